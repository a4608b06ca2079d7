"""The draw of one token from averaged, bounded scores of private records, and its privacy event.

`dpllm.methods.predict` draws the tokens, one at a time, for private prediction (Amin et al., arXiv:2407.12108) and for
InvisibleInk (arXiv:2507.02974).

**Mechanism.** The units are split in secret into groups of s, by a draw that reads no record, so each unit is in one
group at most. One token of a group: every unit i of it gives a score v_i(y) to each token y, a function of its own
records, of public text and of the tokens drawn so far, and |v_i(y)| <= c. The token is drawn with probability
proportional to

    exp((p(y) + (1/s) sum_i v_i(y)) / τ),

where p is public (0, or the logits of the model without a record), and so is the set of tokens that may be drawn. This
is the exponential mechanism: the softmax of a language model at temperature τ.

**Sensitivity.** Zero-out takes v_i away; s is public and stays. Each average then moves by c/s at most, up or down, so
the log-probabilities move within a range of η = 2c/(sτ): log P(y) - log P'(y) = (u(y) - u'(y))/τ - log(Z/Z'), where the
last term is the same for all y. A mechanism whose log-ratios lie within a range of η, whatever the other units and the
tokens drawn before, is (η²/8)-zCDP (bounded range; Cesar and Rogers, arXiv:2004.07223; Dong, Durfee, Rogers,
arXiv:1909.13830). So ρ = (c/(sτ))²/2 for each token: that of Gaussian noise with σ = sτ/c, the event's
``noise_multiplier``. Zero-out is symmetric here. Replace-one moves a score from v_i to v_i', by 2c/s at most: σ/2.

**Composition.** zCDP adds up over adaptively drawn tokens: T tokens of one group cost ρT. A unit is in one group, so
the other groups' tokens cost it nothing (parallel composition). Tokens are charged before the first is drawn, as many
as the texts may have at most. How many a text has follows from private tokens; a charge of that number would be no
bound. From ρ follows δ(ε) by Rényi divergences ρα at every α > 1 (`dpllm.mechanism.renyi`). No Gaussian curve follows:
one draw has a larger δ at some ε than Gaussian noise with this σ (a bounded range is not Gaussian differential
privacy), and a loss distribution of its worst pair gives a larger ε over many tokens than Rényi divergences do, since
its variance is η²/3 and not η²/4.

**Floating point.** The scores are whole numbers of steps of a grid, added up exactly, and the token is drawn exactly
from the weights (`dpllm.methods.predict.sampler`). A score's bound is c (1 - 2^-16): the rest of c is a margin for the
rounding of the weights. A gap remains that training has too: a model's pass over several rows may round a row
differently next to other rows. Where a unit is one record, each pass has public sizes; users have different numbers of
records, so the others' places in a pass may differ. `dpllm.methods.predict.inputs` measures with public tokens that
rows do not depend on each other.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from numpy.typing import NDArray

from dpllm.mechanism import pld, renyi
from dpllm.mechanism.events import EventWords, NeverTruncated, Round

_LOG_ORDERS = (math.log(1e-6), math.log(1e9))
"""Logarithms of the least and the largest α - 1."""


@dataclass(frozen=True, kw_only=True)
class TokenDraw(NeverTruncated):
    """The draw of one token from the averaged scores of a group; σ is sτ/c, for s units, temperature τ and clip c.

    Raises:
        ValueError: a field is out of range.

    >>> from dpllm.privacy.accounting import epsilon
    >>> round(epsilon([(TokenDraw(noise_multiplier=250 * 2 / 10.0), 100)], 1e-6), 3)
    0.9
    """

    kind: ClassVar[str] = "token draw"
    sampling_rate: float = 1.0
    """1: every unit of a group takes part in each of its tokens."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.sampling_rate != 1:
            raise ValueError(
                f"sampling_rate must be 1, got {self.sampling_rate}: each unit of a group takes part in every token"
            )

    def rho(self, adjacency: str = "zero-out") -> float:
        """Return ρ of zero-concentrated differential privacy of one token.

        >>> TokenDraw(noise_multiplier=50.0).rho(), TokenDraw(noise_multiplier=50.0).rho("replace-one")
        (0.0002, 0.0008)
        """
        if self.noise_multiplier == 0:
            return math.inf
        moved = 2 if adjacency == "replace-one" else 1
        return 0.5 * (moved / self.noise_multiplier) ** 2

    @property
    def zcdp_rho(self) -> float:
        """ρ of one token under zero-out."""
        return self.rho()

    @property
    def most_epsilon(self) -> float:
        """The largest ε that follows from Rényi divergences."""
        return renyi.HIGHEST

    @property
    def library_gap(self) -> str | None:
        """dp_accounting has no token draw."""
        return "a token draw; compare by zCDP"

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the tokens: each is a round."""
        return [(dataclasses.replace(self, clip_norm=1.0, num_units=None), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return True: both adjacencies have a bound."""
        return True

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of the adjacency, the loss of all ``count`` tokens; both directions are equal."""
        return [(_dominating(count * self.rho(adjacency), width), 1)] * (1 if adjacency == "replace-one" else 2)

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the width of the grid (`renyi.grid`)."""
        return renyi.grid(width)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms."""
        return dp_event.ZCDpEvent(self.rho())

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        return EventWords(
            sampling="every unit of one group",
            accounted_as="a token drawn by the exponential mechanism from bounded scores, averaged over the public "
            "size of a group: zero-concentrated differential privacy by bounded range (Cesar and Rogers, "
            "arXiv:2004.07223), turned into a dominating distribution of privacy losses. A unit is in one group. Under "
            "replace-one, scores move twice as far",
            options="",
            is_sampled=False,
            renyi="does not apply: ε itself is by zero-concentrated privacy",
        )


@lru_cache(maxsize=32)
def _dominating(rho: float, width: float) -> pld.LossPmf:
    return renyi.dominating(lambda epsilons: _log_delta(rho, epsilons), width)


def _log_delta(rho: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log δ at each ε >= 0, (n,), that follows from ρ (arXiv:2004.00010, proposition 12).

    The bound (α-1)(ρα - ε + log(1 - 1/α)) - log α holds for every α > 1. Its derivative, (2α-1)ρ - ε + log(1 - 1/α),
    rises with α, so the best α is found by bisection.
    """
    low, high = (np.full_like(epsilons, bound) for bound in _LOG_ORDERS)
    for _ in range(50):
        middle = (low + high) / 2
        order = 1 + np.exp(middle)
        rising = (2 * order - 1) * rho - epsilons - np.log1p(1 / (order - 1)) > 0
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
    order = 1 + np.exp(high)
    bound = (order - 1) * (rho * order - epsilons - np.log1p(1 / (order - 1))) - np.log(order)
    return np.minimum(bound, 0.0)

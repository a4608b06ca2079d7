"""Scores of tokens by private records, and the draw of a token from them: both exact, in whole numbers.

Place in the flow: between the model's logits and the text. Scores are clipped, on a grid of whole numbers, and averaged
over the public group size. The bound of a unit's contribution, on which ε rests (`dpllm.methods.predict.token_draw`),
is enforced here and nowhere else. A contribution is a whole number of steps of c 2^-30, so a sum over units is exact: a
unit changes it by its own contribution and by nothing else, in any order of addition.

The draw takes randomness from the operating system. A float is a whole number times a power of two, so the weights have
an exact sum as a whole number, and a uniform whole number below it picks a token with exactly its share: no running sum
of floats, in which rare tokens would lose theirs, and no generator whose state could be guessed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEPS = 2**30
"""Steps of the grid in c."""
MOST = STEPS - 2**14
"""The largest contribution, in steps: c (1 - 2^-16). The rest is the margin for the rounding of weights."""
_LOWEST = -700.0
"""The lowest logarithm of a weight, against 0 for the likeliest token; exp of it is a normal float."""


@dataclass(frozen=True)
class Scoring:
    """The public numbers that turn logits into a distribution.

    With ``around_public`` the clipped quantity is the difference to the model's logits without a record (InvisibleInk,
    arXiv:2507.02974), and the public logits are added back. Otherwise a row's logits are shifted so that the largest is
    c, and clipped from below at -c (arXiv:2407.12108).

    >>> Scoring(clip=10.0, units=250, temperature=2.0).noise_multiplier
    50.0
    """

    clip: float
    """c: the bound of a unit's score of a token."""
    units: int
    """s: the public size of a group; it divides the sum."""
    temperature: float
    """τ."""
    around_public: bool = False
    """Whether differences to the public logits are clipped."""
    top_k: int | None = None
    """Tokens are drawn only from the public model's k likeliest, and those within 2c/s of them. None: from all."""

    @property
    def noise_multiplier(self) -> float:
        """sτ/c: the σ of `dpllm.methods.predict.token_draw.TokenDraw`."""
        return self.units * self.temperature / self.clip

    def contributions(self, logits_RV: Tensor, public_V: Tensor, rows_of_unit_R: Tensor) -> Tensor:
        """Return (R, V) whole numbers of steps: what each row adds to the sum.

        A unit of k rows adds the mean of its rows: each row is clipped, and divided by k towards zero. So a unit adds
        at most `MOST` steps whatever k is. A row adds 0 if a logit is not a number, or the
        largest is infinite.

        Args:
            logits_RV: one row per record.
            public_V: of the model without a record.
            rows_of_unit_R: k of each row's unit, whole numbers of at least 1.
        """
        logits_RV = logits_RV.double()
        if self.around_public:
            apart_RV = logits_RV - public_V.double()
        else:
            apart_RV = logits_RV - logits_RV.amax(dim=1, keepdim=True) + self.clip
        unusable_R = logits_RV.isnan().any(dim=1) | ~logits_RV.amax(dim=1).isfinite()
        apart_RV = apart_RV.masked_fill(unusable_R[:, None] | apart_RV.isnan(), 0.0)
        steps_RV = (apart_RV * (STEPS / self.clip)).round().clamp(-MOST, MOST).long()
        return torch.div(steps_RV, rows_of_unit_R[:, None], rounding_mode="trunc")

    def log_weights(self, sum_V: Tensor, public_V: Tensor) -> Tensor:
        """Return (V,): logarithms of the weights by which the token is drawn, at most 0, in float64; -inf: never drawn.

        Args:
            sum_V: the sum of all rows' contributions, whole numbers of steps.
            public_V: of the model without a record.
        """
        step = self.clip / STEPS
        total_V = sum_V
        if self.around_public:
            # Public, so this cut is free; it keeps the whole numbers below 2^63.
            base_V = (public_V.double() - public_V.double().amax()).nan_to_num(nan=-torch.inf)
            base_V = base_V.clamp(min=_LOWEST * self.temperature - 2 * self.clip)
            total_V = sum_V + self.units * (base_V / step).round().long()
        drawn_V = self._drawn(public_V)
        total_V = total_V - total_V[drawn_V].amax()
        logs_V = (total_V.double() * (step / (self.units * self.temperature))).clamp(min=_LOWEST)
        return logs_V.masked_fill(~drawn_V, -torch.inf)

    def _drawn(self, public_V: Tensor) -> Tensor:
        """Return (V,): whether a token may be drawn; a function of public numbers."""
        usable_V = ~(public_V.isnan() | (public_V == -torch.inf)) if self.around_public or self.top_k else None
        if usable_V is None:
            return torch.ones_like(public_V, dtype=torch.bool)
        if self.top_k is None or self.top_k >= len(public_V):
            return usable_V
        kth = public_V.double().masked_fill(~usable_V, -torch.inf).topk(self.top_k).values[-1]
        return usable_V & (public_V.double() >= kth - 2 * self.clip / self.units)


_HALF = 27
"""Bits of the lower part of a mantissa: sums of either part are exact as floats."""


def draw_index(log_weights: NDArray[np.float64], below: Callable[[int], int] = secrets.randbelow) -> int:
    """Return the number of an entry, drawn with probability proportional to exp of it.

    Args:
        log_weights: (n,), at most 0; -inf is never drawn.
        below: returns a uniform whole number from 0 to one less than its argument.

    Raises:
        ValueError: no entry can be drawn, or one is positive or not a number.

    >>> draw_index(np.array([-np.inf, 0.0, -np.inf]))
    1
    """
    if not (log_weights.size and log_weights.max() > -np.inf and log_weights.max() <= 0):
        raise ValueError(
            f"no token can be drawn: the largest of {log_weights.size} log-weights is "
            f"{log_weights.max(initial=-np.inf)}, and it must be finite and at most 0"
        )
    places = np.flatnonzero(log_weights > -np.inf)
    fractions, exponents = np.frexp(np.exp(log_weights[places]))
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    lowest = int(exponents.min())
    shifts = exponents - lowest
    upper = np.bincount(shifts, weights=mantissas >> _HALF)
    lower = np.bincount(shifts, weights=mantissas & ((1 << _HALF) - 1))
    sums = [(int(high) << _HALF) + int(low) for high, low in zip(upper, lower, strict=True)]
    left = below(sum(mass << shift for shift, mass in enumerate(sums)))
    for shift, mass in enumerate(sums):
        if left < mass << shift:
            members = np.flatnonzero(shifts == shift)
            ends = list(accumulate(mantissas[members].tolist()))
            chosen = next(number for number, end in enumerate(ends) if left >> shift < end)
            return int(places[members[chosen]])
        left -= mass << shift
    raise AssertionError("the number drawn is below the sum of all weights")

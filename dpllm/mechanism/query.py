"""Events of answers to questions about all units: counts, votes or means with Gaussian noise, and several together.

The answer is a vector that every unit may enter, without sampling. Removing one unit changes it by at most Δ
(zero-out). Replacing a unit means removing one and adding another, so it changes the answer by at most 2Δ, and often by
less: a vote by √2 instead of 2.

**Discrete noise.** If the answer consists of whole numbers on a grid, and the noise has the discrete Gaussian
distribution with parameter s (`dpllm.mechanism.discrete_gaussian`), a change by w has a Rényi divergence of at most
α|w|²/(2s²) at every order α > 1, in both directions (Canonne, Kamath, Steinke, arXiv:2004.00010, theorems 4 and 14):
the value of Gaussian noise. ε follows from these divergences (`dpllm.mechanism.renyi`), and is slightly larger than
that of Gaussian noise by privacy loss distributions.

A budget and the first line of a ledger name one event per run, so they store the cost of a whole query run as one
`Several`. The catalogue reads and writes the nested events.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event

from dpllm.mechanism import pld, renyi
from dpllm.mechanism.events import Event, EventWords, NeverTruncated, Round, Step, _grid, _whole
from dpllm.mechanism.limits import MAX_NOISE, MAX_STEPS

ORDERS = (*np.linspace(1.05, 2, 20).tolist(), *np.geomspace(2.05, 5000, 240).tolist())
"""The Rényi orders of discrete noise."""


@dataclass(frozen=True, kw_only=True)
class Query(NeverTruncated):
    """An answer about all units with Gaussian noise, continuous or discrete.

    ``noise_multiplier`` is σ/Δ: the standard deviation of the noise over the largest change of the answer by one unit
    under zero-out, in l2 norm.

    Raises:
        ValueError: a field is out of range.

    >>> Query(noise_multiplier=2.0, replaced=2**0.5).sampling_rate
    1.0
    """

    kind: ClassVar[str] = "query"
    sampling_rate: float = 1.0
    """1: every unit enters."""
    replaced: float | None = 2.0
    """The largest change of the answer by replacing a unit, relative to removing one; at most 2. None: unknown, so
    replace-one is accounted for by group privacy."""
    discrete: bool = False
    """Whether answer and noise are whole multiples of a grid, and the noise has the discrete Gaussian distribution."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.sampling_rate != 1:
            raise ValueError(f"a query covers all units, so its sampling_rate must be 1, got {self.sampling_rate}")
        if not isinstance(self.discrete, bool):
            raise ValueError(f"discrete must be true or false, got {self.discrete!r}")
        if self.replaced is not None:
            object.__setattr__(self, "replaced", float(self.replaced))
            if not 0 < self.replaced <= 2:
                raise ValueError(
                    f"replaced must be above 0 and at most 2, got {self.replaced}: replacing a unit means removing one "
                    "and adding another"
                )

    @property
    def untruncated(self) -> Step | None:
        """The same event as a step over all units; None for discrete noise."""
        return None if self.discrete else Step(sampling_rate=1.0, noise_multiplier=self.noise_multiplier)

    @property
    def zcdp_rho(self) -> float:
        """ρ of zero-concentrated privacy: that of Gaussian noise, discrete or not (arXiv:2004.00010, theorem 4)."""
        return self._gaussian_rho(self.moves)

    @property
    def most_epsilon(self) -> float:
        """The largest ε that follows from Rényi divergences, for discrete noise."""
        return renyi.HIGHEST if self.discrete else math.inf

    @property
    def library_gap(self) -> str | None:
        """dp_accounting has no discrete noise."""
        return "discrete noise; compare by zCDP" if self.discrete else None

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the answers; each is a round."""
        return [(dataclasses.replace(self, clip_norm=1.0, num_units=None), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return whether there is a pair; under replace-one, only if the change is known."""
        return adjacency == "zero-out" or self.replaced is not None

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of the adjacency, the loss that ``count`` answers add, and its multiplicity."""
        if self.discrete:
            directions = 2 if adjacency == "zero-out" else 1
            return [(discrete_losses(self._moved(adjacency) ** 2 * count / 2, width), 1)] * directions
        return _whole(self._noise(adjacency), count, adjacency, width)

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the finest grid, ``width`` or wider, on which the loss of ``count`` answers fits in memory."""
        if self.discrete:
            return renyi.grid(width)
        return _grid(self._noise(adjacency) / math.sqrt(count), 1.0, 1, adjacency, width)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms, for zero-out; for discrete noise, one of equal divergences."""
        return dp_event.GaussianDpEvent(self.noise_multiplier)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        noise, how = "Gaussian noise", ""
        if self.discrete:
            noise = "discrete Gaussian noise (Canonne et al., arXiv:2004.00010)"
            how = "; Rényi divergences, the same as those of Gaussian noise"
        replaced = "Under replace-one, by group privacy: ε is twice a zero-out ε at a smaller δ"
        if self.replaced is not None:
            replaced = f"Replacing a unit changes the answer by at most {self.replaced:.6g} times as much"
        return EventWords(
            sampling="none: every unit enters",
            accounted_as=f"{noise} on an answer about all units, of standard deviation {self.noise_multiplier:.6g} "
            f"times the largest change of the answer by one unit{how}. {replaced}",
            options="--discrete-sensitivity 1.0" if self.discrete else "",
            is_sampled=False,
            renyi="does not apply: ε itself is by Rényi divergences" if self.discrete else EventWords.renyi,
        )

    def _moved(self, adjacency: str) -> float:
        """Return the answer's largest change divided by the noise's standard deviation."""
        replaced = 2.0 if self.replaced is None else self.replaced
        return (1.0 if adjacency == "zero-out" else replaced) / self.noise_multiplier

    def _noise(self, adjacency: str) -> float:
        """Return the σ for which `_whole` has this adjacency's pair; its replace-one pair is 2 apart."""
        return (1.0 if adjacency == "zero-out" else 2.0) / self._moved(adjacency)


@lru_cache(maxsize=64)
def discrete_losses(rho: float, width: float) -> pld.LossPmf:
    """Return the losses of answers whose divergence at each order α is at most αρ, the same in both directions."""
    orders = (*ORDERS, *renyi.fine_orders(width))
    return renyi.dominating(renyi.profile(orders, [order * rho for order in orders]), width)


@dataclass(frozen=True, kw_only=True)
class Several:
    """All answers of a query run together.

    A run that only builds on an earlier release has no answers of its own, and no parts.

    Raises:
        ValueError: a part is not an event with independent steps, or a count is out of range.
    """

    kind: ClassVar[str] = "several"
    parts: tuple[tuple[Event, int], ...]
    """The events, each with its count."""

    def __post_init__(self) -> None:
        """Check the parts."""
        for event, count in self.parts:
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_STEPS:
                raise ValueError(f"an event's count must be from 1 to {MAX_STEPS:,}, got {count!r}")
            if not callable(getattr(event, "rounds", None)):
                raise ValueError(f"a part must be an event, got {event!r}")
            if isinstance(event, Several) or event.restarts:
                raise ValueError(
                    f"an event of the kind {event.kind!r} depends on the course of its run, so it cannot be part of "
                    "several answers. Charge events whose rounds are independent"
                )

    @classmethod
    def of(cls, history: Iterable[tuple[Event, int]]) -> Several:
        """Return the event of a history: equal events are counted together, in the order of their first use."""
        counts: dict[Event, int] = {}
        for event, count in history:
            counts[event] = counts.get(event, 0) + count
        return cls(parts=tuple(counts.items()))

    @property
    def noise_multiplier(self) -> float:
        """The smallest σ of the parts; without parts, the largest possible σ."""
        return min((event.noise_multiplier for event, _ in self.parts), default=MAX_NOISE)

    @property
    def clip_norm(self) -> float:
        """1: ε does not depend on it."""
        return 1.0

    @property
    def moves(self) -> int:
        """The largest change by one unit, in clip norms."""
        return max((event.moves for event, _ in self.parts), default=1)

    @property
    def restarts(self) -> bool:
        """The parts do not restart."""
        return False

    @property
    def answers(self) -> tuple[tuple[Event, int], ...]:
        """The parts."""
        return self.parts

    @property
    def is_selection(self) -> bool:
        """Each answer has its own ε."""
        return False

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the rounds of all parts."""
        return [pair for event, count in self.parts for pair in event.rounds(count * num_steps)]

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        listed = "; ".join(f"{count:,} times {event.words().accounted_as}" for event, count in self.parts)
        listed = listed or "no answer of its own"
        return EventWords(sampling="as each answer states", accounted_as=listed, options="", is_sampled=False)

"""The event of counts of answers that nobody listed beforehand: noise, and a threshold that hides rare ones.

Place in the flow: beside `query`; `dpllm.methods.aggregate.combined` counts the answers of groups with it. The answers
that occur are themselves private, so noise on their counts is not enough: an answer that only one group gives would
show that group's records by being there. So an answer is released only if its noisy count reaches a threshold.

**Mechanism.** Each group gives one answer at most. Each answer that occurs has a count of 1 or more, which gets
discrete Gaussian noise of standard deviation s. Answers whose noisy count is at least 1 + z s are released, with this
count. z is the event's ``margin``.

**One unit** is in one group. Without it, or with another one in its place, this group may give any other answer, or
none: its vote goes from an answer a to an answer b. ε is the same under both adjacencies.

**Proof.** Let D and D' be the neighbours, a the answer of the group in D, and b its answer in D'. K are the answers
that occur in both. An answer outside K is a in D, or b in D', and has the count 1 there.

* On K the counts differ by at most √2 in l2 norm. This is `Query` with σ = s/√2 and discrete noise.
* a is released in D with the probability β = P[1 + noise >= 1 + z s] or less, by noise of its own. For discrete
  Gaussian noise this is at most P[N(0, 1) >= z], if the threshold has room for one step of the grid (Canonne, Kamath,
  Steinke, arXiv:2004.00010, proposition 25); `SLACK` is that room. In D' it is never released: the loss is infinite
  with probability β. Otherwise it is log(1 - β), below 0.
* b is never released in D, and is not released in D' with probability 1 - β or more: the loss is -log(1 - β) or less.

The three parts are independent, so the losses add up. In every case the loss is at most that of √2 on K, plus one that
is infinite with probability β and -log(1 - β) otherwise. This sum is the loss of a pair of distributions, so it
composes with other answers. Both directions are alike. β is part of δ: it stays in the mass of infinite losses.

Source: stability-based histograms with Gaussian noise, as in Lebeda and Retschmeier, arXiv:2412.10357; the proof above
is for one group with one vote.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import stats

from dpllm.mechanism import pld
from dpllm.mechanism.events import EventWords
from dpllm.mechanism.query import Query

SLACK = 1 + 2.0**-10
"""The factor by which the released threshold exceeds z, for steps of the grid and the rounding of s."""


@dataclass(frozen=True, kw_only=True)
class ThresholdedCounts(Query):
    """Counts of answers from an open domain, with discrete Gaussian noise and a threshold; σ is s/√2.

    Raises:
        ValueError: a field is out of range.

    >>> ThresholdedCounts(noise_multiplier=10.0, margin=5.0).hidden_mass < 3e-7
    True
    """

    kind: ClassVar[str] = "thresholded counts"
    replaced: float | None = 1.0
    """1: one vote goes elsewhere, under both adjacencies."""
    discrete: bool = True
    """The noise is on whole numbers."""
    margin: float
    """z: the threshold above one vote, in standard deviations of the noise."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.replaced != 1 or not self.discrete:
            raise ValueError(
                "thresholded counts have discrete noise, and replaced is 1: a unit moves one vote under both "
                "adjacencies. Leave both out"
            )
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not 0 < self.margin < math.inf:
            raise ValueError(f"margin must be above 0 and finite, got {self.margin!r}: it hides answers of one group")
        object.__setattr__(self, "margin", float(self.margin))

    @property
    def zcdp_rho(self) -> float:
        """Inf: an answer of one group is released with a probability above 0."""
        return math.inf

    @property
    def hidden_mass(self) -> float:
        """β: the largest probability with which an answer of one group is released; part of δ."""
        return float(stats.norm.sf(self.margin))

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of the adjacency, the loss that ``count`` answers add, and its multiplicity."""
        beta = self.hidden_mass
        return [(_with_failure(pmf, count, beta), times) for pmf, times in super().parts(count, adjacency, width)]

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        plain = super().words()
        return dataclasses.replace(
            plain,
            accounted_as=f"{plain.accounted_as}; an answer that only one group gives is released with a probability of "
            f"at most {self.hidden_mass:.2g}, which is part of δ",
        )


def _with_failure(pmf: pld.LossPmf, count: int, beta: float) -> pld.LossPmf:
    """Return losses plus ``count`` more, each infinite with probability β and -log(1 - β) otherwise.

    A constant loss l below a grid step w is the loss w with probability (1 - exp(-l))/(1 - exp(-w)), and 0 otherwise:
    its δ is exact on the grid, and larger in between.
    """
    survives = count * math.log1p(-beta)
    steps = math.floor(-survives / pmf.width)
    rest = -survives - steps * pmf.width
    share = min(1.0, math.expm1(-rest) / math.expm1(-pmf.width))
    masses = np.convolve(pmf.masses, [1 - share, share]) * math.exp(survives)
    infinite = -math.expm1(survives) + math.exp(survives) * pmf.infinite
    return pld.LossPmf(pmf.width, pmf.lowest + steps, masses, infinite)

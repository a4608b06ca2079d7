"""The answers of disjoint groups, combined into one private answer: a mean, counts of listed answers, or of open ones.

The bound of one group's influence, on which ε rests, is enforced here and nowhere else. All noise is discrete Gaussian,
on whole numbers.

**Sample and aggregate** (Nissim, Raskhodnikova, Smith, STOC 2007; with language models Wu et al., arXiv:2305.01639).
The units are in m disjoint groups. Each group's answer is any function of its own records, so nothing needs to be known
about the model. A unit is in at most one group. If it is removed or replaced, the answer of this group may change
arbitrarily, and the other answers and the public m stay. So zero-out and replace-one both change one answer and have
the same ε.

**Numbers** (`Mean`). Each answer is clipped to a public range, and scaled to -K ... K, whole numbers. A group adds
(x, W), or (0, 0) if it gave no number. Two answers are at most 2K apart if both are numbers, and
√(K² + W²) <= 2K if one is none, since W² <= 3K². So Δ = 2K, the same as without the second entry: the number of groups
that answered costs nothing. Divided by m, the first sum is a mean of Δ = (high - low)/m. The released number is the
ratio of both noisy sums, which is post-processing.

**Listed answers** (`Votes`). A group votes for one answer: one vote moves from one answer to another, Δ = √2, as in
GNMax. The noise of all counts is charged, so all are released, not only the largest.

**Open answers** (`OpenVotes`, `ThresholdedCounts`). The answers that occur are themselves private, so noise on their
counts is not enough: an answer that only one group gives would show that group's records by being there. So an answer
is released only if its noisy count reaches a threshold.

*Mechanism.* Each group gives one answer at most. Each answer that occurs has a count of 1 or more, which gets
discrete Gaussian noise of standard deviation s. Answers whose noisy count is at least 1 + z s are released, with this
count. z is the event's ``margin``.

*One unit* is in one group. If it is removed or replaced, this group may give any other answer, or none: its vote moves
from an answer a to an answer b. ε is the same under both adjacencies.

*Proof.* Let D and D' be the neighbours, a the answer of the group in D, and b its answer in D'. K are the answers
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
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from scipy import stats

from dpllm.mechanism import pld
from dpllm.mechanism.events import Event, EventWords
from dpllm.mechanism.query import Query
from dpllm.methods.sections import Question

SLACK = 1 + 2.0**-10
"""The factor by which the threshold exceeds z, for steps of the grid and the rounding of s."""


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
    """1: one vote moves, under both adjacencies."""
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
        """Infinite: an answer of one group is released with a probability above 0."""
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


Noisy = Callable[[Sequence[int], float], list[float]]
"""Adds noise of standard deviation σΔ to whole numbers, given Δ."""
STEPS = 2**16
"""K: steps of the scale of numbers from the middle of the range to its ends."""
ANSWERED = math.isqrt(3 * STEPS * STEPS)
"""W: what a group that gave a number adds to the second sum."""
VOTE_CHANGE = math.sqrt(2)
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_SURE = 3.0
"""A mean is released if the noisy number of groups that answered is this many standard deviations above 0."""


class Combined(Protocol):
    """Combines the answers of the groups into one private answer."""

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost, for σ: the standard deviation of the noise over the largest change by one unit."""
        ...

    def settings(self, noise_multiplier: float, groups: int) -> list[tuple[str, str | int | float]]:
        """Return public numbers for the plan.

        Raises:
            ValueError: no answer can be released with this noise.
        """
        ...

    def released(self, answers: Sequence[Any], noise_multiplier: float, noisy: Noisy) -> dict[str, Any]:
        """Combine one answer of each group, which are private, into the released answer."""
        ...


@dataclass(frozen=True)
class Mean:
    """The mean of numbers from ``low`` to ``high``; a group's answer is a text with or without a number.

    >>> Mean(1, 5).contribution("about 4 of 5") == (STEPS // 2, ANSWERED), Mean(1, 5).contribution("none")
    (True, (0, 0))
    """

    low: float
    high: float

    @property
    def change(self) -> int:
        """Δ of the two sums, in l2 norm."""
        return 2 * STEPS

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost."""
        return Query(noise_multiplier=noise_multiplier, replaced=1.0, discrete=True)

    def settings(self, noise_multiplier: float, groups: int) -> list[tuple[str, str | int | float]]:
        """Return the range, and the noise if every group gives a number."""
        return [
            ("range", f"{self.low:g} to {self.high:g}"),
            ("largest change of the mean by one unit", (self.high - self.low) / groups),
            (
                "noise of the mean if every group gives a number, standard deviation",
                noise_multiplier * (self.high - self.low) / groups,
            ),
        ]

    def contribution(self, text: str) -> tuple[int, int]:
        """Return a group's contribution to both sums: the first number of its answer, clipped; (0, 0) without one."""
        found = _NUMBER.search(text)
        if found is None:
            return 0, 0
        value = min(max(float(found[0].replace(",", "")), self.low), self.high)
        share = (value - self.low) / (self.high - self.low)  # 0 to 1: division keeps the order
        return round((2 * share - 1) * STEPS), ANSWERED

    def released(self, answers: Sequence[str], noise_multiplier: float, noisy: Noisy) -> dict[str, Any]:
        """Return the noisy mean over the groups that gave a number, and their noisy number."""
        parts = [self.contribution(text) for text in answers]
        total, answered = noisy([sum(part[0] for part in parts), sum(part[1] for part in parts)], self.change)
        num_groups = answered / ANSWERED
        if answered <= _SURE * noise_multiplier * self.change:  # too few, or too much noise to divide by
            return {"mean": None, "standard deviation of the noise": None, "groups with a number": _short(num_groups)}
        share = min(max((total / STEPS / num_groups + 1) / 2, 0.0), 1.0)
        return {
            "mean": float(f"{self.low + share * (self.high - self.low):.6g}"),
            "standard deviation of the noise": float(f"{noise_multiplier * (self.high - self.low) / num_groups:.3g}"),
            "groups with a number": _short(num_groups),
        }


@dataclass(frozen=True)
class Votes:
    """Counts of listed answers; a group's answer is the number of one of them."""

    answers: tuple[str, ...]

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost."""
        return Query(noise_multiplier=noise_multiplier, replaced=1.0, discrete=True)

    def settings(self, noise_multiplier: float, groups: int) -> list[tuple[str, str | int | float]]:
        """Return the answers, and the noise of a count."""
        return [
            ("answers", ", ".join(self.answers)),
            ("noise of a count, standard deviation", noise_multiplier * VOTE_CHANGE),
        ]

    def released(self, answers: Sequence[int], noise_multiplier: float, noisy: Noisy) -> dict[str, Any]:
        """Return the noisy count of each listed answer, and the answer with the largest.

        Raises:
            ValueError: a group did not vote for a listed answer.
        """
        if any(isinstance(one, bool) or not isinstance(one, int) for one in answers) or not all(
            0 <= one < len(self.answers) for one in answers
        ):
            raise ValueError(f"a group votes with the number of one of {len(self.answers)} answers")
        counts = noisy([list(answers).count(number) for number in range(len(self.answers))], VOTE_CHANGE)
        return {
            "answer": self.answers[counts.index(max(counts))],
            "groups": dict(zip(self.answers, map(_short, counts), strict=True)),
            "standard deviation of the noise": _short(noise_multiplier * VOTE_CHANGE),
        }


@dataclass(frozen=True)
class OpenVotes:
    r"""Counts of answers from an open domain, of those that many groups give; a group's answer is a text.

    >>> OpenVotes(5.0, 3).word("  Thai food. It is hot.\n"), OpenVotes(5.0, 3).word(" ... ")
    ('thai food', None)
    """

    margin: float
    """z of `ThresholdedCounts`."""
    max_words: int
    """The number of words of an answer that count."""

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost, with the part of δ for the threshold."""
        return ThresholdedCounts(noise_multiplier=noise_multiplier, margin=self.margin)

    def threshold(self, noise_multiplier: float) -> float:
        """Return the noisy count from which an answer is released."""
        return 1 + self.margin * SLACK * noise_multiplier * VOTE_CHANGE

    def settings(self, noise_multiplier: float, groups: int) -> list[tuple[str, str | int | float]]:
        """Return noise and threshold.

        Raises:
            ValueError: the threshold is above the number of groups.
        """
        least = self.threshold(noise_multiplier)
        if least > groups:
            raise ValueError(
                f"an open answer is released if {least:.0f} groups give it, and there are {groups:,}: take more "
                "groups, a larger privacy.epsilon, or fewer questions"
            )
        return [
            ("noise of a count, standard deviation", noise_multiplier * VOTE_CHANGE),
            ("threshold, groups", least),
        ]

    def word(self, text: str) -> str | None:
        """Normalise a group's answer: its first clause, in lower case; None if it is empty."""
        plain = unicodedata.normalize("NFKC", text).casefold().strip()
        clause = re.split(r"[\n.,;:!?]", plain, maxsplit=1)[0]
        words = [word for word in (word.strip("\"'()[]{}*_-`<>") for word in clause.split()) if word]
        return " ".join(words[: self.max_words]) or None

    def released(self, answers: Sequence[str], noise_multiplier: float, noisy: Noisy) -> dict[str, Any]:
        """Return the answers whose noisy count reaches the threshold, with these counts, the largest first."""
        counts = Counter(word for word in map(self.word, answers) if word is not None)
        least = self.threshold(noise_multiplier)
        pairs = list(zip(counts, noisy(list(counts.values()), VOTE_CHANGE), strict=True))
        kept = sorted((pair for pair in pairs if pair[1] >= least), key=lambda pair: (-pair[1], pair[0]))
        return {
            "groups": {word: _short(count) for word, count in kept},
            "threshold": _short(least),
            "standard deviation of the noise": _short(noise_multiplier * VOTE_CHANGE),
        }


def _short(count: float) -> float:
    """Round a noisy number of groups for display."""
    return round(count, 2)


def combined(question: Question, margin: float, max_words: int) -> Combined:
    """Return the combination of the answers to a question, with z and the number of words of open ones."""
    if question.kind == "number":
        assert question.low is not None and question.high is not None  # the section has checked it
        return Mean(question.low, question.high)
    if question.kind == "choice":
        assert question.answers is not None
        return Votes(question.answers)
    return OpenVotes(margin, max_words)

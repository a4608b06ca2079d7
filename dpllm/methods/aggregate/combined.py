"""The answers of disjoint groups, combined into one private answer: a mean, counts of listed answers, or of open ones.

Place in the flow: after the groups have answered (`dpllm.methods.predict.asking`). The bound of one group's influence,
on which ε rests, is enforced here and nowhere else.

**Sample and aggregate** (Nissim, Raskhodnikova, Smith, STOC 2007; with language models Wu et al., arXiv:2305.01639).
The units are in m disjoint groups. Each group's answer is any function of its own records, so nothing needs to be known
about the model. A unit is in one group, or in none. Without it, or with another one in its place, the answer of this
group may become any other, and the other answers stay. m is public and stays. So zero-out and replace-one change the
same: one answer, and both have the same ε.

**Numbers** (`Mean`). Each answer is clipped to a public range, and scaled to -K ... K, whole numbers. A group adds
(x, W), or (0, 0) if it gave no number. Two answers are at most 2K apart if both are numbers, and
√(K² + W²) <= 2K if one is none, since W² <= 3K². So Δ = 2K, the same as without the second entry: the number of groups
that answered costs nothing. Divided by m, the first sum is a mean of Δ = (high - low)/m. The released number is the
ratio of both noisy sums, which is post-processing.

**Listed answers** (`Votes`). A group votes for one answer: a vote goes from one to another, Δ = √2, as in GNMax. The
noise of all counts is paid for, so all are released, not only the largest.

**Open answers** (`OpenVotes`). Answers that nobody listed, counted with a threshold:
`dpllm.methods.aggregate.thresholded`.

All noise is discrete Gaussian, on whole numbers.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query
from dpllm.methods.aggregate.section import Question
from dpllm.methods.aggregate.thresholded import SLACK, ThresholdedCounts

Noisy = Callable[[Sequence[int], float], list[float]]
"""From whole numbers and Δ to the same with noise of standard deviation σΔ."""
STEPS = 2**16
"""K: steps of the scale of numbers from the middle of the range to its ends."""
ANSWERED = math.isqrt(3 * STEPS * STEPS)
"""W: what a group that gave a number adds to the second sum."""
VOTE_CHANGE = math.sqrt(2)
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_SURE = 3.0
"""A mean is given if the noisy number of groups that answered is this many standard deviations above 0."""


class Combined(Protocol):
    """How the answers of the groups become one private answer."""

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
        """Return the private answer, from one answer of each group, which are private."""
        ...


@dataclass(frozen=True)
class Mean:
    """The mean of numbers from ``low`` to ``high``; a group's answer is a text with a number, or without one.

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
        """Return what a group adds to the two sums: the first number of its answer, clipped; (0, 0) without one."""
        found = _NUMBER.search(text)
        if found is None:
            return 0, 0
        value = min(max(float(found[0].replace(",", "")), self.low), self.high)
        share = (value - self.low) / (self.high - self.low)  # 0 to 1: division keeps the order
        return round((2 * share - 1) * STEPS), ANSWERED

    def released(self, answers: Sequence[str], noise_multiplier: float, noisy: Noisy) -> dict[str, Any]:
        """Return the mean of the groups that gave a number, and about how many these were."""
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
            ValueError: a group voted for no listed answer.
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
    """Words of an answer that count."""

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost, with the part of δ for the threshold."""
        return ThresholdedCounts(noise_multiplier=noise_multiplier, margin=self.margin)

    def threshold(self, noise_multiplier: float) -> float:
        """Return the noisy count from which an answer is released."""
        return 1 + self.margin * SLACK * noise_multiplier * VOTE_CHANGE

    def settings(self, noise_multiplier: float, groups: int) -> list[tuple[str, str | int | float]]:
        """Return noise and threshold.

        Raises:
            ValueError: more groups are needed than there are.
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
        """Return a group's answer in a common form: its first clause, in lower case; None if there is none."""
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
    """Return a noisy number of groups with the digits that people read."""
    return round(count, 2)


def combined(question: Question, margin: float, max_words: int) -> Combined:
    """Return how the answers to a question are combined.

    Args:
        question: of the recipe.
        margin: z of open questions.
        max_words: words of an open answer.
    """
    if question.kind == "number":
        assert question.low is not None and question.high is not None  # the section has checked it
        return Mean(question.low, question.high)
    if question.kind == "choice":
        assert question.answers is not None
        return Votes(question.answers)
    return OpenVotes(margin, max_words)

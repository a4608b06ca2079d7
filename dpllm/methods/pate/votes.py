"""The vote of the teachers: counts of classes or tokens, noise, and the winner (GNMax, confident GNMax).

Place in the flow: after the teachers were trained. Papernot et al., Scalable Private Learning with PATE (ICLR 2018,
arXiv:1802.08908).

**One label.** Each teacher names one class of a text. The counts of the classes get N(0, σ²) each, independently, and
the class with the largest noisy count is released, and nothing else.

**One unit.** It is a unit of one teacher (`dpllm.methods.pate.partition`), and the other teachers neither see it nor
depend on it: division, starting weights and random numbers of a training do not. Without the unit, or with another one
in its place, that teacher is another function of its data and may name any class. At most one vote goes from one class
to another: two counts change by 1, √2 in l2 norm. So removing a unit and replacing one move the counts by the same
bound, and ε under both adjacencies is the same. With `Query(noise_multiplier=σ/√2, replaced=1)` each label is a
Gaussian answer, and the composition over texts is exact.

**With a check** (confident GNMax). The largest count gets N(0, σ₁²), and the text gets a label only if the sum is at
least T. The largest count changes by at most 1. Which texts pass is released, so every check is charged. How many pass
depends on the private records; so the most labels M are fixed beforehand, no text is checked for a label after M
labels, and all M are charged. The order of checks and labels then follows from earlier releases, while their total
is bounded: Gaussian answers compose exactly for every such course (Smith and Thakurta, Fully adaptive composition for
Gaussian differential privacy, arXiv:2210.17520), since the sum of (Δ/σ)² over all answers is never above that of n
checks and M labels.

**Tokens** (`dpllm.methods.pate.tokens`). A vote on the next token of a text is a vote on its class: the candidates are
the public model's, so no record changes them. Each vote follows from earlier releases, as a check does, and the same
composition holds. The most tokens are fixed beforehand, and all are charged.

**Left out.** If most teachers agree, the true loss of a label is far smaller. But an ε computed from the counts depends
on private records and would have to be smoothed and released with noise itself. No such ε is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.data.units import Int64Array
from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query

VOTE_CHANGE = math.sqrt(2)
"""The largest change of the counts of one text by one unit, in l2 norm: a vote goes from one class to another."""
CHECK_CHANGE = 1.0
"""The largest change of the largest count by one unit."""
LABELS, CHECKS = "labels of public texts", "checks whether the teachers agree"
TOKENS = "tokens of public texts"
"""Names of the charges: a vote has labels or tokens."""
NO_LABEL = -1


class Ballots:
    """The votes of all teachers for all texts, as counts.

    Guarantee: a teacher adds 1 to one count of each text, whatever its model computes.

    Args:
        num_prompts: number of texts.
        num_classes: number of public classes.
    """

    def __init__(self, num_prompts: int, num_classes: int) -> None:
        """Begin without a vote."""
        self.counts_NC: Int64Array = np.zeros((num_prompts, num_classes), dtype=np.int64)
        self.num_voters = 0

    def add(self, classes_N: NDArray[Any]) -> None:
        """Add the votes of one teacher.

        Args:
            classes_N: (num_prompts,) the class of each text, a whole number.

        Raises:
            ValueError: they are no whole numbers (a score or a probability is no vote: its influence has no bound), or
                there are too many or too few of them, or one is no class.
        """
        num_prompts, num_classes = self.counts_NC.shape
        if classes_N.dtype.kind != "i" or classes_N.shape != (num_prompts,):
            raise ValueError(
                f"a teacher votes with one class number for each of {num_prompts} texts, got {classes_N.dtype} of "
                f"shape {classes_N.shape}: take the class with the highest score"
            )
        if num_prompts and not 0 <= classes_N.min() <= classes_N.max() < num_classes:
            raise ValueError(f"a vote is for a class from 0 to {num_classes - 1}")
        self.counts_NC[np.arange(num_prompts), classes_N] += 1
        self.num_voters += 1


@dataclass(frozen=True)
class Vote:
    """The public numbers of the vote.

    Attributes:
        num_prompts: texts that are voted on; places of tokens at most.
        threshold: T of the check. None: every text gets a label.
        max_answers: M, the most labels. None: `num_prompts`.
        check_noise: σ₁/σ.
        answers: name of the charge, `LABELS` or `TOKENS`.
    """

    num_prompts: int
    threshold: float | None = None
    max_answers: int | None = None
    check_noise: float = 3.0
    answers: str = LABELS

    @property
    def most_labels(self) -> int:
        """The number of labels that is charged."""
        return self.num_prompts if self.max_answers is None else min(self.max_answers, self.num_prompts)

    def stddevs(self, noise_multiplier: float) -> tuple[float, float]:
        """Return the standard deviations σ of each count and σ₁ of the check, in votes.

        Args:
            noise_multiplier: σ/√2, that of a label's event.
        """
        stddev = noise_multiplier * VOTE_CHANGE
        return stddev, stddev * self.check_noise

    def charges(self, noise_multiplier: float) -> Sequence[tuple[str, Event, int]]:
        """Return the charges of the run: name, event, and the most that it is charged.

        Args:
            noise_multiplier: σ/√2, that of a label's event.

        >>> [(name, count) for name, _, count in Vote(200, threshold=30, max_answers=50).charges(10.0)]
        [('labels of public texts', 50), ('checks whether the teachers agree', 200)]
        """
        labels = (self.answers, Query(noise_multiplier=noise_multiplier, replaced=1.0), self.most_labels)
        if self.threshold is None:
            return [labels]
        _, check_stddev = self.stddevs(noise_multiplier)
        check = Query(noise_multiplier=check_stddev / CHECK_CHANGE, replaced=1.0)
        return [labels, (CHECKS, check, self.num_prompts)]

    def winners(self, counts_NC: Int64Array, noise_NC: NDArray[np.float64], noise_N: NDArray[np.float64]) -> Int64Array:
        """Return (N,) the label of each text, `NO_LABEL` where it has none.

        Args:
            counts_NC: votes for each class.
            noise_NC: noise of the counts, of standard deviation σ.
            noise_N: noise of the checks, of standard deviation σ₁; not read without a threshold.

        Raises:
            ValueError: the noise has another shape.

        >>> Vote(2).winners(np.array([[3, 2], [0, 5]]), np.array([[0.0, 1.5], [0.0, 0.0]]), np.zeros(2)).tolist()
        [1, 1]
        """
        if noise_NC.shape != counts_NC.shape or noise_N.shape != counts_NC.shape[:1]:
            raise ValueError(
                f"noise of shape {noise_NC.shape} for counts of shape {counts_NC.shape}: draw one for each"
            )
        labels_N = np.argmax(counts_NC + noise_NC, axis=1).astype(np.int64)
        passed_N = np.ones(len(labels_N), dtype=bool)
        if self.threshold is not None:
            passed_N = counts_NC.max(axis=1) + noise_N >= self.threshold
        within_N = np.cumsum(passed_N) <= self.most_labels  # no label after the last one that is charged
        return np.where(passed_N & within_N, labels_N, NO_LABEL)

"""The vote of the teachers: the division of units, counts of classes or tokens, noise, and the winner (GNMax).

Papernot et al., Scalable Private Learning with PATE (ICLR 2018, arXiv:1802.08908). The run passes models as teachers;
the audit passes functions that know what they vote.

**One label.** Each teacher names one class of a text. The counts of the classes get N(0, σ²) each, independently, and
the class with the largest noisy count is released, and nothing else.

**One unit.** It is a unit of one teacher (`Partition`), and the other teachers neither see it nor depend on it:
division, starting weights and random numbers of a training do not. Without the unit, or with a different one in its
place, that teacher is a different function of its data and may name any class. At most one vote goes from one class
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

**Tokens** (`written_tokens`). A vote on the next token of a text is a vote on its class. With the same text so far and
the same candidates, the other teachers vote as before, and the teacher of the unit may name any candidate. The text so
far is a release, and the candidates are the public model's, so no record changes them. Each vote follows from earlier
releases, as a check does, and the same composition holds. The most tokens are fixed beforehand, and all are charged.

**Left out.** If most teachers agree, the true loss of a label is far smaller. But an ε computed from the counts depends
on private records and would have to be smoothed and released with noise itself. No such ε is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpllm.data.units import Int64Array, UnitIndex
from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query
from dpllm.methods.queries.run import QueryRun


class Partition:
    """The division of the units among the teachers.

    Guarantee: it is uniformly random among all divisions in which the teachers' numbers of units differ by at most one,
    and depends on the public number N of units only, not on records. A neighbouring data set, in which a unit is
    removed or replaced, is divided in the same way.

    Raises:
        ValueError: there are more teachers than units.

    >>> Partition(5, 2, np.random.default_rng(0)).sizes.tolist()
    [3, 2]
    """

    def __init__(self, num_units: int, num_teachers: int, rng: np.random.Generator) -> None:
        """Draw the division."""
        if not 1 <= num_teachers <= num_units:
            raise ValueError(
                f"pate.teachers={num_teachers} for {num_units} units: a teacher needs at least one unit. Take fewer "
                "teachers"
            )
        self.num_teachers = num_teachers
        self.teacher_of = np.empty(num_units, dtype=np.int64)
        self.teacher_of[rng.permutation(num_units)] = np.arange(num_units) % num_teachers
        self.teacher_of.setflags(write=False)

    @property
    def sizes(self) -> Int64Array:
        """The number of units of each teacher, (k,), which is public."""
        return np.bincount(self.teacher_of, minlength=self.num_teachers)

    def rows_of(self, teacher: int, units: UnitIndex) -> Int64Array:
        """Return the row numbers of a teacher's units, in the order of the data.

        Raises:
            ValueError: the index has a different number of units.
        """
        if units.num_units != len(self.teacher_of):
            raise ValueError(f"{len(self.teacher_of)} units were divided, and the rows have {units.num_units}")
        rows, _ = units.rows_of(np.flatnonzero(self.teacher_of == teacher))
        return np.sort(np.asarray(rows, dtype=np.int64))


VOTE_CHANGE = math.sqrt(2)
"""The largest change of the counts of one text by one unit, in l2 norm: a vote goes from one class to another."""
CHECK_CHANGE = 1.0
"""The largest change of the largest count by one unit."""
LABELS, CHECKS = "labels of public texts", "checks whether the teachers agree"
TOKENS = "tokens of public texts"
"""Names of the charges: a vote has labels or tokens."""
NO_LABEL = -1


class Ballots:
    """The votes of all teachers on all texts, as counts.

    Guarantee: a teacher adds 1 to exactly one count of each text, whatever its model computes.
    """

    def __init__(self, num_prompts: int, num_classes: int) -> None:
        """Start without votes."""
        self.counts_NC: Int64Array = np.zeros((num_prompts, num_classes), dtype=np.int64)
        self.num_voters = 0

    def add(self, classes_N: NDArray[Any]) -> None:
        """Add the votes of one teacher.

        Args:
            classes_N: (num_prompts,) the class of each text, a whole number.

        Raises:
            ValueError: they are not whole numbers (the influence of a score or a probability has no bound), their
            number
                is wrong, or one is not a class.
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
    """The public parameters of the vote.

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
        """The number of labels charged."""
        return self.num_prompts if self.max_answers is None else min(self.max_answers, self.num_prompts)

    def stddevs(self, noise_multiplier: float) -> tuple[float, float]:
        """Return the standard deviations σ of each count and σ₁ of the check, in votes.

        Args:
            noise_multiplier: σ/√2, that of a label's event.
        """
        stddev = noise_multiplier * VOTE_CHANGE
        return stddev, stddev * self.check_noise

    def charges(self, noise_multiplier: float) -> Sequence[tuple[str, Event, int]]:
        """Return the charges of the run: name, event and largest count.

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
        within_N = np.cumsum(passed_N) <= self.most_labels  # no label after the last charged one
        return np.where(passed_N & within_N, labels_N, NO_LABEL)


def ballots_of(
    partition: Partition, units: UnitIndex, ballots: Ballots, vote_of: Callable[[int, Int64Array], Int64Array]
) -> Ballots:
    """Let every teacher vote with the rows of its units, and return the counts, which are private.

    Args:
        partition: the teacher of each unit.
        units: the rows of each unit.
        ballots: without votes.
        vote_of: maps a teacher's number and the numbers of its rows to its class for each text, (N,).
    """
    for teacher in range(partition.num_teachers):
        ballots.add(vote_of(teacher, partition.rows_of(teacher, units)))
    return ballots


def released_labels(vote: Vote, num_teachers: int, run: QueryRun, ballots: Ballots) -> Int64Array:
    """Charge the vote, add its noise, and return the label of each public text, (N,); `NO_LABEL` for none.

    Raises:
        ValueError: not all teachers have voted, or the charge is not planned.
    """
    _require_all(ballots, num_teachers)
    _charge(vote, run)
    return _noisy_winners(vote, run, ballots)


class TokenVotes:
    """Votes on tokens, place by place for several texts; all possible votes are charged at the start.

    Guarantee: no more votes are released than are charged. The number of places of a text follows from released tokens,
    so it depends on private records; the charge does not.

    Args:
        vote: the public numbers of the vote.
        num_teachers: k.
        run: its plan has the charges of the vote.
        public_votes: added to the count of candidate 0, the public model's own token. They depend on no record, and the
            check of a threshold ignores them.

    Attributes:
        left: number of tokens by vote that may still be released.
    """

    def __init__(self, vote: Vote, num_teachers: int, run: QueryRun, public_votes: float = 0.0) -> None:
        """Charge all tokens, and all checks."""
        self._vote, self._num_teachers, self._run, self._public_votes = vote, num_teachers, run, public_votes
        _charge(vote, run)
        self.left, self._places = vote.most_labels, vote.num_prompts

    def winners(self, ballots: Ballots) -> Int64Array:
        """Return the winning candidate at the next place of each text, (R,); `NO_LABEL` where the check failed.

        Args:
            ballots: of these places, with the votes of all teachers.

        Raises:
            ValueError: not all teachers have voted, or there are more places than are charged.
        """
        _require_all(ballots, self._num_teachers)
        places = len(ballots.counts_NC)
        if places > min(self.left, self._places):
            raise ValueError(
                f"{places} tokens were voted on, and {min(self.left, self._places)} that are charged are left: end the "
                "texts here"
            )
        winners_R = _noisy_winners(self._vote, self._run, ballots, self._public_votes)
        self._places -= places
        self.left -= int((winners_R != NO_LABEL).sum())
        return winners_R


def _require_all(ballots: Ballots, num_teachers: int) -> None:
    if ballots.num_voters != num_teachers:
        raise ValueError(f"{ballots.num_voters} of {num_teachers} teachers have voted")


def _charge(vote: Vote, run: QueryRun) -> None:
    """Charge the most labels or tokens that may be released, and every check."""
    run.charge(vote.answers, vote.most_labels)
    if vote.threshold is not None:
        run.charge(CHECKS, vote.num_prompts)


def _noisy_winners(vote: Vote, run: QueryRun, ballots: Ballots, public_votes: float = 0.0) -> Int64Array:
    """Return the winner of each vote, (N,), with noise of the charged size."""
    stddev, check_stddev = vote.stddevs(run.plan.charge(vote.answers).event.noise_multiplier)
    noise_NC = run.randomness.gaussian(ballots.counts_NC.shape, stddev)
    noise_N = run.randomness.gaussian((len(noise_NC),), check_stddev)
    noise_NC[:, 0] += public_votes
    return vote.winners(ballots.counts_NC, noise_NC, noise_N)


class Writers(Protocol):
    """The public model and the teachers, which continue R texts together."""

    @property
    def num_texts(self) -> int:
        """Return R."""
        ...

    @property
    def num_teachers(self) -> int:
        """Return k."""
        ...

    def candidates(self) -> Int64Array:
        """Return the candidates of the next token, (R, C); the first is the public model's own choice.

        They depend on released tokens, the public model and random numbers only. Called once for each place.
        """
        ...

    def vote(self, teacher: int) -> Int64Array:
        """Return the number of the candidate that a teacher chooses for each text, (R,); called once for each place."""
        ...

    def append(self, tokens_R: Int64Array) -> None:
        """Append a token to each text."""
        ...


def written_tokens(writers: Writers, votes: TokenVotes, most: int, ends: Collection[int] = ()) -> list[list[int]]:
    """Write the tokens that follow each text.

    A text ends before an end token, after the largest number of tokens, or when no vote is left for it. Where the check
    of a threshold fails, it gets the public model's own token.

    Args:
        writers: public model and teachers.
        votes: charged for all tokens that may follow.
        most: T, the most tokens of a text.
        ends: tokens that end a text.
    """
    texts: list[list[int]] = [[] for _ in range(writers.num_texts)]
    going = list(range(writers.num_texts))
    for _ in range(most):
        going = going[: votes.left]
        if not going:
            break
        candidates_RC = writers.candidates()
        ballots = Ballots(len(going), candidates_RC.shape[1])
        for teacher in range(writers.num_teachers):
            ballots.add(writers.vote(teacher)[going])
        winners = votes.winners(ballots)
        tokens_R = candidates_RC[:, 0].copy()  # not read for texts that have ended
        tokens_R[going] = candidates_RC[going, np.where(winners == NO_LABEL, 0, winners)]
        going = [text for text in going if int(tokens_R[text]) not in ends]
        for text in going:
            texts[text].append(int(tokens_R[text]))
        writers.append(tokens_R)
    return texts

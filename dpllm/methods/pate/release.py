"""The private part of a PATE run: every teacher votes, and the vote is charged and released with noise.

Place in the flow: between the teachers and the labels or tokens. What a teacher is does not matter here: the
command passes models, and the audit (`dpllm.methods.pate.probe`) functions that know what they vote.
"""

from __future__ import annotations

from collections.abc import Callable

from dpllm.data.units import Int64Array, UnitIndex
from dpllm.methods.pate.partition import Partition
from dpllm.methods.pate.votes import CHECKS, NO_LABEL, Ballots, Vote
from dpllm.methods.queries.run import QueryRun


def ballots_of(
    partition: Partition, units: UnitIndex, ballots: Ballots, vote_of: Callable[[int, Int64Array], Int64Array]
) -> Ballots:
    """Let every teacher vote, each with the rows of its units, and return the counts, which are private.

    Args:
        partition: the teacher of each unit.
        units: the rows of each unit.
        ballots: without a vote.
        vote_of: from a teacher's number and the numbers of its rows to (N,) the class that it names for each text.
    """
    for teacher in range(partition.num_teachers):
        ballots.add(vote_of(teacher, partition.rows_of(teacher, units)))
    return ballots


def released_labels(vote: Vote, num_teachers: int, run: QueryRun, ballots: Ballots) -> Int64Array:
    """Charge the vote, add its noise, and return (N,) the label of each public text, `NO_LABEL` where it has none.

    Args:
        vote: the public numbers of the vote.
        num_teachers: k.
        run: its plan has the charges of the vote.
        ballots: with the votes of all teachers.

    Raises:
        ValueError: not all teachers have voted, or the charge is not planned.
    """
    _require_all(ballots, num_teachers)
    _charge(vote, run)
    return _noisy_winners(vote, run, ballots)


class TokenVotes:
    """Votes on tokens, one place of several texts after the other; all that may follow are charged at the begin.

    Guarantee: no more votes are released than are charged. How many places a text has follows from released tokens, so
    it depends on private records; the charge does not.

    Args:
        vote: the public numbers of the vote.
        num_teachers: k.
        run: its plan has the charges of the vote.
        public_votes: added to the count of candidate 0, the public model's own token. They depend on no record, and the
            check of a threshold does not see them.

    Attributes:
        left: tokens by vote that may still be released.
    """

    def __init__(self, vote: Vote, num_teachers: int, run: QueryRun, public_votes: float = 0.0) -> None:
        """Charge all tokens, and all checks."""
        self._vote, self._num_teachers, self._run, self._public_votes = vote, num_teachers, run, public_votes
        _charge(vote, run)
        self.left, self._places = vote.most_labels, vote.num_prompts

    def winners(self, ballots: Ballots) -> Int64Array:
        """Return (R,) the candidate that wins at the next place of each text, `NO_LABEL` where the check failed.

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
    """Return (N,) the winner of each vote, with noise of the size that is charged."""
    stddev, check_stddev = vote.stddevs(run.plan.charge(vote.answers).event.noise_multiplier)
    noise_NC = run.randomness.gaussian(ballots.counts_NC.shape, stddev)
    noise_N = run.randomness.gaussian((len(noise_NC),), check_stddev)
    noise_NC[:, 0] += public_votes
    return vote.winners(ballots.counts_NC, noise_NC, noise_N)

"""The private part of a PATE run: every teacher votes once, and the vote is charged and released with noise.

Place in the flow: between the teachers and the labels. What a teacher is does not matter here: `dpllm.teaching.teach`
passes a function that trains one, and the audit (`dpllm.teaching.probe`) one that knows what it votes.
"""

from __future__ import annotations

from collections.abc import Callable

from dpllm.data.units import Int64Array, UnitIndex
from dpllm.queries import QueryRun
from dpllm.teaching.partition import Partition
from dpllm.teaching.votes import CHECKS, LABELS, Ballots, Vote


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
    event = run.plan.charge(LABELS).event
    if ballots.num_voters != num_teachers:
        raise ValueError(f"{ballots.num_voters} of {num_teachers} teachers have voted")
    run.charge(LABELS, vote.most_labels)
    if vote.threshold is not None:
        run.charge(CHECKS, vote.num_prompts)
    stddev, check_stddev = vote.stddevs(event.noise_multiplier)
    noise_NC = run.randomness.gaussian(ballots.counts_NC.shape, stddev)
    noise_N = run.randomness.gaussian((vote.num_prompts,), check_stddev)
    return vote.winners(ballots.counts_NC, noise_NC, noise_N)

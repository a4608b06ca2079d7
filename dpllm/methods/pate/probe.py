"""The probes of PATE for the audit: a vote among teachers that are nearly even, of which one has seen the canary.

Place in the flow: beside the run. The partition, the ballots, the charge and the noisy vote are those of the command. A
teacher is a function that has learnt one thing by heart, whether the canary is among its records, which is the most
that any training could learn of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpllm.data.units import Int64Array
from dpllm.methods.pate.partition import Partition
from dpllm.methods.pate.prepare import (
    CLASSES,
    NEW_TOKENS,
    PROMPTS,
    PUBLIC_VOTES,
    TEACHERS,
    THRESHOLD,
    TOKEN_THRESHOLD,
)
from dpllm.methods.pate.release import TokenVotes, ballots_of, released_labels
from dpllm.methods.pate.tokens import written_tokens
from dpllm.methods.pate.votes import CHECK_CHANGE, CHECKS, LABELS, TOKENS, VOTE_CHANGE, Ballots, Vote
from dpllm.methods.queries.probe import Probe, made_units
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import QueryPlan

_UNITS_OF_TEACHER = 2
_CANARY = 0  # number of the unit, whose rows come first
_NAME = "a unit that decides the vote of its teacher"


def vote_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.pate.prepare`.

    The other teachers are divided between two classes. The teacher with the canary votes for the first one, and without
    it for the second. The score is the number of texts with the first label less that with the second.

    Args:
        plan: of a PATE run.
    """
    settings = dict(plan.settings)
    teachers, classes, prompts = (int(settings[name]) for name in (TEACHERS, CLASSES, PROMPTS))
    vote = _vote_of(plan, LABELS, prompts, settings.get(THRESHOLD))
    units = made_units(plan, teachers * _UNITS_OF_TEACHER, canary=True)
    own_rows = units.rows_of(np.array([_CANARY]))[0]

    def answer(run: QueryRun, there: bool) -> float:
        others = 0

        def vote_of(_: int, rows: Int64Array) -> Int64Array:
            nonlocal others
            if np.isin(own_rows, rows).any():
                return np.full(prompts, 0 if there else 1)
            others += 1
            return np.full(prompts, others % 2)

        partition = Partition(units.num_units, teachers, run.randomness.generator())
        ballots = ballots_of(partition, units, Ballots(prompts, classes), vote_of)
        labels_N = released_labels(vote, teachers, run, ballots)
        return float((labels_N == 0).sum() - (labels_N == 1).sum())

    return Probe(_NAME, answer)


def completion_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan for completions.

    As for labels, at each place: the first and the second candidate after the public model's own. The score is the
    number of the first in all texts less that of the second.

    Args:
        plan: of a PATE run with votes on tokens.
    """
    settings = dict(plan.settings)
    teachers, texts, most = (int(settings[name]) for name in (TEACHERS, PROMPTS, NEW_TOKENS))
    vote = _vote_of(plan, TOKENS, texts * most, settings.get(TOKEN_THRESHOLD))
    units = made_units(plan, teachers * _UNITS_OF_TEACHER, canary=True)
    own_rows = units.rows_of(np.array([_CANARY]))[0]

    def answer(run: QueryRun, there: bool) -> float:
        partition = Partition(units.num_units, teachers, run.randomness.generator())
        named, others = [], 0
        for teacher in range(teachers):
            if np.isin(own_rows, partition.rows_of(teacher, units)).any():
                named.append(_FIRST if there else _SECOND)
                continue
            others += 1
            named.append(_FIRST if others % 2 == 0 else _SECOND)
        votes = TokenVotes(vote, teachers, run, float(settings[PUBLIC_VOTES]))
        found = np.concatenate([[], *written_tokens(_Known(texts, named), votes, most)])
        return float((found == _FIRST).sum() - (found == _SECOND).sum())

    return Probe(_NAME, answer)


_FIRST, _SECOND = 1, 2


@dataclass
class _Known:
    """Writers that know what they vote, at every place of every text."""

    num_texts: int
    named: list[int]

    @property
    def num_teachers(self) -> int:
        return len(self.named)

    def candidates(self) -> Int64Array:
        return np.tile(np.array([0, _FIRST, _SECOND]), (self.num_texts, 1))

    def vote(self, teacher: int) -> Int64Array:
        return np.full(self.num_texts, self.named[teacher])

    def append(self, tokens_R: Int64Array) -> None:
        pass


def _vote_of(plan: QueryPlan, answers: str, places: int, threshold: object) -> Vote:
    """Return the vote with the numbers that a plan charges."""
    charge = plan.charge(answers)
    if threshold is None:
        return Vote(places, None, charge.count, answers=answers)
    check = plan.charge(CHECKS).event.noise_multiplier * CHECK_CHANGE
    ratio = check / (charge.event.noise_multiplier * VOTE_CHANGE)
    return Vote(places, float(str(threshold)), charge.count, ratio, answers)

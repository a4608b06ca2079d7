"""The probe of PATE for the audit: a vote among teachers that are nearly even, of which one has seen the canary.

Place in the flow: beside the run. The partition, the ballots, the charge and the noisy vote are those of the command. A
teacher is a function that has learnt one thing by heart, whether the canary is among its records, which is the most
that any training could learn of it.
"""

from __future__ import annotations

import numpy as np

from dpllm.data.units import Int64Array
from dpllm.privacy.query_plan import QueryPlan
from dpllm.queries import QueryRun
from dpllm.queries.probe import Probe, made_units
from dpllm.teaching.partition import Partition
from dpllm.teaching.prepare import CLASSES, PROMPTS, TEACHERS, THRESHOLD
from dpllm.teaching.release import ballots_of, released_labels
from dpllm.teaching.votes import CHECK_CHANGE, CHECKS, LABELS, VOTE_CHANGE, Ballots, Vote

_UNITS_OF_TEACHER = 2
_CANARY = 0  # number of the unit, whose rows come first


def vote_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.teaching.prepare`.

    The other teachers are divided between two classes. The teacher with the canary votes for the first one, and without
    it for the second. The score is the number of texts with the first label less that with the second.

    Args:
        plan: of a PATE run.
    """
    settings = dict(plan.settings)
    teachers, classes, prompts = (int(settings[name]) for name in (TEACHERS, CLASSES, PROMPTS))
    vote = Vote(prompts)
    if THRESHOLD in settings:
        label, check = plan.charge(LABELS), plan.charge(CHECKS).event.noise_multiplier * CHECK_CHANGE
        ratio = check / (label.event.noise_multiplier * VOTE_CHANGE)
        vote = Vote(prompts, float(settings[THRESHOLD]), label.count, ratio)
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

    return Probe("a unit that decides the vote of its teacher", answer)

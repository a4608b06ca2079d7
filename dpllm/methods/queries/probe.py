"""What an audit needs to know of a method: its private answers on two neighbours of made-up records.

Place in the flow: beside the run; `dpllm.methods.attacks.answers` asks the same questions again and again, each time
with or without a canary. Each method has a function that makes a `Probe` from its plan. No private record is read: the
records are made up, and are the worst that the method's bounds allow. Everything between the records and the answer is
the code that the command runs: the rows of a unit, clipping, the division into groups, the charge, and the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import datasets

from dpllm.config import PrivacyUnit
from dpllm.data.rows import unit_index_of
from dpllm.data.units import UnitIndex
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.count.counting import CHARGE, LabelledUnits, charge_and_count
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import QueryPlan

UNIT = "unit"
"""Column of the ids of made-up records."""
EXCESS = 3
"""A canary with many rows has this many times as many as count, so that a missing bound shows."""
_FAR = 10.0  # deviations of the noise: counts so large stay above 0


@dataclass(frozen=True)
class Probe:
    """The private answers of a method, asked about made-up records with and without a canary."""

    canary: str
    """The canary, in plain words."""
    answer: Callable[[QueryRun, bool], float]
    """From a run and whether the canary is there to a score of the answers, which is higher with it. One call charges
    the run what the method charges for all of its answers."""


def made_units(plan: QueryPlan, others: int, canary: bool) -> UnitIndex:
    """Return the index of made-up rows, divided into units as the method divides records.

    The rows of the canary come first. At user level it has `EXCESS` times as many rows as the plan allows, of which the
    index keeps the allowed number.

    Args:
        plan: what a unit is.
        others: number of other units, of one row each.
        canary: whether the canary is there.
    """
    privacy, own = PrivacyUnit(), 1
    if plan.max_rows_per_unit is not None:  # user level
        most, kept = plan.max_rows_per_unit, plan.rows_kept or "first"
        privacy = PrivacyUnit(unit=UNIT, max_rows_per_unit=most, rows_kept=kept)
        own = EXCESS * most
    ids = [0] * (own if canary else 0) + list(range(1, others + 1))
    return unit_index_of(datasets.Dataset.from_dict({UNIT: ids}), privacy, secret_rng())


def count_probe(plan: QueryPlan) -> Probe:
    """Return the probe of noisy counts of classes: all rows of the canary are of one class.

    Args:
        plan: with the charge "label counts".
    """
    k = plan.max_rows_per_unit or 1
    others = math.ceil(_FAR * k * plan.charge(CHARGE).event.noise_multiplier)
    units = {}
    for there in (False, True):
        index = made_units(plan, others, there)
        # Other units are of the canary's class as well: a count near 0 would be cut off there.
        units[there] = LabelledUnits(("first", "second"), [0] * (int(max(index.rows)) + 1), index)
    exact = {there: made.exact_counts() for there, made in units.items()}

    def answer(run: QueryRun, there: bool) -> float:
        return charge_and_count(run, units[there], exact[there])["first"]

    return Probe("a unit with all its rows in one class", answer)

"""The probe of answers of groups for the audit: a unit that decides the answer of its group.

Place in the flow: beside the run. The charges, the division into groups, the bound of an answer, noise and threshold
are those of the command. The answers are made up: whoever could read the unit from a group's answer knows no more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from dpllm.data.units import Int64Array
from dpllm.methods.aggregate.aggregate import GROUP_SIZE, KIND, charge_name, charged_answers
from dpllm.methods.aggregate.combined import Combined, combined
from dpllm.methods.aggregate.section import Question
from dpllm.methods.aggregate.thresholded import ThresholdedCounts
from dpllm.methods.queries.probe import Probe, made_units
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import QueryPlan

_FAR = 12.0
"""Groups for each standard deviation of a count's noise: sums then stay within their ranges."""
_CANARY = 0  # number of the unit, whose rows come first
_COMMON, _RARE = "common", "rare"
_SHOWN = 1000.0  # the score of a rare answer that is released


def group_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.aggregate.aggregate`.

    With the canary, its group answers with the largest number, the first listed answer, and the answer that all others
    give. Without it, with the smallest, the second, and an answer that no other group gives. The score is the sum of
    the numbers of groups for the former; a rare answer that is released lowers it by a lot.

    Args:
        plan: of answers of groups.
    """
    settings = dict(plan.settings)
    kinds = {name.removesuffix(KIND): str(kind) for name, kind in plan.settings if name.endswith(KIND)}
    ways = [_way(plan, name, kind) for name, kind in kinds.items()]
    size, noise = int(settings[GROUP_SIZE]), plan.event.noise_multiplier
    margin = max((way.margin for _, way in ways if hasattr(way, "margin")), default=0.0)
    num_groups = math.ceil((_FAR + 2 * margin) * max(noise, 1.0))
    index = made_units(plan, num_groups * size - 1, canary=True)

    def answer(run: QueryRun, there: bool) -> float:
        def asked(question: Question, groups: Sequence[Int64Array]) -> list[Any]:
            others = itertools.count()
            return [
                _own_answer(question.kind, there) if _CANARY in group else _other_answer(question.kind, next(others))
                for group in groups
            ]

        found = charged_answers(run, ways, index.num_units, num_groups, size, asked)
        return sum(_score(kinds[name], one, num_groups) for name, one in found)

    return Probe("a unit that decides the answer of its group", answer)


def _way(plan: QueryPlan, name: str, kind: str) -> tuple[Question, Combined]:
    """Return a question of this kind, and how its answers are combined: with the margin of the plan."""
    question = Question(
        name=name,
        ask="made up",
        kind=kind,
        low=0.0 if kind == "number" else None,
        high=1.0 if kind == "number" else None,
        answers=(_COMMON, _RARE) if kind == "choice" else None,
    )
    event = plan.charge(charge_name(question)).event
    return question, combined(question, event.margin if isinstance(event, ThresholdedCounts) else math.nan, 1)


def _own_answer(kind: str, there: bool) -> Any:
    """Return the answer of the canary's group, with the canary and without it."""
    answers = {"number": ("-1000000", "1000000"), "choice": (1, 0), "open": (_RARE, _COMMON)}
    return answers[kind][there]


def _other_answer(kind: str, number: int) -> Any:
    """Return the answer of another group."""
    return {"number": "0.5", "choice": number % 2, "open": _COMMON}[kind]


def _score(kind: str, found: dict[str, Any], num_groups: int) -> float:
    """Return the released number of groups that answered as the canary's does, up to a constant."""
    if kind == "number":
        return float(found["mean"]) * num_groups
    counts = found["groups"]
    if kind == "choice":
        return float(counts[_COMMON] - counts[_RARE]) / 2
    return float(counts.get(_COMMON, 0.0)) - (_SHOWN if _RARE in counts else 0.0)

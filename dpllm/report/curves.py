"""Compute the curves of a privacy report.

The report stores them, so its pictures can be drawn from the report alone. Every value is an upper bound.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting
from dpllm.privacy.accounting import History
from dpllm.privacy.guarantee import Guarantee
from dpllm.privacy.risk import tradeoff_curve
from dpllm.report.models import Curves, DeltasByAdjacency, EpsilonOverDelta, EpsilonOverSteps, Tradeoff

_COARSE = 1e-3
_STEP_POINTS = 12
_EPSILON_POINTS = 48
_LEAST_DELTA = 1e-12


@lru_cache(maxsize=8)
def curves(guarantee: Guarantee) -> Curves:
    """Return the three curves; their lists are empty if there is no step or no noise.

    Args:
        guarantee: the guarantee of the stated steps, in the order in which they ran; its history is a tuple.

    Returns:
        The largest true positive rates over false positive rates; ε after some numbers of steps, on a grid of losses
        that is ten times coarser (but never above the ε of all steps); and the δ for some values of ε, None if it is
        below 1e-12, which this composition cannot resolve.
    """
    if not accounting.merge(guarantee.history) or not guarantee.is_finite:
        return Curves(
            tradeoff=Tradeoff(false_positive_rate=(), true_positive_rate=(), from_epsilon_and_delta_alone=()),
            epsilon_over_steps=EpsilonOverSteps(steps=(), epsilon=()),
            epsilon_over_delta=EpsilonOverDelta(
                epsilon=(), delta=DeltasByAdjacency.model_validate(dict.fromkeys(ADJACENCIES, ()))
            ),
        )
    return Curves(
        tradeoff=_tradeoff(guarantee),
        epsilon_over_steps=_over_steps(guarantee),
        epsilon_over_delta=_over_delta(guarantee),
    )


def _tradeoff(guarantee: Guarantee) -> Tradeoff:
    rates, found = tradeoff_curve(guarantee.history, guarantee.adjacency)
    factor, delta = math.exp(min(guarantee.epsilon, 700.0)), guarantee.delta
    alone = np.clip(np.minimum(factor * rates + delta, 1 + (rates + delta - 1) / factor), rates, 1.0)
    return Tradeoff(
        false_positive_rate=tuple(rates.tolist()),
        true_positive_rate=tuple(found.tolist()),
        from_epsilon_and_delta_alone=tuple(alone.tolist()),
    )


def _over_steps(guarantee: Guarantee) -> EpsilonOverSteps:
    history = guarantee.history
    if any(event.is_selection for event, _ in accounting.merge(history)):
        return EpsilonOverSteps(steps=(), epsilon=())  # a selection has an ε only after all its runs
    total = guarantee.num_steps
    steps = sorted({math.ceil(total * part / _STEP_POINTS) for part in range(1, _STEP_POINTS)} | {1, total})
    values = []
    for number in steps[:-1]:
        at = accounting.epsilon(_first(history, number), guarantee.delta, guarantee.adjacency, _COARSE)
        values.append(min(guarantee.epsilon, at))
    # ε cannot decrease with more steps, so a smaller bound at a later step also holds for earlier steps.
    values = np.minimum.accumulate([*values, guarantee.epsilon][::-1])[::-1].tolist()
    return EpsilonOverSteps(steps=tuple(steps), epsilon=tuple(values))


def _first(history: History, number: int) -> list[Any]:
    """Return the first steps of a history."""
    taken, left = [], number
    for step, count in history:
        taken.append((step, min(count, left)))
        left -= min(count, left)
    return taken


def _over_delta(guarantee: Guarantee) -> EpsilonOverDelta:
    functions = {name: accounting.delta_function(guarantee.history, name, tilted=False) for name in ADJACENCIES}
    # Far enough for the larger of the two curves to fall to a thousandth of δ, or to the resolution.
    goal = max(_LEAST_DELTA, guarantee.delta / 1000)
    highest = 1e-3
    while functions["replace-one"](highest) > goal and highest < 1e6:
        highest *= 1.25
    grid = tuple(np.linspace(0.0, highest, _EPSILON_POINTS).tolist())
    found = {name: [function(at) for at in grid] for name, function in functions.items()}
    deltas = {name: tuple(at if at >= _LEAST_DELTA else None for at in values) for name, values in found.items()}
    return EpsilonOverDelta(epsilon=grid, delta=DeltasByAdjacency.model_validate(deltas))

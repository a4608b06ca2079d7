"""The curves of a privacy report: what its pictures are drawn from.

Place in the flow: below report, which stores them, so that the pictures can be drawn again from the report alone. Every
value is an upper bound.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting
from dpllm.privacy.risk import tradeoff_curve
from dpllm.report.models import Curves, DeltasByAdjacency, EpsilonOverDelta, EpsilonOverSteps, Tradeoff

_COARSE = 1e-3
_STEP_POINTS = 12
_EPSILON_POINTS = 48
_LEAST_DELTA = 1e-12

_History = tuple[tuple[Event, int], ...]


@lru_cache(maxsize=8)
def curves(history: _History, delta: float, adjacency: str, epsilon: float, target_epsilon: float | None) -> Curves:
    """Return the three curves; without a step or without noise their lists are empty.

    Args:
        history: (event, count) pairs in the order in which they ran.
        delta: δ of the headline.
        adjacency: of the headline.
        epsilon: of the headline.
        target_epsilon: the budget, or None.

    Returns:
        The largest true positive rates over false positive rates; ε after some numbers of steps, on a grid of losses
        ten times coarser (but never above the ε of all steps); and the δ of some values of ε, None where it is below
        1e-12 and so below what this composition resolves.
    """
    drawn = history if accounting.merge(history) and math.isfinite(epsilon) else None
    over_delta, deltas = _over_delta(drawn, delta)
    return Curves(
        tradeoff=_tradeoff(drawn, delta, adjacency, epsilon),
        epsilon_over_steps=EpsilonOverSteps(
            adjacency=adjacency,
            delta=delta,
            target_epsilon=target_epsilon,
            **_over_steps(drawn, delta, adjacency, epsilon),
        ),
        epsilon_over_delta=EpsilonOverDelta(
            delta_of_the_headline=delta,
            epsilon_of_the_headline=None if drawn is None else epsilon,
            adjacency=adjacency,
            epsilon=over_delta,
            delta=deltas,
        ),
    )


def _tradeoff(history: _History | None, delta: float, adjacency: str, epsilon: float) -> Tradeoff:
    rates = found = alone = np.zeros(0)
    if history is not None:
        rates, found = tradeoff_curve(history, adjacency)
        factor = math.exp(min(epsilon, 700.0))
        alone = np.clip(np.minimum(factor * rates + delta, 1 + (rates + delta - 1) / factor), rates, 1.0)
    return Tradeoff(
        adjacency=adjacency,
        false_positive_rate=tuple(rates.tolist()),
        true_positive_rate=tuple(found.tolist()),
        from_epsilon_and_delta_alone=tuple(alone.tolist()),
    )


def _over_steps(history: _History | None, delta: float, adjacency: str, epsilon: float) -> dict[str, Any]:
    if history is None or any(event.is_selection for event, _ in history):
        return {"steps": [], "epsilon": []}  # a selection has an ε only when all its runs have ended
    total = sum(count for _, count in history)
    steps = sorted({math.ceil(total * part / _STEP_POINTS) for part in range(1, _STEP_POINTS)} | {1, total})
    values = []
    for number in steps[:-1]:
        at = accounting.epsilon(_first(history, number), delta, adjacency, _COARSE)
        values.append(min(epsilon, at))
    # ε of fewer steps is at most that of more, so that a smaller bound that comes later holds for what came before.
    values = np.minimum.accumulate([*values, epsilon][::-1])[::-1].tolist()
    return {"steps": steps, "epsilon": values}


def _first(history: _History, number: int) -> list[tuple[Event, int]]:
    """Return the first steps of a history."""
    taken, left = [], number
    for step, count in history:
        taken.append((step, min(count, left)))
        left -= min(count, left)
    return taken


def _over_delta(history: _History | None, delta: float) -> tuple[tuple[float, ...], DeltasByAdjacency]:
    if history is None:
        return (), DeltasByAdjacency.model_validate(dict.fromkeys(ADJACENCIES, ()))
    functions = {name: accounting.delta_function(history, name, tilted=False) for name in ADJACENCIES}
    # Far enough that the larger of the two curves, too, comes down to a thousandth of δ, or to what is resolved.
    goal = max(_LEAST_DELTA, delta / 1000)
    highest = 1e-3
    while functions["replace-one"](highest) > goal and highest < 1e6:
        highest *= 1.25
    grid = tuple(np.linspace(0.0, highest, _EPSILON_POINTS).tolist())
    found = {name: [function(at) for at in grid] for name, function in functions.items()}
    return grid, DeltasByAdjacency.model_validate(
        {name: tuple(at if at >= _LEAST_DELTA else None for at in values) for name, values in found.items()}
    )

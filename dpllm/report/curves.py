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
from dpllm.privacy import accounting
from dpllm.privacy.risk import tradeoff_curve

_COARSE = 1e-3
_STEP_POINTS = 12
_EPSILON_POINTS = 48
_LEAST_DELTA = 1e-12
_ADJACENCIES = ("zero-out", "replace-one")

_History = tuple[tuple[Event, int], ...]


def curves(
    history: _History, delta: float, adjacency: str, epsilon: float, target_epsilon: float | None
) -> dict[str, Any]:
    """Return the three curves as plain values; without a step or without noise their lists are empty.

    Args:
        history: (event, count) pairs in the order in which they ran.
        delta: δ of the headline.
        adjacency: of the headline.
        epsilon: of the headline.
        target_epsilon: the budget, or None.

    Returns:
        "tradeoff": false positive rates, the largest true positive rates, and those that (ε, δ) alone would allow;
        "epsilon_over_steps": numbers of steps, and ε after each, on a grid of losses ten times coarser (but never above
        the ε of all steps); "epsilon_over_delta": values of ε, and for each adjacency the δ that belongs to each, None
        where it is below 1e-12 and so below what this composition resolves.
    """
    return _copied(_curves(history, delta, adjacency, epsilon, target_epsilon))


@lru_cache(maxsize=8)
def _curves(
    history: _History, delta: float, adjacency: str, epsilon: float, target_epsilon: float | None
) -> dict[str, Any]:
    drawn = bool(accounting.merge(history)) and math.isfinite(epsilon)
    return {
        "tradeoff": {"adjacency": adjacency, **_tradeoff(history if drawn else None, delta, adjacency, epsilon)},
        "epsilon_over_steps": {
            "adjacency": adjacency,
            "delta": delta,
            "target_epsilon": target_epsilon,
            **_over_steps(history if drawn else None, delta, adjacency, epsilon),
        },
        "epsilon_over_delta": {
            "delta_of_the_headline": delta,
            "epsilon_of_the_headline": epsilon if drawn else None,
            "adjacency": adjacency,
            **_over_delta(history if drawn else None, delta),
        },
    }


def _copied(values: Any) -> Any:
    """Return a copy that shares nothing with what is kept."""
    if isinstance(values, dict):
        return {key: _copied(value) for key, value in values.items()}
    return [_copied(value) for value in values] if isinstance(values, list) else values


def _tradeoff(history: _History | None, delta: float, adjacency: str, epsilon: float) -> dict[str, list[float]]:
    names = ("false_positive_rate", "true_positive_rate", "from_epsilon_and_delta_alone")
    if history is None:
        return {name: [] for name in names}
    rates, found = tradeoff_curve(history, adjacency)
    factor = math.exp(min(epsilon, 700.0))
    alone = np.clip(np.minimum(factor * rates + delta, 1 + (rates + delta - 1) / factor), rates, 1.0)
    return {name: values.tolist() for name, values in zip(names, (rates, found, alone), strict=True)}


def _over_steps(history: _History | None, delta: float, adjacency: str, epsilon: float) -> dict[str, list[Any]]:
    if history is None:
        return {"steps": [], "epsilon": []}
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


def _over_delta(history: _History | None, delta: float) -> dict[str, Any]:
    if history is None:
        return {"epsilon": [], "delta": {name: [] for name in _ADJACENCIES}}
    functions = {name: accounting.delta_function(history, name, tilted=False) for name in _ADJACENCIES}
    # Far enough that the larger of the two curves, too, comes down to a thousandth of δ, or to what is resolved.
    goal = max(_LEAST_DELTA, delta / 1000)
    highest = 1e-3
    while functions["replace-one"](highest) > goal and highest < 1e6:
        highest *= 1.25
    grid = [*np.linspace(0.0, highest, _EPSILON_POINTS).tolist()]
    found = {name: [function(at) for at in grid] for name, function in functions.items()}
    return {
        "epsilon": grid,
        "delta": {name: [at if at >= _LEAST_DELTA else None for at in values] for name, values in found.items()},
    }

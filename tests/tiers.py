"""The two tiers of the suite: ``make test`` runs ``-m "not deep"``, ``make test-deep`` runs everything.

`deep` marks a test, or one of its cases with `deep_case`, that ``make test`` leaves out. ``@pytest.mark.grid`` marks a
parametrised test of which ``make test`` runs a sample: any two values of two different axes meet in one of its cases,
and with ``grid(1)`` every value of every axis appears. A field of a dataclass that is a parameter is an axis too.
`needs_shared_data` leaves out tests of real weights and texts where these are not.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("DPLLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"needs the test data at {SHARED} (or DPLLM_SHARED_DATA), which is not part of dpllm"
)
deep = pytest.mark.deep
Value = tuple[str, Hashable]  # of an axis, which is named first


def deep_case(*values: Any, id: str | None = None) -> Any:
    """A case of a parametrised test that only ``make test-deep`` runs."""
    return pytest.param(*values, id=id, marks=deep)


def is_quick(config: pytest.Config) -> bool:
    """Whether only the tests that are not marked deep run."""
    return str(config.getoption("markexpr")) == "not deep"


def mark_the_rest_of_grids(items: Sequence[pytest.Item]) -> None:
    """Mark as deep the cases of each grid that its sample leaves out."""
    grids: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("grid"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        marker = cases[0].get_closest_marker("grid")
        strength = marker.args[0] if marker is not None and marker.args else 2
        taken = sample([_values(case.callspec) for case in cases], strength)
        for number, case in enumerate(cases):
            if number not in taken:
                case.add_marker(deep)


def sample(cases: Sequence[Sequence[Value]], strength: int) -> set[int]:
    """Numbers of cases in which every combination of this many values appears that appears in any case.

    Greedy: the case with the most combinations that no case before it has comes next; of equals the first.
    """
    axes = {name: {value for case in cases for axis, value in case if axis == name} for name, _ in cases[0]}
    varying = [[(name, value) for name, value in case if len(axes[name]) > 1] for case in cases]
    missing = [set(combinations(case, min(strength, len(case)))) for case in varying]
    taken: set[int] = set()
    while True:
        best = max(range(len(cases)), key=lambda number: len(missing[number]))
        if not missing[best] and taken:
            return taken
        taken.add(best)
        seen = missing[best].copy()
        for combination in missing:
            combination -= seen


def _values(callspec: Any) -> list[Value]:
    values: list[Value] = []
    parameters: Mapping[str, Any] = callspec.params
    for name, value in parameters.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            values += [(f"{name}.{f.name}", repr(getattr(value, f.name))) for f in dataclasses.fields(value)]
        else:
            plain = isinstance(value, (str, int, float, list, tuple, type(None)))
            values.append((name, repr(value) if plain else id(value)))
    return values

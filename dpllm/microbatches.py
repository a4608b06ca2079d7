"""A logical batch cut into microbatches that fit in memory.

Clipping is per unit, so the cut changes nothing but speed: units are sorted by length, so that little padding is
needed, and every row of a unit stays in one microbatch. A step without any unit yields one microbatch of a single
padding row, whose loss has weight 0, so that every step runs the same code.

Shape suffixes: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.units import UnitIndex

PADDING_UNIT = -1  # the unit of a row that belongs to none; its loss has weight 0


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through the model together.

    Attributes:
        inputs: what the collator made of the rows; every tensor has the rows first.
        unit_index: (B,) int64, each row's unit within this microbatch, 0..num_units-1; -1 for a padding row.
        num_units: units in this microbatch.
    """

    inputs: Mapping[str, Any]
    unit_index: Tensor
    num_units: int


def microbatches(
    fetch: Callable[[np.ndarray], Sequence[Any]],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    units: UnitIndex,
    lengths: np.ndarray,
    unit_ids: np.ndarray,
    max_rows: int,
) -> Iterator[Microbatch]:
    """Cut the units drawn for one step into microbatches.

    Args:
        fetch: row numbers to rows.
        collate: rows to the model's inputs.
        units: which rows each unit has.
        lengths: (num_rows,) tokens of every row of the data set.
        unit_ids: the units of this step; may be empty.
        max_rows: rows of a microbatch at most. A unit with more rows makes one microbatch by itself: it is never
            split, since its norm is over all its rows.

    Raises:
        ValueError: the collator returned another number of rows than it was given.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; at least 1 is needed.")
    rows, position = units.rows_of(unit_ids)
    if len(rows) == 0:
        padding_row = units.rows[:1]
        yield _microbatch(fetch(padding_row), collate, np.array([PADDING_UNIT]), num_units=0)
        return
    longest = np.zeros(len(unit_ids), dtype=np.int64)
    np.maximum.at(longest, position, lengths[rows])
    rank = np.empty(len(unit_ids), dtype=np.int64)
    rank[np.argsort(-longest, kind="stable")] = np.arange(len(unit_ids))  # longest first: memory peaks at once or never
    order = np.argsort(rank[position], kind="stable")
    rows, unit_rank = rows[order], rank[position][order]
    for start, stop in _cuts(np.bincount(unit_rank), max_rows):
        here = (unit_rank >= start) & (unit_rank < stop)
        yield _microbatch(fetch(rows[here]), collate, unit_rank[here] - start, num_units=stop - start)


def _cuts(rows_of_unit: np.ndarray, max_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive units that have at most ``max_rows`` rows together, or consist of one unit."""
    start, filled = 0, 0
    for unit, count in enumerate(rows_of_unit):
        if filled and filled + count > max_rows:
            yield start, unit
            start, filled = unit, 0
        filled += int(count)
    yield start, len(rows_of_unit)


def _microbatch(rows: Sequence[Any], collate: Callable, unit_index: np.ndarray, num_units: int) -> Microbatch:
    inputs = collate(list(rows))
    for name, value in inputs.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != len(rows)):
            raise ValueError(
                f"The collator turned {len(rows)} rows into '{name}' of shape {tuple(value.shape)}. Every row has to "
                f"stay a row of its own, first "
                "dimension first: packing rows together would mix the gradients of different units."
            )
    return Microbatch(inputs, torch.from_numpy(unit_index.astype(np.int64)), num_units)

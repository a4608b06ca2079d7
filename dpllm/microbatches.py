"""A logical batch divided over processes and cut into microbatches that fit in memory.

Clipping is per unit, so neither changes anything but speed. Units are handed out longest first, each to the process
with the fewest tokens so far, so that processes that wait for each other at every layer have equal work; within a
process they stay sorted by length, so that little padding is needed. A unit stays in one microbatch, unless it has more
rows than fit: then it has several to itself, all but the last marked as to be continued. Every process gets the same
number of microbatches: one with nothing left, like a step without any unit, runs a single padding row, whose loss has
weight 0.

Shape suffixes: B rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.units import UnitIndex

PADDING_UNIT = -1  # the unit of a row that belongs to none; its loss has weight 0


@dataclass(frozen=True, eq=False)
class RowsTaken:
    """The rows of a microbatch as they were before they were collated, so that smaller ones can be made of them.

    Attributes:
        rows: B of them, unit after unit.
        lengths_B: (B,) tokens of each.
        collate: rows to the model's inputs.
    """

    rows: Sequence[Any]
    lengths_B: np.ndarray
    collate: Callable[[list[Any]], Mapping[str, Any]]

    def __getitem__(self, part: slice) -> RowsTaken:
        """Some of the rows."""
        return RowsTaken(self.rows[part], self.lengths_B[part], self.collate)

    def microbatch(self, unit_index: np.ndarray, num_units: int, continues: bool = False) -> Microbatch:
        """The microbatch of these rows; see `Microbatch`."""
        return Microbatch(*_collated(self.rows, self.collate, unit_index), num_units, continues, self)


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through the model together.

    Attributes:
        inputs: what the collator made of the rows; every tensor has the rows first.
        unit_index: (B,) int64, each row's unit within this microbatch, 0..num_units-1; -1 for a padding row.
        num_units: units that end in this microbatch.
        continues: whether all rows belong to one unit, of which the next microbatch has more.
        taken: what it was made of; None where it can't be divided further.
    """

    inputs: Mapping[str, Any]
    unit_index: Tensor
    num_units: int
    continues: bool = False
    taken: RowsTaken | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included: rows times the longest; 0 where it isn't known."""
        return 0 if self.taken is None else len(self.taken.rows) * int(self.taken.lengths_B.max())

    def halves(self) -> tuple[Microbatch, Microbatch] | None:
        """Two microbatches with the same rows, collated anew: cut between units, or within the only one.

        Guarantee: every row is in one of them, the units are the same, and each ends in one of them; that of a
        microbatch which continues goes on after the second.

        Returns:
            None: a single row, or rows that this can't be done with.
        """
        if self.taken is None or len(self.unit_index) < 2:
            return None
        unit_B = self.unit_index.numpy()
        middle, begins = len(unit_B) / 2, 1 + np.flatnonzero(np.diff(unit_B))
        if not len(begins):
            cut = -(-len(unit_B) // 2)
            first = self.taken[:cut].microbatch(unit_B[:cut], 0, continues=True)
            return first, self.taken[cut:].microbatch(unit_B[cut:], self.num_units, self.continues)
        cut = int(begins[np.abs(begins - middle).argmin()])
        before = int(unit_B[cut])
        first = self.taken[:cut].microbatch(unit_B[:cut], before)
        return first, self.taken[cut:].microbatch(unit_B[cut:] - before, self.num_units - before)


def microbatches(
    fetch: Callable[[np.ndarray], Sequence[Any]],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    units: UnitIndex,
    lengths: np.ndarray,
    unit_ids: np.ndarray,
    max_rows: int | None,
    rank: int = 0,
    size: int = 1,
    max_tokens: int | None = None,
) -> Iterator[Microbatch]:
    """Cut the units drawn for one step into the microbatches of one process.

    Args:
        fetch: row numbers to rows.
        collate: rows to the model's inputs.
        units: which rows each unit has.
        lengths: (num_rows,) tokens of every row of the data set.
        unit_ids: all units of this step, the same on every process; may be empty.
        max_rows: rows of a microbatch at most; None: as many as `max_tokens` allows.
        rank: this process, 0 <= rank < size.
        size: how many processes the units are divided over. Every process gets the same number of microbatches.
        max_tokens: tokens of a microbatch at most, padding included: rows times the longest. A longer row is a
            microbatch by itself.

    Raises:
        ValueError: the collator returned another number of rows than it was given.
    """
    for name, bound in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name} is {bound}; at least 1 is needed.")
    if max_rows is None and max_tokens is None:
        raise ValueError("max_rows and max_tokens are both None: a microbatch needs a bound.")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size} processes; 0 <= rank < size is needed.")
    rows, position = units.rows_of(unit_ids)
    longest = np.zeros(len(unit_ids), dtype=np.int64)
    np.maximum.at(longest, position, lengths[rows])
    rank_of = np.empty(len(unit_ids), dtype=np.int64)  # longest first: memory peaks at once or never
    rank_of[np.argsort(-longest, kind="stable")] = np.arange(len(unit_ids))
    order = np.lexsort((-lengths[rows], rank_of[position]))
    rows, unit = rows[order], rank_of[position][order]
    rows_of_unit = np.bincount(unit, minlength=len(unit_ids))
    owner = share_out(np.bincount(unit, weights=lengths[rows], minlength=len(unit_ids)), size)
    room = np.full(len(rows), len(rows) if max_rows is None else max_rows)
    if max_tokens is not None:
        room = np.minimum(room, np.maximum(1, max_tokens // np.maximum(1, lengths[rows])))
    pieces = [list(_pieces(rows_of_unit[owner == process], room[owner[unit] == process])) for process in range(size)]
    mine = owner[unit] == rank
    rows, unit = rows[mine], np.cumsum(owner == rank)[unit[mine]] - 1
    for start, stop, continues in pieces[rank]:
        here = unit[start:stop]
        num_units = 0 if continues else int(here[-1] - here[0]) + 1
        taken = RowsTaken(fetch(rows[start:stop]), lengths[rows[start:stop]], collate)
        yield taken.microbatch(here - here[0], num_units, continues)
    for _ in range(max(1, *map(len, pieces)) - len(pieces[rank])):
        yield Microbatch(*_collated(fetch(np.asarray(units.rows[:1])), collate, np.array([PADDING_UNIT])), num_units=0)


def share_out(tokens_U: np.ndarray, size: int) -> np.ndarray:
    """Which process gets which unit: in the order given, each to the process with the fewest tokens so far.

    With the longest first this is at most 4/3 of the best possible largest share (Graham 1969).

    Args:
        tokens_U: (U,) tokens of each unit.
        size: processes.

    Returns:
        (U,) the rank of each unit's process.

    >>> share_out(np.array([5, 4, 3, 2]), 2).tolist()
    [0, 1, 1, 0]
    """
    if size == 1:
        return np.zeros(len(tokens_U), dtype=np.int64)
    loads = [(0.0, process) for process in range(size)]
    owner = np.empty(len(tokens_U), dtype=np.int64)
    for unit, tokens in enumerate(tokens_U.tolist()):
        load, process = loads[0]
        owner[unit] = process
        heapq.heapreplace(loads, (load + tokens, process))
    return owner


def _pieces(rows_of_unit: np.ndarray, room: np.ndarray) -> Iterator[tuple[int, int, bool]]:
    """Cut rows that stand unit after unit: where each microbatch begins and ends, and whether its unit goes on.

    Args:
        rows_of_unit: (U,) how many rows each unit has.
        room: (num_rows,) how many rows fit into a microbatch that begins with this row, the longest of it.
    """
    begin, end = 0, 0
    for count in rows_of_unit.tolist():
        if end > begin and end - begin + count > room[begin]:
            yield begin, end, False
            begin = end
        end += count
        if end - begin > room[begin]:
            while end - begin > room[begin]:
                stop = begin + int(room[begin])
                yield begin, stop, True
                begin = stop
            yield begin, end, False  # no other unit joins the last of its rows
            begin = end
    if end > begin:
        yield begin, end, False


def _collated(rows: Sequence[Any], collate: Callable, unit_index: np.ndarray) -> tuple[Mapping[str, Any], Tensor]:
    inputs = collate(list(rows))
    for name, value in inputs.items():
        if isinstance(value, Tensor) and (value.ndim == 0 or value.shape[0] != len(rows)):
            raise ValueError(
                f"The collator turned {len(rows)} rows into '{name}' of shape {tuple(value.shape)}. Every row has to "
                f"stay a row of its own, first "
                "dimension first: packing rows together would mix the gradients of different units."
            )
    return inputs, torch.from_numpy(unit_index.astype(np.int64))

"""Division of a logical batch over processes and into microbatches that fit in memory.

Clipping is per unit, so the division changes nothing but speed. Drawn units are put in a secret random order and dealt
to the processes in turn (`deal`): each process gets the same number, and no unit's process depends on the length or the
content of another unit. Within a process units are sorted by length, and the cuts between microbatches leave the least
padding (`best_cuts`). A unit stays in one microbatch, unless it has more rows than fit: then it gets several
microbatches for itself, all but the last marked as continued. Every process gets the same number of microbatches: a
process with none left, like a step without any unit, runs a single padding row, whose loss has weight 0.

Shape suffixes: B rows, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.data.labels import BOUNDARIES
from dpllm.data.single_rows import collator_of, reader_of
from dpllm.data.units import UnitIndex

_WORD = 2**64 - 1
PADDING_UNIT = -1  # the unit of a row that belongs to none; its loss has weight 0
TOKENS_PER_MICROBATCH = 1024
"""Cost of one more microbatch, in tokens of padding.

Each microbatch reads the weights for forward and backward and adds a gradient to a float32 sum, about 16 bytes per
parameter, while a token costs 6 operations per parameter: at the 100 operations per byte of a large GPU that equals
about 270 tokens. Python's time for the launches adds about a thousand tokens for a model of 10^9 parameters. Too
large a value leaves padding; too small a value makes microbatches that do not fill the device.
"""


@dataclass(frozen=True, eq=False)
class RowsTaken:
    """The rows of a microbatch, each made by itself, from which smaller microbatches can be put together.

    Attributes:
        rows: inputs of B rows, unit after unit (`dpllm.data.single_rows.RowByRow.row`).
        lengths_B: (B,) tokens of each.
        batch: puts the inputs of some rows together.
    """

    rows: Sequence[Any]
    lengths_B: np.ndarray
    batch: Callable[[Sequence[Any]], Mapping[str, Any]]

    def __getitem__(self, part: slice) -> RowsTaken:
        """Return some of the rows."""
        return RowsTaken(self.rows[part], self.lengths_B[part], self.batch)

    def microbatch(
        self, unit_index: np.ndarray, num_units: int, continues: bool = False, share: float = 0.0
    ) -> Microbatch:
        """Return the microbatch of these rows; see `Microbatch`."""
        index = torch.from_numpy(unit_index.astype(np.int64))
        return Microbatch(self.batch(self.rows), index, num_units, continues, self, share)


@dataclass(frozen=True)
class Microbatch:
    """Rows that go through the model together.

    Attributes:
        inputs: batch of the collator's rows; every tensor has the rows as first dimension, or the rows are
            concatenated, and `cu_seq_lens_q` (B + 1,) gives their boundaries.
        unit_index: (B,) int64, each row's unit within this microbatch, 0..num_units-1; -1 for a padding row.
        num_units: number of units that end in this microbatch.
        continues: whether all rows belong to one unit that continues in the next microbatch.
        taken: the rows it was made of; None if it cannot be divided further.
        share: its part of this process's tokens in the step, padding included; 0 if unknown. It is for the screen.
    """

    inputs: Mapping[str, Any]
    unit_index: Tensor
    num_units: int
    continues: bool = False
    taken: RowsTaken | None = None
    share: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included: rows times the longest; the rows' own if packed; 0 if unknown."""
        if self.taken is None:
            return 0
        lengths_B = self.taken.lengths_B
        return int(lengths_B.sum()) if BOUNDARIES in self.inputs else len(lengths_B) * int(lengths_B.max())

    def halves(self) -> tuple[Microbatch, Microbatch] | None:
        """Return two microbatches with the same rows, put together again: cut between units, or within the only unit.

        Guarantee: every row is in one of the two, the units are the same, and each unit ends in one of them; the unit
        of a microbatch that continues goes on after the second.

        Returns:
            The two; None for a single row, or for rows that cannot be divided.
        """
        unit_B = self.unit_index.numpy()
        if self.taken is None or len(unit_B) < 2:
            return None
        middle, begins = len(unit_B) / 2, 1 + np.flatnonzero(np.diff(unit_B))
        if not len(begins):
            cut = -(-len(unit_B) // 2)
            share = self.share * cut / len(unit_B)
            first = self.taken[:cut].microbatch(unit_B[:cut], 0, True, share)
            return first, self.taken[cut:].microbatch(unit_B[cut:], self.num_units, self.continues, self.share - share)
        cut = int(begins[np.abs(begins - middle).argmin()])
        before, share = int(unit_B[cut]), self.share * cut / len(unit_B)
        first = self.taken[:cut].microbatch(unit_B[:cut], before, share=share)
        rest = self.taken[cut:].microbatch(unit_B[cut:] - before, self.num_units - before, share=self.share - share)
        return first, rest


class StepBatch:
    """The microbatches of one process in a step, whose number is known before their rows are fetched.

    Args:
        count: of the microbatches, at least one.
        made: returns an iterator that fetches and collates one after another.
    """

    def __init__(self, count: int, made: Callable[[], Iterator[Microbatch]]) -> None:
        """Fetch nothing yet."""
        self._count, self._made = count, made

    def __len__(self) -> int:
        """The number of microbatches."""
        return self._count

    def __iter__(self) -> Iterator[Microbatch]:
        """Fetch and collate one microbatch after another."""
        return self._made()


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
    packed: bool = False,
    key: int = 0,
    one_unit: bool = False,
) -> StepBatch:
    """Cut the units drawn for one step into the microbatches of one process; rows are fetched when it is iterated over.

    Args:
        fetch: row numbers to rows; called with one number at a time.
        collate: rows to the model's inputs; called with one row at a time.
        units: index of the rows of each unit.
        lengths: (num_rows,) tokens of every row of the data set.
        unit_ids: all units of this step, the same on every process; may be empty.
        max_rows: the most rows of a microbatch. None: as many as `max_tokens` allows.
        rank: rank of this process, 0 <= rank < size.
        size: number of processes that share the units. Every process gets the same number of microbatches.
        max_tokens: the most tokens of a microbatch, padding included: rows times the longest. A longer row is a
            microbatch of one row.
        packed: whether the collator concatenates rows without padding; ``max_tokens`` then counts the rows' own tokens.
        key: key of the order in which units are dealt to the processes; the same on all processes, and secret.
        one_unit: whether a microbatch gets rows of one unit only (`dpllm.ghost.PerUnitClipper`).

    Raises:
        ValueError: a bound is missing or below 1.
        ConfigError: during the iteration, the collator did not make one row of one row.
    """
    for name, bound in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name} is {bound}; at least 1 is needed.")
    if max_rows is None and max_tokens is None:
        raise ValueError("max_rows and max_tokens are both None: a microbatch needs a bound.")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size} processes; 0 <= rank < size is needed.")
    read, make = reader_of(fetch), collator_of(collate, packed)
    rows, position = units.rows_of(unit_ids)
    tokens = lengths[rows].astype(np.int64)  # of 8 bits, products would not fit
    tokens_U = np.zeros(len(unit_ids), dtype=np.int64)
    np.maximum.at(tokens_U, position, tokens)
    rank_of = np.empty(len(unit_ids), dtype=np.int64)  # longest first: memory peaks at once or never
    rank_of[np.argsort(-tokens_U, kind="stable")] = np.arange(len(unit_ids))
    order = np.lexsort((-tokens, rank_of[position]))
    rows, tokens, unit = rows[order], tokens[order], rank_of[position][order]
    rows_of_unit = np.bincount(unit, minlength=len(unit_ids))
    owner = deal(unit_ids, size, key)[np.argsort(rank_of)]
    pieces = []
    for process in range(size):
        its = tokens[owner[unit] == process]
        room = _room(its, max_rows, max_tokens, packed)
        cut = each_unit if one_unit else full_cuts if packed else best_cuts
        pieces.append(list(_pieces(rows_of_unit[owner == process], its, room, cut)))
    mine = owner[unit] == rank
    rows, tokens, unit = rows[mine], tokens[mine], np.cumsum(owner == rank)[unit[mine]] - 1
    shares = _shares(tokens, pieces[rank], packed)
    count = max(1, *map(len, pieces))

    def made() -> Iterator[Microbatch]:
        for (start, stop, continues), share in zip(pieces[rank], shares, strict=True):
            here = unit[start:stop]
            num_units = 0 if continues else int(here[-1] - here[0]) + 1
            numbers = rows[start:stop]
            taken = RowsTaken([make.row(row) for row in read(numbers)], lengths[numbers], make.batch)
            yield taken.microbatch(here - here[0], num_units, continues, share)
        for _ in range(count - len(pieces[rank])):
            yield Microbatch(make(read(np.asarray(units.rows[:1]))), torch.tensor([PADDING_UNIT]), num_units=0)

    return StepBatch(count, made)


def deal(unit_ids: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the process of each unit: in the order of a keyed hash of the ids, each process in turn.

    Guarantee: the result depends only on the ids that were drawn, the key and the number of processes. It does not
    depend on lengths or contents of units, so a row of one unit cannot move another unit to a process that computes
    differently.

    Args:
        unit_ids: (U,) the units of this step, each once.
        size: number of processes.
        key: 128 bits, the same on every process.

    Returns:
        (U,) the rank of each unit's process; two processes' numbers of units differ by at most 1.

    >>> sorted(deal(np.arange(5), 2, key=3).tolist())
    [0, 0, 0, 1, 1]
    """
    owner = np.empty(len(unit_ids), dtype=np.int64)
    hashed = _scrambled(_scrambled(unit_ids.astype(np.uint64) ^ np.uint64(key & _WORD)) ^ np.uint64(key >> 64 & _WORD))
    owner[np.lexsort((unit_ids, hashed))] = np.arange(len(unit_ids)) % size
    return owner


def _shares(lengths: np.ndarray, pieces: Sequence[tuple[int, int, bool]], packed: bool) -> list[float]:
    """Return each microbatch's part of the tokens of all, as `best_cuts` counts them; each begins with its longest."""
    tokens = [
        int(lengths[start:stop].sum()) if packed else (stop - start) * int(lengths[start]) for start, stop, _ in pieces
    ]
    return [one / max(1, sum(tokens)) for one in tokens]


def _scrambled(words: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def _room(lengths: np.ndarray, max_rows: int | None, max_tokens: int | None, packed: bool) -> np.ndarray:
    """Return (num_rows,): the rows that fit into a microbatch beginning with each of these, sorted longest first."""
    room = np.full(len(lengths), max_tokens if max_rows is None else max_rows)  # a row has a token at least
    if max_tokens is None:
        return room
    if packed:
        until = np.cumsum(lengths)
        fitting = np.searchsorted(until, until - lengths + max_tokens, side="right") - np.arange(len(lengths))
    else:
        fitting = max_tokens // np.maximum(1, lengths)
    return np.minimum(room, np.maximum(1, fitting))


def best_cuts(rows_U: np.ndarray, longest_U: np.ndarray, room_U: np.ndarray) -> list[tuple[int, int]]:
    """Cut units sorted by length so that padded tokens plus `TOKENS_PER_MICROBATCH` per microbatch are fewest.

    A microbatch costs its rows times its longest row. Dynamic programming from the end: the best cost of the units from
    u on is the minimum, over the end of the first microbatch, of its cost plus the best cost of the rest. A cut between
    two equal units must be tried only if the microbatch after it is full; if it is not, the unit before the cut can
    move over without raising the sum.

    Args:
        rows_U: (U,) number of rows of each unit.
        longest_U: (U,) tokens of each unit's longest row, in falling order.
        room_U: (U,) rows that fit into a microbatch that begins with this unit, not falling.

    Returns:
        First and last unit + 1 of each microbatch. A unit with more rows than fit is in a microbatch by itself.

    >>> best_cuts(np.array([1, 1, 1, 1]), np.array([900, 20, 10, 10]), np.array([4, 4, 4, 4]))
    [(0, 1), (1, 4)]
    """
    num_units = len(rows_U)
    numbers = np.arange(num_units)
    ends = np.concatenate(([0], np.cumsum(rows_U)))
    latest = np.maximum(numbers + 1, np.searchsorted(ends, ends[:-1] + room_U, side="right") - 1)
    if_full = np.clip(np.searchsorted(ends, ends[:-1] + room_U - rows_U, side="right"), numbers + 1, latest)
    alike = np.zeros(num_units, dtype=bool)
    alike[1:] = (rows_U[1:] == rows_U[:-1]) & (longest_U[1:] == longest_U[:-1])
    earliest = np.where(alike, if_full, numbers + 1)
    best = np.zeros(num_units + 1)
    end_of = np.empty(num_units, dtype=np.int64)
    for first, low, high, tokens in zip(
        range(num_units - 1, -1, -1),
        earliest[::-1].tolist(),
        latest[::-1].tolist(),
        longest_U[::-1].tolist(),
        strict=True,
    ):
        costs = best[low : high + 1] + (ends[low : high + 1] - ends[first]) * tokens
        place = int(costs[::-1].argmin())  # among equal costs the latest: the longest rows fill their microbatch
        end_of[first] = high - place
        best[first] = costs[-1 - place] + TOKENS_PER_MICROBATCH
    cuts, first = [], 0
    while first < num_units:
        cuts.append((first, int(end_of[first])))
        first = cuts[-1][1]
    return cuts


def each_unit(rows_U: np.ndarray, longest_U: np.ndarray, room_U: np.ndarray) -> list[tuple[int, int]]:
    """Cut as `best_cuts`, between all units: no microbatch gets rows of two units."""
    del longest_U, room_U
    return [(unit, unit + 1) for unit in range(len(rows_U))]


def full_cuts(rows_U: np.ndarray, longest_U: np.ndarray, room_U: np.ndarray) -> list[tuple[int, int]]:
    """Cut as `best_cuts` for rows without padding: each microbatch takes as many units as fit."""
    del longest_U
    ends = np.concatenate(([0], np.cumsum(rows_U)))
    latest = np.maximum(np.arange(len(rows_U)) + 1, np.searchsorted(ends, ends[:-1] + room_U, side="right") - 1)
    cuts, first = [], 0
    while first < len(rows_U):
        cuts.append((first, int(latest[first])))
        first = cuts[-1][1]
    return cuts


_Cut = Callable[[np.ndarray, np.ndarray, np.ndarray], list[tuple[int, int]]]


def _pieces(
    rows_of_unit: np.ndarray, lengths: np.ndarray, room: np.ndarray, cut: _Cut
) -> Iterator[tuple[int, int, bool]]:
    """Cut rows ordered by unit: return each microbatch's begin and end, and whether its unit continues.

    Args:
        rows_of_unit: (U,) number of rows of each unit.
        lengths: (num_rows,) tokens of each row; the longest of a unit comes first.
        room: (num_rows,) rows that fit into a microbatch that begins with this row, its longest.
        cut: divides the units over microbatches: `best_cuts`, `full_cuts` or `each_unit`.
    """
    ends = np.concatenate(([0], np.cumsum(rows_of_unit)))
    here = ends[:-1]
    for first, last in cut(rows_of_unit, lengths[here], room[here]):
        begin, end = int(ends[first]), int(ends[last])
        while end - begin > room[begin]:
            stop = begin + int(room[begin])
            yield begin, stop, True
            begin = stop
        yield begin, end, False

"""Divide a logical batch over processes and into microbatches that fit in memory.

Clipping is per unit, so the division changes nothing but speed. Drawn units are put in a secret random order and dealt
to the processes in turn (`deal`): each process gets the same number, and no unit's process depends on the length or the
content of another unit. Within a process units are sorted by length, and the cuts between microbatches are chosen for
all processes together, so that microbatches that run at the same time cost about the same. A
unit stays in one microbatch, unless it has more rows than fit: then it gets several microbatches for itself, all but
the last marked as continued. Every process gets the same number of microbatches. Where one has no rows, as in a step
without any unit, it runs a single padding row, whose loss has weight 0.

Where forward passes communicate (FSDP2, ZeRO-3), the processes run their first microbatches together, then their
second ones, and so on: each costs as much as the largest of them. The cuts are therefore chosen for all at once
(`joint_pieces`):

1. `best_cuts` cuts the units of every process at the same places. Each process has its units in falling order of
   length, and dynamic programming finds the places where the summed cost of the largest microbatches is least. The cost
   of the largest is the budget of the microbatches at this place.
2. Each process fills its microbatches up to these budgets. A process with shorter units gets ahead of the common
   places, and the step ends when the last process has no rows left. No microbatch gets more expensive.
3. Filling every microbatch as far as its bounds allow is cheaper where units have many and unequal numbers of rows:
   there, the common places fit the process with most rows, and leave room on the others. The cheaper way is used.

Rows without padding only fill their microbatches, since a full one wastes nothing. The same holds for more than
`MOST_PLACES` units on a process, which in order of length have hardly any padding: half a percent more than the best.

Every process computes all cuts from the lengths, but builds only its own pieces. With one process, the cuts of
step 1 are the result.

A `FetchThread` fetches and collates the next microbatch while the current one runs. It is used only where the data set
and the collator are known to share nothing with the model and the loss (`dpllm.training.trainer_setup.shares_nothing`),
or where the user declares it (``TrainingRows(fetch_ahead=True)``): two readers of one file might get the bytes of
another record, and a unit would be counted twice. Within a step, only this thread calls the data set and the collator,
one call after another.

Data sets and collators that draw from PyTorch's global generators, or that run a model, must not run concurrently with
a pass: dropout would take numbers from a seed that the data set has set, and activation checkpointing would not draw
the same mask for a layer again. `FetchThread.shares` records this.

Shape suffixes: B rows, R processes, U units of a process, N rows of all processes, K microbatches.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.config import ConfigError
from dpllm.data.labels import BOUNDARIES
from dpllm.data.single_rows import collator_of, reader_of
from dpllm.data.units import UnitIndex

TOKENS_PER_MICROBATCH = 1024
"""Cost of one more microbatch, in tokens of padding.

Each microbatch reads the weights for forward and backward and adds a gradient to a float32 sum, about 16 bytes per
parameter, while a token costs 6 operations per parameter: at the 100 operations per byte of a large GPU that equals
about 270 tokens. Python's launch time adds about a thousand tokens for a model of 10^9 parameters. Too
large a value leaves padding; too small a value makes microbatches that do not fill the device.
"""
MOST_PLACES = 8192
"""The most units of a process between which `best_cuts` chooses: 25 ms on one core."""

Piece = tuple[int, int, bool]
"""First and last row + 1 of a microbatch, and whether its unit continues in the next one."""


@dataclass(frozen=True)
class Bounds:
    """What fits in a microbatch.

    Attributes:
        max_rows: the largest number of rows; None: bounded by ``max_tokens`` only.
        max_tokens: the most tokens, padding included: rows times the longest. A longer row is a microbatch of one row.
        packed: whether rows have no padding; ``max_tokens`` then counts their own tokens.
        one_unit: whether all rows belong to one unit.
    """

    max_rows: int | None
    max_tokens: int | None
    packed: bool = False
    one_unit: bool = False

    def room(self, tokens_N: np.ndarray) -> np.ndarray:
        """Return (N,): how many rows fit in a microbatch that begins with each row, its longest; at least 1."""
        room = np.full(len(tokens_N), self.max_tokens if self.max_rows is None else self.max_rows)
        if self.max_tokens is None:
            return room  # a row has a token at least, so that this many rows always hold as many tokens
        if self.packed:
            until = np.cumsum(tokens_N)
            fitting = np.searchsorted(until, until - tokens_N + self.max_tokens, side="right") - np.arange(len(room))
        else:
            fitting = self.max_tokens // np.maximum(1, tokens_N)
        return np.minimum(room, np.maximum(1, fitting))


class Parts:
    """The rows of all processes in parts that no cut divides: a unit, or a piece of a unit with more rows than fit.

    Args:
        rows_U: number of rows of each unit, process after process, in falling order of the longest row.
        tokens_N: tokens of each row in the same order, the longest row of a unit first.
        first_R: (R + 1,) the first unit of each process, and the number of units.
        bounds: bounds of a microbatch.

    Attributes:
        edges: the first row of each part, and the number of rows.
        continues: whether the unit of each part continues in the next one.
        limit: for a microbatch that begins with each part, the part before which it must end: each piece of a large
            unit is a separate microbatch.
        of_unit: (number of units + 1,) the first part of each unit, and the number of parts.
        begin_R: (R,) the first part of each process.
        end_R: (R,) the last part + 1 of each process.
    """

    def __init__(self, rows_U: np.ndarray, tokens_N: np.ndarray, first_R: np.ndarray, bounds: Bounds) -> None:
        """Divide the units that have more rows than fit."""
        self.tokens_N, self.room_N = tokens_N, bounds.room(tokens_N)
        self.rows_U, self.first_R = rows_U, first_R
        starts = np.concatenate(([0], np.cumsum(rows_U)))
        large_U = rows_U > self.room_N[starts[:-1]]
        inner = [place for unit in np.flatnonzero(large_U) for place in self._inside(starts[unit], starts[unit + 1])]
        self.edges = np.sort(np.concatenate((starts, np.asarray(inner, dtype=np.int64))))
        self.continues = np.isin(self.edges[1:], inner)
        self.of_unit = np.searchsorted(self.edges, starts)
        self.begin_R, self.end_R = self.of_unit[first_R[:-1]], self.of_unit[first_R[1:]]
        numbers = np.arange(len(self.edges) - 1)
        alone = np.repeat(large_U | bounds.one_unit, np.diff(self.of_unit))
        following = np.where(alone, numbers, len(numbers))
        self.limit = np.where(alone, numbers + 1, np.minimum.accumulate(following[::-1])[::-1])
        self.limit = np.minimum(self.limit, np.repeat(self.end_R, self.end_R - self.begin_R))

    def _inside(self, begin: int, end: int) -> list[int]:
        """Return the rows at which a unit is divided: each piece has as many rows as fit."""
        places = []
        while end - begin > self.room_N[begin]:
            begin += int(self.room_N[begin])
            places.append(begin)
        return places

    def full(self, part: np.ndarray, budget: int | None = None) -> np.ndarray:
        """Return the part before which a microbatch that begins with each of these parts is full.

        Args:
            part: the first parts of some microbatches.
            budget: the largest product of rows and longest row; None: only the bounds count.
        """
        row = self.edges[part]
        allowed = self.room_N[row]
        if budget is not None:
            allowed = np.minimum(allowed, budget // np.maximum(1, self.tokens_N[row]))
        return np.minimum(np.searchsorted(self.edges, row + allowed, side="right") - 1, self.limit[part])

    def costs(self, places: np.ndarray) -> np.ndarray:
        """Return (K,): rows times the longest of each microbatch, the largest over the processes; at least the rows.

        Args:
            places: (K + 1, R) the parts at which each process is cut.
        """
        rows = self.edges[places]
        longest = np.maximum(1, self.tokens_N[np.minimum(rows[:-1], len(self.tokens_N) - 1)])
        return (np.diff(rows, axis=0) * longest).max(axis=1)


def joint_pieces(
    rows_U: np.ndarray, tokens_N: np.ndarray, first_R: np.ndarray, rank: int, bounds: Bounds
) -> list[Piece | None]:
    """Cut the rows of all processes, and return the microbatches of one of them.

    Guarantee: each row of the process is in one piece. The number of pieces is the same for every rank.

    Args:
        rows_U: number of rows of each unit, process after process, in falling order of the longest row.
        tokens_N: tokens of each row in the same order, the longest row of a unit first.
        first_R: (R + 1,) the first unit of each process, and the number of units.
        rank: the process.
        bounds: bounds of a microbatch.

    Returns:
        At least one; None is a microbatch in which this process has no row.

    >>> lengths = np.array([9, 1, 1, 5, 4, 4])  # two processes with three units each: 9 beside 5, 2 beside 8 tokens
    >>> joint_pieces(np.ones(6, int), lengths, np.array([0, 3, 6]), 1, Bounds(2, None))
    [(3, 4, False), (4, 6, False)]
    """
    if not len(tokens_N):
        return [None]
    parts = Parts(rows_U, tokens_N, first_R, bounds)
    places = _filled(parts)
    if not bounds.packed and not bounds.one_unit and int(np.diff(first_R).max()) <= MOST_PLACES:
        balanced = _within(parts, parts.costs(_common(parts)))
        if (
            parts.costs(balanced).sum() + TOKENS_PER_MICROBATCH * (len(balanced) - len(places))
            <= parts.costs(places).sum()
        ):
            places = balanced
    assert (places[-1] == parts.end_R).all(), "every row has its place"
    mine = places[:, rank].tolist()
    edges = parts.edges
    return [
        (int(edges[begin]), int(edges[end]), bool(parts.continues[end - 1])) if begin < end else None
        for begin, end in itertools.pairwise(mine)
    ]


def _filled(parts: Parts) -> np.ndarray:
    """Fill each microbatch as far as its bounds allow; return the places (K + 1, R) of the cuts."""
    end_of = parts.full(np.arange(len(parts.limit))).tolist()
    places: list[list[int]] = []
    for begin, last in zip(parts.begin_R.tolist(), parts.end_R.tolist(), strict=True):
        places.append([begin])
        while begin < last:
            begin = end_of[begin]
            places[-1].append(begin)
    most = max(map(len, places))
    return np.array([own + own[-1:] * (most - len(own)) for own in places]).T


def _within(parts: Parts, budgets: np.ndarray) -> np.ndarray:
    """Fill the microbatches up to the budgets (K,) of common cuts, in tokens; return as `_filled`.

    A process is never behind the common cuts, whose microbatches keep to the budgets. Where it is ahead and nothing
    fits, it waits with a row of padding, but not between the pieces of a unit.
    """
    places = [parts.begin_R]
    for budget in budgets.tolist():
        at = places[-1]
        under_way = at < parts.end_R
        if not under_way.any():
            break
        part = np.minimum(at, len(parts.limit) - 1)
        inside = (at > parts.begin_R) & parts.continues[part - 1]
        places.append(np.where(under_way, np.maximum(parts.full(part, budget), at + inside), at))
    return np.array(places)


def _common(parts: Parts) -> np.ndarray:
    """Cut the units of all processes at the same places; return as `_filled`."""
    first_R = parts.first_R
    units = first_R[:-1, None] + np.arange(np.diff(first_R).max())
    exists, units = units < first_R[1:, None], np.minimum(units, first_R[-1] - 1)
    row = parts.edges[parts.of_unit[units]]
    rows = np.where(exists, parts.rows_U[units], 0)
    longest, room = np.where(exists, parts.tokens_N[row], 0), np.where(exists, parts.room_N[row], len(parts.tokens_N))
    if (parts.rows_U == 1).all():  # the longest at each place represents all
        rows, longest, room = rows.max(axis=0)[None], longest.max(axis=0)[None], room.min(axis=0)[None]
    places = [parts.begin_R]
    for _, last in best_cuts(rows, longest, room):
        end = parts.of_unit[np.minimum(first_R[:-1] + last, first_R[1:])]
        while (places[-1] < end).any():  # once, unless a unit has several pieces
            places.append(np.minimum(parts.limit[np.minimum(places[-1], len(parts.limit) - 1)], end))
    return np.array(places)


def best_cuts(rows_RU: np.ndarray, longest_RU: np.ndarray, room_RU: np.ndarray) -> list[tuple[int, int]]:
    """Cut the units of all processes at the same places, so that the step costs least.

    A microbatch costs its rows times its longest row, the largest over the processes, and `TOKENS_PER_MICROBATCH`.
    Dynamic programming from the end: the best cost of the units from u on is the minimum, over the end of the first
    microbatch, of its cost plus the best cost of the rest. With one process, a cut between two equal units need be
    tried only if the microbatch after it is full; otherwise the unit before the cut can move over without raising
    the sum.

    Args:
        rows_RU: number of rows of each unit; 0 where a process has fewer units than others.
        longest_RU: tokens of each unit's longest row, in falling order.
        room_RU: rows that fit into a microbatch that begins with this unit, not falling.

    Returns:
        First and last unit + 1 of each microbatch. A unit with more rows than fit has its own microbatch.

    >>> one = np.array([[1, 1, 1, 1]])
    >>> best_cuts(one, np.array([[900, 20, 10, 10]]), 4 * one)
    [(0, 1), (1, 4)]
    """
    num_processes, num_units = rows_RU.shape
    numbers = np.arange(num_units)
    ends_RU = np.concatenate((np.zeros((num_processes, 1), dtype=np.int64), np.cumsum(rows_RU, axis=1)), axis=1)
    full = [
        np.searchsorted(ends, ends[:-1] + room, side="right") - 1 for ends, room in zip(ends_RU, room_RU, strict=True)
    ]
    latest = np.maximum(numbers + 1, np.min(full, axis=0)) if num_units else numbers
    earliest = numbers + 1
    if num_processes == 1:
        rows, longest, ends = rows_RU[0], longest_RU[0], ends_RU[0]
        if_full = np.searchsorted(ends, ends[:-1] + room_RU[0] - rows, side="right")
        alike = np.zeros(num_units, dtype=bool)
        alike[1:] = (rows[1:] == rows[:-1]) & (longest[1:] == longest[:-1])
        earliest = np.where(alike, np.clip(if_full, earliest, latest), earliest)
    best = np.zeros(num_units + 1)
    end_of = np.empty(num_units, dtype=np.int64)
    for first, low, high in zip(
        range(num_units - 1, -1, -1), earliest[::-1].tolist(), latest[::-1].tolist(), strict=True
    ):
        tokens = (ends_RU[:, low : high + 1] - ends_RU[:, first, None]) * longest_RU[:, first, None]
        costs = best[low : high + 1] + (tokens[0] if num_processes == 1 else tokens.max(axis=0))
        place = int(costs[::-1].argmin())  # among equal costs the last: the longest rows fill their microbatch
        end_of[first] = high - place
        best[first] = costs[-1 - place] + TOKENS_PER_MICROBATCH
    cuts, first = [], 0
    while first < num_units:
        cuts.append((first, int(end_of[first])))
        first = cuts[-1][1]
    return cuts


# ------------------------------------------------------------------ the pieces of a step, dealt to the processes


_WORD = 2**64 - 1
PADDING_UNIT = -1  # the unit of a row that belongs to none; its loss has weight 0


@dataclass(frozen=True, eq=False)
class RowsTaken:
    """The rows of a microbatch, each made separately, from which smaller microbatches can be made.

    Attributes:
        rows: inputs of B rows, unit after unit (`dpllm.data.single_rows.RowByRow.row`).
        lengths_B: (B,) tokens of each row.
        batch: combines the inputs of some rows.
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
            concatenated, and `cu_seq_lens_q` (B + 1,) contains their boundaries.
        unit_index: (B,) int64, each row's unit within this microbatch, 0..num_units-1; -1 for a padding row.
        num_units: number of units that end in this microbatch.
        continues: whether all rows belong to one unit that continues in the next microbatch.
        taken: the rows it was made from; None if it cannot be divided further.
        share: its part of this process's tokens in the step, padding included; 0 if unknown. Only for the screen.
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
        """Return two microbatches with the same rows, collated again: cut between units, or within the only unit.

        Guarantee: every row is in one of the two, the units are the same, and each unit ends in one of them; the unit
        of a microbatch that continues does so after the second.

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
        count: number of microbatches, at least one.
        made: returns an iterator that fetches and collates one after another.
    """

    def __init__(self, count: int, made: Callable[[], Iterator[Microbatch]]) -> None:
        """Store the arguments; nothing is fetched yet."""
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
        fetch: reads rows by number; called with one number at a time.
        collate: makes the model's inputs from rows; called with one row at a time.
        units: index of the rows of each unit.
        lengths: (num_rows,) tokens of every row of the data set.
        unit_ids: all units of this step, the same on every process; may be empty.
        max_rows: the largest number of rows of a microbatch. None: bounded by `max_tokens` only.
        rank: rank of this process, 0 <= rank < size.
        size: number of processes that share the units. Every process gets the same number of microbatches.
        max_tokens: the most tokens of a microbatch, padding included: rows times the longest. A longer row is a
            microbatch of one row.
        packed: whether the collator concatenates rows without padding; ``max_tokens`` then counts the rows' own tokens.
        key: key of the order in which units are dealt to the processes; the same on all processes, and secret.
        one_unit: whether a microbatch gets rows of one unit only (`dpllm.ghost.PerUnitClipper`).

    Raises:
        ValueError: a bound is missing or below 1.
        ConfigError: during the iteration, the collator did not return exactly one row for one row.
    """
    for name, bound in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name} is {bound}, but must be at least 1.")
    if max_rows is None and max_tokens is None:
        raise ValueError("max_rows and max_tokens are both None, but a microbatch needs a bound: set one.")
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size} processes, but 0 <= rank < size is required.")
    read, make = reader_of(fetch), collator_of(collate, packed)
    rows, position = units.rows_of(unit_ids)
    tokens = lengths[rows].astype(np.int64)  # products would overflow 8 bits
    tokens_U = np.zeros(len(unit_ids), dtype=np.int64)
    np.maximum.at(tokens_U, position, tokens)
    owner_U = deal(unit_ids, size, key)
    order_U = np.lexsort((-tokens_U, owner_U))  # longest first: memory peaks at once or never
    place_U = np.empty_like(order_U)
    place_U[order_U] = np.arange(len(unit_ids))
    unit = place_U[position]
    order = np.lexsort((-tokens, unit))
    rows, tokens, unit = rows[order], tokens[order], unit[order]
    first_R = np.searchsorted(owner_U[order_U], np.arange(size + 1))
    bounds = Bounds(max_rows, max_tokens, packed, one_unit)
    pieces = joint_pieces(np.bincount(unit, minlength=len(unit_ids)), tokens, first_R, rank, bounds)
    shares = _shares(tokens, pieces, packed)

    def made() -> Iterator[Microbatch]:
        for piece, share in zip(pieces, shares, strict=True):
            if piece is None:
                padding = make(read(np.asarray(units.rows[:1])))
                yield Microbatch(padding, torch.tensor([PADDING_UNIT]), num_units=0)
                continue
            start, stop, continues = piece
            here = unit[start:stop]
            num_units = 0 if continues else int(here[-1] - here[0]) + 1
            numbers = rows[start:stop]
            taken = RowsTaken([make.row(row) for row in read(numbers)], lengths[numbers], make.batch)
            yield taken.microbatch(here - here[0], num_units, continues, share)

    return StepBatch(len(pieces), made)


def deal(unit_ids: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the process of each unit: in the order of a keyed hash of the ids, each process in turn.

    Guarantee: the result depends only on the drawn ids, the key and the number of processes. It does not
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


def _shares(tokens: np.ndarray, pieces: Sequence[Piece | None], packed: bool) -> list[float]:
    """Return each microbatch's share of all tokens, padding included; each begins with its longest row."""
    own = [0 if one is None else _tokens(tokens[one[0] : one[1]], packed) for one in pieces]
    return [count / max(1, sum(own)) for count in own]


def _tokens(tokens: np.ndarray, packed: bool) -> int:
    """Return the tokens of a microbatch."""
    return int(tokens.sum()) if packed else len(tokens) * int(tokens[0])


def _scrambled(words: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit words."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


# ------------------------------------------------------------------------------------------------ fetching ahead


_Result = TypeVar("_Result")

PATIENCE = 5.0
"""Seconds that the end of a failed step waits for a fetch."""
_SHARED = (
    "The data set or the collator drew from PyTorch's global generators, or used a model's parameter, while a "
    "microbatch ran, so dropout may have drawn its masks from a seed that they set. The step is charged, and none of "
    "its results is released. Set TrainingRows(fetch_ahead=False), so that rows are read between passes"
)
_AT_EXIT = 30.0  # seconds that the end of the program waits for it: PyTorch aborts after Python has ended
_ONE_AT_A_TIME = threading.Lock()  # an abandoned fetch must not run concurrently with one of a later step


class FetchThread:
    """Runs functions one after another in its own thread, which starts with the first and ends with `close`.

    An exception of a function is raised where its result is requested. The thread is a daemon, so a data set that never
    returns does not keep the interpreter from ending.

    Args:
        device: device of the microbatches, current in the thread: pinned memory would otherwise be registered with the
            first GPU by every process of a machine.

    Attributes:
        shares: whether a function drew from PyTorch's global generators or used a parameter, as a model's pass does.

    >>> thread = FetchThread(torch.device("cpu"))
    >>> thread.submit(lambda: 2 + 3, alone=True).result()
    5
    >>> thread.close()
    """

    def __init__(self, device: torch.device) -> None:
        """Store the device; no thread starts yet."""
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.shares = False

    def submit(self, function: Callable[[], _Result], alone: bool) -> Future[_Result]:
        """Run a function after those submitted earlier, even to threads that were closed before they had ended.

        Args:
            function: runs in the thread.
            alone: whether nothing else runs meanwhile, since the caller waits for the result at once. Otherwise the
                result is a ConfigError if the function uses what a model's pass uses too.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dpllm fetch", daemon=True)
            self._thread.start()
        future: Future[_Result] = Future()
        self._tasks.put((future, function, alone))
        return future

    def close(self, patience: float | None = None) -> None:
        """Start no further function, and wait for the one that runs. Nothing can be submitted afterwards.

        Args:
            patience: the largest number of seconds to wait. None: until it returns.
        """
        self._closed = True
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(patience)
            if self._thread.is_alive():
                atexit.register(self._thread.join, _AT_EXIT)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (task := self._tasks.get()) is not None and not self._closed:
            future, function, alone = task
            try:
                with _ONE_AT_A_TIME, _Sharing() as found:
                    result = function()
                self.shares |= found.shares
                if found.shares and not alone:
                    raise ConfigError(_SHARED)
                future.set_result(result)
                del result
            except BaseException as error:
                future.set_exception(error)
            del task, future, function, found  # a result must not be kept until the next one


class _Sharing(TorchDispatchMode):
    """Records operations that a model's pass may disturb, or that may disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        of_all = kwargs.get("generator") in (None, torch.default_generator)
        draws = of_all and torch.Tag.nondeterministic_seeded in func.tags
        self.shares |= draws or any(isinstance(one, nn.Parameter) for one in (*args, *kwargs.values()))
        return func(*args, **kwargs)

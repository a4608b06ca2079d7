"""Cuts of a step's rows into microbatches, chosen jointly for all processes.

Where forward passes communicate (FSDP2, ZeRO-3), the processes run their first microbatches together, then their
second ones, and so on: each costs as much as the largest of them. The cuts are therefore chosen for all at once:

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

Shape suffixes: R processes, U units of a process, N rows of all processes, K microbatches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

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

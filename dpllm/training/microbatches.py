"""Divide a logical batch over processes and into microbatches that fit in memory.

Clipping is per unit, so the division changes nothing but speed. Drawn units are put in a secret random order and dealt
to the processes in turn (`deal`): each process gets the same number, and no unit's process depends on the length or the
content of another unit. Within a process units are sorted by length, and the cuts between microbatches are chosen for
all processes together, so that microbatches that run at the same time cost about the same (`dpllm.training.cuts`). A
unit stays in one microbatch, unless it has more rows than fit: then it gets several microbatches for itself, all but
the last marked as continued. Every process gets the same number of microbatches. Where one has no rows, as in a step
without any unit, it runs a single padding row, whose loss has weight 0.

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
from dpllm.training.cuts import Bounds, Piece, joint_pieces

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

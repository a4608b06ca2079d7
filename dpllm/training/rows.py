"""The rows of a run: their units, their lengths, and the functions that make a model's inputs of them.

Place in the flow: made by `dpllm.training.trainer` or a custom loop, read by `dpllm.training.run`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.data.units import UnitIndex
from dpllm.training.checks import agreement
from dpllm.training.microbatch_size import AUTO
from dpllm.training.microbatches import Microbatch, RowsTaken

LossOf = Callable[[Any, Mapping[str, Any]], Tensor]
"""Function from a module and a microbatch's inputs to one loss per row (B,), each computed only from its own row."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run; the same on every process.

    Attributes:
        units: index of the rows of each unit.
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows.
        collate: rows to the model's inputs, rows first.
        max_rows: the most rows of a microbatch. None: as many as ``max_tokens`` allows.
        max_tokens: the most tokens of a microbatch, padding included. None: as many as ``max_rows`` have. "auto": the
            largest number that fits on the GPU, found before the first step (`dpllm.training.microbatch_size`).
        packed: whether ``collate`` concatenates rows without padding (`dpllm.data.rows.PackedCollator`). The loss is
            then `dpllm.packed_sequence_loss`, and the model runs within `dpllm.models.packing.attention_by_row`.

    Raises:
        ConfigError: ``max_tokens`` is another value.
    """

    units: UnitIndex
    lengths: np.ndarray
    fetch: Callable[[np.ndarray], Sequence[Any]]
    collate: Callable[[list[Any]], Mapping[str, Any]]
    max_rows: int | None
    max_tokens: int | str | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        """Check the value of `max_tokens`, which may be a word."""
        if isinstance(self.max_tokens, str) and self.max_tokens != AUTO:
            raise ConfigError(f'max_tokens is {self.max_tokens!r}; give a whole number, "auto" or None')

    def longest(self, count: int) -> Microbatch:
        """Return a microbatch of `count` copies of the longest row, each unit with the most rows that a unit has."""
        rows = self.units.rows
        number = rows[self.lengths[rows].argmax()]
        unit_index = np.arange(count) // self.units.max_rows
        taken = RowsTaken(list(self.fetch(np.array([number]))) * count, self.lengths[[number] * count], self.collate)
        return taken.microbatch(unit_index, int(unit_index[-1]) + 1)

    @functools.cached_property
    def contents(self) -> str:
        """Return the hash of the rows (`dpllm.training.checks.agreement.contents`); it is computed once."""
        return agreement.contents(self.lengths, self.fetch)

    def facts(self) -> dict[str, Any]:
        """Return facts that must be identical on every process; otherwise processes would split different draws."""
        return agreement.rows(
            self.units,
            self.lengths,
            self.fetch,
            self.collate,
            {"max_rows": self.max_rows, "max_tokens": self.max_tokens, "packed": self.packed},
            self.contents,
        )

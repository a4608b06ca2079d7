"""The rows of a run: which units have them, how long they are, and how they become a model's inputs.

Place in the flow: made by `dpllm.training.trainer` or a loop of one's own, read by `dpllm.training.run`.
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
"""A module and a microbatch's inputs to one loss per row (B,), each from its own row alone."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run; the same on every process.

    Attributes:
        units: which rows each unit has.
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows.
        collate: rows to the model's inputs, rows first.
        max_rows: rows of a microbatch at most; None: as many as ``max_tokens`` allows.
        max_tokens: tokens of a microbatch at most, padding included; None: as many as ``max_rows`` have; "auto": as
            many as fit into the memory of the GPU, found before the first step (`dpllm.training.microbatch_size`).
        packed: whether ``collate`` lays rows end to end (`dpllm.data.rows.PackedCollator`): there is no padding then.
            The loss is `dpllm.packed_sequence_loss`, and the model runs within `dpllm.models.packing.attention_by_row`.

    Raises:
        ConfigError: ``max_tokens`` is none of these.
    """

    units: UnitIndex
    lengths: np.ndarray
    fetch: Callable[[np.ndarray], Sequence[Any]]
    collate: Callable[[list[Any]], Mapping[str, Any]]
    max_rows: int | None
    max_tokens: int | str | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        """Check what may be a word."""
        if isinstance(self.max_tokens, str) and self.max_tokens != AUTO:
            raise ConfigError(f'max_tokens is {self.max_tokens!r}; a whole number, "auto" or None is needed')

    def longest(self, count: int) -> Microbatch:
        """A microbatch of the longest row, taken so many times; as many of them to a unit as one has at most."""
        rows = self.units.rows
        number = rows[self.lengths[rows].argmax()]
        unit_index = np.arange(count) // self.units.max_rows
        taken = RowsTaken(list(self.fetch(np.array([number]))) * count, self.lengths[[number] * count], self.collate)
        return taken.microbatch(unit_index, int(unit_index[-1]) + 1)

    @functools.cached_property
    def contents(self) -> str:
        """Hash of the rows (`dpllm.training.checks.agreement.contents`); computed once."""
        return agreement.contents(self.lengths, self.fetch)

    def facts(self) -> dict[str, Any]:
        """Facts that must be identical on every process; otherwise processes would split different draws."""
        return agreement.rows(
            self.units,
            self.lengths,
            self.fetch,
            self.collate,
            {"max_rows": self.max_rows, "max_tokens": self.max_tokens, "packed": self.packed},
            self.contents,
        )

"""Describe the rows of a run: their units, their lengths, and the functions that make a model's inputs from them.

`dpllm.training.trainer` or a custom loop makes them; `dpllm.training.run` reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.data.records import DataError
from dpllm.data.single_rows import FETCH, RowByRow, RowReader, reader_of
from dpllm.data.units import ONE_ROW, UnitIndex
from dpllm.engines import model_inside
from dpllm.models.inputs import model_pad_id
from dpllm.models.tasks import task_of
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.checks import agreement
from dpllm.training.checks.randomness import refuse_own_generators
from dpllm.training.microbatches import FetchThread, Microbatch, RowsTaken
from dpllm.training.out_of_memory import AUTO

_TRIED = 16  # rows that are made before anything is charged
LossOf = Callable[[Any, Mapping[str, Any]], Tensor]
"""Function from a module and a microbatch's inputs to one loss per row (B,), each computed only from its own row."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run; the same on every process.

    Attributes:
        units: index of the rows of each unit.
        lengths: (num_rows,) tokens of every row.
        fetch: reads rows by number; called with an array of one number (`dpllm.data.single_rows.RowReader`).
        collate: makes the model's inputs, rows first; called with a list of one row, and dpllm pads and combines rows
            (`dpllm.data.single_rows.RowByRow`).
        max_rows: the largest number of rows of a microbatch. None: bounded by ``max_tokens`` only.
        max_tokens: the largest number of tokens of a microbatch, padding included. None: bounded by ``max_rows`` only.
            "auto": the largest number that fits on the GPU, found before the first step
            (`dpllm.training.out_of_memory`).
        packed: whether ``collate`` concatenates rows without padding (`dpllm.data.rows.PackedCollator`). The loss is
            then `dpllm.packed_sequence_loss`, and the model runs within `dpllm.models.inputs.attention_by_row`.
        pad_token_id: token that fills short rows. None: the padding token of the collator, its tokenizer, or the
            model's configuration; if none is known, 0.
        padding_side: "right" or "left". None: the side of the collator's tokenizer, or right.
        fetch_ahead: whether a thread calls ``fetch`` and ``collate`` for the next microbatch while one runs. Set it
            only if the two share no open file, connection, tokenizer or model with the loss, and draw or seed no random
            numbers: two concurrent readers of one file may get bytes of another record, which is then counted under two
            units. If false, both are called between the passes, in the thread of the loop.

    Raises:
        ConfigError: a field has the wrong type, there are fewer lengths than rows, or ``max_tokens`` is invalid.
    """

    units: UnitIndex
    lengths: np.ndarray
    fetch: Callable[[np.ndarray], Sequence[Any]]
    collate: Any
    max_rows: int | None
    max_tokens: int | str | None = None
    packed: bool = False
    fetch_ahead: bool = False
    pad_token_id: int | None = None
    padding_side: str | None = None

    def __post_init__(self) -> None:
        """Check the types of the fields, and the value of `max_tokens`, which may be a string."""
        if not isinstance(self.units, UnitIndex):
            raise ConfigError(
                f"units is of type {type(self.units).__name__}: pass a dpllm.data.units.UnitIndex, for instance "
                "UnitIndex.one_row_per_unit(num_rows)"
            )
        lengths = self.lengths
        if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            kind = f"an array of {lengths.dtype}, shape {lengths.shape}" if isinstance(lengths, np.ndarray) else ""
            raise ConfigError(
                f"lengths is {kind or f'of type {type(lengths).__name__}'}: pass a NumPy array with the number of "
                "tokens of every row, for instance np.array([len(row) for row in rows])"
            )
        if (least := int(np.max(self.units.rows, initial=-1)) + 1) > len(lengths):
            raise ConfigError(
                f"There are {len(lengths)} lengths, but units names {least} rows. Pass one length for each row"
            )
        for name, value in (("fetch", self.fetch), ("collate", self.collate)):
            if not callable(value):
                raise ConfigError(f"{name} is of type {type(value).__name__}: pass a function")
        object.__setattr__(self, "fetch", RowReader(reader_of(self.fetch).fetch, self.units))
        if not isinstance(self.collate, RowByRow):
            made = RowByRow(self.collate, self.pad_token_id, self.padding_side, packed=self.packed)
            object.__setattr__(self, "collate", made)
        if isinstance(self.max_tokens, str) and self.max_tokens != AUTO:
            raise ConfigError(f'max_tokens is {self.max_tokens!r}: pass a whole number, "auto" or None')

    def try_reading(self) -> None:
        """Make a batch of some rows as steps do, so that a mistake is found before anything is charged.

        These are the first row, a shortest, a longest, and up to 16 evenly spaced ones. Each is made separately, with
        ``fetch_ahead`` in a thread.

        Raises:
            ConfigError: ``fetch`` fails, or does not return a sequence with the row; only the thread that opened the
                data can read them; or ``collate`` does not make the inputs of one row, or rows that make a batch.
            DataError: dpllm's collator refuses a row, for instance because its label is text.
        """
        self.refuse_own_generators()
        numbers = np.asarray(self.units.rows)
        lengths = self.lengths[numbers]
        spaced = numbers[np.unique(np.linspace(0, len(numbers) - 1, _TRIED, dtype=np.int64))]
        tried = list(dict.fromkeys([numbers[0], numbers[lengths.argmin()], numbers[lengths.argmax()], *spaced]))
        try:
            self.fetch(np.asarray(tried[:1]))
        except (TypeError, IndexError, KeyError) as error:
            raise ConfigError(f"fetch failed for a row number ({type(error).__name__}: {error}). {FETCH}") from error
        thread, what = FetchThread(torch.device("cpu")), "fetch"

        def run(function: Callable[[], Any]) -> Any:
            return thread.submit(function, alone=True).result() if self.fetch_ahead else function()

        try:
            rows, what = run(lambda: self.fetch(np.asarray(tried))), "collate"
            made = run(lambda: list(map(self.collate.row, rows)))
            if self.max_rows != 1:
                run(lambda: self.collate.batch(made))
        except (ConfigError, DataError):
            raise
        except Exception as error:
            threads = (
                ", and with fetch_ahead it is called in its own thread. If the error mentions threads or an event "
                "loop, leave fetch_ahead out"
            )
            raise ConfigError(
                f"{what} failed for a single row ({type(error).__name__}: {error}). It must accept a single row"
                f"{threads if self.fetch_ahead else ''}"
            ) from error
        finally:
            thread.close()

    def check_plan(self, plan: PrivacyPlan) -> None:
        """Check that a plan was made for these rows.

        Raises:
            ConfigError: the plan's event would not describe the run.
        """
        units, bound = self.units, plan.max_rows_per_unit
        if units.num_units != plan.population:
            what = "rows to draw" if plan.sampling == "example" else "units"
            raise ConfigError(
                f"The plan is for {plan.population} {what}, but the data have {units.num_units}, so q would be "
                "different. Make the plan with make_plan from these data"
            )
        if plan.unit == "user" and units.made_of == ONE_ROW:
            raise ConfigError(
                f"The plan protects users (column {plan.unit_column!r}), but the index makes each row a unit "
                "(UnitIndex.one_row_per_unit), so ε would hold only for a single row. Make the index with "
                "UnitIndex.from_ids(ids, max_rows_per_unit, column=...) from the users' ids"
            )
        if units.rows_per_owner > plan.event.moves:
            raise ConfigError(
                f"Up to {units.rows_per_owner} rows of one user are drawn separately, but the plan accounts for "
                f"{plan.event.moves}. Make both with the same max_rows_per_unit and sampling"
            )
        if plan.sampling == "unit" and bound is not None and units.max_rows > bound:
            raise ConfigError(
                f"A user has {units.max_rows} rows, but the plan allows at most {bound}. Make the index with "
                "UnitIndex.from_ids(ids, max_rows_per_unit)"
            )

    def refuse_own_generators(self) -> None:
        """Check that neither the collator nor the data set has its own random generator, and that no module has a seed.

        Raises:
            ConfigError: one has; see `dpllm.training.checks.randomness.refuse_own_generators`.
        """
        source: Any = self.fetch
        source = getattr(source.fetch, "dataset", source.fetch)
        refuse_own_generators(torch.nn.Module(), [("The collator", self.collate.collate)], [("The data set", source)])

    def padded_for(self, model: Any) -> TrainingRows:
        """Return these rows, padded as the model expects: with its padding token, if the collator names none."""
        inside, own = model_inside(model), self.collate
        pad = model_pad_id(inside) if own.pad_token_id is None else own.pad_token_id
        collate = replace(own, pad_token_id=pad, predicts_next=task_of(inside) == "causal_lm")
        return self if collate == own else replace(self, collate=collate)

    def made(self, numbers: np.ndarray) -> list[Mapping[str, Any]]:
        """Return the inputs of rows, each made separately, for `RowByRow.batch`."""
        return [self.collate.row(row) for row in self.fetch(numbers)]

    def longest(self, count: int) -> Microbatch:
        """Return a microbatch of `count` copies of the longest row, each unit with the largest number of rows."""
        rows = self.units.rows
        number = rows[self.lengths[rows].argmax()]
        unit_index = np.arange(count) // self.units.max_rows
        taken = RowsTaken(self.made(np.array([number])) * count, self.lengths[[number] * count], self.collate.batch)
        return taken.microbatch(unit_index, int(unit_index[-1]) + 1)

    @functools.cached_property
    def contents(self) -> str:
        """Return the hash of the rows (`dpllm.training.checks.agreement.contents`); it is computed once."""
        return agreement.contents(self.lengths, self.fetch)

    @functools.cached_property
    def other_columns(self) -> int | None:
        """Return the number of the first row whose columns differ from those of row 0; None: all rows agree.

        Rows of a table (`datasets.Dataset`) always agree; of larger data, evenly spaced rows are read, as
        for `contents`.
        """

        def columns(row: Any) -> frozenset[Any] | None:
            return frozenset(row) if isinstance(row, Mapping) else None

        return agreement.first_other(self.lengths, self.fetch, columns)

    def first_with_other_counts(self, tokens: Sequence[int]) -> int | None:
        """Return the number of the first row with a different count of these tokens than row 0; None: there is none."""

        def count(row: Any) -> int:
            return int(np.isin(row.get("input_ids", ()), tokens).sum()) if isinstance(row, Mapping) else 0

        return agreement.first_other(self.lengths, self.fetch, count)

    def facts(self) -> dict[str, Any]:
        """Return facts that must be identical on every process; otherwise processes would split different draws."""
        return {
            "the number of units": self.units.num_units,
            "the number of rows": len(self.lengths),
            "the rows' lengths and units": agreement.order(self.units, self.lengths),
            "the bound max_rows of a microbatch": self.max_rows,
            "the bound max_tokens of a microbatch": self.max_tokens,
            "the bound packed of a microbatch": self.packed,
            "the collator": agreement.described(self.collate),
            "the rows' contents or their order": self.contents[:12],
            "the rows as the collator leaves them": agreement.collated(len(self.lengths), self.fetch, self.collate),
        }

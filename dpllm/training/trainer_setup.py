"""Prepare a Trainer's private training: check and fix guarantee, data and plan before training.

The constructor of `dpllm.DPTrainer` calls `agreed_arguments` and `prepare`; its ``train()`` calls `refuse_changed_rows`
and `open_ledger`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainingArguments

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.examples import PairCollator
from dpllm.data.lengths import Limits, row_lengths
from dpllm.data.records import contents_of
from dpllm.data.rows import PackedCollator, unit_index_of
from dpllm.data.single_rows import StoredRows
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.ghost import NormMethod
from dpllm.mechanism.averages import Average
from dpllm.mechanism.sampling import seeded_rng
from dpllm.models.inputs import default_collator, refuse_other_padding, refuse_padding_outside, row_by_row
from dpllm.models.tasks import task_of
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.run_folder import is_used
from dpllm.training.argument_table import Argument
from dpllm.training.arguments import checked_arguments, plan_for
from dpllm.training.averaging import refuse_other_average
from dpllm.training.checks import agreement
from dpllm.training.corrected_adamw import refuse_other_second_moment, words_for
from dpllm.training.ledger_notes import note_data, note_units
from dpllm.training.preflight import require_positions
from dpllm.training.read_rows import (
    columns_for,
    note_unlearned_end,
    refuse_moved,
    refuse_replaced,
    refuse_tables,
    refuse_unreadable,
)
from dpllm.training.rows import TrainingRows
from dpllm.training.screen import Batch
from dpllm.training.shared_ledger import SharedLedger


def agreed_arguments(
    args: TrainingArguments,
    own_optimizer: bool,
    table: Mapping[str, Argument],
    average: Average | None,
    norm_method: NormMethod | None,
) -> TrainingArguments:
    """Check the options before any data are read; return a copy for private training. On all processes together.

    Args:
        args: arguments of the Trainer; they are not changed.
        own_optimizer: whether the caller passes an optimizer.
        table: the options of ``args`` that the trainer supports.
        average: the average of the weights that is released.
        norm_method: as for `dpllm.training.attached.RunOptions`.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue.
        DisagreementError: the processes differ.
    """
    processes = Processes()
    private = processes.together(lambda: checked_arguments(args, own_optimizer, table))
    own = {"train.average": repr(average), "norm_method": repr(norm_method)}
    processes.agree({**agreement.software(), **agreement.training(args), **own})
    return private


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Guarantee, data and plan of a Trainer, as plain data; the same on every process.

    Attributes:
        privacy: the privacy guarantee.
        processes: the processes, which have compared options, data and plan.
        arguments: the copy of the Trainer's arguments for private training.
        dataset: the private rows.
        units: the rows of each unit, also if rows are drawn separately.
        plan: the constants.
        rows: the rows as a run reads them.
        collate: makes inputs from rows, as passed, for evaluation; ``rows`` calls it with one row at a time, or packs.
        average: the average of the weights that is released. None: the weights after the last step are released.
    """

    privacy: PrivacyConfig
    processes: Processes
    arguments: TrainingArguments
    dataset: Any
    units: UnitIndex
    plan: PrivacyPlan
    rows: TrainingRows
    collate: Any
    average: Average | None


def prepare(
    model: nn.Module,
    args: TrainingArguments,
    privacy: PrivacyConfig,
    dataset: Any,
    *,
    tokenizer: Any,
    collator: Callable[[list[Any]], Mapping[str, Any]] | None,
    max_tokens: int | str | None,
    pack_rows: bool,
    own_optimizer: bool,
    average: Average | None,
) -> Prepared:
    """Read the data and compute the plan, before any charge. Called by all processes together.

    Args:
        model: model to train.
        args: as `agreed_arguments` returns them.
        privacy: the privacy guarantee.
        dataset: the private rows.
        tokenizer: for padding.
        collator: makes inputs from rows. None: the default, which pads.
        max_tokens: the largest number of tokens of a microbatch, or "auto". None: the number of rows in ``args``.
        pack_rows: whether the rows of a microbatch are concatenated without padding.
        own_optimizer: whether the caller passes an optimizer.
        average: the average of the weights that is released. None: the weights after the last step are released.

    Raises:
        ConfigError, DataError, ValueError: an option or a row would make the guarantee untrue.
        DisagreementError: the processes differ.
    """
    processes = Processes()
    refuse_unreadable(dataset)
    refuse_tables(dataset)
    units = unit_index_of(dataset, privacy, _draw_of_rows(processes, privacy))
    drawn = units.each_row() if privacy.sampling == "example" else units
    processes.agree(
        {
            "the number of units": units.num_units,
            "the number of rows": len(dataset),
            **{f"privacy.{name}": repr(value) for name, value in vars(privacy).items()},
            "train.max_steps, train.num_train_epochs": (args.max_steps, args.num_train_epochs),
        }
    )
    plan = plan_for(args, privacy, units, own_optimizer, average)
    args.max_steps = plan.num_steps
    collate: Any = collator or default_collator(tokenizer, model, task_of(model))
    refuse_other_padding(model, tokenizer, collate)
    note_unlearned_end(collate)
    single = row_by_row(collate, tokenizer, model, columns_for(dataset, model, collate, args))
    pairs, limits = isinstance(collate, PairCollator), Limits.of(model)
    lengths = collate.row_lengths(dataset, limits) if pairs else row_lengths(dataset, task_of(model), limits)
    longest = int(lengths.max()) // (PairCollator.SEQUENCES if pairs else 1)
    require_positions(model, longest, "the longest row has")
    if not pack_rows:
        refuse_padding_outside(getattr(single, "pad_token_id", None), limits.tokens)
    rows = TrainingRows(
        units=drawn,
        lengths=lengths,
        fetch=StoredRows(dataset),
        collate=PackedCollator() if pack_rows else single,
        max_rows=args.per_device_train_batch_size if max_tokens is None else None,
        max_tokens=max_tokens,
        packed=pack_rows,
    )
    return Prepared(
        privacy=privacy,
        processes=processes,
        arguments=args,
        dataset=dataset,
        units=units,
        plan=plan,
        rows=rows,
        collate=collate,
        average=average,
    )


def expected_batch(prepared: Prepared) -> Batch:
    """Return the expected size of a step's batch, for the throughput on the screen."""
    rows, size = prepared.rows, prepared.plan.expected_batch_size
    return Batch(size, size * float(rows.lengths[np.asarray(rows.units.rows)].sum()) / rows.units.num_units)


def refuse_changed_rows(prepared: Prepared, dataset: Any) -> None:
    """Check that the Trainer still has the rows for which the plan was made. Called by all processes together.

    Raises:
        ConfigError: ``train_dataset`` was set to another object, or its rows were reordered, removed or extended.
    """
    refuse_replaced(dataset, prepared.dataset)
    prepared.processes.together(lambda: refuse_moved(dataset, len(prepared.rows.lengths), prepared.units))


def open_ledger(prepared: Prepared, folder: Path, resume: bool, public: Sequence[str], optimizer: Any) -> SharedLedger:
    """Continue the ledger of a folder, or begin one and charge the budget. Called by all processes together.

    Args:
        prepared: guarantee, data and plan.
        folder: the run's output folder.
        resume: whether the folder's ledger is continued.
        public: earlier training on public data, one line each.
        optimizer: the caller's own; None: the one that the arguments describe.

    Raises:
        ConfigError: the folder holds a run that is not continued.
        ConfigError: the continued run releases a different average of its weights, or its optimizer has
            a different second moment.
        ConfigError, DataError: a row cannot be read or collated; see `TrainingRows.try_reading`.
        LedgerError: the ledger belongs to a different plan or different rows.
        BudgetError: the run would exceed the budget.
    """
    plan, rows, processes = prepared.plan, prepared.rows, prepared.processes
    path, budget = folder / LEDGER_FILE, prepared.privacy.budget_file
    if resume:
        words = None if prepared.average is None else prepared.average.words(plan.num_steps)
        moment = words_for(prepared.arguments, optimizer)
        processes.from_main(lambda: refuse_other_average(folder, words))
        processes.from_main(lambda: refuse_other_second_moment(folder, moment))
        processes.together(rows.try_reading)
        return SharedLedger.open(path, plan, processes, budget, rows.contents, public)
    if processes.from_main(lambda: is_used(path)):
        raise ConfigError(
            f"{folder} already holds a private run ({LEDGER_FILE}). Its record is evidence for the model in the folder "
            f"and is not overwritten: set "
            "train.output_dir to another folder, or resume from its checkpoint."
        )
    processes.together(rows.try_reading)
    ledger = SharedLedger.create(path, plan, processes, public, budget)
    note_data(ledger, prepared.dataset, prepared.units, prepared.privacy)
    note_units(ledger, prepared.units, rows.lengths, prepared.dataset)
    ledger.remember_rows(rows.contents)
    if (contents := contents_of(prepared.dataset)) is not None:
        ledger.remember_records(contents)
    return ledger


def _draw_of_rows(processes: Processes, privacy: PrivacyConfig) -> np.random.Generator:
    """Return the generator that draws the rows to keep of a user: secret, and the same on every process."""
    entropy = processes.from_main(lambda: int.from_bytes(secrets.token_bytes(32), "little"))
    return seeded_rng(entropy if privacy.seed is None else privacy.seed)

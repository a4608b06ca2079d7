"""The preparation of a Trainer's private training: guarantee, data and plan are checked and fixed before training.

Place in the flow: made by `dpllm.DPTrainer` with its arguments; it opens the ledger and makes the run of each
``train()`` (`dpllm.training.trainer_run`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import TrainingArguments

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.lengths import Limits, row_lengths
from dpllm.data.preferences import PairCollator
from dpllm.data.records import contents_of
from dpllm.data.rows import PackedCollator, unit_index_of
from dpllm.data.single_rows import StoredRows
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.ghost import NormMethod
from dpllm.mechanism.averages import Average
from dpllm.mechanism.sampling import seeded_rng
from dpllm.models.inputs import default_collator, refuse_other_padding, refuse_padding_outside, row_by_row
from dpllm.models.starting_point import takes_metrics
from dpllm.models.tasks import task_of
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.unfinished import is_used
from dpllm.training.argument_table import Argument
from dpllm.training.arguments import checked_arguments, plan_for
from dpllm.training.attached import RunOptions
from dpllm.training.averaging import Averaging, refuse_other_average
from dpllm.training.checks import agreement
from dpllm.training.choose_clipper import clipper_for
from dpllm.training.corrected_adamw import refuse_other_second_moment, require_asked, words_for
from dpllm.training.ledger_notes import note_data, note_units
from dpllm.training.preflight import require_positions
from dpllm.training.read_rows import (
    columns_for,
    note_unlearned_end,
    refuse_moved,
    refuse_replaced,
    refuse_tables,
    refuse_unreadable,
    shares_nothing,
)
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.run import PrivateRun
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
        table: the options of ``args`` that the trainer knows.
        average: the average of the weights that is released.
        norm_method: as for `PrivateRun.attach`.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue.
        DisagreementError: the processes differ.
    """
    processes = Processes()
    private = processes.together(lambda: checked_arguments(args, own_optimizer, table))
    own = {"train.average": repr(average), "norm_method": repr(norm_method)}
    processes.agree({**agreement.software(), **agreement.training(args), **own})
    return private


@dataclass(frozen=True)
class Prepared:
    """Guarantee, data and plan of a Trainer; the same on every process.

    Attributes:
        privacy: the privacy guarantee.
        processes: the processes, which have compared options, data and plan.
        arguments: the copy of the Trainer's arguments for private training.
        dataset: the private rows.
        units: the rows of each unit, also if rows are drawn separately.
        plan: the constants.
        rows: the rows as a run reads them.
        collate: rows to inputs, as given, for evaluation; ``rows`` calls it with one row at a time, or packs.
        norm_method: as for `PrivateRun.attach`.
        start_is_independent: as for `PrivateRun.attach`.
        noise_memory: as for `PrivateRun`.
        average: the average of the weights that is released. None: those after the last step are.
        compile: as for `PrivateRun.attach`.
    """

    privacy: PrivacyConfig
    processes: Processes
    arguments: TrainingArguments
    dataset: Any
    units: UnitIndex
    plan: PrivacyPlan
    rows: TrainingRows
    collate: Any
    norm_method: NormMethod | None
    start_is_independent: bool
    noise_memory: str
    average: Average | None
    compile: Mapping[str, Any] | None

    @classmethod
    def of(
        cls,
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
        norm_method: NormMethod | None,
        start_is_independent: bool,
        noise_memory: str,
        average: Average | None = None,
        compile: Mapping[str, Any] | None = None,
    ) -> Prepared:
        """Read the data and compute the plan. Called by all processes together.

        Args:
            model: to train.
            args: as `agreed_arguments` returns them.
            privacy: the privacy guarantee.
            dataset: the private rows.
            tokenizer: for padding.
            collator: rows to inputs. None: the default, which pads.
            max_tokens: the most tokens of a microbatch, or "auto". None: the number of rows in ``args``.
            pack_rows: whether the rows of a microbatch are concatenated without padding.
            own_optimizer: whether the caller passes an optimizer.
            norm_method: as for `PrivateRun.attach`.
            start_is_independent: as for `PrivateRun.attach`.
            noise_memory: as for `PrivateRun`.
            average: the average of the weights that is released.
            compile: as for `PrivateRun.attach`.

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
                "the privacy section": repr(privacy),
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
        return cls(
            privacy=privacy,
            processes=processes,
            arguments=args,
            dataset=dataset,
            units=units,
            plan=plan,
            rows=rows,
            collate=collate,
            norm_method=norm_method,
            start_is_independent=start_is_independent,
            noise_memory=noise_memory,
            average=average,
            compile=compile,
        )

    def refuse_replaced(self, dataset: Any) -> None:
        """Check that the Trainer still has the rows with which the plan was made. Called by all processes together.

        Raises:
            ConfigError: ``train_dataset`` was set to another object, or its rows were moved, left out or extended.
        """
        refuse_replaced(dataset, self.dataset)
        self.processes.together(lambda: refuse_moved(dataset, len(self.rows.lengths), self.units))

    def refuse_unclippable(self, model: nn.Module) -> None:
        """Check that every trainable parameter can be clipped, before anything is charged or written.

        Raises:
            GhostError: a part of the model cannot be clipped exactly.
        """
        clipper_for(self.privacy.gradients, model, self.plan.mechanism.clipping, self.norm_method).remove()

    def open_ledger(self, folder: Path, resume: bool, public: Sequence[str], optimizer: Any = None) -> SharedLedger:
        """Continue the ledger of a folder, or begin one and charge the budget. Called by all processes together.

        Args:
            folder: the run's output folder.
            resume: whether the folder's ledger is continued.
            public: earlier training on public data, one line each.
            optimizer: the caller's own; None: the one that the arguments describe.

        Raises:
            ConfigError: the folder holds a run that is not continued.
            ConfigError: the run that is continued releases another average of its weights, or its optimizer has
                another second moment.
            ConfigError, DataError: a row cannot be read or collated; see `TrainingRows.try_reading`.
            LedgerError: the ledger is of another plan or of other rows.
            BudgetError: the run would exceed the budget.
        """
        path, budget = folder / LEDGER_FILE, self.privacy.budget_file
        if resume:
            words = None if self.average is None else self.average.words(self.plan.num_steps)
            moment = words_for(self.arguments, optimizer)
            self.processes.from_main(lambda: refuse_other_average(folder, words))
            self.processes.from_main(lambda: refuse_other_second_moment(folder, moment))
            self.processes.together(self.rows.try_reading)
            return SharedLedger.open(path, self.plan, self.processes, budget, self.rows.contents, public)
        if self.processes.from_main(lambda: is_used(path)):
            raise ConfigError(
                f"{folder} already holds a private run ({LEDGER_FILE}). Its record is evidence for the model beside "
                f"it and is not overwritten: set "
                "train.output_dir to another folder, or resume from its checkpoint."
            )
        self.processes.together(self.rows.try_reading)
        ledger = SharedLedger.create(path, self.plan, self.processes, public, budget)
        note_data(ledger, self.dataset, self.units, self.privacy)
        note_units(ledger, self.units, self.rows.lengths, self.dataset)
        ledger.remember_rows(self.rows.contents)
        if (contents := contents_of(self.dataset)) is not None:
            ledger.remember_records(contents)
        return ledger

    def run(self, ledger: SharedLedger) -> PrivateRun:
        """Make the run that charges this ledger. Called by all processes together."""
        ahead = shares_nothing(self.dataset, self.collate)
        rows = replace(self.rows, fetch_ahead=ahead)
        return PrivateRun(self.plan, rows, ledger, self.privacy.seed, self.noise_memory)

    def expected_batch(self) -> Batch:
        """Return the expected size of a step's batch, for the throughput on the screen."""
        units, size = self.rows.units, self.plan.expected_batch_size
        return Batch(size, size * float(self.rows.lengths[np.asarray(units.rows)].sum()) / units.num_units)

    def averaging(self) -> Averaging | None:
        """Return an empty average for a run."""
        return None if self.average is None else Averaging(self.average, self.plan.num_steps)

    def attach(
        self,
        run: PrivateRun,
        model: Any,
        optimizer: Any,
        averaging: Averaging | None,
        loss_of: LossOf,
        lr_scheduler: Any = None,
    ) -> None:
        """Hook a model that the Trainer has distributed; see `PrivateRun.attach`.

        A scheduler that follows public evaluations has no rates that are known before the training.

        Raises:
            ConfigError: the arguments ask for another optimizer.
        """
        require_asked(self.arguments, optimizer)
        options = RunOptions(
            norm_method=self.norm_method,
            start_is_independent=self.start_is_independent,
            gradients=self.privacy.gradients,
            compile=self.compile,
        )
        steps = None if takes_metrics(lr_scheduler) else lr_scheduler
        run.attach_with(options, model, optimizer, averaging, loss_of, steps)


def _draw_of_rows(processes: Processes, privacy: PrivacyConfig) -> np.random.Generator:
    """Return the generator that draws the rows a user keeps: secret, and the same on every process."""
    entropy = processes.from_main(lambda: int.from_bytes(secrets.token_bytes(32), "little"))
    return seeded_rng(entropy if privacy.seed is None else privacy.seed)

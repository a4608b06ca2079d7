"""Prepare a Trainer's private training: check and fix guarantee, data and plan before training.

The constructor of `dpllm.DPTrainer` calls `agreed_arguments` and `prepare`; its ``train()`` calls `refuse_changed_rows`
and `open_ledger`.
"""

from __future__ import annotations

import inspect
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.examples import PairCollator
from dpllm.data.lengths import Limits, row_lengths
from dpllm.data.records import contents_of
from dpllm.data.rows import CLASS_AS_TEXT, DataError, PackedCollator, column_of, unit_index_of
from dpllm.data.single_rows import StoredRows, fetch_rows
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
from dpllm.training.rows import TrainingRows
from dpllm.training.screen import Batch
from dpllm.training.shared_ledger import SharedLedger

logger = logging.get_logger(__name__)

_COLLATED = ("label", "label_ids", "labels", "special_tokens_mask", "offset_mapping")  # by transformers' collators


def columns_for(dataset: Any, model: Any, collate: Any, args: Any) -> frozenset[str] | None:
    """Return the columns that a collator receives, or None for all.

    A collator of transformers makes a tensor of every column and fails on text, such as the user's id. As in its
    ``Trainer``, it receives the columns that the model takes, unless ``remove_unused_columns`` is false. Any other
    collator receives all columns.

    Args:
        dataset: data set of the run.
        model: the model to train.
        collate: the collator of the rows.
        args: arguments of the training.

    Raises:
        DataError: such a collator would receive a class as text.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    taken = {*inspect.signature(inner.forward).parameters, *_COLLATED, *(args.label_names or ())}
    maker = (getattr(collate, "__module__", None) or type(collate).__module__).partition(".")[0]
    if maker == "transformers":
        _refuse_text_labels(dataset)
    if not args.remove_unused_columns or maker != "transformers" or "input_ids" not in taken:
        return None
    return frozenset(taken)


_PADDING = (DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def note_unlearned_end(collate: Any) -> None:
    """Warn that a collator removes the end of each text from the loss, because it is also the padding token."""
    tokenizer: Any = getattr(collate, "tokenizer", None)
    end = getattr(tokenizer, "eos_token_id", None)
    if (
        isinstance(collate, DataCollatorForLanguageModeling)
        and not collate.mlm
        and end is not None
        and end == tokenizer.pad_token_id
    ):
        logger.warning_once(
            "DataCollatorForLanguageModeling leaves padding out of the loss, but this tokenizer pads with the "
            "end-of-text token, so the model does not learn to stop. Leave data_collator out, or give the tokenizer "
            "another pad_token."
        )


def shares_nothing(dataset: Any, collate: Any) -> bool:
    """Return whether reading and collating rows shares no file, tokenizer, generator or model with a loss.

    True for a `datasets.Dataset` of numbers and text without a transform, padded by a collator of dpllm or one of
    three collators of transformers. Functions and classes of the user, images and recordings, which are decoded from
    files, and collators that tokenize may use what the loss uses, and then must not run concurrently with it.
    """
    if type(dataset) is not datasets.Dataset or dataset.format["type"] == "custom":
        return False
    kinds = {type(feature) for feature in tree_leaves(list(map(_inner, dataset.features.values())))}
    own = type(collate).__module__.partition(".")[0] == "dpllm"
    return kinds <= {datasets.Value, datasets.ClassLabel} and (own or type(collate) in _PADDING)


def _inner(feature: Any) -> Any:
    """Return the kinds of values within a column, in lists and dictionaries."""
    if isinstance(feature, dict):
        return list(map(_inner, feature.values()))
    if isinstance(feature, list):
        return list(map(_inner, feature))
    return _inner(feature.feature) if hasattr(feature, "feature") else feature


def _refuse_text_labels(dataset: Any) -> None:
    """Check that the class of row 0 is a number; a column of a `datasets.Dataset` has one type.

    Raises:
        DataError: a class is text.
    """
    row = fetch_rows(dataset, np.arange(1))[0] if len(dataset) else {}
    for name in {"label", "label_ids", "labels"} & set(row.keys()):
        value = row[name]
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str | bytes):
            raise DataError(CLASS_AS_TEXT.format(name=name))


def refuse_tables(dataset: Any) -> None:
    """Check that the rows of a `datasets.Dataset` are returned as dictionaries.

    Raises:
        ConfigError: its format returns tables.
    """
    form = getattr(dataset, "format", None)
    if isinstance(form, Mapping) and form.get("type") in ("pandas", "polars", "arrow"):
        raise ConfigError(
            f"train_dataset has the format {form['type']!r}, whose rows are not dictionaries: pass "
            "train_dataset.with_format(None)"
        )


def refuse_unreadable(dataset: Any, words: str = "train_dataset") -> None:
    """Check that rows can be read by their numbers, and that they are dictionaries.

    Args:
        dataset: the rows.
        words: name of the data set, for messages.

    Raises:
        ConfigError: the data set is a stream or missing, or its rows have the wrong type.
    """
    if dataset is None:
        raise ConfigError(f"{words} is missing: pass rows with input_ids, or with texts and a tokenizer")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"{words} is of type {type(dataset).__name__}, whose rows cannot be read by number. ε assumes "
            "steps that draw from all N units at random, so N must be known and every row within reach, but a stream "
            "yields its rows in its own order. Load the data without streaming, or store them: "
            "datasets.Dataset.from_list(list(stream)), or .from_generator(...) if they do not fit in memory"
        )
    if hasattr(dataset, "iloc"):
        raise ConfigError(
            f"{words} is of type {type(dataset).__name__}, a table whose rows cannot be read by number: pass "
            "datasets.Dataset.from_pandas(table, preserve_index=False)"
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"{words} is of type {type(dataset).__name__}, with the keys {', '.join(map(str, dataset))}, not "
            "a list of rows: pass one of its splits (data['train']), or make rows of its columns "
            "(datasets.Dataset.from_dict)"
        )
    row = dataset[0] if not hasattr(dataset, "column_names") and len(dataset) else {}
    if isinstance(row, str):
        raise ConfigError(
            f"Row 0 of {words} is a string, but a row is a dictionary: pass [{{'text': text}} for text in texts], and "
            "processing_class, the tokenizer"
        )
    if not isinstance(row, Mapping) and not hasattr(row, "keys"):
        raise ConfigError(
            f"Row 0 of {words} is of type {type(row).__name__}. Pass rows that are dictionaries with input_ids, "
            "and with labels if these differ from the input"
        )


def refuse_ignored(trainer: Trainer) -> None:
    """Check that a subclass overrides no method that private steps do not call, or whose result they cannot use.

    Raises:
        ConfigError: it overrides ``compute_loss`` or chooses the rows of the steps.
    """
    for kind in itertools.takewhile(lambda one: not one.__module__.startswith("dpllm."), type(trainer).__mro__):
        if chosen := [name for name in ("get_train_dataloader", "_get_train_sampler") if name in vars(kind)]:
            raise ConfigError(
                f"{kind.__name__} overrides {chosen[0]}, but the plan's sampler draws the units of a private step, and "
                "ε holds only for it. Remove the override; to weight rows, multiply their losses in "
                "compute_loss_func by weights that depend only on the row itself"
            )
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise ConfigError(
            f"{type(trainer).__name__} overrides compute_loss, which returns one loss for the whole batch, but private "
            "steps need one loss per row, so the override would be ignored. Pass compute_loss_func=(outputs, labels) "
            "-> (B,), which computes each row's loss from that row only"
        )


def refuse_moved(dataset: Any, num_rows: int, units: UnitIndex) -> None:
    """Check that a data set still has as many rows as before, each belonging to the same unit.

    Args:
        dataset: data set of the run; a list may have been shuffled, sorted, filtered or extended in place.
        num_rows: its number of rows when the units were made.
        units: units made from it.

    Raises:
        ConfigError: it has more or fewer rows, or a row belongs to a different unit.
    """
    if len(dataset) != num_rows:
        raise ConfigError(
            f"train_dataset has {len(dataset)} rows, but had {num_rows} when the DPTrainer was made: the rows were "
            "filtered or extended since, so the plan's units do not match. Make a new DPTrainer after the last change"
        )
    if units.ids is not None and units.ids.column is not None:
        units.refuse_moved(np.arange(num_rows), column_of(dataset, units.ids.column))


def refuse_replaced(now: Any, given: Any) -> None:
    """Check that a trainer still has the data set for which its plan was made.

    Raises:
        ConfigError: ``train_dataset`` was set to another object.
    """
    if now is not given:
        raise ConfigError(
            "train_dataset was replaced after the DPTrainer was made, but the plan's units and lengths are those of "
            f"the first data set ({len(given)} rows). Make a new DPTrainer for the new data set"
        )


# ---------------------------------------------------------------------------------------- the rows of the caller


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

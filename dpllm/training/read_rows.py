"""Refuse data sets, collators and overrides that a private step cannot use, and choose columns for collators.

This happens before the rows of a Trainer are read (`dpllm.data.single_rows`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Trainer,
)
from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.data.rows import CLASS_AS_TEXT, DataError, column_of
from dpllm.data.single_rows import fetch_rows
from dpllm.data.units import UnitIndex

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

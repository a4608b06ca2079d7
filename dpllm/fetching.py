"""Rows of the private data set as they are read in a step, and what of a ``Trainer`` a private step does not use.

Place in the flow: between the data set and `dpllm.microbatches`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from dpllm.config import ConfigError

_NO_DICTIONARIES = (tuple, list, str, torch.Tensor, np.ndarray)  # kinds of rows that other libraries use


def fetch_rows(dataset: Any, numbers: np.ndarray) -> list[dict[str, Any]]:
    """Read rows by number.

    Guarantee: a row is computed from its own record. ``set_transform`` and ``with_transform`` of a `datasets.Dataset`
    call their function with all rows that are read together; here they are called with one row at a time.

    Args:
        dataset: a `datasets.Dataset`, or anything with ``__getitem__``.
        numbers: (R,) row numbers.

    Returns:
        R rows, in the order of ``numbers``.
    """
    if not hasattr(dataset, "column_names"):
        return [dataset[int(number)] for number in numbers]
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        return [row for number in numbers for row in _rows_of(dataset[[int(number)]])]
    return _rows_of(dataset[numbers.tolist()])


def _rows_of(columns: Any) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def refuse_unreadable(dataset: Any) -> None:
    """Make sure that rows can be read by their numbers, and that they are dictionaries.

    Raises:
        ConfigError: the data set is a stream or missing, or its rows are of another kind.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"train_dataset is of type {type(dataset).__name__}, whose rows cannot be read by number. A private step "
            "draws its rows from all of them: load the data without streaming, or write them down first "
            "(datasets.Dataset.from_generator)"
        )
    if not hasattr(dataset, "column_names") and len(dataset) and isinstance(dataset[0], _NO_DICTIONARIES):
        raise ConfigError(
            f"Row 0 of train_dataset is of type {type(dataset[0]).__name__}. Rows are dictionaries with input_ids, and "
            "labels where these are not the input itself"
        )


def refuse_ignored(trainer: Trainer) -> None:
    """Make sure that a subclass overrides no method that private steps do not call.

    Raises:
        ConfigError: it overrides ``compute_loss``, which would be ignored.
    """
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise ConfigError(
            f"{type(trainer).__name__} overrides compute_loss, which returns one loss of the whole batch, and private "
            "steps need one loss per row: the override would be ignored. Pass compute_loss_func=(outputs, labels) -> "
            "(B,), each row's loss from that row only"
        )


def refuse_replaced(now: Any, given: Any) -> None:
    """Make sure that a trainer has the data set with which its plan was made.

    Raises:
        ConfigError: ``train_dataset`` was set to another object.
    """
    if now is not given:
        raise ConfigError(
            "train_dataset was replaced after the DPTrainer was made: its units, its lengths and the number of units "
            f"in the plan are those of the first one ({len(given)} rows). Make a new DPTrainer for the other data set"
        )

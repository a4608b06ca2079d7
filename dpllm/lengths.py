"""How many tokens each row has, and whether every row can be trained on.

Place in the flow: after `dpllm.tokenization`; microbatches are cut by these lengths. A `datasets.Dataset` is read as
Arrow holds it, some thousand rows at a time, without a Python object per token or row.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpllm.losses import IGNORE
from dpllm.records import DataError

_ROWS = 4096  # looked at together


def row_lengths(dataset: Any, task: str | None) -> np.ndarray:
    """Count the tokens of every row.

    Args:
        dataset: tokenized rows with ``input_ids``, and ``labels`` if they are not the input itself; a
            `datasets.Dataset` or a sequence of dictionaries.
        task: of `dpllm.config.ModelConfig`. For "causal_lm" and "seq2seq_lm" labels are checked as well.

    Returns:
        (num_rows,) int32.

    Raises:
        DataError: a row without input, with labels that don't fit its input, or without any target; the message gives
            the first such row.

    >>> row_lengths([{"input_ids": [5, 6]}, {"input_ids": [7], "labels": [7]}], None).tolist()
    [2, 1]
    """
    lengths = np.empty(len(dataset), dtype=np.int32)
    columns = _list_columns(dataset, task)
    if columns is None:
        for number in range(len(dataset)):
            row = dataset[number]
            _check(number, row["input_ids"], row.get("labels"), task)
            lengths[number] = len(row["input_ids"])
        return lengths
    begin = 0
    for table in columns.iter(batch_size=_ROWS):
        ids = table["input_ids"].combine_chunks()
        labels = table["labels"].combine_chunks() if "labels" in table.column_names else None
        own = _counts(ids)
        for place in np.flatnonzero(_suspect(own, labels, task))[:1]:
            row = table.slice(place, 1).to_pylist()[0]
            _check(begin + int(place), row["input_ids"] or [], row.get("labels"), task)
        lengths[begin : begin + len(own)] = own
        begin += len(own)
    return lengths


def _is_text(task: str | None) -> bool:
    """Whether labels are tokens."""
    return task in ("causal_lm", "seq2seq_lm")


def _check(number: int, ids: Any, labels: Any, task: str | None) -> None:
    """Refuse one row; what is said of all rows is said here."""
    if len(ids) == 0:
        raise DataError(f"row {number} has no input_ids: a row needs at least one token")
    if not _is_text(task) or labels is None:
        return
    if task == "causal_lm" and len(labels) != len(ids):
        raise DataError(
            f"row {number} has {len(labels)} labels for {len(ids)} input tokens: give one label per token, -100 where "
            "no loss is wanted"
        )
    if all(label == IGNORE for label in labels[_shift(task) :]):
        raise DataError(
            f"row {number} has no target, all its labels are masked: give it one, or leave the record out before N is "
            "counted"
        )


def _shift(task: str | None) -> int:
    """How many labels at the beginning nothing predicts: in a causal model position t predicts token t + 1."""
    return 1 if task == "causal_lm" else 0


def _list_columns(dataset: Any, task: str | None) -> datasets.Dataset | None:
    """The columns to look at, as Arrow lists; None where rows are made as they are read, or aren't lists."""
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return None
    wanted = ("input_ids", "labels") if _is_text(task) else ("input_ids",)
    columns = dataset.select_columns([name for name in wanted if name in dataset.column_names]).with_format("arrow")
    kinds = [field.type for field in columns.features.arrow_schema]
    all_lists = all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in kinds)
    return columns if "input_ids" in columns.column_names and all_lists else None


def _counts(lists: Any) -> np.ndarray:
    """(rows,) entries of each list; 0 where there is none."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _suspect(ids_of_row: np.ndarray, labels: Any, task: str | None) -> np.ndarray:
    """(rows,) whether `_check` refuses a row."""
    suspect = ids_of_row == 0
    if labels is None:
        return suspect
    labels_of_row = _counts(labels)
    has_labels = labels.is_valid().to_numpy(zero_copy_only=False)
    ends = np.cumsum(labels_of_row)
    is_target = labels.flatten().to_numpy(zero_copy_only=False) != IGNORE
    if _shift(task):
        is_target[(ends - labels_of_row)[labels_of_row > 0]] = False
        suspect |= has_labels & (labels_of_row != ids_of_row)
    targets_before = np.concatenate(([0], np.cumsum(is_target)))
    return suspect | has_labels & (targets_before[ends] == targets_before[ends - labels_of_row])

"""Map rows to privacy units and to padded tensors.

`dpllm.data.records` loads records, `dpllm.data.tokenization` makes rows, and this module maps rows to units and to
tensors. Everything that a user needs from these three modules can be imported from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dpllm.config import DataConfig, PrivacyUnit
from dpllm.config.tasks import labels_of
from dpllm.data.labels import BOUNDARIES, IGNORE, KEY_BOUNDARIES
from dpllm.data.records import DataError as DataError
from dpllm.data.records import check_column, has_many_copies, has_public_rows
from dpllm.data.records import load_records as load_records
from dpllm.data.records import load_train_and_eval as load_train_and_eval
from dpllm.data.records import sources_of as sources_of
from dpllm.data.tokenization import RECORD
from dpllm.data.tokenization import tokenization_info as tokenization_info
from dpllm.data.tokenization import tokenize_records as tokenize_records
from dpllm.data.tokenization import train_tokenizer as train_tokenizer
from dpllm.data.units import UnitIndex

CLASS_AS_TEXT = (
    "the column '{name}' of a row is not a number, but the loss needs numbers. List the names of all classes, in order "
    "(DPTrainer(data={{'class_names': [...]}}), in a recipe data.class_names), or replace each class with its number, "
    "0 to model.config.num_labels - 1"
)

# Columns that a tokenizer adds when it splits a text into several rows.
_PIECES = ("overflow_to_sample_mapping", "overflowing_tokens", "num_truncated_tokens")
MARKS_OF_UNITS = (RECORD, *_PIECES)
"""Columns of tokenized rows that `unit_index_of` reads; code that makes new rows from them must copy them."""


def unit_index_of(dataset: Any, privacy: PrivacyUnit, rng: np.random.Generator | None = None) -> UnitIndex:
    """Return the index of units; the number of units is the same for records and for their rows.

    Sequence level: rows with the same `record` are a unit; without that column each row is a unit. User level: rows
    with the same id in `data.columns.unit` are a unit, at most `max_rows_per_unit` of them.

    Args:
        dataset: records, or tokenized rows, as a `datasets.Dataset` or a sequence of dictionaries.
        privacy: definition of a unit.
        rng: generator that draws the rows a user keeps, with ``rows_kept="random"``:
            `dpllm.mechanism.sampling.secret_rng`, the same on every process. None: the first rows are kept, which
            gives the same numbers of rows and users.

    Raises:
        DataError: the data set is empty, has no column `unit_column`, or has rows that are pieces of longer texts
            without the number of their record.
        ValueError: an id is missing; the message gives the row.

    >>> rows = [{"input_ids": [1, 2], "record": 0}, {"input_ids": [3], "record": 0}, {"input_ids": [4], "record": 1}]
    >>> unit_index_of(rows, PrivacyUnit()).num_units
    2
    """
    if len(dataset) == 0:
        raise DataError("empty data set: there is no record to train on; check path, split and limit")
    present = list(dataset.column_names if isinstance(dataset, datasets.Dataset) else dataset[0])
    if privacy.protects == "user":
        column = str(privacy.unit)  # PrivacyUnit requires it for users
        check_column(present, column, "data.columns.unit", dataset)
        draw = rng if privacy.rows_kept == "random" else None
        ids = column_of(dataset, column)
        try:
            units = UnitIndex.from_ids(ids, privacy.max_rows_per_unit, draw, privacy.normalize_ids, column)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from error
        return _with_notes(units, dataset, column)
    _refuse_pieces(dataset, present)
    if "input_ids" in present and RECORD in present:  # in raw records a column of that name is the user's own
        units = UnitIndex.from_ids(column_of(dataset, RECORD), column=RECORD)
    else:
        units = UnitIndex.one_row_per_unit(len(dataset))
    return _with_notes(units, dataset, None)


def _with_notes(units: UnitIndex, dataset: Any, unit_column: str | None) -> UnitIndex:
    """Return an index with what was noted about the texts when the records were read."""
    copies, public = has_many_copies(dataset, unit_column), has_public_rows(dataset)
    return replace(units, many_copies=copies, in_public_rows=public) if copies or public else units


def _refuse_pieces(dataset: Any, present: Sequence[str]) -> None:
    """Refuse rows that may be pieces of one record when no column gives the record."""
    marks = [name for name in _PIECES if name in present]
    if marks and RECORD not in present:
        raise DataError(
            f"The column '{marks[0]}' shows that a tokenizer cut long texts into several rows, but there is no "
            f"column '{RECORD}'. Each piece would count as a unit, and a record would be protected less than stated. "
            f"Add a column '{RECORD}' with the number of each row's text, or use dpllm.data.rows.tokenize_records"
        )
    if isinstance(dataset, datasets.Dataset):
        return
    lacking = [number for number in range(len(dataset)) if (RECORD in dataset[number]) != (RECORD in present)]
    if lacking and "input_ids" in dataset[lacking[0]]:
        raise DataError(
            f"Some rows have a column '{RECORD}' and others do not; the first that differs from row 0 is row "
            f"{lacking[0]}. Add it to all rows, since the rows of one record are one unit"
        )


def num_labels_of(records: datasets.Dataset, config: DataConfig) -> int | None:
    """Return the number of classes named by the recipe or by a Hub data set's schema; None if neither names them.

    The classes are never counted in the labels: that number would depend on the private records. The schema in a local
    file is not used either: its author may have collected the names from the labels.
    """
    if config.class_names is not None:
        return len(config.class_names)
    feature = records.features.get(config.form.labels or config.column("label"))
    feature = getattr(feature, "feature", feature)  # of a list
    if not isinstance(feature, datasets.ClassLabel) or sources_of(records):
        return None
    return feature.num_classes


@dataclass(frozen=True, kw_only=True)
class RowCollator:
    """Collator that pads rows to the longest of them.

    Called with a list of B rows, it returns `input_ids` (B, T), `attention_mask` (B, T) and `labels`: (B, T), padded
    with -100; (B,) for a classifier; (B, K) float32 for several values or classes of a row. For "seq2seq_lm" the labels
    may be longer or shorter than the input. The target of a row without `labels` is the row itself ("causal_lm").
    Columns other than these and `token_type_ids` are left out.

    >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
    >>> batch = RowCollator(pad_token_id=0)(rows)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6], [7, 0]], [[-100, 6], [7, -100]])
    """

    pad_token_id: int
    """Token that fills the end of short rows; it is masked in the attention and in the loss."""
    task: str = "causal_lm"
    """One of `dpllm.config.TASKS`."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate B rows.

        Raises:
            DataError: there is no row; or a row has no `input_ids`, or a number of labels that is not its number of
                input tokens; or the rows have different numbers of values.
        """
        if not rows:
            raise DataError("no row to collate: a batch needs at least one row (a padding row if nothing was drawn)")
        ids = [_list(row, "input_ids") for row in rows]
        masks = [
            _list(row, "attention_mask") if "attention_mask" in row else [1] * len(own)
            for row, own in zip(rows, ids, strict=True)
        ]
        batch = {"input_ids": self._pad(ids, self.pad_token_id), "attention_mask": self._pad(masks, 0)}
        if any("token_type_ids" in row for row in rows):  # a row without is refused: the others may not decide for it
            batch["token_type_ids"] = self._pad([_list(row, "token_type_ids") for row in rows], 0)
        kind = labels_of(self.task)
        if kind == "class":
            batch["labels"] = torch.tensor([_class(row, "label" if "label" in row else "labels") for row in rows])
        elif kind == "numbers":
            batch["labels"] = _values([_numbers(row, "label" if "label" in row else "labels") for row in rows])
        else:
            triples = zip(rows, ids, masks, strict=True)
            batch["labels"] = self._pad([self._labels(n, *triple) for n, triple in enumerate(triples)], IGNORE)
        return batch

    def _pad(self, rows: list[list[int]], value: int) -> Tensor:
        length = max(map(len, rows))
        padded = torch.full((len(rows), length), value, dtype=torch.long)
        for position, row in enumerate(rows):
            padded[position, : len(row)] = torch.tensor(row, dtype=torch.long)
        return padded

    def _labels(self, number: int, row: Mapping[str, Any], ids: list[int], mask: list[int]) -> list[int]:
        if "labels" not in row and self.task == "causal_lm":
            return [token if seen else IGNORE for token, seen in zip(ids, mask, strict=True)]
        labels = _list(row, "labels")
        if self.task != "seq2seq_lm" and len(labels) != len(ids):
            raise DataError(
                f"row {number} of the batch has {len(labels)} labels for {len(ids)} input tokens. Pass one label per "
                "token, with -100 at tokens without loss"
            )
        return labels


@dataclass(frozen=True)
class PackedCollator:
    """Collator that concatenates rows without padding, for causal language models.

    Called with a list of B rows of N tokens in total, it returns `input_ids` (1, N); `position_ids` (1, N), which start
    at 0 in each row; `labels` (1, N), with each row's first masked; and the boundaries of the rows for the attention
    (transformers' ``FlashAttentionKwargs``): `cu_seq_lens_q` and `cu_seq_lens_k` (B + 1,), the beginning of each row
    and the end of the last, and `max_length_q` and `max_length_k`, the length of the longest row. The loss per row is
    then `dpllm.packed_sequence_loss`. The target of a row without `labels` is the row itself.

    >>> batch = PackedCollator()([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[5, 6, 7, 8, 9]], [[0, 1, 0, 1, 2]], [0, 2, 5])
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate B rows.

        Raises:
            DataError: there is no row; or a row has no tokens, masked tokens, token types, or a number of labels that
                is not its number of input tokens.
        """
        padded = RowCollator(pad_token_id=0)(rows)
        seen_BT = padded["attention_mask"].bool()
        lengths = [len(_list(row, "input_ids")) for row in rows]
        if min(lengths) == 0 or seen_BT.sum(1).tolist() != lengths or "token_type_ids" in padded:
            raise DataError(
                "a row has no token, or has masked tokens or token types, so it cannot be packed. Remove padding and "
                "token types from the rows, or set microbatch.pack to false"
            )
        labels_BT = padded["labels"]
        labels_BT[:, 0] = IGNORE
        boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        positions_BT = torch.arange(max(lengths)).expand(len(rows), -1)
        return {
            "input_ids": padded["input_ids"][seen_BT][None],
            "position_ids": positions_BT[seen_BT][None],
            "labels": labels_BT[seen_BT][None],
            BOUNDARIES: boundaries,
            KEY_BOUNDARIES: boundaries,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


def column_of(dataset: Any, name: str) -> Sequence[Any]:
    """Return a column; one of whole numbers without missing values is returned without a Python object per row."""
    if not isinstance(dataset, datasets.Dataset):
        values = [dataset[number].get(name) for number in range(len(dataset))]
        return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    column = dataset.select_columns([name]).with_format("arrow")[:][name]
    if pa.types.is_integer(column.type) and column.null_count == 0:
        return column.to_numpy()
    return list(column.to_pylist())


def _list(row: Mapping[str, Any], name: str) -> list[int]:
    if row.get(name) is None:
        held = ", ".join(key for key in row if row[key] is not None) or "no column"
        raise DataError(f"a row has no '{name}', only {held}. First tokenize all records in the same way")
    value = row[name]
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _class(row: Mapping[str, Any], name: str) -> int:
    if name not in row:
        raise DataError(f"a row has no '{name}', only {', '.join(row)}. A classifier needs the class of each row")
    try:
        number = int(row[name])
    except (TypeError, ValueError) as error:
        raise DataError(CLASS_AS_TEXT.format(name=name)) from error
    if number != row[name] and not isinstance(row[name], str):
        raise DataError(f"the column '{name}' of a row is {float(row[name])}, but a class is a whole number")
    return number


def _numbers(row: Mapping[str, Any], name: str) -> list[float]:
    if name not in row:
        raise DataError(f"a row has no '{name}', only {', '.join(row)}. A row needs its target values")
    value = row[name]
    value = value.tolist() if hasattr(value, "tolist") else value
    return [float(number) for number in value] if isinstance(value, list | tuple) else [float(value)]


def _values(rows: list[list[float]]) -> Tensor:
    if len({len(row) for row in rows}) > 1:
        raise DataError(
            f"the rows of a batch have {sorted({len(row) for row in rows})} target values. Give each row the same "
            "number, model.config.num_labels"
        )
    return torch.tensor(rows, dtype=torch.float32)

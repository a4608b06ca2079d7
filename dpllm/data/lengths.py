"""Count the tokens of each row, and check that every row can be used for training.

Microbatches are formed by these lengths. A `datasets.Dataset` is read as Arrow arrays, some thousand rows at a time,
without a Python object per token or row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpllm.config.tasks import labels_of
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.records import DataError
from dpllm.data.values import ColumnKinds

_POSITIONS = re.compile(r"^(?!.*rel).*(?:wpe|pos)", re.IGNORECASE)  # names of tables of absolute positions
_ROWS = 4096  # number of rows read together
_NO_GAPS = "give each entry one"
TOKENS = "input_ids"


@dataclass(frozen=True)
class Limits:
    """The limits of a model's input. A row beyond them would end the run with an index error after a charged step."""

    positions: int | None = None
    """The most tokens a row may have, if the model looks positions up in a table. None: no table."""
    tokens: int | None = None
    """Number of entries of the table of input embeddings. None: unknown."""
    source: str = TOKENS
    """The column that a row's text comes from: "labels" if the model reads sound or images only, and writes a text."""

    @classmethod
    def of(cls, model: Any) -> Limits:
        """Read the limits from the model's tables; those of a tower for images or sound count patches, not tokens."""
        tables = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "num_embeddings") and _POSITIONS.search(name.rpartition(".")[2])
            if input_of(model, name) == TOKENS
        }
        rooms = [_room(module) for module in tables.values()]
        try:
            tokens = getattr(model.get_input_embeddings(), "num_embeddings", None)
        except (AttributeError, NotImplementedError):
            tokens = None
        source = TOKENS if input_of(model, "") == TOKENS else "labels"
        return cls(min(rooms) - _virtual_tokens(model) if rooms else None, tokens, source)


def input_of(model: Any, name: str) -> str:
    """Return what the part of a model reads that a module belongs to, such as "input_ids" or "pixel_values".

    Args:
        model: the model.
        name: of the module in it; "" for the model itself.
    """
    parts = [model]
    for step in name.split(".") if name else []:
        parts.append(getattr(parts[-1], step))
    if not name and hasattr(model, "get_base_model"):
        parts.append(model.get_base_model())
    named = (getattr(part, "main_input_name", None) for part in reversed(parts))
    return next((str(found) for found in named if found), TOKENS)


def _room(table: Any) -> int:
    """Return the positions of a table that rows can use: some models count from the padding token or an offset."""
    offset = getattr(table, "offset", None)
    if not isinstance(offset, int):
        offset = 0 if table.padding_idx is None else table.padding_idx + 1
    return int(table.num_embeddings) - offset


def _virtual_tokens(model: Any) -> int:
    """Return the number of tokens that a prompt adapter puts before each row."""
    configs = getattr(model, "peft_config", None) or {}
    kinds = {"PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"}
    chosen = (config for config in configs.values() if str(getattr(config.peft_type, "value", "")) in kinds)
    return max((int(getattr(config, "num_virtual_tokens", 0) or 0) for config in chosen), default=0)


def row_lengths(dataset: Any, task: str | None, limits: Limits | None = None) -> np.ndarray:
    """Count the tokens of every row.

    Args:
        dataset: tokenized rows with ``input_ids``, and ``labels`` if they are not the input itself; a
            `datasets.Dataset` or a sequence of dictionaries.
        task: one of `dpllm.config.TASKS`. Labels that are token ids, or one for each token, are checked as well.
        limits: limits of the model's input. None: no limits.

    Returns:
        (num_rows,) int32.

    Raises:
        DataError: a row has no input, labels that do not fit its input, or no target, or exceeds the limits of the
            model; or a column of rows that are no table has values of two kinds. The message gives the first such row.

    >>> row_lengths([{"input_ids": [5, 6]}, {"input_ids": [7], "labels": [7]}], None).tolist()
    [2, 1]
    """
    limits = limits or Limits()
    lengths = np.empty(len(dataset), dtype=np.int32)
    columns = list_columns(dataset, task) if limits.source == TOKENS else None
    if columns is None:
        optional = {"labels"} if task in ("causal_lm", None) else set()  # each row may have them, or be its own target
        names: list[str] = sorted(set(dataset[0]) - optional) if len(dataset) else []
        kinds = ColumnKinds("the data set")
        for number in range(len(dataset)):
            row = dataset[number]
            # Collators read the columns of a batch's first row, so one row would change the others.
            if sorted(set(row) - optional) != names:
                raise DataError(
                    f"row {number} has the columns {', '.join(sorted(row))}, but row 0 has {', '.join(names)}. Give "
                    "every row the same columns"
                )
            kinds.add(number, row)
            ids = row.get(limits.source)
            if limits.source not in row:
                raise DataError(
                    f"row {number} has no {limits.source}, only {', '.join(row)}. Tokenize the records first"
                )
            _check(number, ids, row.get("labels"), task, limits.source)
            _check_limits(number, ids if limits.source == TOKENS else [i for i in ids if i != IGNORE], limits)
            _check_limits(number, _targets(row), _limits_of_labels(limits, task), "label")
            lengths[number] = len(ids)
        return lengths
    begin = 0
    for table in columns.iter(batch_size=_ROWS):
        ids = table["input_ids"].combine_chunks()
        labels = table["labels"].combine_chunks() if "labels" in table.column_names else None
        own = _counts(ids)
        found = _suspect(own, labels, task) | _has_gap(ids) | _beyond(ids, own, limits)
        if labels is not None:
            found |= _has_gap(labels) | _beyond(labels, _counts(labels), _limits_of_labels(limits, task), IGNORE)
        for place in np.flatnonzero(found)[:1]:
            row = table.slice(place, 1).to_pylist()[0]
            _check(begin + int(place), row["input_ids"] or [], row.get("labels"), task)
            _check_limits(begin + int(place), row["input_ids"] or [], limits)
            _check_limits(begin + int(place), _targets(row), _limits_of_labels(limits, task), "label")
        lengths[begin : begin + len(own)] = own
        begin += len(own)
    return lengths


def refuse_other_classes(dataset: Any, task: str | None, num_labels: int) -> None:
    """Check that the labels are classes of the model's head; the loss would index out of range otherwise.

    Args:
        dataset: as for `row_lengths`.
        task: one of `dpllm.config.TASKS`; labels of tasks that predict text or values are not checked.
        num_labels: number of classes of the head.

    Raises:
        DataError: a label is not a whole number or out of range; the message gives the first such row.

    >>> refuse_other_classes([{"labels": 1}, {"labels": 0}], "sequence_classification", 2)
    """
    kind = labels_of(task)
    if kind not in ("class", "tokens", "span"):
        return
    most = START + END if kind == "span" else num_labels - 1
    for number, label in _labels(dataset):
        values = np.asarray(label).ravel()
        if values.dtype.kind not in "biuf":
            continue  # text, or none: the collator says so
        if any(((values < 0) & (values != IGNORE)) | (values > most) | (values % 1 != 0)):
            meant = "marks of an answer" if kind == "span" else "classes of the model (num_labels)"
            raise DataError(
                f"row {number} has a label that is neither {IGNORE} nor a whole number in 0..{most}, the {meant}. "
                "Correct the labels, or load the model with a different num_labels"
            )


def _labels(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Yield numbers of rows and their labels, some thousand at once from a table."""
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        name = "label" if "label" in dataset.column_names else "labels"
        if name not in dataset.column_names:
            return
        begin = 0
        for table in dataset.select_columns([name]).with_format("arrow").iter(batch_size=_ROWS):
            for place, label in enumerate(table[name].to_pylist()):
                yield begin + place, label
            begin += len(table)
        return
    for number in range(len(dataset)):
        row = dataset[number]
        label = row.get("label", row.get("labels"))
        yield number, label.tolist() if hasattr(label, "tolist") else label


def _are_lists(task: str | None) -> bool:
    """Return whether labels are token ids, or one number for each token."""
    return labels_of(task) in ("text", "tokens", "span")


def _has_label_per_token(task: str | None) -> bool:
    return _are_lists(task) and task != "seq2seq_lm"


def _check(number: int, ids: Any, labels: Any, task: str | None, source: str = TOKENS) -> None:
    """Refuse one row; every message about a row's contents is written here."""
    if isinstance(ids, str | bytes) or (ids is not None and len(ids) and isinstance(ids[0], str | bytes)):
        raise DataError(f"the {source} of row {number} are text: tokenize the records first")
    if ids is None or len(ids) == 0:
        raise DataError(f"row {number} has no {source}: a row needs at least one token")
    if getattr(ids, "ndim", 1) != 1 or isinstance(ids[0], list | tuple):
        raise DataError(
            f"the {source} of row {number} are a list of lists instead of a list of token ids. Tokenize without "
            "return_tensors, one text at a time or batched=True, or use the first inner list"
        )
    if isinstance(ids, list) and None in ids:
        raise DataError(f"row {number} has an entry without a token id in {source}: {_NO_GAPS}")
    if not _are_lists(task) or labels is None:
        return
    if isinstance(labels, list) and None in labels:
        raise DataError(f"row {number} has an entry without a number in its labels: {_NO_GAPS}, -100 where it has none")
    if _has_label_per_token(task) and len(labels) != len(ids):
        raise DataError(
            f"row {number} has {len(labels)} labels for {len(ids)} input tokens. Pass one label per token, with -100 "
            "at tokens without loss"
        )
    if all(label == IGNORE for label in labels[_shift(task) :]):
        raise DataError(
            f"row {number} has no target: all its labels are masked. Give it one, or drop the record before N is "
            "counted"
        )


def _limits_of_labels(limits: Limits, task: str | None) -> Limits:
    """Return the limits of a causal model's labels, which are its tokens; those of other heads are not known."""
    return Limits(tokens=limits.tokens if task == "causal_lm" else None)


def _targets(row: Mapping[str, Any]) -> list[Any]:
    labels = row.get("labels")
    return [] if labels is None or np.ndim(labels) != 1 else [label for label in labels if label != IGNORE]


def _check_limits(number: int, ids: Any, limits: Limits, what: str = "token id") -> None:
    """Refuse one row that the model cannot read."""
    if limits.positions is not None and len(ids) > limits.positions:
        raise DataError(
            f"row {number} has {len(ids)} tokens, but the model has positions for {limits.positions}. Tokenize with "
            "data.max_length of at most that, or use a model with more positions"
        )
    if limits.tokens is not None and len(ids) and not 0 <= min(map(int, ids)) <= max(map(int, ids)) < limits.tokens:
        raise DataError(
            f"row {number} has a {what} outside 0..{limits.tokens - 1}, the model's embedding table. Tokenize "
            "with the model's own tokenizer, or resize the table before the private training"
        )


def _beyond(ids: Any, ids_of_row: np.ndarray, limits: Limits, free: int | None = None) -> np.ndarray:
    """Return (rows,) bool, whether `_check_limits` refuses a row; ``free`` is no token, and allowed."""
    beyond = np.zeros(len(ids_of_row), dtype=bool)
    if limits.positions is not None:
        beyond |= ids_of_row > limits.positions
    if limits.tokens is not None:
        flat = ids.flatten().to_numpy(zero_copy_only=False)
        outside = (flat < 0) | (flat >= limits.tokens)
        bad = np.concatenate(([0], np.cumsum(outside if free is None else outside & (flat != free))))
        ends = np.cumsum(ids_of_row)
        beyond |= bad[ends] > bad[ends - ids_of_row]
    return beyond


def _shift(task: str | None) -> int:
    """Return the number of first labels that nothing predicts: in a causal model position t predicts token t + 1."""
    return 1 if task == "causal_lm" else 0


def list_columns(dataset: Any, task: str | None) -> datasets.Dataset | None:
    """Return the columns to check as Arrow lists; None if rows are computed when read, or are not lists."""
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return None
    wanted = ("input_ids", "labels") if _are_lists(task) else ("input_ids",)
    columns = dataset.select_columns([name for name in wanted if name in dataset.column_names]).with_format("arrow")
    kinds = [field.type for field in columns.features.arrow_schema]
    lists = [kind for kind in kinds if pa.types.is_list(kind) or pa.types.is_large_list(kind)]
    values = [kind.value_type for kind in lists]
    numbers = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind) for kind in values)
    all_lists = len(lists) == len(kinds) and numbers
    return columns if "input_ids" in columns.column_names and all_lists else None


def _counts(lists: Any) -> np.ndarray:
    """Return (rows,) the number of entries of each list; 0 for a missing list."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _has_gap(lists: Any) -> np.ndarray:
    """Return (rows,) bool, whether an entry of a list is missing."""
    counts = _counts(lists)
    before = np.concatenate(([0], np.cumsum(lists.flatten().is_null().to_numpy(zero_copy_only=False))))
    ends = np.cumsum(counts)
    return before[ends] > before[ends - counts]


def _suspect(ids_of_row: np.ndarray, labels: Any, task: str | None) -> np.ndarray:
    """Return (rows,) bool, whether `_check` refuses a row."""
    suspect = ids_of_row == 0
    if labels is None:
        return suspect
    labels_of_row = _counts(labels)
    has_labels = labels.is_valid().to_numpy(zero_copy_only=False)
    ends = np.cumsum(labels_of_row)
    is_target = labels.flatten().to_numpy(zero_copy_only=False) != IGNORE
    if _shift(task):
        is_target[(ends - labels_of_row)[labels_of_row > 0]] = False
    if _has_label_per_token(task):
        suspect |= has_labels & (labels_of_row != ids_of_row)
    targets_before = np.concatenate(([0], np.cumsum(is_target)))
    return suspect | has_labels & (targets_before[ends] == targets_before[ends - labels_of_row])

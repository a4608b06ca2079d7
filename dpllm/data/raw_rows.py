"""Make rows from raw columns: the texts, conversations or classes of a data set that was passed to a Trainer.

A recipe names the format of its records; here it follows from the column names, which are public, or is given with the
same keys as in a recipe's section ``data``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from dpllm.config import TASKS, ConfigError, DataConfig, RecordFormat, read_section
from dpllm.config.formats.catalogue import FORMATS, TextFormat
from dpllm.config.formats.record_format import TextLabel, columns_in
from dpllm.config.recipe_file import UNIT
from dpllm.config.tasks import labels_of
from dpllm.data.lengths import TOKENS
from dpllm.data.messages import CONVERSATIONS
from dpllm.data.records import (
    DataError,
    check_column,
    check_records,
    has_public_rows,
    keep_notes,
    note_copies,
    note_public_rows,
    required_columns,
    text_columns,
    with_class_numbers,
)
from dpllm.data.tokenization import tokenize_records
from dpllm.data.values import ColumnKinds

KEYS = ("columns", "format", "max_length", "long_records", "class_names", "chat_template_kwargs")
"""Keys of a recipe's section ``data`` that define how a record becomes rows, not where it is stored."""
LONGEST = 1024
"""Default for the largest number of tokens in a row, if the model allows as many."""
_ABOUT = "how raw columns become rows: keys of a recipe's section data, such as data={'columns': {'text': 'note'}}"


def read_keys(data: Any) -> dict[str, Any]:
    """Return the argument ``data`` of a Trainer as a dictionary.

    Raises:
        ConfigError: it is not a mapping, or has a key that defines where records are stored.
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"data is of type {type(data).__name__}: pass a dictionary that says {_ABOUT}")
    for key in data:
        if key in (item.name for item in dataclasses.fields(DataConfig)) and key not in KEYS:
            raise ConfigError(f"data has the key {key!r}, which is for a recipe: pass the rows as train_dataset")
    if UNIT in (data.get("columns") or {}):
        raise ConfigError(
            "data has columns.unit, the column of the units in a recipe: pass PrivacyConfig(unit=...) and leave it out"
        )
    given = {"format": TextFormat.name, "path": "train_dataset", "max_length": LONGEST, **data}
    read_section(DataConfig, given, "DPTrainer", "data")
    return {key: value for key, value in data.items() if value is not None}


def is_raw(dataset: Any, rows: Any) -> bool:
    """Return whether token ids were made from the columns of a data set."""
    return rows is not dataset and TOKENS not in _columns(dataset)


@dataclass(frozen=True)
class RowMaker:
    """How the rows of a data set become rows of token ids.

    Attributes:
        tokenizer: None: rows have token ids.
        task: of the model, one of `dpllm.config.TASKS`; None: unknown, rows have token ids.
        source: the column of the model's own input, such as ``input_ids``.
        num_labels: classes, or values, of the model's head.
        class_names: names of the classes in the model's configuration. None: it has only numbers.
        longest: the most tokens that a row may have.
        keys: keys of a recipe's section ``data``, of `KEYS`.
    """

    tokenizer: Any
    task: str | None
    source: str = TOKENS
    num_labels: int | None = None
    class_names: list[str] | None = None
    longest: int = LONGEST
    keys: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, dataset: Any, words: str, keep: Sequence[str] = ()) -> Any:
        """Return rows with token ids and class numbers; a data set that has them already is returned as it is.

        Every row is made of its own record. The classes are those of ``data.class_names`` or of the model, and are
        never collected from the labels.

        Args:
            dataset: rows that can be read by number.
            words: name of the data set, for messages.
            keep: columns that are copied, such as the user's id.

        Raises:
            ConfigError: the columns do not fit the task, or several forms fit; there is no tokenizer.
            DataError: a record cannot be used; the message gives its number.
        """
        columns = _columns(dataset)
        if not columns:  # empty, which is refused later
            return dataset
        if self.source in columns or self.task is None:
            unused = sorted(self.keys.keys() - {"class_names"})
            if unused:
                raise ConfigError(
                    f"data={{{unused[0]!r}: ...}} defines how raw columns become rows, but {words} has the column "
                    f"'{self.source}'. Omit data, or pass only the raw columns"
                )
            return self._with_numbers(dataset, columns, words)
        config = self._config(columns, words)
        tokenizer = self._require_tokenizer(words, columns)
        for name in keep:
            check_column(columns, name, words)
        present = [name for name in config.form.names if name in columns or name in config.form.required]
        records = _table(dataset, [*present, *keep], words)
        config = self._named(records, config)
        if config.form.holds is TextLabel:
            records = with_class_numbers(records, str(config.form.labels), config.class_names, words)
        check_records(records, config, words)
        if words == "train_dataset":
            note_copies(records, text_columns(config), keep[0] if keep else None)
        return tokenize_records(records, tokenizer, config, keep, self.task, self.num_labels)

    def note_public_rows(self, rows: datasets.Dataset, train: Any, public: Any, keep: Sequence[str] = ()) -> None:
        """Note in training rows whether raw rows for evaluation that are declared public hold training records.

        Args:
            rows: made of the training data by `rows`.
            train: the raw training data.
            public: the raw rows for evaluation.
            keep: the column of the users' ids, if a unit is a user.
        """
        config = self._config(_columns(train), "train_dataset")
        records = _table(train, [*required_columns(config), *keep], "train_dataset")
        others = _table(public, required_columns(config), "eval_dataset")
        note_public_rows(records, others, config, keep[0] if keep else None)
        if has_public_rows(records):
            keep_notes(rows, rows, public_rows=True)

    def _config(self, columns: Sequence[str], words: str) -> DataConfig:
        limit = min(LONGEST, self.longest, int(getattr(self.tokenizer, "model_max_length", LONGEST)))
        given = {"path": words, "max_length": limit, **self._keys(columns)}
        if "format" not in given:
            given["format"] = self._format(columns, words)
        return read_section(DataConfig, given, "DPTrainer", "data")

    def _format(self, columns: Sequence[str], words: str) -> str:
        """Return the form of the records whose columns are all there."""
        forms = [self._of(FORMATS[name], columns) for name in TASKS[str(self.task)].formats]
        forms = [form for form in forms if None in form.trainers]
        found = [form.name for form in forms if set(form.required) <= set(columns)]
        if len(found) == 1:
            return found[0]
        pairs = [self._of(kind, columns) for kind in FORMATS.values() if "dpo" in kind.trainers]
        if any(set(form.required) <= set(columns) for form in pairs):
            raise ConfigError(f"{words} has two answers for each prompt. Use dpllm.DPDPOTrainer, which compares them")
        if found:
            raise ConfigError(
                f"{words} has the columns {', '.join(columns)}, which fit the formats {' and '.join(found)}. Choose "
                f"one with data={{'format': {found[0]!r}}}"
            )
        wanted = "; ".join(f"{' and '.join(form.required)} ({form.name})" for form in forms)
        first = next(iter(columns_in(type(forms[0]))))
        raise ConfigError(
            f"{words} has the columns {', '.join(columns)}. A model for {self.task} learns from {self.source}, or from "
            f"the columns {wanted}. Name yours with data={{'columns': {{'{first}': ...}}}}, or pass a model for "
            "another task (model={'name': ..., 'task': ...})"
        )

    def _of(self, kind: type[RecordFormat], columns: Sequence[str]) -> RecordFormat:
        keys = self._keys(columns)
        return kind(**{key: name for key, name in keys.get("columns", {}).items() if key in columns_in(kind)})

    def _keys(self, columns: Sequence[str]) -> dict[str, Any]:
        """Return the keys, with the name that ShareGPT and TRL give a column of conversations."""
        named = "messages" not in columns and CONVERSATIONS in columns
        return {**({"columns": {"messages": CONVERSATIONS}} if named else {}), **self.keys}

    def _named(self, records: datasets.Dataset, config: DataConfig) -> DataConfig:
        """Return the description with the model's class names where labels are text and no names were given."""
        if config.class_names is not None or self.class_names is None:
            return config
        kind = records.features.get(config.form.labels or "")
        kind = getattr(kind, "feature", kind)
        if not isinstance(kind, datasets.Value) or kind.dtype not in ("string", "large_string"):
            return config
        return dataclasses.replace(config, class_names=list(self.class_names))

    def _require_tokenizer(self, words: str, columns: Sequence[str]) -> PreTrainedTokenizerBase:
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            return self.tokenizer
        if self.tokenizer is None:
            raise ConfigError(
                f"{words} has the columns {', '.join(columns)} but no '{self.source}', so its texts need a tokenizer. "
                "Pass processing_class=AutoTokenizer.from_pretrained(...)"
            )
        raise ConfigError(
            f"processing_class is of type {type(self.tokenizer).__name__}, but the texts of {words} need a tokenizer. "
            "Pass it (processor.tokenizer), or pass rows that the processor has made"
        )

    def _with_numbers(self, dataset: Any, columns: Sequence[str], words: str) -> Any:
        """Return tokenised rows with the number of each class that is text; all other rows as they are."""
        names = self.keys.get("class_names", self.class_names)
        column = next((name for name in ("label", "labels") if name in columns), None)
        if names is None or column is None or labels_of(self.task) != "class" or _is_computed(dataset):
            return dataset
        if isinstance(dataset, datasets.Dataset):
            kind = dataset.features[column]
            if not isinstance(kind, datasets.Value) or kind.dtype not in ("string", "large_string"):
                return dataset
            return with_class_numbers(dataset, column, list(names), words)
        if not isinstance(dataset, list | tuple) or not any(isinstance(row.get(column), str) for row in dataset):
            return dataset
        numbers = {name: number for number, name in enumerate(names)}
        for number, row in enumerate(dataset):
            if row.get(column) not in numbers:
                raise DataError(
                    f"{words}: the {column} of row {number} is not one of data.class_names. Write these names, or "
                    "the numbers of the classes, in all rows"
                )
        return [{**row, column: numbers[row[column]]} for row in dataset]


def is_stored(dataset: Any) -> bool:
    """Whether the rows are those of a table, and not made by code when they are read."""
    return isinstance(dataset, datasets.Dataset) and not _is_computed(dataset)


def _is_computed(dataset: Any) -> bool:
    """Whether the rows of a `datasets.Dataset` are made by a function when they are read."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom"


def _columns(dataset: Any) -> list[str]:
    """Return the names of the columns of row 0; an empty list if there is no row."""
    if is_stored(dataset):
        return list(dataset.column_names)
    return [str(name) for name in dataset[0].keys()] if len(dataset) else []  # noqa: SIM118 (may be no mapping)


def _table(dataset: Any, columns: Sequence[str], words: str) -> datasets.Dataset:
    """Return these columns as a table; rows that are computed as they are read are each read once.

    Raises:
        DataError: a row lacks a column, or the values of a column are of several kinds.
    """
    columns = list(dict.fromkeys(columns))
    if is_stored(dataset):
        present = [name for name in columns if name in dataset.column_names]
        return dataset.with_format(None).select_columns(present or dataset.column_names)  # none would have no rows
    found: dict[str, list[Any]] = {name: [] for name in columns}
    kinds = ColumnKinds(words)
    for number in range(len(dataset)):
        row = dataset[number]
        for name in columns:
            if name not in row:
                raise DataError(
                    f"{words}: row {number} has no column '{name}', only {', '.join(row)}. Give every row the same "
                    "columns"
                )
            found[name].append(row[name])
        kinds.add(number, {name: row[name] for name in columns})
    for name, values in found.items():
        try:
            pa.array(values)
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(
                f"{words}: the values of the column '{name}' cannot be stored together. Give all of them one type, "
                "such as text, with the same type under each key and in each list"
            ) from error
    return datasets.Dataset.from_dict(found)

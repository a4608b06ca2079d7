"""Records from where they lie: a Hub data set, local files, or a corpus of a pip package.

Place in the flow: first of the data stages. A *record* is what the sequence level protects, so nothing here filters,
deduplicates or reorders: the number of records is the N of the guarantee. What is wrong with a record is said here,
before any training, by its number (counted from 0) and never with its text.
"""

from __future__ import annotations

import csv
import glob
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from dpllm.config import ConfigError, DataConfig, nearest
from dpllm.corpora import BUILTIN

READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    # Only an empty cell is a missing value: a message that says "NA" or "null" is a message.
    ".csv": ("csv", {"keep_default_na": False, "na_values": [""]}),
    # Quotes are ordinary characters in tab-separated text: a lone one must not swallow the records after it.
    ".tsv": ("csv", {"sep": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False, "na_values": [""]}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"keep_linebreaks": False}),
}
"""File endings that can be read, each with the builder of `datasets` and its options. A line of .txt is a record."""

PARQUET_BRANCH = "refs/convert/parquet"
"""Where the Hub keeps the records of data sets that can't be read as they are."""

HELD_OUT_SEED = 20240229
"""Public constant that fixes which record numbers `eval_fraction` holds out."""

_EMPTY = "empty data set: there is no record to train on; check path, split and limit"
# What the readers of `datasets` say of a file without records; each says it in its own way.
_NO_RECORDS = ("corresponds to no data", "at least one example", "No columns to parse", "BatchSize must be greater")


class DataError(ValueError):
    """A data set that can't be trained on as it is; the message names what, where, and the remedy."""


def required_columns(config: DataConfig) -> list[str]:
    """Return the columns that a record must have for `config.format`.

    >>> required_columns(DataConfig(path="x", max_length=8, format="classification", text_column="sentence"))
    ['sentence', 'label']
    """
    return {
        "text": [config.text_column],
        "prompt_completion": [config.prompt_column, config.completion_column],
        "chat": [config.messages_column],
        "classification": [config.text_column, config.label_column],
    }[config.format]


def load_records(config: DataConfig) -> datasets.Dataset:
    """Return the training records, one row each, unchanged and in their order.

    Args:
        config: where they are. `limit` keeps the first so many.

    Raises:
        ConfigError: the path, split or builtin corpus doesn't exist or can't be reached.
        DataError: no record, a missing column, a null, or a column of the wrong kind.
    """
    return _finish(_load(config.path, config.name, config.split), config, config.path, config.limit)


def load_train_and_eval(config: DataConfig) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the training records and the held-out ones (None when the recipe names none).

    Held-out records come from `eval_path`, from `eval_split`, or are a share `eval_fraction` of the training records,
    chosen by record number with a public constant, before N is fixed: N counts the records that remain.

    Raises:
        ConfigError: as `load_records`; also `eval_split` of a local path without `eval_path`.
        DataError: as `load_records`; also a share that leaves no record on one side.
    """
    records = load_records(config)
    if config.eval_path is not None:
        held_out = _load(config.eval_path, config.name, config.eval_split or "train")
        return records, _finish(held_out, config, config.eval_path, None)
    if config.eval_split is not None:
        if config.path.startswith("builtin:") or _local_files(config.path):
            raise ConfigError(
                f"eval_split={config.eval_split!r} names a split of a Hub data set, but {config.path} is not one: "
                "give the file with the held-out records as eval_path, or set eval_fraction"
            )
        held_out = _load(config.path, config.name, config.eval_split)
        return records, _finish(held_out, config, f"{config.path} ({config.eval_split})", None)
    if config.eval_fraction == 0:
        return records, None
    num_held_out = max(1, round(config.eval_fraction * len(records)))
    if num_held_out >= len(records):
        raise DataError(
            f"eval_fraction={config.eval_fraction} of {len(records)} records leaves none to train on: lower it, or "
            "give eval_path"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(records))
    held_out_rows, train_rows = np.sort(order[:num_held_out]), np.sort(order[num_held_out:])
    return records.select(train_rows), records.select(held_out_rows)


def check_records(records: datasets.Dataset, config: DataConfig, source: str) -> None:
    """Raise unless every record has what `config.format` needs.

    Raises:
        DataError: no record; a missing column (names those present and the nearest); a null (number of the first
            record with one); a text column that doesn't hold text.
    """
    if len(records) == 0:
        raise DataError(f"{source}: {_EMPTY}")
    for name in required_columns(config):
        check_column(records.column_names, name, source)
        column = records.with_format("arrow")[:][name]
        if column.null_count:
            first = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{source}: column '{name}' has {column.null_count} nulls, the first in record {first}: fill them, or "
                "remove these records from the data before this run"
            )
        kind = str(column.type)
        if name not in (config.label_column, config.messages_column) and "string" not in kind:
            raise DataError(f"{source}: column '{name}' holds {kind}, but text is needed: store it as text")


def check_column(present: list[str], name: str, source: str) -> None:
    """Raise `DataError` unless the column `name` is among those `present`."""
    if name not in present:
        raise DataError(
            f"{source}: no column '{name}'{nearest(name, present) or '.'} It has the columns {', '.join(present)}"
        )


def _finish(records: datasets.Dataset, config: DataConfig, source: str, limit: int | None) -> datasets.Dataset:
    if limit is not None:
        records = records.select(range(min(limit, len(records))))
    check_records(records, config, source)
    return records


def _load(path: str, name: str | None, split: str) -> datasets.Dataset:
    if path.startswith("builtin:"):
        corpus = path.removeprefix("builtin:")
        if corpus not in BUILTIN:
            raise ConfigError(f"unknown corpus {path!r}{nearest(corpus, BUILTIN) or '.'} Known: {', '.join(BUILTIN)}")
        return datasets.Dataset.from_list(BUILTIN[corpus]())
    files = _local_files(path)
    if files:
        return _load_local(path, files, split)
    return _load_hub(path, name, split)


def _local_files(path: str) -> list[str]:
    """Return the files that a local path means; none when it is a Hub name."""
    place = Path(path).expanduser()
    if place.is_dir():
        found = sorted(str(file) for file in place.rglob("*") if file.suffix in READERS)
        if not found:
            raise ConfigError(f"{path}: the folder has no file that ends in {', '.join(READERS)}")
        return found
    if place.is_file():
        return [str(place)]
    if glob.has_magic(path):
        found = sorted(glob.glob(str(place), recursive=True))
        if not found:
            raise ConfigError(f"{path}: no file matches this pattern")
        return found
    if place.suffix in READERS or path.startswith((".", "/", "~")):
        raise ConfigError(f"{path}: no such file or folder (seen from {os.getcwd()})")
    return []


def _load_local(path: str, files: list[str], split: str) -> datasets.Dataset:
    endings = sorted({Path(file).suffix for file in files})
    if len(endings) > 1:
        raise ConfigError(
            f"{path}: files of different kinds ({', '.join(endings)}): name one kind, such as {path}/*.csv"
        )
    if endings[0] not in READERS:
        raise ConfigError(f"{path}: can't read files that end in '{endings[0]}'; known: {', '.join(READERS)}")
    builder, options = READERS[endings[0]]
    # A local path has one split; it takes the name the recipe asks for, so that a path can stand in for a Hub name.
    data_files = {split.partition("[")[0] or "train": files}
    try:
        return datasets.load_dataset(builder, data_files=data_files, split=split, **options)
    except (datasets.exceptions.DatasetsError, ValueError, OSError, StopIteration) as error:
        cause = error.__cause__ or error
        if isinstance(cause, StopIteration) or any(words in str(cause) for words in _NO_RECORDS):
            raise DataError(f"{path}: {_EMPTY}") from error
        raise DataError(f"{path}: can't be read as {builder}: {type(cause).__name__}: {_one_line(cause)}") from error


def _load_hub(path: str, name: str | None, split: str) -> datasets.Dataset:
    try:
        try:
            return datasets.load_dataset(path, name, split=split)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            # An old data set that is a program: the Hub keeps its records as Parquet files on a branch of their own.
            return datasets.load_dataset(path, data_dir=name, split=split, revision=PARQUET_BRANCH)
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set: only data sets already in the cache are found)"
        raise ConfigError(
            f"data set {path!r} (name={name!r}, split={split!r}) can't be loaded from the Hub"
            f"{offline if datasets.config.HF_HUB_OFFLINE else ''}: {_one_line(error)}. "
            "Check the name, or give a local file or folder as data.path"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")

"""Loading of records: from a Hub data set, local files, or a corpus of a pip package.

Place in the flow: first of the data stages; local files are read by `dpllm.data.readers`. A *record* is the
unit of the sequence level, so nothing here filters, deduplicates or reorders: the number of records is the N of the
guarantee. A faulty record is an error here, before any training; the message gives its number (counted from 0) and
never its text.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpllm.config import ConfigError, DataConfig, PrivacyUnit, RecordFormat, nearest
from dpllm.data.content_index import ContentIndex, count_copies
from dpllm.data.corpora import BUILTIN
from dpllm.data.readers import (
    READERS,
    content_hash,
    files_of_folder,
    read_tables,
    refuse_equal_files,
    refuse_mixed_kinds,
)
from dpllm.data.readers import DataError as DataError
from dpllm.data.scratch import store
from dpllm.data.units import UnitIndex

PARQUET_BRANCH = "refs/convert/parquet"
"""Branch of the Hub with the records of data sets that cannot be read directly."""

HELD_OUT_SEED = 20240229
"""Public constant that fixes which record numbers `eval_fraction` holds out."""

MANY_COPIES = 0.01
"""Above this share of records that are copies of others, the report has an open point."""

_EMPTY = "empty data set: there is no record to train on; check path, split and limit"
_PUBLIC_ROWS = 0.04  # of public rows; those of the same kind by others, such as E2E's or speeches, hold up to 3 %
_SAME_RECORDS = 0.5  # held-out records are refused when at least this share of them is in the training data
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_ROWS = 4096  # number of rows read together
_INDEXES: weakref.WeakKeyDictionary[datasets.Dataset, tuple[Any, ContentIndex]] = weakref.WeakKeyDictionary()
"""Content indexes of records, with their columns and units."""


def required_columns(config: RecordFormat) -> list[str]:
    """Return the columns that every record must have for `config.format`.

    >>> required_columns(RecordFormat(format="classification", text_column="sentence"))
    ['sentence', 'label']
    """
    return {
        "text": [config.text_column],
        "prompt_completion": [config.prompt_column, config.completion_column],
        "chat": [config.messages_column],
        "preference": [config.chosen_column, config.rejected_column],
        "classification": [config.text_column, config.label_column],
        "tokens": [config.words_column, config.tags_column],
        "question_answering": [config.question_column, config.context_column, config.answers_column],
    }[config.format]


def load_records(config: DataConfig, privacy: PrivacyUnit | None = None) -> datasets.Dataset:
    """Return the training records, one row each, unchanged and in their order.

    Cells of CSV and TSV files are text; only the labels of a classification become whole numbers, strictly. Local files
    are copied into a private folder of this process (`dpllm.data.scratch`), which is removed when the process ends.

    Args:
        config: source of the records. `limit` keeps only that number of records, from the first on.
        privacy: definition of a unit. None: a unit is one record.

    Raises:
        ConfigError: the path, split or builtin corpus does not exist or cannot be reached.
        DataError: no record, a missing column, a null, a column of the wrong kind, a file that cannot be decoded, or
            two equal files.
    """
    records = _finish(read_unchecked(config), config, config.path, config.limit)
    note_copies(records, text_columns(config), unit_column_of(privacy))
    return records


def read_unchecked(config: DataConfig) -> datasets.Dataset:
    """Return the training records as they are read, before any check of their columns; as `load_records` otherwise."""
    return _load(config.path, config, config.split)


def load_train_and_eval(
    config: DataConfig, privacy: PrivacyUnit | None = None
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the training records and the held-out records (None when the recipe names none).

    Held-out records come from `eval_path`, from `eval_split`, or are a share `eval_fraction` of the training records,
    chosen by record number with a public constant, before N is fixed: N counts the records that remain. At user level
    whole users are held out, so no held-out record belongs to a user whose records are trained on.

    Args:
        config: source of the records.
        privacy: definition of a unit. None: a unit is one record.

    Raises:
        ConfigError: as for `load_records`; also for `eval_split` of a local path without `eval_path`, and for a
            held-out file or split that is part of the training data.
        DataError: as for `load_records`; also for a share that leaves no record on one side, and for held-out records
            most of which are training records.
    """
    train, held_out = _train_and_eval(config, privacy)
    ids = [] if privacy is None or privacy.unit_column is None else [privacy.unit_column]
    keep_notes(train, train, contents=hash_of_records(train, [*required_columns(config), *ids]))
    if held_out is not None and config.eval_is_public:
        note_public_rows(train, held_out, config, unit_column_of(privacy))
    return train, held_out


def note_public_rows(
    records: datasets.Dataset, public: datasets.Dataset, config: RecordFormat, unit_column: str | None
) -> None:
    """Note whether rows for evaluation that are declared public hold training records.

    Args:
        records: to train on.
        public: the rows for evaluation.
        config: of the form of both.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    found = index_of(records, config, unit_column).found_in(public, text_columns(config), nearly_all=True)
    keep_notes(records, records, public_rows=bool(found.sum() > _PUBLIC_ROWS * len(public)))


def contents_of(records: datasets.Dataset) -> str | None:
    """Return a hash of the contents of training records, or of the records that rows were made of.

    It is that of the columns that are trained on, and of the units' ids. None: `load_train_and_eval` did not read them.
    """
    found = _notes(records).get("contents")
    return None if found is None else str(found)


def _train_and_eval(
    config: DataConfig, privacy: PrivacyUnit | None
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return what `load_train_and_eval` does, without its note."""
    if config.eval_path is not None:
        _refuse_shared_files(config)
    if config.eval_split is not None and config.eval_split == config.split:
        raise ConfigError(
            f"eval_split={config.eval_split!r} is also the training split: name another split, or set eval_fraction"
        )
    records = load_records(config, privacy)
    if config.eval_path is not None:
        held_out = _finish(_load(config.eval_path, config, config.eval_split or "train"), config, config.eval_path)
        _refuse_shared_records(records, held_out, config, config.eval_path)
        return records, held_out
    if config.eval_split is not None:
        if config.path.startswith("builtin:") or local_files(config.path):
            raise ConfigError(
                f"eval_split={config.eval_split!r} names a split of a Hub data set, but {config.path} is not one: "
                "give the file with the held-out records as eval_path, or set eval_fraction"
            )
        source = f"{config.path} ({config.eval_split})"
        held_out = _finish(_load(config.path, config, config.eval_split), config, source)
        _refuse_shared_records(records, held_out, config, source)
        return records, held_out
    if config.eval_fraction == 0:
        return records, None
    units = _units_to_hold_out(records, config, privacy)
    num_units = int(units.max()) + 1
    num_held_out = max(1, round(config.eval_fraction * num_units))
    if num_held_out >= num_units:
        raise DataError(
            f"eval_fraction={config.eval_fraction} of {num_units} {'users' if num_units < len(records) else 'records'} "
            "leaves none for training: lower it, or give eval_path"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(num_units)
    held_out = np.zeros(num_units, dtype=bool)
    held_out[order[:num_held_out]] = True
    return records.select(np.flatnonzero(~held_out[units])), records.select(np.flatnonzero(held_out[units]))


def _units_to_hold_out(records: datasets.Dataset, config: DataConfig, privacy: PrivacyUnit | None) -> NDArray[np.int64]:
    """Return (num_records,) unit numbers; a unit (a user, or the record itself) is held out as a whole."""
    if privacy is None or privacy.unit != "user":
        return np.arange(len(records))
    column = str(privacy.unit_column)
    check_column(records.column_names, column, config.path)
    index = UnitIndex.from_ids(records[column], normalize=privacy.normalize_ids)
    units = np.empty(len(records), dtype=np.int64)
    rows, units_of_rows = index.rows_of(np.arange(index.num_units))
    units[rows] = units_of_rows
    return units


def check_records(records: datasets.Dataset, config: RecordFormat, source: str) -> None:
    """Raise unless every record has the columns and values that `config.format` needs.

    Raises:
        DataError: no record; a missing column (names those present and the nearest); a null (number of the first
            record with one); a text column that does not hold text; a chat that is not a list of messages.
    """
    if len(records) == 0:
        raise DataError(f"{source}: {_EMPTY}")
    for name in required_columns(config):
        check_column(records.column_names, name, source)
        column = records.with_format("arrow")[:][name]
        if column.null_count:
            first = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{source}: column '{name}' has {column.null_count} nulls, the first in record {first}, counted from "
                "0: fill them, or remove these records from the data before this run"
            )
        if name == config.messages_column and config.format == "chat":
            _check_chats(column, name, source)
        elif config.format == "tokens":
            if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
                raise DataError(
                    f"{source}: column '{name}' holds {column.type}, but a list is needed, with one entry for each "
                    "word: store it as .jsonl or .parquet"
                )
        elif config.format != "preference" and not _is_text(column.type) and name not in _labels_of(config):
            raise DataError(f"{source}: column '{name}' holds {column.type}, but text is needed: store it as text")


def _labels_of(config: RecordFormat) -> list[str]:
    """Return the columns that hold no text of their own."""
    return {
        "classification": [config.label_column],
        "tokens": [config.tags_column],
        "question_answering": [config.answers_column],
    }.get(config.format, [])


def text_columns(config: RecordFormat) -> list[str]:
    """Return the columns of `required_columns` that hold text, or lists of words or messages."""
    return [name for name in required_columns(config) if name not in _labels_of(config)]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_chats(column: pa.ChunkedArray, name: str, source: str) -> None:
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not lists or not (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise DataError(
            f"{source}: column '{name}' holds {kind}, but a chat is a list of {{role, content}}: store it so, or set "
            "data.messages_column"
        )
    for start in range(0, len(column), _ROWS):
        for number, chat in enumerate(column.slice(start, _ROWS).to_pylist(), start=start):
            check_chat(chat, number)


def check_chat(chat: Sequence[Mapping[str, Any] | None], number: int) -> None:
    """Raise unless a chat is a list of messages, each with a role and a content that are text.

    Raises:
        DataError: gives the number of the record and of the message.
    """
    if not chat:
        raise DataError(f"record {number}: the chat has no message: {_REMEDY}")
    for position, message in enumerate(chat):
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise DataError(
                    f"record {number}: message {position} has no text in '{key}'; a chat is a list of "
                    f"{{role, content}}: {_REMEDY}"
                )


def check_column(present: list[str], name: str, source: str) -> None:
    """Raise `DataError` unless the column `name` is among those `present`."""
    if name not in present:
        raise DataError(
            f"{source}: no column '{name}'{nearest(name, present) or '.'} It has the columns {', '.join(present)}"
        )


def sources_of(records: datasets.Dataset) -> dict[str, int]:
    """Return the local files of records, or of rows made of them: name -> number of records in the file.

    Empty for a data set that was not read from local files.
    """
    return dict(_notes(records).get("files", {}))


def has_many_copies(records: datasets.Dataset, unit_column: str | None = None) -> bool:
    """Return whether more than `MANY_COPIES` of the loaded records are copies of others, or of other users' records.

    Args:
        records: the records, or rows made of them.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    notes = _notes(records)
    return bool(notes.get("copies", False)) and notes.get("copies_of") == unit_column


def has_public_rows(records: datasets.Dataset) -> bool:
    """Return whether rows for evaluation that are declared public hold some of the loaded training records."""
    return bool(_notes(records).get("public_rows", False))


def keep_notes(records: datasets.Dataset, rows: datasets.Dataset, **more: Any) -> None:
    """Copy the notes of `records` to the `rows` made of them, and add `more` to them."""
    rows.info.description = json.dumps({**_notes(records), **more})


def _notes(records: Any) -> dict[str, Any]:
    """Return the notes of this library in the description of a data set."""
    if isinstance(records, datasets.Dataset):
        with contextlib.suppress(TypeError, ValueError):
            found = json.loads(records.info.description)
            return found if isinstance(found, dict) else {}
    return {}


def _finish(records: datasets.Dataset, config: DataConfig, source: str, limit: int | None = None) -> datasets.Dataset:
    if limit is not None:
        records = records.select(range(min(limit, len(records))))
    if config.format == "classification" and config.label_column in records.column_names:
        records = with_class_numbers(records, config, source)
    check_records(records, config, source)
    return records


def with_class_numbers(records: datasets.Dataset, config: DataConfig, source: str) -> datasets.Dataset:
    """Turn text labels into class numbers: by the names in the recipe, or by reading them as decimal digits.

    Raises:
        DataError: a label is neither; gives the number of the first such record.
    """
    name = config.label_column
    feature, labels = records.features[name], records.with_format("arrow")[:][name]
    names = config.class_names
    if names is not None and isinstance(feature, datasets.ClassLabel) and feature.names != names:
        raise DataError(
            f"{source}: the file of column '{name}' lists its classes in another order or under other names than "
            "data.class_names: list them in data.class_names as the file does"
        )
    if not _is_text(labels.type) or len(records) == 0:
        return records
    known = None if names is None else {text: number for number, text in enumerate(names)}
    classes: list[int | None] = []
    for number, label in enumerate(labels.to_pylist()):
        if label is None:
            classes.append(None)
        elif known is not None and label in known:
            classes.append(known[label])
        elif known is None and _NUMBER.fullmatch(label):
            classes.append(int(label))
        else:
            need = "is not one of data.class_names" if known else "is text and not a class number"
            raise DataError(
                f"{source}: the label of record {number} (column '{name}') {need}: write the classes as 0, 1, 2, ..., "
                "or name them all, in order, as data.class_names"
            )
    notes, order = records.info.description, records.column_names
    numbered = records.remove_columns(name).add_column(name, pa.array(classes, pa.int64()).to_pylist())
    numbered = numbered.select_columns(order)
    numbered.info.description = notes
    return numbered


def note_copies(records: datasets.Dataset, columns: Sequence[str], unit_column: str | None = None) -> None:
    """Note whether many records are copies of other records; at user level, of those of other users.

    Args:
        records: the records; one that has the note for these units already is not read again.
        columns: those with texts.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    if _notes(records).get("copies_of", "") != unit_column:
        copies = count_copies(records, columns, units_of(records, unit_column))
        keep_notes(records, records, copies=copies > MANY_COPIES * len(records), copies_of=unit_column)


def index_of(records: datasets.Dataset, config: RecordFormat, unit_column: str | None = None) -> ContentIndex:
    """Return the content index of records, which is made when it is first needed.

    Args:
        records: the records; an index belongs to this object.
        config: of their form.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    wanted = (tuple(text_columns(config)), unit_column)
    known = _INDEXES.get(records)
    if known is None or known[0] != wanted:
        known = _INDEXES[records] = wanted, ContentIndex(records, wanted[0], units_of(records, unit_column))
    return known[1]


def unit_column_of(privacy: PrivacyUnit | None) -> str | None:
    """Return the column of the users' ids; None if a unit is a record."""
    return privacy.unit_column if privacy is not None and privacy.unit == "user" else None


def units_of(records: datasets.Dataset, unit_column: str | None) -> NDArray[np.int64] | None:
    """Return (num_records,) unit numbers; None if each record is a unit, or ids cannot be used, which is refused later.

    Args:
        records: the records.
        unit_column: column of the users' ids.
    """
    if unit_column is None or unit_column not in records.column_names:
        return None
    with contextlib.suppress(pa.ArrowException):
        ids = records.select_columns([unit_column]).with_format("arrow")[:][unit_column]
        codes = pa.concat_arrays(ids.chunks).dictionary_encode().indices
        return codes.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return None


def _refuse_shared_records(
    records: datasets.Dataset, held_out: datasets.Dataset, config: RecordFormat, source: str
) -> None:
    """Raise when most of the held-out records are training records, in any file."""
    index = index_of(held_out, config)
    shared = int(index.found_in(records, text_columns(config), nearly_all=True).sum())
    if shared and shared >= _SAME_RECORDS * index.long.sum():
        raise DataError(
            f"{source}: {shared} of {index.long.sum()} held-out records are training records, so nothing is held "
            "out: give records that are not in data.path, or set eval_fraction"
        )


def _refuse_shared_files(config: DataConfig) -> None:
    """Raise when a held-out file is a training file, or a copy of one.

    Raises:
        ConfigError: names both.
    """
    trained, held_out = (
        [] if path.startswith("builtin:") else [Path(file) for file in local_files(path)]
        for path in (config.path, str(config.eval_path))
    )
    by_size = {file.stat().st_size for file in trained}
    hashes: dict[bytes, Path] = {}
    for file in held_out:
        same = next((other for other in trained if os.path.samefile(file, other)), None)
        if same is None and file.stat().st_size in by_size:
            hashes = hashes or {content_hash(other): other for other in trained}
            same = hashes.get(content_hash(file))
        if same is not None:
            raise ConfigError(
                f"eval_path={config.eval_path}: {file} is part of data.path={config.path} (as {same}), so the model "
                "would be trained on it: move it out of that folder, or name only the training files by a pattern"
            )


def shared_source(private: DataConfig, public: DataConfig) -> str | None:
    """Return a file, or a data set, of which both sections read records. Nothing is opened; copies are not found.

    Args:
        private: a section. Its held-out records count too, unless ``eval_is_public`` declares them public.
        public: another section, of which only ``path`` and ``split`` count.
    """
    held_out = not private.eval_is_public
    paths = [private.path] + ([private.eval_path] if private.eval_path is not None and held_out else [])
    theirs = _files_named(public.path)
    for path in paths:
        mine = _files_named(path)
        if not mine and not theirs and (path, private.name) == (public.path, public.name):
            splits = {private.split, private.eval_split if held_out else None} - {None}
            names = [
                {part.partition("[")[0].strip() for split in used for part in str(split).split("+")}
                for used in (splits, {public.split})
            ]
            if path.startswith("builtin:") or names[0] & names[1]:
                return path
        for file, same in itertools.product(mine, theirs):
            exist = os.path.exists(file) and os.path.exists(same)
            if os.path.samefile(file, same) if exist else os.path.abspath(file) == os.path.abspath(same):
                return file
    return None


def _files_named(path: str) -> list[str]:
    """Return the files of a local path, or a path that names no file now; none for a Hub name or a corpus."""
    if path.startswith("builtin:"):
        return []
    try:
        return local_files(path)
    except ConfigError:  # it has no such file now
        return [str(Path(path).expanduser())]


def _load(path: str, config: DataConfig, split: str) -> datasets.Dataset:
    if path.startswith("builtin:"):
        corpus = path.removeprefix("builtin:")
        if corpus not in BUILTIN:
            raise ConfigError(f"unknown corpus {path!r}{nearest(corpus, BUILTIN) or '.'} Known: {', '.join(BUILTIN)}")
        return datasets.Dataset.from_list(BUILTIN[corpus]())
    files = local_files(path)
    if files:
        return _load_local(path, files, split, config.encoding)
    return _load_hub(path, config.name, split)


def local_files(path: str) -> list[str]:
    """Return the files of a local path; none when the path is a Hub name."""
    place = Path(path).expanduser()
    if place.is_dir():
        if (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
            raise ConfigError(
                f"{path}: the folder holds a data set written by save_to_disk. Write its records as one file: "
                "datasets.load_from_disk(path).to_parquet('records.parquet')"
            )
        found = [str(file) for file in files_of_folder(place, READERS)]
        if not found:
            raise ConfigError(f"{path}: the folder has no file that ends in {', '.join(READERS)}")
        return found
    if place.is_file():
        return [str(place)]
    if glob.has_magic(path):
        found = sorted(file for file in glob.glob(str(place), recursive=True) if os.path.isfile(file))
        if not found:
            raise ConfigError(f"{path}: no file matches this pattern")
        return found
    if place.suffix in READERS or path.startswith((".", "/", "~")):
        raise ConfigError(f"{path}: no such file or folder (seen from {os.getcwd()})")
    return []


def _load_local(path: str, files: list[str], split: str, encoding: str) -> datasets.Dataset:
    endings = sorted({Path(file).suffix for file in files})
    if len(endings) > 1:
        raise ConfigError(
            f"{path}: the folder has files of different kinds ({', '.join(endings)}): name one kind, such as "
            f"{path}/*.csv"
        )
    if endings[0] not in READERS:
        raise ConfigError(f"{path}: cannot read files that end in '{endings[0]}'; known: {', '.join(READERS)}")
    places = [Path(file) for file in files]
    refuse_equal_files(places, path)
    counts: dict[str, int] = {}
    try:
        records = store(_tables(places, encoding, counts))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{path}: its files hold different kinds of values in one column: {_one_line(error)}: write the column in "
            "one form in all files"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read or copied to the private folder: {_one_line(error)}") from error
    if records is None:
        raise DataError(f"{path}: {_EMPTY}")
    keep_notes(records, records, files=counts)
    # A local path has one split. It gets the name in the recipe, so that a path can replace a Hub name.
    name = re.split(r"[\[+]", split)[0].strip() or "train"
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(records)})
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"data.split={split!r} is not a part of {path}: {_one_line(error)}") from error
    refuse_overlap(split, {name: len(records)})
    whole = len(parts) == 1 and (parts[0].from_ or 0, parts[0].to) in ((0, None), (0, len(records)))
    if whole:
        return records
    return records.select([row for part in parts for row in range(part.from_ or 0, _end(part.to, len(records)))])


def _end(to: int | None, size: int) -> int:
    return size if to is None else to


def refuse_overlap(split: str, sizes: Mapping[str, int]) -> None:
    """Check that the parts of a split have no record in common: it would count as two and be protected less.

    Args:
        split: as in a recipe, such as ``train[:10%]+train[90%:]``.
        sizes: split name -> number of records; a part of a split that is not named here is treated as the whole split.

    Raises:
        ConfigError: two parts overlap.

    >>> refuse_overlap("train[:10%]+train[90%:]+test", {"train": 50, "test": 9})
    """
    sizes = {**{part.partition("[")[0].strip(): 1 for part in split.split("+")}, **sizes}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    spans = sorted((part.splitname, part.from_ or 0, _end(part.to, sizes[part.splitname])) for part in parts)
    for (name, _, end), (other, begin, last) in itertools.pairwise(spans):
        if name == other and begin < end and begin < last:
            raise ConfigError(
                f"data.split={split!r} takes record {begin} of {name!r} twice: it would count as two records, each "
                "protected separately, and be protected half as well. Write parts that do not overlap"
            )


def _tables(files: list[Path], encoding: str, counts: dict[str, int]) -> Iterator[pa.Table]:
    """Yield the tables of all files, and count the records of each under its path within their common folder."""
    kinds: dict[str, tuple[str, Path]] = {}
    common = os.path.commonpath([file.parent for file in files])
    for file in files:
        name = os.path.relpath(file, common)
        counts[name] = 0
        for table in read_tables(file, encoding):
            for field in table.schema:
                refuse_mixed_kinds(field.name, kinds, file, field.type)
            counts[name] += table.num_rows
            yield table


def _load_hub(path: str, name: str | None, split: str) -> datasets.Dataset:
    mask = os.umask(0o077)  # only the owner can read the copies that `datasets` leaves in its cache
    try:
        try:
            return _without_overlap(datasets.load_dataset(path, name, split=split), split)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            # An old data set that is a program: the Hub has its records as Parquet files on a separate branch.
            found = datasets.load_dataset(path, data_dir=name, split=split, revision=PARQUET_BRANCH)
            return _without_overlap(found, split)
    except ConfigError:
        raise
    except (datasets.exceptions.DatasetsError, RuntimeError, ValueError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set: only data sets already in the cache are found)"
        raise ConfigError(
            f"data set {path!r} (name={name!r}, split={split!r}) cannot be loaded from the Hub"
            f"{offline if datasets.config.HF_HUB_OFFLINE else ''}: {_one_line(error)}. "
            "Check the name, or give a local file or folder as data.path"
        ) from error
    finally:
        os.umask(mask)


def _without_overlap(records: datasets.Dataset, split: str) -> datasets.Dataset:
    """Return a Hub data set after checking that the parts of its split have no record in common."""
    sizes = {str(name): info.num_examples for name, info in (records.info.splits or {}).items() if info.num_examples}
    if "+" in split:
        refuse_overlap(split, sizes)
    return records


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


_REMEDY = "fill it in, or remove it from the data before this run"


_TOGETHER = 1000
"""Records that are hashed together. Another number gives another hash."""


def hash_of_records(records: datasets.Dataset, columns: Sequence[str]) -> str:
    """Return a hash of some columns of all records, in their order, to compare a later reading with.

    It is of private text, so it is never written as it is: the ledger gets its HMAC under a key that is not released
    (`dpllm.privacy.same_rows`).

    Args:
        records: the records.
        columns: their names; those that the records lack are left out.
    """
    digest = hashlib.sha256()
    present = [name for name in dict.fromkeys(columns) if name in records.column_names]
    for table in records.select_columns(present).with_format("arrow").iter(batch_size=_TOGETHER):
        digest.update(json.dumps([table[name].to_pylist() for name in present], default=str).encode())
    return digest.hexdigest()

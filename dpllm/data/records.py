"""Load records from a Hub data set, local files, or a corpus in a pip package.

`dpllm.data.readers` reads local files. A *record* is the unit at sequence level, so nothing here deduplicates or
reorders, and only ``data.missing`` filters: the number of records is the N of the guarantee. A faulty record raises an
error here, before any training; the message gives its number (counted from 0) and never its text.
"""

from __future__ import annotations

import contextlib
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

from dpllm.config import ConfigError, DataConfig, PrivacyUnit, nearest
from dpllm.config.formats.record_format import Cells, Chat, Pair, TextLabel, columns_in
from dpllm.data.content_index import ContentIndex, count_copies
from dpllm.data.corpora import BUILTIN
from dpllm.data.local_files import LocalFiles, find_files, local_files, refuse_several_kinds, split_names
from dpllm.data.messages import is_conversation, read_messages
from dpllm.data.private_tempdir import store
from dpllm.data.readers import NOTHING, Reading, content_hash, kind_of, read_tables, refuse_equal_files
from dpllm.data.readers import DataError as DataError
from dpllm.data.units import UnitIndex
from dpllm.data.values import decoded

PARQUET_BRANCH = "refs/convert/parquet"
"""Branch of the Hub with the records of data sets that cannot be read directly."""

HELD_OUT_SEED = 20240229
"""Public constant that fixes which record numbers ``data.eval.share`` holds out."""

CHATS = "chats"
"""Note on rows that were made from conversations: "turns" if only the assistant's turns have loss, otherwise "all"."""

MANY_COPIES = 0.01
"""If more than this share of records are copies of others, the report has an open point."""

_EMPTY = "empty data set: there is no record to train on; check path, split and limit"
_PUBLIC_ROWS = 0.04  # share of public rows; independent texts of the same kind (E2E, speeches) share up to 3 %
_SAME_RECORDS = 0.5  # held-out records are refused when at least this share of them is in the training data
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_ROWS = 4096  # number of rows read together
_INDEXES: weakref.WeakKeyDictionary[datasets.Dataset, tuple[Any, ContentIndex]] = weakref.WeakKeyDictionary()
"""Content indexes of records, with their columns and units."""

DOCUMENTS = (
    "Each line of the text files was read as a separate record, so the guarantee protects one line, not one document. "
    "There are several files, or blank lines between paragraphs. If documents have several lines, set data.txt_records "
    "to file or paragraph; data.txt_records=line confirms that each line is a separate record."
)
"""Printed, and an open point of the report, if lines of text files may be parts of documents."""


def required_columns(config: DataConfig) -> list[str]:
    """Return the columns that every record must have for `config.format`.

    >>> required_columns(DataConfig(path="x", max_length=8, format="classification", columns={"text": "sentence"}))
    ['sentence', 'label']
    """
    return config.form.required


def load_records(config: DataConfig, privacy: PrivacyUnit | None = None) -> datasets.Dataset:
    """Return the training records, one row each, unchanged and in their order.

    Cells of CSV and TSV files are text; only the labels of a classification become whole numbers, strictly. Local files
    are copied into a private folder of this process (`dpllm.data.private_tempdir`), which is removed when it ends.

    Args:
        config: source of the records. `limit` keeps only the first records.
        privacy: definition of a unit; None: a unit is one record. With ``missing="drop"``, a record without an id is
            also dropped.

    Raises:
        ConfigError: the path, split or builtin corpus does not exist or cannot be reached.
        DataError: there is no record, a column is missing or of the wrong type, a value is null, a file cannot be
            decoded, or two files are equal.
    """
    records = _finish(read_unchecked(config), config, config.path, config.limit, privacy)
    note_copies(records, text_columns(config), unit_column_of(privacy))
    return records


def read_unchecked(config: DataConfig) -> datasets.Dataset:
    """Return the training records as `load_records` does, but without checking their columns."""
    return _load(config.path, config, config.split)


def load_train_and_eval(
    config: DataConfig, privacy: PrivacyUnit | None = None
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the training records and the held-out records (None when the recipe names none).

    Held-out records come from ``data.eval.path``, from ``data.eval.split``, or are a share of the training records,
    chosen by record number with a public constant, before N is fixed: N counts the records that remain. At user level
    whole users are held out, so no held-out record belongs to a user whose records are trained on.

    Args:
        config: source of the records.
        privacy: definition of a unit. None: a unit is one record.

    Raises:
        ConfigError: as for `load_records`; also for ``data.eval.split`` of a local path, and for a
            held-out file or split that is part of the training data.
        DataError: as for `load_records`; also for a share that leaves one side without records, and if most held-out
            records are training records.
    """
    train, held_out = _train_and_eval(config, privacy)
    ids = [] if privacy is None or privacy.unit is None else [privacy.unit]
    keep_notes(train, train, contents=hash_of_records(train, [*config.form.names, *ids]))
    if held_out is not None and config.eval.public:
        note_public_rows(train, held_out, config, unit_column_of(privacy))
    return train, held_out


def note_public_rows(
    records: datasets.Dataset, public: datasets.Dataset, config: DataConfig, unit_column: str | None
) -> None:
    """Note whether evaluation rows that are declared public contain training records.

    Args:
        records: the training records.
        public: the evaluation rows.
        config: the format of both.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    found = index_of(records, config, unit_column).found_in(public, text_columns(config), nearly_all=True)
    keep_notes(records, records, public_rows=bool(found.sum() > _PUBLIC_ROWS * len(public)))


def contents_of(records: datasets.Dataset) -> str | None:
    """Return a hash of the contents of training records, or of the records from which rows were made.

    It covers the columns that are trained on and the units' ids. None: `load_train_and_eval` did not read them.
    """
    found = _notes(records).get("contents")
    return None if found is None else str(found)


def _train_and_eval(
    config: DataConfig, privacy: PrivacyUnit | None
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Return the result of `load_train_and_eval`, without its note."""
    if config.eval.path is not None:
        _refuse_shared_files(config)
    if config.eval.split is not None and config.eval.split == config.split:
        raise ConfigError(
            f"data.eval.split={config.eval.split!r} is also the training split: name a different split, or a share"
        )
    records = load_records(config, privacy)
    if config.eval.path is not None:
        held_out = _finish(_load(config.eval.path, config, _eval_split(config)), config, config.eval.path)
        _refuse_shared_records(records, held_out, config, config.eval.path)
        return records, held_out
    if config.eval.split is not None:
        local = None if config.path.startswith("builtin:") else find_files(config.path)
        if config.path.startswith("builtin:") or (local and not local.splits):
            raise ConfigError(
                f"data.eval.split={config.eval.split!r} names a split, but {config.path} has none: set data.eval to "
                "the file with the held-out records, or to a share"
            )
        if local and set(split_names(config.eval.split, local)) & set(split_names(config.split, local)):
            raise ConfigError(
                f"data.eval.split={config.eval.split!r} shares files with the training split: name a different split, "
                "or a share"
            )
        source = f"{config.path} ({config.eval.split})"
        held_out = _finish(_load(config.path, config, config.eval.split), config, source)
        _refuse_shared_records(records, held_out, config, source)
        return records, held_out
    if config.eval.share is None:
        return records, None
    units = _units_to_hold_out(records, config, privacy)
    num_units = int(units.max()) + 1
    num_held_out = max(1, round(config.eval.share * num_units))
    if num_held_out >= num_units:
        raise DataError(
            f"data.eval={config.eval.share} of {num_units} {'users' if num_units < len(records) else 'records'} "
            "leaves none for training: lower it, or set the path of separate records"
        )
    order = np.random.default_rng(HELD_OUT_SEED).permutation(num_units)
    held_out = np.zeros(num_units, dtype=bool)
    held_out[order[:num_held_out]] = True
    return records.select(np.flatnonzero(~held_out[units])), records.select(np.flatnonzero(held_out[units]))


def _eval_split(config: DataConfig) -> str:
    """Return the split of ``data.eval.path``; for a folder with only one split, that split."""
    path = str(config.eval.path)
    local = None if config.eval.split or path.startswith("builtin:") else find_files(path)
    if local and len(local.splits) > 1:
        raise ConfigError(
            f"data.eval.path={path} has the splits {', '.join(local.splits)}: name one with data.eval.split"
        )
    return next(iter(local.splits)) if local and len(local.splits) == 1 else config.eval.split or "train"


def _units_to_hold_out(records: datasets.Dataset, config: DataConfig, privacy: PrivacyUnit | None) -> NDArray[np.int64]:
    """Return (num_records,) unit numbers; a unit (a user, or the record itself) is held out as a whole."""
    if privacy is None or privacy.protects != "user":
        return np.arange(len(records))
    column = str(privacy.unit)
    check_column(records.column_names, column, config.path, records)
    index = UnitIndex.from_ids(records[column], normalize=privacy.normalize_ids)
    units = np.empty(len(records), dtype=np.int64)
    rows, units_of_rows = index.rows_of(np.arange(index.num_units))
    units[rows] = units_of_rows
    return units


def check_records(records: datasets.Dataset, config: DataConfig, source: str) -> None:
    """Check that every record has the columns and values that `config.format` needs.

    Raises:
        DataError: there is no record; a column is missing (the message names the present ones and the nearest); a value
            is null (it gives the first such record's number); a text column does not hold text; or a chat is not a list
            of messages.
    """
    if len(records) == 0:
        raise DataError(f"{source}: {_EMPTY}")
    form = config.form
    for key, about in columns_in(type(form)).items():
        name = getattr(form, key)
        if about.optional and name not in records.column_names:
            continue
        check_column(records.column_names, name, source, records)
        column = records.with_format("arrow")[:][name]
        if column.null_count and not about.optional:
            first = pc.index(pc.is_null(column), True).as_py()
            raise DataError(
                f"{source}: column '{name}' has {column.null_count} nulls, the first in record {first} (counted from "
                "0). Fill them in, or drop these records with data.missing=drop"
            )
        if about.cells is Cells.MESSAGES:
            _check_chats(column, name, source, records.features)
        elif about.cells is Cells.LIST and not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise DataError(
                f"{source}: column '{name}' holds {column.type}, but must hold lists with one entry per word. Store "
                "it as .jsonl or .parquet"
            )
        elif about.cells is Cells.TEXT and not _is_text(column.type) and not pa.types.is_null(column.type):
            raise DataError(f"{source}: column '{name}' holds {column.type}, but must hold text. Store it as text")


def text_columns(config: DataConfig) -> list[str]:
    """Return the columns of `required_columns` that hold text, or lists of words or messages."""
    return config.form.texts


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _check_chats(column: pa.ChunkedArray, name: str, source: str, features: datasets.Features) -> None:
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    objects = lists and (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type))
    for start in range(0, len(column), _ROWS):
        chats = decoded({name: column.slice(start, _ROWS).to_pylist()}, features)[name]
        for number, chat in enumerate(chats, start=start):
            text = isinstance(chat, str) and chat.lstrip().startswith("[")
            if not (objects or text or is_conversation(chat)):
                raise DataError(
                    f"{source}: column '{name}' holds {kind}, but a chat is a list of {{role, content}}. Store it in "
                    "this form, or set data.columns.messages"
                )
            read_messages(chat, f"record {number}")


def check_column(present: list[str], name: str, source: str, records: Any = None) -> None:
    """Check that a column is present.

    Args:
        present: names of the columns.
        name: name of the required column.
        source: source of the records, for the message.
        records: the data set; its notes say why a column of its files cannot be used.

    Raises:
        DataError: the column is missing or cannot be used.
    """
    if name not in present and name in (faults := column_faults(records)):
        raise DataError(faults[name])
    if name not in present:
        raise DataError(
            f"{source}: no column '{name}'{nearest(name, present) or '.'} It has the columns {', '.join(present)}"
        )


def sources_of(records: datasets.Dataset) -> dict[str, int]:
    """Return the local files of records, or of rows made from them: name -> number of records in the file.

    The result is empty for a data set that was not read from local files.
    """
    return dict(_notes(records).get("files", {}))


def has_many_copies(records: datasets.Dataset, unit_column: str | None = None) -> bool:
    """Return whether more than `MANY_COPIES` of the loaded records are copies of others, or of other users' records.

    Args:
        records: the records, or rows made from them.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    notes = _notes(records)
    return bool(notes.get("copies", False)) and notes.get("copies_of") == unit_column


def has_public_rows(records: datasets.Dataset) -> bool:
    """Return whether evaluation rows that are declared public contain some of the loaded training records."""
    return bool(_notes(records).get("public_rows", False))


def chats_in(rows: Any) -> str | None:
    """Return the note `CHATS` of rows; None for rows that were not made from conversations."""
    found = _notes(rows).get(CHATS)
    return None if found is None else str(found)


def column_faults(records: Any) -> dict[str, str]:
    """Return the columns of the local files that cannot be used, each with the reason."""
    return dict(_notes(records).get("faults", {}))


def reading_remarks(records: datasets.Dataset) -> list[str]:
    """Return what was detected in local files: skipped files, an encoding, a delimiter; for the screen only.

    The sentences may contain file names and private numbers, so they are not published.
    """
    return list(_notes(records).get("read", []))


def record_words(records: Any) -> str | None:
    """Return what one record is in the files that were read, such as "one line of a text file"; None: unknown."""
    return " or ".join(_notes(records).get("records_are", [])) or None


def may_be_documents(records: Any) -> bool:
    """Return whether each line of text files is a record although the files suggest multi-line documents."""
    return bool(_notes(records).get("documents", False))


def keep_notes(records: datasets.Dataset, rows: datasets.Dataset, **more: Any) -> None:
    """Copy the notes of `records` to the `rows` made from them, and add `more`."""
    rows.info.description = json.dumps({**_notes(records), **more})


def _notes(records: Any) -> dict[str, Any]:
    """Return this library's notes from the description of a data set."""
    if isinstance(records, datasets.Dataset):
        with contextlib.suppress(TypeError, ValueError):
            found = json.loads(records.info.description)
            return found if isinstance(found, dict) else {}
    return {}


def _finish(
    records: datasets.Dataset,
    config: DataConfig,
    source: str,
    limit: int | None = None,
    privacy: PrivacyUnit | None = None,
) -> datasets.Dataset:
    if limit is not None:
        records = records.select(range(min(limit, len(records))))
    if config.missing == "drop":
        ids = [] if privacy is None or privacy.unit is None else [privacy.unit]
        records = _without_missing(records, [*required_columns(config), *ids])
    name = config.form.labels
    if config.form.holds is TextLabel and name in records.column_names:
        records = with_class_numbers(records, str(name), config.class_names, source)
    check_records(records, config, source)
    return records


def _without_missing(records: datasets.Dataset, columns: Sequence[str]) -> datasets.Dataset:
    """Return the records that have a value in all columns. Whether a record is kept depends on that record alone.

    An empty text or list counts as missing, like an empty cell of a CSV file, and so does the class -1 of `datasets`.

    The number of dropped records is private: the counts of the files become those of the kept records.
    """
    kept = np.ones(len(records), dtype=bool)
    for name in set(columns) & set(records.column_names):
        column = records.with_format("arrow")[:][name]
        kept &= ~pc.fill_null(_is_empty(column), True).to_numpy(zero_copy_only=False)
        if isinstance(records.features[name], datasets.ClassLabel):  # `datasets` writes -1 for a missing class
            kept &= pc.not_equal(column.fill_null(-1), -1).to_numpy(zero_copy_only=False)
    if kept.all():
        return records
    notes = _notes(records)
    places = iter(np.split(kept, np.cumsum(list(notes.get("files", {}).values()))))
    files = {name: int(next(places).sum()) for name in notes.get("files", {})}
    remark = f"records without a value in {' or '.join(columns)} are dropped (data.missing=drop)"
    records = records.select(np.flatnonzero(kept))
    keep_notes(records, records, **{**notes, "files": files, "read": [*notes.get("read", []), remark]})
    return records


def _is_empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return (num_records,) whether a cell is missing, a blank text, or an empty list."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if _is_text(kind):
        return pc.equal(pc.utf8_trim_whitespace(column), "")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pc.equal(pc.list_value_length(column), 0)
    return pc.is_null(column)


def with_class_numbers(
    records: datasets.Dataset, name: str, names: Sequence[str] | None, source: str
) -> datasets.Dataset:
    """Turn text labels into class numbers: by the names of the classes, or by reading them as decimal numbers.

    Args:
        records: the records.
        name: column of the labels.
        names: names of all classes, in order. None: labels are numbers.
        source: source of the records, for messages.

    Raises:
        DataError: a label is neither; the message gives the number of the first such record.
    """
    feature, labels = records.features[name], records.with_format("arrow")[:][name]
    if names is not None and isinstance(feature, datasets.ClassLabel) and feature.names != list(names):
        raise DataError(
            f"{source}: the classes in column '{name}' of the file differ in order or names from data.class_names. "
            "List them in data.class_names as the file does"
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
                f"{source}: the label of record {number} (column '{name}') {need}. Write the classes as 0, 1, 2, ..., "
                "or list all their names, in order, in data.class_names"
            )
    notes, order = records.info.description, records.column_names
    numbered = records.remove_columns(name).add_column(name, pa.array(classes, pa.int64()).to_pylist())
    numbered = numbered.select_columns(order)
    numbered.info.description = notes
    return numbered


def note_copies(records: datasets.Dataset, columns: Sequence[str], unit_column: str | None = None) -> None:
    """Note whether many records are copies of other records; at user level, of other users' records.

    Args:
        records: the records; if they already have the note for these units, they are not read again.
        columns: columns with texts.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    if _notes(records).get("copies_of", "") != unit_column:
        copies = count_copies(records, columns, units_of(records, unit_column))
        keep_notes(records, records, copies=copies > MANY_COPIES * len(records), copies_of=unit_column)


def index_of(records: datasets.Dataset, config: DataConfig, unit_column: str | None = None) -> ContentIndex:
    """Return the content index of records, which is built on first use.

    Args:
        records: the records; the index belongs to this object.
        config: their format.
        unit_column: column of the users' ids; None: a unit is a record.
    """
    wanted = (tuple(text_columns(config)), unit_column)
    known = _INDEXES.get(records)
    if known is None or known[0] != wanted:
        known = _INDEXES[records] = wanted, ContentIndex(records, wanted[0], units_of(records, unit_column))
    return known[1]


def unit_column_of(privacy: PrivacyUnit | None) -> str | None:
    """Return the column of the users' ids; None if a unit is a record."""
    return privacy.unit if privacy is not None and privacy.protects == "user" else None


def units_of(records: datasets.Dataset, unit_column: str | None) -> NDArray[np.int64] | None:
    """Return (num_records,) unit numbers; None if each record is a unit, or if ids are unusable, which fails later."""
    if unit_column is None or unit_column not in records.column_names:
        return None
    with contextlib.suppress(pa.ArrowException):
        ids = records.select_columns([unit_column]).with_format("arrow")[:][unit_column]
        codes = pa.concat_arrays(ids.chunks).dictionary_encode().indices
        return codes.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return None


def _refuse_shared_records(
    records: datasets.Dataset, held_out: datasets.Dataset, config: DataConfig, source: str
) -> None:
    """Raise if most held-out records are training records, in any file."""
    index = index_of(held_out, config)
    shared = int(index.found_in(records, text_columns(config), nearly_all=True).sum())
    if shared and shared >= _SAME_RECORDS * index.long.sum():
        raise DataError(
            f"{source}: {shared} of {index.long.sum()} held-out records are training records, so nothing is held "
            "out. Use records that are not in data.path, or set data.eval to a share"
        )


def _refuse_shared_files(config: DataConfig) -> None:
    """Raise if a held-out file is a training file, or a copy of one.

    Raises:
        ConfigError: the message names both files.
    """
    trained, held_out = (
        [] if path.startswith("builtin:") else [Path(file) for file in local_files(path, split)]
        for path, split in ((config.path, config.split), (str(config.eval.path), _eval_split(config)))
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
                f"data.eval.path={config.eval.path}: {file} is part of data.path={config.path} (as {same}), so the "
                "model would be trained on it. Move it out of that folder, or use a pattern that matches only the "
                "training files"
            )


def shared_source(private: DataConfig, public: DataConfig) -> str | None:
    """Return a file or data set from which both sections read records. Nothing is opened, so copies are not detected.

    Args:
        private: a section. Its held-out records count too, unless ``data.eval.public`` declares them public.
        public: a second section, of which only ``path`` and ``split`` count.
    """
    held_out = not private.eval.public
    paths = [(private.path, private.split)]
    if private.eval.path is not None and held_out:
        paths.append((private.eval.path, private.eval.split or "train"))
    elif private.eval.split is not None and held_out:
        paths.append((private.path, private.eval.split))
    theirs = _files_named(public.path, public.split)
    for path, split in paths:
        mine = _files_named(path, split)
        if not mine and not theirs and (path, private.name) == (public.path, public.name):
            splits = {private.split, private.eval.split if held_out else None} - {None}
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


def _files_named(path: str, split: str) -> list[str]:
    """Return the files of a local path, or a path that matches no file now; none for a Hub name or a corpus."""
    if path.startswith("builtin:"):
        return []
    try:
        return local_files(path, split)
    except ConfigError:  # it has no such file now
        return [str(Path(path).expanduser())]


def _load(path: str, config: DataConfig, split: str) -> datasets.Dataset:
    if path.startswith("builtin:"):
        corpus = path.removeprefix("builtin:")
        if corpus not in BUILTIN:
            raise ConfigError(f"unknown corpus {path!r}{nearest(corpus, BUILTIN) or '.'} Known: {', '.join(BUILTIN)}")
        return datasets.Dataset.from_list(BUILTIN[corpus]())
    found = find_files(path)
    if found is not None:
        return _load_local(found, split, config)
    return _load_hub(path, config.name, split)


def _load_local(found: LocalFiles, split: str, config: DataConfig) -> datasets.Dataset:
    chosen = found.of(split_names(split, found))
    places = [file for files in chosen.values() for file in files]
    refuse_several_kinds(found.path, places)
    refuse_equal_files(places, found.path)
    reading = reading_of(config)
    records, counts = _stored(found.path, places, reading)
    if reading.mixed_places:  # the first reading finds them, and the second keeps them as JSON
        reading = reading_of(config, frozenset(reading.mixed_places))
        records, counts = _stored(found.path, places, reading)
    unused = [name for name in records.column_names if name in reading.faults or name == NOTHING]
    if len(unused) == len(records.column_names):
        raise DataError(next(iter(reading.faults.values()), f"{found.path}: {_EMPTY}"))
    common = os.path.commonpath([file.parent for file in places])
    notes: dict[str, Any] = {
        "files": {os.path.relpath(file, common): count for file, count in counts.items()},
        "read": [*found.remarks(list(chosen)), *reading.remarks],
        "faults": reading.faults,
        "records_are": sorted(reading.records_are),
    }
    lines = config.txt_records is None and len(places) > 1 and max(counts.values()) > 1 and str(places[0])
    if reading.asks_for_documents or (lines and kind_of(lines) == ".txt"):
        notes["read"].append(DOCUMENTS)
        notes["documents"] = True
    records = records.remove_columns(unused)
    keep_notes(records, records, **notes)
    sizes = {name: sum(counts[file] for file in files) for name, files in chosen.items()}
    begins = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    spec = "+".join(_with_name(part, found) for part in split.split("+")) if found.splits else split
    try:
        parts = datasets.ReadInstruction.from_spec(spec).to_absolute(sizes)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"data.split={split!r} is not a part of {found.path}: {_one_line(error)}") from error
    refuse_overlap(spec, sizes)
    spans = [(begins[part.splitname], part.from_ or 0, _end(part.to, sizes[part.splitname])) for part in parts]
    rows = [range(begin + first, begin + last) for begin, first, last in spans]
    if sum(map(len, rows)) == len(records):  # the parts do not overlap
        return records if len(rows) == 1 else records.select(list(itertools.chain(*rows)))
    return records.select(list(itertools.chain(*rows)))


def _with_name(part: str, found: LocalFiles) -> str:
    name, bracket, rest = part.strip().partition("[")
    return f"{found.canonical(name.strip())}{bracket}{rest}"


def reading_of(config: DataConfig, json_places: frozenset[str] = frozenset()) -> Reading:
    """Return how the files of a section are read.

    Args:
        config: the section.
        json_places: as in `Reading`.
    """
    return Reading(
        encoding=config.encoding,
        delimiter=config.delimiter,
        field=config.field,
        txt_records=config.txt_records,
        needed=required_columns(config),
        mixed_as_json=config.form.holds in (Chat, Pair),
        json_places=json_places,
    )


def _stored(path: str, files: Sequence[Path], reading: Reading) -> tuple[datasets.Dataset, dict[Path, int]]:
    """Return the records of files, copied to the private folder, and the number of records of each file."""
    counts = dict.fromkeys(files, 0)

    def tables() -> Iterator[pa.Table]:
        for file in files:
            for table in read_tables(file, reading):
                counts[file] += table.num_rows
                yield table

    try:
        records = store(tables(), reading.with_json)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"{path}: its files hold different types of values in one column ({_one_line(error)}). Write the column "
            "with the same type in all files"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read or copied to the private folder: {_one_line(error)}") from error
    if records is None:
        raise DataError(f"{path}: {_EMPTY}")
    return records, counts


def _end(to: int | None, size: int) -> int:
    return size if to is None else to


def refuse_overlap(split: str, sizes: Mapping[str, int]) -> None:
    """Check that the parts of a split share no record: it would count as two and be protected less.

    Args:
        split: as in a recipe, such as ``train[:10%]+train[90%:]``.
        sizes: split name -> number of records; a part of a split that is missing here is treated as the whole split.

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
                f"data.split={split!r} takes record {begin} of {name!r} twice. It would count as two records and be "
                "protected half as well. Use parts that do not overlap"
            )


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
            "Check the name, or set data.path to a local file or folder"
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
"""Number of records that are hashed together; the hash depends on it."""


def hash_of_records(records: datasets.Dataset, columns: Sequence[str]) -> str:
    """Return a hash of some columns of all records, in order, to compare with a later reading.

    It depends on private text, so it is never written itself: the ledger gets its HMAC with a key that is not released
    (`dpllm.privacy.run_folder`).

    Args:
        records: the records.
        columns: names of the columns; those that the records lack are ignored.
    """
    digest = hashlib.sha256()
    present = [name for name in dict.fromkeys(columns) if name in records.column_names]
    for table in records.select_columns(present).with_format("arrow").iter(batch_size=_TOGETHER):
        digest.update(json.dumps([table[name].to_pylist() for name in present], default=str).encode())
    return digest.hexdigest()

"""Readers of local files: each file kind is read in one way, and the kind of a value is never guessed.

Place in the flow: below `dpllm.data.records`. All cells of CSV and TSV files are text: a reader that guesses the kinds
of each chunk reads the id "00017" as the number 17 in one chunk and as text in the next, and one person becomes two
units. JSON and Parquet state the kind of each value; a column that mixes text and numbers is refused, in one file and
across files. Errors name the file and the line, never a value.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

CHUNK_BYTES = 1 << 25
"""Approximate number of bytes of text that are read into one table."""

_EXACT = 2**53  # up to here a float holds every whole number
_NOT_RECORDS = "__MACOSX"
_HEAD = 1 << 16


class DataError(ValueError):
    """A data set that cannot be used for training; the message names the place and the remedy."""


def files_of_folder(folder: Path, endings: Iterable[str]) -> list[Path]:
    """Return the data files below a folder, sorted; files and folders whose names begin with a dot are skipped.

    Tools give such names to copies: ``.ipynb_checkpoints``, ``.~lock.notes.csv#``, ``._notes.csv``.
    """
    known = set(endings)
    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in known
        and file.is_file()
        and not any(part.startswith((".", "~$")) or part == _NOT_RECORDS for part in file.relative_to(folder).parts)
    )


def refuse_equal_files(files: Sequence[Path], what: str) -> None:
    """Raise when a file is given twice: under two names, or as an identical copy.

    Raises:
        DataError: the message names both files.
    """
    by_size: dict[int, list[Path]] = {}
    for file in files:
        by_size.setdefault(file.stat().st_size, []).append(file)
    for size, group in by_size.items():
        seen: dict[bytes, Path] = {}
        for file in group if len(group) > 1 and size else ():
            first = seen.setdefault(content_hash(file), file)
            if first is not file:
                raise DataError(
                    f"{what}: {file} and {first} have the same contents, so every record in them would count as two "
                    "and be protected half as well: remove one of them, or name the files in data.path by a pattern"
                )


def content_hash(file: Path) -> bytes:
    """Return the SHA-256 of a file's bytes."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").digest()


def read_tables(file: Path, encoding: str) -> Iterator[pa.Table]:
    """Yield the records of a file, in order.

    Args:
        file: the file; its ending selects the reader, see `READERS`.
        encoding: encoding of text files; Parquet has none.

    Raises:
        DataError: the contents of the file do not match its ending; the message names file and line.
    """
    yield from READERS[file.suffix](file, encoding)


def _read_csv(file: Path, encoding: str) -> Iterator[pa.Table]:
    # strict: an unclosed quote is an error; otherwise it would swallow the records after it.
    yield from _read_separated(file, encoding, delimiter=",", strict=True)


def _read_tsv(file: Path, encoding: str) -> Iterator[pa.Table]:
    # Quotes are ordinary characters in tab-separated text.
    yield from _read_separated(file, encoding, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_separated(file: Path, encoding: str, **options: Any) -> Iterator[pa.Table]:
    with _opened(file, encoding, newline="") as source, _long_cells():
        reader = csv.reader(source, **options)
        cells = _cells(reader, file)
        header = [name or f"Unnamed: {number}" for number, name in enumerate(next(cells, (0, []))[1])]
        if not header:
            return
        twice = [name for number, name in enumerate(header) if name in header[:number]]
        if twice:
            raise DataError(f"{file}: two columns are named '{twice[0]}': give every column a different name")
        schema = pa.schema([(name, pa.string()) for name in header])
        waiting: list[list[str]] = []
        size = 0
        for line, row in cells:
            if len(row) != len(header):
                raise DataError(
                    f"{file}: line {line}: {len(row)} cells, but the header has {len(header)}: put cells that hold the "
                    "separator, a quote or a line break into quotes, or correct the line"
                )
            waiting.append(row)
            size += sum(map(len, row))
            if size >= CHUNK_BYTES:
                yield _text_table(waiting, schema, file)
                waiting, size = [], 0
        yield _text_table(waiting, schema, file)


def _cells(reader: Any, file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line in which a row ends, and its cells; empty lines are skipped."""
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{file}: line {reader.line_num}: {error}: double a quote inside a quoted cell, and close every cell that "
            "begins with a quote by another quote"
        ) from error


@contextmanager
def _long_cells() -> Iterator[None]:
    """Allow cells of any length while a file is read; a long note is a single cell."""
    limit = csv.field_size_limit(1 << 62)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _text_table(rows: list[list[str]], schema: pa.Schema, file: Path) -> pa.Table:
    # Only an empty cell is a missing value: the texts "NA" and "null" are texts.
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    try:
        arrays = [pa.array([cell or None for cell in column], pa.string()) for column in columns]
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: {_SURROGATE}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _read_lines(file: Path, encoding: str) -> Iterator[pa.Table]:
    """Read a text file: each line is a record, except lines of spaces only."""
    waiting: list[str] = []
    size = 0
    with _opened(file, encoding, newline=None) as source:
        for line in source:
            if not line.strip():
                continue
            waiting.append(line.rstrip("\n"))
            size += len(line)
            if size >= CHUNK_BYTES:
                yield pa.table({"text": waiting})
                waiting, size = [], 0
    yield pa.table({"text": pa.array(waiting, pa.string())})


def _read_json(file: Path, encoding: str) -> Iterator[pa.Table]:
    with _opened(file, encoding, newline=None) as source:
        if source.read(_HEAD).lstrip()[:1] == "[":
            source.seek(0)
            records = enumerate(_json(source.read(), file, None))
            yield from _tables_of_objects(records, file, "record")
            return
        source.seek(0)
        lines = ((number, line) for number, line in enumerate(source, start=1) if line.strip())
        objects = ((number, _json(line, file, number)) for number, line in lines)
        yield from _tables_of_objects(objects, file, "line")


def _json(text: str, file: Path, line: int | None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"line {getattr(error, 'lineno', 1) if line is None else line}: "
        reason = getattr(error, "msg", type(error).__name__).removesuffix(" at")
        raise DataError(
            f"{file}: cannot be read as json: {where}{reason}: a .jsonl file has one object per line, a .json file a "
            "list of objects"
        ) from error


def _tables_of_objects(objects: Iterable[tuple[int, Any]], file: Path, noun: str) -> Iterator[pa.Table]:
    """Yield tables of numbered objects, each with a bounded number of them."""
    kinds: dict[str, str] = {}
    waiting: list[dict[str, Any]] = []
    first = size = 0
    for number, value in objects:
        if not isinstance(value, dict):
            raise DataError(
                f"{file}: {noun} {number} holds {_kind(value)}, but a record is an object such as "
                '{"text": "..."}: write one object per record'
            )
        for name, kind in nested_kinds(value):
            if kind != "nothing" and kinds.setdefault(name, kind) != kind:
                raise DataError(
                    f"{file}: column '{name}' holds {kinds[name]}, and in {noun} {number} {kind}: write all its values "
                    "in one form"
                )
        first = first or number
        waiting.append(value)
        size += _size(value)
        if size >= CHUNK_BYTES:
            yield _object_table(waiting, file, f"{noun}s {first} to {number}")
            waiting, first, size = [], 0, 0
    if waiting:
        yield _object_table(waiting, file, f"{noun}s from {first} on")


def _object_table(objects: list[dict[str, Any]], file: Path, where: str) -> pa.Table:
    names = list(dict.fromkeys(name for value in objects for name in value))
    columns: dict[str, pa.Array] = {}
    for name in names:
        cells = [value.get(name) for value in objects]
        if any(isinstance(cell, float) for cell in cells) and any(
            isinstance(cell, int) and abs(cell) > _EXACT for cell in cells
        ):
            raise DataError(
                f"{file}: column '{name}' mixes fractions and whole numbers above 2^53 ({where}), which a fraction "
                "cannot hold exactly: write all its values as text"
            )
        try:
            columns[name] = pa.array(cells)
        except UnicodeEncodeError as error:
            raise DataError(f"{file}: column '{name}', {where}: {_SURROGATE}") from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise DataError(
                f"{file}: column '{name}' holds values of different kinds, or numbers beyond 64 bits ({where}): write "
                "all its values in one form"
            ) from error
    return pa.table(columns)


def nested_kinds(cells: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the kind of each JSON value, and of those in objects and lists.

    Arrow refuses most columns of two kinds, but stores true as 1.0 in a column with 0.5.

    >>> list(nested_kinds({"text": "x", "vitals": {"pulse": 60, "fever": True}}))[1:]
    [('vitals', 'an object'), ('vitals.pulse', 'a number'), ('vitals.fever', 'true or false')]
    """
    for name, cell in cells.items():
        place = f"{inside}{name}"
        yield place, _kind(cell)
        if isinstance(cell, dict):
            yield from nested_kinds(cell, f"{place}.")
        elif isinstance(cell, list):
            plain = {type(one): one for one in cell}  # one of each type, for long lists of numbers
            nested = dict in plain or list in plain
            for one in cell if nested else plain.values():
                yield from nested_kinds({"[]": one}, place)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "an object"


def _size(value: Any) -> int:
    """Return the approximate number of characters of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 8


def _read_parquet(file: Path, encoding: str) -> Iterator[pa.Table]:
    del encoding
    try:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=4096):
                table = pa.Table.from_batches([batch]).replace_schema_metadata(source.schema_arrow.metadata)
                yield _with_plain_columns(table)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{file}: cannot be read as parquet: {' '.join(str(error).split())[:200]}: write the file again"
        ) from error


def _with_plain_columns(table: pa.Table) -> pa.Table:
    """Return a table with only the column types that a data set supports.

    Categories become their values, and ids of the type UUID become text. A column of another type that `datasets` does
    not support (a map, for example) is left out; a recipe that names it gets the error for a missing column.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for place, field in enumerate(table.schema):
        kind, column = field.type, table.column(place)
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        elif pa.types.is_string_view(kind):
            column = column.cast(pa.string())
        elif isinstance(kind, getattr(pa, "UuidType", ())):
            column = pa.chunked_array([pa.array([value and str(value) for value in column.to_pylist()], pa.string())])
        if field.name in columns:
            raise pa.ArrowInvalid(f"two columns are named '{field.name}'")
        if _is_known(column.type):
            columns[field.name] = column
    return pa.table(columns).replace_schema_metadata(table.schema.metadata)


def _is_known(kind: pa.DataType) -> bool:
    try:
        datasets.Features.from_arrow_schema(pa.schema([("column", kind)]))
    except ValueError:
        return False
    return True


def refuse_mixed_kinds(name: str, kinds: dict[str, tuple[str, Path]], file: Path, kind: pa.DataType) -> None:
    """Raise when a column, or a place in its objects and lists, is text in one file and numbers in another.

    Args:
        name: name of the column.
        kinds: name -> the kind seen first and its file; the new ones are added.
        file: the file in which `kind` was seen.
        kind: kind of the column in that file.

    Raises:
        DataError: the message names both files.
    """
    if pa.types.is_null(kind):
        return
    word = _word(kind)
    other, where = kinds.setdefault(name, (word, file))
    if other != word:
        raise DataError(
            f"column '{name}' holds {other} in {where} and {word} in {file}: write it in one form in all files; "
            "converting one of them could give one person two ids, or two people one id"
        )
    if word == "lists":
        refuse_mixed_kinds(f"{name}[]", kinds, file, kind.value_type)
    for inner in kind if word == "objects" else ():
        refuse_mixed_kinds(f"{name}.{inner.name}", kinds, file, inner.type)


def _word(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "numbers"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "lists"
    return "objects" if pa.types.is_struct(kind) else str(kind)


_SURROGATE = "a text holds half of a surrogate pair, which is not a character: write the file again as UTF-8"


@contextmanager
def _opened(file: Path, encoding: str, newline: str | None) -> Iterator[TextIO]:
    """Open a text file; a byte that is invalid in the encoding is an error that gives its line."""
    # A byte order mark is not part of the first column's name.
    chosen = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
    try:
        with open(file, encoding=chosen, newline=newline) as source:
            yield source
    except UnicodeError as error:
        line = _undecodable_line(file, chosen)
        raise DataError(
            f"{file}: line {line} is not {encoding} text: save the file as UTF-8, or name its encoding "
            "(data.encoding=latin-1, cp1252 and utf-16 are usual)"
        ) from error


def _undecodable_line(file: Path, encoding: str) -> int:
    """Count the lines up to the first byte that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    with open(file, "rb") as source:
        while piece := source.read(_HEAD):
            try:
                line += decoder.decode(piece).count("\n")
            except UnicodeError as error:
                return line + piece[: getattr(error, "start", 0)].count(b"\n")
    return line


READERS: dict[str, Callable[[Path, str], Iterator[pa.Table]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_lines,
}
"""File endings that can be read. Each line of a .txt file that is not blank is a record."""

"""Read local files: each file format is read in one way, and the type of a value is never guessed.

All cells of CSV and TSV files are text: a reader that guesses the types of each chunk reads the id "00017" as the
number 17 in one chunk and as text in the next, and one person becomes two units. JSON, Parquet, Arrow and Excel state
the type of each value. A column that mixes text and numbers cannot be used, in one file or across files. Errors name
the file and the line, never a value.

What is detected (an encoding, a delimiter) never lets one record change how a different record is read: the delimiter
comes from the header, and a file is read as cp1252 only if no character in it could be UTF-8.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from dpllm.config.extras import require
from dpllm.config.hub import refuse_lfs_pointer

CHUNK_BYTES = 1 << 25
"""Approximate number of bytes of text that are read into one table."""

NOTHING = "nothing that can be used"
"""Column of a table without usable columns; it preserves the number of records."""

_EXACT = 2**53  # up to this number, a float represents every whole number
_HEAD = 1 << 16


class DataError(ValueError):
    """A data set that cannot be used for training; the message names the place and the remedy."""


@dataclasses.dataclass
class Reading:
    """How files are read, and what was detected while they were read.

    Attributes:
        encoding: encoding of text files. None: detected.
        delimiter: delimiter of CSV and TSV files. None: the one in the header.
        field: key of the JSON object, or sheet of the workbook, that holds the records.
        txt_records: "line", "paragraph" or "file": the part of a .txt file that is one record. None: a line.
        needed: columns that the format needs.
        mixed_as_json: whether positions in a list or object with several types of values are kept as JSON.
        json_places: these positions, such as ``messages[].tool_calls[].function.arguments``.
        faults: column -> why it cannot be used; its values are dropped.
        remarks: one sentence for each detected property.
        records_are: what one record is in the files, such as "one line of a text file".
        asks_for_documents: whether a .txt file has blank lines between paragraphs.
        mixed_places: positions with several types of values, which may become `json_places`.
        encodings: file -> detected encoding.
    """

    encoding: str | None = None
    delimiter: str | None = None
    field: str | None = None
    txt_records: str | None = None
    needed: Collection[str] = ()
    mixed_as_json: bool = False
    json_places: frozenset[str] = frozenset()
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)
    records_are: set[str] = dataclasses.field(default_factory=set)
    asks_for_documents: bool = False
    mixed_places: set[str] = dataclasses.field(default_factory=set)
    encodings: dict[Path, str] = dataclasses.field(default_factory=dict)
    _kinds: dict[str, tuple[str, str]] = dataclasses.field(
        default_factory=dict
    )  # position -> type, and where it was first seen

    def fault(self, column: str, message: str) -> None:
        """Note that a column cannot be used; the first reason is kept."""
        self.faults.setdefault(column, message)

    def remark(self, sentence: str) -> None:
        """Note a detected property, once."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def with_json(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema in which the text at `json_places` is JSON, which `datasets` reads."""
        fields = [one.with_type(_json_type(one.type, one.name, self.json_places)) for one in schema]
        return pa.schema(fields, metadata=schema.metadata)

    def see(self, column: str, place: str, kind: str, where: str) -> None:
        """Note the type of a value at a position of a column; a second type there is a fault of the column.

        Args:
            column: name of the column.
            place: the column, or a position in its objects and lists.
            kind: the type in words.
            where: file and line, for messages.
        """
        first, seen = self._kinds.setdefault(place, (kind, where))
        if first == kind:
            return
        if self.mixed_as_json and place != column:
            self.mixed_places.add(place)
        self.fault(
            column,
            f"column '{place}' holds {first} ({seen}) and {kind} ({where}): write all its values in one form. "
            "Converting them here could give one person two ids, or two people one id",
        )


def _json_type(kind: pa.DataType, place: str, places: Collection[str]) -> pa.DataType:
    """Return the type of `_with_json`'s values: `datasets` reads the JSON at these places."""
    if place in places:
        return pa.json_()
    if pa.types.is_struct(kind):
        return pa.struct([(one.name, _json_type(one.type, f"{place}.{one.name}", places)) for one in kind])
    return pa.list_(_json_type(kind.value_type, f"{place}[]", places)) if pa.types.is_list(kind) else kind


def read_tables(file: Path, reading: Reading | None = None) -> Iterator[pa.Table]:
    """Yield the records of a file, in order.

    Args:
        file: the file; its ending selects the reader (see `kind_of`).
        reading: how it is read; None: with the defaults.

    Raises:
        DataError: the file cannot be read, or its contents do not match its ending; the message names file and line.
    """
    reading = reading or Reading()
    refuse_unreadable(file)
    try:
        _refuse_other_contents(file)
        yield from READERS[kind_of(file)](file, reading)  # type: ignore[index]  # refuse_unreadable
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: {_SURROGATE}") from error
    except PermissionError as error:
        raise DataError(f"{file}: no permission to read it. Change its permissions or its owner") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(_damaged(file)) from error
    except OSError as error:
        if _compression(file):
            raise DataError(_damaged(file)) from error
        raise


def kind_of(file: str | Path) -> str | None:
    """Return the format of a file from its ending, ignoring case and a compression suffix; None: it cannot be read.

    >>> kind_of("notes.CSV.gz"), kind_of("a.ndjson"), kind_of("letter.docx")
    ('.csv', '.jsonl', None)
    """
    endings = [ending.lower() for ending in Path(file).suffixes[-2:]]
    if endings and endings[-1] in _OPENERS:
        endings.pop()
        if not endings or _ALIASES.get(endings[-1], endings[-1]) not in _OF_TEXT:
            return None
    kind = _ALIASES.get(endings[-1], endings[-1]) if endings else ""
    return kind if kind in READERS else None


def why_unreadable(file: str | Path) -> str | None:
    """Return why a file cannot be read, with the remedy, from its ending; None: it can be read."""
    if kind_of(file) is not None:
        return None
    ending = Path(file).suffix.lower()
    if ending in _OPENERS:
        return f"only text files may be compressed: unpack it, or name it after its contents, as notes.jsonl{ending}"
    return _REMEDIES.get(ending, f"files that end in '{ending}' are not read" if ending else "its name has no ending")


def refuse_unreadable(file: Path) -> None:
    """Raise `DataError` unless a file with this ending can be read."""
    reason = why_unreadable(file)
    if reason is not None:
        raise DataError(f"{file}: cannot be read: {reason}. Known endings: {ENDINGS}")


def _refuse_other_contents(file: Path) -> None:
    """Raise if the first bytes of a file contradict its ending."""
    refuse_lfs_pointer(file, DataError)
    with open(file, "rb") as source:
        head = source.read(512)
    kind = kind_of(file)
    if not head and kind not in _OF_TEXT:
        raise DataError(f"{file}: the file is empty (0 bytes): write it again")
    for mark, ending in () if _compression(file) else _MARKS:
        if head.startswith(mark) and kind not in ending.split(" or "):
            raise DataError(
                f"{file}: its contents are those of a file that ends in {ending}. Correct its ending, or save it as "
                f"{kind}"
            )
    if _HTML.match(head):
        raise DataError(f"{file}: it is a web page, not data. Download the file itself, not the page that shows it")


def _damaged(file: Path) -> str:
    return f"{file}: the compressed file is truncated or damaged. Copy or download it again"


def refuse_equal_files(files: Sequence[Path], what: str) -> None:
    """Raise if a file is given twice: under two names, or as an identical copy.

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
                    "and be protected half as well. Remove one of them, or use a pattern in data.path"
                )


def content_hash(file: Path) -> bytes:
    """Return the SHA-256 of a file's bytes."""
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").digest()


def _read_csv(file: Path, reading: Reading) -> Iterator[pa.Table]:
    reading.records_are.add("one row of a CSV file")
    before, delimiter, spaced = _delimiter(file, reading)
    with _opened(file, reading, newline="") as source, _long_cells():
        for _ in range(before):
            source.readline()
        # Quotes are ordinary characters in tab-separated text. Elsewhere, an unclosed quote is an error (strict),
        # because it would absorb the records after it.
        plain = kind_of(file) == ".tsv" and delimiter == "\t"
        reader = csv.reader(
            source,
            delimiter=delimiter,
            quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
            skipinitialspace=spaced,
            strict=not plain,
        )
        cells = _cells(reader, file, before)
        header = [name or f"Unnamed: {number}" for number, name in enumerate(next(cells, (0, []))[1])]
        if not header:
            return
        _check_header(header, file, reading, delimiter)
        once = [header.count(name) == 1 for name in header]
        schema = pa.schema([(name, pa.string()) for name in itertools.compress(header, once)])
        waiting: list[list[str]] = []
        size = 0
        for line, row in cells:
            if len(row) != len(header):
                raise DataError(_ragged(file, line, row, header, delimiter))
            waiting.append(row if all(once) else list(itertools.compress(row, once)))
            size += sum(map(len, row))
            if size >= CHUNK_BYTES:
                yield _text_table(waiting, schema)
                waiting, size = [], 0
        yield _text_table(waiting, schema)


def _delimiter(file: Path, reading: Reading) -> tuple[int, str, bool]:
    """Return the number of lines to skip, the delimiter, and whether a space follows it.

    Only the header, which is not a record, determines them.
    """
    usual = "\t" if kind_of(file) == ".tsv" else ","
    with _opened(file, reading, newline="") as source:
        header = next((line for line in source if line.strip()), "")
    stated = re.fullmatch(r"sep=(.)\s*", header)  # a first line that Excel writes and reads
    bare = re.sub(r'"[^"]*"', "", header)
    most = reading.delimiter or (stated[1] if stated else max((usual, *"\t;|,"), key=bare.count))  # the first on ties
    if most != usual and reading.delimiter is None and not stated:
        reading.remark(f"{file.name}: cells are separated by {most!r}, as in its header (see data.delimiter)")
    return int(bool(stated)), most, 0 < bare.count(most) == bare.count(f"{most} ")


def _check_header(header: list[str], file: Path, reading: Reading, delimiter: str) -> None:
    for name in header:
        if header.count(name) > 1:
            reading.fault(name, f"{file}: two columns are named '{name}': give them different names")
    looks_like_values = any(len(name) > _LONG_NAME or re.fullmatch(r"[-+]?[\d.,]+", name) for name in header)
    looks_like_values &= not any(re.fullmatch(r"[^\W\d]\w*", name) for name in header)
    if reading.needed and not set(reading.needed) & set(header) and looks_like_values:
        raise DataError(
            f"{file}: line 1 looks like a record, not like column names, and contains none of "
            f"{', '.join(reading.needed)}. Write the column names into the first line, separated by {delimiter!r}"
        )


def _ragged(file: Path, line: int, row: list[str], header: list[str], delimiter: str) -> str:
    other = next((one for one in ",;\t|" if one != delimiter and one in "".join(header)), None)
    if other and 1 in (len(row), len(header)):
        remedy = f"if the separator is {other!r}, set data.delimiter"
    elif len(header) == 1:
        remedy = "if line 1 is a title and not a column name, remove it; quote texts that contain the separator"
    elif kind_of(file) == ".tsv" and delimiter == "\t":
        remedy = "quotes have no meaning in a .tsv file: if its cells are quoted, rename it to .csv"
    elif len(row) == len(header) + 1 > 2 and line == 2:
        remedy = "if the first column has no name, add one to the header"
    else:
        remedy = "quote cells that contain the separator, a quote or a line break, or correct the line"
    return f"{file}: line {line}: {len(row)} cells, but the header has {len(header)}: {remedy}"


def _cells(reader: Any, file: Path, before: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number at which a row ends, and its cells; empty lines are skipped."""
    try:
        for row in reader:
            if row:
                yield before + reader.line_num, row
    except csv.Error as error:
        raise DataError(
            f"{file}: line {before + reader.line_num}: {error}. Double a quote inside a quoted cell, and close every "
            "quoted cell"
        ) from error


@contextmanager
def _long_cells() -> Iterator[None]:
    """Allow cells of any length while a file is read; a long note is a single cell."""
    limit = csv.field_size_limit(1 << 62)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _text_table(rows: list[list[str]], schema: pa.Schema) -> pa.Table:
    # Only an empty cell is a missing value: the texts "NA" and "null" are texts.
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array([cell or None for cell in column], pa.string()) for column in columns]
    if not arrays:
        return pa.table({NOTHING: pa.nulls(len(rows))})
    return pa.Table.from_arrays(arrays, schema=schema)


def _read_txt(file: Path, reading: Reading) -> Iterator[pa.Table]:
    """Read a text file: a line, a paragraph or the whole file is a record; blank ones are skipped."""
    part = reading.txt_records or "line"
    with _opened(file, reading, newline=None) as source:
        if reading.txt_records is None and _JSON_RECORD.match(source.read(_HEAD)):
            raise DataError(
                f"{file}: it contains JSON, but its ending says that its lines are texts. Rename it to .json, or set "
                "data.txt_records: line to train on the JSON itself"
            )
    reading.records_are.add("one text file" if part == "file" else f"one {part} of a text file")
    waiting: list[str] = []
    size = together = paragraphs = 0  # lines of this paragraph, and finished paragraphs
    several = False  # whether a paragraph has several lines
    with _opened(file, reading, newline=None) as source:
        for text in source if part == "line" else _parts(source, part):
            if not text.strip():
                paragraphs, together = paragraphs + bool(together), 0
                continue
            together += 1
            several |= together > 1
            waiting.append(text.rstrip("\n"))
            size += len(text)
            if size >= CHUNK_BYTES:
                yield pa.table({"text": waiting})
                waiting, size = [], 0
    if reading.txt_records is None and several and paragraphs + bool(together) > 1:
        reading.asks_for_documents = True
    yield pa.table({"text": pa.array(waiting, pa.string())})


def _parts(source: TextIO, part: str) -> Iterator[str]:
    """Yield the whole text, or its paragraphs, which blank lines separate."""
    if part == "file":
        yield source.read()
        return
    lines: list[str] = []
    for line in source:
        if line.strip():
            lines.append(line)
        else:
            yield "".join(lines)
            lines = []
    yield "".join(lines)


def _read_json(file: Path, reading: Reading) -> Iterator[pa.Table]:
    reading.records_are.add("one JSON object")
    with _opened(file, reading, newline=None) as source:
        filled = (line for line in source if line.strip())
        first, second = next(filled, ""), next(filled, None)
    with _opened(file, reading, newline=None) as source:
        if second is not None and reading.field is None and _is_object(first):
            lines = ((number, line) for number, line in enumerate(source, start=1) if line.strip())
            objects = ((number, _json(line, file, number)) for number, line in lines)
            yield from _tables_of_objects(objects, file, "line", reading)
        else:
            records = enumerate(_whole_json(source.read(), file, reading))
            yield from _tables_of_objects(records, file, "record", reading)


def _is_object(line: str) -> bool:
    try:
        return line.lstrip()[:1] == "{" and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return line.rstrip().endswith("}")  # a faulty line among others; the error gives its number


def _whole_json(text: str, file: Path, reading: Reading) -> list[Any]:
    """Return the records of a list, of an object that contains a list, or of consecutive objects."""
    values: list[Any] = []
    place = 0
    while place < len(text) and (more := re.compile(r"[\s,]*\S" if values else r"\s*\S").match(text, place)):
        try:
            value, place = _DECODER.raw_decode(text, more.end() - 1)
        except (ValueError, RecursionError) as error:
            raise _not_json(error, text, file, None) from error
        values.append(value)
    if reading.field is not None and len(values) != 1:
        raise DataError(f"{file}: data.field names a key of one object, but the file has {len(values)}: remove it")
    if len(values) != 1:
        return values
    whole = values[0]
    if reading.field is not None:
        for key in reading.field.split("."):
            if not isinstance(whole, dict) or key not in whole:
                present = f"It has {', '.join(whole)}" if isinstance(whole, dict) else "It is not an object"
                raise DataError(f"{file}: no key '{key}' (data.field={reading.field}). {present}")
            whole = whole[key]
        if not isinstance(whole, list):
            raise DataError(f"{file}: data.field={reading.field} is {_kind(whole)}, but must be a list of records")
    if isinstance(whole, list):
        return whole
    if isinstance(whole, dict):
        _refuse_container(whole, file, reading)
    return [whole]


def _refuse_container(whole: dict[str, Any], file: Path, reading: Reading) -> None:
    """Raise if an object is not a record but contains the records."""
    if len(whole) > 1 and all(isinstance(value, dict) for value in whole.values()):
        raise DataError(
            f"{file}: it holds one object with {len(whole)} objects in it instead of a list of records. In pandas, "
            "write a list with to_json(path, orient='records', lines=True)"
        )
    if kind_of(file) != ".json":
        return
    if {"columns", "data"} <= set(whole) or _are_columns(list(whole.values())):
        raise DataError(f"{file}: it holds columns instead of records. In pandas, use to_json(path, orient='records')")
    if set(reading.needed) & set(whole):
        return
    lists = [key for key, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists:
        raise DataError(
            f"{file}: it holds one object, with lists in {', '.join(lists)}. Set data.field to the key of the list of "
            f"records, such as data.field={lists[0]}"
        )


def _are_columns(values: list[Any]) -> bool:
    """Return whether the values of an object are lists of plain values, all of the same length above 1."""
    lists = [value for value in values if isinstance(value, list) and not any(map(_is_nested, value))]
    return len(lists) == len(values) > 0 and len({len(value) for value in lists}) == 1 and len(lists[0]) > 1


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def _json(text: str, file: Path, line: int | None) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, text, file, line) from error


def _not_json(error: Exception, text: str, file: Path, line: int | None) -> DataError:
    """Return the error of a text that is not JSON."""
    where = f"line {getattr(error, 'lineno', 1) if line is None else line}: "
    reason = getattr(error, "msg", type(error).__name__).removesuffix(" at")
    before, after = text[: getattr(error, "pos", 0)].rstrip(), text[getattr(error, "pos", 0) :].lstrip()
    remedy = "a .jsonl file has one object per line, a .json file a list of objects"
    if (before.endswith(",") and after[:1] in ("}", "]")) or "railing comma" in reason:
        reason, remedy = "a comma before a closing bracket", "remove the comma"
    elif after[:1] == "'":
        reason, remedy = "single quotes", "write it with json.dumps: str() of a Python object is not JSON"
    elif after.startswith(("//", "/*", "#")):
        reason, remedy = "a comment", "remove it: JSON has none"
    elif not after.strip():
        reason = f"{reason} at its end: the file or line is truncated"
    return DataError(f"{file}: cannot be read as json: {where}{reason}: {remedy}")


def _tables_of_objects(
    objects: Iterable[tuple[int, Any]], file: Path, noun: str, reading: Reading
) -> Iterator[pa.Table]:
    """Yield tables of numbered objects, each of bounded size."""
    waiting: list[dict[str, Any]] = []
    first = size = 0
    for number, value in objects:
        if not isinstance(value, dict):
            raise DataError(
                f"{file}: {noun} {number} holds {_kind(value)}, but a record is an object such as "
                '{"text": "..."}. Write one object per record'
            )
        if reading.json_places:
            value = {name: _with_json(cell, name, reading.json_places) for name, cell in value.items()}
        for name, cell in value.items():
            if name not in reading.faults or reading.mixed_as_json:  # one reading finds all such positions
                for place, kind in nested_kinds({name: cell}):
                    if kind != "nothing":
                        reading.see(name, place, kind, f"{file}, {noun} {number}")
        first = first or number
        waiting.append(value)
        size += _size(value)
        if size >= CHUNK_BYTES:
            yield _object_table(waiting, file, f"{noun}s {first} to {number}", reading)
            waiting, first, size = [], 0, 0
    if waiting:
        yield _object_table(waiting, file, f"{noun}s from {first} on", reading)


def _with_json(cell: Any, place: str, places: Collection[str]) -> Any:
    """Return a value in which those at some places are written as JSON."""
    if cell is None:
        return None
    if place in places:
        return json.dumps(cell)
    if isinstance(cell, dict):
        return {name: _with_json(one, f"{place}.{name}", places) for name, one in cell.items()}
    return [_with_json(one, f"{place}[]", places) for one in cell] if isinstance(cell, list) else cell


def _object_table(objects: list[dict[str, Any]], file: Path, where: str, reading: Reading) -> pa.Table:
    names = list(dict.fromkeys(name for value in objects for name in value))
    columns: dict[str, pa.Array] = {}
    for name in names:
        cells = [value.get(name) for value in objects]
        if any(isinstance(cell, float) for cell in cells) and any(
            isinstance(cell, int) and abs(cell) > _EXACT for cell in cells
        ):
            reading.fault(
                name,
                f"{file}: column '{name}' mixes floats and whole numbers above 2^53 ({where}), which a float cannot "
                "represent exactly. Write all its values as text",
            )
        if name in reading.faults:
            continue
        try:
            columns[name] = pa.array(cells)
        except UnicodeEncodeError as error:
            raise DataError(f"{file}: column '{name}', {where}: {_SURROGATE}") from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            reading.fault(
                name,
                f"{file}: column '{name}' holds values of different types, or numbers beyond 64 bits ({where}). Write "
                "all its values with one type",
            )
    # A table without columns would have no rows.
    return pa.table(columns or {NOTHING: pa.nulls(len(objects))})


def nested_kinds(cells: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the type of each JSON value, including those in objects and lists.

    Arrow refuses most columns with two types, but stores true as 1.0 in a column with 0.5.

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


def _read_xlsx(file: Path, reading: Reading) -> Iterator[pa.Table]:
    """Read one sheet of a workbook; values keep the types of their cells, and dates become text."""
    reading.records_are.add("one row of a sheet")
    require("excel", f"{file}: save the sheet as .csv. To read a workbook, dpllm")
    import openpyxl

    try:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as a workbook. Save it again, or save the sheet as .csv") from error
    try:
        names = book.sheetnames
        if reading.field is not None and reading.field not in names:
            raise DataError(f"{file}: no sheet '{reading.field}' (data.field). It has {', '.join(names)}")
        if reading.field is None and len(names) > 1:
            raise DataError(f"{file}: it has the sheets {', '.join(names)}. Name one with data.field")
        rows = book[reading.field or names[0]].iter_rows(values_only=True)
        cells = next(rows, ())
        header = [f"Unnamed: {number}" if name is None else str(name) for number, name in enumerate(cells)]
        _check_header(header, file, reading, ",")
        filled = ((number, row) for number, row in enumerate(rows, start=2) if any(cell is not None for cell in row))
        objects = ((number, dict(zip(header, map(_plain_cell, row), strict=False))) for number, row in filled)
        yield from _tables_of_objects(objects, file, "line", reading)
    finally:
        book.close()


def _plain_cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


def _read_arrow(file: Path, reading: Reading) -> Iterator[pa.Table]:
    reading.records_are.add("one row of an Arrow file")
    with pa.memory_map(str(file)) as source:
        try:
            if file.stat().st_size >= 6 and source.read(6) == b"ARROW1":
                batches: Any = pa.ipc.open_file(source)
                every: Iterable[pa.RecordBatch] = map(batches.get_batch, range(batches.num_record_batches))
            else:
                source.seek(0)
                batches = every = pa.ipc.open_stream(source)
            for batch in every:
                yield _with_plain_columns(pa.Table.from_batches([batch]), batches.schema, file, reading)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}: cannot be read as Arrow: {_one_line(error)}: write the file again") from error


def _read_parquet(file: Path, reading: Reading) -> Iterator[pa.Table]:
    reading.records_are.add("one row of a Parquet file")
    try:
        with pq.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=4096):
                yield _with_plain_columns(pa.Table.from_batches([batch]), source.schema_arrow, file, reading)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file}: cannot be read as parquet: {_one_line(error)}: write the file again") from error


def _with_plain_columns(table: pa.Table, schema: pa.Schema, file: Path, reading: Reading) -> pa.Table:
    """Return a table with only the column types that a data set supports.

    Categories become their values, and UUIDs become text. A column of images or sound, or of any other type that
    `datasets` does not support (a map, for example), is dropped; a recipe that names it gets the reason.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for place, one in enumerate(schema):
        kind, column = one.type, table.column(place)
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        elif pa.types.is_string_view(kind):
            column = column.cast(pa.string())
        elif isinstance(kind, getattr(pa, "UuidType", ())):
            column = pa.chunked_array([pa.array([value and str(value) for value in column.to_pylist()], pa.string())])
        if schema.names.count(one.name) > 1:
            reading.fault(one.name, f"{file}: two columns are named '{one.name}': give them different names")
        elif not _is_known(one.with_type(column.type), schema):
            reading.fault(one.name, f"{file}: column '{one.name}' holds {one.type}, which is not supported: write text")
        for inside, word in _words(column.type, one.name) if one.name not in reading.faults else ():
            reading.see(one.name, inside, word, str(file))
        if one.name not in reading.faults:
            columns[one.name] = column
    whole = pa.table(columns or {NOTHING: pa.nulls(table.num_rows)})
    return whole.replace_schema_metadata(schema.metadata)


def _is_known(one: pa.Field, schema: pa.Schema) -> bool:
    """Return whether `datasets` can return a column without a library for images, sound or video."""
    try:
        features = datasets.Features.from_arrow_schema(pa.schema([one], metadata=schema.metadata))
    except (ValueError, TypeError, KeyError):
        return False
    return not re.search(r"\b(Image|Audio|Video|Pdf|Nifti|Mesh)\(", repr(features))


def _words(kind: pa.DataType, place: str) -> Iterator[tuple[str, str]]:
    """Yield the type of a column, and of the positions in its objects and lists."""
    if pa.types.is_null(kind):
        return
    word = _word(kind)
    yield place, word
    if word == "lists":
        yield from _words(kind.value_type, f"{place}[]")
    for inner in kind if word == "objects" else ():
        yield from _words(inner.type, f"{place}.{inner.name}")


def _word(kind: pa.DataType) -> str:
    """Return the type of a column's values, in the words of `nested_kinds`."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "a number"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return "a list"
    return "an object" if pa.types.is_struct(kind) else str(kind)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


_SURROGATE = "a text contains half of a surrogate pair, which is not a character. Write the file again as UTF-8"


def _compression(file: Path) -> str | None:
    ending = file.suffix.lower()
    return ending if ending in _OPENERS else None


def _bytes_of(file: Path) -> IO[bytes]:
    """Open a file for reading, uncompressed."""
    return _OPENERS.get(file.suffix.lower(), lambda path: open(path, "rb"))(file)


@contextmanager
def _opened(file: Path, reading: Reading, newline: str | None) -> Iterator[TextIO]:
    """Open a text file; a byte that is invalid in the encoding is an error that gives its line."""
    encoding = reading.encoding
    if encoding is None:
        encoding = reading.encodings[file] = reading.encodings.get(file) or _encoding_of(file)
        if encoding != "utf-8-sig":
            reading.remark(f"{file.name}: read as {encoding}, since it is not UTF-8 (see data.encoding)")
    elif codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # a byte order mark is not part of the first column's name
    try:
        with _bytes_of(file) as raw, io.TextIOWrapper(raw, encoding=encoding, newline=newline) as source:
            yield source
    except UnicodeDecodeError as error:
        raise DataError(_not_decoded(file, encoding)) from error
    except UnicodeError as error:
        if isinstance(error, UnicodeEncodeError):
            raise
        raise DataError(_not_decoded(file, encoding)) from error  # utf-16 without a mark


def _not_decoded(file: Path, encoding: str) -> str:
    name = encoding.removesuffix("-sig")
    return (
        f"{file}: line {_undecodable_line(file, encoding)} is not {name} text: save the file as UTF-8, or set its "
        "encoding (data.encoding; cp1252, cp1251, shift_jis, gb18030 and utf-16 are common)"
    )


def _encoding_of(file: Path) -> str:
    """Return the encoding of a text file: UTF-8, UTF-16 with or without a mark, or cp1252 (with latin-1's letters).

    cp1252 is returned only if no character of the file could be UTF-8 beyond ASCII, so that one record cannot change
    the text of a different record; and only if its non-ASCII letters are isolated within Latin words, as in Western
    languages.

    Raises:
        DataError: it is none of them.
    """
    with _bytes_of(file) as source:
        head = source.read(4)
        for mark, name in _BYTE_ORDER_MARKS:
            if head.startswith(mark):
                return name
        if len(head) == 4 and head[0] and head[2] and not head[1] and not head[3]:
            return "utf-16-le"
        if len(head) == 4 and head[1] and head[3] and not head[0] and not head[2]:
            return "utf-16-be"
        decoder = codecs.getincrementaldecoder("utf-8")()
        piece, valid = head, True
        while piece and valid:
            try:
                decoder.decode(piece)
            except UnicodeError:
                valid = False
            piece = source.read(_HEAD)
        if valid:
            try:
                decoder.decode(b"", final=True)
                return "utf-8-sig"
            except UnicodeError:
                pass
    with _bytes_of(file) as source:
        for line in source:
            if not line.isascii() and (
                _UTF8.search(line) or _OTHER_LETTER.search(line) or not _WESTERN.fullmatch(line)
            ):
                raise DataError(_not_decoded(file, "utf-8"))
    return "cp1252"


def _undecodable_line(file: Path, encoding: str) -> int:
    """Return the number of the line with the first byte that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    with _bytes_of(file) as source:
        while piece := source.read(_HEAD):
            try:
                line += decoder.decode(piece).count("\n")
            except UnicodeError as error:
                return line + piece[: getattr(error, "start", 0)].count(b"\n")
    return line


def _zstd(path: str | os.PathLike[str]) -> IO[bytes]:
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


READERS: dict[str, Callable[[Path, Reading], Iterator[pa.Table]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".xlsx": _read_xlsx,
    ".txt": _read_txt,
}
"""Readers by file ending."""

_ALIASES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".tab": ".tsv", ".feather": ".arrow", ".xlsm": ".xlsx"}
_OPENERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
_OF_TEXT = (".jsonl", ".json", ".csv", ".tsv", ".txt")
ENDINGS = f"{', '.join((*READERS, *_ALIASES))}; text files also with {', '.join(_OPENERS)}"
"""The endings that can be read, in words."""

_REMEDIES: dict[str, str] = {
    ending: remedy
    for endings, remedy in (
        (".xls .xlsb .ods .numbers", "save the sheet as .csv or .xlsx"),
        (
            ".docx .doc .pdf .rtf .odt .epub .html .htm .md .xml .eml .pptx",
            "it is a document in a different format: save its text as .txt, or as one object of a .jsonl file",
        ),
        (".zip .tar .tgz .7z .rar", "it is an archive: unpack it, and use the folder"),
        (
            ".pkl .pickle .npy .npz .pt .h5 .hdf5 .db .sqlite .dta .sav .rds .sas7bdat",
            "write its records as .parquet or .jsonl, for example with pandas",
        ),
        (
            ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .heic .mp3 .wav .flac .mp4",
            "it holds no text, and models are only trained on text",
        ),
    )
    for ending in endings.split()
}
_MARKS = (
    (b"PK\x03\x04", ".xlsx or .zip"),
    (b"%PDF", ".pdf"),
    (b"\xd0\xcf\x11\xe0", ".xls or .doc"),
    (b"PAR1", ".parquet"),
    (b"ARROW1", ".arrow"),
    (b"\x1f\x8b", ".gz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
    (b"FEA1", ".feather of version 1"),
)
_HTML = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*<(?:!doctype\s+html|html)", re.IGNORECASE)
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UTF8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
# Letters of Western languages, at most two together, and the signs of print; not the bytes that cp1252 lacks.
_WESTERN = re.compile(
    rb"(?:[\x00-\x7f]|[\x80\x82-\x8c\x8e\x91-\x9c\x9e-\xbf\xd7\xf7]|[\xc0-\xd6\xd8-\xf6\xf8-\xff]{1,2}(?![\xc0-\xff]))*"
)
# A cp1252 sign or capital within a word is a letter in a different encoding, such as latin-2 or Mac Roman.
_OTHER_LETTER = re.compile(
    rb"[A-Za-z\xc0-\xff][\xa1-\xac\xae-\xb3\xb5\xb6\xb8\xb9\xbb-\xbf][A-Za-z\xc0-\xff]|[a-z][\x83\x8a\x8e\x9f]"
)
_LONG_NAME = 80  # characters: columns have shorter names
# pandas and NumPy write NaN for a missing value.
_HEAD = 4096  # characters
_JSON_RECORD = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\\n]|\\.)*"\s*:')  # up to the first key of an object
_DECODER = json.JSONDecoder(parse_constant={"NaN": None, "Infinity": float("inf"), "-Infinity": -float("inf")}.get)

"""Inspect the columns in the first records of a data set: which format they fit, and which column is an id.

`dpllm init` uses them to propose a recipe's ``data`` section. A column is proposed only on evidence: a common name and
values that fit that name. The example of each column is only for the person at the screen.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from dpllm.config import ConfigError, DataConfig
from dpllm.config.formats.catalogue import COLUMNS, FORMATS
from dpllm.config.formats.record_format import Cells, Column, RecordFormat, columns_in
from dpllm.data.local_files import local_files
from dpllm.data.messages import read_messages
from dpllm.data.readers import NOTHING, DataError, Reading, read_tables
from dpllm.data.records import read_unchecked, reading_of

TEXT, MESSAGES, LIST, NUMBER, OTHER = "text", "messages", "list", "number", "other"

_OF_CELLS = {Cells.TEXT: (TEXT,), Cells.LIST: (LIST,), Cells.MESSAGES: (MESSAGES,), Cells.ANY: (TEXT, NUMBER)}
_ID = "id|no|nr|num|number|nummer|key|hash|code|uuid|guid"
_PERSON = re.compile(
    r"(?:^|_)(?:user|patient|patienten|person|author|customer|client|subject|sender|member|employee|student|owner|"
    r"speaker|account|participant|individual|resident|citizen|respondent|reviewer|applicant|claimant|donor|pupil|"
    r"pseudonym|kunde|kunden|nutzer|proband|probanden|paciente|usuario|cliente|utilisateur)"
    rf"(?:s|name|_?(?:{_ID}|name))?$|"
    r"(?:^|_)(?:pat|worker|annotator|candidate|player|staff|child|mother|visitor|buyer|tenant|guest|household|"
    rf"matrikel|social_security|insurance|nhs|medical_record|passport)_?(?:{_ID})$|"
    r"^(?:mrn(?:_hash)?|screen_name|uid|pid|ssn|guid|(?:e_?mail|sender_e_?mail)(?:_address)?|(?:mobile|phone)(?:_?(?:no|number))?)$"
)
_TURNS = ({"role", "content"}, {"from", "value"})  # of OpenAI, of ShareGPT
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NO_TEXT = frozenset(
    [
        *("id", "ids", "no", "nr", "num", "number", "date", "time", "day", "year", "type", "kind", "count", "length"),
        *("len", "size", "hash", "key", "url", "uri", "link", "lang", "language", "code", "path", "file", "version"),
        *("status", "score"),
    ]
)
"""Parts of a name which show that a column describes a text instead of holding it."""
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0e7f]{6}")  # Japanese, Chinese, Thai
_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_LONGEST_ID, _MOST_NAMES = 64, 5  # characters, words; a longer text in a column "user" is what somebody wrote
_WRITTEN = 0.1  # the share of such texts in a column of texts; no id and no name of a person is one
_TOPICS = ("subject", "subjects", "subject_name")
_NO_IDS = frozenset(("", "yes", "no", "true", "false", "y", "n", "0", "1", "unknown", "none", "user", "assistant"))
_ROWS = 4096
_SHORT_ID = 40  # characters
_SHORTEST_TEXT = 12  # characters of half of the values: "not ok" and "New York" are no texts to train on
_SHOWN = 34
_FEW = 10  # values, of which nothing can be concluded


@dataclass(frozen=True)
class ColumnFacts:
    """What the first records show about a column.

    Attributes:
        kind: one of the constants of this module.
        example: the beginning of a value, private; empty if there is none.
        filled: number of values.
        empty: number of records without a value.
        different: number of different values.
        length: median number of characters of texts; 0 for other kinds.
        is_prose: whether at least half of the values are sentences, or at least two words.
    """

    kind: str
    example: str = ""
    filled: int = 0
    empty: int = 0
    different: int = 0
    length: int = 0
    is_prose: bool = False

    @property
    def is_id(self) -> bool:
        """Whether all values are short and distinct, so that they can only identify records."""
        short = self.kind == NUMBER or (self.kind == TEXT and not self.is_prose and self.length <= _SHORT_ID)
        return short and self.filled >= _FEW and self.different == self.filled

    @property
    def is_label(self) -> bool:
        """Whether values repeat as those of classes do."""
        return self.kind == LIST or self.filled < _FEW or 5 * self.different <= self.filled

    @property
    def words(self) -> str:
        """The facts in a few words, for the person at the screen."""
        if self.filled == 0:
            return "empty"
        if self.is_prose:
            return f"median {self.length:,} characters"
        count = "all different" if self.different == self.filled > 1 else f"{self.different:,} different"
        return count if self.kind in (TEXT, NUMBER) else self.kind


@dataclass(frozen=True)
class Columns:
    """The columns of a data set.

    Attributes:
        facts: name -> facts, in the order of the file.
        people: columns whose name is that of a person's id and whose first values repeat.
        faults: name -> why the column cannot be used, such as a name that two columns have.
    """

    facts: dict[str, ColumnFacts]
    people: tuple[str, ...] = ()
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """Name -> kind, in the order of the file."""
        return {name: facts.kind for name, facts in self.facts.items()}

    def guessed_format(self) -> str | None:
        """Return the format whose columns are all present by name and content; None if there is none.

        A format of messages has priority, then the format with the most columns.
        """
        fitting = {name: found for name, kind in FORMATS.items() if kind.asked and (found := self._columns_for(kind))}
        chats = [name for name in fitting if any(self.kinds[column] == MESSAGES for column in fitting[name])]
        best = max(chats or fitting, key=lambda name: len(fitting[name]), default=None)
        other = self.format_of_others()
        if best and other and set(fitting[best]) <= set(FORMATS[other]().required):
            return None  # for example one of the two answers of a preference
        return best

    def format_of_others(self) -> str | None:
        """Return a format for which `dpllm init` writes no recipe and whose columns all have their own names."""
        for name, kind in FORMATS.items():
            if not kind.asked and set(kind().required) <= self.facts.keys():
                return name
        return None

    def proposed(self, key: str, taken: Sequence[str] = ()) -> str | None:
        """Return the column for a key of the section, such as "prompt"; None if none fits by name and content."""
        return self._proposed(COLUMNS[key], taken)

    def longest_prose(self) -> str | None:
        """Return the column with the longest sentences, regardless of its name; None if there is none."""
        prose = {name: facts.length for name, facts in self.facts.items() if facts.is_prose}
        return max(prose, key=lambda name: prose[name], default=None)

    def _proposed(self, about: Column, taken: Sequence[str]) -> str | None:
        names = [
            name
            for name, facts in self.facts.items()
            if facts.kind in _OF_CELLS[about.cells] and name not in (*self.people, *taken) and _fits(about, facts)
        ]
        return _usual(about.usual, names) or (next(iter(names), None) if about.cells is Cells.MESSAGES else None)

    def _columns_for(self, kind: type[RecordFormat]) -> list[str] | None:
        """Return the columns that fit a format; None: one is missing."""
        taken: list[str] = []
        for about in columns_in(kind).values():
            name = self._proposed(about, taken)
            if name is None and not about.optional:
                return None
            taken += [] if name is None else [name]
        return taken


def columns_of(data: DataConfig) -> Columns:
    """Return the columns of a data set, from the first records of its first file.

    Args:
        data: where the records are, and how they are read. A data set of the Hub is loaded as a whole.

    Raises:
        ConfigError: there is no such file, folder or data set.
        DataError: the file cannot be read as its ending says, or holds no record.
    """
    path, files = data.path, local_files(data.path, data.split)
    if files:
        reading, table = _first_table(files, data)
        if reading.mixed_places:  # as `dpllm.data.records` reads chats
            reading, table = _first_table(files, data, frozenset(reading.mixed_places))
    else:
        reading = Reading()
        if not path.startswith("builtin:") and "/" not in path:
            raise ConfigError(
                f"{path}: there is no such file or folder here, and a Hub data set has the form owner/name. Check the "
                "spelling and the folder"
            )
        records = read_unchecked(data)
        table = records.select(range(min(_ROWS, len(records)))).with_format("arrow")[:] if len(records) else None
    if table is not None and table.column_names == [NOTHING]:
        raise DataError(next(iter(reading.faults.values())))
    if table is None:
        raise DataError(f"{path}: it contains no record. Check the file")
    fields = [field for field in table.schema if field.name != NOTHING]
    facts = {field.name: _facts_of(field.type, table.column(field.name)[:_ROWS]) for field in fields}
    values = {name: table.column(name).to_pylist() for name in facts if names_people(name)}
    people = tuple(name for name, own in values.items() if _are_ids(name, own) and _is_shared(own))
    return Columns(facts, people, {name: words for name, words in reading.faults.items() if name != NOTHING})


def _first_table(
    files: Sequence[str], data: DataConfig, json_places: frozenset[str] = frozenset()
) -> tuple[Reading, pa.Table | None]:
    """Return the first records of files, and what was found while they were read."""
    reading = reading_of(data, json_places)
    reading.needed, reading.mixed_as_json = (*reading.needed, "messages", "conversations"), True
    tables = (table for file in files for table in read_tables(Path(file), reading))
    return reading, next((table for table in tables if table.num_rows), None)


def names_people(name: str) -> bool:
    """Return whether a column has the name of a person's id.

    >>> [names_people(one) for one in ("patient_id", "PatientID", "Customer No", "text", "message_id")]
    [True, True, True, False, False]
    """
    return _PERSON.search(_WORD_STARTS.sub("_", name).strip("_").lower()) is not None


def people_in(records: Any) -> tuple[str, ...]:
    """Return the columns of a data set that have the name of a person's id, and whose values repeat.

    Ids are the same if they differ in case, accents or punctuation only (123-45-6789 and 123456789, José and Jose).

    Args:
        records: a `datasets.Dataset` or a list of dictionaries; any other data set has none.
    """
    return tuple(name for name in ids_in(records) if _is_shared(values_in(records, name)))


def ids_in(records: Any) -> list[str]:
    """Return the columns of a data set that have the name of a person's id, and whose first values may be such ids.

    A column of texts that people wrote identifies nobody, such as the turns of a chat in "user" and "assistant".

    Args:
        records: as for `people_in`.
    """
    named = (name for name in names_in(records) if names_people(name))
    return [name for name in named if _are_ids(name, itertools.islice(values_in(records, name), _ROWS))]


def names_in(records: Any) -> list[str]:
    """Return the columns of a `datasets.Dataset` or of a list of dictionaries; none of any other data set."""
    if isinstance(records, datasets.Dataset):
        return list(records.column_names)
    if isinstance(records, list | tuple) and records and isinstance(records[0], dict):
        return [str(name) for name in records[0]]
    return []


def values_in(records: Any, column: str) -> Iterator[Any]:
    """Yield the values of a column of a data set that `names_in` reads."""
    if not isinstance(records, datasets.Dataset):
        yield from (row.get(column) for row in records)
        return
    for table in records.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        yield from table.column(0).to_pylist()


def _is_shared(values: Iterable[Any]) -> bool:
    """Return whether ids repeat, in any spelling."""
    seen: set[str] = set()
    repeats, only_flags = False, True
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or len(str(value)) > _LONGEST_ID:
            continue
        if value != value:  # pandas writes numbers beside missing values as floats
            continue
        plain = unicodedata.normalize("NFKD", str(value)).casefold()
        one = "".join(letter for letter in plain if letter.isalnum())
        repeats |= one in seen
        only_flags &= one in _NO_IDS
        if repeats and not only_flags:
            return True
        seen.add(one)
    return False


def _are_ids(name: str, values: Iterable[Any]) -> bool:
    """Whether values of a column that has the name of a person's id may be ids or names of people.

    A "subject" without a number is that of an e-mail or of a lesson, and one with a number is that of a study.
    """
    texts = [str(value) for value in values if value is not None]
    written = sum(len(text) > _LONGEST_ID or len(text.split()) > _MOST_NAMES for text in texts)
    numbered = sum(any(letter.isdigit() for letter in text) and len(text.split()) == 1 for text in texts)
    return written <= _WRITTEN * len(texts) and (name.casefold() not in _TOPICS or 2 * numbered >= len(texts))


def texts_of(record: Any) -> list[str]:
    """Return all texts in a value: of a cell, a list of words, or messages."""
    if isinstance(record, str):
        return [record]
    if isinstance(record, dict):
        return [text for value in record.values() for text in texts_of(value)]
    if isinstance(record, list):
        return [text for value in record for text in texts_of(value)]
    return []


def _facts_of(kind: pa.DataType, column: pa.ChunkedArray) -> ColumnFacts:
    values = [value for value in column.to_pylist() if value is not None and value != ""]
    word = _kind(kind)
    texts = [value for value in values if isinstance(value, str)] if word == TEXT else []
    if texts and all(map(_is_chat, texts[:_FEW])):
        word, texts = MESSAGES, []
    example = " ".join(str(values[0]).split()) if values else ""
    return ColumnFacts(
        kind=word,
        example=example if len(example) <= _SHOWN else f"{example[: _SHOWN - 1]}…",
        filled=len(values),
        empty=len(column) - len(values),
        different=len({str(value) for value in values}),
        length=int(statistics.median(map(len, texts))) if texts else 0,
        is_prose=2 * sum(map(_is_prose, texts)) >= max(1, len(texts)),
    )


def _is_chat(text: str) -> bool:
    """Whether a text is the JSON text of a chat."""
    if text.lstrip()[:1] != "[":
        return False
    try:
        return bool(read_messages(text, "record"))
    except DataError:
        return False


def _is_prose(text: str) -> bool:
    """Whether a text has at least two words; a number, a date, a code or a name of one word has not."""
    return sum(_LETTERS.search(word) is not None for word in text.split()) > 1 or _UNSPACED.search(text) is not None


def _fits(about: Column, facts: ColumnFacts) -> bool:
    """Whether the content of a column is what the key says, as far as it can be seen."""
    if about.label:
        return facts.is_label
    if about.cells is Cells.TEXT:
        if about.is_answer:
            return facts.is_prose or not facts.is_id
        return facts.is_prose and facts.length >= _SHORTEST_TEXT
    return True


def _kind(kind: pa.DataType) -> str:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return TEXT
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        names = {inner.field(n).name for n in range(inner.num_fields)} if pa.types.is_struct(inner) else set()
        return MESSAGES if any(turn <= names for turn in _TURNS) else LIST
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return NUMBER
    return OTHER


def _usual(known: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the name that is known, by the order of the known ones; then a longer name with a known one in it."""
    rules: tuple[Callable[[str], set[str]], ...] = (lambda name: {name.casefold()}, _parts)
    for rule in rules:
        by_name = {one: name for name in reversed(names) for one in rule(name)}
        if (found := next((by_name[one] for one in known if one in by_name), None)) is not None:
            return found
    return None


def _parts(name: str) -> set[str]:
    """Return the words of a name, such as those of ``clinicalNote``; none of one that is about a text."""
    parts = {part.casefold() for part in _PART.findall(name)}
    return set() if parts & _NO_TEXT else parts

"""The columns of a data set and their kinds, from its first records: which format it has, and which column is an id.

Place in the flow: `dpllm init` proposes a recipe's ``data`` section by them. Names and kinds of columns are facts of
the form of a data set, as its documentation would state them. No value is returned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dpllm.config import ConfigError, DataConfig, RecordFormat
from dpllm.config.formats.catalogue import COLUMNS, FORMATS
from dpllm.config.formats.record_format import Cells, Column, columns_in
from dpllm.data.readers import DataError, read_tables
from dpllm.data.records import local_files, read_unchecked

TEXT, MESSAGES, LIST, NUMBER, OTHER = "text", "messages", "list", "number", "other"

_OF_CELLS = {Cells.TEXT: (TEXT,), Cells.LIST: (LIST,), Cells.MESSAGES: (MESSAGES,), Cells.ANY: (TEXT, NUMBER)}
_PERSON = re.compile(
    r"(?:^|_)(?:user|patient|person|author|customer|client|subject|sender|member|employee|student|owner|speaker|account|"
    r"participant|individual)(?:s|name|_?(?:id|no|nr|number|key|hash|name))?$|^(?:mrn|uid|pid)$",
    re.IGNORECASE,
)
_ROWS = 4096


@dataclass(frozen=True)
class Columns:
    """The columns of a data set.

    Attributes:
        kinds: name -> kind, one of the constants of this module, in the order of the file.
        people: columns whose name is that of a person's id and whose first values repeat.
    """

    kinds: dict[str, str]
    people: tuple[str, ...] = ()

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the names of the columns of these kinds."""
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def guessed_format(self) -> str | None:
        """Return the format by names and kinds; None if no column holds text or messages.

        Of the formats whose columns are all there, that of messages comes first, and then the one of which most columns
        have a usual name.
        """
        ranks = {name: rank for name, kind in FORMATS.items() if kind.asked and (rank := self._rank(kind))}
        return max(ranks, key=lambda name: ranks[name], default=None)

    def _rank(self, kind: type[RecordFormat]) -> tuple[bool, int] | None:
        """Return how well a format fits; None: a column is missing."""
        taken: list[str] = []
        usual = 0
        for about in columns_in(kind).values():
            named = _first(about.usual, self._candidates(about, taken))
            name = named or (next(iter(self._candidates(about, taken)), None) if about.any_name else None)
            if name is None and not about.optional:
                return None
            usual += named is not None
            taken += [] if name is None else [name]
        return any(about.cells is Cells.MESSAGES for about in columns_in(kind).values()), usual

    def text_column(self) -> str | None:
        """Return the column of the text; the first text column that is no id if no name is known."""
        return self.proposed("text_column")

    def proposed(self, key: str, taken: Sequence[str] = ()) -> str | None:
        """Return the column for a key of the section, such as "prompt_column"; None if none fits.

        Args:
            key: the key.
            taken: columns that have another use.
        """
        about, names = COLUMNS[key], self._candidates(COLUMNS[key], taken)
        only_named = about.label or about.optional
        return _first(about.usual, names) or (None if only_named else next(iter(names), None))

    def _candidates(self, about: Column, taken: Sequence[str]) -> list[str]:
        """Return the names of the columns with such cells that are no ids and have no other use."""
        return [name for name in self.of_kind(*_OF_CELLS[about.cells]) if name not in (*self.people, *taken)]


def columns_of(path: str, encoding: str = "utf-8") -> Columns:
    """Return the columns of a data set, from the first records of its first file.

    Args:
        path: as `DataConfig.path`. A data set of the Hub is loaded as a whole.
        encoding: of text files.

    Raises:
        ConfigError: there is no such file, folder or data set.
        DataError: the file cannot be read as its ending says, or holds no record.
    """
    files = local_files(path)
    if files:
        first = Path(sorted(files)[0])
        table = next((one for one in read_tables(first, encoding) if one.num_rows), None)
    else:
        if not path.startswith("builtin:") and "/" not in path:
            raise ConfigError(
                f"{path}: there is no such file or folder here, and a data set of the Hub is written owner/name: check "
                "the spelling and the folder"
            )
        records = read_unchecked(DataConfig(path=path, max_length=2, encoding=encoding))
        table = records.select(range(min(_ROWS, len(records)))).with_format("arrow")[:] if len(records) else None
    if table is None:
        raise DataError(f"{path}: there is no record in it: check the file")
    kinds = {field.name: _kind(field.type) for field in table.schema}
    people = tuple(name for name in kinds if _PERSON.search(name) and _repeats(table.column(name)))
    return Columns(kinds, people)


def texts_of(record: Any) -> list[str]:
    """Return all texts in a value: of a cell, a list of words, or messages."""
    if isinstance(record, str):
        return [record]
    if isinstance(record, dict):
        return [text for value in record.values() for text in texts_of(value)]
    if isinstance(record, list):
        return [text for value in record for text in texts_of(value)]
    return []


def _kind(kind: pa.DataType) -> str:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return TEXT
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        if pa.types.is_struct(inner) and {"role", "content"} <= {inner.field(n).name for n in range(inner.num_fields)}:
            return MESSAGES
        return LIST
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return NUMBER
    return OTHER


def _repeats(column: Any) -> bool:
    values = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    try:
        return len(values.unique()) < len(values) - values.null_count
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False


def _first(known: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the name that is known, by the order of the known ones; case does not matter."""
    by_name = {name.casefold(): name for name in reversed(names)}
    return next((by_name[one] for one in known if one in by_name), None)

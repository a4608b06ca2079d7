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

from dpllm.config import ConfigError, DataConfig
from dpllm.data.local_files import local_files
from dpllm.data.readers import NOTHING, DataError, Reading, read_tables
from dpllm.data.records import read_unchecked

TEXT, MESSAGES, LIST, NUMBER, OTHER = "text", "messages", "list", "number", "other"

_PROMPTS = ("prompt", "instruction", "question", "input", "query", "source", "context")
_COMPLETIONS = ("completion", "response", "answer", "output", "target", "reply", "summary")
_LABELS = ("label", "labels", "class", "category", "target", "sentiment")
_TEXTS = ("text", "content", "note", "body", "message", "document", "sentence", "report", "review")
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
        """Return the format by names and kinds; None if no column holds text or messages."""
        if self.of_kind(MESSAGES):
            return "chat"
        texts = self.of_kind(TEXT)
        if not texts:
            return None
        if _first(_PROMPTS, texts) and _first(_COMPLETIONS, texts):
            return "prompt_completion"
        label = _first(_LABELS, [name for name in self.of_kind(TEXT, NUMBER) if name != self.text_column()])
        return "classification" if label is not None else "text"

    def text_column(self) -> str | None:
        """Return the column of the text; the first text column that is no id if no name is known."""
        texts = [name for name in self.of_kind(TEXT) if name not in self.people]
        return _first(_TEXTS, texts) or next(iter(texts), None)

    def proposed(self, key: str, taken: Sequence[str] = ()) -> str | None:
        """Return the column for a key of the section, such as "prompt_column"; None if none fits.

        Args:
            key: the key.
            taken: columns that have another use.
        """
        texts = [name for name in self.of_kind(TEXT) if name not in (*self.people, *taken)]
        if key == "text_column":
            return self.text_column()
        if key == "messages_column":
            return next(iter(self.of_kind(MESSAGES)), None)
        if key == "label_column":
            return _first(_LABELS, [name for name in self.of_kind(TEXT, NUMBER, LIST) if name not in taken])
        known = _first(_PROMPTS if key == "prompt_column" else _COMPLETIONS, texts)
        return known or next(iter(texts), None)


def columns_of(path: str, encoding: str | None = None) -> Columns:
    """Return the columns of a data set, from the first records of its first file.

    Args:
        path: as `DataConfig.path`. A data set of the Hub is loaded as a whole.
        encoding: of text files; None: found by looking.

    Raises:
        ConfigError: there is no such file, folder or data set.
        DataError: the file cannot be read as its ending says, or holds no record.
    """
    files, reading = local_files(path), Reading(encoding=encoding, needed=("messages", "conversations"))
    if files:
        table = next((one for file in files for one in read_tables(Path(file), reading) if one.num_rows), None)
    else:
        if not path.startswith("builtin:") and "/" not in path:
            raise ConfigError(
                f"{path}: there is no such file or folder here, and a data set of the Hub is written owner/name: check "
                "the spelling and the folder"
            )
        records = read_unchecked(DataConfig(path=path, max_length=2, encoding=encoding))
        table = records.select(range(min(_ROWS, len(records)))).with_format("arrow")[:] if len(records) else None
    if table is not None and table.column_names == [NOTHING]:
        raise DataError(next(iter(reading.faults.values())))
    if table is None:
        raise DataError(f"{path}: there is no record in it: check the file")
    kinds = {field.name: _kind(field.type) for field in table.schema if field.name != NOTHING}
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

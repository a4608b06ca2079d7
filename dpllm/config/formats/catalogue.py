"""Every format of records. A new one is a file beside this one, and its columns and its class here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dpllm.config.formats.chat import ChatFormat
from dpllm.config.formats.classification import ClassificationFormat
from dpllm.config.formats.instruction import InstructionFormat
from dpllm.config.formats.preference import PreferenceFormat
from dpllm.config.formats.prompt_completion import PromptCompletionFormat
from dpllm.config.formats.question_answering import QuestionAnsweringFormat
from dpllm.config.formats.record_format import Column, RecordFormat, columns_in
from dpllm.config.formats.text import TextFormat
from dpllm.config.formats.tokens import TokensFormat
from dpllm.config.values import ConfigError

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


FORMATS: Mapping[str, type[RecordFormat]] = {kind.name: kind for kind in _FORMATS}
"""Values of ``data.format``."""

COLUMNS: Mapping[str, Column] = {
    key: next(columns_in(one)[key] for one in _FORMATS if key in columns_in(one))
    for kind in _FORMATS
    for key in columns_in(kind)
}
"""What the keys of ``data.columns`` are for; that of the first format, if several have the key."""


def format_of(keys: Collection[str]) -> str:
    """Return the format whose columns have these keys.

    Args:
        keys: of ``data.columns``, without ``unit``.

    Raises:
        ConfigError: no format has all of them, or several have.

    >>> format_of(["text", "label"]), format_of(["messages"]), format_of([])
    ('classification', 'chat', 'text')
    """
    if set(keys) <= {"text"}:
        return "text"
    found = [name for name, kind in FORMATS.items() if set(keys) <= columns_in(kind).keys()]
    if len(found) == 1:
        return found[0]
    known = "; ".join(f"{name}: {', '.join(columns_in(kind))}" for name, kind in FORMATS.items())
    given = ", ".join(keys)
    if found:
        raise ConfigError(
            f"columns has {given}, which the formats {' and '.join(found)} have: set data.format to one of them"
        )
    raise ConfigError(f"columns has {given}, and no format has them all ({known}): leave out those that are not read")


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

"""All formats of records, by name, with the columns that they read. A new format is a class and a line of `FORMATS`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import (
    Cells,
    Chat,
    Column,
    Completion,
    Pair,
    Question,
    RecordFormat,
    Text,
    TextLabel,
    WordTags,
    column,
    columns_in,
)
from dpllm.config.values import ConfigError

TEXT_NAMES = (
    *("text", "content", "note", "body", "message", "document", "sentence", "report", "review", "comment"),
    *("transcript", "abstract", "article", "narrative", "description"),
)
"""Usual names of a column of texts."""


@dataclass(frozen=True, kw_only=True)
class TextFormat(RecordFormat):
    """A text with loss on each token, and the end-of-sequence token after it."""

    text: str = column("text", "the text", usual=TEXT_NAMES, trl="text")

    name = "text"
    about = "a text"
    table = ("`text`", "all tokens")
    holds = Text
    tasks = ("causal_lm",)
    trainers = (None, "sft")
    long_records = "split"

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return the prompt and the text as one text."""
        return {self.text: f"{prompt}{gap}{text}" if prompt else text}


_PROMPTS = ("prompt", "instruction", "question", "input", "query", "source", "context")
_COMPLETIONS = ("completion", "response", "answer", "output", "target", "reply", "summary")


@dataclass(frozen=True, kw_only=True)
class PromptCompletionFormat(RecordFormat):
    """A prompt and a completion with nothing between them; the completion and the end-of-sequence token have loss."""

    prompt: str = column("prompt", "the part without loss", usual=_PROMPTS, trl="prompt")
    completion: str = column("completion", "the part with loss", usual=_COMPLETIONS, is_answer=True, trl="completion")

    name = "prompt_completion"
    about = "a prompt and its completion"
    table = ("`prompt`, `completion` (joined as they are)", "the completion")
    holds = Completion
    tasks = ("causal_lm", "seq2seq_lm")
    trainers = (None, "sft")
    aliases = ("prompt+completion",)

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return prompt and text in their columns."""
        del gap
        return {self.prompt: prompt, self.completion: text}


_GAP = "\n\n"
_INPUTS = ("input", "context")  # of Alpaca, of Dolly


@dataclass(frozen=True, kw_only=True)
class InstructionFormat(RecordFormat):
    """Instruction, input where there is one, and output, with an empty line between them, as in Alpaca's records."""

    instruction: str = column("instruction", "the instruction", usual=("instruction",))
    input: str = column("input", "what the instruction is about", Cells.ANY, optional=True, usual=_INPUTS)
    output: str = column("output", "the answer, which has loss", usual=("output", "response"), is_answer=True)

    name = "instruction"
    about = "an instruction, an optional input, and the output"
    table = ("`instruction`, `input` (may be missing or empty), `output`", "the output")
    holds = Completion
    tasks = ("causal_lm", "seq2seq_lm")
    aliases = ("alpaca",)

    def content(self, record: Mapping[str, Any]) -> Completion:
        """Return instruction and input as the prompt, and the output as its completion."""
        parts = [record[self.instruction], str(record.get(self.input) or "")]
        prompt = _GAP.join(part for part in parts if part.strip())
        return Completion(prompt + _GAP, record[self.output])

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return the prompt as an instruction, and the text as its output."""
        del gap
        return {self.instruction: prompt, self.output: text}


SYSTEM, OPTIONS = "system", "chat_template_kwargs"
_CHATS = ("messages", "conversations", "conversation")
BESIDE = (SYSTEM, "tools", "documents", OPTIONS)
"""Columns beside a conversation: a system prompt, and what a chat template takes in addition to the messages."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat(RecordFormat):
    """Messages in the tokenizer's chat template (`dpllm.data.chat`); the assistant's turns have loss."""

    messages: str = column("messages", "the chat", Cells.MESSAGES, usual=_CHATS, trl="messages")

    name = "chat"
    about = "a list of messages"
    table = (
        "`messages`: list of `{role, content}` or of `{from, value}`, through the tokenizer's chat template; "
        "see [Chats](#chats)",
        "the assistant's turns",
    )
    holds = Chat
    tasks = ("causal_lm",)
    trainers = (None, "sft")
    aliases = ("messages",)
    beside = BESIDE
    long_records = "split"

    def content(self, record: Mapping[str, Any]) -> Chat:
        """Return the conversation, and the columns `BESIDE` it that the record has."""
        return Chat(record.get(self.messages), {name: record[name] for name in BESIDE if name in record})

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return a user's turn and the assistant's."""
        del gap
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        return {self.messages: turns}

    def key(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return role and content of each turn: a table adds other keys to all messages."""
        return tuple((turn["role"], turn["content"]) for turn in record[self.messages])


@dataclass(frozen=True, kw_only=True)
class PreferenceFormat(RecordFormat):
    """Two answers, whose rows `dpllm.data.examples` makes; without a prompt, both begin with it."""

    prompt: str = column("prompt", "the prompt", Cells.ANY, optional=True, trl="prompt")
    chosen: str = column("chosen", "the better answer", Cells.ANY, trl="chosen")
    rejected: str = column("rejected", "the other answer", Cells.ANY, trl="rejected")

    name = "preference"
    about = "two answers"
    table = (
        "`chosen`, `rejected`: texts or lists of `{role, content}`; `prompt`, or both begin with "
        "the prompt; needs `train.trainer: dpo`",
        "one loss for each pair",
    )
    holds = Pair
    tasks = ("causal_lm",)
    trainers = ("dpo",)
    asked = False
    beside = BESIDE


_LABELS = ("label", "labels", "class", "category", "target", "sentiment")


@dataclass(frozen=True, kw_only=True)
class ClassificationFormat(RecordFormat):
    """A text and its label."""

    text: str = column("text", "the text", usual=TEXT_NAMES, trl="text")
    label: str = column("label", "the class, a list of classes, or numbers", Cells.ANY, label=True, usual=_LABELS)

    name = "classification"
    about = "a text and its label"
    table = (
        "`text`, `label`: 0, 1, 2, …; a list of them (`model.task: multi_label_classification`); a "
        "number, or a list of `model.num_labels` numbers (`regression`)",
        "the class, the classes, the numbers",
    )
    holds = TextLabel
    tasks = ("sequence_classification", "multi_label_classification", "regression")
    aliases = ("text+label",)


@dataclass(frozen=True, kw_only=True)
class TokensFormat(RecordFormat):
    """Words, joined by spaces, with the class of a word at its first token."""

    words: str = column("words", "the list of words of a text", Cells.LIST)
    tags: str = column("tags", "the list of their classes", Cells.LIST, label=True)

    name = "tokens"
    about = "words and the class of each"
    table = (
        "`words`: list of words; `tags`: list of their classes",
        "the class of each word, at its first token (`token_classification`)",
    )
    holds = WordTags
    tasks = ("token_classification",)
    asked = False


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringFormat(RecordFormat):
    """Question and context as a pair of texts; the labels mark the first answer, or the row's first token."""

    question: str = column("question", "the question")
    context: str = column("context", "the text that holds the answer")
    answers: str = column("answers", "the answers, as in SQuAD", Cells.ANY, label=True)

    name = "question_answering"
    about = "a question and the place of its answer in a text"
    table = (
        "`question`, `context`, `answers`: `{text: [...], answer_start: [...]}` as in SQuAD, of which the first counts",
        "first and last token of the answer in the context; the row's first token if there is none, or if it was cut "
        "off",
    )
    holds = Question
    tasks = ("question_answering",)
    asked = False


FORMATS: Mapping[str, type[RecordFormat]] = {
    kind.name: kind
    for kind in (
        *(TextFormat, PromptCompletionFormat, InstructionFormat, ChatFormat),
        *(PreferenceFormat, ClassificationFormat, TokensFormat, QuestionAnsweringFormat),
    )
}
"""Values of ``data.format``."""

COLUMNS: Mapping[str, Column] = {
    key: next(columns_in(one)[key] for one in FORMATS.values() if key in columns_in(one))
    for kind in FORMATS.values()
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

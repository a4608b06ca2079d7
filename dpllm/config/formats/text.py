"""The format "text": a language model learns whole texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import RecordFormat, Text, column
from dpllm.config.topics import Topic

_USUAL = (
    "text",
    "content",
    "note",
    "body",
    "message",
    "document",
    "sentence",
    "report",
    "review",
    "comment",
    "transcript",
    "abstract",
    "article",
    "narrative",
    "description",
)


@dataclass(frozen=True, kw_only=True)
class TextColumn(Topic):
    """The column of a text."""

    text_column: str = column("text", "the text", usual=_USUAL, trl="text")


@dataclass(frozen=True, kw_only=True)
class TextFormat(TextColumn, RecordFormat):
    """A text with loss on each token, and the end-of-sequence token after it."""

    name = "text"
    about = "a text"
    table = ("`text_column`", "all tokens")
    holds = Text
    tasks = ("causal_lm",)
    trainers = (None, "sft")
    long_records = "split"

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return the prompt and the text as one text."""
        return {self.text_column: f"{prompt}{gap}{text}" if prompt else text}

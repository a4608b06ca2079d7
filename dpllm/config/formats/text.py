"""The format "text": a language model learns whole texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import RecordFormat, Text, column

TEXT_NAMES = (
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

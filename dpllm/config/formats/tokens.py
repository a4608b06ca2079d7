"""The format "tokens": a model learns the class of each word of a text."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.record_format import Cells, RecordFormat, WordTags, column


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

"""The format "tokens": a model learns the class of each word of a text."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.record_format import Cells, RecordFormat, WordTags, column
from dpllm.config.topics import Topic


@dataclass(frozen=True, kw_only=True)
class WordColumns(Topic):
    """The columns of words and their classes."""

    words_column: str = column("words", "the list of words of a text", Cells.LIST)
    tags_column: str = column("tags", "the list of their classes", Cells.LIST, label=True)


@dataclass(frozen=True, kw_only=True)
class TokensFormat(WordColumns, RecordFormat):
    """Words, joined by spaces, with the class of a word at its first token."""

    name = "tokens"
    about = "words and the class of each"
    table = (
        "`words_column`: list of words; `tags_column`: list of their classes",
        "the class of each word, at its first token (`token_classification`)",
    )
    holds = WordTags
    tasks = ("token_classification",)
    asked = False

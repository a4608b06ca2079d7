"""The format "chat": a language model learns the assistant's words in messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import Cells, Chat, RecordFormat, column
from dpllm.config.topics import Topic


@dataclass(frozen=True, kw_only=True)
class MessagesColumn(Topic):
    """The column of a chat."""

    messages_column: str = column("messages", "the chat", Cells.MESSAGES, trl="messages")


@dataclass(frozen=True, kw_only=True)
class ChatFormat(MessagesColumn, RecordFormat):
    """Messages in the tokenizer's chat template (`dpllm.data.chat`); the assistant's turns have loss."""

    name = "chat"
    about = "a list of messages"
    table = (
        "`messages_column`: list of `{role, content}`, through the tokenizer's chat template; a template that writes "
        "the date gets 26 July 2024, so that a run can be resumed on another day",
        "the assistant's turns",
    )
    holds = Chat
    tasks = ("causal_lm",)
    trainers = (None, "sft")
    aliases = ("messages",)
    long_records = "split"

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return a user's turn and the assistant's."""
        del gap
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        return {self.messages_column: turns}

    def key(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return role and content of each turn: a table adds other keys to all messages."""
        return tuple((turn["role"], turn["content"]) for turn in record[self.messages_column])

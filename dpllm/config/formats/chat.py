"""The format "chat": a language model learns the assistant's words in messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import Cells, Chat, RecordFormat, column

SYSTEM, OPTIONS = "system", "chat_template_kwargs"
_USUAL = ("messages", "conversations", "conversation")
BESIDE = (SYSTEM, "tools", "documents", OPTIONS)
"""Columns beside a conversation: a system prompt, and what a chat template takes in addition to the messages."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat(RecordFormat):
    """Messages in the tokenizer's chat template (`dpllm.data.chat`); the assistant's turns have loss."""

    messages: str = column("messages", "the chat", Cells.MESSAGES, usual=_USUAL, trl="messages")

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

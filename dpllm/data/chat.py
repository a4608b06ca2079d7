"""Tokenization of chat messages, with loss on the assistant's words.

Place in the flow: a part of the tokenization. If a template marks the assistant's words itself (``{% generation %}``),
the marks decide which tokens are targets. For any other template, the targets of an assistant's turn are the tokens
that its message adds to the rendering of the earlier messages (the opening of the turn, as in generation, belongs to
the earlier part). A turn whose beginning is rendered differently with and without the later messages has no loss; some
templates leave out the reasoning of an earlier turn. Text after the assistant's last turn is left out: it could not
influence any loss.

Some templates write the current date into the chat (Llama 3.2). They are given a fixed date (`TODAY`): rows must be the
same on every process, and on the day on which a run is resumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError, check_chat
from dpllm.data.values import own_value

# Errors that a template, which is a program, can raise: its own refusals, and mistakes in it such as an endless loop.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""The date given to a chat template; Llama's own templates use it as their default."""
_DIRECTIVES = [f"%{mark}{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwxXyYzZ" for mark in ("-", "")]
_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DRAWS = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")  # all that Jinja has


def encode_chats(
    chats: Sequence[Sequence[Mapping[str, Any]]], tokenizer: PreTrainedTokenizerBase, record_numbers: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Return input ids and labels of each chat; labels are -100 except on the assistant's words.

    Args:
        chats: lists of messages with `role` and `content`.
        tokenizer: a fast one with a chat template.
        record_numbers: the chats' record numbers, for error messages.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that draws random numbers, or is not a fast one.
        DataError: a message has no role or content, or the template refuses a chat; the message names the record.
    """
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            "data.format='chat' needs a tokenizer with a chat template, and this one has none: set model.tokenizer to "
            "the tokenizer of the model's chat version, or use data.format='prompt_completion'"
        )
    refuse_random(template)
    if not tokenizer.is_fast:
        raise ConfigError("data.format='chat' needs a fast tokenizer (one with tokenizer.json); this model has none")
    cleaned = [_clean(chat, number) for chat, number in zip(chats, record_numbers, strict=True)]
    marked = isinstance(template, str) and _MARKS_ASSISTANT.search(template) is not None
    encode = _encode_marked if marked else _encode_unmarked
    examples = []
    for chat, number in zip(cleaned, record_numbers, strict=True):
        try:
            examples.append(encode(chat, tokenizer))
        except _REFUSALS as error:
            raise DataError(
                f"record {number}: the chat template refuses these messages ({' '.join(str(error).split())}): correct "
                "their roles or their order, or remove the record from the data before this run"
            ) from error
    return examples


def prompt_of_chat(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return messages as the text that the assistant's next words follow, by the template and date of the training.

    Args:
        messages: with `role` and `content`.
        tokenizer: with a chat template.

    Raises:
        ConfigError: the template refuses the messages.
        DataError: a message has no role or content.
    """
    try:
        return _render(_clean(messages, 0), tokenizer, opened=True)
    except _REFUSALS as error:
        if isinstance(error, DataError):
            raise
        raise ConfigError(
            f"the chat template refuses these messages ({' '.join(str(error).split())}): correct their roles or order"
        ) from error


def _clean(chat: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Return the messages as no other chat has changed them."""
    check_chat(chat, number)
    return [own_value(message) for message in chat]


def _encode_marked(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    encoding: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, chat_template=with_fixed_date(tokenizer)
    )
    ids, said = encoding["input_ids"], encoding["assistant_masks"]
    return ids, [token if wanted else IGNORE for token, wanted in zip(ids, said, strict=True)]


def _encode_unmarked(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    turns = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        ids = tokenizer(_render(messages, tokenizer), add_special_tokens=False, verbose=False)["input_ids"]
        return ids, [IGNORE] * len(ids)
    messages = messages[: turns[-1] + 1]
    whole = _render(messages, tokenizer)
    spans = []
    for turn in turns:
        before = _render(messages[:turn], tokenizer, opened=True) if turn else ""
        through = _render(messages[: turn + 1], tokenizer)
        if whole.startswith(before) and whole.startswith(through):
            spans.append((len(before), len(through)))
    encoding = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoding["input_ids"]
    starts = [start for start, _ in encoding["offset_mapping"]]
    said = [any(begin <= start < end for begin, end in spans) for start in starts]
    return ids, [token if wanted else IGNORE for token, wanted in zip(ids, said, strict=True)]


def with_fixed_date(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> str | None:
    """Return the template with a macro in place of the time function; the given one if it does not use that function.

    Args:
        tokenizer: with a chat template.
        template: another template. None: the tokenizer's own.
    """
    if "strftime_now" not in str(template or tokenizer.chat_template):
        return template
    replaced = "".join(f"|replace('{one}', '{TODAY.strftime(one)}')" for one in _DIRECTIVES)
    # The empty expression keeps a line break at the beginning of the template.
    macro = f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}{{{{ '' }}}}"
    return macro + str(tokenizer.get_chat_template(template))


def refuse_random(template: Any) -> None:
    """Check that a chat template draws no random numbers, whose place in their sequence depends on other records.

    Args:
        template: a template, or several by name.

    Raises:
        ConfigError: it does.
    """
    found = _DRAWS.search(str(template))
    if found is not None:
        raise ConfigError(
            f"the chat template draws random numbers ({found[0]}). Which numbers a record gets depends on how many "
            "other records come before it, so ε would not hold: leave random and lipsum out of the template"
        )


def _render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, opened: bool = False) -> str:
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opened, chat_template=with_fixed_date(tokenizer)
    )
    return str(rendered)

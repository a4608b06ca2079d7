"""Render and tokenize conversations with chat templates, with loss on the assistant's words.

If a template marks the assistant's words itself (``{% generation %}``), the marks determine the target tokens. For any
other template, the targets of an assistant's turn are the tokens that its message adds to the rendering of the earlier
messages (the opening of the turn, as in generation, belongs to the earlier part). A turn whose beginning is rendered
differently with and without the later messages has no loss; some templates omit the reasoning in an earlier turn. Text
after the assistant's last turn is omitted, since it cannot influence any loss.

It is an error if the template omits anything that a record has: a message, a tool call, tools, documents, a variable.

Some templates write the current date into the chat (Llama 3.2). They get a fixed date (`TODAY`), because rows must be
the same on every process, and on the day on which a run is resumed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.data.labels import IGNORE
from dpllm.data.messages import OPTIONS, SYSTEM, read_beside, read_messages, with_system
from dpllm.data.readers import DataError

REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a template, which is a program, can raise: deliberate ones, and bugs such as infinite recursion."""
TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""The date for chat templates; Llama's own templates use it as their default."""
SILENT = "assistant_turns_without_loss"
"""Name of the count of assistant turns that have no loss because later messages change their rendering."""
_DIRECTIVES = [f"%{mark}{letter}" for letter in "aAbBcdDeFHIjmMpSTuUwxXyYzZ" for mark in ("-", "")]
_CLOCK = (  # the empty expression keeps a line break at the beginning of the template
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{one}', '{TODAY.strftime(one)}')" for one in _DIRECTIVES)
    + " }}{% endmacro %}{{ '' }}"
)
_MARKS_ASSISTANT = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DRAWS = re.compile(r"\|\s*random\b|['\"]random['\"]|\blipsum\b")  # everything random in Jinja
_OWN = ("messages", "tools", "documents", "add_generation_prompt")  # not variables of a record
_REASONING = ("reasoning_content", "reasoning", "thinking")  # texts of a message in addition to its content
_LONG = 24  # characters: a shorter text may be in the rendering by chance
_PROBE = ("Where is the lighthouse?", "Behind the dunes.", "And the harbour?", "South of the town.")


@dataclass(frozen=True)
class Chat:
    """A conversation in the form that a template accepts.

    Attributes:
        messages: messages with the texts ``role`` and ``content``.
        tools: tools that the assistant may call.
        documents: documents that it may read.
        options: variables of the template.
        unweighted: numbers of the assistant's messages with weight 0, which have no loss.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unweighted: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with the date of the training.

    Attributes:
        tokenizer: a tokenizer with one template, or several by name.
        template: a template that replaces the tokenizer's.

    Raises:
        ConfigError: the template draws random numbers, which would depend on the preceding records.
    """

    tokenizer: Any
    template: str | None = None

    def __post_init__(self) -> None:
        """Refuse random numbers."""
        found = _DRAWS.search(str(self.template or self.tokenizer.chat_template))
        if found is not None:
            raise ConfigError(
                f"the chat template draws random numbers ({found[0]}). A record's numbers would depend on how many "
                "records precede it, so ε would not hold. Remove random and lipsum from the template"
            )

    def source(self, tools: Any = None) -> str:
        """Return the template for a conversation with these tools; a macro with a fixed date replaces the clock.

        Raises:
            ConfigError: the tokenizer has none, or several of which none is the default.
        """
        if not (self.template or self.tokenizer.chat_template):
            raise ConfigError(
                "A conversation needs a tokenizer with a chat template, and this one has none. Use the tokenizer of "
                "the model's chat version (model.tokenizer in a recipe), set tokenizer.chat_template, or store the "
                "records as prompt and completion"
            )
        try:
            source = str(self.tokenizer.get_chat_template(self.template, tools))
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer has several chat templates ({', '.join(sorted(self.tokenizer.chat_template))}) and "
                "none is called 'default'. Give this name to the one to train with"
            ) from error
        return _CLOCK + source if "strftime_now" in source else source

    def names(self, role: str) -> bool:
        """Return whether the template mentions a role."""
        return any(f"{quote}{role}{quote}" in str(self.template or self.tokenizer.chat_template) for quote in "'\"")

    def marks(self, tools: Any = None) -> bool:
        """Return whether the template marks the assistant's words."""
        return _MARKS_ASSISTANT.search(self.source(tools)) is not None

    def apply(self, chat: Chat, **how: Any) -> Any:
        """Return what the tokenizer's ``apply_chat_template`` returns for a conversation.

        Args:
            chat: the conversation.
            how: other arguments, such as ``tokenize``.
        """
        return self.tokenizer.apply_chat_template(
            chat.messages,
            tools=chat.tools,
            documents=chat.documents,
            chat_template=self.source(chat.tools),
            **how,
            **chat.options,
        )

    def text(self, chat: Chat, opened: bool = False) -> str:
        """Return a conversation as text, with the opening of the assistant's next turn or without."""
        return str(self.apply(chat, tokenize=False, add_generation_prompt=opened))

    def refuse_unused(self, options: Mapping[str, Any], where: str, tools: Any = None) -> None:
        """Check that the template uses the given variables.

        Raises:
            ConfigError: it does not use one of them, or sets it itself.
        """
        for name in options:
            if name in _OWN or not re.search(rf"\b{re.escape(name)}\b", self.source(tools)):
                raise ConfigError(
                    f"{where}: {OPTIONS} sets '{name}', which is not a variable of this chat template. Remove it, or "
                    "choose a template that uses it"
                )

    def refuse_omissions(self, chat: Chat, where: str, text: str | None = None) -> None:
        """Check that the rendering contains everything in a record.

        A text that is not in the rendering verbatim may be rendered differently; if so, changing it changes the
        rendering.

        Raises:
            DataError: the template omits a message, tool calls, tools or documents.
        """
        whole = self.text(chat) if text is None else text
        without = {"tools": replace(chat, tools=None), "documents": replace(chat, documents=None)}
        for name, other in without.items():
            if getattr(chat, name) and self._is_same(other, whole):
                raise DataError(
                    f"{where} has {name}, but the chat template omits them. Choose a model whose template renders "
                    f"{name}, or remove the column '{name}'"
                )
        if any("tool_calls" in one for one in chat.messages):
            plain = [{key: one[key] for key in one if key != "tool_calls"} for one in chat.messages]
            if self._is_same(replace(chat, messages=plain), whole):
                raise DataError(
                    f"{where} has tool calls, but the chat template omits them. Choose a model whose template renders "
                    "them, or write the calls into the message's content"
                )
        for name in _REASONING:
            if any(message.get(name) for message in chat.messages) and name not in self.source(chat.tools):
                raise DataError(
                    f"{where} has '{name}' in a message, but the chat template omits it. Write it into the content, "
                    "marked as the model marks it, or remove it from the data"
                )
        for position, message in enumerate(chat.messages):
            said = message["content"].strip()
            if not said or (len(said) >= _LONG and said in whole):
                continue
            changed = [*chat.messages]
            changed[position] = {**message, "content": "0" if said != "0" else "1"}
            if self._is_same(replace(chat, messages=changed), whole):
                raise DataError(
                    f"{where}: the chat template leaves the text of message {position} out: {_remedy(message)}"
                )

    def _is_same(self, chat: Chat, whole: str) -> bool:
        try:
            return self.text(chat) == whole
        except REFUSALS:
            return False

    def refusal(self, error: Exception, chat: Chat, where: str) -> DataError:
        """Return the error for a record that the template does not accept; it says if a system turn is the cause."""
        said = " ".join(str(error).split())[:300]
        others = [one for one in chat.messages if one["role"] not in (SYSTEM, "developer")]
        remedy = "correct their roles or their order, or remove the record before this run"
        if 0 < len(others) < len(chat.messages):
            try:
                self.text(replace(chat, messages=others))
            except REFUSALS:
                pass
            else:
                remedy = f"it accepts no system turn. {_remedy({'role': SYSTEM}).capitalize()}"
        return DataError(f"{where}: the chat template refuses these messages ({said}): {remedy}")

    def spans(self, chat: Chat, whole: str, turns: Sequence[int]) -> Iterator[tuple[int, tuple[int, int] | None]]:
        """Yield the position of each turn in the rendering; None for a turn that later messages change.

        Args:
            chat: the conversation.
            whole: its rendering.
            turns: numbers of the assistant's messages.
        """
        for turn in turns:
            before = self.text(replace(chat, messages=chat.messages[:turn]), opened=True) if turn else ""
            through = self.text(replace(chat, messages=chat.messages[: turn + 1]))
            kept = whole.startswith(before) and whole.startswith(through)
            yield turn, (len(before), len(through)) if kept else None

    def turn_end(self) -> int | None:
        """Return the token that ends an assistant's turn, such as ``<|im_end|>``, from a made-up conversation.

        None: the template has no special token at the end of a turn, or does not accept the conversation.
        """
        text = self._probe(_PROBE[:2])
        if text is None or _PROBE[1] not in text:
            return None
        close = text[text.rindex(_PROBE[1]) + len(_PROBE[1]) :]
        own = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        own.discard(self.tokenizer.unk_token_id)
        return next((token for token in self._ids(close) if token in own), None)

    def notes(self, masked: bool = True) -> list[str]:
        """Return what a person should know about the template before training with it; no record is read.

        Args:
            masked: whether only the assistant's turns have loss.
        """
        found = []
        if self._changes(_PROBE):
            found.append("The chat template renders an assistant's earlier turns differently from its last one")
            silent = "earlier turns"
        elif self._changes([_PROBE[0], f"<think>\nIt is near.\n</think>\n\n{_PROBE[1]}", *_PROBE[2:]]):
            found.append("The chat template omits the reasoning (<think>) in an assistant's earlier turns")
            silent = "earlier turns with reasoning"
        if found and masked:
            found[0] += f", so {silent} have no loss. To train on every turn, make one record that ends with each turn"
        text = self._probe(_PROBE[:2])
        if text is not None and self.turn_end() is None:
            found.append(
                "The chat template has no special token at the end of an assistant's turn, so generation stops only at "
                "the limit of new tokens. Use a template that ends turns with the end-of-sequence token"
            )
        elif text is not None and masked and self.marks() and not self._learns_end():
            found.append(
                "In the chat template, the token that ends an assistant's turn is outside of {% generation %}, so the "
                "model does not learn to end a turn. Move the token before {% endgeneration %}"
            )
        return found

    def _learns_end(self) -> bool:
        _, labels = _encode(_made_up(_PROBE[:2]), self, "the template", Counter())
        return self.turn_end() in labels

    def _changes(self, texts: Sequence[str]) -> bool:
        """Return whether a first turn has no loss if a second one follows."""
        whole = self._probe(texts)
        if whole is None:
            return False
        try:
            first, last = (span for _, span in self.spans(_made_up(texts), whole, (1, 3)))
        except REFUSALS:
            return False
        return first is None and last is not None

    def _probe(self, texts: Sequence[str]) -> str | None:
        try:
            return self.text(_made_up(texts))
        except REFUSALS:
            return None

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def read_chat(
    messages: Any,
    template: ChatTemplate,
    where: str,
    beside: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Chat:
    """Return the conversation of a record.

    Args:
        messages: in a form of `dpllm.data.messages`.
        template: decides which roles there are.
        where: the record, for messages.
        beside: its columns, of which those of `dpllm.data.messages.BESIDE` are read.
        options: variables of the template for all records; those of the record replace them.

    Raises:
        ConfigError: the template does not use a variable.
        DataError: it is in none of the forms.
    """
    found = read_beside(beside or {}, where)
    chat = with_system(read_messages(messages, where, template.names), found.get(SYSTEM), where)
    weights = [message.pop("weight", None) for message in chat]
    if any(weight not in (None, 0, 1) for weight in weights):
        raise DataError(f"{where}: the weight of a message must be 0 or 1. Correct or remove it")
    own = {**(options or {}), **found.get(OPTIONS, {})}
    template.refuse_unused(own, where, found.get("tools"))
    unweighted = frozenset(position for position, weight in enumerate(weights) if weight == 0)
    return Chat(chat, found.get("tools"), found.get("documents"), own, unweighted)


def encode_chats(
    chats: Sequence[Any],
    tokenizer: PreTrainedTokenizerBase,
    record_numbers: Sequence[int],
    records: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    counts: Counter[str] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return input ids and labels of each chat; labels are -100 except on the assistant's words.

    Args:
        chats: conversations, in a form of `dpllm.data.messages`.
        tokenizer: a fast one with a chat template.
        record_numbers: the chats' record numbers, for error messages.
        records: columns of each record, of which those beside its conversation are read.
        options: variables of the template for all records.
        counts: gets the number of turns `SILENT`, a property of the private text.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that draws random numbers, or is not a fast one.
        DataError: a chat is in none of the forms, the template refuses it, or leaves a part of it out; the message
            names the record.
    """
    template = ChatTemplate(tokenizer)
    template.source()
    if not tokenizer.is_fast:
        raise ConfigError("data.format='chat' needs a fast tokenizer (with tokenizer.json), which this model lacks")
    examples = []
    for messages, number, record in zip(chats, record_numbers, records or [{}] * len(chats), strict=True):
        chat = read_chat(messages, template, f"record {number}", record, options)
        try:
            examples.append(_encode(chat, template, f"record {number}", Counter() if counts is None else counts))
        except (DataError, ConfigError):
            raise
        except REFUSALS as error:
            raise template.refusal(error, chat, f"record {number}") from error
    return examples


def prompt_of_chat(messages: Any, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> str:
    """Return messages as the text that the assistant's next words follow, by the template and date of the training.

    Args:
        messages: in a form of `dpllm.data.messages`.
        tokenizer: with a chat template.
        options: variables of the template.

    Raises:
        ConfigError: there is no template, or it refuses the messages.
        DataError: a message has no role or content.
    """
    template = ChatTemplate(tokenizer)
    chat = read_chat(messages, template, "the prompt", options=options)
    try:
        return template.text(chat, opened=True)
    except ConfigError:
        raise
    except REFUSALS as error:
        raise ConfigError(
            f"the chat template refuses these messages ({' '.join(str(error).split())}): correct their roles or order"
        ) from error


def _encode(chat: Chat, template: ChatTemplate, where: str, counts: Counter[str]) -> tuple[list[int], list[int]]:
    turns = [position for position, message in enumerate(chat.messages) if message["role"] == "assistant"]
    marked = template.marks(chat.tools)
    if turns and not marked:
        chat = replace(chat, messages=chat.messages[: turns[-1] + 1])
    whole = template.text(chat)
    template.refuse_omissions(chat, where, whole)
    encoding: Any = template.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, starts = encoding["input_ids"], [start for start, _ in encoding["offset_mapping"]]
    spans = dict(template.spans(chat, whole, sorted(chat.unweighted) if marked else turns))
    if marked:
        said = [
            bool(one)
            for one in template.apply(chat, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
        ]
    else:
        counts[SILENT] += sum(span is None for turn, span in spans.items() if turn not in chat.unweighted)
        wanted = [span for turn, span in spans.items() if span is not None and turn not in chat.unweighted]
        said = [any(begin <= start < end for begin, end in wanted) for start in starts]
        if turns and not wanted and not chat.unweighted:
            raise DataError(
                f"{where}: the chat template renders no assistant turn as it opens it for generation, so there is "
                f"nothing to learn. Write the opening, such as <think>, into the messages, or set {OPTIONS}"
            )
    left_out = [spans[turn] for turn in chat.unweighted if turn in spans]
    if marked and None in left_out:
        raise DataError(f"{where}: later messages change a turn with weight 0. Remove the weight or the record")
    said = [one and not any(s and s[0] <= at < s[1] for s in left_out) for one, at in zip(said, starts, strict=True)]
    return ids, [token if wanted else IGNORE for token, wanted in zip(ids, said, strict=True)]


def _made_up(texts: Sequence[str]) -> Chat:
    roles = ("user", "assistant") * (len(texts) // 2)
    return Chat([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])


def _remedy(message: Mapping[str, Any]) -> str:
    if message["role"] in (SYSTEM, "developer"):
        return "put its text at the beginning of the user's first message, or choose a model that accepts it"
    if "tool_calls" in message:
        return "put it into a separate message before the tool calls, or remove it from the data"
    return "choose a model whose template renders messages of this role, or move their text to a different message"

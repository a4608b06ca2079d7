"""Make rows from examples in the formats that TRL documents, for supervised fine-tuning and for preference tuning.

An example is a text, a prompt with a completion or with two answers, or a conversation. TRL decides which values are
conversations, and a transformers tokenizer computes the tokens, with the same calls as in TRL. Each example is read
independently: TRL derives the format of all examples from the first one, whereas here an example in a different format
is an error.

**Supervised.** A row is made by the steps of TRL's ``SFTTrainer`` (version 1.16, ``_prepare_dataset``): the
end-of-sequence token is added to texts, chat templates are applied, tokens without loss are masked, and long rows are
truncated. `tests/data/test_supervised.py` compares the rows with those of ``SFTTrainer``. ``SFTTrainer`` drops examples
without a target; here they are an error, because N would depend on them.

**Preferences.** A row is a pair of answers to one prompt, made by the steps of TRL's ``DPOTrainer`` (version 1.16,
``_prepare_dataset`` and its collator). TRL drops examples whose prompt fills the row; here they are an error, because N
would depend on them. `PairCollator` makes the inputs of two model calls per microbatch: one with the chosen answers,
and one with the rejected answers.

Shape suffixes: B pairs, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from datasets.utils import tqdm
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.data.chat import REFUSALS, Chat, ChatTemplate
from dpllm.data.labels import IGNORE
from dpllm.data.lengths import Limits, row_lengths
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
from dpllm.data.records import CHATS, DataError, check_column, keep_notes, note_copies
from dpllm.data.rows import MARKS_OF_UNITS, RowCollator
from dpllm.data.values import own_value

_AT_A_TIME = 256  # rows of a table that is written


def require_trl(purpose: str) -> Any:
    """Import TRL.

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


_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """How an example becomes a row.

    Attributes:
        tokens: tokenizer and chat template.
        text_column: column of texts.
        completion_only: whether only completions have loss. None: only if there is a completion.
        assistant_only: whether only the assistant's words have loss.
        max_length: largest number of tokens in a row. None: no limit.
        keep_end: whether to cut off the beginning of a long row instead of its end.
    """

    tokens: Tokens
    text_column: str = "text"
    completion_only: bool | None = None
    assistant_only: bool = False
    max_length: int | None = None
    keep_end: bool = False

    def rows(self, dataset: Any, words: str = "train_dataset", keep: Sequence[str] = ()) -> datasets.Dataset:
        """Return one row for each example, with the columns ``input_ids`` and ``labels`` and those kept.

        Args:
            dataset: examples with a column of texts, ``prompt`` and ``completion``, ``messages`` or
                ``conversations``; or with ``input_ids``, and ``labels`` or masks of 0 and 1. The text column is read
                only if there is none of the others.
            words: name of the data set, for messages.
            keep: columns that are copied.

        Raises:
            ConfigError: the data set has none of these columns, or an option does not fit its columns.
            DataError: an example's format differs from the first one's, or it has no target; the message gives its
                number.
        """
        refuse_unprepared(dataset, words)
        parts = self._parts(dataset.column_names, words)
        noted = dataset
        if parts is not None and words == "train_dataset":
            texts = [name for name in (*parts, "conversations") if name in dataset.column_names]
            noted = dataset.select_columns([*texts, *(name for name in keep if name in dataset.column_names)])
            note_copies(noted, texts, keep[0] if keep else None)
        if parts is None:  # tokenized rows may be pieces of one record
            keep = [*keep, *(name for name in MARKS_OF_UNITS if name in dataset.column_names and name not in keep)]
        whole = datasets.List(datasets.Value("int32"))
        columns = {"input_ids": whole, "labels": whole}
        rows = store_rows(self._rows(dataset, parts, words), columns, dataset, keep)
        keep_notes(noted, rows, **chats_note(dataset))
        return rows

    def _parts(self, columns: Sequence[str], words: str) -> tuple[str, ...] | None:
        """Return the columns that hold the texts; None for token ids."""
        if "input_ids" in columns:
            parts: tuple[str, ...] | None = None
        elif "prompt" in columns:
            parts = ("prompt", "completion")
        elif "messages" in columns or "conversations" in columns:
            parts = ("messages",)
        else:
            parts = (self.text_column,)
        known = {*columns, *(["messages"] if "conversations" in columns else [])}
        if missing := [name for name in parts or () if name not in known]:
            raise ConfigError(
                f"{words} has the columns {', '.join(columns)} but no '{missing[0]}'. Pass texts in the column "
                f"'{self.text_column}' (dataset_text_field), 'prompt' and 'completion', 'messages', or 'input_ids'"
            )
        if self.completion_only and parts != ("prompt", "completion") and "completion_mask" not in columns:
            raise ConfigError(
                f"completion_only_loss=True needs the columns 'prompt' and 'completion', or token ids with a "
                f"'completion_mask', but {words} has {', '.join(columns)}. Omit completion_only_loss"
            )
        return parts

    def _rows(
        self, dataset: Any, parts: tuple[str, ...] | None, words: str
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        chat: bool | None = None
        without: list[int] = []
        for number, example in read_examples(dataset, words, self.tokens):
            if parts is None:
                row = self._of_tokens(number, example)
            else:
                chat = is_chat(number, example, parts, chat)
                self._refuse_said(number, chat)
                try:
                    row = self._of_texts(example, chat)
                    if chat:
                        self.tokens.refuse_omissions(number, example, [one for name in parts for one in example[name]])
                except (DataError, ConfigError):
                    raise
                except REFUSALS as error:
                    raise self.tokens.refusal(number, example, error) from error
                if self.assistant_only and 1 not in row["assistant_masks"]:
                    raise DataError(
                        f"row {number}: the chat template marks none of the assistant's words, so "
                        f"assistant_only_loss=True leaves no target. Mark them with {{% generation %}}, or {REMEDY}"
                    )
            row = self._cut(_with_labels(row, self._masks(parts)))
            if all(label == IGNORE for label in row["labels"][1:]):
                without.append(number)
            yield row, example
        if without:
            raise DataError(
                f"{words}: {len(without)} row(s) have no target within max_length={self.max_length}, the first is row "
                f"{without[0]}. Allow longer rows, cut beginnings (truncation_mode='keep_end'), or drop these records "
                "before N is counted (TRL drops them silently)"
            )

    def _refuse_said(self, number: int, chat: bool) -> None:
        if self.assistant_only and not chat:
            raise ConfigError(f"assistant_only_loss=True needs conversations, but row {number} holds texts. Omit it")

    def _masks(self, parts: tuple[str, ...] | None) -> list[str]:
        completed = parts is not None and len(parts) > 1 if self.completion_only is None else self.completion_only
        return [name for name in _MASKS if name != "completion_mask" or completed]

    def _of_tokens(self, number: int, example: Mapping[str, Any]) -> dict[str, Any]:
        row = {name: example[name] for name in ("input_ids", "labels", *_MASKS) if example.get(name) is not None}
        if not row.get("input_ids") or any(not isinstance(of, list) or None in of for of in row.values()):
            raise DataError(f"row {number}: {', '.join(row) or 'input_ids'} must be lists of numbers: {REMEDY}")
        lengths = {name: len(of) for name, of in row.items()}
        if len({*lengths.values()}) > 1:
            shown = ", ".join(f"{length} in '{name}'" for name, length in lengths.items())
            raise DataError(f"row {number} has different numbers of tokens: {shown}. Give one label and mask per token")
        return row

    def _of_texts(self, example: dict[str, Any], chat: bool) -> dict[str, Any]:
        """Return ``input_ids``, with a mask for each kind of token that may have no loss."""
        if "prompt" not in example:
            whole: Any = example.get("messages", example.get(self.text_column))
            row = dict(self.tokens.of(example, whole if chat else self._ended(whole), said=self.assistant_only))
            return {name: row[name] for name in ("input_ids", "assistant_masks") if name in row}
        completion = example["completion"] if chat else self._ended(example["completion"])
        prompt = self.tokens.of(example, example["prompt"], opened=True)["input_ids"]
        both = self.tokens.of(example, example["prompt"] + completion, said=self.assistant_only)
        row = {name: both[name] for name in ("input_ids", "assistant_masks") if name in both}
        shared = common_length(prompt, row["input_ids"])
        return {**row, "completion_mask": [0] * shared + [1] * (len(row["input_ids"]) - shared)}

    def _ended(self, text: str) -> str:
        end = self.tokens.tokenizer.eos_token
        return text if text.endswith(end) else text + end

    def _cut(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.max_length is None:
            return row
        here = slice(-self.max_length, None) if self.keep_end else slice(None, self.max_length)
        return {name: values[here] for name, values in row.items()}


def _with_labels(row: Mapping[str, Any], masks: Sequence[str]) -> dict[str, Any]:
    """Return ``input_ids`` and ``labels``: those of the row, or the tokens that no mask leaves out."""
    ids = row["input_ids"]
    labels = row.get("labels")
    if labels is None:
        bits = [row[name] for name in masks if name in row]
        labels = [token if all(of) else IGNORE for token, *of in zip(ids, *bits, strict=True)]
    return {"input_ids": list(ids), "labels": list(labels)}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two sequences have in common.

    A template may render a prompt differently if an answer follows: the answer then begins where the two differ.

    >>> common_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        length += 1
    return length


SIDES = ("chosen", "rejected")
"""The two sequences of a pair."""
REFERENCE = tuple(f"ref_{side}_logps" for side in SIDES)
"""Columns of examples with the log-probabilities of the answers under a reference, as TRL names them."""
PAIR = "pair"
"""Column of a row: its number, by which its reference is looked up."""
LOG_PROBS = "reference_log_probs"
"""Input of a microbatch (B, 2): the reference of its pairs."""


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """How an example becomes a pair of sequences.

    Attributes:
        tokens: tokenizer and chat template.
        max_length: largest number of tokens of a sequence. None: no limit.
        keep_end: whether to cut off the beginning of a long sequence instead of its end.
    """

    tokens: Tokens
    max_length: int | None = None
    keep_end: bool = False

    def rows(
        self, dataset: Any, words: str = "train_dataset", keep: Sequence[str] = (), first: int = 0
    ) -> datasets.Dataset:
        """Return one row for each example, with token ids and labels of both sequences.

        Args:
            dataset: examples with ``chosen`` and ``rejected``, texts or conversations, and ``prompt``; without it the
                prompt is what both have in common.
            words: name of the data set, for messages.
            keep: columns that are copied.
            first: number of the first row.

        Raises:
            ConfigError: the data set is not a set of pairs.
            DataError: an example's format differs from the first one's, or an answer has no target; the message gives
                its number.
        """
        refuse_unprepared(dataset, words)
        if missing := [name for name in SIDES if name not in dataset.column_names]:
            raise ConfigError(
                f"{words} has the columns {', '.join(dataset.column_names)} but no '{missing[0]}'. A pair has 'chosen' "
                "and 'rejected', and 'prompt' if they do not begin with it"
            )
        whole = datasets.List(datasets.Value("int32"))
        columns: dict[str, Any] = {f"{side}_{name}": whole for side in SIDES for name in ("input_ids", "labels")}
        columns[PAIR] = datasets.Value("int64")
        rows = store_rows(self._rows(dataset, words, first), columns, dataset, keep)
        texts = [name for name in ("prompt", *SIDES) if name in dataset.column_names]
        noted = dataset.select_columns([*texts, *(name for name in keep if name in dataset.column_names)])
        if words == "train_dataset":
            note_copies(noted, texts, keep[0] if keep else None)
        keep_notes(noted, rows, **chats_note(dataset))
        return rows

    def _rows(self, dataset: Any, words: str, first: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        trl = require_trl("this data set")
        chat: bool | None = None
        without: list[int] = []
        for number, example in read_examples(dataset, words, self.tokens):
            chat = is_chat(number, example, SIDES, chat)
            try:
                pair = example if "prompt" in dataset.column_names else trl.extract_prompt(example)
                row = self._of(number, pair, chat)
                for side in SIDES if chat else ():
                    self.tokens.refuse_omissions(number, pair, pair["prompt"] + pair[side])
            except (DataError, ConfigError):
                raise
            except REFUSALS as error:
                raise self.tokens.refusal(number, example, error) from error
            if any(all(label == IGNORE for label in row[f"{side}_labels"][1:]) for side in SIDES):
                without.append(number)
            yield {**row, PAIR: first + number}, example
        if without:
            raise DataError(
                f"{words}: in {len(without)} pair(s) no token of an answer fits within max_length={self.max_length}, "
                f"the first is row {without[0]}. Allow longer rows, cut prompts (truncation_mode='keep_end'), or drop "
                "these pairs before N is counted (TRL drops them silently)"
            )

    def _of(self, number: int, pair: Mapping[str, Any], chat: bool) -> dict[str, list[int]]:
        """Return the truncated sequences of a pair, with their common prompt masked."""
        if not isinstance(pair.get("prompt"), list if chat else str):
            shown = "a list of messages" if chat else "a text"
            raise DataError(f"row {number}: 'prompt' must be {shown}, as the answers are")
        opened = self.tokens.of(pair, pair["prompt"], opened=True)["input_ids"] if pair["prompt"] or not chat else []
        answers = [pair[side] if chat else self._ended(pair[side]) for side in SIDES]
        sequences = [self.tokens.of(pair, pair["prompt"] + answer)["input_ids"] for answer in answers]
        shared = min(common_length(opened, ids) for ids in sequences)
        here = slice(None, self.max_length)
        if self.keep_end and self.max_length is not None:
            here = slice(-self.max_length, None)
        row: dict[str, list[int]] = {}
        for side, ids in zip(SIDES, sequences, strict=True):
            row[f"{side}_input_ids"] = list(ids)[here]
            row[f"{side}_labels"] = [*[IGNORE] * shared, *ids[shared:]][here]
        return row

    def _ended(self, text: str) -> str:
        end = self.tokens.tokenizer.eos_token
        return text if text.endswith(end) else text + end


@dataclass
class PairCollator:
    """Collator that pads the chosen and the rejected sequences of pairs.

    Called with B rows of `Preferences`, it returns ``input_ids``, ``attention_mask`` and ``labels`` (B, T) of each
    side, such as ``chosen_input_ids``, and the reference of each pair, (B, 2).

    Attributes:
        pad_token_id: token that fills short sequences.
        reference: (number of pairs, 2) log-probabilities under the reference, by the number of a pair. Before they are
            known, a batch has zeros.
    """

    pad_token_id: int
    reference: np.ndarray = field(default_factory=lambda: np.zeros((0, len(SIDES)), dtype=np.float64))

    SEQUENCES = len(SIDES)
    """Sequences of a row: calls of the model for each microbatch."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate B rows.

        Raises:
            DataError: there is no row, or it has no pair.
        """
        pad = RowCollator(pad_token_id=self.pad_token_id)
        batch: dict[str, Tensor] = {}
        for side in SIDES:
            own = pad([{name: row.get(f"{side}_{name}") for name in ("input_ids", "labels")} for row in rows])
            batch |= {f"{side}_{name}": value for name, value in own.items()}
        numbers = np.asarray([row[PAIR] for row in rows], dtype=np.int64)
        known = len(self.reference) > 0
        found = self.reference[numbers] if known else np.zeros((len(rows), len(SIDES)))
        return {**batch, LOG_PROBS: torch.from_numpy(found)}

    def row_lengths(self, dataset: Any, limits: Limits) -> np.ndarray:
        """Return (num_rows,) the tokens of each row: of both sequences, padded to the longer one.

        Raises:
            DataError: a sequence has no target, or exceeds the limits of the model.
        """
        longest = np.zeros(len(dataset), dtype=np.int32)
        for side in SIDES:
            names = {f"{side}_{name}": name for name in ("input_ids", "labels")}
            try:
                own = row_lengths(dataset.select_columns(list(names)).rename_columns(names), "causal_lm", limits)
            except DataError as error:
                raise DataError(f"the {side} answer: {error}") from error
            longest = np.maximum(longest, own)
        return longest * self.SEQUENCES


_NO_REFERENCE = f"{' and '.join(REFERENCE)} must have one number for each pair; omit both to compute them"


def reference_in(dataset: Any) -> np.ndarray | None:
    """Return (num_rows, 2) log-probabilities under a reference, where examples have them; None if they do not.

    Raises:
        DataError: one of the two columns is missing, or a number is.
    """
    names = [name for name in REFERENCE if name in getattr(dataset, "column_names", ())]
    if not names:
        return None
    if len(names) < len(REFERENCE):
        raise DataError(f"the data set has only the column '{names[0]}': pass {' and '.join(REFERENCE)}, or neither")
    try:
        found = np.stack([np.asarray(dataset[name], dtype=np.float64) for name in REFERENCE], 1)
    except (TypeError, ValueError) as error:
        raise DataError(f"{_NO_REFERENCE}: {' '.join(str(error).split())[:200]}") from error
    if found.ndim != len(SIDES):
        raise DataError(f"{_NO_REFERENCE}: they are lists")
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found).all(1))[0])
        raise DataError(f"row {row} has no finite {' and '.join(REFERENCE)}: omit both columns to compute them")
    return found


def shares_prompts(dataset: Any) -> bool:
    """Return whether more than one in a hundred pairs has the prompt of another pair.

    Args:
        dataset: examples that `Preferences.rows` has accepted; without a column ``prompt``, the prompt of a pair is
            what its answers have in common.
    """
    if "prompt" in dataset.column_names:
        prompts = [repr(prompt) for prompt in dataset["prompt"]]
    else:
        trl = require_trl("this data set")
        pairs = dataset.with_format(None).select_columns(list(SIDES))
        prompts = [repr(trl.extract_prompt(pair)["prompt"]) for pair in pairs]
    return len(prompts) - len(set(prompts)) > len(prompts) / 100

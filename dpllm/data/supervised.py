"""Make rows for supervised fine-tuning from examples in TRL's formats.

Each row is made from one example only, by the steps of TRL's ``SFTTrainer`` (version 1.16, ``_prepare_dataset``): the
end-of-sequence token is added to texts, chat templates are applied, tokens without loss are masked, and long rows are
truncated. `tests/data/test_supervised.py` compares the rows with those of ``SFTTrainer``. ``SFTTrainer`` drops examples
without a target; here they are an error, because N would depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from dpllm.config import ConfigError
from dpllm.data.chat import REFUSALS
from dpllm.data.examples import REMEDY, Tokens, chats_note, is_chat, read_examples, refuse_unprepared, store_rows
from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError, keep_notes, note_copies
from dpllm.data.rows import MARKS_OF_UNITS

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

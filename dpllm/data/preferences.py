"""Make rows for preference tuning from examples in TRL's formats: each row is a pair of answers to one prompt.

Each row is made from one example only, by the steps of TRL's ``DPOTrainer`` (version 1.16, ``_prepare_dataset`` and its
collator). TRL drops examples whose prompt fills the row; here they are an error, because N would depend on them.
`PairCollator` makes the inputs of two model calls per microbatch: one with the chosen answers, and one with the
rejected answers.

Shape suffixes: B pairs, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.data.chat import REFUSALS
from dpllm.data.examples import Tokens, chats_note, is_chat, read_examples, refuse_unprepared, require_trl, store_rows
from dpllm.data.labels import IGNORE
from dpllm.data.lengths import Limits, row_lengths
from dpllm.data.records import DataError, keep_notes, note_copies
from dpllm.data.rows import RowCollator
from dpllm.data.supervised import common_length

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

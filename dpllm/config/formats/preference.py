"""The format "preference": a language model learns which of two answers to a prompt is better."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.chat import BESIDE
from dpllm.config.formats.record_format import Cells, Pair, RecordFormat, column
from dpllm.config.topics import Topic


@dataclass(frozen=True, kw_only=True)
class AnswerColumns(Topic):
    """The columns of two answers to one prompt."""

    chosen_column: str = column("chosen", "the better answer", Cells.ANY, trl="chosen")
    rejected_column: str = column("rejected", "the other answer", Cells.ANY, trl="rejected")


@dataclass(frozen=True, kw_only=True)
class PairPrompt(Topic):
    """The column of the prompt of two answers, if it is apart."""

    prompt_column: str = column("prompt", "the prompt", Cells.ANY, optional=True, trl="prompt")


@dataclass(frozen=True, kw_only=True)
class PreferenceFormat(AnswerColumns, PairPrompt, RecordFormat):
    """Two answers, whose rows `dpllm.data.preferences` makes; without a prompt, both begin with it."""

    name = "preference"
    about = "two answers"
    table = (
        "`chosen_column`, `rejected_column`: texts or lists of `{role, content}`; `prompt_column`, or both begin with "
        "the prompt; needs `train.trainer: dpo`",
        "one loss for each pair",
    )
    holds = Pair
    tasks = ("causal_lm",)
    trainers = ("dpo",)
    asked = False
    beside = BESIDE

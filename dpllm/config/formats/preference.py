"""The format "preference": a language model learns which of two answers to a prompt is better."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.chat import BESIDE
from dpllm.config.formats.record_format import Cells, Pair, RecordFormat, column


@dataclass(frozen=True, kw_only=True)
class PreferenceFormat(RecordFormat):
    """Two answers, whose rows `dpllm.data.examples` makes; without a prompt, both begin with it."""

    prompt: str = column("prompt", "the prompt", Cells.ANY, optional=True, trl="prompt")
    chosen: str = column("chosen", "the better answer", Cells.ANY, trl="chosen")
    rejected: str = column("rejected", "the other answer", Cells.ANY, trl="rejected")

    name = "preference"
    about = "two answers"
    table = (
        "`chosen`, `rejected`: texts or lists of `{role, content}`; `prompt`, or both begin with "
        "the prompt; needs `train.trainer: dpo`",
        "one loss for each pair",
    )
    holds = Pair
    tasks = ("causal_lm",)
    trainers = ("dpo",)
    asked = False
    beside = BESIDE

"""The format "prompt_completion": a language model learns what follows a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import Completion, RecordFormat, column

_PROMPTS = ("prompt", "instruction", "question", "input", "query", "source", "context")
_COMPLETIONS = ("completion", "response", "answer", "output", "target", "reply", "summary")


@dataclass(frozen=True, kw_only=True)
class PromptCompletionFormat(RecordFormat):
    """A prompt and a completion with nothing between them; the completion and the end-of-sequence token have loss."""

    prompt: str = column("prompt", "the part without loss", usual=_PROMPTS, trl="prompt")
    completion: str = column("completion", "the part with loss", usual=_COMPLETIONS, is_answer=True, trl="completion")

    name = "prompt_completion"
    about = "a prompt and its completion"
    table = ("`prompt`, `completion` (joined as they are)", "the completion")
    holds = Completion
    tasks = ("causal_lm", "seq2seq_lm")
    trainers = (None, "sft")
    aliases = ("prompt+completion",)

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return prompt and text in their columns."""
        del gap
        return {self.prompt: prompt, self.completion: text}

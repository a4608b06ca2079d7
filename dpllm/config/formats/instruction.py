"""The format "instruction": a language model learns the output that follows an instruction and an optional input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config.formats.record_format import Cells, Completion, RecordFormat, column

_GAP = "\n\n"
_INPUTS = ("input", "context")  # of Alpaca, of Dolly


@dataclass(frozen=True, kw_only=True)
class InstructionFormat(RecordFormat):
    """Instruction, input where there is one, and output, with an empty line between them, as in Alpaca's records."""

    instruction: str = column("instruction", "the instruction", usual=("instruction",))
    input: str = column("input", "what the instruction is about", Cells.ANY, optional=True, usual=_INPUTS)
    output: str = column("output", "the answer, which has loss", usual=("output", "response"), is_answer=True)

    name = "instruction"
    about = "an instruction, an optional input, and the output"
    table = ("`instruction`, `input` (may be missing or empty), `output`", "the output")
    holds = Completion
    tasks = ("causal_lm", "seq2seq_lm")
    aliases = ("alpaca",)

    def content(self, record: Mapping[str, Any]) -> Completion:
        """Return instruction and input as the prompt, and the output as its completion."""
        parts = [record[self.instruction], str(record.get(self.input) or "")]
        prompt = _GAP.join(part for part in parts if part.strip())
        return Completion(prompt + _GAP, record[self.output])

    def record(self, prompt: str, text: str, gap: str = "") -> dict[str, Any]:
        """Return the prompt as an instruction, and the text as its output."""
        del gap
        return {self.instruction: prompt, self.output: text}

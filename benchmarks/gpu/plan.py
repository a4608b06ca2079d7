"""The plan of both commands: their steps and parts, in order, with the seconds that each part takes on an H100.

This module needs no torch, so that the process that watches the others starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

WHEELS, START = 8, 12
"""Seconds to install the wheels, and to start a process: Python, torch, transformers and the CUDA context."""
MARGIN = 5
"""Seconds that remain for the summary when a command's time is over."""


@dataclass(frozen=True)
class Part:
    """One part of a step: the unit that has a time limit, and that is lost if its process ends.

    Attributes:
        step: the step's short name.
        name: the part's name.
        seconds: the expected duration on an H100.
        function: module and function in this package.
        arguments: further arguments of the function.
        resumes: whether a second process may continue the part after the first one ended in it.
    """

    step: str
    name: str
    seconds: float
    function: str
    arguments: tuple = ()
    resumes: bool = False

    @property
    def limit(self) -> float:
        """Seconds after which the part's process is killed."""
        return 1.5 * self.seconds + 10


@dataclass(frozen=True)
class Command:
    """One visit to the machine.

    Attributes:
        seconds: the most that the whole command may take.
        processes: the parts, by process; a process that ends early does not affect the others.
    """

    seconds: float
    processes: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> list[Part]:
        """All parts in their order."""
        return [part for process in self.processes for part in process]

    @property
    def steps(self) -> list[str]:
        """The steps' names in their order."""
        return list(dict.fromkeys(part.step for part in self.parts))

    @property
    def planned(self) -> float:
        """Seconds in all, with the wheels and the start of each process."""
        return WHEELS + START * len(self.processes) + sum(part.seconds for part in self.parts)


def _row(step: str, name: str, seconds: float, number: int, *methods: str) -> Part:
    """Return a part that measures methods on row ``number`` of the target table (from 1)."""
    return Part(step, name, seconds, "rows:measure", (number, methods), resumes=True)


PLAIN, OURS, TWICE, LAYERS = "non-private", "dpllm", "dpllm-two-passes", "dpllm-per-layer"
OWN, PEERS = (OURS, TWICE, LAYERS), ("opacus", "fastdp")
PROGRAMS = "correctness:programs"  # whether the Triton kernels are trusted
COMPILED = ("non-private-compiled", "dpllm-compiled")
FULL_1B, LORA_8B = "Llama 1B, full, 8×512", "Llama 8B, LoRA r=16, 8×512"

FIRST = Command(
    590,
    (
        (
            Part("device", "versions and rates", 8, "device:rates"),
            Part("correctness", "programs", 10, PROGRAMS),
            Part("correctness", "models", 12, "correctness:models"),
            Part("correctness", "noise words", 2, "correctness:noise_words"),
            _row("headline", FULL_1B, 27, 1, PLAIN, OURS, *PEERS),
            _row("headline", LORA_8B, 36, 4, PLAIN, OURS, *PEERS),
            _row("headline", f"{FULL_1B}, compiled", 25, 1, PLAIN, *COMPILED),
            _row("headline", f"{LORA_8B}, compiled", 30, 4, PLAIN, *COMPILED),
            _row("rows", "Llama 1B, full, 8×1024", 15, 2, PLAIN, OURS),
            _row("rows", "Llama 8B, full, 4×512", 18, 3, PLAIN, OURS),
            _row("rows", f"{LORA_8B}, checkpointing", 22, 5, PLAIN, OURS),
            Part("profile", FULL_1B, 15, "busy:profile", (1,)),
            Part("profile", LORA_8B, 22, "busy:profile", (4,)),
            Part("whole step", FULL_1B, 25, "whole_step:measure", (1,)),
            Part("whole step", LORA_8B, 35, "whole_step:measure", (4,)),
            Part("whole step", "rows alone and together, float32", 10, "whole_step:row_differences", ("float32",)),
            Part("whole step", "rows alone and together, autocast", 10, "whole_step:row_differences", ("autocast",)),
        ),
        (
            _row("memory", f"{FULL_1B}, checkpointing", 12, 6, PLAIN, OURS, LAYERS),
            _row("memory", "Llama 1B, full, 4×2048, checkpointing", 18, 8, PLAIN, OURS, TWICE, LAYERS),
            _row("memory", "Llama 1B, LoRA r=16, 8×512", 9, 11, PLAIN, OURS),
            _row("memory", "Llama 1B, LoRA r=16, 8×512, checkpointing", 10, 12, PLAIN, OURS),
            Part("checks", "memory that runs out", 12, "memory_limits:memory_runs_out"),
            Part("checks", "automatic budget", 15, "memory_limits:automatic_budget"),
            Part("checks", "rounding", 10, "kernel_checks:rounding"),
            Part("checks", "noise", 15, "kernel_checks:noise"),
            Part("checks", "TF32", 5, "kernel_checks:tf32"),
            Part("checks", "packed rows", 5, "kernel_checks:packed"),
            Part("checks", "PyTorch forms", 5, "kernel_checks:without_triton"),
            Part("checks", "kernel table", 30, "kernel_checks:table"),
            Part("checks", "longer rows, other models", 20, "kernel_checks:other_models"),
            Part("checks", "the kernels' tests", 50, "kernel_checks:own_tests"),
        ),
    ),
)

SECOND = Command(
    150,
    (
        (
            Part("real text", "tokens per second", 35, "real_run:speed"),
            Part("real text", "ε = 8, 60 steps", 30, "real_run:private_run"),
            Part("4 bits", "nf4, LoRA", 20, "quantized:nf4"),
        ),
        (
            Part("engines", "FSDP2", 13, "engines:engine", ("fsdp2",)),
            Part("engines", "ZeRO-3", 18, "engines:engine", ("zero3",)),
        ),
    ),
)

COMMANDS = {"first": FIRST, "second": SECOND}

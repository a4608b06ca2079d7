"""Shared parts of the steps: the device, the sizes, the folders and the time left."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import targets
import torch
from throughput import Settings

from gpu.record import TRUSTED, Skipped

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 6
LOST = 3
"""Exit status of a process whose CUDA context refuses to continue."""
TOY: dict[str, Any] = {
    **{"config": None, "hidden": 32, "layers": 2, "vocab": 97, "heads": 2, "batch": 2, "tokens": 8},
    **{"rank": 2, "rounds": 1, "warmup": 1},
}


@dataclass(frozen=True)
class Setting:
    """One part of a run.

    Attributes:
        toy: tiny sizes, on the CPU.
        folder: scratch folder; the figures are elsewhere.
        material: folder with ``stories15M`` and ``e2e``; None where there is none.
        kernels: whether the Triton kernels are `TRUSTED`.
        deadline: time by `time.monotonic` after which the part begins nothing new.
    """

    toy: bool
    folder: Path
    material: Path | None = None
    kernels: str = TRUSTED
    deadline: float = float("inf")

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device("cpu" if self.toy else "cuda")

    def is_over(self) -> bool:
        """Whether the part's time is over."""
        return time.monotonic() > self.deadline

    def row(self, number: int) -> tuple[targets.Target, Settings]:
        """Return a row of the target table (from 1) and its settings; in the toy the same modes on a tiny model."""
        target = targets.TARGETS[number - 1]
        whole = target.settings(target.layers, self.device.type, ROUNDS)
        return target, replace(whole, **TOY) if self.toy else whole

    @property
    def fused(self) -> bool:
        """Whether the Triton kernels are run first."""
        return self.kernels == TRUSTED

    def needs_cuda(self) -> None:
        """End a part that shows nothing elsewhere."""
        if self.toy:
            raise Skipped("no CUDA")

    def needs(self, package: str) -> None:
        """End a part whose package is missing."""
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not installed")


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that its errors belong to the part that caused them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Free all memory without references, and reset the peak."""
    from dpllm.training.out_of_memory import free_memory as give_back

    give_back()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def is_lost(device: torch.device) -> bool:
    """Return whether CUDA refuses to continue, as it does after an error within a kernel."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False

"""Shared parts of the stages: sizes, folders, the device and its description."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from throughput import machine

from gpu.record import Skipped

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "datasets", "numpy", "dp-accounting"),
    *("deepspeed", "bitsandbytes", "opacus", "fastDP"),
)


@dataclass(frozen=True)
class Setting:
    """One run of the script.

    Attributes:
        toy: tiny sizes, on the CPU.
        folder: scratch folder; the results of a run are elsewhere.
        material: the folder that has ``stories15M`` and ``e2e``; None where there is none.
    """

    toy: bool
    folder: Path
    material: Path | None

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device("cpu" if self.toy else "cuda")

    def needs_cuda(self) -> None:
        """End a step that has no sense elsewhere."""
        if self.toy:
            raise Skipped("no CUDA")

    def needs(self, package: str) -> None:
        """End a step that lacks its subject."""
        if importlib.util.find_spec(package) is None:
            raise Skipped(f"{package} is not installed")


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that its errors are those of the step that made them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Free all memory, and reset the peak."""
    from dpllm.training.out_of_memory import free_memory as give_back

    give_back()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def is_lost(device: torch.device) -> bool:
    """Whether CUDA refuses to go on, as it does after an error within a kernel."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def describe(setting: Setting) -> dict[str, Any]:
    """The machine, the versions, and which code ran."""
    versions = {name: _version(name) for name in PACKAGES}
    facts = {**machine(setting.device), "toy": setting.toy, "commit": _commit(), "source": _source(), **versions}
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        facts |= {
            "capability": ".".join(map(str, torch.cuda.get_device_capability(setting.device))),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit as given or from git; `_source` identifies a copy without history."""
    given = os.environ.get("DPLLM_COMMIT")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return given or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _source() -> str:
    """A hash of the package's files."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "dpllm").rglob("*.py")):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]

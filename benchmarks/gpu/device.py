"""Step 0: the machine, the versions, which code runs, and the device's own rates."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from throughput import machine

from gpu.record import Figures
from gpu.setting import ROOT, Setting, free_memory, synchronize

PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "datasets", "numpy", "scipy", "dp-accounting"),
    *("deepspeed", "bitsandbytes", "opacus", "fastDP"),
)
ABSENT = "not installed"


def rates(figures: Figures, setting: Setting) -> None:
    """Measure a bfloat16 matrix product and a copy: what a step can be compared with on this machine."""
    facts = describe(setting)
    figures.say(f"{facts['device']}, Python {facts['python']}, commit {facts['commit']}, source {facts['source']}")
    figures.say(", ".join(f"{name} {facts[name]}" for name in PACKAGES))
    free_memory()
    size, entries = (64, 1 << 16) if setting.toy else (8192, 1 << 30)
    x, y = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _seconds(lambda: x @ y, setting)
    figures["matmul_tflops"] = 2 * size**3 / seconds / 1e12
    source = torch.empty(entries, dtype=torch.int32, device=setting.device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), setting)
    figures["copy_tb_per_s"] = 2 * source.nbytes / seconds / 1e12
    figures.say(f"bf16 {size}³: {figures['matmul_tflops']:.4g} TFLOP/s; copy: {figures['copy_tb_per_s']:.3g} TB/s")


def _seconds(function: Callable[[], object], setting: Setting, times: int = 10) -> float:
    """Return the mean time of a call, after a warm-up."""
    for _ in range(3):
        function()
    synchronize(setting.device)
    begin = time.perf_counter()
    for _ in range(times):
        function()
    synchronize(setting.device)
    return (time.perf_counter() - begin) / times


def describe(setting: Setting) -> dict[str, Any]:
    """Return the machine, the versions, and which code ran."""
    versions = {name: _version(name) for name in PACKAGES}
    facts = {**machine(setting.device), "toy": setting.toy, "commit": _commit(), "source": source(), **versions}
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
        return ABSENT


def _commit() -> str:
    """Return the commit as given or from git; `source` identifies a copy without history."""
    given = os.environ.get("DPLLM_COMMIT")
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return given or subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def source() -> str:
    """Return a hash of the package's files."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "dpllm").rglob("*.py")):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]

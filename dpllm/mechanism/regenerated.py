"""Correlated noise that is stored between steps, or redrawn from its first step, with equal bits.

Banded noise needs the noise of the last b - 1 steps, each a tensor of the gradient's size. If these do not fit, the
noise of a block of entries is *regenerated* in each step: all its independent numbers are drawn again, from the first
step on, and go through the same code. This needs memory for one block only, and time: t draws per entry in step t
instead of one, and about 2 t / b with the geometric strategy (`SingleStep`).

The numbers of a block are a function of a secret key and an address: the parameter's name, this process's slice, the
block and the step. Stored noise is made from the same numbers, block by block, so both give the same noise, bit by bit,
and a run may store only part of it. The key is taken from the operating system at each start and resume. It stays in
this process's memory (`dpllm.mechanism.chacha20`): anyone who has it can subtract all noise of the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.mechanism.correlated import StepOrder
from dpllm.mechanism.generators import ENTRIES_AT_A_TIME, NoiseSource
from dpllm.mechanism.limits import NOISE_MEMORIES
from dpllm.mechanism.noise import slice_of
from dpllm.mechanism.parts import Noise, NoiseStream, Normals, SingleStep

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STORED_SHARE = 1 / 4
"""The share of a device's memory that "auto" fills with noise of earlier steps; the rest is regenerated."""


def stream_of(noise: Noise, source: NoiseSource, num_steps: int, memory: str = "auto") -> NoiseStream:
    """Return the noise of a run, or of a resume, stored or regenerated.

    Args:
        noise: the plan's noise.
        source: this process's source.
        num_steps: T of the plan.
        memory: "stored", "regenerated", or "auto": stored as far as `STORED_SHARE` of the device's memory allows. The
            noise is the same.

    Raises:
        ValueError: the choice is unknown.
    """
    limit = NoiseMemory(memory, noise.tensors_kept)
    if not noise.tensors_kept:
        return noise.stream(source, num_steps)
    return BlockStream(lambda numbers: noise.stream(numbers, num_steps), source, limit)


class NoiseMemory:
    """Decides for each block of entries whether its noise is stored.

    Args:
        choice: "stored", "regenerated" or "auto".
        num_tensors: the number of tensors kept per block.

    Raises:
        ValueError: the choice is unknown.
    """

    def __init__(self, choice: str, num_tensors: int) -> None:
        """Begin with nothing stored."""
        if choice not in NOISE_MEMORIES:
            raise ValueError(f"noise_memory must be one of {', '.join(NOISE_MEMORIES)}, got {choice!r}")
        self._choice, self._num_tensors = choice, num_tensors
        self._bytes: dict[torch.device, int] = {}

    def stores(self, block: Tensor) -> bool:
        """Return whether a block's noise is stored, and if so count its bytes."""
        if self._choice != "auto":
            return self._choice == "stored"
        stored = self._bytes.get(block.device, 0) + self._num_tensors * block.numel() * block.element_size()
        if stored > STORED_SHARE * memory_of(block.device):
            return False
        self._bytes[block.device] = stored
        return True


def memory_of(device: torch.device) -> int:
    """Return a device's memory in bytes; for a CPU, this process's share of its container's limit."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [2**63]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class BlockStream:
    """The noise of a run, made by a separate stream for each block of entries from addressed numbers.

    Args:
        make: returns a new stream that draws from these numbers. Made twice from the same numbers, it must give the
            same noise.
        source: gives the secret key.
        memory: decides which streams are stored.
    """

    def __init__(self, make: Callable[[Normals], NoiseStream], source: NoiseSource, memory: NoiseMemory) -> None:
        """Begin without noise, with a fresh key."""
        self._make, self._numbers, self._memory = make, source.numbers(), memory
        self._stored: dict[tuple[str, int], NoiseStream | None] = {}  # None: regenerated
        self._places: dict[str, tuple[object, ...]] = {}
        self._order = StepOrder()

    def begin(self, step: int) -> None:
        """Begin a step. Skipped steps still draw their noise, since the groups advance with every draw.

        Raises:
            ValueError: the step does not follow the last one, or a parameter received no noise in the previous step, or
                only part of it because of an error.
        """
        self._order.begin(step)

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add the noise of this step to one process's slice of the entries, in place.

        Raises:
            ValueError: the parameter already received its noise of this step; its shape, dtype or processes changed;
                the dtype is neither float32 nor float64; or this process is a fork.
        """
        if self._order.step < 0:
            raise ValueError(f"{name} has no noise before the first step: call begin first")
        self._order.require_first(name)
        share = slice_of(total, rank, size)
        place = (share.numel(), share.dtype, rank, size)
        if self._places.setdefault(name, place) != place:
            raise ValueError(
                f"{name} has {_words(place)}, but had {_words(self._places[name])} in the previous steps, with whose "
                "noise it is correlated. Keep the model's shapes, or start a new run"
            )
        with self._order.adding(name):
            for number, block in enumerate(share.split(ENTRIES_AT_A_TIME)):
                self._add_block_(name, number, (rank, size), block, stddev)

    def _add_block_(self, name: str, number: int, of: tuple[int, int], block: Tensor, stddev: float) -> None:
        where = (name, number)
        stream = self._stored.get(where)
        if stream is None:
            numbers = self._numbers.at(name, *of, number)
            stream = self._make(numbers)
            if where not in self._stored:
                self._stored[where] = stream if self._memory.stores(block) else None
            if self._stored[where] is None and isinstance(stream, SingleStep):
                stream.add_once_(self._order.step, block, stddev, numbers)
                return
            if self._order.step:
                stream.begin(0)
                stream.add_share_(name, block.new_zeros(block.shape), 0.0, 0, 1)
        stream.begin(self._order.step)
        stream.add_share_(name, block, stddev, 0, 1)


def _words(place: tuple[object, ...]) -> str:
    entries, dtype, rank, size = place
    return f"{entries} entries on this process ({dtype}, process {rank} of {size})"

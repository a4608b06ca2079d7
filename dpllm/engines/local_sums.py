"""Whole sums of one process, accumulated over a step's microbatches while memory allows.

Engines that partition gradients (FSDP2, ZeRO-2, ZeRO-3) can reduce the sums of each microbatch and keep only their
parts, or accumulate whole sums and reduce them once per step, with the last microbatch. Whole sums take 4 bytes per
trained entry, and divide the traffic of sums by the number of microbatches. Training without privacy has the same
choice (``no_sync``).

Two rules, the same on every process, decide once per run:

* sums that take at most half the memory of a process's weights (LoRA) are always accumulated;
* other sums are accumulated if every process has enough memory left. The memory is measured when the first microbatch
  of a step has passed through the model, so that its peak counts as used: PyTorch keeps it reserved.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dpllm.engines.processes import Processes
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum

_SHARE = 0.5  # of the memory of a process's weights
_MARGIN = 0.1  # of a device's memory, which stays free for longer rows, fragmentation and evaluations
_LATER = 3 * 4  # bytes per trained entry that a process holds: moments and gradient of the first update


class LocalSums:
    """The sums of whole parameters between a step's microbatches.

    Args:
        model: as its engine has divided it.
        processes: the run's processes.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        """Start without sums."""
        self._model, self._processes = model, processes
        self._fits: bool | None = None
        self._sums: dict[nn.Parameter, Sum] = {}

    def fit(self) -> bool:
        """Return whether sums are kept, the same on every process; the first call is a collective of all of them."""
        if self._fits is None:
            self._fits = sums_are_small(self._model) or sums_fit(self._model, self._processes)
        return self._fits

    def begun(self, parameter: nn.Parameter) -> Sum:
        """Return and release the sum that was kept for a parameter, or begin one of its whole shape."""
        kept = self._sums.pop(parameter, None)
        shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the shape there
        return Sum(shape, accumulation_dtype(parameter.dtype), _device_of(parameter)) if kept is None else kept

    def keep(self, parameter: nn.Parameter, total: Sum) -> None:
        """Keep a parameter's sum until the next microbatch."""
        self._sums[parameter] = total


def sums_are_small(model: nn.Module) -> bool:
    """Return whether sums of all trained parameters take at most half the memory of this process's weights.

    Args:
        model: as its engine has divided it.
    """
    return _bytes_of_sums(model) <= _SHARE * sum(map(_held, model.parameters()))


def sums_fit(model: nn.Module, processes: Processes) -> bool:
    """Return whether every process has enough memory for sums of all trained parameters; a collective of all processes.

    Args:
        model: as its engine has divided it.
        processes: the run's processes.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory = free_memory(_device_of(trained[0]), processes)
    spare = -1.0
    if memory is not None:
        free, total = memory
        updates = sum(_LATER * _held(parameter) / parameter.element_size() for parameter in trained)
        spare = free - _MARGIN * total - _bytes_of_sums(model) - updates
    return min(one for (one,) in processes.gather_numbers([spare])) >= 0


def free_memory(device: torch.device, processes: Processes) -> tuple[float, float] | None:
    """Return a device's free and total bytes; on a CPU, this process's share of the machine's; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type != "cpu":
        return None
    memory, sharing = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", processes.size))
    return memory.available / sharing, memory.total / sharing


def _device_of(parameter: Any) -> torch.device:
    """Return the device on which a parameter's sum is formed, since FSDP2 may offload its shard to the CPU."""
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


def _bytes_of_sums(model: nn.Module) -> int:
    return sum(
        getattr(p, "ds_numel", p.numel()) * accumulation_dtype(p.dtype).itemsize
        for p in model.parameters()
        if p.requires_grad
    )


def _held(parameter: Any) -> int:
    """Return a parameter's bytes in each process, the same number on all of them."""
    shard = getattr(parameter, "ds_tensor", None)  # of ZeRO-3, padded to equal sizes
    if shard is not None:
        return shard.numel() * shard.element_size()
    size = parameter.numel() * parameter.element_size()
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            size //= parameter.device_mesh.size(dim) if placement.is_shard() else 1
    return size

"""Whether a sharded engine keeps whole sums between the microbatches of a step, and reduces them only once.

Place in the flow: read by the engines that divide gradients over the processes (FSDP2, ZeRO-2, ZeRO-3). They reduce
each microbatch's sums, since whole ones would take the memory that sharding is to save. The sums of LoRA factors do
not: they are added up locally, which divides the number of reductions by that of the microbatches.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dpllm.ghost.kernels import accumulation_dtype

_SHARE = 0.5  # of the memory of the weights that a process holds


def sums_are_small(model: nn.Module) -> bool:
    """Return whether sums of all trained parameters take at most half the memory of this process's weights.

    Args:
        model: as its engine has divided it.
    """
    held = sums = 0
    for parameter in model.parameters():
        held += _held(parameter)
        if parameter.requires_grad:
            sums += getattr(parameter, "ds_numel", parameter.numel()) * accumulation_dtype(parameter.dtype).itemsize
    return sums <= _SHARE * held


def _held(parameter: Any) -> int:
    """Return the bytes of a parameter in each process, the same number on all of them."""
    shard = getattr(parameter, "ds_tensor", None)  # of ZeRO-3, padded to one size
    if shard is not None:
        return shard.numel() * shard.element_size()
    size = parameter.numel() * parameter.element_size()
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            size //= parameter.device_mesh.size(dim) if placement.is_shard() else 1
    return size

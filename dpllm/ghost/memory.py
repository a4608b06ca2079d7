"""The memory that a clipper would hold between a backward pass and the clipped sum, and the memory that is free.

Place in the flow: the clipper asks before each backward pass, if it may choose between one pass and two
(`NormMethod.backward_passes`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from dpllm.ghost import kernels

SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
"""What errors say where memory ran out beside PyTorch's own allocator: CUDA's and Triton's launches, cuBLAS, cuDNN, and
the CPU's allocator. They are plain RuntimeErrors."""

_SHARE = 0.8  # of the free memory that may be filled: the backward pass needs some of it too


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that the device, or the host, has no memory left.

    >>> is_shortage(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    True
    >>> is_shortage(RuntimeError("Triton Error [CUDA]: out of memory")), is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGES)


class Passes:
    """Chooses between one backward pass and two, if the user set neither, and when sums are formed.

    Args:
        model: that is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules that hold trained parameters, and those that may recompute their activations."""
        modules = list(model.modules())
        self._trained = [module for module in modules if any(p.requires_grad for p in module.parameters(recurse=False))]
        self._recomputing = [module for module in modules if hasattr(module, "gradient_checkpointing")]

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on, as transformers marks it.

        Without it, autograd holds the activations until the end in any case, and a second pass saves little.
        """
        return any(module.gradient_checkpointing for module in self._recomputing)

    def needed(self, rows: int, tokens: int, device: torch.device) -> int:
        """Return 2 if activations are recomputed and one pass over rows of these tokens would not fit, otherwise 1."""
        free = free_bytes(device) if self.recomputes else None
        return 1 if free is None or held_bytes(self._trained, rows, tokens) <= _SHARE * free else 2

    def sums_are_smaller(self, rows: int, tokens: int, finished: bool) -> bool:
        """Whether the clipped sums take less memory than what they are formed from, for rows of these tokens.

        ``finished``: each sum becomes a gradient in its parameter's dtype at once.
        """
        trained = {id(p): p for module in self._trained for p in module.parameters(recurse=False) if p.requires_grad}
        sums = sum(
            p.numel() * (p.element_size() if finished else kernels.accumulation_dtype(p.dtype).itemsize)
            for p in trained.values()
        )
        return sums < held_bytes(self._trained, rows, tokens)


def held_bytes(modules: Iterable[nn.Module], rows: int, tokens: int) -> int:
    """Return the bytes held for a microbatch of one row per unit: per layer the factors, or the instances if smaller.

    >>> held_bytes([nn.Linear(100, 50, bias=False)], rows=2, tokens=10)
    12000
    """
    total = 0
    for module in modules:
        for parameter in module.parameters(recurse=False):
            instance = parameter.numel() * kernels.accumulation_dtype(parameter.dtype).itemsize
            if parameter.requires_grad and parameter.ndim == 2:
                width = parameter.shape[1] if isinstance(module, nn.Embedding) else sum(parameter.shape)
                total += rows * min(instance, tokens * width * parameter.element_size())
            elif parameter.requires_grad:
                total += rows * instance
    return total


def logits_outweigh(vocabulary: int, width: int, layers: float) -> bool:
    """Whether a token's logits and their gradient take more than what activation checkpointing keeps of its blocks.

    That is the input of each block. A trained head is then computed in chunks (`dpllm.ghost.chunked_head`).

    Args:
        vocabulary: the number of logits.
        width: of the hidden states.
        layers: the number of blocks.

    >>> logits_outweigh(32_000, 2048, 16), logits_outweigh(32_000, 4096, 32)
    (True, False)
    """
    return 2 * vocabulary > layers * width


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a GPU; None on other devices, where it is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

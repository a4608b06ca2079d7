"""Inputs under autocast: layers that read one tensor keep one copy of it in the dtype of their products.

Autocast casts the input of each linear layer by itself. Layers that read the same tensor (query, key and value; gate
and up) share the Gram matrix of their input, and for this they must keep the same tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 2  # the input that several layers read, and one that a layer between them read (the factors of LoRA)


class Casts:
    """The last casts of this call of the model."""

    def __init__(self) -> None:
        """Start without any."""
        self._recent: list[tuple[Tensor, int, Tensor]] = []

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x`` in a dtype, without a graph; the same tensor again until ``x`` changes in place."""
        for known, version, made in self._recent:
            if known is x and version == x._version and made.dtype == dtype:
                return made
        made = x.detach().to(dtype)
        self._recent = [*self._recent[1 - _KEPT :], (x, x._version, made)]
        return made

    def forget(self) -> None:
        """Release the tensors."""
        self._recent = []

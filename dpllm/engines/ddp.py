"""Replicated parameters: one all-reduce of the clipped sums per step, in float32.

DistributedDataParallel's own reducer is not used: it reduces gradients of autograd, and here there are none. The
weights were made equal on all processes when it was built.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dpllm.engines.single import SingleProcess


class DataParallel(SingleProcess):
    """The engine of processes that each hold the whole model.

    Guarantee: every process holds the same total; one of them drew the noise of each entry.
    """

    def _reduce(self, totals: list[Tensor]) -> None:
        """Reduce small tensors together: a LoRA model has hundreds of them."""
        if len(totals) == 1:
            dist.all_reduce(totals[0])
            return
        flat = torch.cat([total.flatten() for total in totals])
        dist.all_reduce(flat)
        for piece, total in zip(flat.split([t.numel() for t in totals]), totals, strict=True):
            total.copy_(piece.view_as(total))

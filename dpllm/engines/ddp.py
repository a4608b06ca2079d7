"""Replicated parameters: one all-reduce of the clipped sums per step, in float32.

DistributedDataParallel's own reducer is not used: it reduces what autograd computes, which here is nothing. Its weights
were made equal on all processes when it was built.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dpllm.engines.single import SingleProcess

_BUCKET_BYTES = 64 * 2**20


class DataParallel(SingleProcess):
    """The engine of processes that each hold the whole model.

    Guarantee: every process holds the same total; each entry's noise was drawn by one of them.
    """

    def _reduce(self, totals: list[Tensor]) -> None:
        """Add up over the processes, small tensors together: a LoRA model has hundreds of them."""
        for bucket in _buckets(totals):
            if len(bucket) == 1:
                dist.all_reduce(bucket[0])
                continue
            flat = bucket[0].new_empty(sum(t.numel() for t in bucket))
            pieces = flat.split([t.numel() for t in bucket])
            for piece, total in zip(pieces, bucket, strict=True):
                piece.copy_(total.flatten())
            dist.all_reduce(flat)
            for piece, total in zip(pieces, bucket, strict=True):
                total.copy_(piece.view_as(total))


def _buckets(totals: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device, together no larger than a bucket unless one alone is."""
    buckets: dict[tuple, list[list[Tensor]]] = {}
    for total in totals:
        kind = buckets.setdefault((total.dtype, total.device), [[]])
        filled = sum(t.nbytes for t in kind[-1])
        if kind[-1] and filled + total.nbytes > _BUCKET_BYTES:
            kind.append([])
        kind[-1].append(total)
    return [bucket for kind in buckets.values() for bucket in kind]

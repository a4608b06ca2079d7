"""Sums of parameters that ZeRO-3 has partitioned: reduced here, and passed to DeepSpeed as its local gradients.

DeepSpeed accepts an autograd gradient only for a parameter whose weights are gathered. Sums need no weights, so this
module reduces them itself, in buckets, and sets each process's partition of the gradient by the interface that
DeepSpeed has for that (``safe_set_local_grad``). No weights are gathered for this.

A partition is a process's part of the flattened parameter: all parts have the same size, and the last ones are padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from dpllm.engines.buckets import aligned, buckets
from dpllm.ghost.kernels import accumulation_dtype


class PartitionedBucket:
    """The layout of parameters whose sums are reduced together: one row per process.

    Args:
        parameters: of one dtype, partitioned over all processes.
        num_parts: the number of processes.
    """

    def __init__(self, parameters: Sequence[Any], num_parts: int) -> None:
        """Lay out the bucket."""
        self.parameters, self._num_parts = parameters, num_parts
        self._sizes = [int(parameter.ds_tensor.ds_numel) for parameter in parameters]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + (size if len(parameters) == 1 else aligned(size)))

    def packed(self, totals: Sequence[Tensor]) -> Tensor:
        """Return whole sums as (number of parts, entries); a single one without a copy, if it has no padding.

        Args:
            totals: the parameters' sums, contiguous.
        """
        first, parts = totals[0], self._num_parts
        if len(totals) == 1 and first.numel() == self._sizes[0] * parts:
            return first.view(parts, -1)
        flat = first.new_zeros(parts, self._starts[-1])
        for total, start, size in zip(totals, self._starts, self._sizes, strict=False):
            for row, part in enumerate(total.flatten().split(size)):
                flat[row, start : start + len(part)] = part
        return flat

    def unpacked(self, own: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each parameter and this process's part of its sum."""
        for parameter, start, size in zip(self.parameters, self._starts, self._sizes, strict=False):
            yield parameter, own[start : start + size]


def partitioned_buckets(parameters: Iterable[nn.Parameter], num_parts: int) -> list[PartitionedBucket]:
    """Return the buckets of a model's trained parameters, the same on every process."""
    groups = buckets(
        parameters,
        kind_of=lambda parameter: (parameter.dtype, parameter.device),
        bytes_of=lambda parameter: parameter.ds_numel * accumulation_dtype(parameter.dtype).itemsize,
    )
    return [PartitionedBucket(group, num_parts) for group in groups]

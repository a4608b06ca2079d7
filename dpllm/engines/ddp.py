"""Replicated parameters: the clipped sums are summed in float32, once per step.

DistributedDataParallel's own reducer is not used: it reduces autograd's gradients, and here there are none. Building it
made the weights equal on all processes.

Each bucket's sums are reduce-scattered in float32. Each process completes its part of the bucket, including noise that
is added to complete sums, and rounds it to the gradient's dtype; the parts are then gathered. So the sums are exact
before the noise is complete, as in a float32 all-reduce, but the second half transfers the gradient's bytes: 6 instead
of 8 bytes per entry in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.engines.base import AddTo, SingleProcess, ToTotal, refuse_foreign_gradients
from dpllm.engines.buckets import Work, aligned, all_gather, buckets, in_turns, overlapped, reduce_scatter
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum


class DataParallel(SingleProcess):
    """The engine of processes that each hold the whole model.

    Guarantee: every process holds the same total, and exactly one process drew the noise of each entry.

    Args:
        optimizer: the optimizer of the run, whose first update is checked.
    """

    def __init__(self, optimizer: Any) -> None:
        """Attach the guard; no gradient is finished before the sums of all processes are added."""
        super().__init__(optimizer)
        self.early = None

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Add one microbatch's sums; after the last, the total over all processes times ``scale`` is in ``.grad``.

        Raises:
            EngineError: autograd wrote a gradient, which would be released unclipped.
        """
        if not last:
            super().collect(parameters, add_to, last=last, scale=scale)
            return
        refuse_foreign_gradients(parameters)
        in_turns(self._work(bucket, add_to, scale, to_total) for bucket in self._buckets(parameters))

    def _buckets(self, parameters: Mapping[str, nn.Parameter]) -> list[list[nn.Parameter]]:
        return buckets(
            parameters.values(),
            kind_of=lambda parameter: (parameter.dtype, parameter.device),
            bytes_of=lambda parameter: parameter.numel() * accumulation_dtype(parameter.dtype).itemsize,
        )

    def _work(self, bucket: list[nn.Parameter], add_to: AddTo, scale: float, to_total: ToTotal | None) -> Work:
        """Reduce a bucket's sums and write its gradients, which share one tensor."""
        totals = [self._formed(parameter, add_to) for parameter in bucket]
        shapes, starts = [total.shape for total in totals], _starts(totals)
        flat = _packed(totals, starts, self.processes.size)
        del totals
        own = flat.new_empty(len(flat) // self.processes.size)
        yield from overlapped(partial(self._reduce, own, flat))
        del flat
        if to_total is not None:
            for parameter, part in self._parts(bucket, shapes, starts, own):
                to_total(parameter, part)
        total = Sum.onto(own)
        total.finish_in(bucket[0].dtype, scale)
        finished = total.finished()
        whole = finished.new_empty(len(finished) * self.processes.size)
        yield from overlapped(partial(all_gather, whole, finished, async_op=True))
        for parameter, shape, start in zip(bucket, shapes, starts, strict=True):
            self._leave(parameter, whole[start : start + shape.numel()].view(shape))

    def _formed(self, parameter: nn.Parameter, add_to: AddTo) -> Tensor:
        """Return this process's sum of one parameter over all microbatches."""
        total = self._sums.pop(parameter, None) or self._begun(parameter)
        add_to(parameter, total)
        return total.filled()

    def _reduce(self, own: Tensor, flat: Tensor) -> Any:
        """Begin to sum a bucket over the processes; this process gets its part."""
        return reduce_scatter(own, flat, async_op=True)

    def _parts(
        self, bucket: list[nn.Parameter], shapes: list[torch.Size], starts: list[int], own: Tensor
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each parameter's entries in this process's part of the bucket, without empty ones."""
        first = self.processes.rank * len(own)
        parts = []
        for parameter, shape, start in zip(bucket, shapes, starts, strict=True):
            part = own[max(start - first, 0) : max(start + shape.numel() - first, 0)]
            if part.numel():
                parts.append((parameter, part))
        return parts


def _starts(totals: list[Tensor]) -> list[int]:
    """Return each sum's position in its bucket."""
    starts = [0]
    for total in totals[:-1]:
        starts.append(starts[-1] + aligned(total.numel()))
    return starts


def _packed(totals: list[Tensor], starts: list[int], size: int) -> Tensor:
    """Return a bucket as a vector that the processes can divide equally; a single sum without a copy, if possible."""
    if len(totals) == 1 and totals[0].numel() % size == 0:
        return totals[0].flatten()
    length = starts[-1] + totals[-1].numel()
    flat = totals[0].new_zeros(-(-length // size) * size)
    for total, start in zip(totals, starts, strict=True):
        flat[start : start + total.numel()] = total.flatten()
    return flat

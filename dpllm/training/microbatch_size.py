"""Search by trial for the largest number of tokens of a microbatch that fits on a GPU.

`dpllm.training.run` calls this module once, before the first step; `dpllm.training.out_of_memory.attempt` runs each
trial.

A trial runs rows of the greatest length through the model, up to their clipped sums, and discards all results. Peak
memory is close to a + b * rows, so two small trials predict the number of rows that fit; the prediction is tried, and
corrected if memory grows differently. Long rows are the most expensive: memory that grows with the square of the length
is largest for them. `dpllm.training.out_of_memory` handles cases that a trial cannot foresee (units whose rows take
several passes, memory that other programs take meanwhile). The trials are not part of the mechanism: only the number of
tokens is kept. Like the division of a logical batch, it has no influence on the release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.engines.guard import innermost
from dpllm.ghost import UnitClipper
from dpllm.ghost.errors import is_shortage
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum
from dpllm.training.microbatches import Microbatch
from dpllm.training.out_of_memory import OutOfMemory, attempt, free_memory

AUTO = "auto"
"""Value that replaces a number of tokens: the number is found by trial."""
TOKENS_WITHOUT_MEASURE = 2048
"""The number of tokens if there is no GPU whose memory could be measured.

A CPU's memory is no usable bound, since the system allocates more than there is, and kills the process when it is
used. The number is therefore chosen for speed. Matrix products gain nothing beyond about a thousand rows, while
activations outgrow the caches: in one feed-forward layer of GPT-2's smallest model in float32, a token has 12 KiB of
them and 2048 tokens have 24 MiB.
"""
MARGIN = 0.9
"""Share of the free memory to use; the rest is for fragmentation, CUDA libraries, and rows that need more."""
_MAX_TRIALS = 12
_MAX_GROWTH = 8  # of a trial over the last that fitted, since small trials predict far larger ones badly
_WORTH_IT = 1.05  # a smaller gain is not worth another trial


class Memory(Protocol):
    """A device whose memory can be measured.

    Attributes:
        capacity: the largest number of bytes that a trial may use at its peak.
    """

    capacity: int

    def reset_peak(self) -> None:
        """Start to measure."""
        ...

    def peak(self) -> int:
        """Return the largest number of bytes in use at any moment since then."""
        ...


class CudaMemory:
    """The memory of one GPU, as PyTorch's allocator counts it.

    Args:
        device: device of the model.
        needed_later: bytes to keep free for tensors that do not exist yet; see `needed_later`.
    """

    def __init__(self, device: torch.device, needed_later: int) -> None:
        """Read the free memory of the device; memory that the allocator holds in reserve counts as free."""
        self._device = device
        free_memory()
        free, _ = torch.cuda.mem_get_info(device)
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        self.capacity = torch.cuda.memory_allocated(device) + int(MARGIN * (free + reserve)) - needed_later

    def reset_peak(self) -> None:
        """See `Memory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """See `Memory`."""
        return torch.cuda.max_memory_allocated(self._device)


def memory_of(device: torch.device, needed_later: int) -> Memory | None:
    """Return the device's memory, None if it cannot be measured."""
    return CudaMemory(device, needed_later) if device.type == "cuda" else None


def needed_later(parameters: Iterable[nn.Parameter], optimizer: Any) -> int:
    """Return the bytes that the first step adds permanently: sums over microbatches, and the optimizer's state.

    Args:
        parameters: the trained parameters.
        optimizer: counted with two values per entry, as for Adam, minus the state that it already has.

    >>> needed_later([nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))], optimizer=None)
    80
    """
    kept = list(parameters)
    sums = sum(p.numel() * accumulation_dtype(p.dtype).itemsize for p in kept)
    inner = innermost(optimizer)
    wide = getattr(inner, "wide_moments", False)  # dpllm.training.corrected_adamw
    state = sum(2 * p.numel() * (accumulation_dtype(p.dtype).itemsize if wide else p.element_size()) for p in kept)
    values = [value for entry in getattr(inner, "state", {}).values() for value in entry.values()]
    return sums + max(0, state - sum(value.nbytes for value in values if isinstance(value, Tensor)))


def largest_that_fits(peak_of: Callable[[int], int | None], capacity: int, most: int) -> int:
    """Return the largest number of rows whose peak stays within the capacity, to within a tenth.

    Args:
        peak_of: maps a number of rows to the peak bytes of a trial, which rise with it; None: memory ran out.
        capacity: the largest number of bytes that a peak may reach.
        most: the largest number of rows, at least 1.

    Returns:
        A number that was tried and fits; 1 if a single row exceeds the capacity but still runs; 0 if memory runs out
        on a single row.

    >>> largest_that_fits(lambda rows: 1000 + 30 * rows, capacity=4000, most=500)
    100
    """
    peak = peak_of(1)
    if peak is None or peak > capacity:
        return 0 if peak is None else 1
    fitting, too_many, exceeded = [(1, peak)], most + 1, False
    for _ in range(_MAX_TRIALS):
        best = fitting[-1][0]
        rows = (best + too_many) // 2 if exceeded else min(_predicted(fitting, capacity), too_many - 1)
        if rows < max(best + 1, _WORTH_IT * best):
            break
        peak = peak_of(rows)
        if peak is None or peak > capacity:
            too_many, exceeded = rows, True
        else:
            fitting.append((rows, peak))
    return fitting[-1][0]


def _predicted(fitting: list[tuple[int, int]], capacity: int) -> int:
    """Return the number of rows that fills the capacity, by the line through the last two trials."""
    last, last_peak = fitting[-1]
    if len(fitting) == 1:
        return last + 1
    before, before_peak = fitting[-2]
    slope = (last_peak - before_peak) / (last - before)
    furthest = _MAX_GROWTH * last
    return min(furthest, last + int((capacity - last_peak) / slope)) if slope > 0 else furthest


def rows_that_fit(
    clipper: UnitClipper,
    loss_of: Callable[[Mapping], Tensor],
    microbatch_of: Callable[[int], Microbatch],
    memory: Memory,
    most: int,
) -> int:
    """Return the number of rows of the greatest length that a microbatch may have; see `largest_that_fits`.

    Guarantee: no gradient, sum or charge is left behind. These are the first passes of the model, so they
    already check that rows are independent and that every use of a parameter is covered.

    Args:
        clipper: attached to the model; it may not store rows of an unfinished unit.
        loss_of: computes one loss per row (B,) from a microbatch's inputs.
        microbatch_of: makes a microbatch of a number of rows.
        memory: memory of the device.
        most: the largest number of rows.
    """

    def peak_of(rows: int) -> int | None:
        microbatch = microbatch_of(rows)
        memory.reset_peak()
        return memory.peak() if _trial(clipper, microbatch, loss_of) else None

    return largest_that_fits(peak_of, memory.capacity, most)


def _trial(clipper: UnitClipper, microbatch: Microbatch, loss_of: Callable[[Mapping], Tensor]) -> bool:
    """Run a microbatch as a step does, compute its clipped sums and drop them; return whether memory sufficed."""
    check_rows = not clipper.rows_checked and len(microbatch.unit_index) > 1
    if isinstance(attempt(clipper, microbatch, loss_of, check_rows), OutOfMemory):
        return False
    fits = False
    try:
        for p in clipper.parameters.values():
            clipper.add_clipped_sum_(p, Sum.of(p))
        fits = True
    except RuntimeError as error:
        if not is_shortage(error):
            raise
    clipper.forget()
    free_memory()
    return fits

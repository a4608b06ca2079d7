"""How many tokens a microbatch may have: the largest budget that fits into the memory of a GPU, found by trial.

Place in the flow: above `dpllm.training.out_of_memory`, whose `attempt` a trial is; `dpllm.training.run` asks once,
before the first step.

A trial runs rows of the greatest length through the model, up to their clipped sums, and drops everything. Peak memory
is close to a + b * rows, so two small trials predict how many rows fit; the prediction is tried, and corrected where
memory grows otherwise. Long rows are the dear ones: what grows with the square of the length is largest for them. What
a trial cannot know (units whose rows take several passes, memory that others take meanwhile) is left to
`dpllm.training.out_of_memory`. The trials are not part of the mechanism: nothing of them is kept but the budget, which,
like the way a logical batch is cut, has no influence on what is released.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.engines.optimizers import innermost
from dpllm.ghost import GhostClipper
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.training.microbatches import Microbatch
from dpllm.training.out_of_memory import OutOfMemory, attempt, free_memory

AUTO = "auto"
"""In place of a number of tokens: find it."""
TOKENS_WITHOUT_MEASURE = 2048
"""The budget where there is no GPU whose memory could be measured.

A CPU's memory is no measure: the system hands out more than there is, and ends the process when it is used. What counts
is speed, and matrix products gain nothing beyond a thousand rows or so, while activations outgrow the caches: a token
has 12 KiB of them in one feed-forward layer of GPT-2's smallest model in float32, 2048 tokens 24 MiB.
"""
MARGIN = 0.9
"""Share of the free memory that is used: the rest is for fragments, CUDA libraries, and rows that need more."""
_MAX_TRIALS = 12
_MAX_GROWTH = 8  # of a trial over the last that fitted: small trials say little about far larger ones
_WORTH_IT = 1.05  # a smaller gain is not worth another trial


class Memory(Protocol):
    """A device whose memory can be measured.

    Attributes:
        capacity: bytes that a trial may take at its peak.
    """

    capacity: int

    def reset_peak(self) -> None:
        """Begin to watch."""
        ...

    def peak(self) -> int:
        """The largest number of bytes that were taken at any moment since then, by whatever was there."""
        ...


class CudaMemory:
    """The memory of one GPU, as PyTorch's allocator counts it.

    Args:
        device: of the model.
        needed_later: bytes that are kept free for what does not exist yet; see `needed_later`.
    """

    def __init__(self, device: torch.device, needed_later: int) -> None:
        """Ask the device what is free; what the allocator holds in reserve is, too."""
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
    """The device's memory, None where it cannot be measured."""
    return CudaMemory(device, needed_later) if device.type == "cuda" else None


def needed_later(parameters: Iterable[nn.Parameter], optimizer: Any) -> int:
    """Bytes that the first step will add and that stay: the sums over microbatches, and the optimizer's state.

    Args:
        parameters: those that are trained.
        optimizer: two values per entry are counted, which is what Adam keeps, less what it already holds.

    >>> needed_later([nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))], optimizer=None)
    80
    """
    kept = list(parameters)
    sums = sum(p.numel() * accumulation_dtype(p.dtype).itemsize for p in kept)
    state = sum(2 * p.numel() * p.element_size() for p in kept)
    values = [value for entry in getattr(innermost(optimizer), "state", {}).values() for value in entry.values()]
    return sums + max(0, state - sum(value.nbytes for value in values if isinstance(value, Tensor)))


def largest_that_fits(peak_of: Callable[[int], int | None], capacity: int, most: int) -> int:
    """The largest number of rows whose peak stays within the capacity, to within a tenth.

    Args:
        peak_of: peak bytes of a trial with so many rows, rising with them; None: memory ran out.
        capacity: bytes that a peak may reach.
        most: rows at most, at least 1.

    Returns:
        A number that was tried and fits; 1 where a single row exceeds the capacity and still runs; 0 where memory runs
        out on it.

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
    """The rows that fill the capacity by the line through the last two trials."""
    last, last_peak = fitting[-1]
    if len(fitting) == 1:
        return last + 1
    before, before_peak = fitting[-2]
    slope = (last_peak - before_peak) / (last - before)
    furthest = _MAX_GROWTH * last
    return min(furthest, last + int((capacity - last_peak) / slope)) if slope > 0 else furthest


def rows_that_fit(
    clipper: GhostClipper,
    loss_of: Callable[[Mapping], Tensor],
    microbatch_of: Callable[[int], Microbatch],
    memory: Memory,
    most: int,
) -> int:
    """How many rows of the greatest length a microbatch may have; see `largest_that_fits`.

    Guarantee: no gradient, no sum and no charge is left behind. That rows are independent, and that every use of a
    parameter is seen, is measured here already, since these are the first passes of the model.

    Args:
        clipper: attached to the model; it may not hold rows of a unit.
        loss_of: a microbatch's inputs to one loss per row (B,).
        microbatch_of: makes one of so many rows.
        memory: of the device.
        most: rows at most.
    """

    def peak_of(rows: int) -> int | None:
        microbatch = microbatch_of(rows)
        memory.reset_peak()
        return memory.peak() if _trial(clipper, microbatch, loss_of) else None

    return largest_that_fits(peak_of, memory.capacity, most)


def _trial(clipper: GhostClipper, microbatch: Microbatch, loss_of: Callable[[Mapping], Tensor]) -> bool:
    """Run a microbatch as a step does, form its clipped sums and drop them; whether memory sufficed."""
    check_rows = not clipper.rows_checked and len(microbatch.unit_index) > 1
    if isinstance(attempt(clipper, microbatch, loss_of, check_rows), OutOfMemory):
        return False
    fits = False
    with contextlib.suppress(torch.OutOfMemoryError):
        for p in clipper.parameters.values():
            clipper.add_clipped_sum_(p, torch.zeros(p.shape, dtype=accumulation_dtype(p.dtype), device=p.device))
        fits = True
    clipper.forget()
    free_memory()
    return fits

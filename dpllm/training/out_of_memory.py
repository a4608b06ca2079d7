"""Retry after running out of memory: the microbatch is run again in parts, and no unit is lost or counted twice.

`dpllm.training.microbatches` cuts by a budget, and `dpllm.training.step` runs the microbatches. The clipper stores all
results of a microbatch until its clipped sum is added to the sum of the step, so an aborted pass leaves nothing behind
once the clipper has dropped it. Clipping is per unit: the division of rows into passes changes the sum only by
rounding.

Once, before the first step, `rows_that_fit` searches on a GPU by trial for the largest microbatch that fits.
A trial runs rows of the greatest length through the model, up to their clipped sums, and discards all results. Peak
memory is close to a + b * rows, so two small trials predict the number of rows that fit; the prediction is tried, and
corrected if memory grows differently. Long rows are the most expensive: memory that grows with the square of the length
is largest for them. Cases that a trial cannot foresee are handled when they occur (units whose rows take
several passes, memory that other programs take meanwhile). The trials are not part of the mechanism: only the number of
tokens is kept. Like the division of a logical batch, it has no influence on the release.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dpllm.data.transfer import pin, send
from dpllm.engines.guard import innermost
from dpllm.ghost import UnitClipper
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.refusals import is_shortage
from dpllm.ghost.sums import Finish, Sum
from dpllm.training.microbatches import PATIENCE, FetchThread, Microbatch

_Result = TypeVar("_Result")


class MicrobatchTooLargeError(RuntimeError):
    """Memory ran out on a microbatch that cannot be divided further, or that one process cannot divide alone."""


@dataclass(frozen=True)
class Passed:
    """The results of a microbatch's pass, in addition to those that the clipper stores.

    Attributes:
        loss_B: (B,) the rows' losses.
        norm_U: (U,) norms of the units that end in it; None if no unit ends in it.
    """

    loss_B: Tensor
    norm_U: Tensor | None


@dataclass(frozen=True)
class OutOfMemory:
    """An aborted pass whose results were dropped.

    Attributes:
        message: the error message of the device.
    """

    message: str


def attempt(
    clipper: UnitClipper,
    microbatch: Microbatch,
    loss_of: Callable[[Mapping], Tensor],
    check_rows: bool,
    finish: Finish | None = None,
) -> Passed | OutOfMemory:
    """Run a microbatch up to its clip factors.

    Guarantee: after `OutOfMemory` the clipper is in its previous state, including the parts of a unit that continues,
    and the memory of the pass is free again.

    Args:
        clipper: attached to the model.
        microbatch: the microbatch to run.
        loss_of: computes one loss per row (B,) from a microbatch's inputs on the device of the trained parameters.
        check_rows: first check that rows are independent.
        finish: see `UnitClipper.clip`; after `OutOfMemory` the caller drops what it made.

    Raises:
        GhostError: the clipper raised it; or memory ran out when the parts of a unit were combined.
    """
    inputs = loss_B = None
    try:
        inputs = send(microbatch.inputs, device_of(clipper))
        if check_rows:
            clipper.check_rows(functools.partial(loss_of, inputs), microbatch.unit_index)
        if not microbatch.continues:
            loss_B, result = clipper.run(loss_of, inputs, microbatch.unit_index, finish)
            return Passed(loss_B, result.norms)
        loss_B = loss_of(inputs)
        clipper.hold(loss_B)
        return Passed(loss_B.detach(), None)
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        message = str(error)
    # Deleting the exception also freed the frames below that held tensors of the pass; these are the others.
    del inputs, loss_B
    clipper.forget()
    free_memory()
    return OutOfMemory(message)


def device_of(clipper: UnitClipper) -> torch.device:
    """Return the device of the first trained parameter, to which the inputs of the model are sent."""
    return next(iter(clipper.parameters.values())).device


def free_memory() -> None:
    """Return to the device all memory without references, including reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Portions:
    """The microbatches of a step in the order in which they are run; one that is too large is run in parts.

    A context manager: with ``ahead``, one thread fetches and collates all of them meanwhile. An error in it is raised
    where the step would have met it without the thread, and no thread is left behind.

    Args:
        batch: the microbatches of this process, at least one. One whose length is unknown is first read completely.
        device: device to which the microbatches are sent.
        divisible: whether this process may run more microbatches than the others. False where the processes run in
            lockstep, since each waits for all at every layer.
        ahead: whether a thread fetches and collates; otherwise `fetch_ahead` does nothing.

    Attributes:
        max_tokens: the largest number of tokens of a microbatch, padding included, after memory ran out. None: it did
            not run out.
        num_divided: how often memory ran out.
    """

    def __init__(self, batch: Iterable[Microbatch], device: torch.device, divisible: bool, ahead: bool = False) -> None:
        """Begin before the first microbatch."""
        sized: Any = batch if isinstance(batch, Sized) else list(batch)
        self._fetches, self._to_come = iter(sized), len(sized)
        self._next: Future[Microbatch] | None = None
        self._thread = FetchThread(device) if ahead else None
        self._device, self._divisible = device, divisible
        self._waiting: deque[Microbatch] = deque()
        self.max_tokens: int | None = None
        self.num_divided = 0

    def __enter__(self) -> Portions:
        """Prepare to fetch when the first portion is taken."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop the result of a fetch that is under way and end the thread: after an error or Ctrl-C in a few seconds.

        A fetch that takes longer runs to its end, and nothing begins after it.
        """
        if self._thread is not None:
            self._thread.close(None if kind is None else PATIENCE if issubclass(kind, Exception) else 0.2 * PATIENCE)

    def fetch_ahead(self) -> None:
        """Let the thread fetch the microbatch after the current one, if there is one that it has not started.

        It does not if that shares random numbers or a model with the pass that runs meanwhile (`FetchThread.shares`).
        """
        if self._thread is not None and not self._thread.shares and self._next is None and self._to_come:
            self._next = self._thread.submit(self._fetched, alone=False)

    def _fetched(self) -> Microbatch:
        self._to_come -= 1
        return self._pinned(next(self._fetches))

    def _run(self, function: Callable[[], _Result]) -> _Result:
        """Run a function that reads or collates rows, wait for it, and return its result."""
        return function() if self._thread is None else self._thread.submit(function, alone=True).result()

    def __iter__(self) -> Iterator[tuple[Microbatch, bool]]:
        """Yield each portion, and whether it is the last of the step (unless it is divided)."""
        while self._to_come or self._next:
            future, self._next = self._next, None
            self._waiting.append(self._run(self._fetched) if future is None else future.result())
            while self._waiting:
                portion = self._waiting.popleft()
                too_large = self.max_tokens is not None and portion.num_tokens > self.max_tokens
                if too_large and (halves := self._halves(portion)):
                    self._put_back(halves)
                else:
                    yield portion, not (self._waiting or self._next or self._to_come)

    def _halves(self, portion: Microbatch) -> tuple[Microbatch, Microbatch] | None:
        halves = self._run(portion.halves)
        return None if halves is None else (self._pinned(halves[0]), self._pinned(halves[1]))

    def _pinned(self, microbatch: Microbatch) -> Microbatch:
        return replace(microbatch, inputs=pin(microbatch.inputs, self._device))

    def divide(self, portion: Microbatch, shortage: OutOfMemory) -> None:
        """Run the last portion again in halves, and yield no later portion that is larger than these.

        Args:
            portion: the portion on which memory ran out; no part of it was collected.
            shortage: the result of `attempt`.

        Raises:
            MicrobatchTooLargeError: the portion cannot be divided; the message has the remedy.
        """
        rows = len(portion.unit_index)
        halves = self._halves(portion) if self._divisible else None
        if halves is None:
            raise MicrobatchTooLargeError(self._advice(portion, rows, shortage))
        self.num_divided += 1
        self.max_tokens = -(-rows // 2) * (portion.num_tokens // rows)
        self._put_back(halves)

    def _put_back(self, halves: tuple[Microbatch, Microbatch]) -> None:
        self._waiting.extendleft(reversed(halves))

    def _advice(self, portion: Microbatch, rows: int, shortage: OutOfMemory) -> str:
        if rows > 1:
            why = (
                "it was not made by dpllm.training.microbatches, so it cannot be divided"
                if self._divisible
                else "all processes pass through each layer together, so one of them cannot divide it by itself"
            )
            return (
                f"Memory ran out on a microbatch of {rows} rows, and {why}. Set a smaller microbatch.tokens (in the "
                "Trainer max_tokens_per_microbatch), or per_device_train_batch_size. The step is charged; resume from "
                f"a checkpoint. Error of the device: {shortage.message}"
            )
        return (
            "Memory ran out on a microbatch of a single row, which cannot be divided. Shorten the rows "
            "(data.max_length), recompute activations (train.gradient_checkpointing=true), train fewer parameters "
            "(LoRA), or shard the model (dpllm train --config fsdp2). The step is charged; resume from a "
            f"checkpoint. Error of the device: {shortage.message}"
        )


# -------------------------------------------------------------------------------------- the size of a microbatch


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

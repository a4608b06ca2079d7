"""Retry after running out of memory: the microbatch is run again in parts, and no unit is lost or counted twice.

Place in the flow: between `dpllm.training.microbatches`, which cuts by a budget, and `dpllm.training.step`, which runs
the microbatches. The clipper holds all results of a microbatch until its clipped sum is added to the sum of the step,
so an aborted pass leaves nothing behind once the clipper has forgotten it. Clipping is per unit: the division of rows
into passes changes the sum only by rounding.
"""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpllm.data.transfer import pin, send
from dpllm.ghost import UnitClipper
from dpllm.ghost.errors import is_shortage
from dpllm.ghost.sums import Finish
from dpllm.training.microbatches import Microbatch
from dpllm.training.prefetch import PATIENCE, FetchThread

_Result = TypeVar("_Result")


class MicrobatchTooLargeError(RuntimeError):
    """Memory ran out on a microbatch that cannot be divided further, or that one process cannot divide by itself."""


@dataclass(frozen=True)
class Passed:
    """The results of a microbatch's pass, besides those that the clipper holds.

    Attributes:
        loss_B: (B,) the rows' losses.
        norm_U: (U,) norms of the units that end in it; None if no unit ends in it.
    """

    loss_B: Tensor
    norm_U: Tensor | None


@dataclass(frozen=True)
class OutOfMemory:
    """An aborted pass whose results were forgotten.

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
        loss_of: a microbatch's inputs, on the device of the trained parameters, to one loss per row (B,).
        check_rows: measure first that rows are independent.
        finish: see `UnitClipper.clip`; the caller drops what it made after `OutOfMemory`.

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
    # The exception was deleted, and with it the frames below that held tensors of the pass; here are the others.
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

    A context: with ``ahead``, one thread fetches and collates all of them while it lasts. An error in it is raised
    where the step would have met it without the thread, and no thread is left behind.

    Args:
        batch: the microbatches of this process, at least one. One whose length is unknown is read as a whole first.
        device: to which the microbatches are sent.
        divisible: whether this process may run more microbatches than the others. False where the processes run in
            lockstep, since each waits for all at every layer.
        ahead: whether a thread fetches and collates; `fetch_ahead` does nothing otherwise.

    Attributes:
        max_tokens: the most tokens of a microbatch, padding included, after memory ran out. None: it did not run out.
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
        """Begin to fetch when the first portion is taken."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop the result of a fetch that is under way and end the thread: after an error or Ctrl-C in a few seconds.

        A fetch that takes longer goes on by itself; nothing begins after it.
        """
        if self._thread is not None:
            self._thread.close(None if kind is None else PATIENCE if issubclass(kind, Exception) else 0.2 * PATIENCE)

    def fetch_ahead(self) -> None:
        """Let the thread fetch the microbatch after the present one, if there is one that it has not begun with.

        Not if it shares random numbers or a model with the pass that runs meanwhile (`FetchThread.shares`).
        """
        if self._thread is not None and not self._thread.shares and self._next is None and self._to_come:
            self._next = self._thread.submit(self._fetched, alone=False)

    def _fetched(self) -> Microbatch:
        self._to_come -= 1
        return self._pinned(next(self._fetches))

    def _run(self, function: Callable[[], _Result]) -> _Result:
        """Return what a function that reads or collates rows returns, and wait for it."""
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
        """Repeat the last portion in halves, and yield no later portion that is larger than these.

        Args:
            portion: the portion on which memory ran out; no part of it was collected.
            shortage: the result of `attempt`.

        Raises:
            MicrobatchTooLargeError: it cannot be divided; the message has the remedy.
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
                f"Memory ran out on a microbatch of {rows} rows, and {why}. Give a smaller microbatch.tokens (in the "
                "Trainer max_tokens_per_microbatch), or per_device_train_batch_size. The step is charged; resume from "
                f"a checkpoint. Error of the device: {shortage.message}"
            )
        return (
            "Memory ran out on a microbatch of a single row, which cannot be divided. Shorten the rows "
            "(data.max_length), recompute activations (train.gradient_checkpointing=true), train fewer parameters "
            "(LoRA), or shard the model (dpllm train --config fsdp2). The step is charged; resume from a "
            f"checkpoint. Error of the device: {shortage.message}"
        )

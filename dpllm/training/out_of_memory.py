"""Going on where memory ran out: the microbatch is taken again in parts, and no unit is lost or counted twice.

Place in the flow: between `dpllm.training.microbatches`, which cuts by a budget, and `dpllm.training.step`, which runs
what was cut. Until the clipped sum of a microbatch is added to that of the step, nothing of it has left the clipper, so
a pass that broke off leaves nothing behind once the clipper has forgotten it. Clipping is per unit: how the rows are
divided over passes changes the sum by rounding alone.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from dpllm.ghost import GhostClipper
from dpllm.training.microbatches import Microbatch

_Item = TypeVar("_Item")


class MicrobatchTooLargeError(RuntimeError):
    """Memory ran out on a microbatch that cannot be divided further, or not by one process alone."""


@dataclass(frozen=True)
class Passed:
    """What the pass of a microbatch gave, beside what the clipper holds of it.

    Attributes:
        loss_B: (B,) the rows' losses.
        norm_U: (U,) norms of the units that end in it; None where none does.
    """

    loss_B: Tensor
    norm_U: Tensor | None


@dataclass(frozen=True)
class OutOfMemory:
    """A pass that broke off, and was forgotten.

    Attributes:
        message: what the device said.
    """

    message: str


def attempt(
    clipper: GhostClipper, microbatch: Microbatch, loss_of: Callable[[Mapping], Tensor], check_rows: bool
) -> Passed | OutOfMemory:
    """Run a microbatch up to its clip factors.

    Guarantee: after `OutOfMemory` the clipper is as before, with what it holds of a unit that continues, and the
    memory of the pass is free again.

    Args:
        clipper: attached to the model.
        microbatch: what to run.
        loss_of: a microbatch's inputs to one loss per row (B,).
        check_rows: measure before that rows are independent.

    Raises:
        GhostError: what the clipper raises; memory ran out when the parts of a unit were brought together.
    """
    try:
        return _pass(clipper, microbatch, loss_of, check_rows)
    except torch.OutOfMemoryError as error:
        message = str(error)
    # Here the exception is gone, and with it the frames that held the tensors of the pass.
    clipper.forget()
    free_memory()
    return OutOfMemory(message)


def _pass(
    clipper: GhostClipper, microbatch: Microbatch, loss_of: Callable[[Mapping], Tensor], check_rows: bool
) -> Passed:
    if check_rows:
        clipper.check_rows(lambda: loss_of(microbatch.inputs), microbatch.unit_index)
    loss_B = loss_of(microbatch.inputs)
    if microbatch.continues:
        clipper.hold(loss_B)
        return Passed(loss_B.detach(), None)
    return Passed(loss_B.detach(), clipper.clip(loss_B, microbatch.unit_index).norms)


def free_memory() -> None:
    """Give back to the device what nobody refers to any more, reference cycles included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Portions:
    """The microbatches of a step as they are run: those that turn out too large in parts, in the same order.

    Args:
        batch: the microbatches of this process, at least one.
        divisible: whether this process may run more microbatches than the others. Not where they run in lockstep,
            since each waits for all at every layer.

    Attributes:
        max_tokens: tokens of a microbatch at most, padding included, since memory ran out; None: it did not.
        num_divided: how often it ran out.
    """

    def __init__(self, batch: Iterable[Microbatch], divisible: bool) -> None:
        """Begin before the first microbatch."""
        self._batch, self._divisible = batch, divisible
        self._waiting: deque[Microbatch] = deque()
        self.max_tokens: int | None = None
        self.num_divided = 0

    def __iter__(self) -> Iterator[tuple[Microbatch, bool]]:
        """Each portion, and whether it is the last of the step unless it is divided."""
        for microbatch, last in _with_last(self._batch):
            self._waiting.append(microbatch)
            while self._waiting:
                portion = self._waiting.popleft()
                too_large = self.max_tokens is not None and portion.num_tokens > self.max_tokens
                if too_large and (halves := portion.halves()):
                    self._put_back(halves)
                else:
                    yield portion, last and not self._waiting

    def divide(self, portion: Microbatch, shortage: OutOfMemory) -> None:
        """Take the portion that was yielded last again, in halves, and all that follow no larger than these.

        Args:
            portion: on which memory ran out, and of which nothing was collected.
            shortage: what `attempt` returned.

        Raises:
            MicrobatchTooLargeError: it cannot be divided; says what to do.
        """
        rows = len(portion.unit_index)
        halves = portion.halves() if self._divisible else None
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
                "it was not made by dpllm.training.microbatches, which knows how to divide it"
                if self._divisible
                else "all processes pass through each layer together, so that one of them cannot divide it alone"
            )
            return (
                f"Memory ran out on a microbatch of {rows} rows, and {why}. Give a smaller microbatch_tokens (in the "
                "Trainer max_tokens_per_microbatch), or per_device_train_batch_size. The step is charged; resume from "
                f"a checkpoint. The device said: {shortage.message}"
            )
        return (
            "Memory ran out on a microbatch of a single row, which cannot be divided. Shorten the rows "
            "(data.max_length), recompute activations (train.gradient_checkpointing=true), train fewer parameters "
            "(LoRA), or shard the model (accelerate_configs/fsdp2.yaml). The step is charged; resume from a "
            f"checkpoint. The device said: {shortage.message}"
        )


def _with_last(items: Iterable[_Item]) -> Iterator[tuple[_Item, bool]]:
    """Each item, and whether it is the last."""
    iterator = iter(items)
    held = next(iterator)
    for following in iterator:
        yield held, False
        held = following
    yield held, True

"""Record the learning rates of a run for each update, and compare them with the schedule at the start.

A step returns the exact mean loss of private rows to its loop (`dpllm.training.step.StepDiagnostics`). A learning rate
that follows it, or an evaluation on private rows, would carry these figures into the weights, which ε does not cover.
So the rates of all updates are computed from the scheduler before the first step, and an update with a different rate
is refused. A loop that names no scheduler has an open point, or a declaration. Schedulers whose ``step`` takes metrics
are refused by type (`dpllm.models.starting_point.refuse_steering`).
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, Protocol

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from dpllm.engines.guard import innermost
from dpllm.training.checks.watch import WatchError

DECLARED = "learning rates and other decisions of the loop"
"""Name of the fact about a loop whose author has declared them independent of the private rows."""
INDEPENDENT = "declared independent of the private rows"
OWN_LOOP = (
    "The training uses a custom loop around the private steps. Its hyperparameters, such as the learning rate, and its "
    "decisions to update, load a checkpoint or stop must not depend on losses, evaluations or other figures of private "
    "rows (as with ReduceLROnPlateau): confirm it. For the next run, "
    "PrivateRun.attach(schedule_is_independent=True) declares it."
)
"""The open point of a run whose loop has not declared it."""
UNKNOWN = (
    "The learning rates of {kind} could not be computed before the training ({error}), so the ledger records them, but "
    "nothing checked them. Confirm that they depend on no loss, evaluation or other figure of private rows."
)
"""The open point of a run with a scheduler that cannot be copied."""
_TOLERANCE = 1e-9  # relative


class Ledger(Protocol):
    """Where the rates are recorded."""

    @property
    def num_steps(self) -> int:
        """Number of steps charged so far."""
        ...

    def note_rate(self, rate: str) -> None:
        """Record the learning rates of the last step's update."""
        ...

    def append_open_point(self, text: str) -> None:
        """Note a reason not to release."""
        ...


class LearningRates:
    """The rates with which an optimizer makes its updates.

    A rate that is a tensor on a device other than the CPU is read only in updates 1, 2, 4, 8, …, since reading it
    waits for the device.

    Args:
        optimizer: as prepared; wrappers are removed.
        ledger: ledger of the run.
    """

    def __init__(self, optimizer: Any, ledger: Ledger) -> None:
        """Begin without a schedule."""
        self._optimizer, self._ledger = innermost(optimizer), ledger
        self._scheduler: Any = None
        self._expected: list[list[float | None]] = []
        self._updates = 0

    def expect(self, scheduler: Any, num_updates: int) -> None:
        """Compute the rates of all future updates; add an open point if that is impossible.

        Args:
            scheduler: scheduler of the optimizer, in its state before the next update; it steps once after each update.
            num_updates: number of future updates.
        """
        self._scheduler, self._updates, self._expected = scheduler, 0, []
        self._refuse_other_base(scheduler)
        try:
            self._expected = scheduled_rates(scheduler, self._optimizer, num_updates)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._ledger.append_open_point(UNKNOWN.format(kind=type(scheduler).__name__, error=words))

    def expect_again(self, num_updates: int) -> None:
        """Recompute the rates of the future updates, after a checkpoint was loaded into the scheduler."""
        if self._scheduler is not None:
            self.expect(self._scheduler, num_updates)

    def _refuse_other_base(self, scheduler: Any) -> None:
        """Check that a schedule starts from the rates with which its optimizer was made.

        Raises:
            WatchError: something changed them, such as a learning-rate finder at the start of the training.
        """
        inside = getattr(scheduler, "scheduler", scheduler)
        given = [group.get("initial_lr") for group in self._optimizer.param_groups]
        base_lrs = inside.base_lrs if isinstance(inside, LambdaLR) else []  # all of transformers' schedules
        for base, initial in zip(base_lrs, given, strict=False):
            if initial is not None and not math.isclose(float(base), float(initial), rel_tol=_TOLERANCE):
                raise WatchError(
                    f"The scheduler starts from the learning rate {float(base):.10g}, but its optimizer was made with "
                    f"{float(initial):.10g}: a callback or the loop changed it, perhaps from figures of private rows "
                    "that ε does not cover. Set the rate in the optimizer (learning_rate)"
                )

    def note(self) -> None:
        """Record the rates of the next update, after comparing them with the schedule.

        Raises:
            WatchError: a rate differs from the schedule.
        """
        number, self._updates = self._updates, self._updates + 1
        reads = self._updates & number == 0
        rates = _rates_of(self._optimizer, reads)
        expected = self._expected[number] if number < len(self._expected) else [None] * len(rates)
        for rate, planned in zip(rates, expected, strict=False):
            if rate is None or planned is None or math.isclose(rate, planned, rel_tol=_TOLERANCE):
                continue
            raise WatchError(
                f"The learning rate of step {self._ledger.num_steps} is {rate:.10g}, but the schedule at the start of "
                f"the training planned {planned:.10g}: a callback or the loop changed it, perhaps from figures of "
                "private rows that ε does not cover, or the scheduler does not step once after each update. Remove "
                "that code, and pass the schedule to the trainer: optimizers=(optimizer, scheduler)"
            )
        if words := ", ".join(dict.fromkeys(f"{rate:.10g}" for rate in rates if rate is not None)):
            self._ledger.note_rate(words)


def scheduled_rates(scheduler: Any, optimizer: Any, num_updates: int) -> list[list[float | None]]:
    """Return the learning rates of each group in all future updates, from a copy of the scheduler.

    Args:
        scheduler: scheduler of the optimizer; accelerate's wrapper, which steps once for each process, is allowed.
        optimizer: the optimizer without wrappers.
        num_updates: number of updates.

    Raises:
        ValueError: the optimizer has relative steps, whose rates are in its state.
        Exception: raised by a scheduler that cannot be copied or needs its own optimizer.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> scheduled_rates(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer, 3)
    [[0.5], [0.25], [0.125]]
    """
    if any(group.get("relative_step") for group in optimizer.param_groups):
        raise ValueError("the optimizer sets its rates from its own state")  # Adafactor, AdafactorSchedule
    times = 1
    if isinstance(scheduler, AcceleratedScheduler):
        if scheduler.step_with_optimizer and not scheduler.split_batches:
            times = AcceleratorState().num_processes
        scheduler = scheduler.scheduler
    stub = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in optimizer.param_groups], lr=0.0)
    for group, own in zip(stub.param_groups, optimizer.param_groups, strict=True):
        group |= {name: copy.deepcopy(value) for name, value in own.items() if name != "params"}
    optimizers = (optimizer, getattr(scheduler, "optimizer", None))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps before the first update
        copied = copy.deepcopy(scheduler, {id(one): stub for one in optimizers if one is not None})
        for group, rate in zip(stub.param_groups, copied.get_last_lr(), strict=True):
            group["lr"] = rate
        for _ in range(num_updates):
            rates.append(_rates_of(stub, reads=True))
            for _ in range(times):
                if getattr(copied, "_step_count", 0) <= getattr(copied, "total_steps", math.inf):
                    copied.step()
    return rates


def _rates_of(optimizer: Any, reads: bool) -> list[float | None]:
    """Return the rate of each group; None: it has none, or it would have to be read from a device."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    unread = [rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu" and not reads) for rate in rates]
    return [None if skipped else float(rate) for rate, skipped in zip(rates, unread, strict=True)]

"""Detection of hyperparameters of an optimizer that change between two updates, in a custom loop.

Place in the flow: on the optimizer, from `dpllm.training.run.PrivateRun.attach` to its end. A step returns to its loop
the exact mean loss of private rows (`dpllm.training.step.StepDiagnostics`). A learning rate that follows the loss
carries it into the weights, and ε does not cover that. A schedule that was fixed before does no harm. The numbers do
not distinguish the two, so people must: a change is an open point of the report, unless a scheduler of PyTorch made it
or it was declared. The schedulers of PyTorch compute their rates from the number of the step, except
``ReduceLROnPlateau``. Most of them multiply the present rate, which may have been changed before. If a single scheduler
sets the rate and has a closed form, the rate must therefore equal that form.

The values are compared on the host, before each update.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dpllm.engines.optimizers import innermost

DECLARED = "hyperparameters that changed between updates, and were declared independent of the private rows"
"""Name of the fact in ledger and report."""
_SCHEDULED = ("lr", "momentum", "betas")
_ROUNDING = 1e-5  # of a rate that was multiplied in each step
_NO_HYPERPARAMETERS = ("params", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum")  # of schedulers


class _Ledger(Protocol):
    def append_fact(self, name: str, value: str | int | float) -> None: ...
    def append_open_point(self, text: str) -> None: ...


class Steering:
    """Watch that notes once each hyperparameter changed by anything but the optimizer or a scheduler of PyTorch.

    Args:
        optimizer: the prepared optimizer; wrappers are removed.
        ledger: ledger of the run.
        is_declared: whether people declared that changes do not depend on private rows; they are then a fact.
        by_engine: whether the engine updates within the private step (DeepSpeed), between `before_update` and
            `after_update`.
    """

    def __init__(self, optimizer: Any, ledger: _Ledger, is_declared: bool = False, by_engine: bool = False) -> None:
        """Store the present values, and hook the optimizer."""
        self._optimizer, self._ledger, self._is_declared = innermost(optimizer), ledger, is_declared
        self._by_engine = by_engine
        self._noted: set[str] = set()
        self._schedulers: list[LRScheduler] = []
        self._handles: list[Any] = []
        if not by_engine:
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: self.before_update()),
                self._optimizer.register_step_post_hook(lambda *_: self.take()),
            ]
        self.take()

    def take(self) -> None:
        """Store the present values for comparison: changes made by the optimizer itself are allowed."""
        self._taken = self._values()

    def before_update(self) -> None:
        """Compare with the values after the last update."""
        now = self._values()
        if now == self._taken:
            return
        for place, (before, after) in enumerate(zip(self._taken, now, strict=False)):
            for name in sorted(before.keys() & after.keys() - self._noted):
                if before[name] != after[name] and not self._is_scheduled(name, place):
                    self._note(name)
        self._taken = now

    def after_update(self) -> None:
        """Store the values after the engine's own update."""
        if self._by_engine:
            self.take()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._schedulers.clear()

    def _values(self) -> list[dict[str, Any]]:
        return [
            {name: _comparable(value) for name, value in group.items() if name not in _NO_HYPERPARAMETERS}
            for group in self._optimizer.param_groups
        ]

    def _is_scheduled(self, name: str, place: int) -> bool:
        """Return whether a scheduler of PyTorch that follows the number of the step has set this group's values."""
        group = self._optimizer.param_groups[place]
        if name not in _SCHEDULED or "initial_lr" not in group:
            return False
        if not self._is_set(group["lr"], place):
            self._schedulers = list(_schedulers_of(self._optimizer))
        return self._is_set(group["lr"], place)

    def _is_set(self, rate: Any, place: int) -> bool:
        followed = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers)
        if followed or not any(_has_set(scheduler, rate, place) for scheduler in self._schedulers):
            return False
        return len(self._schedulers) > 1 or _has_its_form(self._schedulers[0], rate, place)

    def _note(self, name: str) -> None:
        self._noted.add(name)
        if self._is_declared:
            self._ledger.append_fact(DECLARED, name)
            return
        self._ledger.append_open_point(
            f"The hyperparameter {name} of the optimizer was changed between two updates, and by no scheduler of "
            "PyTorch that follows the number of the step only: make sure that it follows neither losses nor anything "
            "else of the private rows, or train with a schedule that is fixed before. For the next run, "
            "PrivateRun.attach(schedule_is_independent=True) declares it."
        )


def _comparable(value: Any) -> Any:
    """Return a value that can be compared without reading the device."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _schedulers_of(optimizer: Any) -> Iterable[LRScheduler]:
    """Return the schedulers of an optimizer, which refer to it while it does not refer to them."""
    for one in gc.get_objects():
        if issubclass(type(one), LRScheduler) and innermost(one.__dict__.get("optimizer")) is optimizer:
            yield one


def _has_its_form(scheduler: Any, rate: Any, place: int) -> bool:
    """Return whether a rate follows from a scheduler and its first rate only, as far as that can be computed."""
    form = getattr(scheduler, "_get_closed_form_lr", None)
    if form is None or isinstance(rate, Tensor) or not type(scheduler).__module__.startswith("torch."):
        return True
    return math.isclose(form()[place], rate, rel_tol=_ROUNDING, abs_tol=_ROUNDING * abs(scheduler.base_lrs[place]))


def _has_set(scheduler: LRScheduler, rate: Any, place: int) -> bool:
    if isinstance(rate, Tensor) or not type(scheduler).__module__.startswith("torch."):
        return True  # a subclass may store its last rates elsewhere
    rates = getattr(scheduler, "_last_lr", ())
    return place < len(rates) and bool(rates[place] == rate)

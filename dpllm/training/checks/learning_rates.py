"""The learning rates of a run, for the ledger, and what a report asks about a loop of one's own.

Place in the flow: on the optimizer, from `dpllm.training.run.PrivateRun.attach` to its end. A step tells its loop the
exact mean loss of private rows (`dpllm.training.step.StepDiagnostics`). A learning rate that follows it, or an
evaluation on private rows, carries these figures into the weights, and ε does not cover that. The numbers do not show
whether a rate followed anything, so people have to say it: a custom loop has one open point, or a declaration. The
Trainer refuses schedules that follow evaluations (`dpllm.models.starting_point.refuse_steering`), and each callback is
an open point there.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from dpllm.engines.optimizers import innermost

LEARNING_RATES = "learning rates of the updates"
"""Name of the fact in ledger and report."""
DECLARED = "learning rates and other decisions of the loop"
"""Name of the fact about a loop whose author has declared them independent of the private rows."""
INDEPENDENT = "declared independent of the private rows"
OWN_LOOP = (
    "The loop around the private steps is one's own. Its learning rate and other hyperparameters, and whether it makes "
    "an update, loads a checkpoint or stops, must follow neither losses nor evaluations nor other figures of private "
    "rows (as with ReduceLROnPlateau): confirm it. For the next run, "
    "PrivateRun.attach(schedule_is_independent=True) declares it."
)
"""The open point of a run whose loop has not declared it."""


class Ledger(Protocol):
    """Where the rates are recorded."""

    @property
    def num_steps(self) -> int:
        """Number of steps charged so far."""
        ...

    def append_fact(self, name: str, value: str | int | float) -> None:
        """Record a fact."""
        ...


class LearningRates:
    """The rates with which an optimizer makes its updates, as facts of the ledger.

    Recorded are the rates in the updates 1, 2, 4, 8, … of a process, and at its end the last, the least and the
    largest of all. A rate that is a tensor is read where it is recorded, which waits for its device.

    Args:
        optimizer: as prepared; wrappers are looked through.
        ledger: of the run.
        by_engine: whether the engine updates within the private step (DeepSpeed), which calls `note`.
    """

    def __init__(self, optimizer: Any, ledger: Ledger, by_engine: bool) -> None:
        """Hook the optimizer."""
        self._optimizer, self._ledger = innermost(optimizer), ledger
        self._last: list[Any] = []
        self._range: tuple[float, float] | None = None
        self._updates = 0
        self._handle = None if by_engine else self._optimizer.register_step_pre_hook(lambda *_: self.note())

    def note(self) -> None:
        """Take the rates of the update that comes next."""
        self._updates += 1
        self._last = [group["lr"] for group in self._optimizer.param_groups if "lr" in group]
        is_due = self._updates & (self._updates - 1) == 0
        known = [float(rate) for rate in self._last if is_due or not isinstance(rate, Tensor)]
        if known:
            least, most = self._range or (known[0], known[0])
            self._range = min(least, *known), max(most, *known)
        if is_due and self._last:
            self._ledger.append_fact(LEARNING_RATES, f"step {self._ledger.num_steps}: {self._words()}")

    def end(self) -> None:
        """Record the last, the least and the largest rates, while the ledger is open."""
        if self._last and self._range is not None:
            least, most = self._range
            text = f"step {self._ledger.num_steps}, the last: {self._words()}; least {least:.6g}, largest {most:.6g}"
            self._ledger.append_fact(LEARNING_RATES, text)

    def remove(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _words(self) -> str:
        return ", ".join(dict.fromkeys(f"{float(rate):.6g}" for rate in self._last))

"""Decisions of a custom loop about updates: an open point of the report where they may follow losses.

Place in the flow: on the optimizer, from `dpllm.training.run.PrivateRun.attach` to its end. A step tells its loop the
exact mean loss of private rows (`dpllm.training.step.StepDiagnostics`). A decision that follows the loss carries it
into the weights, and ε does not cover that. A schedule that was fixed before does no harm. The numbers do not tell one
from the other, so people have to: each of these is an open point of the report, unless it was declared independent of
the private rows.

* A hyperparameter, or the members of a parameter group, changed after the first private step began, and not as the
  schedulers of PyTorch that were there then change it (`dpllm.training.checks.schedules`). ``ReduceLROnPlateau``
  follows results.
* A scheduler was not stepped at one fixed pace.
* A private step was followed by no update or by several; a draw was followed by no private step.
* A checkpoint was loaded, or the run was detached and attached again, after the first private step.

All is compared on the host. A learning rate that is a tensor on a device is read in the steps 1, 2, 4, 8, ….
"""

from __future__ import annotations

from typing import Any, Protocol

from dpllm.engines.optimizers import innermost
from dpllm.training.checks.schedules import MEMBERS, Foreseen

DECLARED = "hyperparameters that changed between updates, and were declared independent of the private rows"
"""Name of the fact in ledger and report."""
DECISIONS = "decisions of the loop about updates, declared independent of the private rows"
"""Likewise, for all that is no hyperparameter."""
_SETTLE = (
    "make sure that this follows neither losses nor anything else of the private rows, or train with a loop that "
    "decides nothing by itself. For the next run, PrivateRun.attach(schedule_is_independent=True) declares it."
)


class _Ledger(Protocol):
    def append_fact(self, name: str, value: str | int | float) -> None: ...
    def append_open_point(self, text: str) -> None: ...


class Steering:
    """Notes each decision of a loop that reaches the weights past the private gradient, once.

    Args:
        optimizer: as prepared; wrappers are looked through.
        ledger: of the run.
        is_declared: whether people declared that decisions follow nothing of the private rows: they are a fact then.
        by_engine: the engine updates within the private step (DeepSpeed): `before_update` and `after_step` say when.
        again: the run was detached after a private step: what happened in between is not known.
    """

    def __init__(
        self,
        optimizer: Any,
        ledger: _Ledger,
        is_declared: bool = False,
        by_engine: bool = False,
        again: bool = False,
    ) -> None:
        """Hook the optimizer."""
        self._optimizer, self._ledger, self._is_declared = innermost(optimizer), ledger, is_declared
        self._by_engine = by_engine
        self._noted: set[str] = set()
        self._foreseen: Foreseen | None = None  # no loss of the run is known before the first private step
        self._steps = self._drawn = 0
        self._updates: int | None = None  # since the last private gradient
        self._depth = 0  # an optimizer's step may call that of its base class, with the same hooks
        self._before: list[dict[str, Any]] = []
        self._handles: list[Any] = []
        if again:
            self._note("a run that was attached again", "The run was detached and attached again after a private step")
        if not by_engine:
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: self._begin_update()),
                self._optimizer.register_step_post_hook(lambda *_: self._end_update()),
            ]

    # ------------------------------------------------------------------ steps

    def before_step(self, drawn: int) -> None:
        """Take the values of now for those to begin with, or look at how the last step was used.

        Args:
            drawn: draws of the run so far, that of this step included.
        """
        if self._foreseen is None:
            self._foreseen = Foreseen(self._optimizer, holds_members=not self._by_engine)
        elif drawn > self._drawn + 1:
            self._note("a draw without a step", "A draw of units was followed by no private step")
        self._settle_updates()
        self._drawn, self._depth = drawn, 0
        self._steps += 1

    def before_update(self) -> None:
        """Compare with what was foreseen, when the private gradient is complete."""
        if self._by_engine and self._foreseen is not None:
            self._look_at_paces(self._foreseen)
            self._before = self._foreseen.values()
        self._compare()

    def after_step(self) -> None:
        """Expect one update by the private gradient, or adopt what the engine's own update changed."""
        if not self._by_engine:
            self._updates = 0
        elif self._foreseen is not None:
            self._foreseen.adopt(self._before)

    def loaded(self) -> None:
        """Take the values of a checkpoint for those to begin with."""
        if self._foreseen is not None:
            self._note("a checkpoint in mid-run", "A checkpoint was loaded after a private step of the same process")
        self._foreseen = self._updates = None

    def end(self, drawn: int, is_last: bool) -> None:
        """Look at the last step, while the ledger is open.

        Args:
            drawn: draws of the run.
            is_last: whether the plan has no further step; an interrupt may leave one draw without a step.
        """
        self._settle_updates()
        if self._foreseen is None:
            return
        if drawn > self._drawn + (not is_last):
            self._note("a draw without a step", "A draw of units was followed by no private step")
        for pace in self._foreseen.paces:
            if drawn == self._steps and not pace.is_kept_to_the_end():
                self._note_pace(type(pace.scheduler).__name__)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._foreseen = None

    # ---------------------------------------------------------------- updates

    def _begin_update(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._foreseen is None:
            return
        if any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"]):
            self._updates = (self._updates or 0) + 1
            if self._updates > 1:
                self._note("several updates after one private step", "A private step was followed by several updates")
        self._look_at_paces(self._foreseen)
        self._compare()
        self._before = self._foreseen.values()

    def _end_update(self) -> None:
        self._depth -= 1
        if self._depth > 0 or self._foreseen is None:
            return
        if type(self._optimizer).__module__.startswith("torch.optim."):  # these change none: a hook of the loop did
            self._compare()
        else:
            self._foreseen.adopt(self._before)

    def _settle_updates(self) -> None:
        if self._updates == 0:
            self._note("private steps without an update", "A private step was followed by no update of the optimizer")
        self._updates = None

    # ------------------------------------------------------------------ notes

    def _compare(self) -> None:
        if self._foreseen is None:
            return
        is_due = self._steps & (self._steps - 1) == 0
        for name in self._foreseen.differing(self._noted, is_due):
            if name == MEMBERS:
                self._note(name, "The parameters in the groups of the optimizer were changed after the first step")
            else:
                self._note_change(name)

    def _look_at_paces(self, foreseen: Foreseen) -> None:
        for pace in foreseen.paces:
            if not pace.is_kept():
                if pace.follows_results:
                    self._note_change("lr")
                else:
                    self._note_pace(type(pace.scheduler).__name__)

    def _note_pace(self, name: str) -> None:
        self._note(f"the pace of {name}", f"The scheduler {name} was not stepped at one fixed pace over the updates")

    def _note(self, decision: str, finding: str) -> None:
        if decision in self._noted:
            return
        self._noted.add(decision)
        if self._is_declared:
            self._ledger.append_fact(DECISIONS, decision if decision != MEMBERS else "the members of parameter groups")
        else:
            self._ledger.append_open_point(f"{finding}: {_SETTLE}")

    def _note_change(self, name: str) -> None:
        if name in self._noted:
            return
        self._noted.add(name)
        if self._is_declared:
            self._ledger.append_fact(DECLARED, name)
            return
        self._ledger.append_open_point(
            f"The hyperparameter {name} of the optimizer was changed between two updates, and by no scheduler of "
            "PyTorch that follows the number of the step only and was there before the first step: make sure that it "
            "follows neither losses nor anything else of the private rows, or train with a schedule that is fixed "
            "before. For the next run, PrivateRun.attach(schedule_is_independent=True) declares it."
        )

"""One ledger for all processes of a run: rank 0 writes it, and no process goes on before a step is on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpllm.accounting import Step
from dpllm.budget import charge, check_entry, settle
from dpllm.ledger import Ledger, LedgerError, read_ledger
from dpllm.plan import PLAN_FILE, PrivacyPlan
from dpllm.processes import Processes


class SharedLedger:
    """A `dpllm.ledger.Ledger` as every process of a run sees it.

    Guarantee: when `append_step` returns on any process, the step is on the disk of rank 0. When it can't be written,
    every process raises the same error, and the step isn't taken.

    Made by `create` or `open`, which all processes call together.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        path: Path,
        num_steps: int,
        processes: Processes,
        budget: tuple[str, str] | None = None,
    ) -> None:
        """Take over what rank 0 opened; use `create` or `open`."""
        self.path, self._ledger, self._num_steps, self._processes = path, ledger, num_steps, processes
        self._budget = budget  # on rank 0: the file and the run's entry in it

    @classmethod
    def create(
        cls,
        path: str | Path,
        plan: PrivacyPlan,
        processes: Processes,
        public: Sequence[str] = (),
        budget_file: str | None = None,
    ) -> SharedLedger:
        """Start the ledger of a new run, with the plan beside it, charged to the data set's budget where there is one.

        Raises:
            LedgerError: the file exists.
            BudgetError: the run would exceed the budget, or the budget is another data set's.
        """

        def start() -> tuple[Ledger, tuple[str, str] | None]:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if budget_file is None:
                ledger, entry = Ledger.create(path, plan, public=public), None
            else:
                if Path(path).exists():  # before anything is charged
                    raise LedgerError(f"{path} is the ledger of an earlier run. Choose an empty output folder")
                entry = charge(budget_file, plan, str(plan.dataset))
                named = {"file": Path(budget_file).name, "entry": entry}
                ledger = Ledger.create(path, plan, public=public, budget=named)
            plan.save(Path(path).parent / PLAN_FILE)
            return ledger, None if entry is None or budget_file is None else (budget_file, entry)

        return cls._made(start, Path(path), processes)

    @classmethod
    def open(
        cls, path: str | Path, plan: PrivacyPlan, processes: Processes, budget_file: str | None = None
    ) -> SharedLedger:
        """Continue the ledger of a run that is resumed; everything in it stays charged.

        Raises:
            LedgerError: it is missing, edited, or of another plan; or the budget file isn't the one that it names.
            BudgetError: what the run gave back when it ended is needed again, and was spent by others.
        """

        def start() -> tuple[Ledger, tuple[str, str] | None]:
            named = read_ledger(path).runs[0].get("budget")
            if (named or {}).get("file") != (None if budget_file is None else Path(budget_file).name):
                raise LedgerError(
                    f"{path} is charged to {named['file'] if named else 'no budget file'}, and privacy.budget_file is "
                    f"{budget_file}: its steps would be counted twice, or not at all. Resume with the first run's file"
                )
            if named is None or budget_file is None:
                return Ledger.open(path, plan), None
            check_entry(budget_file, named["entry"], plan)
            return Ledger.open(path, plan), (budget_file, named["entry"])

        return cls._made(start, Path(path), processes)

    @classmethod
    def _made(
        cls, start: Callable[[], tuple[Ledger, tuple[str, str] | None]], path: Path, processes: Processes
    ) -> SharedLedger:
        opened: list[tuple[Ledger, tuple[str, str] | None]] = []

        def on_main() -> int:
            opened.append(start())
            return opened[0][0].num_steps

        num_steps = processes.from_main(on_main)
        ledger, budget = opened[0] if opened else (None, None)
        return cls(ledger, path, num_steps, processes, budget)

    @property
    def num_steps(self) -> int:
        """Steps charged so far, those of earlier runs included."""
        return self._num_steps

    def append_step(self, step_number: int, step: Step) -> None:
        """Charge a step, on the disk before any process goes on. Called by all processes together.

        Raises:
            LedgerError: the number is not the next one, or the run has ended.
            OSError: it can't be written; on every process.
        """

        def charge() -> None:
            assert self._ledger is not None
            self._ledger.append_step(step_number, step)

        self._processes.from_main(charge)
        self._num_steps += 1

    def append_disclosure(self, what: str, count: int = 1) -> None:
        """As `Ledger.append_disclosure`, on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_disclosure(what, count)

    def append_diagnostic(self, what: str, count: int = 1) -> None:
        """As `Ledger.append_diagnostic`, on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_diagnostic(what, count)

    def append_fact(self, name: str, value: str | int | float) -> None:
        """As `Ledger.append_fact`, on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_fact(name, value)

    def append_open_point(self, text: str) -> None:
        """As `Ledger.append_open_point`, on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_open_point(text)

    def append_end(self, reason: str) -> None:
        """As `Ledger.append_end`, on rank 0; other ranks write nothing. The budget is charged what was taken."""
        if self._ledger is not None:
            self._ledger.append_end(reason)
            if self._budget is not None:
                settle(*self._budget, self._ledger.num_steps)

    def close(self) -> None:
        """Close the file."""
        if self._ledger is not None:
            self._ledger.close()

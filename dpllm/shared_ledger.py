"""One ledger for all processes of a run: rank 0 writes it, and no process goes on before a step is on the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpllm.accounting import Step
from dpllm.ledger import Ledger
from dpllm.plan import PLAN_FILE, PrivacyPlan
from dpllm.processes import Processes


class SharedLedger:
    """A `dpllm.ledger.Ledger` as every process of a run sees it.

    Guarantee: when `append_step` returns on any process, the step is on the disk of rank 0. When it can't be written,
    every process raises the same error, and the step isn't taken.

    Made by `create` or `open`, which all processes call together.
    """

    def __init__(self, ledger: Ledger | None, path: Path, num_steps: int, processes: Processes) -> None:
        """Take over what rank 0 opened; use `create` or `open`."""
        self.path, self._ledger, self._num_steps, self._processes = path, ledger, num_steps, processes

    @classmethod
    def create(
        cls, path: str | Path, plan: PrivacyPlan, processes: Processes, public: Sequence[str] = ()
    ) -> SharedLedger:
        """Start the ledger of a new run, with the plan beside it.

        Raises:
            LedgerError: the file exists.
        """

        def start() -> Ledger:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            ledger = Ledger.create(path, plan, public=public)
            plan.save(Path(path).parent / PLAN_FILE)
            return ledger

        return cls._made(start, Path(path), processes)

    @classmethod
    def open(cls, path: str | Path, plan: PrivacyPlan, processes: Processes) -> SharedLedger:
        """Continue the ledger of a run that is resumed; everything in it stays charged.

        Raises:
            LedgerError: it is missing, edited, or of another plan.
        """
        return cls._made(lambda: Ledger.open(path, plan), Path(path), processes)

    @classmethod
    def _made(cls, start: Callable[[], Ledger], path: Path, processes: Processes) -> SharedLedger:
        opened: list[Ledger] = []

        def on_main() -> int:
            opened.append(start())
            return opened[0].num_steps

        num_steps = processes.from_main(on_main)
        return cls(opened[0] if opened else None, path, num_steps, processes)

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

    def append_end(self, reason: str) -> None:
        """As `Ledger.append_end`, on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_end(reason)

    def close(self) -> None:
        """Close the file."""
        if self._ledger is not None:
            self._ledger.close()

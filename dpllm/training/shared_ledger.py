"""One ledger for all processes of a run: rank 0 writes it, and all processes wait until a step is on the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.config.tasks import Score
from dpllm.engines.processes import Processes
from dpllm.mechanism.events import Event
from dpllm.privacy.budget import BudgetError, charge, check_entry, mark, new_entry_id, read_budget, settle
from dpllm.privacy.ledger import Ledger, LedgerError, read_ledger
from dpllm.privacy.ledger_reader import LedgerHead, count_step, require_prefix
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.private_folder import note_writer
from dpllm.privacy.run_folder import (
    COMPLETED,
    STOPPED_EARLY,
    charging,
    compare_rows,
    make_way,
    note_public_start,
    remember_records,
    remember_rows,
    require_public_start,
)
from dpllm.privacy.stated import planned_steps, stated_starts, steps_allowed, taken_starts
from dpllm.training.step import Threshold

NOT_SETTLED = (
    "The run ended, but its budget {file} could not be settled ({error}), so all its planned steps stay reserved "
    "there. Restore the file, and run `dpllm budget settle` with it and this folder."
)


@dataclass(frozen=True)
class PlannedSteps:
    """The number of steps that a run may take."""

    of_run: int
    """For all starts together: T, or the number that a resume allows."""
    of_plan: int
    """T, the steps of a run without a resume."""


class SharedLedger:
    """A `dpllm.privacy.ledger.Ledger` shared by all processes of a run.

    Guarantee: when `append_step` returns on any process, the step is on the disk of rank 0. When it cannot be written,
    every process raises the same error, and the step is not taken.

    Created by `create` or `open`, which all processes call together.

    Attributes:
        has_run: whether a run in this process was made with this ledger. Where noise is correlated over steps, a second
            one is refused: its draws and noise would begin a new cycle that the ledger does not state.
        unused_frozen: whether a run on this ledger has frozen the parameters that no loss reaches, so the losses'
            reach needs no further check.
    """

    def __init__(
        self,
        ledger: Ledger | None,
        path: Path,
        head: LedgerHead,
        processes: Processes,
        budget: tuple[str, str] | None = None,
        planned: PlannedSteps | None = None,
        history: Sequence[tuple[Event, int]] = (),
        threshold: float | None = None,
    ) -> None:
        """Store the ledger opened by rank 0; use `create` or `open`."""
        self.path, self._ledger, self._head, self._processes = path, ledger, head, processes
        self._budget = budget  # on rank 0: the file and the run's entry in it
        self._planned = planned
        self._before = head.num_steps
        self.has_run = self.unused_frozen = False
        self._history, self._begins = list(history), True  # as in `LedgerContents`, on every process
        self._threshold, self._handed_over = Threshold(threshold), False
        self._stated: tuple[tuple[Event, int], ...] | None = None  # steps whose ε is stated, set when the run ends

    @classmethod
    def create(
        cls,
        path: str | Path,
        plan: PrivacyPlan,
        processes: Processes,
        public: Sequence[str] = (),
        budget_file: str | None = None,
    ) -> SharedLedger:
        """Start the ledger of a new run, with the plan next to it, and charge the data set's budget if there is one.

        The ledger of a run that failed before its first step is replaced (`dpllm.privacy.run_folder`).

        Raises:
            LedgerError: the file exists.
            BudgetError: the run would exceed the budget, or the budget is for another data set.
        """

        def start() -> tuple[Ledger, tuple[str, str] | None]:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            written_out = make_way(path, budget_file)
            if budget_file is None:
                ledger, entry = Ledger.create(path, plan, public=public), None
            else:
                read_budget(budget_file)  # a file that cannot be read is refused before anything is written
                entry = new_entry_id()
                named = {"file": Path(budget_file).name, "entry": entry}
                ledger = Ledger.create(path, plan, public=public, budget=named)  # before anything is charged
                with charging(ledger, budget_file, entry):
                    charge(budget_file, plan, str(plan.dataset), entry)
                with _given_back_on_failure(budget_file, entry):
                    mark(budget_file, entry, ledger.head)
            plan.save(Path(path).parent / PLAN_FILE)
            note_public_start(ledger)
            for what, count in written_out.items():
                ledger.append_disclosure(what, count)
            return ledger, None if entry is None or budget_file is None else (budget_file, entry)

        return cls._made(start, Path(path), processes, plan)

    @classmethod
    def open(
        cls,
        path: str | Path,
        plan: PrivacyPlan,
        processes: Processes,
        budget_file: str | None = None,
        contents: str | None = None,
        public: Sequence[str] = (),
    ) -> SharedLedger:
        """Continue the ledger of a resumed run; all its steps stay charged.

        Args:
            path: path of the ledger.
            plan: the privacy plan; it must be the plan with which the ledger was started.
            processes: all processes of the run.
            budget_file: the budget file to which the run was charged.
            contents: hash of the rows, compared with those of the first start (`dpllm.privacy.run_folder`). None: not
                compared.
            public: earlier training on public data, as stated by this start; lines that the ledger lacks are added.

        Raises:
            LedgerError: the ledger is missing, edited or a copy; it belongs to a different plan, different rows or
                different public weights; the plan next to it is missing or different; or it names another budget file.
            BudgetError: the run needs budget that it returned when it ended and that other runs have spent; or the run
                continued in another copy of the folder.
        """
        points: list[str | None] = []

        def start() -> tuple[Ledger, tuple[str, str] | None]:
            opened, budget = start_over()
            if points and points[0] is not None:
                remember_rows(opened, str(contents), points[0])
            return opened, budget

        def start_over() -> tuple[Ledger, tuple[str, str] | None]:
            named = read_ledger(path).runs[0].get("budget")
            if (named or {}).get("file") != (None if budget_file is None else Path(budget_file).name):
                raise LedgerError(
                    f"{path} is charged to {named['file'] if named else 'no budget file'}, but privacy.budget_file is "
                    f"{budget_file}, so its steps would be counted twice or not at all. Resume with the first file"
                )
            ours = all(run["plan_hash"] == plan.hash for run in read_ledger(path).runs)
            if ours and PrivacyPlan.load(Path(path).parent / PLAN_FILE).hash != plan.hash:
                raise LedgerError(
                    f"{Path(path).parent / PLAN_FILE} is not the plan of this run. Restore the file that the run "
                    "wrote, and resume with the configuration of the first start"
                )
            if ours:
                require_public_start(path)
            if ours and contents is not None:
                points.append(compare_rows(path, contents))
            allowed = steps_allowed(plan, read_ledger(path)) if ours else None
            if named is None or budget_file is None:
                return Ledger.open(path, plan, public, allowed), None
            opened: list[Ledger] = []

            def go_on() -> LedgerHead:
                opened.append(Ledger.open(path, plan, public, allowed))
                return opened[0].head

            check_entry(budget_file, named["entry"], plan, path, go_on, allowed)
            return opened[0], (budget_file, named["entry"])

        return cls._made(start, Path(path), processes, plan)

    @classmethod
    def _made(
        cls,
        start: Callable[[], tuple[Ledger, tuple[str, str] | None]],
        path: Path,
        processes: Processes,
        plan: PrivacyPlan,
    ) -> SharedLedger:
        opened: list[tuple[Ledger, tuple[str, str] | None]] = []

        def on_main() -> tuple[LedgerHead, int, list[tuple[Event, int]], float | None]:
            opened.append(start())
            note_writer(path.parent)
            contents = read_ledger(path)
            threshold = [plan.mechanism.first_threshold, *contents.notes.thresholds][-1]
            return opened[0][0].head, planned_steps(plan, contents), contents.history, threshold

        head, num_steps, history, threshold = processes.from_main(on_main)
        ledger, budget = opened[0] if opened else (None, None)
        planned = PlannedSteps(of_run=num_steps, of_plan=plan.num_steps)
        return cls(ledger, path, head, processes, budget, planned, history, threshold)

    def remember_rows(self, contents: str) -> None:
        """Note the rows of a new run (`dpllm.privacy.run_folder`). Called by all processes together."""

        def remember() -> None:
            assert self._ledger is not None
            remember_rows(self._ledger, contents)

        self._processes.from_main(remember)

    def remember_records(self, contents: str) -> None:
        """Note the records of a new run (`dpllm.privacy.run_folder`). Called by all processes together."""

        def remember() -> None:
            assert self._ledger is not None
            remember_records(self._ledger, contents)

        self._processes.from_main(remember)

    @property
    def num_steps(self) -> int:
        """Number of steps charged so far, including those of earlier runs."""
        return self._head.num_steps

    @property
    def num_steps_before(self) -> int:
        """Number of steps that were charged before this start or resume."""
        return self._before

    @property
    def steps_planned(self) -> int | None:
        """Number of steps of all starts: the plan's, or the number a resume allows; None for a test's stand-in."""
        return None if self._planned is None else self._planned.of_run

    @property
    def history(self) -> tuple[tuple[Event, int], ...]:
        """The charged steps by start; after the end, the steps in the report's ε (`dpllm.privacy.stated`).

        It is the same on every process.
        """
        return tuple(self._history) if self._stated is None else self._stated

    @property
    def head(self) -> LedgerHead:
        """Head of the ledger after the last step, the same on every process; on rank 0 it may have more lines."""
        return self._head

    def require_prefix(self, head: LedgerHead, owner: str) -> None:
        """Check as `dpllm.privacy.ledger_reader.require_prefix` does, with one result on all processes together."""
        self._processes.from_main(lambda: require_prefix(self.path, head, owner))

    def mark(self) -> LedgerHead:
        """Check that the file is intact, write its head into the budget, and return it; on rank 0, at each save.

        Raises:
            LedgerError: the file was replaced, cut, or written by another process.
        """
        assert self._ledger is not None, "rank 0 holds the ledger"
        self._ledger.require_intact()
        if self._budget is not None:
            mark(*self._budget, self._ledger.head)
        return self._ledger.head

    @property
    def threshold(self) -> float | None:
        """The threshold of the next step, where the clipping adapts; otherwise None. Only the run's steps change it."""
        return self._threshold.value

    def hand_over_threshold(self) -> Threshold:
        """Return the threshold, for the one run that changes it; called once, when the run is made.

        Raises:
            LedgerError: another run has it.
        """
        if self._handed_over:
            raise LedgerError(
                f"A run in this process already moves the clip threshold in {self.path}. A threshold that anything "
                "else moves can contain private values. Use that run, or PrivateRun.resume"
            )
        self._handed_over = True
        return self._threshold

    def append_step(self, step_number: int, step: Event) -> None:
        """Charge a step; it is on the disk before any process continues. Called by all processes together.

        Raises:
            LedgerError: the number is not the next one, or the run has ended.
            OSError: the step cannot be written; on every process.
        """

        def charge() -> LedgerHead:
            assert self._ledger is not None
            self._ledger.append_step(step_number, step, self.threshold)
            return self._ledger.head

        self._head = self._processes.from_main(charge)
        count_step(self._history, step, self._begins)
        self._begins = False

    def append_disclosure(self, what: str, count: int = 1) -> None:
        """Call `Ledger.append_disclosure` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_disclosure(what, count)

    def append_diagnostic(self, what: str, count: int = 1) -> None:
        """Call `Ledger.append_diagnostic` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_diagnostic(what, count)

    def append_fact(self, name: str, value: str | int | float) -> None:
        """Call `Ledger.append_fact` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_fact(name, value)

    def append_score(self, score: Score, value: float) -> None:
        """Call `Ledger.append_score` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_score(score, value)

    def note_rate(self, rate: str) -> None:
        """Call `Ledger.note_rate` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.note_rate(rate)

    def write_rate(self) -> None:
        """Call `Ledger.write_rate` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.write_rate()

    def append_open_point(self, text: str) -> None:
        """Call `Ledger.append_open_point` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_open_point(text)

    def append_released(self, folder: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Call `Ledger.append_released` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_released(folder, files)

    def append_pages(self, files: Mapping[str, str]) -> None:
        """Call `Ledger.append_pages` on rank 0; other ranks write nothing."""
        if self._ledger is not None:
            self._ledger.append_pages(files)

    def append_end(self, reason: str, independent: bool = False) -> None:
        """Call `Ledger.append_end` on rank 0; other ranks write nothing. The budget is charged the stated ε.

        A run with fewer steps than planned is never "completed". Its planned steps stay charged to the budget, unless
        its stop was declared independent or it took no step.
        """
        taken = self.num_steps
        planned = self._planned or PlannedSteps(of_run=taken, of_plan=taken)
        early = taken < planned.of_run
        keep = early and taken > 0 and not independent
        if keep or not early:
            self._stated = stated_starts(self._history, planned.of_run, self._begins, planned.of_plan)
        else:
            self._stated = taken_starts(self._history)
        if self._ledger is None:
            return
        if early and reason.startswith(COMPLETED):
            reason = STOPPED_EARLY
        self._ledger.append_end(reason, independent=early and independent)
        if self._budget is not None:
            try:
                settle(*self._budget, taken, self._ledger.head, keep_reserved=keep)
            except (BudgetError, OSError) as error:  # all planned steps stay reserved; the model is kept
                self._ledger.append_open_point(NOT_SETTLED.format(file=self._budget[0], error=error))

    @contextlib.contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """End the ledger when the block raises; this returns the uncharged steps to the budget."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError, ValueError):  # must not hide the first error
                self.append_end("failed")
            raise

    def close(self) -> None:
        """Close the file."""
        if self._ledger is not None:
            self._ledger.close()


@contextlib.contextmanager
def _given_back_on_failure(budget_file: str, entry: str) -> Iterator[None]:
    """Settle an entry without steps when the run cannot begin, since no run will settle it later."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # must not hide the first error
            settle(budget_file, entry, 0)
        raise

"""A query run: from its first charge to its report.

Place in the flow: the methods of private release call it; below it plan, ledger, budget and report. What is charged
cannot be undone: an answer is charged before it is computed, and the budget holds all planned answers before the first.

    with QueryRun.begin("runs/counts", plan, dataset="chats", budget="chats.budget.json") as run:
        run.charge("label counts")                     # on the disk before the answer exists
        noisy = run.randomness.noisy(counts, noise_multiplier, change)
        path.write_text(json.dumps(noisy))
        run.release(path)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dpllm.config import RECIPE_FILE
from dpllm.config.files import write_file
from dpllm.data.units import UnitIndex
from dpllm.methods.queries.randomness import Randomness
from dpllm.privacy import checkpoints
from dpllm.privacy.budget import charge, new_entry_id, read_budget, settle
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.private_folder import PRIVATE_FOLDER, note_writer, private_path
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.run_folder import COMPLETED, STOPPED_EARLY, charging, is_used, make_way
from dpllm.report.model_card import write_release_card
from dpllm.report.release_notes import ReleaseNotes
from dpllm.report.statement import write_report

FAILED = "failed"
"""The reason of an end by an error."""


class QueryRun:
    """A query run that goes on; made by `begin`.

    Guarantee: no answer exists that the ledger does not charge, if the caller computes answers after `charge` only and
    gives no other private values out than those that it notes with `disclose`. Used as a context, it ends when the
    block ends: as completed or stopped early, or after an exception as failed.
    """

    def __init__(
        self,
        folder: Path,
        plan: QueryPlan,
        ledger: Ledger,
        entry: tuple[Path, str] | None,
        notes: ReleaseNotes | None = None,
    ) -> None:
        """Take over the open ledger; use `begin`."""
        self._notes = notes
        self.folder = folder
        self.plan = plan
        self._ledger = ledger
        self._entry = entry
        self._left = {charge.name: charge.count for charge in plan.charges}
        self._released: dict[str, dict[str, Any]] = {}
        self._ended = False

    @classmethod
    def begin(
        cls,
        folder: str | Path,
        plan: QueryPlan,
        *,
        dataset: str | None,
        budget: str | Path | None = None,
        recipe_text: str | None = None,
        notes: ReleaseNotes | None = None,
        results: Sequence[str] = (),
    ) -> QueryRun:
        """Start a run: charge all its planned answers to the budget, and write the plan and the ledger.

        Args:
            folder: of the run; it is made, and must hold no other run.
            plan: the plan.
            dataset: public name of the data set; a budget needs one.
            budget: the budget file of the data set; None: the run is charged to none.
            recipe_text: of the recipe, which is kept in the folder.
            notes: what only people know about the release, for the report.
            results: files and folders that the run will write in its folder.

        Raises:
            ValueError: the plan names another data set, or a result exists, so that it could not be written later.
            LedgerError: the folder holds a run.
            BudgetError: the budget does not allow the run, or is that of other data.
        """
        folder = Path(folder)
        if plan.dataset != dataset:
            raise ValueError(f"the plan is for the data set {plan.dataset!r}, and this run asks about {dataset!r}")
        if budget is not None and dataset is None:
            raise ValueError(f"the budget {budget} is that of a data set with a name: plan the run with its name")
        path = folder / LEDGER_FILE
        if is_used(path) or ((folder / PLAN_FILE).exists() and not path.exists()):
            raise LedgerError(
                f"{folder} holds an earlier run, whose answers stay charged: a second run there would hide them. "
                "Choose an empty output folder"
            )
        for name in results:
            if os.path.lexists(folder / name):
                raise ValueError(
                    f"{folder / name} exists already, and it is not replaced: choose an empty output folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        written_out = make_way(path, None if budget is None else str(budget))
        entry = None if budget is None else (Path(budget), new_entry_id())
        named = None if entry is None else {"file": entry[0].name, "entry": entry[1]}
        if entry is not None:
            read_budget(entry[0])  # a file that cannot be read is refused before anything is written
        ledger = Ledger.create(path, plan, budget=named)
        if entry is not None:
            with charging(ledger, *entry):
                charge(entry[0], plan, str(dataset), entry[1])
        for what, count in written_out.items():
            ledger.append_disclosure(what, count)
        plan.save(folder / PLAN_FILE)
        note_writer(folder)
        if recipe_text is not None:
            write_file(folder / RECIPE_FILE, recipe_text)
        return cls(folder, plan, ledger, entry, notes)

    @property
    def randomness(self) -> Randomness:
        """Random numbers from the operating system."""
        return Randomness(self.plan.randomness)

    @property
    def ledger(self) -> Ledger:
        """The ledger, for lines that charge nothing."""
        return self._ledger

    def charge(self, name: str, count: int = 1) -> None:
        """Charge answers; call it before any of them is computed.

        Guarantee: when the call returns, the charge is on the disk.

        Args:
            name: of a charge of the plan.
            count: how many answers.

        Raises:
            ValueError: the plan has no such charge, or fewer answers left.
            LedgerError: the run has ended, or the ledger was replaced, cut or written by another process.
        """
        planned = self.plan.charge(name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name!r} is charged a whole number of times, at least once, got {count!r}")
        if count > self._left[name]:
            raise ValueError(
                f"{count} more answers {name!r} were asked for, and the plan has {self._left[name]} of {planned.count} "
                "left. End the run here, or plan more answers in a new run"
            )
        self._ledger.append_charge(name, planned.event, count)
        self._left[name] -= count

    def left(self, name: str) -> int:
        """Return how many answers of a charge are left."""
        self.plan.charge(name)
        return self._left[name]

    def disclose(self, what: str, count: int = 1) -> None:
        """Note that something was written out that depends on the private data and that ε does not cover."""
        self._ledger.append_disclosure(what, count)

    def fact(self, name: str, value: str | int | float) -> None:
        """Note a fact of the run for the report; it depends on the private data only in ways that ε covers."""
        self._ledger.append_fact(name, value)

    def open_point(self, text: str) -> None:
        """Note a reason not to release before people have settled it."""
        self._ledger.append_open_point(text)

    def note_units(self, units: UnitIndex) -> None:
        """Note the reasons to doubt that a unit is all that one person gave."""
        for doubt in units.doubts(self.plan.unit_column):
            self.open_point(doubt)

    @property
    def private_folder(self) -> Path:
        """The folder for files that are not for release; it is made, readable by its owner only."""
        return private_path(self.folder, f"{PRIVATE_FOLDER}/any").parent

    def release(self, *files: str | Path) -> None:
        """Note files of the folder that may be published, by size and hash; they must not change afterwards.

        The ledger gets one line with all of them at the end of the run: with a line per call, a folder in which a later
        file was edited would still match the line before.

        Args:
            files: paths inside the run's folder.

        Raises:
            ValueError: a file is not in the folder, is missing, is one that is never for release, or was released.
        """
        names = [self._name(Path(file)) for file in files]
        if known := sorted(set(names) & set(self._released)):
            raise ValueError(f"{known[0]} is released already, as it was then: release the files of an answer once")
        self._released |= checkpoints.seal(self.folder, names)

    def _name(self, file: Path) -> str:
        """Return the name of a file in the folder; refuse one that cannot be released."""
        inside = file if file.is_absolute() else (file if file.exists() else self.folder / file)
        try:
            name = inside.resolve().relative_to(self.folder.resolve()).as_posix()
        except ValueError as error:
            raise ValueError(f"{file} is not in {self.folder}: only files of the run's folder are released") from error
        if not (self.folder / name).is_file() or (self.folder / name).is_symlink():
            raise ValueError(f"{file} is no file of {self.folder}: write it before it is released")
        if name.split("/")[0] == PRIVATE_FOLDER:
            raise ValueError(f"{file} is in {PRIVATE_FOLDER}/, which ε does not cover. Release other files")
        return name

    def finish(self, independent: bool = False) -> None:
        """End the run: settle the budget, and write report and card. A second call does nothing.

        Args:
            independent: declares that the run stopped before its planned answers for a reason that depends neither on
                the private data nor on its answers. Its ε is then that of the charged answers.
        """
        early = any(self._left.values())
        self._end(STOPPED_EARLY if early else COMPLETED, early and independent)

    def _end(self, reason: str, independent: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self._released:
            self._ledger.append_released(self.folder.resolve().name, self._released)
        self._ledger.append_end(reason, independent)
        self._ledger.close()
        contents = read_ledger(self._ledger.path)
        if self._entry is not None:
            keep = not contents.answers_end_independently
            settle(*self._entry, contents.history, contents.head, keep_reserved=keep)
        write_release_card(self.folder, write_report(self.folder, self.plan, contents, self._notes))

    def __enter__(self) -> QueryRun:
        """Return the run itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: after an exception as failed, with all that was charged."""
        if error is None:
            self.finish()
        else:
            self._end(FAILED, independent=False)

"""Runs that did not end: reuse the folder of one that failed before its first step, settle the budget of a crash.

Place in the flow: beside the ledger. A refused model, a full disk or an option that only an engine can check may end a
run between the opening of its ledger and the first charge. No step has then released anything private, so a new run may
replace such a ledger, and its reservation returns to the budget. A ledger with a step, one that cannot be read, or a
copy of a ledger (whose original may have steps by now) is never touched. A run that crashed after a step is settled by
a person (`dpllm budget settle`); one that ends normally settles itself (`dpllm.training.shared_ledger`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dpllm.mechanism.several import Several
from dpllm.privacy.budget import BudgetError, entry_of, read_budget, require_own_ledger, settle
from dpllm.privacy.budget_entry import Entry
from dpllm.privacy.chained_file import is_at, lock
from dpllm.privacy.ledger import (
    LEDGER_FILE,
    REPORT_FILE,
    Ledger,
    LedgerContents,
    LedgerError,
    is_being_written,
    read_ledger,
    require_own_file,
)
from dpllm.privacy.writer import known_writer


def is_used(path: str | Path) -> bool:
    """Return whether there is a ledger file that a new run must not replace.

    Args:
        path: the ledger of a run's folder; it need not exist.
    """
    return Path(path).exists() and _unused(Path(path)) is None


def make_way(path: str | Path, budget_file: str | None) -> dict[str, int]:
    """Remove the ledger and the report of a run that took no step, and settle its reservation. On rank 0.

    Args:
        path: path of the ledger; if there is none, or it is used, nothing happens.
        budget_file: budget file of the new run. If the unused ledger names another file, that file is not changed.

    Returns:
        The disclosures of the unused run, and how often each was made; the new ledger has to note them again.

    Raises:
        BudgetError: the budget file cannot be read or written, or counts steps that the ledger has lost.
    """
    path = Path(path)
    if not path.exists() or _unused(path) is None:
        return {}
    with _locked(path) as held:  # two new runs do not both take it for unused, and one does not remove the other's
        contents = read_ledger(path) if held else None
        if contents is None or contents.num_steps or contents.torn_lines:
            return {}
        named = contents.runs[0].get("budget") if contents.runs else None
        if named and budget_file is not None and named["file"] == Path(budget_file).name:
            entry = _own_entry(budget_file, path, contents)
            if entry is not None:
                settle(budget_file, entry.id, 0)
        path.with_name(REPORT_FILE).unlink(missing_ok=True)  # it would be taken for the new run's
        path.unlink()
    return dict(contents.disclosures)


@contextlib.contextmanager
def charging(ledger: Ledger, budget_file: str | Path, entry: str) -> Iterator[None]:
    """Charge a budget within this block, for a ledger that was just made and names the entry.

    The ledger comes first: if the run is killed before it charges or right after, the ledger says whose the entry is,
    and that no step was taken; `make_way` and `dpllm budget settle` then give the entry back. If the block fails, an
    entry that it made is given back, and the ledger is removed.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # must not hide the first error
            if any(one.id == entry for one in read_budget(budget_file).entries):
                settle(budget_file, entry, 0)
            ledger.path.unlink(missing_ok=True)  # while its lock is held: nobody else writes it
        ledger.close()
        raise


def settle_crashed(path: str | Path, folder: str | Path, independent: bool = False) -> int:
    """Settle a run that crashed, so that the budget counts the steps whose ε the run's report states.

    A run whose ledger charges no step returns its whole reservation. A run with steps keeps its planned steps
    reserved: its stop may depend on the data or on its releases, and its report states the ε of the plan
    (`dpllm.privacy.stated.stated_history`). If people declare that the stop does not depend on them, the ledger records
    the declaration, the report states the ε of the steps taken, and the remaining steps return to the budget. A run
    that is resumed later reserves the steps it needs again.

    Args:
        path: the budget file.
        folder: output folder of the run.
        independent: declares that the crash depended neither on the private data nor on the run's releases (a power
            failure, a time limit that was fixed in advance).

    Returns:
        The steps that its ledger charges.

    Raises:
        BudgetError: the run is still running, or is charged to another file or to none.
        LedgerError: the ledger is missing, was edited, or is a copy of the file that the run wrote.
    """
    ledger = Path(folder) / LEDGER_FILE
    contents = read_ledger(ledger)
    if is_being_written(ledger):
        raise BudgetError(
            f"{ledger} is being written: the run is still going on{known_writer(folder)}, and needs its reservation. "
            "Wait for its end"
        )
    named = contents.runs[0].get("budget")
    if not named or named["file"] != Path(path).name:
        raise BudgetError(
            f"{ledger} is charged to {named['file'] if named else 'no budget file'}, not to {path}. Give the file that "
            "the run was charged to"
        )
    entry = _own_entry(path, ledger, contents)
    if entry is None:
        return 0
    require_own_file(contents)  # a copy that was made before the crash holds fewer steps than were taken
    answers = isinstance(entry.step, Several)
    planned = sum(count for _, count in entry.step.parts) if isinstance(entry.step, Several) else entry.steps_reserved
    early = 0 < contents.num_steps < planned
    if early and independent and not contents.notes.stopped_independently:
        what = "answers" if answers else "releases"
        with Ledger.annotate(ledger) as opened:
            opened.append_end(f"crashed; declared independent of the data and of the {what}", independent=True)
        contents = read_ledger(ledger)
    keep = not contents.answers_end_independently if answers else early and not contents.notes.stopped_independently
    settle(path, entry.id, contents.history, contents.head, keep_reserved=keep)
    return contents.num_steps


def _own_entry(budget_file: str | Path, ledger: Path, contents: LedgerContents) -> Entry | None:
    """Return the entry of a budget that a run's ledger names; None if the run was killed before it charged.

    Raises:
        BudgetError: the budget cannot be read, lacks the entry of a run with steps, or has it for another ledger.
    """
    budget, named = read_budget(budget_file), contents.runs[0]["budget"]["entry"]
    if contents.num_steps == 0 and not contents.torn_lines and named not in {one.id for one in budget.entries}:
        return None  # and so before any step
    entry = entry_of(budget, named)
    require_own_ledger(budget_file, entry, ledger)
    return entry


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a ledger; yield whether it is held, and the file is still the one of this name."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # another new run has removed it
        yield False
        return
    try:
        yield lock(descriptor) and is_at(descriptor, path)
    finally:
        os.close(descriptor)


def _unused(path: Path) -> LedgerContents | None:
    """Return the contents of a ledger that charges nothing, None for any other."""
    try:
        if is_being_written(path):
            return None
        contents = read_ledger(path)
        require_own_file(contents)
    except LedgerError:
        return None
    return contents if contents.num_steps == 0 and not contents.torn_lines else None

"""Reuse the folder of a run that failed before its first step.

Place in the flow: beside the ledger. A refused model, a full disk or an option that only an engine can check may end a
run between the opening of its ledger and the first charge. No step has then released anything private, so a new run may
replace such a ledger, and its reservation returns to the budget. A ledger with a step, one that cannot be read, or a
copy of a ledger (whose original may have steps by now) is never touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dpllm.privacy import locks
from dpllm.privacy.budget import entry_of, read_budget, require_own_ledger, settle
from dpllm.privacy.ledger import Ledger, LedgerContents, LedgerError, is_being_written, read_ledger, require_own_file


def is_used(path: str | Path) -> bool:
    """Return whether there is a ledger file that a new run must not replace.

    Args:
        path: the ledger of a run's folder; it need not exist.
    """
    return Path(path).exists() and _unused(Path(path)) is None


def make_way(path: str | Path, budget_file: str | None) -> dict[str, int]:
    """Remove the ledger of a run that took no step, and settle its reservation. On rank 0.

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
        _settle(path, contents, budget_file)
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


def _settle(path: Path, contents: LedgerContents, budget_file: str | None) -> None:
    named = contents.runs[0].get("budget") if contents.runs else None
    if named and budget_file is not None and named["file"] == Path(budget_file).name:
        budget = read_budget(budget_file)
        if not any(entry.id == named["entry"] for entry in budget.entries):
            return  # the run was killed before it charged, and so before any step
        require_own_ledger(budget_file, entry_of(budget, named["entry"]), path)
        settle(budget_file, named["entry"], 0)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a ledger; yield whether it is held, and the file is still the one of this name."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # another new run has removed it
        yield False
        return
    try:
        yield locks.lock(descriptor) and path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
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

"""Settle the budget of a run that crashed: `dpllm budget settle`.

Place in the flow: after the run, called by a person. A run that ends normally settles itself
(`dpllm.training.shared_ledger`).
"""

from __future__ import annotations

from pathlib import Path

from dpllm.mechanism.several import Several
from dpllm.privacy.budget import BudgetError, entry_of, read_budget, require_own_ledger, settle
from dpllm.privacy.budget_entry import Entry
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, is_being_written, read_ledger, require_own_file
from dpllm.privacy.query_budget import settle_queries
from dpllm.privacy.writer import known_writer


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
    budget = read_budget(path)
    if contents.num_steps == 0 and not contents.torn_lines and named["entry"] not in {one.id for one in budget.entries}:
        return 0  # the run was killed before it charged, and so before any step
    entry = entry_of(budget, named["entry"])
    require_own_ledger(path, entry, ledger)
    require_own_file(contents)  # a copy that was made before the crash holds fewer steps than were taken
    if isinstance(entry.step, Several):
        return _settle_queries(path, ledger, entry, independent)
    early = 0 < contents.num_steps < entry.steps_reserved
    if early and independent and not contents.notes.stopped_independently:
        with Ledger.annotate(ledger) as opened:
            opened.append_end("crashed; declared independent of the data and of the releases", independent=True)
        contents = read_ledger(ledger)
    keep = early and not contents.notes.stopped_independently
    settle(path, named["entry"], contents.num_steps, contents.head, keep_reserved=keep)
    return contents.num_steps


def _settle_queries(path: str | Path, ledger: Path, entry: Entry, independent: bool) -> int:
    """Settle a query run that crashed; return the answers that its ledger charges."""
    contents = read_ledger(ledger)
    assert isinstance(entry.step, Several)
    early = 0 < contents.num_steps < sum(count for _, count in entry.step.parts)
    if early and independent and not contents.notes.stopped_independently:
        with Ledger.annotate(ledger) as opened:
            opened.append_end("crashed; declared independent of the data and of the answers", independent=True)
        contents = read_ledger(ledger)
    settle_queries(path, entry.id, contents)
    return contents.num_steps

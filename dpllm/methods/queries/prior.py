"""The training run on whose model a query run builds.

Place in the flow: before a query run is planned. Its people bear the ε of both runs, so plan and report state them
together.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.privacy.compose import check_run
from dpllm.privacy.ledger import LEDGER_FILE, is_being_written, read_ledger, require_own_file
from dpllm.privacy.query_plan import PriorRelease, training_plan
from dpllm.privacy.stated import stated_history
from dpllm.report.definition import selection_points


def prior_release(folder: str | Path) -> PriorRelease:
    """Return the released training run of a folder, for `QueryPlan.after`.

    Guarantee: its history is the one whose ε its own report states. It is refused if that ε may still grow, or does not
    hold.

    Args:
        folder: of the run.

    Raises:
        ValueError: the folder holds no training run, plan and ledger do not belong together, the run was not private,
            has not ended, or is one of a private tuning that did not select it.
        LedgerError: the ledger is missing or was edited; or it is a copy of one whose stop was declared independent,
            and the original may have been resumed since.
    """
    folder = Path(folder)
    plan = training_plan(folder, "A run that builds on a model")
    ledger = folder / LEDGER_FILE
    contents = read_ledger(ledger)
    check_run(folder, plan, contents)
    if contents.end is None or is_being_written(ledger):
        raise ValueError(
            f"the run in {folder} has not ended, or crashed: it may still take steps, and its ε would grow. Let it "
            "end, or resume it"
        )
    if contents.notes.stopped_independently:
        require_own_file(contents)  # a copy from before a resume states fewer steps than were taken
    if points := selection_points(plan, contents):
        raise ValueError(f"{folder}: {points[0]}")
    budget = contents.runs[0].get("budget")
    return PriorRelease(
        folder=folder.resolve().name,
        run=str(contents.runs[0]["run"]),
        plan_hash=plan.hash,
        chain=contents.chain,
        history=tuple(stated_history(plan, contents)),
        unit=plan.unit,
        unit_column=plan.unit_column,
        num_units=plan.num_units,
        dataset=plan.dataset,
        budget=None if budget is None else (str(budget["file"]), str(budget["entry"])),
    )

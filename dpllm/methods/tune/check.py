"""Whether the folder of a private tuning is what the tuning left behind: a part of `dpllm verify`.

Place in the flow: after everything else, by whoever holds the private folder. Whoever has only the released folder
cannot see the number of runs, and verifies the report there.
"""

from __future__ import annotations

from pathlib import Path

from dpllm.methods.tune import RECORD_FILE, RELEASED_FOLDER
from dpllm.methods.tune.record import Record, TuningError, read_record
from dpllm.methods.tune.tune import require_charged_draws, run_of, score_in
from dpllm.privacy.budget import BudgetError
from dpllm.privacy.ledger import LedgerError
from dpllm.report.verify import Check, Verification, verify

_WHOLE = "the record of the tuning is there and its lines are chained"


def verify_tuning(folder: str | Path) -> Verification:
    """Check the record of a tuning, its runs, the choice of the released run, and the released folder.

    Args:
        folder: of a tuning.
    """
    folder = Path(folder)
    try:
        record = read_record(folder / RECORD_FILE)
    except TuningError as error:
        return Verification(folder, (Check(_WHOLE, False, str(error)),))
    checks = [Check(_WHOLE, True, f"drawn runs: {len(record.runs)} (private)")]
    checks += [_charged(record), _complete(record), _scores(record), _best(record)]
    released = folder / RELEASED_FOLDER
    if record.is_decided and record.selected is not None:
        checks.append(_own(record, released))
        checks += verify(released).checks
    elif released.exists():
        checks.append(Check("a model is released only after the choice", False, f"{released} exists"))
    return Verification(folder, tuple(checks))


def _charged(record: Record) -> Check:
    what = "the draws are those that the budget was charged for"
    if record.draws["budget"] is None:
        return Check(what, None, "no budget file")
    try:
        require_charged_draws(record)
    except (BudgetError, OSError) as error:
        return Check(what, False, str(error))
    return Check(what, True, f"entry {record.draws['budget']['entry']}")


def _complete(record: Record) -> Check:
    what = "every run that was drawn has ended"
    left = [run.folder for number, run in enumerate(record.runs) if number not in record.scores]
    if left:
        return Check(what, False, f"{len(left)} have not: release nothing before `dpllm methods tune` has taken them")
    return Check(what, True, f"{len(record.scores)} runs, failed ones included")


def _scores(record: Record) -> Check:
    what = "each score is that of its run's ledger"
    wrong = []
    for number, score in record.scores.items():
        if score is None:
            continue
        try:
            found = score_in(record.folder_of(number), record.draws["selected"])
        except TuningError as error:
            return Check(what, False, str(error))
        if found != score:
            wrong.append(f"{record.runs[number].folder} has {found} and was noted with {score}")
    return Check(what, not wrong, "; ".join(wrong) or "as noted")


def _best(record: Record) -> Check:
    what = "the released run has the best score"
    if not record.is_decided:
        return Check(what, None, "no run is released yet")
    scores = [score for score in record.scores.values() if score is not None]
    if record.selected is None:
        return Check(what, not scores, "no run is released" + (", but one has a score" if scores else ": all failed"))
    chosen = record.scores.get(record.selected)
    if chosen is None or chosen != max(scores):
        return Check(what, False, f"its score is {chosen}, and the best one is {max(scores, default=None)}")
    return Check(what, True, f"score {chosen:g} (private)")


def _own(record: Record, released: Path) -> Check:
    """Whether the released ledger is that of the selected run."""
    what, number = "the released model is that of the selected run", record.selected
    assert number is not None
    try:
        mine, there = (run_of(place) for place in (record.folder_of(number), released))
    except LedgerError as error:
        return Check(what, False, str(error))
    return Check(what, mine == there, f"run {there}" + ("" if mine == there else f", and the selected one is {mine}"))

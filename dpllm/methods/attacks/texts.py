"""The audit of synthetic text: whether a released data set repeats more of the canaries that its model was trained on.

Place in the flow: after `dpllm methods synthesize`, for a run on the data of `dpllm audit prepare`. The attacker sees
the texts and nothing else. The score of a canary follows from the texts, and the coins decided which canaries were in
the data; so the bounds of one run hold (`dpllm.audit.bounds`), for the ε of the data set: that of the training and of
its own counts. `dpllm audit run` audits the model itself, and shows more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.canaries import Canary, CanarySet, check_data
from dpllm.audit.result import AUDIT_FILE, PICTURE_FILE, AuditResult, judge, plot_audit
from dpllm.audit.run import check_run
from dpllm.methods.attacks.exposure import FEWEST_REFERENCE, exposure
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.report.model_card import add_audit

SCORE = "words that the texts repeat"
ScoresOf = Callable[[Sequence[str]], NDArray[np.float64]]
"""From the texts of canaries to (n,) scores by the released texts; higher: more of it is repeated."""


def audit_texts(
    folder: str | Path,
    run_folder: str | Path,
    canaries: str | Path,
    scores_of: ScoresOf,
    confidence: float = CONFIDENCE,
) -> AuditResult:
    """Audit a data set, and write ``audit.json`` and ``audit.png`` into its folder, and the verdict into its report.

    Guarantee: a sound data set fails with probability at most 1 - confidence (`judge`).

    Args:
        folder: of the data set.
        run_folder: of the training whose model wrote it.
        canaries: ``canaries.json`` of the audit, with the data file beside it.
        scores_of: computes scores from the texts of the data set.
        confidence: confidence of all bounds together.

    Raises:
        AuditError: coins, data, training and data set do not belong together, or the texts were edited.
        ValueError: one of the files cannot be read.
    """
    folder, run_folder, canaries = Path(folder), Path(run_folder), Path(canaries)
    made = CanarySet.load(canaries)
    check_run(run_folder, made, None, plain=False)
    check_data(made, canaries.parent)
    plan = _plan_of(folder, run_folder)
    values = scores_of([_text(canary) for canary in (*made.canaries, *made.candidates)])
    included, num = np.array(made.included), len(made.canaries)
    details: dict[str, Any] = {"texts": str(folder), "model": str(run_folder), "plan": plan.hash}
    unseen = np.concatenate([values[:num][~included], values[num:]])
    if included.any() and len(unseen) >= FEWEST_REFERENCE and np.ptp(unseen) > 0:
        details["exposure"] = exposure(values[:num][included], unseen).to_dict()
    result = judge(
        {SCORE: values[:num]},
        included,
        delta=plan.delta,
        history=plan.history,
        canary_kind=f"{made.kind}, searched in released texts",
        unit=made.unit,
        repetitions=len(made.canaries[0].records) * made.repetitions,
        confidence=confidence,
        details=details,
    )
    plot_audit(result, {SCORE: values[:num]}, included, folder / PICTURE_FILE, plan.history)
    result.save(folder)
    add_audit(folder, AUDIT_FILE, result.summary())
    return result


def _plan_of(folder: Path, run_folder: Path) -> QueryPlan:
    """Return the plan of a data set, after checking that the run's model wrote it and that it is as released.

    Raises:
        AuditError: it is another kind of folder, of another run, or was edited.
    """
    plan = load_plan(folder / PLAN_FILE)
    if not isinstance(plan, QueryPlan) or plan.after is None:
        raise AuditError(
            f"{folder} is no data set of a trained model: give the folder made by `dpllm methods synthesize`, "
            "and the training's folder as --run"
        )
    trained, contents = PrivacyPlan.load(run_folder / PLAN_FILE), read_ledger(run_folder / LEDGER_FILE)
    if plan.after.plan_hash != trained.hash or plan.after.run != contents.runs[0]["run"]:
        raise AuditError(
            f"the texts in {folder} were written by the model of another run ({plan.after.folder}), which had other "
            f"coins: give that run's folder, or texts of the model in {run_folder}"
        )
    own = read_ledger(folder / LEDGER_FILE)
    files = own.notes.released[-1]["files"] if own.notes.released else {}
    if not files or any(run["plan_hash"] != plan.hash for run in own.runs):
        raise AuditError(f"the ledger in {folder} names no released texts of this plan: let the run end, or restore it")
    if changed := checkpoints.differing(folder, files):
        raise AuditError(
            f"{folder}/{next(iter(changed))} is not as it was released: restore the file, or generate it again"
        )
    return plan


def _text(canary: Canary) -> str:
    return " ".join(text for _, text in canary.records)

"""The audit of private answers: counts, votes and tokens, computed many times with and without a canary.

Each method has a probe (`dpllm.methods.attacks.probes`): its own code, from the rows of a unit to the released answers,
on made-up records that are as extreme as its bounds allow. Each trial flips a fair coin, includes the canary or leaves
it out, and charges a real ledger. The claim is the ε of a trial's charges. `dpllm.audit.result.judge` turns scores and
coins into lower bounds and a verdict.

No private record is read, so the audit costs nothing and its result says nothing about any person or data set. It tests
whether this installation keeps the promise of a plan in the worst case.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpllm.audit.bounds import CONFIDENCE, FEWEST_CANARIES, AuditError
from dpllm.audit.result import AUDIT_FILE, PICTURE_FILE, AuditResult, judge, plot_audit
from dpllm.mechanism.limits import MAX_STEPS
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.attacks.probes import Probe
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.accounting import History, epsilon
from dpllm.privacy.ledger import LEDGER_FILE, Ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan
from dpllm.report.model_card import add_audit

SCORE = "the released answers"
MEMORY = Path("/dev/shm")  # thousands of ledger lines are flushed to the disk one by one


class RoundsProbe(Protocol):
    """Computes federated rounds with and without a canary, as `dpllm.methods.attacks.probes.RoundProbe` does."""

    history: History
    """The privacy cost of one round."""

    def answer(self, there: bool) -> float:
        """Take a round, and return a score of its release, which is higher with the canary."""
        ...


@dataclasses.dataclass(frozen=True)
class Trials:
    """The observations of an audit of answers."""

    scores: NDArray[np.float64]
    """(n,) one per trial."""
    included: NDArray[np.bool_]
    """(n,) the coins."""
    history: History
    """The charges of a trial. If they differ between trials, those with the smallest ε: a run could show them, and
    would claim that ε."""
    charged: str
    """The same in words."""

    def result(self, plan: QueryPlan | PrivacyPlan, canary: str, confidence: float = CONFIDENCE) -> AuditResult:
        """Compare the bounds with the claim, and return the verdict."""
        method = plan.method if isinstance(plan, QueryPlan) else "federated rounds"
        return judge(
            {SCORE: self.scores},
            self.included,
            delta=plan.delta,
            history=self.history,
            canary_kind=f"one in each trial: {canary}",
            unit=plan.unit,
            repetitions=plan.max_rows_per_unit or 1,
            confidence=confidence,
            independent_runs=True,
            details={"method": method, "charged in a trial": self.charged},
        )


def run_trials(plan: QueryPlan, probe: Probe, trials: int, on_trial: Callable[[], None] = lambda: None) -> Trials:
    """Compute the answers of a plan many times, and return the observations.

    Args:
        plan: of the run; each trial computes all of its answers.
        probe: of its method.
        trials: n.
        on_trial: called after each trial, to show progress.

    Raises:
        AuditError: there are too few or too many trials, the plan has no answers of its own, or an answer was given
            without a charge.
    """
    if not plan.charges:
        raise AuditError(
            "this plan has no private answers of its own: its ε is that of the model that it builds on. Audit the "
            "training of that model (dpllm audit gradient, dpllm audit run)"
        )
    most = MAX_STEPS // max(charge.count for charge in plan.charges)
    if not FEWEST_CANARIES <= trials <= most:
        raise AuditError(
            f"trials={trials:,}: an audit of this plan takes {FEWEST_CANARIES} to {most:,} trials, each with all of "
            "its answers"
        )
    many = dataclasses.replace(
        plan,
        charges=tuple(dataclasses.replace(charge, count=charge.count * trials) for charge in plan.charges),
        dataset=None,
        target_epsilon=None,
        after=None,
    )
    folder = Path(tempfile.mkdtemp(prefix="dpllm-audit-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        run, seen = QueryRun.begin(folder / "run", many, dataset=None), Counter[tuple[int, ...]]()

        def answer(there: bool) -> float:
            before = _left(run)
            score = probe.answer(run, there)
            seen[tuple(was - now for was, now in zip(before, _left(run), strict=True))] += 1
            return score

        scores, included = flip_coins(answer, trials, on_trial)
        run.ledger.close()
    finally:
        shutil.rmtree(folder)
    history, charged = _claim(plan, seen)
    return Trials(scores, included, history, charged)


def flip_coins(
    answer: Callable[[bool], float], trials: int, on_trial: Callable[[], None]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Flip n fair coins; return the score of an answer for each, (n,), and the coins, (n,)."""
    included = secret_rng().integers(0, 2, trials).astype(bool)
    scores = np.zeros(trials)
    for number, there in enumerate(included.tolist()):
        scores[number] = answer(there)
        on_trial()
    return scores, included


def run_rounds(
    plan: PrivacyPlan,
    probe_of: Callable[[PrivacyPlan, Ledger], RoundsProbe],
    trials: int,
    on_trial: Callable[[], None] = lambda: None,
) -> Trials:
    """Take federated rounds, each with a coin of its own, and return the observations.

    Raises:
        AuditError: there are too few trials, or a round was taken without a charge.
    """
    if not FEWEST_CANARIES <= trials <= MAX_STEPS:
        raise AuditError(f"trials={trials:,}: an audit takes {FEWEST_CANARIES} to {MAX_STEPS:,} trials")
    folder = Path(tempfile.mkdtemp(prefix="dpllm-audit-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
            probe = probe_of(plan, ledger)
            scores, included = flip_coins(probe.answer, trials, on_trial)
            charged = ledger.num_steps
    finally:
        shutil.rmtree(folder)
    if charged != trials:
        raise AuditError(f"FAIL: {trials} rounds charged {charged} steps. Do not use this installation")
    return Trials(scores, included, probe.history, "1 round, in which everybody is")


def save_answers(found: Trials, result: AuditResult, folder: Path, of_run: bool) -> None:
    """Write ``audit.json`` and ``audit.png`` into a folder; of the run's own folder, add the verdict to the report."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_audit(result, {SCORE: found.scores}, found.included, folder / PICTURE_FILE, found.history)
    result.save(folder)
    if of_run:
        add_audit(folder, AUDIT_FILE, result.summary())


def _left(run: QueryRun) -> list[int]:
    return [run.left(charge.name) for charge in run.plan.charges]


def _claim(plan: QueryPlan, seen: Counter[tuple[int, ...]]) -> tuple[History, str]:
    """Return the charges of the trial with the smallest ε, and these charges in words.

    Raises:
        AuditError: a trial charged nothing.
    """
    histories = {
        counts: [(charge.event, count) for charge, count in zip(plan.charges, counts, strict=True) if count]
        for counts in seen
    }
    if not all(histories.values()):
        raise AuditError(
            "FAIL: an answer was released without a charge, so no ledger would show it. Do not use this installation"
        )
    least = min(histories, key=lambda counts: epsilon(histories[counts], plan.delta, "zero-out"))
    words = ", ".join(f"{count:,} x {charge.name}" for charge, count in zip(plan.charges, least, strict=True))
    if len(seen) > 1:
        words += f", the least of {len(seen)} different charges: the charge must not depend on the answers"
    return histories[least], words

"""Canaries in a released model or text: their exposure, and the audit of synthetic texts.

Exposure is how much higher a canary scores than similar texts that the model never saw, in bits: how much memorisation
helps somebody who tries such texts one by one (Carlini, Liu, Erlingsson, Kos, Song, arXiv:1802.08232). It is
not a bound on ε. About half of the canaries of an audit were left out by coin flips, and the candidates were never in
the data: they are the reference.

The audit of a synthetic data set (`audit_texts`) checks whether it repeats more of the canaries that its model was
trained on, for a run on the data of `dpllm audit prepare`. The attacker sees the texts and nothing else. The score of a
canary follows from the texts, and the coins decided which canaries were in the data; so the bounds of one run hold
(`dpllm.audit.bounds`), for the ε of the data set: that of the training and of its own counts. `dpllm audit run` audits
the model itself, and shows more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.canaries import Canary, CanarySet, check_data
from dpllm.audit.result import AUDIT_FILE, PICTURE_FILE, AuditResult, judge, plot_audit
from dpllm.audit.run import check_run
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.report.model_card import add_audit

Floats = NDArray[np.float64]
FEWEST_REFERENCE = 10
"""Smallest number of reference texts for which exposure is stated."""
_FAR = -300.0


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Exposure of the included canaries, in bits."""

    num_reference: int
    """Number of texts of the same kind that were not in the data."""
    most_by_rank: float
    """The largest exposure that a rank among this many texts can show."""
    median_by_rank: float
    """Median of the included canaries; for texts that were never seen it is 1."""
    max_by_rank: float
    """Largest exposure of an included canary."""
    median_extrapolated: float
    """Median by the skew-normal distribution of the reference, which has no largest value."""
    max_extrapolated: float
    """Largest extrapolated exposure of an included canary."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return (
            f"median {self.median_by_rank:.2f}, largest {self.max_by_rank:.2f} bits by rank among "
            f"{self.num_reference:,} others ({self.most_by_rank:.2f} at most; never seen: median 1); extrapolated "
            f"median {self.median_extrapolated:.2f}, largest {self.max_extrapolated:.2f}"
        )


def exposure_of_run(
    run_folder: str | Path,
    canaries: str | Path,
    model: str | Path | None = None,
    reference: str | None = None,
    plain: bool = False,
) -> Exposure:
    """Return the exposure of the canaries under the model of a run; arguments and errors are those of `audit_run`.

    Raises:
        AuditError: no canary was included, or there are too few texts to compare with.
    """
    from dpllm.audit.run import scored_canaries

    scored = scored_canaries(run_folder, canaries, model, reference, plain)
    included, num = np.array(scored.made.included), len(scored.made.included)
    return exposure(scored.main[:num][included], np.concatenate([scored.main[:num][~included], scored.main[num:]]))


def exposure(included: Floats, reference: Floats) -> Exposure:
    """Return the exposure of all included canaries.

    Args:
        included: (n,) scores of the included canaries; higher means more likely in the training data.
        reference: (r,) scores of texts of the same kind that were not in the training data.

    Raises:
        AuditError: no canary, or too few texts to compare with.

    >>> rng = np.random.default_rng(0)
    >>> round(exposure(rng.normal(size=500), rng.normal(size=500)).median_by_rank, 1)
    1.0
    """
    if len(included) == 0:
        raise AuditError("no canary was included, so no exposure can be stated")
    by_rank = exposure_by_rank(included, reference)
    extrapolated = exposure_extrapolated(included, reference)
    return Exposure(
        num_reference=len(reference),
        most_by_rank=math.log2(len(reference) + 1),
        median_by_rank=float(np.median(by_rank)),
        max_by_rank=float(by_rank.max()),
        median_extrapolated=float(np.median(extrapolated)),
        max_extrapolated=float(extrapolated.max()),
    )


def exposure_by_rank(scores: Floats, reference: Floats) -> Floats:
    """Return, (n,), log2 of the number of texts divided by the canary's rank, both including the canary.

    Half of the texts with the canary's own score rank before it.

    Raises:
        AuditError: too few reference texts.

    >>> exposure_by_rank(np.array([99.0, -1.0]), np.arange(15.0)).round(2).tolist()
    [4.0, 0.0]
    """
    ordered = np.sort(_checked(reference))
    above = len(ordered) - np.searchsorted(ordered, scores, side="right")
    equal = len(ordered) - np.searchsorted(ordered, scores, side="left") - above
    rank = 1 + above + equal / 2
    return np.asarray(math.log2(len(ordered) + 1) - np.log2(rank), dtype=np.float64)


def exposure_extrapolated(scores: Floats, reference: Floats) -> Floats:
    """Return minus log2 of the probability that a reference text scores as high or higher: (n,).

    The probability comes from a skew-normal distribution fitted to the reference, so it can exceed any rank. It is an
    estimate: its tail is extrapolated.

    Raises:
        AuditError: too few reference texts, or all have the same score.
    """
    values = _checked(reference)
    centre, spread = float(values.mean()), float(values.std())
    if spread < 1e-12 * max(1.0, abs(centre)):
        raise AuditError("all reference texts have the same score, so no exposure can be stated")
    shape, location, scale = stats.skewnorm.fit((values - centre) / spread)
    standard = ((np.asarray(scores, dtype=np.float64) - centre) / spread - location) / scale
    return np.asarray(-_log_survival(standard, float(shape)) / math.log(2), dtype=np.float64)


def _log_survival(z: Floats, shape: float) -> Floats:
    """Return log P[Z > z] of the standard skew-normal law, also where the probability underflows.

    Far out, the density falls exponentially at a nearly constant rate, the slope of its logarithm.
    """
    with np.errstate(divide="ignore"):
        near = np.log(stats.skewnorm.sf(z, shape))
    far = near < _FAR
    out = z[far]
    log_density = math.log(2) + stats.norm.logpdf(out) + stats.norm.logcdf(shape * out)
    slope = out - shape * np.exp(stats.norm.logpdf(shape * out) - stats.norm.logcdf(shape * out))
    near[far] = log_density - np.log(slope)
    return np.asarray(near, dtype=np.float64)


def _checked(reference: Floats) -> Floats:
    values = np.asarray(reference, dtype=np.float64)
    if len(values) < FEWEST_REFERENCE:
        raise AuditError(
            f"exposure compares with texts that were not in the data, but there are only {len(values)}: at least "
            f"{FEWEST_REFERENCE} are needed (`dpllm audit prepare --candidates`)"
        )
    if not np.isfinite(values).all():
        raise AuditError("a reference text has a score that is not finite: score in float32")
    return values


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
        folder: folder of the data set.
        run_folder: folder of the training run whose model wrote it.
        canaries: ``canaries.json`` of the audit, in the folder of the data file.
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
    """Return the plan of a data set; check that the run's model wrote it and that no file changed since its release.

    Raises:
        AuditError: the folder is not a data set, was made from a different run, or was edited.
    """
    plan = load_plan(folder / PLAN_FILE)
    if not isinstance(plan, QueryPlan) or plan.after is None:
        raise AuditError(
            f"{folder} is not a data set of a trained model: give the folder made by `dpllm methods synthesize`, "
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
            f"{folder}/{next(iter(changed))} changed since its release: restore the file, or generate it again"
        )
    return plan


def _text(canary: Canary) -> str:
    return " ".join(text for _, text in canary.records)

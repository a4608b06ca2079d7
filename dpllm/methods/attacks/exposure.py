"""Exposure: how much higher a canary scores than similar texts that the model never saw.

Place in the flow: beside the bounds, from the same scores. Exposure is not a bound on ε; it measures in bits how much
memorisation helps somebody who tries such texts one after the other (Carlini, Liu, Erlingsson, Kos, Song,
arXiv:1802.08232). About half of the canaries of an audit were left out by coin flips, and the candidates were never in:
they are the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.audit.bounds import AuditError

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
    """Return the exposure of the canaries under the model of a run; args and errors are those of `audit_run`.

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
        included: (n,) their scores, higher = more likely in the training data.
        reference: (r,) scores of texts of the same kind that were not in it.

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
    """Return log2 of the number of texts over the canary's rank among them, the canary counted in both: (n,).

    Half of the texts with the canary's own score rank before it.

    Args:
        scores: (n,) scores of the canaries.
        reference: (r,) scores of the other texts.

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

    Args:
        scores: (n,) scores of the canaries.
        reference: (r,) scores of the other texts.

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

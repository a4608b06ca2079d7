"""How well scores separate members from others: area under the ROC curve, true positive rates, each with its interval.

These are estimates of an attack's success, while `dpllm.audit.bounds` gives proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from dpllm.audit.bounds import AuditError


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def auroc(scores: NDArray[np.float64], included: NDArray[np.bool_], confidence: float = 0.95) -> Estimate:
    """Return the probability that a member scores above a non-member, counting ties as half.

    The interval uses DeLong's variance (DeLong, DeLong, Clarke-Pearson 1988) on the logit scale. There, it is below 1
    and misses less often when the area is large. An area of 1 has no variance: with n of the rarer kind, it is
    compatible with any area above (1 - confidence)^(1/n).

    Args:
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is a member.
        confidence: confidence of the interval.

    Raises:
        AuditError: there are no members, or no others.

    >>> print(auroc(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False])))
    1.000 (0.224 to 1.000)
    """
    members, others = _both(scores, included)
    ranks = stats.rankdata(np.concatenate((members, others)))
    num_in, num_out = len(members), len(others)
    above_in = (ranks[:num_in] - stats.rankdata(members)) / num_out  # for each member: the share of others below it
    above_out = 1 - (ranks[num_in:] - stats.rankdata(others)) / num_in
    value = float(above_in.mean())
    variance = (above_in.var(ddof=1) / num_in if num_in > 1 else 0.0) + (
        above_out.var(ddof=1) / num_out if num_out > 1 else 0.0
    )
    least = (1 - confidence) ** (1 / min(num_in, num_out))
    if not 0 < value < 1:
        return Estimate(value, least if value == 1 else 0.0, 1 - least if value == 0 else 1.0)
    half = float(stats.norm.ppf((1 + confidence) / 2)) * math.sqrt(variance) / (value * (1 - value))
    low, high = special.expit(special.logit(value) + np.array([-half, half]))
    return Estimate(value, float(low), float(high))


def tpr_at(scores: NDArray[np.float64], included: NDArray[np.bool_], fpr: float, confidence: float = 0.95) -> Estimate:
    """Return the share of members found when at most a share ``fpr`` of the others is accused.

    The threshold is one of the others' scores, so with n others a rate below 1/n cannot be distinguished from 0: then
    the threshold is the highest of them. The interval is Clopper-Pearson's for that threshold.

    Args:
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is a member.
        fpr: false positive rate, between 0 and 1.
        confidence: confidence of the interval.

    Raises:
        AuditError: there are no members, or no others, or the rate is outside [0, 1].
    """
    if not 0 <= fpr <= 1:
        raise AuditError(f"a false positive rate must be between 0 and 1, got {fpr}")
    members, others = _both(scores, included)
    accused = math.floor(fpr * len(others) + 1e-9)
    ordered = np.sort(others)[::-1]
    hits = len(members) if accused == len(others) else int((members > ordered[accused]).sum())
    found = stats.binomtest(hits, len(members)).proportion_ci(confidence, method="exact")
    return Estimate(hits / len(members), float(found.low), float(found.high))


def highest_fpr(num_others: int, fpr: float, confidence: float = 0.95) -> float:
    """Return the upper end of the interval of the true false positive rate of `tpr_at`'s threshold.

    That threshold is chosen among the scores of the others, so the share of them above it is known, but the rate in the
    population is not. By Clopper-Pearson it is at most the result, with probability ``(1 + confidence) / 2``.

    Args:
        num_others: the number of non-members.
        fpr: requested false positive rate.
        confidence: confidence of the interval; half of the error is on this side.

    >>> [round(highest_fpr(num, 0.01), 4) for num in (100, 500, 10000)]
    [0.0545, 0.0232, 0.0121]
    """
    accused = math.floor(fpr * num_others + 1e-9)
    return (
        1.0 if accused >= num_others else float(stats.beta.ppf((1 + confidence) / 2, accused + 1, num_others - accused))
    )


def shown_rates(rates: Sequence[float], num_others: int) -> list[float]:
    """Return the false positive rates that this many others can show: those at which at least one is accused.

    >>> shown_rates((1e-3, 1e-2), 500)
    [0.01]
    """
    return [rate for rate in rates if rate * num_others >= 1]


def roc_curve(
    scores: NDArray[np.float64], included: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the false and true positive rates at all thresholds, from (0, 0) to (1, 1)."""
    members, others = _both(scores, included)
    values = np.concatenate((members, others))
    is_member = np.arange(len(values)) < len(members)
    order = np.argsort(-values, kind="stable")
    last = np.append(np.diff(values[order]) != 0, True)  # equal scores are accused together
    tpr = np.cumsum(is_member[order])[last] / len(members)
    fpr = np.cumsum(~is_member[order])[last] / len(others)
    return np.concatenate(([0.0], fpr)), np.concatenate(([0.0], tpr))


def _both(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    members, others = scores[included], scores[~included]
    if len(members) == 0 or len(others) == 0:
        raise AuditError(f"got {len(members)} members and {len(others)} non-members. An attack needs some of both")
    return members, others

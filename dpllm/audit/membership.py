"""Membership inference on real records: several attacks at once, and how well each separates members from others.

Place in the flow: from token scores of members and non-members to a table. The result of an attack is an estimate. The
bound beside it holds for any attack on this run (`dpllm.privacy.risk.attack_risk`), for a record whose text entered the
data once and a non-member from the same distribution. `check_exchangeable` refuses non-members that a model which saw
neither can already separate from the members (Das, Zhang, Tramèr, arXiv:2406.16201, show how often published attacks
measure this difference instead).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.result import allowed_rates
from dpllm.audit.roc import Estimate, auroc, shown_rates, tpr_at
from dpllm.audit.scores import (
    Floats,
    TokenScores,
    loss_score,
    min_k_plus_plus_score,
    min_k_score,
    ratio_score,
    zlib_score,
)
from dpllm.privacy.accounting import History
from dpllm.privacy.rounding import up

RATES = (0.01, 0.001)
"""False positive rates at which the share of members found is stated."""

_TOO_FAR = 4.0  # largest distance from 1/2, in standard deviations, of the AUROC of a model that saw no record


@dataclass(frozen=True, eq=False)
class MembershipResult:
    """How well one attack separates members from others."""

    name: str
    """Name of the attack."""
    scores: Floats = field(repr=False)
    """(m,) the higher, the likelier a member."""
    included: NDArray[np.bool_] = field(repr=False)
    """(m,) whether it is one."""
    auroc: Estimate
    """Area under the ROC curve; 1/2 is blind guessing."""
    true_positive_rate: dict[float, Estimate]
    """False positive rate -> share of members found; a rate that needs more non-members is left out."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the scores of single records are left out."""
        rates = {f"{rate:g}": found.to_dict() for rate, found in self.true_positive_rate.items()}
        return {"attack": self.name, "auroc": self.auroc.to_dict(), "true_positive_rate": rates}


def judge_attack(name: str, scores: Floats, included: NDArray[np.bool_]) -> MembershipResult:
    """Return the area under the ROC curve and the true positive rates of an attack, at false positive rates `RATES`.

    Rates below 1 / (number of non-members) are left out: the true false positive rate of a threshold that no non-member
    exceeds may be many times higher.

    Args:
        name: name of the attack.
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is one.

    Raises:
        AuditError: a score is NaN; there are no members, or no others.

    >>> result = judge_attack("loss", np.arange(200.0), np.arange(200) >= 100)
    >>> result.auroc.value, {rate: found.value for rate, found in result.true_positive_rate.items()}
    (1.0, {0.01: 1.0})
    """
    if np.isnan(scores).any():
        raise AuditError(
            f"the attack '{name}' has no score for {int(np.isnan(scores).sum())} records (NaN): the model gives them "
            "no probability. Check that its training loss was not NaN"
        )
    others = int((~np.asarray(included, dtype=bool)).sum())
    found = {rate: tpr_at(scores, included, rate) for rate in shown_rates(RATES, others)}
    return MembershipResult(name, np.asarray(scores, dtype=np.float64), included, auroc(scores, included), found)


def membership_scores(
    tuned: TokenScores, texts: Sequence[str], reference: TokenScores | None = None
) -> dict[str, Floats]:
    """Return the scores of all attacks that need no training: attack -> (R,).

    Args:
        tuned: R records under the model that is attacked.
        texts: (R,) the texts of their target tokens.
        reference: the same records under a model that saw none of them; without it the ratio is left out.
    """
    found = {
        "loss": loss_score(tuned),
        "zlib": zlib_score(tuned, texts),
        "Min-K%": min_k_score(tuned),
        "Min-K%++": min_k_plus_plus_score(tuned),
    }
    return found if reference is None else {**found, "reference ratio": ratio_score(tuned, reference)}


def check_exchangeable(reference: TokenScores, included: NDArray[np.bool_]) -> Estimate:
    """Make sure that a model which saw none of the records cannot separate members from others.

    Args:
        reference: the records under that model.
        included: (R,) whether a record is in the training data of the attacked model.

    Returns:
        The area under its ROC curve.

    Raises:
        AuditError: it separates them by more than four standard deviations.
    """
    found = auroc(loss_score(reference), included)
    num_in, num_out = int(included.sum()), int((~included).sum())
    deviation = math.sqrt((num_in + num_out + 1) / (12 * num_in * num_out))  # of an area of scores without a difference
    if abs(found.value - 0.5) > _TOO_FAR * deviation:
        raise AuditError(
            f"members and held-out records differ before any training: the reference model, which saw neither, "
            f"separates them with an AUROC of {found}. An attack would measure that difference and not membership. "
            "Hold out a random share of the same records (data.eval) and train again"
        )
    return found


def bounds_of(history: History, num_others: int, rates: Sequence[float] = RATES) -> dict[float, float]:
    """Return the largest share of members that any attack finds: false positive rate -> bound.

    Each bound is stated at the highest false positive rate that a threshold chosen on this many non-members may have.

    Guarantee: an upper bound for a run with this history, under zero-out adjacency (did the record take part?).

    >>> from dpllm.mechanism.events import Step
    >>> history = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]
    >>> {rate: round(bound, 3) for rate, bound in bounds_of(history, 10**6).items()}
    {0.01: 0.097, 0.001: 0.021}
    """
    return allowed_rates(history, shown_rates(rates, num_others), num_others, CONFIDENCE)


def membership_rows(
    attacks: Sequence[MembershipResult], bounds: Mapping[float, float] | None
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table: attack, area, true positive rates, and the bounds of any attack below."""
    head = ["attack", "AUROC (95 %)", *(f"TPR at FPR {rate:.1%}" for rate in RATES)]
    rows = [
        [
            attack.name,
            interval(attack.auroc),
            *(
                interval(attack.true_positive_rate[rate]) if rate in attack.true_positive_rate else "too few records"
                for rate in RATES
            ),
        ]
        for attack in attacks
    ]
    if bounds is not None:
        limits = (up(bounds[rate], 3) if rate in bounds else "too few records" for rate in RATES)
        rows.append(["any attack, at most (95 %)", "", *limits])
    return head, rows


def interval(found: Estimate) -> str:
    """Return an estimate and its interval, short enough for a column.

    >>> interval(Estimate(0.5, 0.25, 0.75))
    '0.500 (0.250–0.750)'
    """
    return f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})"

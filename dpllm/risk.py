"""What (ε, δ) means for an attacker.

Place in the flow: from the ledger's history to the report. The attacker of differential privacy knows everything except
whether one unit took part: all other units, every setting, every released checkpoint. Three figures bound what that
attacker can achieve; a real one has less to go on. All come from the privacy loss distribution of the whole run, which
says far more than one (ε, δ) pair, and all are upper bounds.

With D(e) the δ that belongs to e (over both directions of the adjacency), and a test that accuses a share `fpr` of the
units that did not take part and a share `tpr` of those that did:

* ``tpr <= exp(e) fpr + D(e)`` and ``1 - fpr <= exp(e) (1 - tpr) + D(e)`` for every e >= 0 (Kairouz, Oh, Viswanath,
  arXiv:1311.0776, theorem 2.1);
* the advantage ``tpr - fpr`` is at most D(0), the total variation distance;
* with prior probability p that the unit took part, the best guess is right with probability at most
  ``max over tests of p tpr + (1 - p)(1 - fpr)``, which the same inequalities bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import optimize

from dpllm.accounting import DISCRETIZATION, History, loss_distribution, merge, rounding_margin

FALSE_POSITIVE_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
PRIORS = (0.5, 0.01)

_GRID = (0.0, *np.geomspace(1e-3, 700.0, 30).tolist())


@dataclass(frozen=True)
class AttackRisk:
    """Bounds on what an attacker learns about one unit."""

    adjacency: str
    """The two worlds the attacker tells apart."""
    advantage: float
    """Largest tpr - fpr of any attack; 0 is blind guessing, 1 is certainty."""
    bayes_success: dict[float, float]
    """Prior probability of taking part -> largest probability of guessing right."""
    true_positive_rate: dict[float, float]
    """False positive rate -> largest true positive rate. Blind guessing has them equal."""


def attack_risk(
    history: History,
    adjacency: str = "zero-out",
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    priors: Sequence[float] = PRIORS,
    discretization: float = DISCRETIZATION,
) -> AttackRisk:
    """Return the bounds for a history.

    Guarantee: upper bounds, never below what blind guessing achieves (the false positive rate itself, and the more
    likely of the two answers).

    Args:
        history: (step, count) pairs.
        adjacency: "zero-out" (did the unit take part?) or "replace-one" (was it this unit or that one?).
        false_positive_rates: where to state the true positive rate, each between 0 and 1.
        priors: where to state the success of the best guess, each between 0 and 1.
        discretization: width of the grid of privacy losses.

    Raises:
        ValueError: a rate or a prior is not between 0 and 1.

    >>> from dpllm.accounting import Step
    >>> risk = attack_risk([(Step(None, 0.02, None, 1.0), 1500)], discretization=1e-3)
    >>> round(risk.advantage, 2)
    0.38
    """
    for value in (*false_positive_rates, *priors):
        if not 0 <= value <= 1:
            raise ValueError(f"rates and priors lie between 0 and 1, got {value}")
    delta_at = _delta_function(history, adjacency, discretization)
    rates = {fpr: _true_positive_rate(fpr, delta_at) for fpr in false_positive_rates}
    success = {prior: _bayes_success(prior, delta_at) for prior in priors}
    return AttackRisk(adjacency, delta_at(0.0), success, rates)


def _delta_function(history: History, adjacency: str, discretization: float) -> Callable[[float], float]:
    """Return D."""
    merged = merge(history)
    if not merged:
        return lambda _: 0.0
    distribution = loss_distribution(merged, adjacency, discretization)
    if distribution is None:
        return lambda _: 1.0
    margin = rounding_margin(merged)

    @cache
    def delta_at(epsilon: float) -> float:
        return min(1.0, max(0.0, float(distribution.get_delta_for_epsilon(epsilon))) + margin)

    return delta_at


def _true_positive_rate(fpr: float, delta_at: Callable[[float], float]) -> float:
    direct = _minimum(lambda e: math.exp(e) * fpr + delta_at(e))
    reverse = _minimum(lambda e: 1 + (fpr + delta_at(e) - 1) * math.exp(-e))
    return max(fpr, min(1.0, direct, reverse))


def _minimum(bound: Callable[[float], float]) -> float:
    """Return a small value of a function whose every value is a valid bound.

    D is convex in exp(e), so both bounds have one valley; where a search misses its floor, the result is only looser.
    """
    values = [bound(e) for e in _GRID]
    best = int(np.argmin(values))
    low, high = _GRID[max(0, best - 1)], _GRID[min(len(_GRID) - 1, best + 1)]
    found = optimize.minimize_scalar(bound, bounds=(low, high), method="bounded", options={"xatol": 1e-5 * high})
    return min(values[best], float(found.fun))


def _bayes_success(prior: float, delta_at: Callable[[float], float]) -> float:
    """Return the largest p tpr + (1-p)(1-fpr).

    With p >= 1/2, put e = log(p / (1-p)): p tpr + (1-p)(1-fpr) = p + (1-p)((1-fpr) - exp(e)(1-tpr)) <= p + (1-p) D(e).
    With p < 1/2 the roles of the two worlds are exchanged.
    """
    more, less = max(prior, 1 - prior), min(prior, 1 - prior)
    return min(1.0, more + less * delta_at(math.log(more / less))) if less > 0 else 1.0


def in_plain_words(risk: AttackRisk, unit: str = "unit") -> list[str]:
    """Return sentences about the bounds for people who don't read formulas.

    >>> in_plain_words(AttackRisk("zero-out", 0.0, {}, {0.01: 0.014}))[0].split("; ")[1]
    'blind guessing finds 1%.'
    """
    question = (
        f"whether one {unit} was in the training data"
        if risk.adjacency == "zero-out"
        else f"which of two {unit}s was in the training data"
    )
    lines = []
    for prior, success in risk.bayes_success.items():
        guess = max(prior, 1 - prior)
        if prior == 0.5:
            lines.append(
                f"Even someone who knows all other data and every setting, and must say {question}, is right at most "
                f"{_percent(success, 1)}% of the time when both answers are equally likely beforehand; 50.0% is blind "
                "guessing."
            )
        else:
            lines.append(
                f"When the chance beforehand is {prior * 100:g}%, such a person is right at most "
                f"{_percent(success, 2)}% of the time; always giving the likelier answer is right {guess * 100:g}% of "
                "the time."
            )
    for fpr, tpr in risk.true_positive_rate.items():
        lines.append(
            f"Accusing {fpr * 100:g}% of the {unit}s that were not in the data, such a person finds at most "
            f"{_percent(tpr, 2)}% of those that were; blind guessing finds {fpr * 100:g}%."
        )
    return lines


def _percent(value: float, digits: int) -> str:
    """Round up, so that what is printed stays an upper bound."""
    scale = 10**digits
    return f"{min(100.0, math.ceil(value * 100 * scale - 1e-7) / scale):.{digits}f}"

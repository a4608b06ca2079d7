"""Compute what (ε, δ) means for an attacker, and the Gaussian mechanism in closed form.

Differential privacy assumes an attacker who knows everything except whether one unit took part: all other units, every
setting, every released checkpoint. Four figures bound the success of that attacker; a real attacker knows less. All
four are computed from the privacy loss distribution of the whole run, which contains far more information than one
(ε, δ) pair, and all are upper bounds.

Let D(e) be the δ at e (over both directions of the adjacency). A test accuses a share `fpr` of the units that did not
take part and a share `tpr` of those that did:

* ``tpr <= exp(e) fpr + D(e)`` and ``1 - fpr <= exp(e) (1 - tpr) + D(e)`` for every e >= 0 (Kairouz, Oh, Viswanath,
  arXiv:1311.0776, theorem 2.1);
* the advantage ``tpr - fpr`` is at most D(0), the total variation distance;
* with prior probability p that the unit took part, the best guess is right with probability at most
  ``max over tests of p tpr + (1 - p)(1 - fpr)``, which the same inequalities bound;
* reconstruction: the unit itself is unknown, and drawn from a prior under which the best guess without the release is
  right with probability at most k. A guess made with the release is right with probability at most the largest ``tpr``
  at ``fpr = k`` (Balle, Cherubin, Hayes, arXiv:2201.04845; Hayes, Mahloujifar, Balle, arXiv:2302.07225, theorem 2).

The last bound has a condition: for each value z of the unit, the pair is (release with z, release without it), in this
direction, and the second must be the same for all z. Under zero-out it is the release in which the unit contributes
nothing; under replace-one any fixed other unit takes its place. The attacker has all other units, and the prior does
not depend on them. Proof: let f be the largest ``tpr`` as a function of ``fpr``, which is concave and rising. A guess
is right for z with probability at most f(r(z)), where r(z) is the probability of guessing z when the unit is absent.
The mean over the prior is at most f(mean of r(z)), and the mean of r(z) is at most k. The bounds here take the larger D
of both directions, which covers the one that is needed.

**The Gaussian mechanism.** A sum that one unit changes by μ standard deviations of its noise is μ-private (Dong, Roth,
Su, arXiv:1905.02383). δ = Φ(μ/2 - ε/μ) - exp(ε) Φ(-μ/2 - ε/μ) is the smallest δ at which it is (ε, δ)-private (Balle,
Wang, arXiv:1805.06530, theorem 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from dpllm.privacy.accounting import DISCRETIZATION, History, delta_function, merge

_LOG_DISTANCES = (math.log(1e-12), math.log(1e6))


def gaussian_log_delta(mu: float, epsilon: float) -> float:
    """Return log δ of a μ-Gaussian mechanism at ε.

    Args:
        mu: μ > 0.
        epsilon: ε >= 0.

    >>> round(gaussian_log_delta(1.0, 4.377), 2) == round(math.log(1e-5), 2)
    True
    """
    upper = float(special.log_ndtr(mu / 2 - epsilon / mu))
    lower = epsilon + float(special.log_ndtr(-mu / 2 - epsilon / mu))
    return upper + math.log(-math.expm1(min(lower - upper, -1e-300)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε at δ of a μ-Gaussian mechanism; 0 if δ holds even at ε = 0.

    Args:
        mu: μ >= 0.
        delta: δ > 0.

    >>> round(gaussian_epsilon(1.0, 1e-5), 2)
    4.38
    """

    def excess(at: float) -> float:
        return gaussian_log_delta(mu, at) - math.log(delta)

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-9))


def gaussian_distance(epsilon: float, delta: float) -> float:
    """Return μ, the largest distance of two unit normals that are (ε, δ)-indistinguishable.

    Args:
        epsilon: ε >= 0.
        delta: δ, between 0 and 1.

    >>> round(gaussian_distance(1.0, 1e-5), 3)
    0.268
    """

    def excess(log_distance: float) -> float:
        return gaussian_log_delta(math.exp(log_distance), epsilon) - math.log(delta)

    return math.exp(float(optimize.brentq(excess, *_LOG_DISTANCES, xtol=1e-12)))


FALSE_POSITIVE_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
PRIORS = (0.5, 0.01)
RECONSTRUCTION_PRIORS = (1e-3, 1e-6)

_CURVE_GRID = (*np.linspace(0.0, 12.0, 241).tolist(), *np.geomspace(12.3, 100.0, 30).tolist())
_CURVE_RATES = (*np.logspace(-8, 0, 65).tolist(),)
_GRID = (0.0, *np.geomspace(1e-3, 700.0, 30).tolist())


@dataclass(frozen=True)
class AttackRisk:
    """Bounds on the information that an attacker gains about one unit."""

    adjacency: str
    """Adjacency of the two data sets that the attacker must distinguish."""
    advantage: float
    """Largest tpr - fpr of any attack; 0 is blind guessing, 1 is certainty."""
    bayes_success: dict[float, float]
    """Prior probability of taking part -> largest probability of guessing right."""
    true_positive_rate: dict[float, float]
    """False positive rate -> largest true positive rate. For blind guessing they are equal."""
    reconstruction: dict[float, float]
    """Chance of guessing the unit's contents without the release -> largest chance with it."""


def attack_risk(
    history: History,
    adjacency: str = "zero-out",
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    priors: Sequence[float] = PRIORS,
    discretization: float = DISCRETIZATION,
    reconstruction_priors: Sequence[float] = RECONSTRUCTION_PRIORS,
) -> AttackRisk:
    """Return the bounds for a history.

    Guarantee: upper bounds, never below the success of blind guessing (the false positive rate itself, the more likely
    of the two answers, and the chance of a guess without the release).

    Args:
        history: (step, count) pairs.
        adjacency: "zero-out" (did the unit take part?) or "replace-one" (was it this unit or that one?).
        false_positive_rates: rates at which to state the true positive rate, each between 0 and 1.
        priors: priors at which to state the success of the best guess, each between 0 and 1.
        discretization: width of the grid of privacy losses.
        reconstruction_priors: priors at which to state the success of reconstruction, each between 0 and 1: the chance
            that the best guess of the unit's contents is right without the release.

    Raises:
        ValueError: a rate or a prior is not between 0 and 1, or a reconstruction prior is 0.

    >>> from dpllm.mechanism.events import Step
    >>> risk = attack_risk([(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)], discretization=1e-3)
    >>> round(risk.advantage, 2)
    0.38
    """
    _check_probabilities(*false_positive_rates, *priors, *reconstruction_priors)
    if 0 in reconstruction_priors:
        raise ValueError("a reconstruction prior must be above 0: pass the probability of guessing without the release")
    asked = (tuple(false_positive_rates), tuple(priors), tuple(reconstruction_priors))
    advantage, *bounds = _bounds(merge(history), adjacency, discretization, *asked)
    rates, success, reconstruction = (
        dict(zip(values, found, strict=True)) for values, found in zip(asked, bounds, strict=True)
    )
    return AttackRisk(adjacency, advantage, success, rates, reconstruction)


def tradeoff_curve(
    history: History,
    adjacency: str = "zero-out",
    false_positive_rates: Sequence[float] = _CURVE_RATES,
    discretization: float = DISCRETIZATION,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the trade-off curve of the best attack.

    Guarantee: each true positive rate is an upper bound, at least the false positive rate, and only slightly above
    that of `attack_risk`, which searches more finely.

    Args:
        history: (step, count) pairs.
        adjacency: "zero-out" or "replace-one".
        false_positive_rates: (n,) rates at which to state the bound, each between 0 and 1.
        discretization: width of the grid of privacy losses.

    Returns:
        False positive rates (n,) and the largest true positive rates (n,).

    Raises:
        ValueError: a rate is not between 0 and 1.

    >>> from dpllm.mechanism.events import Step
    >>> history = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]
    >>> _, found = tradeoff_curve(history, "zero-out", [0.01, 0.1], 1e-3)
    >>> found.round(2).tolist()
    [0.1, 0.39]
    """
    _check_probabilities(*false_positive_rates)
    delta_at = _delta_function(history, adjacency, discretization)
    losses = np.asarray(_CURVE_GRID)
    deltas = np.array([delta_at(loss) for loss in _CURVE_GRID])
    rates = np.asarray(false_positive_rates, dtype=np.float64)
    direct = (np.exp(losses) * rates[:, None] + deltas).min(axis=1)
    reverse = (1 + (rates[:, None] + deltas - 1) * np.exp(-losses)).min(axis=1)
    return rates, np.maximum(rates, np.minimum(1.0, np.minimum(direct, reverse)))


@lru_cache(maxsize=64)
def _bounds(
    history: History,
    adjacency: str,
    discretization: float,
    false_positive_rates: tuple[float, ...],
    priors: tuple[float, ...],
    reconstruction_priors: tuple[float, ...],
) -> tuple[float, tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the advantage and the bounds of `attack_risk`, cached for a report and its verification."""
    delta_at = _delta_function(history, adjacency, discretization)
    rates = tuple(_true_positive_rate(fpr, delta_at) for fpr in false_positive_rates)
    success = tuple(_bayes_success(prior, delta_at) for prior in priors)
    reconstruction = tuple(_true_positive_rate(prior, delta_at) for prior in reconstruction_priors)
    return delta_at(0.0), rates, success, reconstruction


def _check_probabilities(*values: float) -> None:
    for value in values:
        if not 0 <= value <= 1:
            raise ValueError(f"rates and priors must be between 0 and 1, got {value}")


def _delta_function(history: History, adjacency: str, discretization: float) -> Callable[[float], float]:
    """Return D as a cached function."""
    return cache(delta_function(history, adjacency, discretization, tilted=False))


def _true_positive_rate(fpr: float, delta_at: Callable[[float], float]) -> float:
    direct = _minimum(lambda e: math.exp(e) * fpr + delta_at(e))
    reverse = _minimum(lambda e: 1 + (fpr + delta_at(e) - 1) * math.exp(-e))
    return max(fpr, min(1.0, direct, reverse))


def _minimum(bound: Callable[[float], float]) -> float:
    """Return a value near a function's minimum; every value of the function is a valid bound.

    D is convex in exp(e), so both bounds have one minimum; if the search misses it, the bound is only looser.
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

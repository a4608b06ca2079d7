"""Compute δ, ε and μ of the Gaussian mechanism in closed form, each from the other two.

A sum that one unit changes by μ standard deviations of its noise is μ-private (Dong, Roth, Su, arXiv:1905.02383).
δ = Φ(μ/2 - ε/μ) - exp(ε) Φ(-μ/2 - ε/μ) is the smallest δ at which it is (ε, δ)-private (Balle, Wang, arXiv:1805.06530,
theorem 8).
"""

from __future__ import annotations

import math

from scipy import optimize, special

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

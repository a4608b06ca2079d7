"""Turn bounds by Rényi divergences into a distribution of privacy losses that can be composed with others.

Some events' costs are known only as Rényi divergences. They give a bound δ(ε) for every ε >= 0, in both directions of
zero-out. The true δ is a convex function of t = exp(ε), so the lower convex hull of that bound is a bound as well. A
distribution of privacy losses with exactly this hull dominates the mechanism, and can be composed with other
distributions on the same data (Zhu, Dong, Wang, arXiv:2106.08567, theorem 10).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from dpllm.mechanism import pld

WIDTH = 1e-3
"""The width of the grid for an ε of at least 0.1; a finer one changes ε by less than 1e-5."""
HIGHEST = 600.0
"""The largest ε that follows from a bound: exp of it is a float, and a larger ε protects nobody."""

_ORDER_RATIO, _MOST_ORDER = 1.2, 400_000.0

LogDelta = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps ε >= 0, (n,), to log δ."""


def grid(width: float) -> float:
    """Return the width of the grid of losses for a requested ``width``: ten times it, and at most `WIDTH` if larger.

    The loss of a bound has no noise to resolve, so a hundred widths up to ε are enough.

    >>> grid(1e-4), round(grid(0.5e-6), 9), grid(0.5)
    (0.001, 5e-06, 0.5)
    """
    return max(width, min(WIDTH, 10 * width))


def sampled_gaussian(sampling_rate: float, noise_multiplier: float, order: int) -> float:
    """Return the Rényi divergence of a Poisson sampled Gaussian sum at a whole order (arXiv:1908.10530, section 3.3).

    For high orders, at which the library takes seconds.

    >>> round(sampled_gaussian(1.0, 10.0, 4), 12)
    0.02
    """
    if sampling_rate == 1:
        return order / (2 * noise_multiplier**2)
    number = np.arange(order + 1, dtype=np.float64)
    terms = stats.binom.logpmf(number, order, sampling_rate) + number * (number - 1) / (2 * noise_multiplier**2)
    return float(special.logsumexp(terms)) / (order - 1)


def fine_orders(width: float) -> tuple[int, ...]:
    """Return whole Rényi orders for the small ε of a grid finer than `WIDTH`; none for any other grid.

    The best order for an ε at a δ is below 2 log(1/δ)/ε, and an ε has a hundred to a few hundred widths.
    """
    if width >= WIDTH:
        return ()
    highest = min(0.35 / width, _MOST_ORDER)
    return tuple(round(highest / _ORDER_RATIO**number) for number in range(20) if highest > 2 * _ORDER_RATIO**number)


def profile(orders: Sequence[float], divergences: Sequence[float]) -> LogDelta:
    """Return the function from ε >= 0 to log δ that follows from Rényi divergences (arXiv:2004.00010, prop. 12).

    Args:
        orders: α > 1.
        divergences: one for each order, finite, a bound for both directions.
    """

    def log_delta(epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.zeros_like(epsilons)
        for order, divergence in zip(orders, divergences, strict=True):
            at = (order - 1) * (divergence - epsilons + math.log1p(-1 / order)) - math.log(order)
            np.minimum(found, at, out=found)
        return found

    return log_delta


def last(log_delta: LogDelta, width: float = WIDTH) -> float:
    """Return an ε, at most 600 and at least 1,000 widths, at which δ is negligible."""
    highest = min(1.0, 1000 * width)
    while highest < HIGHEST and float(log_delta(np.array([highest]))[0]) > math.log(pld.STEP_TAIL):
        highest *= 1.1
    return min(highest, HIGHEST)


def dominating(
    log_delta: LogDelta, width: float, also: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None = None
) -> pld.LossPmf:
    """Return symmetric losses whose δ at each ε >= 0 is the lower convex hull, over exp(ε), of a bound.

    A function of t = exp(ε) that is linear between points t_i, and 1 at t = 0, is the δ of masses at log t_i: each mass
    is t_i times the change of the slope there. The distribution is the same in both directions, so the mass at -l is
    exp(-l) times that at l. The hull over all t > 0 is symmetric as well: the line that crosses t = 1 is the one
    through (-1, 1).

    Args:
        log_delta: the bound.
        width: the distance between two grid points.
        also: maps ε to a δ that is added to the bound.
    """
    furthest = last(log_delta, width)
    if float(log_delta(np.array([furthest]))[0]) >= 0:  # the bound is 1 everywhere; what remains costs no time
        return pld.LossPmf(width, 0, np.array([1e-300]), 1.0)
    count = max(2, math.ceil(furthest / width))
    epsilons = np.arange(count + 1, dtype=np.float64) * width
    deltas = np.exp(log_delta(epsilons))
    if also is not None:  # δ never increases with ε, but this bound may
        deltas = np.minimum.accumulate(np.minimum(1.0, deltas + also(epsilons)))
    knots = _hull(np.concatenate(([-1.0], np.exp(epsilons))), np.concatenate(([1.0], deltas)))
    at = knots[1:] - 1  # without the point (-1, 1)
    losses, kept = epsilons[at], deltas[at]
    gaps, falls = np.diff(losses), np.diff(kept)
    # The slopes to the right and to the left of each point, times t there.
    right = np.append(falls / np.expm1(gaps), 0.0)
    left = np.append((kept[0] - 1) / (1 + math.exp(-losses[0])), falls / -np.expm1(-gaps))
    masses, infinite = np.maximum(right - left, 0.0), float(kept[-1])
    both, above = np.zeros(2 * count + 1), at > 0
    both[count + at[above]] = masses[above]
    both[count - at[above]] = masses[above] * np.exp(-losses[above])
    both[count] = max(1 - infinite - float(both.sum()), 1e-300)
    return pld.LossPmf(width, -count, both, infinite)


def _hull(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of the points on the lower convex hull, for ascending ``x`` (Andrew's monotone chain)."""
    xs, ys = x.tolist(), y.tolist()
    kept: list[int] = []
    for number, (at, value) in enumerate(zip(xs, ys, strict=True)):
        while len(kept) > 1:
            first, second = kept[-2], kept[-1]
            rise = (ys[second] - ys[first]) / (xs[second] - xs[first])
            if rise < (value - ys[second]) / (at - xs[second]):
                break
            kept.pop()
        kept.append(number)
    return np.array(kept)

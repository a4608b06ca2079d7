"""Strategies of correlated noise: the first column of the matrix M of `dpllm.mechanism.banded`.

The planner chooses a strategy for a workload; the plan stores its numbers, and nothing is optimised again afterwards.
The guarantee needs a column of norm at most 1, which `require_column` checks; everything else only affects the amount
of noise.

* *Geometric*: c_j proportional to γ^j for j < b. Its inverse has a recursion of three terms for any b.
* *Free*: any b numbers, found by L-BFGS with the analytic gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.workload import Workload

_NORM_SLACK = 1e-12  # of the squares, which are rounded; columns of 1000 entries have errors below 1e-13
_GROWTH_SLACK = 1e-6  # of the roots of a polynomial
_TOO_LONG = 1e300  # replaces an error that overflows
_NEARLY_LEAST = 1.001
_LEAST_RATIO = 0.3
_LEAST_DIAGONAL = 1e-3


def require_norm(column: Sequence[float]) -> None:
    """Refuse a first column that would make the printed ε untrue.

    The sensitivity of the release is C times the largest column norm of M. All columns of a lower triangular Toeplitz
    matrix are shifted and truncated copies of the first one.

    Raises:
        ValueError: an entry is not a finite number, the diagonal is not above 0, or the norm exceeds 1.

    >>> require_norm([0.6, 0.8])
    """
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in column):
        raise ValueError(f"coefficients must be numbers, got {list(column)!r}")
    if not column or not all(abs(value) < math.inf for value in column) or column[0] < _LEAST_DIAGONAL:
        raise ValueError(
            f"coefficients must be finite and the first one at least {_LEAST_DIAGONAL:g}, since the noise is divided "
            f"by it, got {str(list(column))[:200]}"
        )
    norm = math.hypot(*(min(max(value, -1e9), 1e9) for value in column))
    if norm**2 > 1 + _NORM_SLACK:
        raise ValueError(
            f"coefficients have norm {norm:.9g}, but at most 1 is allowed: a unit could change the releases by more "
            "than clip_norm. Divide them by their norm"
        )


@lru_cache(maxsize=64)
def require_column(column: tuple[float, ...]) -> None:
    """Refuse what `require_norm` refuses, and a column whose noise would grow without bound.

    Raises:
        ValueError: as `require_norm`, or the entries of M⁻¹ grow exponentially with the number of steps.

    >>> require_column((0.6, 0.8))
    Traceback (most recent call last):
    ValueError: coefficients make noise that grows 1.33-fold with every step. Use decreasing coefficients, or omit \
    them, and they are computed
    """
    require_norm(column)
    if len(column) > 1 and (growth := _growth(column)) > 1 + _GROWTH_SLACK:
        raise ValueError(
            f"coefficients make noise that grows {growth:.3g}-fold with every step. Use decreasing coefficients, or "
            "omit them, and they are computed"
        )


def _growth(column: Sequence[float]) -> float:
    """Return the factor per step by which the entries of M⁻¹ grow in the long run."""
    return float(np.abs(np.roots(np.asarray(column) / column[0])).max(initial=0))


def geometric_column(bands: int, ratio: float) -> tuple[float, ...]:
    """Return c_j proportional to γ^j for j < b, of norm 1.

    >>> [round(value, 4) for value in geometric_column(3, 0.5)]
    [0.8729, 0.4364, 0.2182]
    """
    powers = [ratio**j for j in range(bands)]
    norm = math.sqrt(math.fsum(value * value for value in powers))
    return tuple(value / norm for value in powers)


def best_ratio(bands: int, workload: Workload) -> float:
    """Return the smallest γ, in steps of 0.001, whose error is within 0.1 % of the minimum over all γ up to 1.

    The error is nearly flat there, while the variance of a single step's noise grows like 1/(1 - γ). Rounding also
    makes the number equal on all machines.

    Args:
        bands: b >= 2.
        workload: the noise to be minimised.
    """
    from scipy import optimize

    def error(ratio: float) -> float:
        return workload.error(geometric_column(bands, ratio))

    found = optimize.minimize_scalar(error, bounds=(_LEAST_RATIO, 1.0), method="bounded", options={"xatol": 1e-5})
    enough = _NEARLY_LEAST * min(float(found.fun), error(1.0))
    low, high = math.floor(1000 * _LEAST_RATIO), 1000  # thousandths: too much error or the bound, enough
    best = min(1000, max(low, math.ceil(1000 * float(found.x))))
    high = best if error(best / 1000) <= enough else high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if error(middle / 1000) <= enough else (middle, high)
    return high / 1000


def free_column(bands: int, workload: Workload) -> tuple[float, ...]:
    """Return the first column of norm 1, with b entries, that minimises the error for a workload.

    With u = M⁻¹ r (r the response, last step first) the square of the error is ‖c‖² Σ_j weight_j u_j². It does not
    depend on the scale of c, so c_0 = 1 is fixed and the others are optimised, starting from the coefficients of
    (1 - x)^(-1/2), the best ones for prefix sums without a bound on the bands (Fichtenberger et al. 2022,
    arXiv:2202.11205), and for released weights also from the geometric column.

    Args:
        bands: b. Entries beyond the number of steps are 0.
        workload: the noise to be minimised.

    >>> [round(value, 4) for value in free_column(2, Workload.prefix_sums(410))]
    [0.7643, 0.6449]
    """
    num_steps = workload.num_steps
    if bands > num_steps:
        return (*free_column(num_steps, workload), *[0.0] * (bands - num_steps))
    if bands == 1:
        return (1.0,)
    from scipy import optimize, signal  # takes as long to load as the command line's whole help

    weight, response = workload.weights, workload.reversed

    @np.errstate(over="ignore", invalid="ignore")  # of search steps that are too long and are shortened
    def loss(rest: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        c = np.concatenate(([1.0], rest))
        u = signal.lfilter([1.0], c, response)
        error, square = float(weight @ u**2), float(c @ c)
        if not math.isfinite(error):
            return _TOO_LONG, np.zeros(bands - 1)
        adjoint = signal.lfilter([1.0], c, (2 * weight * u)[::-1])[::-1]
        slope = np.array([-float(adjoint[k:] @ u[: num_steps - k]) for k in range(1, bands)])
        return square * error, 2 * rest * error + square * slope

    starts = [np.cumprod([(2 * k - 1) / (2 * k) for k in range(1, bands)])]
    if not workload.over_time:
        starts.append(best_ratio(bands, workload) ** np.arange(1.0, bands))
    options = {"maxiter": 2000, "gtol": 1e-12}
    found = [optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    c = np.concatenate(([1.0], min(found, key=lambda one: float(one.fun)).x))
    return tuple(float(value) for value in c / np.linalg.norm(c))


def rounded(column: Sequence[float]) -> tuple[float, ...]:
    """Return the entries with eight decimals, rounded towards 0, so that the norm does not grow.

    >>> rounded([0.123456789, -0.123456789])
    (0.12345678, -0.12345678)
    """
    return tuple(math.trunc(value * 1e8) / 1e8 for value in column)


@lru_cache(maxsize=64)
def coefficients(bands: int, num_steps: int) -> tuple[float, ...]:
    """Return the free column for prefix sums, for noise with only its bands given.

    Args:
        bands: b.
        num_steps: T.

    >>> [round(value, 4) for value in coefficients(2, 410)]
    [0.7643, 0.6449]
    """
    return free_column(bands, Workload.prefix_sums(num_steps))


@lru_cache(maxsize=64)
def inverse(column: tuple[float, ...], num_steps: int) -> NDArray[np.float64]:
    """Return the first column of M⁻¹, (T,)."""
    from scipy import signal

    return np.asarray(signal.lfilter([1.0], column[:num_steps], np.eye(1, num_steps)[0]))

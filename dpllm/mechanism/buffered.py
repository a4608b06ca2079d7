"""Buffered Toeplitz strategies: the numbers of the noise of `dpllm.mechanism.blt`, their inverse and sensitivity.

The planner computes the numbers for a workload, and the plan stores them. The strategy is the lower triangular Toeplitz
matrix M = s C, where the first column of C is

    c_0 = 1,    c_j = Σ_i ω_i θ_i^(j-1)    (j >= 1; d buffers with decay θ_i and weight ω_i)

(Dvijotham et al. 2024, arXiv:2404.16706; McMahan et al. 2024, arXiv:2408.08868). Products with C and with its inverse
need d numbers of memory, for any number of steps. The scale s makes the sensitivity of a complete run 1.

**The conditions.** 0 <= θ_i < 1, 0 <= ω_i, and Σ ω_i <= 1. Then 1 = c_0 >= c_1 >= c_2 >= … >= 0: a sum of decreasing,
nonnegative sequences decreases, and c_1 = Σ ω_i. `require_numbers` refuses other numbers. The conditions also bound the
noise: the inverse of C has the decays of diag(θ) - √ω√ωᵀ, a symmetric matrix with eigenvalues in [-1, 1).

**The sensitivity.** A unit enters steps t_1 < … < t_m, with m <= k and t_(i+1) - t_i >= b, and changes the sum of step
t_i by g_i, ‖g_i‖ <= 1. The square of the change of C G over n steps is Σ_ij ⟨C e_(t_i), C e_(t_j)⟩⟨g_i, g_j⟩. Inner
products of columns are sums of products of nonnegative entries, so it is largest where all g_i are equal, with norm 1.
For s <= t the inner product of the columns s and t is Σ_(u=0)^(n-1-t) c_u c_(u+t-s). It decreases in t (fewer terms,
none negative) and in t - s (c decreases). Since t_i >= (i-1) b and t_j - t_i >= (j-i) b, no pair of columns has a
larger inner product than the columns (i-1) b and (j-1) b, and another participation only adds. So the sensitivity is

    ‖Σ_(i<k) C e_(ib)‖, over the columns ib < n,

which is attained. This is theorem 2 of Kalinin and Lampert 2024 (arXiv:2405.13763), here for at most k participations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.workload import Workload

MAX_BUFFERS = 4
Numbers = tuple[float, ...]
_Array = NDArray[np.float64]
_EPS = float(np.finfo(np.float64).eps)
_DIGITS = 10
_NEARLY_LEAST = 1.02
_FOR_EVER, _LITTLE = 20.0, 0.01  # of a start: the logit of a decay that hardly forgets, and its weight


def require_numbers(decays: Sequence[float], weights: Sequence[float]) -> None:
    """Refuse numbers for which the sensitivity would not be that of the worst participation.

    Raises:
        ValueError: there are not 1 to 4 decays with one weight each, or they violate the conditions above.

    >>> require_numbers((0.99, 0.7), (0.1, 0.4))
    """
    for name, values in (("decays", decays), ("weights", weights)):
        wrong = any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values)
        if wrong or not 1 <= len(values) <= MAX_BUFFERS:
            raise ValueError(f"noise.{name} must be a list of 1 to {MAX_BUFFERS} numbers, got {list(values)!r}")
    if len(decays) != len(weights):
        raise ValueError(f"noise has {len(decays)} decays but {len(weights)} weights: give one weight per decay")
    if not all(0 <= value < 1 for value in decays):
        raise ValueError(f"noise.decays must be at least 0 and below 1, got {list(decays)!r}")
    if not all(0 <= value <= 1 for value in weights) or math.fsum(weights) > 1:
        raise ValueError(
            f"noise.weights must be at least 0, with a sum of at most 1, got {list(weights)!r}; otherwise a unit's "
            "worst participations are unknown. Divide them by their sum, or omit decays and weights"
        )


def inverse_numbers(decays: Sequence[float] | _Array, weights: Sequence[float] | _Array) -> tuple[_Array, _Array]:
    """Return decays and weights (d,) of C⁻¹, whose first column is 1 and then -Σ_i ω_i θ_i^(j-1).

    C⁻¹ has the states of C, fed by its own output, so its matrix is diag(θ) - 1ωᵀ, which is similar to the symmetric
    diag(θ) - √ω√ωᵀ. With its eigenvectors v_i the weights are (v_iᵀ√ω)² >= 0.

    >>> [value.round(3).tolist() for value in inverse_numbers([0.9], [0.1])]
    [[0.8], [0.1]]
    """
    root = np.sqrt(np.asarray(weights, dtype=np.float64))
    values, vectors = np.linalg.eigh(np.diag(np.asarray(decays, dtype=np.float64)) - np.outer(root, root))
    return values, (vectors.T @ root) ** 2


def _filtered(decay: float, values: _Array) -> _Array:
    """Return Σ_(j>=1) θ^(j-1) x_(t-j) for each step t: a buffer, before the step."""
    from scipy import signal  # takes as long to load as the command line's whole help

    return np.asarray(signal.lfilter([0.0, 1.0], [1.0, -decay], values))


def product(decays: Sequence[float] | _Array, weights: Sequence[float] | _Array, values: _Array) -> _Array:
    """Return C x, (T,)."""
    parts = (weight * _filtered(decay, values) for decay, weight in zip(decays, weights, strict=True))
    return np.asarray(values + sum(parts))


def solution(decays: Sequence[float], weights: Sequence[float], values: _Array) -> _Array:
    """Return C⁻¹ x, (T,)."""
    return product(*_negated(inverse_numbers(decays, weights)), values)


def _negated(numbers: tuple[_Array, _Array]) -> tuple[_Array, _Array]:
    return numbers[0], -numbers[1]


@lru_cache(maxsize=4096)
def sensitivity(decays: Numbers, weights: Numbers, num_steps: int, separation: int, participations: int) -> float:
    """Return ‖Σ_(i<k) C e_(ib)‖ over n steps, the largest change by one unit in clip norms; rounded up.

    All sums have nonnegative terms, so each entry is within a factor 1 ± 2n eps of its true value.

    Args:
        decays: θ.
        weights: ω.
        num_steps: n.
        separation: b, the minimal distance between two steps of a unit.
        participations: k, the maximal number of steps of a unit.

    >>> round(sensitivity((0.5,), (0.0,), num_steps=9, separation=3, participations=3), 9)
    1.732050808
    """
    change = product(decays, weights, _visits(num_steps, separation, participations))
    return math.sqrt(float(np.square(change).sum())) * (1 + 8 * num_steps * _EPS)


def _visits(num_steps: int, separation: int, participations: int) -> _Array:
    """Return 1 in the steps 0, b, 2b, …, of which there are at most k, and 0 in all other steps."""
    visits = np.zeros(num_steps)
    visits[: separation * participations : separation] = 1.0
    return visits


@lru_cache(maxsize=64)
def variances(decays: Numbers, weights: Numbers, num_steps: int) -> _Array:
    """Return the squared norms of the rows of C⁻¹, (T,)."""
    impulse = np.zeros(num_steps)
    impulse[0] = 1.0
    return np.asarray(np.cumsum(np.square(solution(decays, weights, impulse))))


def error(decays: Sequence[float], weights: Sequence[float], workload: Workload) -> float:
    """Return ‖wᵀ C⁻¹‖, as `Workload.error` does for a column, in time proportional to T."""
    return math.sqrt(float(workload.weights @ solution(decays, weights, workload.reversed) ** 2))


def best_numbers(
    buffers: int | None, workload: Workload, separation: int, participations: int, calm: float = 0.0
) -> tuple[Numbers, Numbers]:
    """Return the decays and weights that minimise error times sensitivity, found by L-BFGS, with ten decimals.

    The error is nearly flat around its minimum, while the noise of single steps is not: with momentum it can be
    several times as large at 2 % above the minimal error. So it enters the objective too, to the power ``calm``.

    Args:
        buffers: d; None: the fewest, up to 4, whose product is within 2 % of the minimum.
        workload: the noise to be minimised.
        separation: b.
        participations: k in all T steps.
        calm: the power of the root mean square of single steps' noise.
    """
    if buffers is not None:
        return _optimised(buffers, workload, separation, participations, calm)
    found = [_optimised(number, workload, separation, participations, calm) for number in range(1, MAX_BUFFERS + 1)]
    losses = [
        error(*one, workload) * sensitivity(*one, workload.num_steps, separation, participations) for one in found
    ]
    return next(one for one, loss in zip(found, losses, strict=True) if loss <= _NEARLY_LEAST * min(losses))


def _optimised(
    buffers: int, workload: Workload, separation: int, participations: int, calm: float
) -> tuple[Numbers, Numbers]:
    from scipy import optimize

    visits = _visits(workload.num_steps, separation, participations)

    def loss(free: _Array) -> tuple[float, _Array]:
        return _loss(free, workload, visits, calm)

    options = {"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9}
    steps = workload.num_steps
    starts = [_start(buffers, longest) for longest in sorted({steps, min(steps, 4 * separation)})]
    if buffers > 1:
        times, powers = np.split(_start(buffers - 1, min(steps, 4 * separation)), 2)
        starts.append(np.concatenate((times, [_FOR_EVER], powers, [math.log(_LITTLE)])))
    found = [optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options) for start in starts]
    decays, weights = _numbers(min(found, key=lambda one: float(one.fun)).x)
    order = np.argsort(-decays)
    return _cut(decays[order]), _cut(weights[order])


def _start(buffers: int, longest: int) -> _Array:
    """Return the free numbers of buffers with memories between 1 step and ``longest``, evenly spaced in logarithm.

    Their weights decrease with the root of that time, as in (1 - x)^(-1/2), the best strategy for prefix sums and one
    participation (Fichtenberger et al. 2022, arXiv:2202.11205), and their sum is c_1 = 1/2 as there.
    """
    times = 1.5 + (0.5 * longest) ** ((np.arange(buffers) + 0.5) / buffers)
    weights = 0.5 * times**-0.5 / (times**-0.5).sum()
    return np.concatenate((np.log(times - 1), np.log(weights / 0.5)))


def _numbers(free: _Array) -> tuple[_Array, _Array]:
    """Return decays and weights that satisfy the conditions, from unbounded numbers."""
    times, powers = np.split(free, 2)
    powers = np.exp(np.clip(powers, -60, 60))
    return 1 / (1 + np.exp(-np.clip(times, -60, 30))), powers / (1 + powers.sum())


def _loss(free: _Array, workload: Workload, visits: _Array, calm: float) -> tuple[float, _Array]:
    """Return log(error² sensitivity²), plus ``calm`` times the same for single steps, and its slope, (2d,).

    The noise of single steps is the error of a different workload: of the impulse, whose entry j is in T - j of T
    steps. With u = C⁻¹ r and a = C⁻ᵀ (weight · u), the slope of the squared error along a change D of C is -2 aᵀ D u.
    Along ω_i, D is the filter of buffer i, and along θ_i it is ω_i times that filter applied twice.
    """
    decays, weights = _numbers(free)
    back, num_steps = _negated(inverse_numbers(decays, weights)), workload.num_steps
    parts = [(1.0, workload.weights, workload.reversed)]
    if calm:
        parts.append((calm, 1 - np.arange(num_steps) / num_steps, np.eye(1, num_steps)[0]))
    value, slope_decays, slope_weights = 0.0, np.zeros_like(decays), np.zeros_like(weights)
    for power, share, response in parts:
        u = product(*back, response)
        a = product(*back, (share * u)[::-1])[::-1]
        square = float(u @ (share * u))
        value += power * math.log(square)
        _add_slopes(slope_decays, slope_weights, decays, -2 * power / square * a, u)
    change = product(decays, weights, visits)
    square = float(change @ change)
    value += (1 + calm) * math.log(square)
    _add_slopes(slope_decays, slope_weights, decays, 2 * (1 + calm) / square * change, visits)
    slopes = (
        weights * slope_decays * decays * (1 - decays),
        weights * (slope_weights - float(weights @ slope_weights)),
    )
    return value, np.concatenate(slopes)


def _add_slopes(slope_decays: _Array, slope_weights: _Array, decays: _Array, to: _Array, of: _Array) -> None:
    """Add the slopes of toᵀ C of along each decay (without its weight) and along each weight."""
    for i, decay in enumerate(decays):
        once = _filtered(decay, of)
        slope_weights[i] += float(to @ once)
        slope_decays[i] += float(to @ _filtered(decay, once))


def _cut(values: _Array) -> Numbers:
    return tuple(math.trunc(float(value) * 10**_DIGITS) / 10**_DIGITS for value in values)


def scale_of(decays: Numbers, weights: Numbers, num_steps: int, separation: int, participations: int) -> float:
    """Return s, for which the sensitivity of a complete run is at most 1, truncated to ten decimals."""
    (scale,) = _cut(np.asarray([1 / sensitivity(decays, weights, num_steps, separation, participations)]))
    return scale

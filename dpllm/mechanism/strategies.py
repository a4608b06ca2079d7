"""Strategies of correlated noise: the first column of the matrix M of `dpllm.mechanism.banded`.

The planner chooses a strategy for a workload; the plan stores its numbers, and nothing is optimised again afterwards.
The guarantee needs a column of norm at most 1, which `require_column` checks; everything else only affects the amount
of noise.

* *Geometric*: c_j proportional to γ^j for j < b. Its inverse has a recursion of three terms for any b.
* *Free*: any b numbers, found by L-BFGS with the analytic gradient.

A `Workload` is the linear map by which each step's noise reaches the released weights. Training makes it of plain
numbers from optimizer, schedule and averaging. An optimizer with momentum adds to the weights θ in step t

    θ_t+1 = θ_t - r_t m_t,    m_t = β m_t-1 + (1 - β) g_t    (divided by 1 - β^(t+1) with bias correction),

with the learning rate r_t and the noisy gradient g_t. The released weights are the last θ, or an average Σ_t a_t θ_t+1.
Both are linear in the noise of the steps. The response w_t is the factor of the noise of step t in the released
weights. An optimizer that divides by a second moment scales the noise further; this factor is assumed to be equal in
all steps. Curvature of the loss and weight decay, which reduce early noise, are ignored.

`KnownNoise` is the variance of the noise in a run's gradients, which an optimizer can subtract
(`dpllm.training.corrected_adamw`). Only public constants enter, so this is post-processing, and ε does not depend on
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.parts import Mechanism


@dataclass(frozen=True)
class Workload:
    """The response of the released weights, or the prefix sums of the noise.

    Raises:
        ValueError: there is no step, a number is not finite, or all are 0.
    """

    response: tuple[float, ...]
    """(T,) w: the factor of each step's noise in the released weights, in units of the largest learning rate."""
    over_time: bool = False
    """Whether all T prefix sums count, by their mean square, instead of the last sum; w is then 1 in every step."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.response or not all(math.isfinite(value) for value in self.response) or not any(self.response):
            raise ValueError("a workload needs the response of at least one step: finite numbers, not all 0")
        if self.over_time and set(self.response) != {1.0}:
            raise ValueError("over_time needs a response of 1 in every step: use Workload.prefix_sums")

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.response)

    @classmethod
    def prefix_sums(cls, num_steps: int) -> Workload:
        """Return the workload of a run of which only the number of steps is known: sums of equal steps."""
        return cls((1.0,) * num_steps, over_time=True)

    @classmethod
    def released(
        cls,
        rates: Sequence[float],
        momentum: float = 0.0,
        *,
        bias_correction: bool = False,
        averaging: Sequence[float] | None = None,
    ) -> Workload:
        """Return the workload of released weights.

        If the response is 0 in every step (no step has a learning rate), the prefix sums are returned.

        Args:
            rates: (T,) r, the learning rate of each step; only their ratios count.
            momentum: β of the first moment, 0 <= β < 1.
            bias_correction: whether the first moment is divided by 1 - β^(t+1), as Adam does.
            averaging: (T,) a, the share of the weights after each step in the average; None: the last weights are
                released.

        Raises:
            ValueError: there is no step, a number is out of range, or the shares have a different number of steps.

        >>> Workload.released([2, 2, 1]).response
        (1.0, 1.0, 0.5)
        >>> [round(value, 3) for value in Workload.released([1, 1, 1], momentum=0.5).response]
        [0.875, 0.75, 0.5]
        """
        rate = np.asarray(rates, dtype=np.float64)
        if rate.ndim != 1 or rate.size < 1 or not np.isfinite(rate).all() or (rate < 0).any():
            raise ValueError("rates must be finite and at least 0, with one for each step, and must not be empty")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")
        share = np.zeros(rate.size)
        share[-1] = 1.0
        if averaging is not None:
            share = np.asarray(averaging, dtype=np.float64)
            if share.shape != rate.shape or not np.isfinite(share).all() or (share < 0).any():
                raise ValueError(f"averaging needs a finite share of at least 0 for each of the {rate.size} steps")
        largest = rate.max()
        if largest == 0 or not share.any():
            return cls.prefix_sums(rate.size)
        # An update of step t is in all later weights. Its noise enters through the first moments of all later steps.
        update = rate / largest * np.cumsum(share[::-1])[::-1]
        if bias_correction:
            update /= 1 - momentum ** np.arange(1, rate.size + 1)
        response, later = np.empty(rate.size), 0.0
        for step in range(rate.size - 1, -1, -1):
            later = (1 - momentum) * float(update[step]) + momentum * later
            response[step] = later
        return cls(tuple(response.tolist())) if response.any() else cls.prefix_sums(rate.size)

    def error(self, column: Sequence[float]) -> float:
        """Return the standard deviation of the noise in the released weights, divided by σC and the learning rate.

        This is ‖wᵀ M⁻¹‖ for a lower triangular Toeplitz matrix M; for prefix sums, the root of their mean square.

        Args:
            column: the first column of M, from its diagonal downwards; all other entries are 0.

        >>> round(Workload.prefix_sums(410).error([1.0]), 3)
        14.335
        """
        from scipy import signal  # takes as long to load as the command line's whole help

        filtered = signal.lfilter([1.0], np.asarray(column, dtype=np.float64)[: self.num_steps], self.reversed)
        return math.sqrt(float(self.weights @ filtered**2))

    @property
    def reversed(self) -> NDArray[np.float64]:
        """(T,) the response, last step first: ‖wᵀ M⁻¹‖ is the norm of this sequence filtered by M⁻¹."""
        return np.asarray(self.response[::-1], dtype=np.float64)

    @property
    def weights(self) -> NDArray[np.float64]:
        """(T,) the weight of each square in the sum: 1, or the share of prefix sums that have the entry."""
        steps = np.arange(self.num_steps)
        return 1 - steps / self.num_steps if self.over_time else np.ones(self.num_steps)


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

    >>> [round(value, 4) for value in coefficients(2, 410)]
    [0.7643, 0.6449]
    """
    return free_column(bands, Workload.prefix_sums(num_steps))


@lru_cache(maxsize=64)
def inverse(column: tuple[float, ...], num_steps: int) -> NDArray[np.float64]:
    """Return the first column of M⁻¹, (T,)."""
    from scipy import signal

    return np.asarray(signal.lfilter([1.0], column[:num_steps], np.eye(1, num_steps)[0]))


@dataclass(frozen=True)
class KnownNoise:
    """The noise in an entry of the private gradients: of step t, stddev · Σ_s response[t - s] z_s with z_s ~ N(0, 1).

    Steps are counted from a start or a resume: both begin with fresh noise.

    Attributes:
        response: (T,) how the noise drawn in one step enters the gradients of this step and the following ones.
        stddev: σC/b, in units of the gradient that reaches the optimizer; 0 without noise.
    """

    response: tuple[float, ...]
    stddev: float

    @classmethod
    def of(cls, mechanism: Mechanism, num_steps: int) -> KnownNoise:
        """Return the noise of a run's gradients, which are divided by the expected batch size."""
        response = inverse(mechanism.noise.column(num_steps), num_steps)
        return cls(tuple(response.tolist()), mechanism.noise_stddev / mechanism.draw.expected_batch_size)

    def variances(self) -> NDArray[np.float64]:
        """Return the (T,) variance in each step's gradient.

        >>> KnownNoise((1.0, -0.5, 0.0), 2.0).variances().tolist()
        [4.0, 5.0, 5.0]
        """
        return np.asarray(self.stddev**2 * np.cumsum(np.square(self.response)))

    def averaged(self, decay: float) -> KnownNoise:
        """Return the noise in m_t = decay · m_t-1 + (1 - decay) · g_t, which begins at 0.

        >>> KnownNoise((1.0, 0.0, 0.0), 1.0).averaged(0.5).response
        (0.5, 0.25, 0.125)
        """
        from scipy import signal  # takes as long to load as the command line's whole help

        response = signal.lfilter([1 - decay], [1.0, -decay], self.response)
        return KnownNoise(tuple(response.tolist()), self.stddev)

    def averaged_share(self, decay: float) -> float:
        """Return the ratio of the noise in `averaged` to that in the gradients: root mean squares over the steps.

        >>> round(KnownNoise((1.0,) + (0.0,) * 9999, 3.0).averaged_share(0.9), 3)  # nearly sqrt(0.1 / 1.9)
        0.229
        """
        both = (KnownNoise(one.response, 1.0).variances() for one in (self.averaged(decay), self))
        averaged, own = (float(np.mean(variances)) for variances in both)
        return float(np.sqrt(averaged / own))

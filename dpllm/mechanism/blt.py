"""Noise that is correlated over steps for units that cannot be sampled: buffered linear Toeplitz matrices (BLT).

The release of step t is g_t + σC (M⁻¹z)_t with independent z and the strategy M = sC.
The units are visited in a fixed order (`dpllm.mechanism.sampling`). Sampling adds no privacy, so the order may be
public. This is DP-FTRL with BLT noise (Kairouz et al. 2021, arXiv:2103.00039; Dvijotham et al. 2024, arXiv:2404.16706;
McMahan et al. 2024, arXiv:2408.08868).

**Why the charge is right.** All n steps from a start are one Gaussian release of M G, where the rows of G are the sums
of the steps: the release is M⁻¹(M G + σC Z), and M⁻¹ is public. One unit changes M G by at most s(n)·C, the sensitivity
below, which is exact for at most k steps of a unit that are at least b apart. So the n steps cost one Gaussian sum over
all units with noise multiplier σ / s(n). Gradients may depend on earlier releases, because M is lower triangular and
the noise is Gaussian (Denisov et al. 2022, arXiv:2202.08312, theorem 2.1). Under replace-one a unit keeps its places
and changes each sum by up to 2C, so the noise multiplier is halved.

* *A run that ends early*: s(n) of the n drawn steps. It increases with n, and s(T) of a complete run is 1.
* *A resume*: a fresh order and fresh noise. A unit may take part in all its steps before and all its steps after the
  resume, so the two starts are two Gaussian releases, which compose: 1/σ² Σ s(n_i)². This holds for any two orders. A
  run of one pass that is resumed in the middle therefore costs nearly as much as two runs. Between two passes a resume
  may cost less than going on, since the unit's steps no longer add up. Then the plan's ε is stated, because the
  releases may have caused the resume (`dpllm.privacy.accounting.of_starts`).
* *Steps that were drawn but not taken, or lost in a crash*: they were drawn, so they count in n. A skipped draw still
  has its row of noise, so that later rows are those of M⁻¹.

The noise state, d tensors of the gradient's size, is kept only in memory: it would allow a reader to subtract the noise
from later updates.

**The strategy.** The planner computes its numbers for a workload, and the plan stores them. It is the lower triangular
Toeplitz matrix M = s C, where the first column of C is

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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.events import Event, EventWords, Numbers, Round, Step
from dpllm.mechanism.limits import MAX_NOISE, MIN_NOISE
from dpllm.mechanism.noise import CorrelatedStream
from dpllm.mechanism.parts import Draw, NoiseStream, Normals
from dpllm.mechanism.sampling import FixedOrderSampler
from dpllm.mechanism.strategies import Workload

if TYPE_CHECKING:
    from torch import Tensor


MAX_BUFFERS = 4
_Floats = tuple[float, ...]
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
def sensitivity(decays: _Floats, weights: _Floats, num_steps: int, separation: int, participations: int) -> float:
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
def variances(decays: _Floats, weights: _Floats, num_steps: int) -> _Array:
    """Return the squared norms of the rows of C⁻¹, (T,)."""
    impulse = np.zeros(num_steps)
    impulse[0] = 1.0
    return np.asarray(np.cumsum(np.square(solution(decays, weights, impulse))))


def error(decays: Sequence[float], weights: Sequence[float], workload: Workload) -> float:
    """Return ‖wᵀ C⁻¹‖, as `Workload.error` does for a column, in time proportional to T."""
    return math.sqrt(float(workload.weights @ solution(decays, weights, workload.reversed) ** 2))


def best_numbers(
    buffers: int | None, workload: Workload, separation: int, participations: int, calm: float = 0.0
) -> tuple[_Floats, _Floats]:
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
) -> tuple[_Floats, _Floats]:
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


def _cut(values: _Array) -> _Floats:
    return tuple(math.trunc(float(value) * 10**_DIGITS) / 10**_DIGITS for value in values)


def scale_of(decays: _Floats, weights: _Floats, num_steps: int, separation: int, participations: int) -> float:
    """Return s, for which the sensitivity of a complete run is at most 1, truncated to ten decimals."""
    (scale,) = _cut(np.asarray([1 / sensitivity(decays, weights, num_steps, separation, participations)]))
    return scale


_LEAST_SCALE = 1e-9
_MOST_STEPS = 200_000
_CALM = 0.05
"""With it the noise of the released weights is at most 2 % above the minimum, and that of single steps down to 0.4 of
it (E2E: N = 42 061, B = 1024, T = 41 and 410; prefix sums, and momentum 0.9 with linear decay or a warm-up)."""


def _require_scale(scale: float) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not _LEAST_SCALE <= scale <= 1:
        raise ValueError(f"noise.scale must be at least {_LEAST_SCALE:g} and at most 1, got {scale!r}")


def _tuple_of(name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of numbers, got {value!r}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class BltStep(Numbers):
    """A step with BLT noise over the next B units of a fixed order of all N.

    Raises:
        ValueError: a field is out of range, or the strategy violates a condition of its sensitivity.
    """

    kind: ClassVar[str] = "blt"
    sampling_rate: float = 1.0
    """1: sampling adds no privacy."""
    batch_size: int
    """B, the units in every step."""
    decays: tuple[float, ...]
    """θ."""
    weights: tuple[float, ...]
    """ω."""
    scale: float
    """s."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        for name in ("num_units", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            object.__setattr__(self, name, int(value))
        super().__post_init__()
        if self.sampling_rate != 1:
            raise ValueError(
                f"sampling_rate is {self.sampling_rate:g}, but the accounting of BLT noise gains nothing from "
                "sampling, since a unit's steps are correlated. Omit it, or use noise=banded, whose groups are sampled"
            )
        for name in ("decays", "weights"):
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name)))
        require_numbers(self.decays, self.weights)
        _require_scale(self.scale)
        _ = self._sampler  # checks its fields

    @property
    def _sampler(self) -> FixedOrderSampler:
        assert self.num_units is not None
        return FixedOrderSampler(self.num_units, self.batch_size)

    @property
    def restarts(self) -> bool:
        """A resume has its own cost: it begins a new order and new noise."""
        return True

    def sensitivity(self, num_steps: int) -> float:
        """Return s(n), the largest change of M G by one unit over n steps from a start, in clip norms."""
        sampler = self._sampler
        visits = sampler.participations(num_steps)
        return self.scale * sensitivity(self.decays, self.weights, num_steps, sampler.separation, visits)

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the Gaussian sum over all units that all these steps together cost."""
        sigma = min(self.noise_multiplier / self.sensitivity(num_steps), MAX_NOISE)
        return Step(sampling_rate=1.0, noise_multiplier=sigma if sigma >= MIN_NOISE else 0.0).rounds(1)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        sampler = self._sampler
        return EventWords(
            sampling=f"none: a fixed order, {self.batch_size} units in each step, a unit at least "
            f"{sampler.separation} steps apart",
            accounted_as="a Gaussian sum over all units, once for all steps since a start: the noise follows a "
            "buffered Toeplitz matrix (arXiv:2404.16706, arXiv:2408.08868). Its sensitivity is exact for a unit's "
            f"steps, which are at least {sampler.separation} apart (arXiv:2405.13763, theorem 2). Sampling adds no "
            "privacy",
            options="",
            is_sampled=False,
        )


@dataclass(frozen=True)
class BltNoise:
    """BLT noise over units in a fixed order.

    A recipe names the number of buffers. `candidates` computes the noise's numbers, which the plan stores.

    Attributes:
        buffers: d, from 1 to 4, or "auto", the fewest whose noise is within 2 % of the minimum.
        decays: θ, each at least 0 and below 1; None: not yet chosen.
        weights: ω, one per decay, at least 0, with a sum of at most 1; None: not yet chosen.
        scale: s, with which a complete run has sensitivity 1, so that it costs one Gaussian sum with noise multiplier
            σ; None: not yet chosen. A different s changes the meaning of σ, and ε is computed for it.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    kind: ClassVar[str] = "blt"
    wants_total: ClassVar[bool] = False
    is_sampled: ClassVar[bool] = False
    only_discrete: ClassVar[bool] = False
    max_entries: ClassVar[int | None] = None
    buffers: int | Literal["auto"] = "auto"
    decays: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers, above all the conditions of the sensitivity."""
        number = self.buffers
        wrong = isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_BUFFERS
        if number != "auto" and wrong:
            raise ValueError(f"noise.buffers must be a whole number from 1 to {MAX_BUFFERS}, or auto, got {number!r}")
        if (self.decays is None) != (self.weights is None):
            raise ValueError("noise.decays and noise.weights belong together: give both or neither")
        if self.decays is not None and self.weights is not None:
            for name in ("decays", "weights"):
                object.__setattr__(self, name, _tuple_of(f"noise.{name}", getattr(self, name)))
            require_numbers(self.decays, self.weights)
            if number != len(self.decays):
                raise ValueError(
                    f"noise.buffers is {number}, but there are {len(self.decays)} decays: write buffers: "
                    f"{len(self.decays)}"
                )
        if self.scale is not None:
            if self.decays is None:
                raise ValueError("noise.scale needs decays and weights: add them, or omit scale")
            _require_scale(self.scale)

    @property
    def _numbers(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.decays is None or self.weights is None:
            raise ValueError(
                "noise=blt has no decays and weights yet: create the plan with make_plan, which computes them"
            )
        return self.decays, self.weights

    @property
    def _scale(self) -> float:
        if self.scale is None:
            raise ValueError("noise=blt has no scale yet: create the plan with make_plan, which computes it")
        return self.scale

    def candidates(self, draw: Draw, workload: Workload) -> list[BltNoise]:
        """Return the noise with all its numbers.

        Raises:
            ValueError: single rows are drawn, or numbers would be computed for too many steps.
        """
        if self.scale is not None:
            return [self]
        sampler, steps = self.sampler(draw), workload.num_steps
        visits = sampler.participations(steps)
        if self.decays is None or self.weights is None:
            if steps > _MOST_STEPS:
                raise ValueError(
                    f"noise=blt computes its numbers for at most {_MOST_STEPS:,} steps, but the run has {steps:,}, "
                    "which would take minutes. Use fewer steps and a larger batch, or set noise.decays and "
                    "noise.weights, for instance from a shorter run"
                )
            buffers = None if self.buffers == "auto" else self.buffers
            decays, weights = best_numbers(buffers, workload, sampler.separation, visits, _CALM)
        else:
            decays, weights = self.decays, self.weights
        scale = scale_of(decays, weights, steps, sampler.separation, visits)
        return [BltNoise(len(decays), decays, weights, scale)]

    def column(self, num_steps: int) -> tuple[float, ...]:
        """Return the first column of M, with T entries."""
        impulse = np.eye(1, num_steps)[0]
        return tuple((self._scale * product(*self._numbers, impulse)).tolist())

    def separation(self, draw: Draw) -> int:
        """Return ⌊N/B⌋."""
        return self.sampler(draw).separation

    def error(self, workload: Workload) -> float:
        """Return the standard deviation of the noise in the released weights, over σC and the learning rate."""
        return error(*self._numbers, workload) / self._scale

    @property
    def tensors_kept(self) -> int:
        """The number of gradient-sized tensors that all processes together keep between steps ("auto": at most)."""
        return MAX_BUFFERS if self.buffers == "auto" else self.buffers

    @property
    def unit_groups(self) -> int:
        """One: there is one order of all units."""
        return 1

    def max_batch_size(self, draw: Draw) -> int:
        """Return B: every step has exactly B units."""
        return self.sampler(draw).batch_size

    def sampler(self, draw: Draw) -> FixedOrderSampler:
        """Return the fixed order.

        Raises:
            ValueError: single rows are drawn.
        """
        if draw.rows_per_unit is not None:
            raise ValueError(
                'noise="blt" has no accounting where single rows are drawn (sampling="example"): omit sampling, '
                "and each user is visited as a whole"
            )
        return FixedOrderSampler(draw.num_units, draw.expected_batch_size)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step of the fixed order.

        Raises:
            ValueError: single rows are drawn, or the numbers are not chosen.
        """
        sampler, (decays, weights) = self.sampler(draw), self._numbers
        return BltStep(
            num_units=sampler.num_units,
            batch_size=sampler.batch_size,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            decays=decays,
            weights=weights,
            scale=self._scale,
        )

    def variance(self, step: int, num_steps: int) -> float:
        """Return the square of the norm of row t of M⁻¹."""
        return float(variances(*self._numbers, num_steps)[step]) / self._scale**2

    def stream(self, generator: Normals, num_steps: int) -> NoiseStream:
        """Return the noise of a run."""
        return BltStream(generator, *self._numbers, self._scale)

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report."""
        return (
            f"the {draw.num_units} {drawn}s are put in one random order, and each step takes the next "
            f"{draw.expected_batch_size} of them, pass after pass (no sampling; the order need not be secret)"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        return (
            f"Gaussian noise, correlated with that of all previous steps (buffered Toeplitz matrix, {self._counted}) "
            "and made from independent noise"
        )

    @property
    def _counted(self) -> str:
        return "1 buffer" if self.buffers == 1 else f"{self.buffers} buffers"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions, and how the run ensures each of them."""
        sampler = self.sampler(draw)
        return [
            (
                f"Two steps of a unit are at least {sampler.separation} apart, and a unit is in at most ⌈nB/N⌉ of the "
                "first n steps of a start",
                f"the sampler is built from the plan: it visits all {draw.num_units} units in one order, "
                f"{draw.expected_batch_size} per step, pass after pass. A step over different units is refused. Each "
                "start and resume has a new order and is counted separately; each step in the ledger carries these "
                "numbers",
            ),
            (
                f"Noise follows a buffered Toeplitz strategy ({self._counted}), whose column is nonincreasing and "
                "nonnegative",
                f"independent noise of standard deviation {noise_stddev:.6g} is drawn once per step for every entry "
                "of the complete sum, by exactly one process. The strategy subtracts parts of the noise of earlier "
                "steps and scales up the difference. The buffers are kept only in memory, and the noise is redrawn "
                "after a resume",
            ),
        ]


class BltStream(CorrelatedStream):
    """The noise of a run, (M⁻¹z)_t, step by step: x_t = z_t - Σ_i ω_i s_i, then s_i becomes θ_i s_i + x_t.

    This is algorithm 3 of McMahan et al. 2024. The step's noise is x_t / s. The d buffers s_i are kept.

    Args:
        generator: draws z.
        decays: θ.
        weights: ω.
        scale: s.
    """

    def __init__(self, generator: Normals, decays: tuple[float, ...], weights: tuple[float, ...], scale: float) -> None:
        """Begin without earlier noise."""
        super().__init__(generator)
        self._decays, self._weights, self._scale = decays, weights, scale

    def _begun(self, share: Tensor) -> deque[Tensor]:
        return deque(share.new_zeros(share.shape) for _ in self._decays)

    def _next(self, kept: deque[Tensor], like: Tensor) -> Sequence[Tensor]:
        noise = self._generator.normal_like(like)
        for weight, buffer in zip(self._weights, kept, strict=True):
            noise.sub_(buffer, alpha=weight)
        for decay, buffer in zip(self._decays, kept, strict=True):
            buffer.mul_(decay).add_(noise)
        return [noise]

    def _add_(self, share: Tensor, drawn: Sequence[Tensor], stddev: float) -> None:
        share.add_(drawn[0], alpha=stddev / self._scale)

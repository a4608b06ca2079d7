"""Privacy loss distributions of one step, and of the composition of many equal steps.

The accounting handles steps and histories; this module handles only numbers. The definitions and the discretization
follow the library dp_accounting, and tests check that the results agree. That library's distribution of a truncated
step inverts the privacy loss number by number and then convolves complex arrays, which takes seconds if σ is small.
Here whole grids are inverted at once, negligible tails are cut, and the convolution is real.

A distribution belongs to a pair (P, Q): outcomes under P, with the loss log(P/Q) on a grid. All rounding is upwards.
"Connect the dots" (Doroshenko et al., arXiv:2207.04380) gives grid masses that keep δ exact at every grid point and
increase it between them. A cut upper tail becomes an infinite loss; a cut lower tail moves up.

Tiny δ. The Fourier transform of a distribution has a rounding error of 2**-53 of the whole mass, and the power T
multiplies it by T. Over 10**5 steps this error hides a δ of 10**-10, and the result is no longer an upper bound. So the
masses are first tilted: multiplied by exp(θ loss) / M(θ), with the θ that moves their mean to the given ε. The sum of T
tilted losses is the tilted sum. The rounding error is then T 2**-50 of the tilted mass. Tilted back, it is T 2**-50 of
the Chernoff bound of δ: an error relative to δ, for every size of δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy import fft, optimize, special, stats

REVERSE = {
    AdjacencyType.ADD: AdjacencyType.REMOVE,
    AdjacencyType.REMOVE: AdjacencyType.ADD,
    AdjacencyType.REPLACE: AdjacencyType.REPLACE,
}

STEP_TAIL = 1e-22
"""The largest δ per step that cutting the upper tail may cost."""

_COMPOSED_TAIL = 1e-15  # tilted mass outside the window of a composition
_STEP_ROUNDING = 2.0**-50  # error per step, of the tilted mass; see `Composition`
_LOG_TILTS = (math.log(1e-3), math.log(1e7))


@dataclass(frozen=True, eq=False)
class LossPmf:
    """Masses of privacy losses on a grid."""

    width: float
    """The distance between two grid points."""
    lowest: int
    """The first grid point, in widths."""
    masses: NDArray[np.float64]
    """(n,): mass of each grid point from the lowest upwards."""
    infinite: float
    """Mass of an infinite loss."""

    @property
    def losses(self) -> NDArray[np.float64]:
        """Return (n,): the grid points."""
        return self.width * np.arange(self.lowest, self.lowest + len(self.masses), dtype=np.float64)


def sampled_gaussian(
    noise_multiplier: float, sampling_rate: float, pair: AdjacencyType, width: float, weight: float = 1.0
) -> LossPmf:
    """Return the loss distribution of one pair of the Poisson sampled Gaussian.

    With l the loss at outcome x, and q, σ the sampling rate and the noise multiplier:

    * REMOVE, (1-q) N(0, σ²) + q N(-1, σ²) against N(0, σ²): l = log(1 - q + q exp(u)) with u = -(x + 1/2)/σ².
    * ADD, N(0, σ²) against (1-q) N(0, σ²) + q N(1, σ²): -l = log(1 - q + q exp(u)) with u = (x - 1/2)/σ².
    * REPLACE, (1-q) N(0, σ²) + q N(-1, σ²) against (1-q) N(0, σ²) + q N(1, σ²):
      sinh(l/2) (1-q)/q exp(1/(2σ²)) = -sinh(l/2 + x/σ²).

    Args:
        noise_multiplier: σ > 0.
        sampling_rate: q, above 0 and at most 1.
        pair: one of the three.
        width: the distance between two grid points.
        weight: the weight of the result in a later mixture; a smaller weight cuts the tails earlier.
    """
    mechanism = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=pair)
    reverse = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=REVERSE[pair])
    highest = math.ceil(_tail_start(mechanism, STEP_TAIL / weight, width) / width)
    lowest = min(highest - 1, math.floor(-(_tail_start(reverse, STEP_TAIL / weight, width) + _further(width)) / width))
    lowest = max(lowest, math.floor(mechanism.connect_dots_bounds().epsilon_lower / width))
    losses = np.arange(lowest, highest + 1) * width
    deltas = np.zeros_like(losses)
    log_rate = math.log(sampling_rate)
    log_rest = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf
    variance = noise_multiplier**2
    if pair is AdjacencyType.REPLACE:
        inside = np.full(losses.shape, True)
        half = np.abs(losses) / 2
        with np.errstate(divide="ignore"):  # log(sinh(0)) = -inf is correct
            log_sinh = 0.5 / variance + log_rest - log_rate + half + np.log(-np.expm1(-2 * half)) - math.log(2)
        arsinh = np.logaddexp(0.5 * np.logaddexp(0, 2 * log_sinh), log_sinh)
        outcome = -np.sign(losses) * variance * (arsinh + half)
    else:
        # Above its largest loss, -log(1-q), ADD has δ = 0; below its smallest, log(1-q), REMOVE has δ = 1 - exp(l).
        toward = losses if pair is AdjacencyType.REMOVE else -losses
        inside = toward > log_rest
        if pair is AdjacencyType.REMOVE:
            deltas[~inside] = -np.expm1(losses[~inside])
        toward = toward[inside]
        exponent = toward + np.log(-np.expm1(log_rest - toward)) - log_rate
        side = -1 if pair is AdjacencyType.REMOVE else 1
        outcome = side * (0.5 + variance * exponent)
    deltas[inside] = mechanism.mu_upper_cdf(outcome) - np.exp(losses[inside] + mechanism.mu_lower_log_cdf(outcome))
    return _connect_the_dots(np.clip(deltas, 0.0, 1.0), lowest, width)


def _tail_start(mechanism: GaussianPrivacyLoss, tail: float, width: float) -> float:
    """Return a loss L, within 0.1 % or a grid step, above which the pair's δ is at most `tail`."""
    low, high = 0.0, max(float(mechanism.connect_dots_bounds().epsilon_upper), width)
    while high - low > max(1e-3 * high, width):
        middle = (low + high) / 2
        low, high = (middle, high) if mechanism.get_delta_for_epsilon(middle) > tail else (low, middle)
    return high


def _further(width: float) -> float:
    """Return how far below a loss L the lower tail is cut, so that the mass that this moves up is negligible.

    The mass under P of losses below -(L + 1) is at most the δ of the reversed pair at L, and of losses below -(L + x)
    at most 1/x of it.
    """
    return min(1.0, 1e4 * width)


def _connect_the_dots(deltas: NDArray[np.float64], lowest: int, width: float) -> LossPmf:
    """Return the masses whose δ at each grid point is the given one (arXiv:2207.04380, algorithm 1)."""
    deltas = np.minimum.accumulate(deltas)
    rises = np.diff(deltas)
    masses = np.empty_like(deltas)
    masses[0] = 1 - deltas[0] + rises[0] / math.expm1(width)
    masses[1:-1] = (rises[1:] - rises[:-1] * math.exp(width)) / math.expm1(width)
    masses[-1] = rises[-1] / math.expm1(-width)
    return LossPmf(width, lowest, np.maximum(masses, 0.0), float(deltas[-1]))


def mixture(first: LossPmf, second: LossPmf, weight: float) -> LossPmf:
    """Return weight * first + (1 - weight) * second, for a public choice between the two."""
    lowest = min(first.lowest, second.lowest)
    end = max(first.lowest + len(first.masses), second.lowest + len(second.masses))
    masses = np.zeros(end - lowest)
    for part, share in ((first, weight), (second, 1 - weight)):
        start = part.lowest - lowest
        masses[start : start + len(part.masses)] += share * part.masses
    return LossPmf(first.width, lowest, masses, weight * first.infinite + (1 - weight) * second.infinite)


def sampled_rows(
    noise_multiplier: float, sampling_rate: float, rows_per_unit: int, pair: AdjacencyType, width: float
) -> LossPmf:
    """Return the loss distribution of one pair of a Gaussian sum over rows, of which one unit has up to k.

    Each of the unit's k rows is drawn with probability q and clipped, separately from the others, so the sum changes by
    at most the number of rows drawn (Charles et al., arXiv:2407.07737, example-level sampling; Choquette-Choo et al.,
    arXiv:2310.15526, for sums of vectors). With b_j = P[Binomial(k, q) = j] and
    l(x) = log sum_j b_j exp((j x - j²/2)/σ²):

    * REMOVE: sum_j b_j N(j, σ²) against N(0, σ²), loss l(x);
    * ADD: N(0, σ²) against the mixture, loss -l(x).

    Negligibly rare components are omitted from the mixture, and count as an infinite loss of REMOVE.

    Args:
        noise_multiplier: σ > 0.
        sampling_rate: q of a row, above 0 and at most 1.
        rows_per_unit: k >= 1.
        pair: REMOVE or ADD; there is no pair for replacing.
        width: the distance between two grid points.
    """
    if pair is AdjacencyType.REPLACE:
        raise ValueError("no pair is known for replacing a unit of several rows; use twice the loss of removing one")
    counts = np.arange(rows_per_unit + 1)
    kept = stats.binom.sf(counts - 1, rows_per_unit, sampling_rate) > STEP_TAIL
    dropped = float(stats.binom.sf(counts[kept][-1], rows_per_unit, sampling_rate))
    mixed = _Mixture(noise_multiplier, counts[kept], stats.binom.logpmf(counts[kept], rows_per_unit, sampling_rate))
    highest = math.ceil(_last_above(lambda loss: mixed.delta(loss, pair) > STEP_TAIL, width) / width)
    reverse = _last_above(lambda loss: mixed.delta(loss, REVERSE[pair]) > STEP_TAIL, width)
    lowest = min(highest - 1, math.floor(-(reverse + _further(width)) / width))
    if pair is AdjacencyType.REMOVE and math.isfinite(mixed.least):
        lowest = max(lowest, math.floor(mixed.least / width) - 1)
    deltas = mixed.delta(width * np.arange(lowest, highest + 1, dtype=np.float64), pair)
    if pair is AdjacencyType.REMOVE:
        deltas = deltas + dropped
    return _connect_the_dots(np.clip(deltas, 0.0, 1.0), lowest, width)


class _Mixture:
    """Normal distributions of one width around whole numbers, compared with the one around 0."""

    def __init__(self, noise_multiplier: float, means: NDArray[np.int64], log_weights: NDArray[np.float64]) -> None:
        self.sigma, self.means, self.log_weights = noise_multiplier, means, log_weights
        self.least = float(log_weights[0]) if means[0] == 0 else -math.inf
        """A lower bound of the loss."""

    def delta(self, loss: NDArray[np.float64] | float, pair: AdjacencyType) -> NDArray[np.float64]:
        """Return the δ of the pair at each loss (n,)."""
        losses = np.atleast_1d(np.asarray(loss, dtype=np.float64))
        toward = losses if pair is AdjacencyType.REMOVE else -losses
        result = np.zeros_like(losses)
        inside = toward > self.least
        outcome = self._outcome(toward[inside])
        side = 1.0 if pair is AdjacencyType.REMOVE else -1.0
        mixture = sum(
            np.exp(log_weight) * special.ndtr(side * (mean - outcome) / self.sigma)
            for mean, log_weight in zip(self.means, self.log_weights, strict=True)
        )
        if pair is AdjacencyType.REMOVE:
            result[~inside] = -np.expm1(losses[~inside])
            result[inside] = mixture - np.exp(losses[inside] + special.log_ndtr(-outcome / self.sigma))
        else:
            result[inside] = special.ndtr(outcome / self.sigma) - np.exp(losses[inside]) * mixture
        return np.clip(result, 0.0, 1.0)

    def _outcome(self, loss: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the outcome with the given loss, by Newton's method.

        The loss increases with the outcome and is convex. Dropping all components but 0 and j gives a lower bound that
        can be inverted. The least of these outcomes is above the solution, and from there Newton steps on a convex
        function never overshoot.
        """
        variance = self.sigma**2
        rest = loss if self.least == -math.inf else loss + np.log(-np.expm1(self.least - loss))
        outcome = np.full_like(loss, math.inf)
        for mean, log_weight in zip(self.means, self.log_weights, strict=True):
            if mean > 0:
                outcome = np.minimum(outcome, (rest - log_weight) * variance / mean + mean / 2)
        for _ in range(100):
            value = np.full_like(loss, -math.inf)
            for mean, log_weight in zip(self.means, self.log_weights, strict=True):
                value = np.logaddexp(value, log_weight + (mean * outcome - mean**2 / 2) / variance)
            slope = np.zeros_like(loss)
            for mean, log_weight in zip(self.means, self.log_weights, strict=True):
                slope += mean / variance * np.exp(log_weight + (mean * outcome - mean**2 / 2) / variance - value)
            step = (value - loss) / slope
            outcome = outcome - step
            if not step.size or float(np.max(np.abs(step))) < 1e-13 * self.sigma:
                break
        return outcome


def _last_above(is_above: Callable[[float], Any], width: float) -> float:
    """Return a loss, within 0.1 % or a grid step, above which a decreasing δ no longer exceeds a bound."""
    low, high = 0.0, 1.0
    while np.all(is_above(high)):
        low, high = high, 2 * high
    while high - low > max(1e-3 * high, width):
        middle = (low + high) / 2
        low, high = (middle, high) if np.all(is_above(middle)) else (low, middle)
    return max(high, width)


@dataclass(frozen=True, eq=False)
class Composition:
    """The sum of independent losses on a grid, tilted by exp(θ loss).

    The mass of loss l is ``masses * exp(log_scale - tilt * l)``. It is accurate for losses near the ε for which θ was
    chosen; for others, `delta` is still an upper bound.

    Rounding. δ is a sum of tilted masses with weights of at most exp(log_scale - θ ε). Against the same in extended
    precision, such sums were off by at most 1.7 T 2**-53 of that over 36 settings without tilt, T from 410 to 10**6,
    and by less with tilt (tests check both); `delta` adds T 2**-50.
    """

    width: float
    """The distance between two grid points."""
    lowest: int
    """The first grid point, in widths."""
    masses: NDArray[np.float64]
    """(n,): tilted masses."""
    infinite: float
    """Mass of an infinite loss, not tilted."""
    tilt: float
    """θ >= 0."""
    log_scale: float
    """log M(θ)."""
    rounding: float
    """T 2**-50."""

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of the δ at ε."""
        start, reference, above, weighted = self._tails
        index = math.floor(epsilon / self.width) + 1 - start
        if index < 0:
            return 1.0
        value = 0.0
        if index < len(above):
            value = above[index]
            if epsilon - reference < 600:  # otherwise exp would overflow; the omitted term only lowers δ
                value -= weighted[index] * math.exp(epsilon - reference)
        scale = math.exp(min(700.0, self.log_scale - self.tilt * reference))
        slack = self.rounding * math.exp(min(700.0, self.log_scale - self.tilt * epsilon))
        return min(1.0, self.infinite + max(0.0, float(value)) * scale * (1 + 1e-9) + slack)

    @cached_property
    def _tails(self) -> tuple[int, float, NDArray[np.float64], NDArray[np.float64]]:
        """Return sums of masses from each grid point upwards, plain and times exp(-loss), from a reference loss."""
        losses = (self.lowest + np.arange(len(self.masses))) * self.width
        reference = float(losses[len(losses) // 2])
        # Far below the reference, tilting back would overflow. The mean of the tilted losses is near the requested ε.
        mean = float(self.masses @ losses) / float(self.masses.sum())
        if mean < reference - 300 / (self.tilt + 1):
            reference = self.width * round(mean / self.width)
        first = int(np.searchsorted(losses, reference - 600 / (self.tilt + 1)))
        away = losses[first:] - reference
        plain = self.masses[first:] * np.exp(-self.tilt * away)
        weighted = plain * np.exp(-away)
        return self.lowest + first, reference, plain[::-1].cumsum()[::-1], weighted[::-1].cumsum()[::-1]


Parts = Sequence[tuple[LossPmf, int]]


def compose(parts: Parts, tilt: float = 0.0) -> Composition:
    """Return the distribution of the sum of independent losses, `count` of each part.

    Uses one real Fourier transform for all of them. The mass above the Chernoff bounds becomes an infinite loss.

    Args:
        parts: distributions on one grid, and the count of each.
        tilt: θ >= 0; `tilt_for` chooses one. Every value is valid.
    """
    tilted, log_scale, log_finite, total = [], 0.0, 0.0, 0
    for pmf, count in parts:
        exponent = tilt * pmf.losses
        shift = float(exponent[pmf.masses > 0].max())
        masses = pmf.masses * np.exp(np.minimum(exponent - shift, 0.0))
        moment = float(masses.sum())
        tilted.append((masses / moment, count))
        log_scale += count * (math.log(moment) + shift)
        log_finite += count * (math.log1p(-pmf.infinite) if pmf.infinite < 1 else -math.inf)
        total += count
    width = parts[0][0].width
    first, last = _composed_bounds(tilted)
    length = fft.next_fast_len(max(last - first + 1, *(len(masses) for masses, _ in tilted)), real=True)
    spectrum = None
    for masses, count in tilted:
        powered = _power(fft.rfft(masses, length), count)
        spectrum = powered if spectrum is None else spectrum * powered
    composed = np.roll(fft.irfft(spectrum, length), -first)[: last - first + 1]
    lowest = sum(pmf.lowest * count for pmf, count in parts)
    cut = _COMPOSED_TAIL * math.exp(min(700.0, log_scale - tilt * (lowest + last) * width))
    return Composition(
        width, lowest + first, composed, cut - math.expm1(log_finite), tilt, log_scale, total * _STEP_ROUNDING
    )


def _power(spectrum: NDArray[np.complex128], count: int) -> NDArray[np.complex128]:
    power = spectrum
    for bit in bin(count)[3:]:
        power = power * power * spectrum if bit == "1" else power * power
    return power


def tilt_for(parts: Parts, *, delta: float | None = None, epsilon: float | None = None) -> float:
    """Return approximately the θ of the best Chernoff bound, for the ε of a δ or for the δ of an ε.

    log δ <= log M(θ) - θ ε for every θ >= 0. Every θ is valid; a θ far from the best gives a looser result.
    """
    with np.errstate(divide="ignore"):
        logs = [(pmf.losses, np.log(pmf.masses), count) for pmf, count in parts]

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        log_scale = sum(count * _log_moment(tilt * losses + log) for losses, log, count in logs)
        if delta is not None:
            return (log_scale - math.log(delta)) / tilt
        assert epsilon is not None
        return log_scale - tilt * epsilon

    found = optimize.minimize_scalar(bound, bounds=_LOG_TILTS, method="bounded", options={"xatol": 0.03})
    return math.exp(found.x) if delta is not None or found.fun < 0 else 0.0


def _composed_bounds(parts: Sequence[tuple[NDArray[np.float64], int]]) -> tuple[int, int]:
    """Return the first and the last index of the composition that matter, by Chernoff's bound.

    For any order t: P[sum >= k] <= exp(sum of count * log E[exp(t X)] - t k), and likewise below. Any set of orders is
    valid; these are near the best order for a normal distribution of the same variance.
    """
    first, last = 0, sum((len(masses) - 1) * count for masses, count in parts)
    budget = math.log(2 / _COMPOSED_TAIL)
    variance, longest, logs = 0.0, 0, []
    for masses, count in parts:
        index = np.arange(len(masses), dtype=np.float64)
        mean = float((masses * index).sum())  # the tilted masses sum to one
        variance += count * float((masses * (index - mean) ** 2).sum())
        longest = max(longest, len(masses))
        with np.errstate(divide="ignore"):
            logs.append((index, np.log(masses), count))
    best = math.sqrt(2 * budget / max(variance, 1e-6))
    for order in (*(best * 2.0 ** np.arange(-2, 2)), 4 / longest, 20 / longest):
        for signed in (order, -order):
            total = sum(count * _log_moment(signed * index + log) for index, log, count in logs)
            bound = (total + budget) / signed
            if signed > 0:
                last = min(last, math.ceil(bound))
            else:
                first = max(first, math.floor(bound))
    return first, max(first, last)


def _log_moment(exponents: NDArray[np.float64]) -> float:
    """Return log sum exp, rounded up: negligible terms are raised to a range where exp is fast."""
    largest = float(exponents.max())
    return math.log(float(np.exp(np.maximum(exponents - largest, -600.0)).sum())) + largest

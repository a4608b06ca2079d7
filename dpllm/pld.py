"""Privacy loss distributions of one step, and of the same step taken many times.

Place in the flow: below accounting, which knows steps and histories; here are only numbers. The definitions and the
discretization are those of the library dp_accounting, and tests hold the two to the same results; its distribution of a
truncated step inverts the privacy loss number by number and then convolves complex arrays, which takes seconds where σ
is small. Here whole grids are inverted at once, tails too small to matter are cut, and the convolution is a real one.

A distribution is always a pair's: outcomes under P, with the loss log(P/Q) on a grid. Rounding is upwards throughout:
"connect the dots" (Doroshenko et al., arXiv:2207.04380) gives the grid masses that keep the δ of every grid point exact
and of everything between them larger; a cut upper tail becomes an infinite loss, a cut lower tail moves up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy import fft

REVERSE = {
    AdjacencyType.ADD: AdjacencyType.REMOVE,
    AdjacencyType.REMOVE: AdjacencyType.ADD,
    AdjacencyType.REPLACE: AdjacencyType.REPLACE,
}

_STEP_TAIL = 1e-18  # δ per step that cutting the upper tail may cost; rounding may cost 2**-50 = 9e-16
_COMPOSED_TAIL = 1e-15  # the same for a whole composition


@dataclass(frozen=True, eq=False)
class LossPmf:
    """Masses of privacy losses on a grid."""

    width: float
    """Distance of two grid points."""
    lowest: int
    """The first grid point, in widths."""
    masses: NDArray[np.float64]
    """(n,): mass of each grid point from the lowest upwards."""
    infinite: float
    """Mass of an infinite loss."""


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
        pair: which of the three.
        width: distance of two grid points.
        weight: the weight with which the result will enter a mixture; the smaller, the earlier its tails are cut.
    """
    mechanism = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=pair)
    reverse = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=REVERSE[pair])
    highest = math.ceil(_tail_start(mechanism, _STEP_TAIL / weight, width) / width)
    # Of the losses below -(L + 1), P has no more than the reversed pair has δ at L.
    lowest = min(highest - 1, math.floor(-(_tail_start(reverse, _STEP_TAIL / weight, width) + 1) / width))
    lowest = max(lowest, math.floor(mechanism.connect_dots_bounds().epsilon_lower / width))
    losses = np.arange(lowest, highest + 1) * width
    deltas = np.zeros_like(losses)
    log_rate = math.log(sampling_rate)
    log_rest = math.log1p(-sampling_rate) if sampling_rate < 1 else -math.inf
    variance = noise_multiplier**2
    if pair is AdjacencyType.REPLACE:
        inside = np.full(losses.shape, True)
        half = np.abs(losses) / 2
        with np.errstate(divide="ignore"):  # log(sinh(0)) = -inf is right
            log_sinh = 0.5 / variance + log_rest - log_rate + half + np.log(-np.expm1(-2 * half)) - math.log(2)
        arsinh = np.logaddexp(0.5 * np.logaddexp(0, 2 * log_sinh), log_sinh)
        outcome = -np.sign(losses) * variance * (arsinh + half)
    else:
        # Beyond its largest loss, -log(1-q), ADD has no δ left; below its smallest, log(1-q), REMOVE has 1 - exp(l).
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
    """Return a loss L, within 0.1 % or a grid step, from which on the pair's δ is at most `tail`."""
    low, high = 0.0, max(float(mechanism.connect_dots_bounds().epsilon_upper), width)
    while high - low > max(1e-3 * high, width):
        middle = (low + high) / 2
        low, high = (middle, high) if mechanism.get_delta_for_epsilon(middle) > tail else (low, middle)
    return high


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
    """Return weight * first + (1 - weight) * second, for a choice between the two that everybody may know."""
    lowest = min(first.lowest, second.lowest)
    end = max(first.lowest + len(first.masses), second.lowest + len(second.masses))
    masses = np.zeros(end - lowest)
    for part, share in ((first, weight), (second, 1 - weight)):
        start = part.lowest - lowest
        masses[start : start + len(part.masses)] += share * part.masses
    return LossPmf(first.width, lowest, masses, weight * first.infinite + (1 - weight) * second.infinite)


def self_compose(pmf: LossPmf, count: int) -> LossPmf:
    """Return the distribution of the sum of `count` independent losses.

    By one real Fourier transform. What lies outside the Chernoff bounds, at most 1e-15, becomes an infinite loss.
    """
    first, last = _composed_bounds(pmf.masses, count)
    length = fft.next_fast_len(max(last - first + 1, len(pmf.masses)), real=True)
    spectrum = fft.rfft(pmf.masses, length)
    power = spectrum
    for bit in bin(count)[3:]:
        power = power * power * spectrum if bit == "1" else power * power
    masses = np.roll(fft.irfft(power, length), -first)[: last - first + 1]
    infinite = _COMPOSED_TAIL - math.expm1(count * math.log1p(-pmf.infinite))
    return LossPmf(pmf.width, pmf.lowest * count + first, masses, infinite)


def _composed_bounds(masses: NDArray[np.float64], count: int) -> tuple[int, int]:
    """Return the first and the last index of the composition that matter, by Chernoff's bound.

    For any order t: P[sum >= k] <= exp(count * log E[exp(t X)] - t k), and likewise below. Any set of orders is valid;
    these lie around the one that is best for a normal distribution of the same variance.
    """
    first, last = 0, (len(masses) - 1) * count
    index = np.arange(len(masses), dtype=np.float64)
    budget = math.log(2 / _COMPOSED_TAIL)
    mean = float(masses @ index) / masses.sum()
    deviation = math.sqrt(float(masses @ (index - mean) ** 2) / masses.sum()) or 1e-3
    best = math.sqrt(2 * budget / count) / deviation
    for order in (*(best * 2.0 ** np.arange(-4, 3)), 4 / len(masses), 20 / len(masses)):
        for signed in (order, -order):
            shift = max(0.0, signed * index[-1])
            moment = float(masses @ np.exp(signed * index - shift))
            if moment <= 0:
                continue
            bound = (count * (math.log(moment) + shift) + budget) / signed
            if signed > 0:
                last = min(last, math.ceil(bound))
            else:
                first = max(first, math.floor(bound))
    return first, max(first, last)


def to_library(remove: LossPmf, add: LossPmf | None = None) -> library.PrivacyLossDistribution:
    """Return dp_accounting's object for a pair and its reverse, or for a symmetric pair alone."""
    pmfs = (
        pld_pmf.DensePLDPmf(pmf.width, pmf.lowest, pmf.masses, pmf.infinite, pessimistic_estimate=True)
        for pmf in (remove, add)
        if pmf is not None
    )
    return library.PrivacyLossDistribution(*pmfs)

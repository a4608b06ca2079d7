"""Tests of dpllm.mechanism.pld."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from scipy import fft, stats

from dpllm.mechanism.pld import Composition, LossPmf, compose, mixture, sampled_gaussian, sampled_rows, tilt_for
from tests.tiers import deep_case

EPSILONS = np.linspace(0, 6, 13)


def deltas_of(*pmfs: LossPmf) -> np.ndarray:
    """δ at each of EPSILONS of a pair and its reverse, of one step."""
    return np.array([max(compose([(pmf, 1)]).delta(at) for pmf in pmfs) for at in EPSILONS])


@pytest.mark.parametrize("relation", [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE])
@pytest.mark.parametrize(
    ("sigma", "rate", "width"), [(0.6, 1e-4, 1e-3), (1.0, 0.3, 1e-3), (3.0, 1.0, 1e-3), (9.0, 0.01, 1e-4)]
)
def test_one_step_is_the_library_s(sigma: float, rate: float, width: float, relation: NeighboringRelation) -> None:
    """δ(ε) of one step equals dp_accounting's to 1e-13."""
    if relation is NeighboringRelation.REPLACE_ONE:
        ours = deltas_of(sampled_gaussian(sigma, rate, AdjacencyType.REPLACE, width))
    else:
        pairs = (AdjacencyType.REMOVE, AdjacencyType.ADD)
        ours = deltas_of(*(sampled_gaussian(sigma, rate, pair, width) for pair in pairs))
    theirs = library.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=width, neighboring_relation=relation
    )
    assert np.allclose(ours, theirs.get_delta_for_epsilon(EPSILONS), rtol=1e-8, atol=1e-13)


def test_cut_tails_only_round_up() -> None:
    """A pair with little weight in a mixture is cut early, and this never makes its δ smaller."""
    whole = sampled_gaussian(0.5, 0.01, AdjacencyType.REPLACE, 1e-3)
    cut = sampled_gaussian(0.5, 0.01, AdjacencyType.REPLACE, 1e-3, weight=1e-10)
    assert len(cut.masses) < 0.9 * len(whole.masses)
    difference = deltas_of(cut) - deltas_of(whole)
    assert difference.min() > -1e-14 and difference.max() < 1e-8


def test_hardly_any_weight_and_hardly_any_loss() -> None:
    """A pair of almost no weight or loss still gives a valid distribution of a few grid points."""
    for sigma, rate, weight in ((0.5, 0.3, 1e-30), (1000.0, 1e-6, 1.0), (1000.0, 1.0, 1e-300)):
        for pair in AdjacencyType:
            pmf = sampled_gaussian(sigma, rate, pair, 1e-3, weight)
            assert pmf.masses.min() >= 0
            assert pmf.masses.sum() + pmf.infinite == pytest.approx(1, abs=1e-9)


def test_masses_add_up() -> None:
    """Masses are not negative and, with the infinite loss, sum to one, also after mixing and composing."""
    remove = sampled_gaussian(1.0, 0.05, AdjacencyType.REMOVE, 1e-3)
    replace = sampled_gaussian(0.5, 0.05, AdjacencyType.REPLACE, 1e-3)
    for pmf in (remove, replace, mixture(replace, remove, 0.25)):
        assert pmf.masses.min() >= 0
        assert pmf.masses.sum() + pmf.infinite == pytest.approx(1, abs=1e-9)
    composed = compose([(mixture(replace, remove, 0.25), 50)])
    assert composed.masses.sum() * math.exp(composed.log_scale) + composed.infinite == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("tilt", [0.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_self_composition_is_repeated_convolution(count: int, tilt: float) -> None:
    """The Fourier power is the sum of that many independent losses, on the right grid points, tilted or not."""
    masses = np.array([0.5, 0.0, 0.3, 0.19])
    composed = compose([(LossPmf(0.1, -2, masses, 0.01), count)], tilt)
    expected = np.ones(1)
    for _ in range(count):
        expected = np.convolve(expected, masses)
    found, first = masses_of(composed), composed.lowest + 2 * count
    kept = expected[first : first + len(found)]
    weight = np.exp(composed.log_scale - tilt * losses_of(composed))
    assert np.all(np.abs(found - kept) <= 1e-13 * np.maximum(weight, kept))
    above = expected[first + len(found) :].sum()
    assert above <= 1e-15
    assert composed.infinite == pytest.approx(1 - 0.99**count, abs=2e-15)


def test_two_kinds_of_losses_are_convolved() -> None:
    """Losses of several parts add up, each with its count."""
    one, two = np.array([0.6, 0.4]), np.array([0.1, 0.2, 0.7])
    parts = [(LossPmf(0.5, 0, one, 0.0), 2), (LossPmf(0.5, -1, two, 0.0), 1)]
    expected = np.convolve(np.convolve(one, one), two)
    for tilt in (0.0, 1.5):
        composed = compose(parts, tilt)
        assert composed.lowest == -1
        assert np.allclose(masses_of(composed), expected, atol=1e-15)


def losses_of(composed: Composition) -> np.ndarray:
    return (composed.lowest + np.arange(len(composed.masses))) * composed.width


def masses_of(composed: Composition) -> np.ndarray:
    """Tilted back."""
    return composed.masses * np.exp(composed.log_scale - composed.tilt * losses_of(composed))


@pytest.mark.parametrize(
    ("sigma", "rate", "count", "width", "delta"),
    [
        (3.0, 0.004, 100_000, 1e-3, 1e-8),
        (0.614, 4.08e-5, 100_000, 1e-3, 1.1e-10),
        (0.614, 4.08e-5, 100_000, 1e-4, 1e-13),
        (1.0, 0.02, 1500, 1e-3, 1e-12),
        (0.6, 1e-4, 1_000_000, 1e-3, 1e-9),
    ],
)
def test_rounding_is_covered(sigma: float, rate: float, count: int, width: float, delta: float) -> None:
    """Compared with extended precision, δ near the ε of the tilt is never smaller, and almost equal."""
    if np.finfo(np.longdouble).eps >= np.finfo(float).eps:
        pytest.skip("this machine's long double is no longer than its double")
    for pair in (AdjacencyType.REMOVE, AdjacencyType.ADD):
        one = sampled_gaussian(sigma, rate, pair, width)
        tilt = tilt_for([(one, count)], delta=delta)
        ours = compose([(one, count)], tilt)
        exact = extended(one, count, tilt, ours)
        # the ε of δ, roughly, and some around it
        spread = np.linspace(ours.lowest, ours.lowest + len(ours.masses), 33)[4:-4] * width
        for epsilon in (float(at) for at in spread if at > 0):
            losses = losses_of(ours).astype(np.longdouble)
            inside = losses > epsilon
            back = np.exp(ours.log_scale - tilt * losses[inside])
            true = float((-np.expm1(epsilon - losses[inside]) * back * exact[inside]).sum())
            chernoff = math.exp(ours.log_scale - tilt * epsilon)
            assert true <= ours.delta(epsilon) <= true * (1 + 1e-8) + 2 * count * 2.0**-50 * chernoff + ours.infinite
            weights = -np.expm1(epsilon - losses[inside].astype(float)) * np.exp(tilt * (epsilon - losses[inside]))
            off = abs(float((weights * (ours.masses[inside] - exact[inside])).sum()))
            assert off < count * 2.0**-51


def extended(one: LossPmf, count: int, tilt: float, like: Composition) -> np.ndarray:
    """The tilted composition with 64 bits of mantissa."""
    exponent = tilt * one.losses.astype(np.longdouble)
    masses = one.masses.astype(np.longdouble) * np.exp(exponent - exponent.max())
    masses /= masses.sum()
    length = 1 << (max(len(like.masses), len(masses)) - 1).bit_length()
    spectrum = fft.rfft(masses, length)
    power = np.ones_like(spectrum)
    for bit in bin(count)[2:]:
        power = power * power * (spectrum if bit == "1" else 1)
    return np.roll(fft.irfft(power), -(like.lowest - one.lowest * count))[: len(like.masses)]


def test_outside_its_window_a_tilted_composition_still_bounds() -> None:
    """Far below and far above the ε of the tilt, δ is still an upper bound."""
    one = sampled_gaussian(1.0, 0.02, AdjacencyType.REMOVE, 1e-3)
    plain, tilted = compose([(one, 500)]), compose([(one, 500)], tilt_for([(one, 500)], delta=1e-12))
    for epsilon in np.linspace(0, 12, 49):
        assert tilted.delta(epsilon) >= plain.delta(epsilon) * (1 - 1e-8) - 2 * plain.rounding


def test_tilt_is_the_chernoff_bound_s() -> None:
    """θ minimises the bound: of a normal loss with mean m and variance 2m, it is (ε - m) / (2m)."""
    one = sampled_gaussian(5.0, 1.0, AdjacencyType.REMOVE, 1e-4)
    mean = 100 / (2 * 25)
    assert tilt_for([(one, 100)], epsilon=6.0) == pytest.approx((6.0 - mean) / (2 * mean), rel=0.02)
    assert tilt_for([(one, 100)], epsilon=1.0) == 0.0
    best = math.sqrt(math.log(1e10) / mean)
    assert tilt_for([(one, 100)], delta=1e-10) == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize("pair", [AdjacencyType.REMOVE, AdjacencyType.ADD])
@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.02), (2.0, 0.5), (1.0, 1.0)])
def test_one_row_of_a_unit_is_the_unit(sigma: float, rate: float, pair: AdjacencyType) -> None:
    """With k = 1, drawing rows is drawing units."""
    rows, unit = sampled_rows(sigma, rate, 1, pair, 1e-3), sampled_gaussian(sigma, rate, pair, 1e-3)
    assert np.allclose(deltas_of(rows), deltas_of(unit), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("sigma", "rate", "k"), [(1.0, 0.02, 2), deep_case(0.8, 0.1, 5), (4.0, 0.3, 8), deep_case(3.0, 0.999, 3)]
)
def test_rows_of_a_unit_are_the_library_s_mixture(sigma: float, rate: float, k: int) -> None:
    """δ(ε) of one step equals that of dp_accounting's mixture of Gaussians, both ways."""
    ours = deltas_of(*(sampled_rows(sigma, rate, k, pair, 1e-3) for pair in (AdjacencyType.REMOVE, AdjacencyType.ADD)))
    theirs = library.from_mixture_gaussian_mechanism(
        sigma, list(range(k + 1)), list(stats.binom.pmf(range(k + 1), k, rate)), value_discretization_interval=1e-3
    )
    assert np.allclose(ours, theirs.get_delta_for_epsilon(EPSILONS), rtol=1e-7, atol=1e-12)


def test_rare_components_only_round_up() -> None:
    """With k = 400 rows at a tiny rate most components are left out, and no δ is below that of fewer rows."""
    few, many = (sampled_rows(1.0, 1e-6, k, AdjacencyType.REMOVE, 1e-3) for k in (300, 400))
    assert len(many.masses) < 300_000
    assert np.all(deltas_of(many) >= deltas_of(few) - 1e-14)


def test_replacing_a_unit_of_several_rows_has_no_pair() -> None:
    """There is no distribution for it."""
    with pytest.raises(ValueError, match="replacing"):
        sampled_rows(1.0, 0.1, 2, AdjacencyType.REPLACE, 1e-3)


def test_losses_beyond_what_exp_can_hold() -> None:
    """For losses in the thousands, δ is still an upper bound, without an error."""
    one = sampled_gaussian(1 / math.sqrt(30_000), 1.0, AdjacencyType.REMOVE, 0.1)
    composed = compose([(one, 1)], tilt_for([(one, 1)], delta=1e-4))
    for epsilon in (14_000.0, 15_000.0, 16_000.0):
        sigma = 1 / math.sqrt(30_000)
        exact = stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(
            epsilon + stats.norm.logcdf(-0.5 / sigma - epsilon * sigma)
        )
        assert exact <= composed.delta(epsilon) <= 1

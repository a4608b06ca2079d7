"""Tests of dpllm.pld."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from scipy import fft

from dpllm.pld import LossPmf, mixture, sampled_gaussian, self_compose, to_library

EPSILONS = np.linspace(0, 6, 13)


@pytest.mark.parametrize("relation", [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE])
@pytest.mark.parametrize(
    ("sigma", "rate", "width"), [(0.6, 1e-4, 1e-3), (1.0, 0.3, 1e-3), (3.0, 1.0, 1e-3), (9.0, 0.01, 1e-4)]
)
def test_one_step_is_the_library_s(sigma: float, rate: float, width: float, relation: NeighboringRelation) -> None:
    """δ(ε) of one step equals dp_accounting's to 1e-13."""
    if relation is NeighboringRelation.REPLACE_ONE:
        ours = to_library(sampled_gaussian(sigma, rate, AdjacencyType.REPLACE, width))
    else:
        pairs = (AdjacencyType.REMOVE, AdjacencyType.ADD)
        ours = to_library(*(sampled_gaussian(sigma, rate, pair, width) for pair in pairs))
    theirs = library.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=width, neighboring_relation=relation
    )
    difference = ours.get_delta_for_epsilon(EPSILONS) - theirs.get_delta_for_epsilon(EPSILONS)
    assert np.abs(difference).max() < 1e-13


def test_cut_tails_only_round_up() -> None:
    """A pair that enters a mixture with little weight is cut early, and its δ is nowhere smaller for it."""
    whole = sampled_gaussian(0.5, 0.01, AdjacencyType.REPLACE, 1e-3)
    cut = sampled_gaussian(0.5, 0.01, AdjacencyType.REPLACE, 1e-3, weight=1e-10)
    assert len(cut.masses) < 0.9 * len(whole.masses)
    difference = to_library(cut).get_delta_for_epsilon(EPSILONS) - to_library(whole).get_delta_for_epsilon(EPSILONS)
    assert difference.min() > -1e-14 and difference.max() < 1e-8


def test_hardly_any_weight_and_hardly_any_loss() -> None:
    """A pair of next to no weight, or next to no loss, still gives a proper distribution of a few grid points."""
    for sigma, rate, weight in ((0.5, 0.3, 1e-30), (1000.0, 1e-6, 1.0), (1000.0, 1.0, 1e-300)):
        for pair in AdjacencyType:
            pmf = sampled_gaussian(sigma, rate, pair, 1e-3, weight)
            assert pmf.masses.min() >= 0
            assert pmf.masses.sum() + pmf.infinite == pytest.approx(1, abs=1e-9)


def test_masses_add_up() -> None:
    """Masses are not negative and, with the infinite loss, come to one, after mixing and composing too."""
    remove = sampled_gaussian(1.0, 0.05, AdjacencyType.REMOVE, 1e-3)
    replace = sampled_gaussian(0.5, 0.05, AdjacencyType.REPLACE, 1e-3)
    for pmf in (remove, replace, mixture(replace, remove, 0.25)):
        assert pmf.masses.min() >= 0
        assert pmf.masses.sum() + pmf.infinite == pytest.approx(1, abs=1e-9)
    composed = self_compose(mixture(replace, remove, 0.25), 50)
    assert composed.masses.sum() + composed.infinite == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_self_composition_is_repeated_convolution(count: int) -> None:
    """The Fourier power is the sum of that many independent losses, on the right grid points."""
    masses = np.array([0.5, 0.0, 0.3, 0.19])
    composed = self_compose(LossPmf(0.1, -2, masses, 0.01), count)
    expected = np.ones(1)
    for _ in range(count):
        expected = np.convolve(expected, masses)
    first = composed.lowest + 2 * count
    assert np.allclose(composed.masses, expected[first : first + len(composed.masses)], atol=1e-15)
    kept = expected[first : first + len(composed.masses)].sum()
    assert expected.sum() - kept <= 1e-15
    assert composed.infinite == pytest.approx(1 - 0.99**count, abs=2e-15)


def test_rounding_stays_within_the_margin() -> None:
    """Against extended precision, 10**5 steps are off by less than the margin that accounting sets aside."""
    if np.finfo(np.longdouble).eps >= np.finfo(float).eps:
        pytest.skip("this machine's long double is no longer than its double")
    count = 100_000
    one = sampled_gaussian(3.0, 0.004, AdjacencyType.REMOVE, 1e-3)
    ours = self_compose(one, count)
    spectrum = fft.rfft(one.masses.astype(np.longdouble), 1 << 14)
    power = np.ones_like(spectrum)
    for bit in bin(count)[2:]:
        power = power * power * (spectrum if bit == "1" else 1)
    exact = np.roll(fft.irfft(power), -(ours.lowest - one.lowest * count))[: len(ours.masses)]
    losses = (ours.lowest + np.arange(len(ours.masses))) * one.width
    for epsilon in (0.0, 0.5, 1.0, 2.0):
        weight = np.maximum(-np.expm1(epsilon - losses), 0)
        assert abs(float(weight @ (ours.masses - exact))) < count * 2.0**-51

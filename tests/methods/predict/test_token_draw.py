"""Tests of dpllm.methods.predict.token_draw: the ε of tokens drawn from averaged scores."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp

from dpllm.mechanism.catalogue import from_fields, to_fields
from dpllm.methods.predict.token_draw import TokenDraw
from dpllm.privacy.accounting import delta, epsilon
from dpllm.privacy.calibration import least_noise
from tests.mutations import kills


@kills(
    "ρ of a token is half of what the range of its scores has",
    "dpllm/methods/predict/token_draw.py",
    "return 0.5 * (moved / self.noise_multiplier) ** 2",
    "return 0.25 * (moved / self.noise_multiplier) ** 2",
)
@pytest.mark.parametrize(
    ("tokens", "clip", "size", "temperature", "figure"),
    [(100, 10.0, 250, 2.0, 0.900), (500, 10.0, 1000, 2.0, 0.484), (500, 0.62774, 8, 1.0, 10.000)],
)
def test_the_figures_of_the_papers(tokens, clip, size, temperature, figure):
    """ρ = T/2 (c/(sτ))² at δ = 1e-6: arXiv:2407.12108, and InvisibleInk's clip for ε = 10 (arXiv:2507.02974)."""
    event = TokenDraw(noise_multiplier=size * temperature / clip)
    assert round(epsilon([(event, tokens)], 1e-6), 3) == figure
    assert event.rho() == pytest.approx((clip / (size * temperature)) ** 2 / 2)


@pytest.mark.parametrize("noise", [3.0, 12.7, 50.0])
def test_it_equals_the_zcdp_accounting_of_dp_accounting(noise):
    """Its best of all orders is below theirs of a few, and the grid adds less than 1e-4."""
    event = TokenDraw(noise_multiplier=noise)
    accountant = rdp.RdpAccountant(1 + np.geomspace(1e-2, 1e3, 3000), dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(event.dp_event(), 100)
    assert epsilon([(event, 100)], 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), abs=1e-4)


@pytest.mark.parametrize("noise", [0.7, 3.0, 20.0])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_every_pair_of_neighbouring_scores_is_within_its_delta(noise, adjacency):
    """The worst pairs of a bounded range: some tokens move up by c/s, the others down, for every share of them."""
    moved = (2 if adjacency == "replace-one" else 1) / noise
    for epsilon_at in (0.0, 0.1, 0.5, 1.0):
        allowed = delta([(TokenDraw(noise_multiplier=noise), 1)], epsilon_at, adjacency)
        for share in np.linspace(0.01, 0.99, 50):
            with_unit = np.array([share * math.exp(moved), (1 - share) * math.exp(-moved)])
            one, other = with_unit / with_unit.sum(), np.array([share, 1 - share])
            for first, second in ((one, other), (other, one)):
                assert np.maximum(first - math.exp(epsilon_at) * second, 0).sum() <= allowed + 1e-12


def test_replacing_a_unit_moves_scores_twice_as_far():
    """ρ is four times as large."""
    event = TokenDraw(noise_multiplier=50.0)
    half = TokenDraw(noise_multiplier=25.0)
    assert epsilon([(event, 100)], 1e-6, "replace-one") == epsilon([(half, 100)], 1e-6)


def test_it_is_read_and_written():
    """Ledgers and plans keep it."""
    event = TokenDraw(noise_multiplier=12.5)
    assert from_fields(to_fields(event)) == event


def test_the_inverse_of_epsilon():
    """The noise for a target has that ε, and no more."""
    noise = least_noise(2.0, 1e-6, lambda sigma: [(TokenDraw(noise_multiplier=sigma), 100)])
    assert 2.0 * (1 - 4e-4) <= epsilon([(TokenDraw(noise_multiplier=noise), 100)], 1e-6) <= 2.0


def test_a_sample_of_a_group_has_no_accounting():
    """Every unit of a group takes part in each of its tokens."""
    with pytest.raises(ValueError, match="sampling_rate must"):
        TokenDraw(noise_multiplier=1.0, sampling_rate=0.5)


def test_no_noise_is_no_guarantee():
    """An infinite clip, or a temperature of 0."""
    assert epsilon([(TokenDraw(noise_multiplier=0.0), 1)], 1e-6) == math.inf

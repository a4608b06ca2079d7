"""Tests of dpllm.privacy.defaults: rules stay within their bounds for every N, and follow their measurement."""

from __future__ import annotations

import pytest

from dpllm.mechanism.events import Step
from dpllm.privacy import defaults
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.risk import gaussian_distance

SIZES = [1, 3, 4, 17, 100, 120, 999, 1302, 5000, 28_500, 42_061, 255_564, 10**6, 10**9]


@pytest.mark.parametrize("num_units", SIZES)
def test_delta_never_exceeds_a_tenth_of_one_over_n(num_units):
    """Rounding is downwards, by less than a tenth."""
    assert 0.9 / (10 * num_units) < defaults.delta_for(num_units) <= 1 / (10 * num_units)


@pytest.mark.parametrize("num_units", SIZES)
def test_a_step_has_at_most_a_quarter_of_the_units(num_units):
    """And T is divided by every number of bands that is compared."""
    batch, steps = defaults.batch_and_steps(num_units)
    assert 1 <= batch <= max(1, num_units / 4) and batch <= 2048
    assert 192 <= steps <= 480 and all(steps % bands == 0 for bands in (1, 2, 3, 4, 6, 8, 12, 16))


@pytest.mark.parametrize(("num_units", "batch"), [(5000, 128), (42_061, 1024)])
def test_the_batch_is_that_of_the_plans_that_were_compared(num_units, batch):
    """E2E, a part of it and the whole (docs/correlated_noise.md)."""
    found, steps = defaults.batch_and_steps(num_units)
    assert found == batch and 4 <= found * steps / num_units <= 10


def test_few_units_are_held_out_of_many():
    """5 %, and about a thousand at most."""
    assert defaults.held_out_share(100) == 0.05
    assert all(900 < defaults.held_out_share(n) * n < 1001 for n in (30_000, 10**6, 10**8))


@pytest.mark.parametrize("target", [8.0, 3.0, 1.0])
def test_the_units_needed_have_the_signal_to_noise_of_the_measurement(target):
    """N μ with μ of the accountant: one release of all units with σ = N/(N μ) has this ε, to the two digits of N."""
    num_units = defaults.units_needed(target)
    strength = 5000 * gaussian_distance(8.0, 2e-5)
    found = epsilon([(Step(sampling_rate=1.0, noise_multiplier=num_units / strength), 1)], 1 / (10 * num_units))
    assert found == pytest.approx(target, rel=0.06)


def test_a_smaller_epsilon_needs_more_units_and_a_better_model_too():
    """Both ways; at the ε of the measurement it is its own number."""
    assert defaults.units_needed(8.0) == 5000 < defaults.units_needed(3.0) < defaults.units_needed(1.0)
    at_three = [defaults.units_needed(3.0, one.target_epsilon) for one in defaults.MEASURED]
    assert at_three == sorted(at_three, reverse=True) and at_three[1] == pytest.approx(5000, rel=0.1)


def test_few_units_are_said_to_be_few():
    """The remedy is more data or public text, never a larger ε."""
    need, few = defaults.need_words(300, 1.0, "user")
    assert "public text" in few and "larger" not in need + few
    assert len(defaults.need_words(50_000, 1.0, "sequence")) == 1


def test_best_measured_rates_are_within_the_range_that_is_named():
    """Of the three lines of the table in docs/correlated_noise.md; wider for adapters, which were not measured."""
    for computed, best in ((0.0043, 0.004), (0.061, 0.064), (0.083, 0.064)):
        low, high = defaults.rate_range(computed, adapter=False)
        assert low <= best <= high
    assert defaults.rate_range(0.1, adapter=False) == (0.05, 0.2) and defaults.rate_range(0.1, adapter=True) == (
        0.025,
        0.4,
    )
    assert defaults.two_digits_down(0.0999) == pytest.approx(0.099)

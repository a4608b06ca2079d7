"""Tests of dpllm.methods.attacks.exposure."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import AuditError
from dpllm.methods.attacks.exposure import Exposure, exposure, exposure_by_rank, exposure_extrapolated


def test_rank_among_others():
    """The best of n + 1 has log2(n + 1) bits, the worst none; half of the ties rank before."""
    reference = np.arange(1.0, 16.0)
    found = exposure_by_rank(np.array([99.0, 0.0, 14.0, 14.5]), reference)
    assert found == pytest.approx([4.0, 0.0, math.log2(16 / 2.5), 3.0])


def test_extrapolation_is_the_normal_tail_for_normal_scores():
    """With much normal reference, a score z deviations above has -log2 P[Z > z] bits, and any scale does."""
    reference = np.random.default_rng(0).normal(size=20_000)
    z = np.array([0.0, 1.0, 2.0, 3.0])
    expected = -stats.norm.logsf(z) / math.log(2)
    assert exposure_extrapolated(z, reference) == pytest.approx(expected, rel=0.1)
    assert exposure_extrapolated(z * 1e-3 + 7, reference * 1e-3 + 7) == pytest.approx(
        exposure_extrapolated(z, reference), rel=1e-3
    )


@pytest.mark.parametrize("skewed", [-3.0, 0.0, 3.0])
def test_extrapolation_far_out(skewed):
    """Where a probability underflows, bits continue to rise without a jump, as the square of the distance."""
    reference = stats.skewnorm.rvs(skewed, size=2000, random_state=1)
    bits = exposure_extrapolated(np.linspace(3, 60, 600), reference)
    assert np.isfinite(bits).all() and (np.diff(bits) > 0).all()
    assert np.abs(np.diff(bits, 2)).max() < 0.1 * bits[-1] / 100
    assert bits[-1] > 1500


def test_what_was_never_seen_has_a_median_of_one():
    """Scores of the same distribution as the reference have a median of one bit; memorised ones the most there is."""
    rng = np.random.default_rng(3)
    unseen = exposure(rng.normal(size=400), rng.normal(size=400))
    assert unseen.median_by_rank == pytest.approx(1, abs=0.2) == unseen.median_extrapolated
    memorised = exposure(rng.normal(size=400) + 20, rng.normal(size=400))
    assert memorised.median_by_rank == memorised.most_by_rank == math.log2(401)
    assert memorised.median_extrapolated > 100
    assert "bits by rank among 400 others" in str(memorised)
    assert Exposure(**memorised.to_dict()) == memorised


@pytest.mark.parametrize(
    ("included", "reference", "message"),
    [
        ([], np.arange(20.0), "no canary was included"),
        ([1.0], np.arange(9.0), "there are only 9: at least 10 are needed"),
        ([1.0], [*range(19), np.nan], "not finite"),
        ([1.0], np.ones(20), "the same score"),
    ],
)
def test_refusals(included, reference, message):
    """Scores without a reference to compare with are refused."""
    with pytest.raises(AuditError, match=message):
        exposure(np.array(included), np.array(reference))

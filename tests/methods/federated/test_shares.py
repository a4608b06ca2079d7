"""An update as whole numbers: its norm after rounding, its share of the noise, and the models that are too large."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.methods.federated.client import Shares
from tests.methods.federated.small import plan_of
from tests.mutations import kills


@pytest.mark.parametrize("size", [1, 37, 5000])
def test_rounding_never_exceeds_the_clip_norm(size):
    """Whatever the update: half a step in every entry, far too large, and 0."""
    shares, rng = Shares(clip_norm=1.0, step=1e-3), np.random.default_rng(0)
    half = np.full(size, 0.5005e-3)
    for update in (half, 50 * rng.standard_normal(size), 1e-9 * rng.standard_normal(size), np.zeros(size)):
        whole = shares.rounded(update)
        assert whole.dtype == np.int64 and np.linalg.norm(whole) * 1e-3 <= 1.0
    long = shares.rounded(50 * rng.standard_normal(size))
    assert np.linalg.norm(long) * 1e-3 > 1 - 1.1e-3 * math.sqrt(size)


def test_a_sum_modulo_2_64_is_read_as_the_sum():
    shares, rng = Shares(clip_norm=1.0, step=2.0**-12), np.random.default_rng(0)
    updates = rng.standard_normal((9, 50)) / 30
    total = sum(shares.rounded(one).view(np.uint64) for one in updates)
    assert shares.read(total) == pytest.approx(updates.sum(0), abs=9 * 2.0**-13)


@kills(
    "clients share the noise of a round among the whole cohort, so that dropouts take their part with them",
    "dpllm/methods/federated/client.py",
    "math.sqrt(event.min_batch_size)",
    "math.sqrt(event.max_batch_size)",
)
def test_the_noise_of_a_client_is_its_share():
    """Discrete Gaussian of 2^16 steps, whatever the update; n of them have σC."""
    plan = plan_of(num_clients=40, batch=40, secure=True, clip_norm=2.0, max_batch_size=40)
    shares, fewest = Shares.of(plan), plan.event.min_batch_size
    noise = shares.with_noise(np.zeros(20_000)).view(np.int64)
    assert shares.step * 2**16 * math.sqrt(fewest) == pytest.approx(plan.noise_stddev)
    assert stats.kstest(noise / 2**16, "norm").pvalue > 1e-4
    assert not np.array_equal(noise, shares.with_noise(np.zeros(20_000)).view(np.int64))


def test_models_too_large_for_the_grid_are_refused():
    shares = Shares(clip_norm=1.0, step=1e-3)
    shares.require_entries(1_000_000)
    with pytest.raises(ValueError, match="fewer parameters"):
        shares.require_entries(1_100_000)


@pytest.mark.parametrize("changes", [{}, {"secure": True, "noise_multiplier": 0.0}])
def test_secure_aggregation_without_noise_of_clients_is_refused(changes):
    with pytest.raises(ValueError, match=r"privacy\.noise=distributed"):
        Shares.of(plan_of(num_clients=40, batch=40, **changes))

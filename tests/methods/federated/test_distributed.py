"""Noise added by clients: enough whoever drops out, its event, and the rounds that are given up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpllm import PrivacyConfig, make_plan
from dpllm.config import ConfigError
from dpllm.mechanism.catalogue import noise_of, with_randomness
from dpllm.mechanism.discrete import DiscreteStep
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.strategies import Workload
from dpllm.methods.federated.distributed import DistributedNoise, DistributedStep
from dpllm.privacy.accounting import delta, epsilon
from tests.mutations import kills

NUMBERS = {"num_units": 100, "sampling_rate": 0.5, "noise_multiplier": 1.5}
ROUND = DistributedStep(**NUMBERS, max_batch_size=100, min_batch_size=11, dropouts=0.2)


def draw_of(num_units=100, batch=50):
    return Draw(num_units=num_units, population=num_units, expected_batch_size=batch, max_batch_size=num_units)


@kills(
    "the rounds that are given up cost nothing",
    "dpllm/methods/federated/distributed.py",
    "return super().failure + float(",
    "return super().failure + 0 * float(",
)
def test_the_cost_is_that_of_discrete_noise_and_of_the_rounds_given_up():
    """With a sensitivity of exactly C: there is no floating-point sum. A failure adds (1 + e^ε) β to δ."""
    plain = DiscreteStep(**NUMBERS, sensitivity=1.0)
    rare = DistributedStep(**NUMBERS, max_batch_size=100, min_batch_size=2, dropouts=0.0)
    assert epsilon([(rare, 20)], 1e-4) == pytest.approx(epsilon([(plain, 20)], 1e-4), abs=1e-4)
    often = DistributedStep(**NUMBERS, max_batch_size=100, min_batch_size=20, dropouts=0.3)
    failure = float(stats.binom.cdf(19, 100, 0.35))
    assert often.failure == pytest.approx(failure)
    for at in (0.5, 1.0, 2.0):  # convexity may lessen it
        least, most = delta([(plain, 1)], at), delta([(often, 1)], at)
        assert least < most <= (least + (1 + math.exp(at + 1e-3)) * failure) * (1 + 1e-6)
    assert epsilon([(often, 1)], 1e-4) > epsilon([(plain, 1)], 1e-4)


def test_a_known_cohort_is_not_sampled():
    """Against the server: a Gaussian over all clients, at whole orders."""
    whole = epsilon([(DiscreteStep(sampling_rate=1.0, noise_multiplier=1.5, sensitivity=1.0), 20)], 1e-4)
    assert epsilon([(ROUND.against_the_server, 20)], 1e-4) == whole > 1.3 * epsilon([(ROUND, 20)], 1e-4)


def test_survivors_of_unequal_clients_are_no_fewer_than_the_bound_says():
    """Of all answer probabilities with one mean, equal ones miss the fewest survivors most often (Hoeffding 1956)."""
    rng = np.random.default_rng(0)
    for least in (2, 3):
        equal = stats.binom.cdf(least - 1, 12, 0.5 * 0.8)
        for _ in range(20):
            shares = rng.dirichlet(np.ones(12) * 0.3) * 12
            shares = np.clip(shares * 0.8, 0, 1)
            rates = 0.5 * shares * (0.8 * 12 / shares.sum()) if shares.sum() else shares
            if (rates > 0.5).any():
                continue
            sizes = np.ones(1)
            for rate in rates:
                sizes = np.convolve(sizes, [1 - rate, rate])
            assert sizes[:least].sum() <= equal + 1e-12


def test_sums_of_discrete_gaussians_are_discrete_gaussians_of_the_summed_variance():
    """At a parameter of 4 steps the two agree to 1e-12 in every ratio; at 2^16 steps no number tells them apart."""
    values = np.arange(-120, 121)
    one = np.exp(-(values**2) / (2 * 4.0**2))
    one /= one.sum()
    total = one
    for _ in range(4):
        total = np.convolve(total, one)
    middle = len(total) // 2
    found = total[middle - 30 : middle + 31]
    whole = np.exp(-(np.arange(-400, 401) ** 2) / (2 * 5 * 4.0**2))
    expected = (whole / whole.sum())[400 - 30 : 400 + 31]
    assert np.abs(found / expected - 1).max() < 1e-10


@pytest.mark.parametrize(("num_units", "batch", "dropouts"), [(100, 50, 0.2), (1302, 200, 0.3), (10**6, 1000, 0.1)])
def test_the_fewest_survivors_are_missed_hardly_ever(num_units, batch, dropouts):
    """The most for which a run of T rounds gives up none but with a probability of 1e-7/N."""
    (chosen,) = DistributedNoise(dropouts=dropouts).candidates(draw_of(num_units, batch), Workload.prefix_sums(20))
    rate, fewest = batch / num_units * (1 - dropouts), chosen.min_batch_size
    allowed = 1e-7 / num_units / 20
    assert stats.binom.cdf(fewest - 1, num_units, rate) <= allowed < stats.binom.cdf(fewest, num_units, rate)


def test_a_plan_stores_its_fewest_survivors_and_costs_its_target():
    privacy = PrivacyConfig(
        epsilon=8,
        clip_norm=1,
        expected_batch_size=50,
        unit="client",
        max_rows_per_unit=4,
        randomness="discrete",
        noise={"kind": "distributed", "dropouts": 0.2},
    )
    plan = make_plan(privacy, 100, 20)
    assert plan.noise.plain_options == {"dropouts": 0.2, "min_batch_size": plan.event.min_batch_size}
    assert 7.99 < plan.epsilon <= 8 and plan.event.sensitivity == 1.0
    assert noise_of(plan.noise).event(plan.draw, plan.noise_multiplier, 1.0) == plan.event


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dropouts": 1.0}, "from 0 to below 1"),
        ({"dropouts": True}, "from 0 to below 1"),
        ({"min_batch_size": 1}, "the sum of one client is that client's update"),
        ({"min_batch_size": 2.0}, "a whole number of at least 2"),
    ],
)
def test_impossible_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        noise_of(Spec.of({"kind": "distributed", **options}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_units": None, "max_batch_size": None}, "needs num_units"),
        ({"min_batch_size": 41}, "between 1 and the 40 clients"),
        ({"min_batch_size": 0}, "between 1 and the 40 clients"),
        ({"dropouts": -0.1}, "from 0 to below 1"),
    ],
)
def test_impossible_rounds_are_refused(changes, match):
    numbers = {**NUMBERS, "max_batch_size": 100, "min_batch_size": 11, "dropouts": 0.2, **changes}
    with pytest.raises(ValueError, match=match):
        DistributedStep(**numbers)


def test_cohorts_that_may_leave_one_client_are_refused():
    with pytest.raises(ValueError, match="raise expected_batch_size"):
        DistributedNoise(dropouts=0.3).candidates(draw_of(100, 10), Workload.prefix_sums(20))


def test_one_trainer_has_no_noise_of_clients():
    """Nor are single rows drawn, nor is the noise made of floating-point numbers."""
    with pytest.raises(ValueError, match="use `dpllm"):
        DistributedNoise().stream(NoiseSource(randomness="discrete"), 4)
    rows = Draw(num_units=10, population=40, expected_batch_size=20, max_batch_size=40, rows_per_unit=4)
    with pytest.raises(ValueError, match="leave sampling"):
        DistributedNoise().event(rows, 1.0, 1.0)
    for randomness in ("os", "chacha20"):
        with pytest.raises(ValueError, match=r"privacy\.randomness=discrete"):
            with_randomness(DistributedNoise(), randomness)


def test_the_configuration_reads_it():
    with pytest.raises(ConfigError, match="dropouts"):
        PrivacyConfig(
            noise_multiplier=1, clip_norm=1, expected_batch_size=5, noise={"kind": "distributed", "dropouts": 2}
        )

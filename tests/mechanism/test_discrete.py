"""Discrete noise: its sensitivity, its Rényi divergences in both directions, and the mechanisms without a proof."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting import rdp
from scipy import special, stats

from dpllm import PrivacyConfig, Step, calibrate_noise_multiplier, epsilon, make_plan
from dpllm.engines import EngineError
from dpllm.engines.deepspeed import DeepSpeedZero
from dpllm.mechanism.discrete import ORDERS, DiscreteNoise, DiscreteStep, divergences, sensitivity
from dpllm.mechanism.generators import NoiseSource, round_and_add_
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Mechanism
from dpllm.privacy.accounting import delta
from dpllm.privacy.calibration import calibrate
from dpllm.privacy.comparison import library_epsilon, zcdp_rho
from tests.mutations import kills


class Silent:
    """No noise, so that only the rounding is left."""

    def draw(self, count):
        return np.zeros(count, np.int64)


def rounded(values, step):
    """Multiples of the grid."""
    block = values.clone()
    round_and_add_(block, step * 2**40, Silent())
    return torch.round(block / step)


def test_rounding_moves_two_sums_apart_by_half_a_step_of_each_entry():
    """|round(a + v) - round(a)| <= |v| + γ sqrt(n), which a tiny v reaches; the noise is added to the rounded sum."""
    generator, step = torch.Generator().manual_seed(0), 2.0**-5
    for size in (1e-3, 1.0, 30.0):
        first = torch.randn(10_000, generator=generator, dtype=torch.float64)
        change = size * torch.nn.functional.normalize(torch.randn(10_000, generator=generator).double(), dim=0)
        apart = step * (rounded(first + change, step) - rounded(first, step)).norm()
        assert apart <= change.norm() + step * 100
    edge = torch.full((10_000,), 0.499 * step, dtype=torch.float64)
    assert step * (rounded(edge + 0.002 * step, step) - rounded(edge, step)).norm() == step * 100


@kills(
    "the sum below discrete noise is not rounded",
    "dpllm/mechanism/generators.py",
    "    block.copy_(torch.from_numpy(whole * step))\n",
    "    block.add_(torch.from_numpy((whole - rounded) * step))\n",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_is_a_whole_multiple_of_the_grid(dtype):
    """The sum itself is not in it: only its nearest multiple. In float32 the last bits are rounded off afterwards."""
    total = torch.full((1000,), math.pi, dtype=dtype)
    NoiseSource(randomness="discrete").add_(total, 1.0)
    whole = total.double() * 2**40
    assert torch.equal(whole, whole.round()) and 0.9 < float(total.std()) < 1.1
    again = [torch.full((1000,), value, dtype=dtype) for value in (math.pi, math.pi + 1e-14)]
    for one in again:
        NoiseSource(seed=3, randomness="discrete").add_(one, 1.0)
    assert torch.equal(*again)


def test_sums_beyond_the_grid_are_cut():
    """They stay finite whole numbers; a sum that is not a number gives a zero with noise."""
    total = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.float64)
    NoiseSource(randomness="discrete").add_(total, 1.0)
    assert total[0] == -total[1] == 2.0**21 or float((total[:2].abs() - 2.0**21).abs().max()) < 10
    assert abs(float(total[2])) < 10


@kills(
    "rounding to the grid and in sums is left out of the sensitivity",
    "dpllm/mechanism/discrete.py",
    "return 1 + SUM_SHARE * max_batch_size + GRID_SHARE * noise_multiplier",
    "return 1.0",
)
def test_the_sensitivity_counts_the_grid_and_the_sums():
    """2^40 entries of γ = σC 2^-40 each, and 16 units in the last place for each of B_max contributions, twice."""
    assert sensitivity(2.0, 1000) == 1 + 2 * 16 * 2**-24 * 1000 + math.sqrt(2**40) * 2.0 * 2**-40


def exact(scale, shift, rate, order):
    """log E_Q[(P/Q)^j] and log E_P[(Q/P)^j] of the sampled discrete Gaussian, by sums over whole numbers."""
    numbers = np.arange(-3000, 3001)
    log_q = -(numbers**2) / (2 * scale**2)
    log_w = -((numbers - shift) ** 2) / (2 * scale**2)
    log_q, log_w = log_q - special.logsumexp(log_q), log_w - special.logsumexp(log_w)
    log_p = np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_w)
    return tuple(special.logsumexp(order * a + (1 - order) * b) for a, b in ((log_p, log_q), (log_q, log_p)))


@pytest.mark.parametrize(("scale", "shift"), [(0.5, 1), (2, 1), (4, 5), (8, 8)])
@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
def test_the_divergences_are_those_of_the_discrete_gaussian_and_of_its_reflection(scale, shift, rate):
    """At whole orders equal in one direction, and at least as large in the other."""
    event = DiscreteStep(sampling_rate=rate, noise_multiplier=scale / shift, sensitivity=1.0)
    claimed = dict(zip(ORDERS, divergences(event.dp_event()), strict=True))
    for order in (2, 3, 5, 12, 40):
        forward, back = exact(scale, shift, rate, order)
        assert forward == pytest.approx((order - 1) * claimed[order], rel=1e-9, abs=1e-12)
        assert back <= (order - 1) * claimed[order] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 7.0, 60.0])
def test_the_other_direction_is_never_larger_point_by_point(order):
    """f(r) + r f(1/r) >= 0, the inequality of the proof, for all ratios and rates."""
    ratio, rate = np.meshgrid(np.logspace(-4, 4, 401), np.linspace(0, 1, 101))

    def f(at):
        mixed = 1 - rate + rate * at
        return mixed**order - mixed ** (1 - order)

    found, scale = f(ratio) + ratio * f(1 / ratio), np.abs(f(ratio)) + ratio * np.abs(f(1 / ratio))
    assert (found >= -1e-9 * scale - 1e-12).all()


STEP = DiscreteStep(sampling_rate=0.02, noise_multiplier=1.0, sensitivity=1.003)


@pytest.mark.parametrize("count", [1, 100, 2000])
def test_epsilon_is_that_of_renyi_accounting_at_whole_orders(count):
    """Not below that of Gaussian noise by privacy loss distributions, and at most that of dp_accounting."""
    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(STEP.dp_event(), count)
    found = epsilon([(STEP, count)], 1e-6)
    assert found <= accountant.get_epsilon(1e-6) + 2e-3 and found >= 0.99 * accountant.get_epsilon(1e-6)
    assert found > epsilon([(Step(sampling_rate=0.02, noise_multiplier=1 / 1.003), count)], 1e-6)
    resumed = epsilon([(STEP, count - count // 2), (STEP, count // 2)], 1e-6)
    assert resumed == found


@kills(
    "a truncated draw of discrete noise costs nothing",
    "dpllm/mechanism/discrete.py",
    "lambda epsilons: failure * (1 + np.exp(epsilons))",
    "lambda epsilons: 0 * epsilons",
)
def test_a_truncated_draw_counts_as_a_failure():
    """It adds (1 + e^ε) T P[Binomial > B_max] to δ, which convexity may lessen."""
    numbers = {"num_units": 1000, "sampling_rate": 0.02, "noise_multiplier": 1.0, "sensitivity": 1.003}
    cut, whole = DiscreteStep(max_batch_size=60, **numbers), DiscreteStep(**numbers)
    failure = 100 * stats.binom.sf(60, 1000, 0.02)
    for at in (0.5, 1.0, 2.0):
        least, most = delta([(whole, 100)], at), delta([(cut, 100)], at)
        assert least < most <= (least + (1 + math.exp(at + 1e-3)) * failure) * (1 + 1e-6)
    assert epsilon([(cut, 100)], 1e-6) > epsilon([(whole, 100)], 1e-6)
    assert cut.truncates and not whole.truncates and cut.without_truncation.max_batch_size is None


def test_a_step_with_a_useless_bound_costs_an_infinite_epsilon():
    """δ is then 1 at every ε up to 600: too little noise, or draws that are nearly always too large."""
    numbers = {"num_units": 200, "sampling_rate": 0.1, "sensitivity": 1.003}
    bare = DiscreteStep(noise_multiplier=0.01, **numbers)
    full = DiscreteStep(noise_multiplier=1.0, max_batch_size=20, **numbers)
    for step in (bare, full):
        for adjacency in ("zero-out", "replace-one"):
            assert epsilon([(step, 20)], 1e-5, adjacency) == math.inf
        assert delta([(step, 20)], 5.0) == 1
    assert epsilon([(STEP, 20), (bare, 1)], 1e-5) == math.inf


def test_a_target_without_a_noise_is_refused_with_a_reason():
    """No ε above 600 is computed, and no noise helps where draws are nearly always too large."""
    for change, match in (
        ({"epsilon": 601.0}, "above 600, the largest ε that is computed from Rényi divergences"),
        ({"epsilon": 8.0, "max_batch_size": 20}, "cannot be reached: at a noise multiplier of 1000"),
    ):
        with pytest.raises(ValueError, match=match):
            make_plan(privacy(noise_multiplier=None, **change), num_units=200, num_steps=20)


def test_calibration_meets_the_target():
    """With more noise than the Gaussian's."""

    def event_of(sigma):
        return DiscreteStep(sampling_rate=0.02, noise_multiplier=sigma, sensitivity=sensitivity(sigma, 100))

    sigma = calibrate(4.0, 1e-5, event_of, 200)
    assert 0.999 * 4 < epsilon([(event_of(sigma), 200)], 1e-5) <= 4
    assert sigma > calibrate_noise_multiplier(4.0, 1e-5, 0.02, 200)


def privacy(**change):
    given = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 20, "randomness": "discrete"}
    return PrivacyConfig(**{**given, **change})


def test_a_plan_is_accounted_with_its_own_sensitivity():
    """Its largest batch is practically never exceeded, so that truncation costs nothing."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    assert isinstance(plan.mechanism.noise, DiscreteNoise) and plan.noise_stddev == 0.5
    assert plan.event == DiscreteStep(
        num_units=1000,
        sampling_rate=0.02,
        noise_multiplier=1.0,
        clip_norm=0.5,
        max_batch_size=plan.max_batch_size,
        sensitivity=sensitivity(1.0, plan.max_batch_size),
    )
    assert (
        stats.binom.sf(plan.max_batch_size, 1000, 0.02) < 1e-30 <= stats.binom.sf(plan.max_batch_size - 3, 1000, 0.02)
    )
    assert plan.epsilon > make_plan(privacy(randomness="os"), 1000, 50).epsilon
    assert plan.epsilon < plan.epsilon_under("replace-one") < math.inf
    huge = make_plan(privacy(max_batch_size=10**6), num_units=10**6, num_steps=50).event
    assert huge.max_batch_size < 200  # the margin of sums is not that of the whole population
    small = make_plan(privacy(max_batch_size=50), num_units=1000, num_steps=50)
    assert small.event.max_batch_size == 50 and small.epsilon > plan.epsilon
    assert make_plan(privacy(noise_multiplier=None, epsilon=2.0), 1000, 50).epsilon <= 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"noise": {"kind": "banded", "bands": 2}}, "no accounting for the noise 'banded'"),
        ({"clipping": "quantile"}, "no accounting for clipping 'quantile'"),
        ({"selection": {"kind": "geometric", "mean": 3}}, "no Rényi bound of a selection of such runs"),
        (
            {"unit": "who", "max_rows_per_unit": 2, "sampling": "example"},
            "no accounting where single rows of users are drawn",
        ),
    ],
)
def test_what_is_not_proved_is_refused(change, match):
    """Correlated noise, thresholds that adapt, selections, and rows drawn singly."""
    with pytest.raises(ValueError, match=match):
        make_plan(privacy(**change), num_units=1000, num_steps=50, num_examples=1000)


def test_noise_and_generator_must_be_of_one_kind():
    """Otherwise the ε of the plan would be that of other noise."""
    with pytest.raises(ValueError, match=r"dpllm\.NoiseSource"):
        DiscreteNoise().stream(NoiseSource(), 3)
    with pytest.raises(ValueError, match="accounts"):
        IndependentNoise().stream(NoiseSource(randomness="discrete"), 3)
    for draw in (lambda source: source.normal_like(torch.zeros(3)), lambda source: source.numbers()):
        with pytest.raises(ValueError, match="needs normal"):
            draw(NoiseSource(randomness="discrete"))


def test_more_trained_parameters_than_the_sensitivity_covers_are_refused():
    """Rounding to the grid moves a sum by sqrt(n)/2 steps; the accounting has it for 2^40 entries."""
    mechanism = make_plan(privacy(), num_units=1000, num_steps=2).mechanism
    mechanism.require_entries(2**40)
    with pytest.raises(ValueError, match="777 parameters"):
        mechanism.require_entries(2**40 + 1)
    Mechanism(mechanism.draw, mechanism.clipping, IndependentNoise(), 1.0).require_entries(2**41)


def test_a_share_of_a_sum_gets_no_noise():
    """Adding other shares to it afterwards would round, and show their last bits."""
    stream, share = DiscreteNoise().stream(NoiseSource(randomness="discrete"), 3), torch.zeros(4)
    with pytest.raises(ValueError, match="2 processes"):
        stream.add_share_("w", share, 1.0, 0, 2)
    assert not share.any()
    with pytest.raises(EngineError, match="DeepSpeedZero"):
        engine = DeepSpeedZero.__new__(DeepSpeedZero)
        engine.collect({}, lambda parameter, total: None, last=True, scale=1.0, to_total=lambda parameter, own: None)


def test_a_loop_of_parts_adds_discrete_noise():
    """By the mechanism's stream, in one process."""
    plan = make_plan(privacy(), num_units=1000, num_steps=2)
    stream = plan.mechanism.noise.stream(NoiseSource(randomness="discrete"), 2)
    for step in range(2):
        stream.begin(step)
        total = torch.zeros(2000)
        stream.add_share_("weight", total, plan.mechanism.noise_stddev, rank=0, size=1)
    assert 0.45 < float(total.std()) < 0.55 and plan.mechanism.history(2) == plan.history


@pytest.mark.parametrize("change", [{"sensitivity": 0.9}, {"sensitivity": math.inf}, {"max_batch_size": 5}])
def test_impossible_steps_are_refused(change):
    """A sensitivity below C, and a largest batch of an unknown population."""
    with pytest.raises(ValueError, match=next(iter(change))):
        DiscreteStep(**{"sampling_rate": 0.02, "noise_multiplier": 1.0, "sensitivity": 1.003, **change})


def test_other_accountants_do_not_take_it_for_gaussian_noise():
    """zCDP counts the sensitivity; a library's distribution would be of Gaussian noise."""
    assert zcdp_rho([(STEP, 10)]) == pytest.approx(10 * 1.003**2 / 2)
    with pytest.raises(ValueError, match="loss distribution"):
        library_epsilon([(STEP, 10)], 1e-6)

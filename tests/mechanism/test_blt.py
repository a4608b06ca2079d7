"""BLT noise: the stream is the inverse of the strategy, and all steps of a start are one Gaussian sum."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy import linalg, optimize, stats

from dpllm.config import PrivacyConfig
from dpllm.mechanism.blt import BltNoise, BltStep
from dpllm.mechanism.catalogue import from_fields, noise_of, spec_of, to_fields
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.events import Step
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Mechanism, Spec
from dpllm.mechanism.sampling import seeded_rng
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.accounting import delta, epsilon, merge
from dpllm.privacy.calibration import prediction
from dpllm.privacy.plan import PrivacyPlan, format_plan, make_plan
from tests.mutations import kills

DECAYS, WEIGHTS, SCALE = (0.97, 0.6, 0.1), (0.2, 0.3, 0.1), 0.25
NOISE = BltNoise(3, DECAYS, WEIGHTS, SCALE)
DRAW = Draw(num_units=60, population=60, expected_batch_size=8, max_batch_size=8)


def matrix(num_steps):
    """M, from its definition."""
    rest = [sum(w * d**j for d, w in zip(DECAYS, WEIGHTS, strict=True)) for j in range(num_steps - 1)]
    return SCALE * linalg.toeplitz([1.0, *rest], np.zeros(num_steps))


def step_of(sigma, **others):
    numbers = {"num_units": 60, "batch_size": 8, "decays": DECAYS, "weights": WEIGHTS, "scale": SCALE}
    return BltStep(noise_multiplier=sigma, **{**numbers, **others})


def released(num_steps, entries=4, seed=0, dtype=torch.float64):
    """(T, entries): the noise of the steps of a run."""
    stream, rows = NOISE.stream(NoiseSource(seed=seed), num_steps), []
    for step in range(num_steps):
        stream.begin(step)
        total = torch.zeros(entries, dtype=dtype)
        stream.add_share_("w", total, 1.0, 0, 1)
        rows.append(total)
    return torch.stack(rows).numpy()


@kills(
    "the buffers of earlier noise are added and not taken back",
    "dpllm/mechanism/blt.py",
    "noise.sub_(buffer, alpha=weight)",
    "noise.add_(buffer, alpha=weight)",
)
def test_the_stream_is_the_inverse_of_the_strategy():
    """M applied to the noise gives the independent draws, in float64."""
    generator = NoiseSource(seed=0)
    white = torch.stack([generator.normal_like(torch.zeros(4, dtype=torch.float64)) for _ in range(90)]).numpy()
    assert released(90) == pytest.approx(np.linalg.solve(matrix(90), white), abs=1e-10)


def test_the_covariance_over_steps_is_that_of_the_strategy():
    """(MᵀM)⁻¹, over many entries, in float32; each step is Gaussian with the variance that the guard is told."""
    noise = released(10, entries=60_000, dtype=torch.float32).astype(float)
    inverse = np.linalg.inv(matrix(10))
    expected = inverse @ inverse.T
    sizes = np.sqrt(np.diag(expected))
    assert np.abs(noise @ noise.T / 60_000 - expected).max() < 0.03 * sizes.max() ** 2
    for step in (0, 3, 9):
        assert NOISE.variance(step, 10) == pytest.approx(expected[step, step], rel=1e-9)
        assert stats.kstest(noise[step] / sizes[step], "norm").pvalue > 1e-6


@pytest.mark.parametrize(("num_units", "size"), [(12, 3), (13, 5), (9, 9), (20, 3)])
def test_no_unit_of_the_sampler_changes_the_releases_by_more_than_is_charged(num_units, size):
    """‖M (steps of the unit)‖ over all units of real orders; for a whole number of batches the charge is attained."""
    draw = Draw(num_units=num_units, population=num_units, expected_batch_size=size, max_batch_size=size)
    event = NOISE.event(draw, 1.0, 1.0)
    for num_steps in (1, 4, 5, 17, 40):
        steps = list(itertools.islice(NOISE.sampler(draw).steps(seeded_rng(num_steps)), num_steps))
        entered = np.array([[unit in units for units in steps] for unit in range(num_units)], dtype=float)
        changes = np.linalg.norm(matrix(num_steps) @ entered.T, axis=0)
        assert changes.max() <= event.sensitivity(num_steps) * (1 + 1e-12)
        if num_units % size == 0:
            assert changes.max() == pytest.approx(event.sensitivity(num_steps), rel=1e-9)


def gaussian_epsilon(moved, at):
    """ε of one Gaussian release that moves by this many standard deviations (Balle and Wang 2018, theorem 8)."""

    def excess(value):
        high, low = moved / 2 - value / moved, -moved / 2 - value / moved
        return stats.norm.cdf(high) - math.exp(value + stats.norm.logcdf(low)) - at

    return optimize.brentq(excess, 1e-9, 500)


@kills(
    "steps in a fixed order cost as if a run were complete",
    "dpllm/mechanism/blt.py",
    "self.noise_multiplier / self.sensitivity(num_steps)",
    "self.noise_multiplier",
)
@pytest.mark.parametrize(("adjacency", "factor"), [("zero-out", 1), ("replace-one", 2)])
@pytest.mark.parametrize("starts", [[40], [1], [25], [15, 25], [1] * 5])
def test_epsilon_is_that_of_one_gaussian_release_for_each_start(starts, adjacency, factor):
    """Starts compose by their squares; under replace-one a unit moves twice as far. By the closed form."""
    event = step_of(0.9)
    moved = factor * math.sqrt(sum((event.sensitivity(count) / 0.9) ** 2 for count in starts))
    found = epsilon([(event, count) for count in starts], 1e-6, adjacency)
    assert found == pytest.approx(gaussian_epsilon(moved, 1e-6), rel=2e-3)
    assert found >= gaussian_epsilon(moved, 1e-6)


def test_epsilon_is_that_of_dp_accounting():
    """Its Gaussian mechanism, with the sensitivity of the dense matrix."""
    column = matrix(40)[:, ::7][:, :6].sum(axis=1)
    sigma = 1.3 / np.linalg.norm(column)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(sigma, value_discretization_interval=1e-4)
    assert epsilon([(step_of(1.3), 40)], 1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=1e-3)
    ((one, count),) = merge([(step_of(1.3), 40)])
    assert count == 1 and isinstance(one.dp_event(), dp_accounting.DpEvent)
    assert delta([(step_of(1.3), 40)], 2.0) == pytest.approx(theirs.get_delta_for_epsilon(2.0), rel=1e-2)


def test_numbers_that_would_take_minutes_are_not_computed():
    """Given ones are taken for any number of steps."""
    with pytest.raises(ValueError, match="000 steps"):
        BltNoise().candidates(DRAW, Workload.prefix_sums(200_001))
    (found,) = BltNoise(1, (0.5,), (0.5,)).candidates(DRAW, Workload.prefix_sums(200_001))
    assert found.scale is not None


def test_a_run_that_goes_on_costs_less_than_one_that_is_resumed_and_more_steps_never_cost_less():
    """A resume is charged as two releases: the fresh order may visit a unit at once again."""
    event = step_of(1.0)
    costs = [event.sensitivity(steps) for steps in range(1, 60)]
    assert costs == sorted(costs) and event.restarts
    whole = epsilon([(event, 6)], 1e-6)
    assert epsilon([(event, 3), (event, 3)], 1e-6) > 1.2 * whole
    ((one, count),) = merge([(event, 3)] * 2)
    assert count == 2 and one == Step(sampling_rate=1.0, noise_multiplier=1 / event.sensitivity(3))


def test_noise_beyond_what_is_computed_is_charged_as_less():
    """More than the largest σ counts as the largest; less than the least as none."""
    ((one, _),) = merge([(step_of(1e6), 1)])
    assert one.noise_multiplier == 1e6
    ((one, _),) = merge([(step_of(1e-3, scale=1.0), 30)])
    assert one.noise_multiplier == 0 and epsilon([(step_of(1e-3, scale=1.0), 30)], 1e-6) == math.inf
    assert epsilon([(step_of(0.0), 30)], 1e-6) == math.inf


def config(**options):
    return PrivacyConfig(**{"clip_norm": 0.5, "expected_batch_size": 8, "noise": "blt", "delta": 1e-5, **options})


def test_a_plan_has_all_numbers_and_costs_its_target(tmp_path):
    """σ is that of one Gaussian release, since a complete run has sensitivity 1; the plan is read back."""
    plan = make_plan(config(epsilon=3), 400, 120)
    noise, event = plan.mechanism.noise, plan.event
    assert plan.epsilon <= 3 and plan.epsilon > 2.99
    assert 1 - 1e-8 < event.sensitivity(120) <= 1
    assert plan.noise_multiplier == pytest.approx(
        1 / optimize.brentq(lambda m: gaussian_epsilon(m, 1e-5) - 3, 0.1, 9), rel=1e-3
    )
    assert plan.max_batch_size == 8 and None not in (noise.decays, noise.weights, noise.scale)
    assert noise.candidates(DRAW, Workload.prefix_sums(120)) == [noise]
    plan.save(tmp_path / "plan.json")
    again = PrivacyPlan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash and again.event == event and hash(again.event) == hash(event)
    assert noise_of(Spec.of(spec_of(noise).to_plain())) == noise


def test_an_event_is_read_back_from_a_ledger():
    """JSON has lists; equal steps have to be equal."""
    event = step_of(0.9)
    fields = {**to_fields(event), "decays": list(DECAYS), "weights": list(WEIGHTS)}
    assert from_fields(fields) == event and hash(from_fields(fields)) == hash(event)


def test_the_plan_says_that_nothing_is_sampled():
    """Instead of a sampling rate."""
    plan = make_plan(config(noise_multiplier=1.0), 403, 120)
    rows = dict(format_plan(plan))
    assert (
        rows["share of the units in a step, b/N"] == "0.0198511; units are not sampled"
        and "sampling rate q" not in rows
    )


def test_it_has_less_noise_than_independent_noise_that_is_sampled():
    """E2E, one pass and ten passes at ε = 8: 0.53 and 0.72 of the noise of DP-SGD with its amplification."""
    shares = []
    for passes in (1, 10):
        noise = {"kind": "blt", "buffers": 2}
        plan = make_plan(config(epsilon=8, delta=1e-6, expected_batch_size=1024, noise=noise), 42_061, 41 * passes)
        predicted = prediction(plan, Workload.prefix_sums(41 * passes))
        shares.append(predicted.noise / predicted.independent)
        assert plan.noise_multiplier == pytest.approx(0.65298, abs=1e-4)
    assert shares == pytest.approx([0.533, 0.717], abs=0.01)


def test_a_largest_batch_beside_a_fixed_one_is_refused():
    """Every step has exactly B units."""
    with pytest.raises(ValueError, match="noise=blt"):
        make_plan(config(noise_multiplier=1.0, max_batch_size=20), 400, 10)
    assert make_plan(config(noise_multiplier=1.0, max_batch_size=8), 400, 10).max_batch_size == 8


def test_sampling_that_amplifies_is_refused():
    """Rows drawn singly, or a rate below 1 in an event: no gain from sampling is accounted for."""
    with pytest.raises(ValueError, match="noise="):
        users = {"unit": "author", "max_rows_per_unit": 2, "sampling": "example"}
        make_plan(config(noise_multiplier=1.0, **users), 400, 10, num_examples=700)
    with pytest.raises(ValueError, match="gains"):
        step_of(1.0, sampling_rate=0.1)


def test_draws_of_a_run_cannot_be_others_than_those_of_the_order():
    """The sampler of the mechanism is that of its noise; a mechanism cannot be given another one."""
    mechanism = Mechanism(DRAW, FlatClipping(1.0), NOISE, 1.0)
    assert mechanism.sampler == NOISE.sampler(DRAW) and mechanism.event == step_of(1.0)
    assert mechanism.history([3, 2]) == [(step_of(1.0), 3), (step_of(1.0), 2)]
    assert isinstance(IndependentNoise().event(DRAW, 1.0, 1.0), Step)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buffers": 0}, "noise.buffers must be a whole number from 1 to 4, or auto, got 0"),
        ({"decays": [0.5]}, "noise.decays and noise.weights belong together"),
        ({"buffers": 2, "decays": [0.5], "weights": [0.5]}, "write buffers: 1"),
        ({"buffers": 1, "decays": [0.5], "weights": [1.5]}, "noise.weights must be at least 0"),
        ({"scale": 0.5}, "noise.scale needs decays and weights"),
        ({"buffers": 1, "decays": [0.5], "weights": [0.5], "scale": 0}, "noise.scale must be at least 1e-09"),
        ({"buffers": 1, "decays": [0.5], "weights": [0.5], "scale": 1.01}, "at most 1, got 1.01"),
        ({"bands": 3}, "noise.bands is not an option of 'blt'"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    """Above all numbers for which the sensitivity is not proved."""
    with pytest.raises(ValueError, match=text):
        noise_of(Spec.of({"kind": "blt", **options}))


def test_noise_without_numbers_has_no_event_and_no_noise():
    """They are computed by make_plan, from numbers that are all public; given decays and weights keep theirs."""
    with pytest.raises(ValueError, match="make_plan"):
        BltNoise(2).event(DRAW, 1.0, 1.0)
    half = BltNoise(1, (0.9,), (0.2,))
    with pytest.raises(ValueError, match="make_plan"):
        half.event(DRAW, 1.0, 1.0)
    (whole,) = half.candidates(DRAW, Workload.prefix_sums(30))
    assert (whole.decays, whole.weights) == ((0.9,), (0.2,))
    assert whole.event(DRAW, 1.0, 1.0).sensitivity(30) == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_units": None},
        {"num_units": 60.0},
        {"batch_size": 0},
        {"batch_size": 61},
        {"decays": (0.9,)},
        {"weights": (0.2, 0.3, -0.1)},
        {"scale": 2.0},
        {"sigma": 1e7},
    ],
)
def test_an_event_out_of_range_is_refused(bad):
    """A ledger with such numbers was not written by this library."""
    with pytest.raises(ValueError):
        step_of(**{"sigma": 1.0, **bad})

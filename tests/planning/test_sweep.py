"""The sweep: its figures of a point hold, and the recommendation follows its rule."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from dpllm.mechanism.events import Step
from dpllm.planning.sweep import (
    NEARLY_BEST,
    TOLERANCE,
    Budget,
    Cost,
    default_grid,
    equal_compute,
    recommend,
    sweep,
)
from dpllm.privacy.accounting import DISCRETIZATION, epsilon
from dpllm.privacy.calibration import calibrate_noise_multiplier
from dpllm.privacy.risk import gaussian_distance

SETTING = {
    "target_epsilon": 2.0,
    "delta": 1e-6,
    "num_units": 42_000,
    "expected_batch_sizes": [512, 1024, 2048],
    "step_counts": [100, 200, 400],
}


LINE = {**SETTING, "step_counts": [200], "compute": 1024 * 200}
FEW = {**SETTING, "expected_batch_sizes": [512, 2048], "step_counts": [100, 200]}


def limit_share(noise_multiplier: float) -> float:
    """The share of the full batch's ratio at σ, in the limit of many steps at a small sampling rate, zero-out."""
    inverse = noise_multiplier**-2
    return math.sqrt(inverse / math.expm1(inverse)) if inverse < 700 else math.sqrt(inverse) * math.exp(-inverse / 2)


@pytest.fixture(scope="module")
def result():
    return sweep(**SETTING)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_every_point_keeps_the_budget_and_uses_it(adjacency):
    """ε of each point, recomputed on the plan's grid, is at most the target and at most 1 % below it."""
    for point in sweep(**FEW, adjacency=adjacency).points:
        step = Step(sampling_rate=point.sampling_rate, noise_multiplier=point.noise_multiplier)
        assert 2 * 0.99 <= epsilon([(step, point.num_steps)], 1e-6, adjacency, DISCRETIZATION) <= 2
        assert 2 * 0.99 <= point.epsilon <= 2


def test_the_noise_of_a_point_is_that_of_the_plan_s_calibration():
    """Within the tolerance of the quick search; where it is exact, the same number."""
    budget = Budget(4.0, 1e-6, 42_000, "zero-out")
    for b, t in ((512, 50), (2048, 200)):
        sigma = calibrate_noise_multiplier(4.0, 1e-6, b / 42_000, t)
        assert budget.least_noise(b, t).sigma == pytest.approx(sigma, rel=0.01)
        assert budget.least_noise(b, t, exact=True).sigma == sigma


@pytest.mark.parametrize(
    ("budget", "size"),
    [(Budget(1.0, 1e-6, 100_000, "zero-out"), (100, 160_000)), (Budget(0.01, 1e-6, 42_000, "zero-out"), (16, 100))],
    ids=["many steps", "small target"],
)
def test_where_the_coarse_grid_asks_for_too_much_noise_the_fine_one_decides(budget, size):
    """Over many steps, and for a target near its width, the coarse grid would ask for a quarter more noise."""
    assert budget.target_epsilon * (1 - TOLERANCE) <= budget.least_noise(*size).epsilon <= budget.target_epsilon


def test_numbers_of_a_point_fit_together(result):
    """Rates, ratios, examples and epochs follow from b, T, σ and N."""
    assert len(result.points) == 9
    for point in result.points:
        b, t, sigma = point.expected_batch_size, point.num_steps, point.noise_multiplier
        assert point.sampling_rate == b / 42_000
        assert point.noise_to_batch_ratio == sigma / b
        assert point.signal_to_noise == pytest.approx(math.sqrt(t) * b / sigma)
        assert point.share_of_full_batch == pytest.approx(
            point.signal_to_noise / result.budget.full_batch_signal_to_noise
        )
        assert point.examples == b * t and point.epochs == b * t / 42_000
        assert point.tokens is None and point.seconds is None and point.effective_steps is None


def test_larger_batches_lower_the_noise_ratio_and_more_steps_raise_it(result):
    """The two directions of the grid, between all neighbours."""
    ratio = {(point.expected_batch_size, point.num_steps): point.noise_to_batch_ratio for point in result.points}
    for steps, (small, large) in itertools.product([100, 200, 400], itertools.pairwise([512, 1024, 2048])):
        assert ratio[large, steps] < ratio[small, steps]
    for size, (few, many) in itertools.product([512, 1024, 2048], itertools.pairwise([100, 200, 400])):
        assert ratio[size, few] < ratio[size, many]


@pytest.mark.parametrize("gradient_rms", [0.0, 3e-4, 1.0])
@pytest.mark.parametrize("num_units", [3000, 42_000])
def test_the_rule_picks_what_a_loop_over_the_line_picks(num_units, gradient_rms):
    """The smallest batch within 10 % of the best, found here by other means."""
    result = sweep(**{**LINE, "num_units": num_units}, gradient_rms=gradient_rms)
    assert [(point.expected_batch_size, point.num_steps) for point in result.line] == [
        (512, 400),
        (1024, 200),
        (2048, 100),
    ]

    def score(point):
        power = (point.noise_multiplier / point.expected_batch_size) ** 2 + gradient_rms**2
        return math.sqrt(point.num_steps / power)

    best = max(score(point) for point in result.line)
    picked = None
    for point in reversed(result.line):
        if score(point) >= 0.9 * best:
            picked = point
    assert result.recommended == picked


def test_the_rule_depends_on_what_limits_the_run(result):
    """Noise alone asks for the largest batch, where σ is small; a strong signal for the most steps."""
    assert result.recommended.expected_batch_size == 2048
    strong = recommend(result.line, gradient_rms=1.0)
    assert (strong.expected_batch_size, strong.num_steps) == (512, 400)
    # With few units σ is large, the signal-to-noise ratio is near the full batch's everywhere, and steps are free.
    few = sweep(**{**LINE, "num_units": 2500})
    assert few.recommended.expected_batch_size == 512
    assert "smaller ones may be as good" in few.reason


def test_effective_steps_are_those_the_noise_leaves():
    """T / (1 + (σ/b)²/r²): more than half of them while the noise is below the signal."""
    (point,) = sweep(**{**SETTING, "expected_batch_sizes": [1024], "step_counts": [100]}, gradient_rms=1e-3).points
    assert point.effective_steps == pytest.approx(100 / (1 + (point.noise_multiplier / 1024 / 1e-3) ** 2))
    assert 50 < point.effective_steps < 100


def test_min_steps_keeps_the_recommendation_from_too_few(result):
    """Points of fewer steps stay in the table and are not recommended."""
    assert result.recommended.num_steps == 100
    bound = sweep(**SETTING, min_steps=150)
    assert bound.recommended.num_steps == 200 and len(bound.points) == 9
    assert "at least 150 steps" in bound.reason


def test_max_compute_is_the_corner_of_the_grid_split_in_other_ways():
    """The line of the largest compute goes on beyond the grid's steps."""
    result = sweep(**FEW, compute="max")
    assert result.compute == 2048 * 200
    assert [(p.expected_batch_size, p.num_steps) for p in result.line] == [(512, 800), (2048, 200)]
    assert len(result.points) == 5


def test_a_compute_in_examples_takes_the_grid_s_steps_where_they_nearly_fit():
    """T comes from the grid within 5 %, and is K/b rounded down elsewhere, so that K is not exceeded."""
    result = sweep(**FEW, compute=103_000)
    assert [(p.expected_batch_size, p.num_steps) for p in result.line] == [(512, 200), (2048, 50)]
    assert all(point.examples <= 103_000 for point in result.line)


def test_full_batches_are_the_ceiling_whatever_their_steps():
    """b = N reaches N μ exactly (within the calibration's half percent), for any T; half of it under replace-one."""
    for adjacency, part in (("zero-out", 1), ("replace-one", 2)):
        result = sweep(
            target_epsilon=2.0,
            delta=1e-5,
            num_units=1000,
            expected_batch_sizes=[100, 1000],
            step_counts=[10, 1000],
            adjacency=adjacency,
        )
        assert result.budget.full_batch_signal_to_noise == pytest.approx(1000 * gaussian_distance(2.0, 1e-5) / part)
        for point in result.points:
            if point.expected_batch_size == 1000:
                assert point.share_of_full_batch == pytest.approx(1, rel=5e-3)
            else:
                assert point.share_of_full_batch < 1


@pytest.mark.parametrize(("target", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (8.0, 1e-10), (50.0, 1e-6)])
def test_gaussian_distance_is_that_of_the_gaussian_mechanism(target, delta):
    """Noise of 1/μ on a sum of sensitivity 1 costs (ε, δ), by dp_accounting."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(GaussianDpEvent(1 / gaussian_distance(target, delta)))
    assert accountant.get_epsilon(delta) == pytest.approx(target, rel=5e-3)


def test_in_the_limit_the_share_depends_on_sigma_alone():
    """Many steps at a small rate: the accountant's share is `limit_share`, at several σ."""
    result = sweep(
        target_epsilon=1.0,
        delta=1e-6,
        num_units=10**5,
        expected_batch_sizes=[100, 200, 400],
        step_counts=[40_000],
        compute=4_000_000,
    )
    shares = [point.share_of_full_batch for point in result.points]
    assert min(shares) < 0.8 and max(shares) > 0.93
    for point in result.points:
        assert point.share_of_full_batch == pytest.approx(limit_share(point.noise_multiplier), rel=0.03)


@pytest.mark.parametrize("sigma", [0.4, 0.7, 1.2, 3.0, 20.0])
def test_the_slope_along_equal_compute_is_the_derived_one(sigma):
    """d log(√T b/σ) / d log b from the limit by differences, with its two ends: 1/2 at little noise, 1/(4σ²) at much.

    On the limit μ is fixed by x = K b / (N² μ²) = 1 / (exp(1/σ²) - 1), which is proportional to b.
    """

    def at(log_x):
        return math.log1p(math.exp(-log_x)) ** -0.5  # σ

    log_x = -math.log(math.expm1(sigma**-2))
    step = 1e-4
    slope = (math.log(limit_share(at(log_x + step))) - math.log(limit_share(at(log_x - step)))) / (2 * step)
    assert slope == pytest.approx((1 - sigma**2 * -math.expm1(-(sigma**-2))) / 2, rel=1e-4)
    assert 0 < slope < 0.5
    if sigma == 20:
        assert slope == pytest.approx(1 / (4 * sigma**2), rel=0.01)
    if sigma == 0.4:
        assert slope > 0.4


def test_the_accountant_has_the_derived_slope():
    """Twice the batch and half the steps: the ratio's gain, by the accountant, is between the slopes of both ends."""
    result = sweep(
        target_epsilon=1.0,
        delta=1e-7,
        num_units=10**6,
        expected_batch_sizes=[400, 800, 1600],
        step_counts=[40_000],
        compute=400 * 80_000,
    )

    def slope(sigma):
        return (1 - sigma**2 * -math.expm1(-(sigma**-2))) / 2

    for low, high in itertools.pairwise(result.line):
        gain = math.log2(high.signal_to_noise / low.signal_to_noise)
        middle = slope(math.sqrt(low.noise_multiplier * high.noise_multiplier))
        assert gain == pytest.approx(middle, abs=0.05)
        assert 0.1 < gain < 0.3


def test_limit_share_at_its_ends():
    """1 at much noise, 0 at little, without overflow, 90 % at σ = 1.57."""
    assert limit_share(100.0) == pytest.approx(1, abs=1e-4)
    assert 0 < limit_share(0.03) < 1e-200
    assert limit_share(0.0381) == pytest.approx(limit_share(0.0377), rel=1)
    assert limit_share(1.57) == pytest.approx(NEARLY_BEST, abs=1e-3)


def test_what_would_change_the_noise(result):
    """Each change against a calibration of its own; all three lower the ratio, none by more than a half."""
    batch, budget, units = result.what_if
    at = result.recommended
    wider = sweep(**{**SETTING, "expected_batch_sizes": [4096], "step_counts": [at.num_steps]}).points[0]
    assert batch.noise_to_batch_ratio == pytest.approx(wider.noise_to_batch_ratio, rel=0.01)
    double = sweep(**{**SETTING, "target_epsilon": 4.0, "expected_batch_sizes": [2048], "step_counts": [100]}).points[0]
    assert budget.noise_to_batch_ratio == pytest.approx(double.noise_to_batch_ratio, rel=0.01)
    for change in (batch, budget, units):
        assert 0.5 < change.factor < 1
        assert change.factor == pytest.approx(change.noise_to_batch_ratio / at.noise_to_batch_ratio, rel=0.01)


def test_twice_a_batch_of_more_than_half_the_units_is_impossible():
    """An impossible change has no number."""
    result = sweep(**{**SETTING, "num_units": 3000, "expected_batch_sizes": [2048], "step_counts": [100]})
    assert result.what_if[0].noise_to_batch_ratio is None and result.what_if[0].factor is None
    assert result.what_if[2].factor is not None


def test_an_unreachable_point_stays_with_its_reason():
    """It has no σ and is not recommended; the others are as they would be without it."""
    result = sweep(
        target_epsilon=0.001,
        delta=1e-4,
        num_units=1000,
        expected_batch_sizes=[1000],
        step_counts=[1, 10**7],
        compute=1000,
    )
    reached, missing = result.points
    assert (
        missing.noise_multiplier is None
        and missing.to_dict()["noise_multiplier"] is None is missing.to_dict()["epsilon"]
    )
    assert "ε is still" in missing.reason
    assert reached.recommended and reached.reason is None
    with pytest.raises(ValueError, match="grid reaches"):
        sweep(target_epsilon=0.001, delta=1e-4, num_units=1000, expected_batch_sizes=[1000], step_counts=[10**7])


def test_cost_gives_tokens_and_time():
    """From a measured rate, from an estimate, or not at all."""
    measured = sweep(**FEW, cost=Cost(tokens_per_unit=30.0, tokens_per_second=1000.0)).points[0]
    assert measured.tokens == 512 * 100 * 30 and measured.seconds == 512 * 100 * 30 / 1000
    assert Cost().tokens(10) is None and Cost().seconds(10) is None
    assert Cost(tokens_per_unit=3).seconds(10) is None
    two = Cost(tokens_per_unit=1, flops_per_token=10, peak_flops=100, utilization=0.5, gpus=2)
    assert two.seconds(1000) == 100


def test_default_grid_surrounds_the_recipe():
    """Five by five at most, powers of two around it, b never above N, nothing below 1, nothing twice."""
    assert default_grid(2048, 36, 255_564) == ([512, 1024, 2048, 4096, 8192], [9, 18, 36, 72, 144])
    assert default_grid(2048, 36, 2048)[0] == [512, 1024, 2048]
    assert default_grid(1, 1, 10) == ([1, 2, 4], [1, 2, 4])


def test_equal_compute_groups_what_costs_the_same(result):
    """Diagonals of the grid, by compute; points without σ are in none."""
    groups = equal_compute(result.points)
    assert [len(group) for group in groups] == [1, 2, 3, 2, 1]
    assert [group[0].examples for group in groups] == sorted(group[0].examples for group in groups)
    without = [dataclasses.replace(point, noise_multiplier=None) for point in result.points]
    assert equal_compute(without) == []


def test_to_dict_is_json(result):
    """Everything, in plain values; the recommended point is also listed by itself."""
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["recommended"]["expected_batch_size"] == result.recommended.expected_batch_size
    assert len(values["points"]) == 9 and sum(point["recommended"] for point in values["points"]) == 1
    assert values["what_if"][0]["factor"] == result.what_if[0].factor
    lost = dataclasses.replace(result.points[0], noise_multiplier=None, epsilon=None).to_dict()
    assert list(lost) == list(values["points"][0]) and lost["noise_multiplier"] is None is lost["epsilon"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon must be above 0 and finite, got 0.0"),
        ({"target_epsilon": math.inf}, "target_epsilon must be above 0"),
        ({"delta": 1 / 42_000}, "delta must be above 0 and below 1/N"),
        ({"delta": 0.0}, "delta must be above 0 and below 1/N"),
        ({"num_units": 0}, "num_units must be an integer of at least 1, got 0"),
        ({"adjacency": "add-or-remove"}, "adjacency must be one of zero-out, replace-one, got 'add-or-remove'"),
        ({"expected_batch_sizes": []}, "the grid has no expected_batch_size"),
        ({"step_counts": []}, "the grid has no num_steps"),
        ({"expected_batch_sizes": [512, 42_001]}, "expected_batch_size=42001 exceeds the number of units, 42000"),
        ({"expected_batch_sizes": [0]}, "expected_batch_size must be an integer of at least 1, got 0"),
        ({"step_counts": [10.0]}, "num_steps must be an integer of at least 1, got 10.0"),
        ({"step_counts": [True]}, "num_steps must be an integer of at least 1, got True"),
        ({"min_steps": 0}, "min_steps must be an integer of at least 1, got 0"),
        ({"min_steps": 401}, "at least min_steps=401 steps"),
        ({"gradient_rms": -1.0}, "gradient_rms must be at least 0 and finite, got -1.0"),
        ({"gradient_rms": math.nan}, "gradient_rms must be at least 0 and finite, got nan"),
        ({"compute": "largest"}, "compute must be .* got 'largest'"),
        ({"compute": 0}, "compute must be"),
        ({"compute": 511}, "511 examples are less than one step of the smallest batch, 512"),
    ],
)
def test_bad_input_is_refused(changes, message):
    """Each with the problem and the remedy."""
    with pytest.raises(ValueError, match=message):
        sweep(**{**SETTING, **changes})


def test_a_line_without_a_usable_point_is_refused(result):
    """`recommend` never returns a point without σ."""
    without = [dataclasses.replace(point, noise_multiplier=None) for point in result.line]
    with pytest.raises(ValueError, match="min_steps"):
        recommend(without)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens_per_unit": 0.0}, "tokens_per_unit must be above 0 and finite, got 0.0"),
        ({"gpus": 0}, "gpus must be above 0"),
        ({"utilization": 1.1}, "utilization is a share of peak_flops and at most 1, got 1.1"),
        ({"tokens_per_unit": 1.0, "flops_per_token": 1.0}, "flops_per_token, peak_flops and utilization: give all"),
        ({"tokens_per_second": 1.0}, "needs tokens_per_unit"),
        (
            {
                "tokens_per_unit": 1.0,
                "tokens_per_second": 1.0,
                "flops_per_token": 1.0,
                "peak_flops": 1.0,
                "utilization": 0.5,
            },
            "give one of the two",
        ),
    ],
)
def test_costs_that_make_no_sense_are_refused(given, message):
    """Out of range, incomplete or twice."""
    with pytest.raises(ValueError, match=message):
        Cost(**given)


@pytest.mark.parametrize("given", [(0, 36, 100), (200, 36, 100), (50, 0, 100)])
def test_a_grid_around_nothing_is_refused(given):
    """The recipe's own numbers must be possible."""
    with pytest.raises(ValueError, match=r"expected_batch_size.*(at least 1|exceeds)|num_steps must be an integer"):
        default_grid(*given)

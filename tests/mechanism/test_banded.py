"""Banded noise: the strategy is optimal, the stream is its inverse, and two steps of a unit are a cycle apart."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpllm.config import PrivacyConfig
from dpllm.mechanism.banded import BandedNoise, BandedStep, BandedStream, GeometricStream
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.events import Step
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.parts import Draw, Mechanism
from dpllm.mechanism.sampling import seeded_rng
from dpllm.mechanism.strategies import Workload, coefficients
from dpllm.privacy.accounting import epsilon, merge
from dpllm.privacy.calibration import calibrate
from dpllm.privacy.plan import make_plan
from dpllm.report import definition
from tests.mutations import kills

# Of jax_privacy 2.0 and an independent computation, for T = 410 (E2E: N = 42 061, B = 1024, δ = 1e-6).
COEFFICIENTS = {
    2: [0.764289, 0.644873],
    4: [0.617370, 0.499071, 0.452945, 0.405737],
    8: [0.549345, 0.391878, 0.350253, 0.326086, 0.307516, 0.290614, 0.272719, 0.249488],
}
RMSE = {1: 14.33527, 2: 10.25604, 4: 7.45371, 8: 5.57308}
SIGMA = {1: 0.71758, 2: 0.83187, 4: 0.99707, 8: 1.23699}
REPLACE_ONE = {1: 9.92, 4: 11.61, 8: 12.79}


GEOMETRIC = {"strategy": "geometric", "ratio": 0.98}
FREE = {"strategy": "free", "coefficients": (0.8, 0.5, 0.3)}


def matrix(bands, num_steps, **strategy):
    """M, by its first column; without a strategy that of plans of earlier versions."""
    column = np.zeros(num_steps)
    first = BandedNoise(bands, **strategy).column(num_steps) if strategy else coefficients(bands, num_steps)
    column[:bands] = first[:num_steps]
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(num_steps)] for i in range(num_steps)])


def step_of(bands, sigma):
    rate = 1024 * bands / 42_061
    return BandedStep(
        num_units=42_061, sampling_rate=rate, max_batch_size=1248, noise_multiplier=sigma, clip_norm=0.5, bands=bands
    )


@pytest.mark.parametrize("bands", COEFFICIENTS)
def test_coefficients_are_those_of_other_implementations(bands):
    """To 1e-5."""
    assert coefficients(bands, 410) == pytest.approx(COEFFICIENTS[bands], abs=1e-5)


@pytest.mark.parametrize("bands", RMSE)
def test_the_error_of_prefix_sums_is_that_of_the_dense_matrix(bands):
    """Root mean square of the rows of A M⁻¹, A the prefix sums."""
    dense = np.tril(np.ones((410, 410))) @ np.linalg.inv(matrix(bands, 410))
    error = BandedNoise(bands).error(Workload.prefix_sums(410))
    assert error == pytest.approx(math.sqrt((dense**2).sum() / 410), rel=1e-9)
    assert error == pytest.approx(RMSE[bands], abs=1e-4)


@pytest.mark.parametrize(("bands", "num_steps"), [(1, 1), (1, 9), (2, 1), (3, 7), (4, 410), (9, 5), (16, 40)])
def test_columns_have_norm_one_at_most_and_those_of_a_unit_share_no_row(bands, num_steps):
    """The privacy depends on this: a unit's steps are b apart, so that its columns are orthogonal."""
    dense = matrix(bands, num_steps)
    assert (np.linalg.norm(dense, axis=0) <= 1 + 1e-12).all()
    gram = dense.T @ dense
    for first in range(bands):
        of_unit = gram[first::bands, first::bands]
        assert np.abs(of_unit - np.diag(np.diag(of_unit))).max(initial=0) == 0


@pytest.mark.parametrize("bands", SIGMA)
def test_sigma_for_a_target(bands):
    """To 1e-4, and ε under replace-one."""
    found = calibrate(8.0, 1e-6, lambda sigma: step_of(bands, sigma), 410)
    assert found == pytest.approx(SIGMA[bands], abs=1e-4)
    if bands in REPLACE_ONE:
        assert epsilon([(step_of(bands, found), 410)], 1e-6, "replace-one") == pytest.approx(
            REPLACE_ONE[bands], abs=0.01
        )


def test_steps_cost_as_many_rounds_as_cycles_were_begun():
    """Each a Poisson sampled Gaussian over a group; a resume begins a new cycle."""
    one = Step(
        num_units=math.ceil(42_061 / 8), sampling_rate=8 * 1024 / 42_061, max_batch_size=1248, noise_multiplier=1.2
    )
    for steps, rounds in ((1, 1), (8, 1), (9, 2), (410, 52)):
        assert merge([(step_of(8, 1.2), steps)]) == ((one, rounds),)
    assert merge([(step_of(8, 1.2), 100), (step_of(8, 1.2), 310)]) == ((one, 13 + 39),)
    assert merge([(step_of(8, 1.2), 101), (step_of(8, 1.2), 309)]) == ((one, 13 + 39),)
    assert merge([(step_of(8, 1.2), 1)] * 410) == ((one, 410),)


def test_starts_that_begin_again_are_charged_each():
    """Four starts of two steps cost four cycles of correlated noise, eight steps of one start two; DP-SGD the same."""
    banded, independent = (
        make_plan(
            PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=4, noise=noise), 64, 8
        ).mechanism
        for noise in ({"kind": "banded", "bands": 4}, "independent")
    )
    assert epsilon(banded.history([2, 2, 2, 2]), 1e-3) == epsilon(banded.history(16), 1e-3)
    assert epsilon(banded.history([2, 2, 2, 2]), 1e-3) > 1.2 * epsilon(banded.history(8), 1e-3)
    assert epsilon(independent.history(np.array([2, 6])), 1e-3) == epsilon(independent.history([8]), 1e-3)
    with pytest.raises(ValueError, match=r"2\.5 times"):
        epsilon(banded.history([2, 2.5]), 1e-3)


def test_one_band_is_dp_sgd():
    """Same event, same σ, same noise."""
    plain = Step(num_units=42_061, sampling_rate=1024 / 42_061, max_batch_size=1248, noise_multiplier=0.7)
    assert epsilon([(step_of(1, 0.7), 410)], 1e-6) == epsilon([(plain, 410)], 1e-6)
    assert not step_of(1, 0.7).restarts and step_of(2, 0.7).restarts
    stream = BandedNoise(1).stream(NoiseSource(seed=3), 9)
    totals = [torch.zeros(50) for _ in range(3)]
    for step, total in enumerate(totals):
        stream.begin(step)
        stream.add_share_("w", total, 2.0, 0, 1)
    generator = NoiseSource(seed=3)
    for total in totals:
        assert torch.allclose(total, 2 * generator.normal_like(total))


def released(bands, num_steps, entries=4, stddev=1.0, seed=0, **strategy):
    """(T, entries): the noise of a run."""
    stream = BandedNoise(bands, **strategy).stream(NoiseSource(seed=seed), num_steps)
    rows = []
    for step in range(num_steps):
        stream.begin(step)
        total = torch.zeros(entries, dtype=torch.float64)
        stream.add_share_("w", total, stddev, 0, 1)
        rows.append(total)
    return torch.stack(rows).numpy()


@kills(
    "the noise before is added and not taken back",
    "dpllm/mechanism/banded.py",
    "noise.sub_(before, alpha=coefficient)",
    "noise.add_(before, alpha=coefficient)",
)
@kills(
    "geometric noise forgets the cycle before",
    "dpllm/mechanism/banded.py",
    ".mul_(self._ratio**self._bands)",
    ".mul_(0.0)",
)
@pytest.mark.parametrize(
    ("bands", "strategy"),
    [
        *((bands, {}) for bands in (2, 4, 8)),
        *((bands, GEOMETRIC) for bands in (2, 3, 8, 30, 41)),
        (5, {**GEOMETRIC, "ratio": 1.0}),
        (4, {**GEOMETRIC, "ratio": 0.3}),
        (3, FREE),
    ],
)
def test_the_stream_is_the_inverse_of_the_strategy(bands, strategy):
    """M⁻¹ times the numbers drawn, and M times the noise is them again; also with more bands than steps."""
    noise = released(bands, 40, entries=5, stddev=0.5, seed=7, **strategy)
    generator = NoiseSource(seed=7)
    drawn = np.stack([generator.normal_like(torch.zeros(5, dtype=torch.float64)).numpy() for _ in range(40)])
    dense = matrix(bands, 40, **strategy)
    np.testing.assert_allclose(np.linalg.inv(dense) @ drawn, 2 * noise, atol=1e-12)
    np.testing.assert_allclose(dense @ noise, 0.5 * drawn, atol=1e-12)


def test_geometric_noise_is_that_of_the_general_recursion_in_float32():
    """The cheap recursion is a different order of the same sums, over hundreds of steps."""
    cheap = BandedNoise(8, **GEOMETRIC).stream(NoiseSource(seed=5), 600)
    general = BandedStream(NoiseSource(seed=5), BandedNoise(8, **GEOMETRIC).column(600))
    assert type(cheap) is GeometricStream
    for step in range(600):
        totals = [torch.zeros(500) for _ in range(2)]
        for stream, total in zip((cheap, general), totals, strict=True):
            stream.begin(step)
            stream.add_share_("w", total, 1.0, 0, 1)
    torch.testing.assert_close(*totals, rtol=0, atol=1e-4)
    assert totals[0].std() > 3


@pytest.mark.parametrize("strategy", [{}, GEOMETRIC])
def test_each_step_has_the_variance_that_the_guard_is_told(strategy):
    """The square of the norm of row t of M⁻¹, and a Gaussian."""
    noise = released(4, 12, entries=40_000, stddev=1.0, **strategy)
    inverse = np.linalg.inv(matrix(4, 12, **strategy))
    for step in (0, 1, 5, 11):
        variance = BandedNoise(4, **strategy).variance(step, 12)
        assert variance == pytest.approx((inverse[step] ** 2).sum(), rel=1e-9)
        assert noise[step].var() == pytest.approx(variance, rel=0.05)
        assert stats.kstest(noise[step] / math.sqrt(variance), "norm").pvalue > 1e-3


def drawn(bands, num_steps, num_units=60, size=5, most=60, seed=0):
    draw = Draw(num_units=num_units, population=num_units, expected_batch_size=size, max_batch_size=most)
    steps = BandedNoise(bands).sampler(draw).steps(seeded_rng(seed))
    return [set(units.tolist()) for units in itertools.islice(steps, num_steps)]


@kills(
    "units are drawn from all groups in every step",
    "dpllm/mechanism/banded.py",
    "                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)\n",
    (
        "                group = np.arange(self.num_units)\n"
        "                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)\n"
    ),
)
def test_a_unit_enters_only_steps_that_are_whole_cycles_apart():
    """And each step draws from a group of ⌊N/b⌋ or ⌈N/b⌉ units."""
    steps = drawn(7, 4000)
    groups = [set().union(*steps[group::7]) for group in range(7)]
    assert sum(map(len, groups)) == 60 and set().union(*groups) == set(range(60))
    assert {len(group) for group in groups} == {8, 9}


def test_units_of_a_group_enter_independently_with_the_rate_that_is_charged():
    """Chi-square over units, and no two of them together more often than by chance."""
    steps = drawn(3, 12_000, num_units=30, size=2)
    present = np.array([[unit in step for unit in range(30)] for step in steps], dtype=float)
    counts = present.sum(axis=0)
    z = (counts - 4000 * 0.2) / math.sqrt(4000 * 0.2 * 0.8)
    assert stats.chi2.sf((z**2).sum(), 30) > 1e-4
    group = [unit for unit in range(30) if present[0::3, unit].any()]
    correlation = np.corrcoef(present[0::3][:, group].T) - np.eye(len(group))
    assert np.abs(correlation).max() < 5 / math.sqrt(4000)


def test_batches_are_cut_and_the_split_is_another_in_every_run():
    """At most B_max units; groups from fresh entropy."""
    assert max(map(len, drawn(2, 400, size=8, most=10))) == 10
    first, second = ([set().union(*drawn(3, 300, seed=seed)[group::3]) for group in range(3)] for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize("bands", [0, -1, 1.5, "4", True, 1001])
def test_a_number_of_bands_that_is_none_is_refused(bands):
    """Whole and above 0."""
    with pytest.raises(ValueError, match="bands must"):
        BandedNoise(bands)


def test_groups_smaller_than_a_batch_and_single_rows_are_refused():
    """There is no accounting for them."""
    draw = Draw(num_units=100, population=100, expected_batch_size=30, max_batch_size=60)
    with pytest.raises(ValueError, match="most 3"):
        BandedNoise(4).sampler(draw)
    rows = Draw(num_units=100, population=300, expected_batch_size=30, max_batch_size=300, rows_per_unit=3)
    with pytest.raises(ValueError, match="accounting where"):
        BandedNoise(4).event(rows, 1.0, 1.0)


@kills(
    "the columns of a strategy may have any norm",
    "dpllm/mechanism/strategies.py",
    "    if norm**2 > 1 + _NORM_SLACK:\n",
    "    if norm > 2:\n",
)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"bands": 3, "strategy": "free", "coefficients": (0.8, 0.6, 0.1)},
            "norm 1.00498756, but at most 1 is allowed",
        ),
        ({"bands": 2, "strategy": "free", "coefficients": (0.6, 0.8 + 1e-9)}, "norm 1, but at most 1"),
        ({"bands": 2, "strategy": "free", "coefficients": (0.6, 0.8)}, "grows 1.33-fold with every step"),
        ({"bands": 2, "strategy": "free", "coefficients": (0.0, 0.8)}, "the first one at least 0.001"),
        ({"bands": 2, "strategy": "free", "coefficients": (0.8, math.nan)}, "must be finite"),
        ({"bands": 3, "strategy": "free", "coefficients": (0.8, 0.5)}, "a list of bands=3 numbers"),
        ({"bands": 3, "coefficients": (0.8, 0.5, 0.1)}, "noise.coefficients needs strategy: free"),
        ({"bands": "auto", "strategy": "free", "coefficients": (0.8,)}, "and a number of bands"),
        *(
            ({"bands": 3, "strategy": "geometric", "ratio": ratio}, "noise.ratio must be above 0 and at most 1")
            for ratio in (0.0, -0.5, 1.001, math.nan, math.inf, True, "0.9")
        ),
        ({"bands": 1, "strategy": "free", "coefficients": (0.5,)}, "bands=1 is independent"),
        ({"bands": 3, "strategy": "best"}, "noise.strategy must be geometric or free, got 'best'"),
    ],
)
def test_a_strategy_that_is_none_is_refused(options, text):
    """Above all a column of norm above 1, with which a unit could change the releases by more than C."""
    with pytest.raises(ValueError, match=text):
        BandedNoise(**options)


def test_a_strategy_without_numbers_has_no_event_and_no_noise():
    """Only make_plan computes them; a plan that is loaded has them."""
    draw = Draw(num_units=100, population=100, expected_batch_size=5, max_batch_size=30)
    for noise in (BandedNoise(4, "geometric"), BandedNoise(4, "free")):
        for use in (
            lambda n: n.event(draw, 1.0, 1.0),
            lambda n: n.stream(NoiseSource(), 9),
            lambda n: n.variance(0, 9),
        ):
            with pytest.raises(ValueError, match="make_plan"):
                use(noise)
    for use in (lambda n: n.event(draw, 1.0, 1.0), lambda n: n.sampler(draw), lambda n: n.stream(NoiseSource(), 9)):
        with pytest.raises(ValueError, match="bands=auto"):
            use(BandedNoise())


def test_candidates_have_numbers_and_fit_into_the_groups():
    """Of auto, all bands for which a group has a batch and that are not more than the steps."""
    draw = Draw(num_units=70, population=70, expected_batch_size=10, max_batch_size=70)
    found = BandedNoise("auto", "geometric").candidates(draw, Workload.released([1.0] * 40, 0.9))
    assert [noise.bands for noise in found] == [1, 2, 3, 4, 6]
    assert found[0] == BandedNoise(1) and all(0.3 <= noise.ratio <= 1 for noise in found[1:])
    assert [noise.bands for noise in BandedNoise().candidates(draw, Workload.released([1.0] * 3, 0.9))] == [1, 2, 3]
    (free,) = BandedNoise(7).candidates(draw, Workload.prefix_sums(40))
    assert free.strategy == "free" and free.coefficients == pytest.approx(coefficients(7, 40), abs=1e-7)
    assert free.candidates(draw, Workload.released([1.0] * 3)) == [free]
    with pytest.raises(ValueError, match="most 7"):
        BandedNoise(8).candidates(draw, Workload.released([1.0] * 40))


@kills(
    "a step of more bands than there are units is charged",
    "dpllm/mechanism/banded.py",
    "if self.num_units is None or not 1 <= self.bands <= self.num_units:",
    "if False:",
)
@pytest.mark.parametrize(
    "bad",
    [{"bands": 0}, {"bands": 42_062}, {"bands": 4.0}, {"bands": True}, {"max_batch_size": 0}, {"num_units": None}],
)
def test_an_event_out_of_range_is_refused(bad):
    """In a ledger that another program wrote."""
    fields = {"num_units": 42_061, "sampling_rate": 0.1, "max_batch_size": 9, "noise_multiplier": 1.0, "bands": 4}
    with pytest.raises(ValueError, match=next(iter(bad))):
        BandedStep(**{**fields, **bad})


def test_a_release_has_the_standard_deviation_of_the_dense_matrix():
    """σC is that of z, and a release has more."""
    draw = Draw(num_units=200, population=200, expected_batch_size=10, max_batch_size=33)
    mechanism = Mechanism(draw, FlatClipping(0.5), BandedNoise(4), 1.0)
    first, last = mechanism.release_stddevs(16)
    inverse = np.linalg.inv(matrix(4, 16))
    assert (first, last) == pytest.approx(tuple(0.5 * np.linalg.norm(inverse[step]) for step in (0, 15)))


def test_plan_and_report_state_the_standard_deviation_of_a_release():
    """About, since other machines may find other last digits; DP-SGD has σC only."""
    config = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 10}
    banded = make_plan(PrivacyConfig(**config, noise={"kind": "banded", "bands": 4}), num_units=200, num_steps=16)
    first, last = (f"{value:.2g}" for value in banded.mechanism.release_stddevs(16))
    assert first != last and float(first) > 1.2
    words = f"of about {first} in the first step and about {last} in step 16"
    assert words in definition.mechanism(banded)

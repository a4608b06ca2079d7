"""Tests of dpllm.privacy.accounting. Reference numbers were computed with dp_accounting 0.6.0."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpllm.mechanism.events import Step, StepOfRows, dp_sgd
from dpllm.privacy.accounting import (
    DISCRETIZATION,
    delta,
    delta_function,
    discretization_used,
    epsilon,
    epsilon_curve,
    merge,
)
from dpllm.privacy.calibration import calibrate_noise_multiplier, choose_max_batch_size, solve
from tests.mutations import kills

RELATIONS = {
    "zero-out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def plain(sigma: float, rate: float) -> Step:
    return Step(sampling_rate=rate, noise_multiplier=sigma)


# σ, q, T, δ, ε zero-out, ε replace-one, ε zero-out at discretization 1e-3, advantage
VECTORS = [
    (1.0, 0.02, 1500, 1e-5, 4.813654994542411, 7.915548868450321, 4.814195329150747, 0.376185959438491),
    (0.8, 1024 / 42000, 410, 1e-5, 5.213749854380606, 6.9667206206158, 5.213871985354965, 0.3365041684547),
    (0.6, 1e-4, 100000, 1e-6, 0.9637584244605347, 1.0228584604430269, 0.9906773208025731, 0.0486736269139),
    (4.0, 0.01, 10000, 1e-5, 0.9469993068930963, 1.993194377026107, 0.9600452104972911, 0.1010065352874),
]


@kills(
    "the Fourier transform is not tilted",
    "dpllm/privacy/accounting.py",
    "pld.compose(parts, pld.tilt_for(parts, delta=delta))",
    "pld.compose(parts)",
)
@pytest.mark.parametrize(("sigma", "rate", "steps", "at", "zero", "replace", "coarse", "advantage"), VECTORS)
def test_reference_vectors(
    sigma: float, rate: float, steps: int, at: float, zero: float, replace: float, coarse: float, advantage: float
) -> None:
    """ε under both adjacencies and the advantage equal dp_accounting's, but for the small margin upwards."""
    history = [(plain(sigma, rate), steps)]
    assert zero - 5e-9 <= epsilon(history, at) <= zero + 2e-6
    assert replace - 5e-9 <= epsilon(history, at, "replace-one") <= replace + 2e-6
    assert coarse - 5e-9 <= epsilon(history, at, discretization=1e-3) <= coarse + 2e-6
    assert delta(history, 0.0) == pytest.approx(advantage, abs=1e-8)


def test_truncated_reference() -> None:
    """ε of a truncated run equals dp_accounting's, and truncation is not free."""
    step = Step(num_units=42000, sampling_rate=1024 / 42000, max_batch_size=1184, noise_multiplier=0.8)
    assert epsilon([(step, 410)], 1e-5) == pytest.approx(5.215571209662058, abs=1e-6)
    assert epsilon([(step, 410)], 1e-5) > epsilon([(plain(0.8, 1024 / 42000), 410)], 1e-5) + 1e-3


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("sigma", "rate", "size"),
    [(0.8, 0.001, None), (3.0, 0.3, None), (1.3, 0.9, 199), (1.0, 0.02, 6), (4.0, 0.3, 62), (2.0, 1.0, 150)],
)
def test_agrees_with_the_accountant_of_the_library(sigma: float, rate: float, size: int | None, adjacency: str) -> None:
    """The vectorised distribution is the library's, for every pair, with and without truncation."""
    units, steps = 200, 30
    event = (
        dp_accounting.TruncatedSubsampledGaussianDpEvent(units, rate, size, sigma)
        if size is not None
        else dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    )
    accountant = PLDAccountant(RELATIONS[adjacency], 1e-3).compose(event, steps)
    step = Step(num_units=units, sampling_rate=rate, max_batch_size=size, noise_multiplier=sigma)
    ours = epsilon([(step, steps)], 1e-4, adjacency, 1e-3)
    assert ours == pytest.approx(max(1e-3, accountant.get_epsilon(1e-4)), abs=1e-6)
    assert delta([(step, steps)], 1.0, adjacency, 1e-3) == pytest.approx(min(1.0, accountant.get_delta(1.0)), rel=2e-9)


def _exact_delta(
    units: int, rate: float, size: int, sigma: float, others: int, own: int, instead: int, at: float
) -> float:
    """Return the larger divergence of one step when all other units contribute `others`, and one `own` or `instead`.

    It sums over the number drawn: only the others, or the others and the unit, cut to `size` at random.
    """
    grid = np.linspace(-size - 8 * sigma, size + 8 * sigma, 8001)
    with_unit, without = np.zeros_like(grid), np.zeros_like(grid)
    for count in range(units):
        chance = stats.binom.pmf(count, units - 1, rate)
        kept_alone = min(count, size)
        alone = stats.norm.pdf(grid, others * kept_alone, sigma)
        # The neighbour: the unit is still drawn and takes its place in the batch, but contributes `instead`.
        together = min(count + 1, size)
        stays = together / (count + 1)
        pushed = stats.norm.pdf(grid, others * together, sigma)
        present = stays * stats.norm.pdf(grid, others * (together - 1) + own, sigma) + (1 - stays) * pushed
        absent = stays * stats.norm.pdf(grid, others * (together - 1) + instead, sigma) + (1 - stays) * pushed
        with_unit += chance * (rate * present + (1 - rate) * alone)
        without += chance * (rate * absent + (1 - rate) * alone)
    width = grid[1] - grid[0]
    one_way = np.maximum(with_unit - math.exp(at) * without, 0).sum() * width
    other_way = np.maximum(without - math.exp(at) * with_unit, 0).sum() * width
    return max(one_way, other_way)


def test_bound_holds_for_tiny_instances() -> None:
    """Brute force: no arrangement of contributions in {-1, 0, 1} has a larger δ than the accounting of a step says."""
    tightest = math.inf
    for sigma, (units, rate, size) in itertools.product([0.7, 1.5], [(6, 0.4, 2), (6, 0.4, 4), (12, 0.2, 3)]):
        step = Step(num_units=units, sampling_rate=rate, max_batch_size=size, noise_multiplier=sigma)
        for at in (0.1, 0.5, 1.5):
            for adjacency, instead in (("zero-out", 0), ("replace-one", -1)):
                bound = delta([(step, 1)], at, adjacency)
                for others in (-1, 0, 1):
                    exact = _exact_delta(units, rate, size, sigma, others, 1, instead, at)
                    assert exact <= bound + 1e-9
                    tightest = min(tightest, bound - exact)
    assert tightest < 0.05, "the instances should come near the bound, or they show nothing"


@pytest.mark.parametrize("sigma", [1, True, np.float32(1.0), np.int64(2), "1.0", None])
def test_noise_that_is_no_float_is_refused(sigma: object) -> None:
    """An accountant dropped terms when it was given other number types; ours accepts only floats."""
    with pytest.raises(ValueError, match="noise_multiplier must"):
        plain(sigma, 0.02)  # type: ignore[arg-type]
    assert type(plain(np.float64(1.0), 0.02).noise_multiplier) is float


def test_monotone() -> None:
    """ε falls with σ and δ, and rises with steps, sampling rate, and a tighter truncation."""

    def cost(sigma: float = 1.0, rate: float = 0.02, steps: int = 200, at: float = 1e-5, size: int = 90) -> float:
        return epsilon(
            [(Step(num_units=2500, sampling_rate=rate, max_batch_size=size, noise_multiplier=sigma), steps)],
            at,
            discretization=1e-3,
        )

    base = cost()
    assert cost(sigma=1.1) < base < cost(sigma=0.9)
    assert cost(rate=0.018) < base < cost(rate=0.022)
    assert cost(steps=150) < base < cost(steps=250)
    assert cost(at=1e-4) < base < cost(at=1e-6)
    assert cost(size=100) <= base < cost(size=70)
    assert (
        epsilon(
            [(Step(num_units=2500, sampling_rate=0.02, max_batch_size=90, noise_multiplier=1.0), 200)],
            1e-5,
            "replace-one",
            1e-3,
        )
        > base
    )


def test_composition_is_that_of_the_merged_history() -> None:
    """Order and grouping of steps, and their clip norms, do not change ε; two kinds of steps compose."""
    one, two = plain(1.0, 0.02), plain(1.2, 0.01)
    reference = epsilon([(one, 200), (two, 100)], 1e-5)
    scattered = [
        (two, 40),
        (one, 150),
        (two, 60),
        (Step(sampling_rate=0.02, noise_multiplier=1.0, clip_norm=3.0), 50),
        (one, 0),
    ]
    assert epsilon(scattered, 1e-5) == reference
    assert merge(scattered) == merge([(one, 200), (two, 100)])
    assert reference > max(epsilon([(one, 200)], 1e-5), epsilon([(two, 100)], 1e-5))
    # dp_accounting 0.6.0
    history = [(plain(1.0, 0.02), 1000), (plain(1.0, 0.01), 500), (plain(1.2, 0.01), 500)]
    assert epsilon(history, 1e-5) == pytest.approx(4.2478, abs=1e-4)


def test_full_batches_are_a_gaussian_mechanism() -> None:
    """With q = 1, T steps at σ are one Gaussian mechanism at σ/sqrt(T): the analytic δ is met from above."""
    at = 1.0
    for adjacency, sigma in (("zero-out", 20 / math.sqrt(100)), ("replace-one", 10 / math.sqrt(100))):
        exact = stats.norm.cdf(0.5 / sigma - at * sigma) - math.exp(at) * stats.norm.cdf(-0.5 / sigma - at * sigma)
        bound = delta([(plain(20.0, 1.0), 100)], at, adjacency)
        assert exact <= bound <= exact * (1 + 1e-5)


def test_never_zero_after_a_step() -> None:
    """A step with hardly any effect still costs: the resolution is the least ε that is stated."""
    history = [(plain(100.0, 1e-4), 1)]
    assert epsilon(history, 1e-2) == DISCRETIZATION
    assert epsilon([], 1e-5) == 0.0 == delta([], 0.5)
    assert epsilon([(plain(1.0, 0.1), 0)], 1e-5) == 0.0


def test_no_noise_is_no_privacy() -> None:
    """One step without noise makes ε infinite and δ one."""
    history = [(plain(1.0, 0.02), 10), (plain(0.0, 0.02), 1)]
    assert epsilon(history, 1e-5) == math.inf == epsilon(history, 1e-5, "replace-one")
    assert delta(history, 3.0) == 1.0


def test_curve_and_delta_are_inverse() -> None:
    """δ at the ε of δ is δ, up to the rounding of ε and its margin."""
    history = [(Step(num_units=1000, sampling_rate=0.02, max_batch_size=45, noise_multiplier=1.0), 100)]
    for at, value in epsilon_curve(history, [1e-4, 1e-6], "replace-one"):
        assert delta(history, value, "replace-one") == pytest.approx(at, rel=1e-5)


@pytest.mark.parametrize(
    ("width", "expected"),
    [(1e-3, 1.7217), (1e-4, 1.7111), (1e-5, 1.7105)],  # by a Fourier transform in long double
)
def test_tiny_delta_over_many_steps(width: float, expected: float) -> None:
    """Where a float64 Fourier transform alone falls below the truth (1.7002 at 1e-3), ε is that of extended precision.

    A finer grid then gives a smaller ε, as it must.
    """
    history = [(plain(0.614, 4.08e-5), 100_000)]
    assert epsilon(history, 1.1e-10, discretization=width) == pytest.approx(expected, abs=6e-5)


def test_delta_below_the_tails_is_refused() -> None:
    """A δ smaller than the mass cut off the tails is refused instead of reported as infinite."""
    with pytest.raises(ValueError, match="certified"):
        epsilon([(plain(2.0, 0.001), 100_000)], 1e-16)


# dp_accounting 0.6.0, MixtureOfGaussiansDpEvent on the grid 1e-3, q = 1024/42000, T = 410, δ = 1e-5
@pytest.mark.parametrize(
    ("sigma", "k", "expected"),
    [
        (1.0, 1, 3.122),
        (1.0, 2, 6.890263),
        (1.0, 4, 15.79),
        (1.0, 8, 38.4),
        (2.0, 2, 2.228),
        (4.0, 4, 2.051),
        (8.0, 8, 1.999),
    ],
)
def test_rows_drawn_singly(sigma: float, k: int, expected: float) -> None:
    """ε of a user with k rows that are drawn and clipped by themselves is that of the mixture of Gaussians."""
    step = dp_sgd(sampling_rate=1024 / 42000, noise_multiplier=sigma, rows_per_unit=k)
    found = epsilon([(step, 410)], 1e-5, discretization=1e-3)
    assert found == pytest.approx(expected, abs=1e-6 if k == 2 and sigma == 1 else 1e-2 * expected / 3)
    assert (
        epsilon([(Step(sampling_rate=1024 / 42000, noise_multiplier=sigma), 410)], 1e-5, discretization=1e-3) <= found
    )


def test_rows_drawn_always_are_one_gaussian() -> None:
    """With q = 1 all k rows are there in every step: a Gaussian sum of sensitivity k."""
    rows, whole = dp_sgd(sampling_rate=1.0, noise_multiplier=9.0, rows_per_unit=3), plain(3.0, 1.0)
    assert epsilon([(rows, 20)], 1e-5) == pytest.approx(epsilon([(whole, 20)], 1e-5), abs=1e-9)


def test_replacing_a_unit_of_several_rows_costs_by_group_privacy() -> None:
    """Under replace-one, δ is that of removing and adding: (1 + exp(ε/2)) δ'(ε/2); ε is at least twice as large."""
    history = [(dp_sgd(num_units=100, sampling_rate=0.02, noise_multiplier=4.0, rows_per_unit=4), 410)]
    single, double = epsilon(history, 1e-5), epsilon(history, 1e-5, "replace-one")
    assert double > 2 * single
    assert delta(history, double, "replace-one") == pytest.approx(1e-5, rel=1e-3)
    half = delta(history, double / 2)
    assert (1 + math.exp(double / 2)) * half == pytest.approx(1e-5, rel=1e-3)
    assert (1 + math.exp(double / 2)) * half <= 1e-5 * (1 + 1e-6)
    assert (
        epsilon(
            [(dp_sgd(num_units=100, sampling_rate=0.5, noise_multiplier=0.3, rows_per_unit=4), 10)], 1e-5, "replace-one"
        )
        == math.inf
    )


def test_delta_function_is_delta_at_every_epsilon() -> None:
    """Composed once for all ε, it says the same as `delta`, but for the rounding of T steps."""
    for adjacency in ("zero-out", "replace-one"):
        history = [
            (Step(num_units=1000, sampling_rate=0.02, max_batch_size=45, noise_multiplier=1.0), 100),
            (dp_sgd(num_units=100, sampling_rate=0.02, noise_multiplier=4.0, rows_per_unit=2), 50),
        ]
        at_once = delta_function(history, adjacency, tilted=False)
        for at in (0.0, 0.7, 3.0):
            assert at_once(at) == pytest.approx(delta(history, at, adjacency), rel=1e-6, abs=1e-11)
        assert delta_function([], adjacency)(1.0) == 0.0


def test_huge_loss_range_widens_the_grid() -> None:
    """With very little noise the grid gets wider, and says so; the number stays an upper bound."""
    step = plain(0.05, 1.0)
    used = discretization_used([(step, 4)])
    assert used > DISCRETIZATION == discretization_used([(plain(1.0, 0.02), 1000)])
    sigma, at = 0.05 / 2, epsilon([(step, 4)], 1e-5)
    exact = stats.norm.cdf(0.5 / sigma - at * sigma) - math.exp(at + stats.norm.logcdf(-0.5 / sigma - at * sigma))
    assert exact <= 1e-5 and at < 1100


@pytest.mark.parametrize(
    ("target", "rate", "steps", "units", "size", "adjacency"),
    [
        (8.0, 1024 / 42000, 410, None, None, "zero-out"),
        (3.0, 0.05, 60, 2000, 171, "replace-one"),
        (8.0, 0.02, 100, 5000, 100, "zero-out"),  # truncation strikes in half of the steps
        (0.05, 0.001, 50, 100_000, 170, "zero-out"),
        (1.0, 1.0, 10, 50, 50, "zero-out"),
    ],
)
def test_calibration_meets_the_target_from_below(
    target: float, rate: float, steps: int, units: int | None, size: int | None, adjacency: str
) -> None:
    """Re-evaluated, the calibrated σ costs at most the target, and one per mille less noise would cost more."""
    sigma = calibrate_noise_multiplier(target, 1e-5, rate, steps, units, size, adjacency)
    reached = epsilon(
        [(Step(num_units=units, sampling_rate=rate, max_batch_size=size, noise_multiplier=sigma), steps)],
        1e-5,
        adjacency,
    )
    assert target * (1 - 5e-4) <= reached <= target
    assert (
        epsilon(
            [(Step(num_units=units, sampling_rate=rate, max_batch_size=size, noise_multiplier=sigma * 0.999), steps)],
            1e-5,
            adjacency,
        )
        > target
    )


def test_a_solution_is_on_the_safe_side_of_a_jump_and_outside_an_infinite_cost() -> None:
    """Where ε jumps over the target, the σ just above the jump is taken; too little noise for any ε is no failure."""
    assert 2 < solve(lambda sigma: 1.0 if sigma > 2 else 9.0, 4.0, 1.0, tolerance=1e-3) < 2 + 1e-6
    infinite = solve(lambda sigma: math.inf if sigma < 3 else 40 / sigma**2, 4.0, 0.1, tolerance=1e-3)
    assert math.sqrt(10) <= infinite <= math.sqrt(10) * 1.001


def test_calibration_reference() -> None:
    """Calibration to ε = 8 gives the σ found with dp_accounting 0.6.0's own calibration."""
    assert calibrate_noise_multiplier(8, 1e-5, 1024 / 42000, 410) == pytest.approx(0.67890, abs=1e-4)


def chosen(size: int, units: int, steps: int, sigma: float, delta: float) -> int:
    """B_max of DP-SGD at these numbers."""

    def event_of(at_most: int) -> Step:
        return Step(num_units=units, sampling_rate=size / units, max_batch_size=at_most, noise_multiplier=sigma)

    return choose_max_batch_size(size, units, event_of, steps, delta)


def test_max_batch_size_rule() -> None:
    """The rule is 7 standard deviations, raised where truncation would cost more than 1e-3, and never above N."""
    assert chosen(1024, 42000, 410, 0.68, 1e-5) == 1248
    assert chosen(20, 30, 10, 1.0, 1e-3) == 30
    assert chosen(64, 1000, 10, 0.0, 1e-5) == 120
    raised = chosen(4, 1_000_000, 100_000, 0.7, 1e-9)
    assert raised > 18
    cost = [
        epsilon(
            [(Step(num_units=1_000_000, sampling_rate=4e-6, max_batch_size=b, noise_multiplier=0.7), 100_000)],
            1e-9,
            discretization=1e-3,
        )
        for b in (18, raised, None)
    ]
    assert cost[0] > cost[2] + 1e-3 > cost[1]


@pytest.mark.parametrize("at", [0.0, 1.0, -1.0, math.nan])
def test_bad_delta_is_refused(at: float) -> None:
    """δ must lie between 0 and 1."""
    with pytest.raises(ValueError, match="delta must"):
        epsilon([(plain(1.0, 0.1), 1)], at)


def test_bad_arguments_are_refused() -> None:
    """Negative ε and counts, unknown adjacencies, empty histories and targets out of reach are errors."""
    step = plain(1.0, 0.1)
    with pytest.raises(ValueError, match="epsilon must"):
        delta([(step, 1)], -1.0)
    with pytest.raises(ValueError, match="-1 times"):
        epsilon([(step, -1)], 1e-5)
    with pytest.raises(ValueError, match="add-or-remove"):
        epsilon([(step, 1)], 1e-5, "add-or-remove")
    with pytest.raises(ValueError, match="target_epsilon must"):
        calibrate_noise_multiplier(math.inf, 1e-5, 0.1, 10)
    with pytest.raises(ValueError, match="num_steps must"):
        calibrate_noise_multiplier(1.0, 1e-5, 0.1, 0)
    with pytest.raises(ValueError, match="target_epsilon=1e-05"):
        calibrate_noise_multiplier(1e-5, 1e-5, 0.1, 10)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"sampling_rate": 0.0}, "sampling_rate must be above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"num_units": 10**23, "max_batch_size": 1000}, "at most 1,000,000,000,000,000"),
        ({"num_units": None}, "max_batch_size needs num_units"),
    ],
)
def test_bad_step_is_refused(fields: dict[str, float | None], match: str) -> None:
    """A step whose numbers cannot be is an error."""
    good = {"num_units": 100, "sampling_rate": 0.1, "max_batch_size": 30, "noise_multiplier": 1.0, "clip_norm": 1.0}
    with pytest.raises(ValueError, match=match):
        Step(**{**good, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.3, 0.609, 1.0, 3.0])
def test_group_privacy_of_a_few_steps_has_an_epsilon_or_none(sigma: float) -> None:
    """Where ε' is so large that δ' is below every number, ε is infinite: no error ends a plan."""
    steps = [(StepOfRows(sampling_rate=40 / 1106, noise_multiplier=sigma, rows_per_unit=2), 2)]
    single, both = epsilon(steps, 1.8e-4), epsilon(steps, 1.8e-4, "replace-one")
    assert 0 < single < math.inf and 2 * single <= both
    assert (both < math.inf) == (sigma > 0.7)

"""Tests of dpllm.privacy.comparison. References: dp_accounting 0.6.0, and numbers that prv-accountant 0.2.0 printed."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpllm.mechanism.events import Step, dp_sgd
from dpllm.privacy import accounting
from dpllm.privacy.accounting import DISCRETIZATION
from dpllm.privacy.comparison import (
    ESTIMATE,
    UPPER_BOUND,
    advanced_epsilon,
    basic_epsilon,
    best_of_epsilon,
    compare,
    fine_library_epsilon,
    library_epsilon,
    renyi_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)

NAMES = ["PLD", "PLD, dp_accounting", "Rényi", "zCDP", "advanced composition", "basic composition"]


def plain(sigma: float, rate: float) -> Step:
    return Step(sampling_rate=rate, noise_multiplier=sigma)


# σ, q, T, δ, PLD ε at discretization 1e-3 and Rényi ε (dp_accounting 0.6.0), and the estimate of prv-accountant 0.2.0
# (arXiv:2106.02848)
VECTORS = [
    (1.0, 0.02, 1500, 1e-5, 4.814195329150747, 5.295951708161915, 4.8137),
    (0.8, 1024 / 42000, 410, 1e-5, 5.213871985354965, 5.975607178566768, 5.2138),
    (0.6, 1e-4, 100_000, 1e-6, 0.9906773208025731, 2.2674398814198513, 0.9634),
    (4.0, 0.01, 10_000, 1e-5, 0.9600452104972911, 1.0354900660362436, 0.9470),
]


@pytest.mark.parametrize(("sigma", "rate", "steps", "at", "coarse", "renyi", "prv"), VECTORS)
def test_reference_vectors(
    sigma: float, rate: float, steps: int, at: float, coarse: float, renyi: float, prv: float
) -> None:
    """Each library's number is met, and the reported ε is the one of an independent accountant."""
    history = [(plain(sigma, rate), steps)]
    reported = accounting.epsilon(history, at)
    assert library_epsilon(history, at) == pytest.approx(coarse, rel=1e-5)  # processors differ by up to 3e-6
    assert renyi_epsilon(history, at) == pytest.approx(renyi, abs=1e-8)
    assert reported == pytest.approx(prv, abs=1e-3)


@pytest.mark.parametrize(
    ("history", "prv"),
    [
        ([(plain(1.0, 0.02), 1000), (plain(1.0, 0.01), 500), (plain(1.2, 0.01), 500)], 4.247834),
        ([(plain(20.0, 1.0), 50), (plain(30.0, 1.0), 50)], 1.662826),
        ([(plain(20.0, 1.0), 50), (plain(1.5, 0.05), 100)], 2.190397),
    ],
)
def test_histories_of_several_kinds_of_steps(history: accounting.History, prv: float) -> None:
    """Different steps, and full batches, compose as in prv-accountant 0.2.0 and in dp_accounting."""
    reported = accounting.epsilon(history, 1e-5)
    assert reported == pytest.approx(prv, abs=1e-3)
    assert reported - 1e-6 < library_epsilon(history, 1e-5) < reported + 2e-3


@pytest.mark.parametrize(("history", "at"), [([(plain(sigma, q), T)], at) for sigma, q, T, at, *_ in VECTORS])
def test_the_check_of_the_report_is_near_enough_to_see_a_wrong_number(history: accounting.History, at: float) -> None:
    """Within 0.5 % of the exact ε, on a finer grid for many small steps; also where the batch is cut."""
    for each in (history, [(Step(num_units=1000, sampling_rate=0.02, max_batch_size=22, noise_multiplier=2.0), 20)]):
        found, grid = fine_library_epsilon(each, at)
        assert found == pytest.approx(accounting.epsilon(each, at), rel=5e-3) and grid in (1e-3, DISCRETIZATION)


def test_an_epsilon_that_is_too_small_is_not_taken_for_a_finer_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of ε leads to the finer grid, whose number is the true one."""
    history, epsilon = [(plain(4.0, 0.01), 10_000)], accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *given: epsilon(*given) / 2)
    assert fine_library_epsilon(history, 1e-5) == (pytest.approx(0.9470, abs=1e-4), DISCRETIZATION)


def test_library_accountant_takes_truncation_and_rows_drawn_singly() -> None:
    """The library's event of a step is the truncated one, or the mixture of Gaussians, where the step says so."""
    truncated = [(Step(num_units=42_000, sampling_rate=1024 / 42_000, max_batch_size=1184, noise_multiplier=0.8), 410)]
    assert library_epsilon(truncated, 1e-5) == pytest.approx(5.2156934, abs=1e-6)
    rate, k = 1024 / 42_000, 2
    chances = [float(chance) for chance in stats.binom.pmf(range(k + 1), k, rate)]
    event = dp_event.MixtureOfGaussiansDpEvent(1.0, [0, 1, 2], chances)
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    expected = PLDAccountant(relation, 1e-3).compose(event, 410).get_epsilon(1e-5)
    found = library_epsilon(
        [(dp_sgd(num_units=21_000, sampling_rate=rate, noise_multiplier=1.0, rows_per_unit=k), 410)], 1e-5
    )
    assert found == expected == pytest.approx(6.890263231394683, abs=1e-6)  # dp_accounting 0.6.0
    assert library_epsilon([(plain(100.0, 1e-4), 1)], 1e-2) == 1e-3
    assert library_epsilon([], 1e-5) == 0.0
    assert library_epsilon([(plain(0.0, 0.1), 1)], 1e-5) == math.inf


def test_zcdp_is_the_least_over_all_orders() -> None:
    """ε is that of the best order, by brute force, and below the library's result among its own orders."""
    for sigma, steps, at in ((1.0, 1, 1e-5), (20.0, 100, 1e-5), (0.3, 1000, 1e-6), (500.0, 3, 1e-9), (3.0, 7, 0.4)):
        rho = steps / (2 * sigma**2)
        excess = np.exp(np.linspace(-12, 25, 400_001))
        orders = 1 + excess
        every = orders * rho + np.log1p(-1 / orders) - np.log(orders * at) / excess
        found = zcdp_epsilon([(plain(sigma, 0.01), steps)], at)
        assert found == pytest.approx(max(every.min(), DISCRETIZATION), rel=1e-6)
        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
        theirs = accountant.compose(dp_accounting.ZCDpEvent(rho=rho)).get_epsilon(at)
        assert found <= max(theirs, DISCRETIZATION) + 1e-9
        assert found <= rho + 2 * math.sqrt(rho * math.log(1 / at))  # Bun, Steinke, proposition 1.3


def test_zcdp_bounds_the_gaussian_mechanism() -> None:
    """Without sampling the exact δ at the ε of zCDP is at most the δ asked for, also for k rows clipped singly."""
    for step, steps in (
        (plain(20.0, 1.0), 100),
        (dp_sgd(num_units=9, sampling_rate=1.0, noise_multiplier=8.0, rows_per_unit=3), 4),
    ):
        assert zcdp_rho([(step, steps)]) == steps * step.moves**2 / (2 * step.noise_multiplier**2)
        shift = step.moves * math.sqrt(steps) / step.noise_multiplier
        at = zcdp_epsilon([(step, steps)], 1e-5)
        exact = stats.norm.cdf(shift / 2 - at / shift) - math.exp(at) * stats.norm.cdf(-shift / 2 - at / shift)
        assert 1e-7 < exact <= 1e-5


def _optimal_composition(single: float, count: int, at: float) -> float:
    """Return the least ε of `count` steps that are each exactly ε₀-private: Kairouz, Oh, Viswanath, theorem 3.3."""
    best = count * single
    for i in range(count // 2 + 1):
        excess = sum(
            math.comb(count, number)
            * (math.exp((count - number) * single) - math.exp((count - 2 * i + number) * single))
            for number in range(i)
        )
        if excess / (1 + math.exp(single)) ** count <= at:
            best = min(best, (count - 2 * i) * single)
    return best


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(4.0, 0.01, 100), (2.0, 0.05, 30), (1.0, 0.001, 300)])
def test_advanced_composition_is_valid_and_no_looser_than_its_forerunners(
    sigma: float, rate: float, steps: int
) -> None:
    """It lies above the optimal composition of the same steps, and below the plain sum and the bound of 2010."""
    history, at = [(plain(sigma, rate), steps)], 1e-5
    single = accounting.epsilon([(plain(sigma, rate), 1)], at / (2 * steps))
    found = advanced_epsilon(history, at)
    mean = single * (math.exp(single) - 1) / (math.exp(single) + 1)
    formula = steps * mean + single * math.sqrt(2 * steps * math.log(1 / (at / 2)))
    assert found == pytest.approx(min(formula, steps * single), rel=1e-12)
    of_2010 = math.sqrt(2 * steps * math.log(2 / at)) * single + steps * single * math.expm1(single)
    assert _optimal_composition(single, steps, at / 2) <= found <= min(steps * single, of_2010)
    assert accounting.epsilon(history, at) <= found


def test_basic_and_advanced_composition_of_several_kinds_of_steps() -> None:
    """Both add up over kinds of steps, at a δ shared out over all of them."""
    one, two = plain(2.0, 0.02), plain(3.0, 0.05)
    history = [(one, 30), (two, 10), (one, 20)]
    singles = [accounting.epsilon([(step, 1)], 1e-5 / 60) for step in (one, two)]
    assert basic_epsilon(history, 1e-5) == pytest.approx(50 * singles[0] + 10 * singles[1], rel=1e-12)
    halves = [accounting.epsilon([(step, 1)], 1e-5 / 120) for step in (one, two)]
    tail = math.sqrt(2 * math.log(2e5) * (50 * halves[0] ** 2 + 10 * halves[1] ** 2))
    mean = 50 * halves[0] * math.tanh(halves[0] / 2) + 10 * halves[1] * math.tanh(halves[1] / 2)
    assert advanced_epsilon(history, 1e-5) == pytest.approx(mean + tail, rel=1e-12)
    assert basic_epsilon([], 1e-5) == 0.0 == advanced_epsilon([], 1e-5) == zcdp_epsilon([], 1e-5)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "history",
    [
        [(plain(1.0, 0.02), 300)],
        [(plain(4.0, 1.0), 10)],
        [(Step(num_units=1000, sampling_rate=0.02, max_batch_size=30, noise_multiplier=1.0), 100)],
        [
            (Step(num_units=1000, sampling_rate=0.02, max_batch_size=45, noise_multiplier=1.5), 50),
            (plain(2.0, 0.01), 50),
        ],
    ],
)
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_reported_number_is_the_least_of_the_bounds(history: accounting.History, adjacency: str) -> None:
    """The table has every method; its first row is the reported ε, and no upper bound is below it."""
    rows = compare(history, 1e-5, adjacency)
    assert [row.name for row in rows] == NAMES
    assert rows[0].epsilon == accounting.epsilon(history, 1e-5, adjacency) and rows[0].kind == UPPER_BOUND
    bounds = [row.epsilon for row in rows if row.kind == UPPER_BOUND and row.epsilon is not None]
    assert len(bounds) >= 4 and min(bounds) >= rows[0].epsilon - 1e-3
    assert all(row.note and "\n" not in row.note for row in rows)


def test_methods_that_leave_something_out_say_so() -> None:
    """With truncation, Rényi is an estimate that names it; under replace-one it and zCDP give no number."""
    by_name = {
        row.name: row
        for row in compare(
            [(Step(num_units=1000, sampling_rate=0.02, max_batch_size=30, noise_multiplier=1.0), 100)], 1e-5
        )
    }
    assert by_name["Rényi"].kind == ESTIMATE and "without the effect of truncation" in by_name["Rényi"].note
    assert by_name["zCDP"].kind == UPPER_BOUND and "no gain from sampling" in by_name["zCDP"].note
    for row in compare([(plain(1.0, 0.02), 100)], 1e-5, "replace-one"):
        assert (row.epsilon is None) == (row.name in ("Rényi", "zCDP"))
        assert row.epsilon is not None or "zero-out" in row.note or "replace-one" in row.note


def test_rows_drawn_singly_are_compared_by_what_knows_them() -> None:
    """Where the rows of a unit are drawn singly, the methods without such an event say so."""
    history = [(dp_sgd(num_units=5000, sampling_rate=0.01, noise_multiplier=1.0, rows_per_unit=2), 50)]
    assert renyi_epsilon(history, 1e-5) is None
    rows = {row.name: row for row in compare(history, 1e-5)}
    assert "drawn individually" in rows["Rényi"].note
    assert rows["PLD, dp_accounting"].epsilon is not None and rows["zCDP"].epsilon is not None
    other = compare(history, 1e-5, "replace-one")
    assert other[1].epsilon is None and "has no replace-one event" in other[1].note


def test_no_noise_is_infinite_everywhere() -> None:
    """A step without noise makes every method's ε infinite or absent, and no step makes it 0."""
    history = [(plain(1.0, 0.02), 10), (plain(0.0, 0.02), 1)]
    assert renyi_epsilon(history, 1e-5) == math.inf == zcdp_epsilon(history, 1e-5) == zcdp_rho(history)
    assert advanced_epsilon(history, 1e-5) == math.inf == basic_epsilon(history, 1e-5)
    assert {row.epsilon for row in compare(history, 1e-5)} <= {math.inf, None}
    assert {row.epsilon for row in compare([], 1e-5)} == {0.0}


def test_bad_arguments_are_refused() -> None:
    """δ outside (0, 1), unknown adjacencies and events that the library lacks are errors."""
    history = [(plain(1.0, 0.1), 1)]
    for method in (zcdp_epsilon, basic_epsilon, advanced_epsilon):
        with pytest.raises(ValueError, match="delta must"):
            method(history, 0.0)
    with pytest.raises(ValueError, match="got 'bounded"):
        library_epsilon(history, 1e-5, "bounded")
    with pytest.raises(ValueError, match="replace-one event"):
        library_epsilon(
            [(dp_sgd(num_units=100, sampling_rate=0.1, noise_multiplier=1.0, rows_per_unit=2), 10)], 1e-5, "replace-one"
        )


# dp_accounting 0.6.0, RepeatAndSelectDpEvent by RDP; setting A
@pytest.mark.parametrize(
    ("mean", "shape", "expected"), [(10, 0.0, 8.16), (10, 1.0, 9.26), (10, math.inf, 10.95), (50, 1.0, 11.05)]
)
def test_tuning_with_a_random_number_of_runs(mean: float, shape: float, expected: float) -> None:
    """The best of a random number of runs costs the ε of the library's event: more than one, less than all."""
    history = [(plain(1.0, 0.02), 1500)]
    found = best_of_epsilon(history, 1e-5, mean, shape)
    assert found == pytest.approx(expected, abs=5e-3)
    single = renyi_epsilon(history, 1e-5)
    assert single is not None and single < found < mean * single


def test_tuning_refuses_and_passes_on() -> None:
    """Numbers out of range are errors; no noise is infinite, and rows drawn singly have no such event."""
    step = plain(1.0, 0.02)
    for values, match in (((0.5, 1.0), "mean_runs must be at least 1"), ((10, -1.0), "shape must be at least 0")):
        with pytest.raises(ValueError, match=match):
            best_of_epsilon([(step, 10)], 1e-5, *values)
    with pytest.raises(ValueError, match="delta"):
        best_of_epsilon([(step, 10)], 0.0, 10)
    assert best_of_epsilon([], 1e-5, 10) == 0.0
    assert best_of_epsilon([(plain(0.0, 0.02), 1)], 1e-5, 10) == math.inf
    assert (
        best_of_epsilon(
            [(dp_sgd(num_units=100, sampling_rate=0.1, noise_multiplier=1.0, rows_per_unit=2), 10)], 1e-5, 10
        )
        is None
    )


def test_best_of_never_hides_the_truncation() -> None:
    """Where truncation costs privacy the Rényi figure would be too small: it is refused, and never below one run's."""
    truncated = [(Step(num_units=1000, sampling_rate=0.1, max_batch_size=100, noise_multiplier=1.0), 100)]
    with pytest.raises(ValueError, match="--max-batch-size"):
        best_of_epsilon(truncated, 1e-5, 2)
    history = [(Step(num_units=1000, sampling_rate=0.1, max_batch_size=200, noise_multiplier=1.0), 100)]
    for mean in (1, 2, 10):
        assert best_of_epsilon(history, 1e-5, mean) >= accounting.epsilon(history, 1e-5)


def test_a_grid_that_would_not_fit_into_memory_is_a_note():
    """An accountant that would need more memory than a machine has is left out, and the comparison goes on."""
    steps = [(Step(sampling_rate=0.3, noise_multiplier=0.05), 100_000)]
    with pytest.raises(ValueError, match="would need"):
        library_epsilon(steps, 1e-5)

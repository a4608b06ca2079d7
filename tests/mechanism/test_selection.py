"""Tests of dpllm.mechanism.selection: the ε of the best of K runs."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from scipy import integrate, stats

from dpllm.mechanism import pld
from dpllm.mechanism.banded import BandedStep
from dpllm.mechanism.events import Step, StepOfRows
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.selection import KINDS, Selection, selected_run
from dpllm.privacy.accounting import delta, delta_function, epsilon
from tests.mutations import kills

E2E = Step(sampling_rate=1024 / 42061, noise_multiplier=0.71758)
# Private tuning of E2E: N = 42 061, B = 1024, T = 410, δ = 1e-6.
FIGURES = [
    ("logarithmic", 5, 0.71758, 11.85),
    ("logarithmic", 10, 0.71758, 12.66),
    ("geometric", 10, 0.71758, 13.85),
    ("poisson", 10, 0.71758, 15.66),
    ("logarithmic", 10, 0.87943, 8.0),
]


@kills(
    "the number of runs of a selection is left out of its cost",
    "dpllm/mechanism/selection.py",
    "dp_event.RepeatAndSelectDpEvent(run, self.mean_runs, ",
    "dp_event.RepeatAndSelectDpEvent(run, 1.0, ",
)
@pytest.mark.parametrize(("kind", "mean", "sigma", "figure"), FIGURES)
def test_it_equals_the_renyi_accounting_of_dp_accounting(kind, mean, sigma, figure):
    """The hull and its grid change ε by less than 1e-5; one run has 9.03 by the same accounting."""
    step = Step(sampling_rate=E2E.sampling_rate, noise_multiplier=sigma)
    found = epsilon([(selected_run(Selection(kind, mean), step, 410), 1)], 1e-6)
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    run = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(step.sampling_rate, dp_event.GaussianDpEvent(sigma)), 410
    )
    shape = {"logarithmic": 0, "geometric": 1, "poisson": math.inf}[kind]
    accountant.compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
    assert found == pytest.approx(accountant.get_epsilon(1e-6), abs=1e-5)
    assert found == pytest.approx(figure, abs=6e-3)


@pytest.mark.parametrize("kind", ["logarithmic", "geometric"])
def test_the_theorem_by_its_formula(kind):
    """Papernot and Steinke, theorem 2: ε' = ε + (1+η)(1 - 1/λ^)ε^ + (1+η) log(1/γ)/λ^ + log E[K]/(λ-1)."""
    sigma, mean, at = 3.0, 4.0, 1e-5
    orders = np.array(rdp.RdpAccountant().orders)
    one_run = orders / (2 * sigma**2)  # of a Gaussian without sampling
    if kind == "geometric":
        shape, log_gamma = 1.0, -math.log(mean)
    else:
        x = np.linspace(1e-6, 20, 4_000_001)
        shape, log_gamma = 0.0, -float(x[np.searchsorted(np.expm1(x) / x, mean)])
    extra = np.min((1 + shape) * ((1 - 1 / orders) * one_run - log_gamma / orders))
    total = one_run + extra + math.log(mean) / (orders - 1)
    due = np.min(total + np.log1p(-1 / orders) - (math.log(at) + np.log(orders)) / (orders - 1))
    event = selected_run(Selection(kind, mean), Step(sampling_rate=1.0, noise_multiplier=sigma), 1)
    assert epsilon([(event, 1)], at) == pytest.approx(due, abs=1e-5)


@pytest.mark.parametrize(("kind", "mean"), [("logarithmic", 3), ("geometric", 5), ("poisson", 4)])
def test_the_exact_best_of_gaussians_is_within_the_bound(kind, mean):
    """The output of a run is N(x, σ²) and its score is itself: the density of the best of K is known in closed form.

    With G(s) = E[s^K] and F, f of one run, the best has the density f G'(F). With K = 0 nothing is released.
    """
    sigma, selection = 1.0, Selection(kind, mean)
    bound = delta_function([(selected_run(selection, Step(sampling_rate=1.0, noise_multiplier=sigma), 1), 1)])
    runs = np.arange(1, 150)
    chances = np.array([selection.chance(int(run)) for run in runs])
    y = np.linspace(-10, 11, 20_001)

    def density(mu: float) -> np.ndarray:
        below = stats.norm.cdf(y, mu, sigma)
        slope = np.zeros_like(y)
        for run, chance in zip(runs, chances, strict=True):
            slope += run * chance * below ** (run - 1)
        return stats.norm.pdf(y, mu, sigma) * slope

    with_unit, without = density(1.0), density(0.0)
    nothing = selection.chance(0)
    assert integrate.trapezoid(without, y) + nothing == pytest.approx(1, abs=1e-5)
    for at in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0):
        for p, q in ((with_unit, without), (without, with_unit)):
            exact = integrate.trapezoid(np.maximum(p - math.exp(at) * q, 0), y)
            assert exact <= bound(at) + 1e-6


def test_the_distribution_is_symmetric_whole_and_exact_at_its_points():
    """Both directions are one; the masses add up to 1, and their δ is at most the Rényi bound at every ε."""
    event = selected_run(Selection("logarithmic", 10), E2E, 410)
    (pmf, count), (again, _) = event.parts(1, "zero-out", 1e-3)
    assert again is pmf and count == 1
    assert pmf.masses.sum() + pmf.infinite == pytest.approx(1, abs=1e-12) and pmf.infinite <= 1e-21
    middle = len(pmf.masses) // 2
    assert pmf.lowest == -middle and (pmf.masses >= 0).all()
    above = pmf.masses[middle + 1 :]
    assert pmf.masses[:middle][::-1] == pytest.approx(above * np.exp(-pmf.losses[middle + 1 :]), rel=1e-12)
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(event.dp_event())
    for at in (2.0, 5.0, 8.0, 12.0, 20.0):
        mine = pld.compose([(pmf, 1)], pld.tilt_for([(pmf, 1)], epsilon=at)).delta(at)
        assert mine <= accountant.get_delta(at) * (1 + 1e-6)
        assert mine >= 0.5 * accountant.get_delta(at)


def test_it_composes_with_other_runs():
    """More than either, and less than the sum."""
    event, other = selected_run(Selection("geometric", 4), E2E, 100), (E2E, 100)
    alone, single = epsilon([(event, 1)], 1e-6), epsilon([other], 1e-6)
    both = epsilon([(event, 1), other], 1e-6)
    assert max(alone, single) < both < alone + single
    assert epsilon([(event, 2)], 1e-6) > both


def test_replacing_a_unit_is_twice_removing_one():
    """There is no pair for it: group privacy, as for rows that are drawn singly."""
    history = [(selected_run(Selection("logarithmic", 5), E2E, 50), 1)]
    found = epsilon(history, 1e-6, "replace-one")
    assert (1 + math.exp(found / 2)) * delta(history, found / 2) <= 1e-6 * (1 + 1e-6)
    assert found > 2 * epsilon(history, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_runs_has_its_distribution(kind):
    """Its mean and its chances; and every uniform number gives the K whose cumulated chance it falls into."""
    selection = Selection(kind, 10)
    chances = [selection.chance(run) for run in range(2000)]
    assert sum(chances) == pytest.approx(1, abs=1e-12)
    assert sum(run * chance for run, chance in enumerate(chances)) == pytest.approx(10, rel=1e-9)
    assert (chances[0] > 0) == (kind == "poisson")
    counted = [selection.number_at((n + 0.5) / 500) for n in range(500)]
    for run in range(5):
        assert counted.count(run) / 500 == pytest.approx(chances[run], abs=2.1e-3)
    if kind == "logarithmic":  # p^k / (-k log(1 - p))
        assert chances[2] / chances[1] * 2 == pytest.approx(chances[3] / chances[2] * 3 / 2, rel=1e-9)


def test_a_mean_of_one_is_one_run():
    """Then only one run is taken, for the Rényi ε of one run."""
    assert [Selection(kind, 1).number_at(0.99) for kind in ("logarithmic", "geometric")] == [1, 1]


def test_correlated_noise_counts_its_cycles():
    """A run of 410 steps with 4 bands is 103 rounds of one group."""
    banded = BandedStep(num_units=1000, sampling_rate=0.4, max_batch_size=1000, noise_multiplier=1.0, bands=4)
    event = selected_run(Selection("geometric", 3), banded, 410)
    assert (event.num_rounds, event.sampling_rate) == (103, 0.4)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Step(num_units=1000, sampling_rate=0.1, max_batch_size=150, noise_multiplier=1.0), "truncated samples"),
        (StepOfRows(num_units=1000, sampling_rate=0.1, rows_per_unit=3, noise_multiplier=1.0), "no Rényi bound"),
    ],
)
def test_runs_without_a_renyi_bound_are_refused(event, words):
    """Never accounted as something else."""
    with pytest.raises(ValueError, match=words):
        selected_run(Selection("geometric", 3), event, 10)


@pytest.mark.parametrize(
    "bad", ["geometric", {"kind": "fixed", "mean": 3}, {"kind": "poisson", "mean": 0.5}, {"kind": "poisson", "k": 3}]
)
def test_other_numbers_of_runs_are_refused(bad):
    """A fixed number has another theorem, and a mean below 1 no selection."""
    with pytest.raises(ValueError, match="selection"):
        Selection.of(Spec.of(bad))


def test_no_noise_is_no_privacy():
    """Whatever the number of runs."""
    event = selected_run(Selection("geometric", 3), Step(sampling_rate=0.1, noise_multiplier=0.0), 5)
    assert epsilon([(event, 1)], 1e-5) == math.inf and epsilon([], 1e-5) == 0

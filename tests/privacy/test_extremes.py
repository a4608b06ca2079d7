"""σ for a very large or a very small ε, compared with closed forms and with other accountants."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from dp_accounting.pld import PLDAccountant
from scipy import optimize, special

from dpllm import PrivacyConfig, Step, epsilon, make_plan
from dpllm.mechanism.discrete import DiscreteStep
from dpllm.mechanism.events import StepOfRows
from dpllm.mechanism.query import Query
from dpllm.mechanism.selection import Selection, selected_run
from dpllm.methods.predict.token_draw import TokenDraw
from dpllm.privacy.accounting import DISCRETIZATION, delta_function, discretization_used
from dpllm.privacy.calibration import calibrate, least_noise

DELTA = 1e-6
EXTREMES = (1000.0, 100.0, 0.01, 0.001)


def analytic_distance(target):
    """Return μ of the Gaussian mechanism at (target, δ), by its closed form."""

    def excess(log_mu):
        mu = math.exp(log_mu)
        above = special.log_ndtr(mu / 2 - target / mu)
        below = target + special.log_ndtr(-mu / 2 - target / mu)
        return above + math.log(-math.expm1(min(below - above, -1e-300))) - math.log(DELTA)

    return math.exp(optimize.brentq(excess, math.log(1e-9), math.log(1e4)))


def zcdp_epsilon(rho):
    """Return ε at δ of ρ-zCDP, by the best of a dense set of orders (arXiv:2004.00010, proposition 12)."""
    order = 1 + np.geomspace(1e-2, 1e8, 20_000)
    return float(np.min(rho * order + np.log1p(-1 / order) - (math.log(DELTA) + np.log(order)) / (order - 1)))


@pytest.mark.parametrize("target", EXTREMES)
def test_full_batches_need_the_noise_of_the_analytic_gaussian_mechanism(target):
    """T steps over all units are one Gaussian sum with T times less variance."""
    sigma = calibrate(target, DELTA, lambda at: Step(sampling_rate=1.0, noise_multiplier=at), 100)
    assert sigma == pytest.approx(10 / analytic_distance(target), rel=1e-3)


@pytest.mark.parametrize("target", EXTREMES)
def test_sampled_steps_cost_what_another_accountant_says(target):
    """dp_accounting's ε of the plan's σ, on a grid of 10,000 widths, is the target to half a percent."""
    privacy = PrivacyConfig(epsilon=target, delta=DELTA, clip_norm=1.0, expected_batch_size=1000)
    plan = make_plan(privacy, num_units=50_000, num_steps=1500)
    accountant = PLDAccountant(value_discretization_interval=target / 10_000)
    step = dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(plan.noise_multiplier))
    accountant.compose(step, 1500)
    assert plan.epsilon <= target and accountant.get_epsilon(DELTA) == pytest.approx(target, rel=5e-3)


@pytest.mark.parametrize("target", [0.01])
def test_rows_drawn_singly_cost_what_another_accountant_says(target):
    """A mixture of Gaussians; only small ε, where the grid of 1e-4 was as coarse as the losses."""

    def steps(at):
        return [(StepOfRows(sampling_rate=0.01, noise_multiplier=at, rows_per_unit=2), 20)]

    sigma = least_noise(target, DELTA, steps)
    accountant = PLDAccountant(value_discretization_interval=target / 2000)
    chances = [0.99**2, 2 * 0.01 * 0.99, 0.01**2]
    accountant.compose(dp_event.MixtureOfGaussiansDpEvent(sigma, [0, 1, 2], chances), 20)
    assert accountant.get_epsilon(DELTA) == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize("target", [0.01, 0.001])
@pytest.mark.parametrize(
    "event_of",
    [
        lambda at: Query(noise_multiplier=at, discrete=True),
        lambda at: TokenDraw(noise_multiplier=at),
        lambda at: DiscreteStep(sampling_rate=1.0, noise_multiplier=at, sensitivity=1.0),
    ],
    ids=["discrete query", "token draw", "discrete step"],
)
def test_bounds_by_divergences_need_the_noise_of_their_best_order(event_of, target):
    """A ρ of 1/(2σ²) for each of 50; high orders are looked at where ε is small."""
    sigma = least_noise(target, DELTA, lambda at: [(event_of(at), 50)])
    assert zcdp_epsilon(50 / (2 * sigma**2)) == pytest.approx(target, rel=0.01)


@pytest.mark.parametrize("kind", ["logarithmic", "geometric", "poisson"])
def test_a_selection_at_a_small_epsilon_costs_what_dp_accounting_says_at_high_orders(kind):
    """Its own orders end at 1,024, which is too few for such an ε: it is given more."""
    event = selected_run(Selection(kind, 10), Step(sampling_rate=0.02, noise_multiplier=100.0), 100)
    orders = [int(order) for order in np.geomspace(150, 5000, 18)]
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(event.dp_event())
    theirs = accountant.get_epsilon(DELTA)
    assert 0.01 < theirs < 0.05 and epsilon([(event, 1)], DELTA) == pytest.approx(theirs, rel=0.02)


def test_a_large_epsilon_in_a_far_longer_range_of_losses_is_not_overstated():
    """Four rows of one unit seldom meet in a step, and then its loss is 200: ε was overstated by two thirds."""
    steps = [(StepOfRows(sampling_rate=0.005, noise_multiplier=0.2, rows_per_unit=4), 1500)]
    found = epsilon(steps, DELTA)
    at_once = delta_function(steps, discretization=1e-2, tilted=False)
    assert 300 < found < 600 and at_once(found * 0.995) > DELTA > at_once(found * 1.005)


def histories():
    rng = np.random.default_rng(7)
    for target in np.exp(rng.uniform(math.log(5e-4), math.log(30), 6)):
        rate, count = float(rng.choice([0.002, 0.05, 1.0])), int(rng.integers(1, 100))
        discrete = bool(rng.random() < 0.3)
        made = DiscreteStep if discrete else Step
        more = {"sensitivity": 1.01} if discrete else {}
        yield (
            float(target),
            lambda at, m=made, q=rate, n=count, o=more: [(m(sampling_rate=q, noise_multiplier=at, **o), n)],
        )


@pytest.mark.parametrize(("target", "history_of"), list(histories()))
def test_the_noise_keeps_to_the_target_and_a_little_less_does_not(target, history_of):
    """Of any size, for Gaussian and discrete noise: ε of the very σ is at most the target."""
    sigma = least_noise(target, DELTA, history_of)
    assert target * (1 - 4e-4) <= epsilon(history_of(sigma), DELTA) <= target
    assert epsilon(history_of(sigma * 0.999), DELTA) > target


@pytest.mark.parametrize("sigma", [1.0, 40.0, 1000.0])
def test_the_grid_that_is_reported_gives_the_epsilon_that_is_reported(sigma):
    """On the scale of ε: finer for a small one; a grid that is asked for is used as it is."""
    steps = [(Step(sampling_rate=0.02, noise_multiplier=sigma), 500)]
    used, found = discretization_used(steps, delta=DELTA), epsilon(steps, DELTA)
    assert epsilon(steps, DELTA, discretization=used) == found <= epsilon(steps, DELTA, discretization=1e-4)
    assert (used < DISCRETIZATION) == (found < 0.1) and found / used >= 1000


def test_a_target_that_cannot_be_computed_is_refused_at_once():
    """With the true reason: the orders of a divergence, or the least ε that is stated."""
    with pytest.raises(ValueError, match="largest ε that is computed from Rényi divergences"):
        least_noise(1000.0, DELTA, lambda at: [(TokenDraw(noise_multiplier=at), 1)])
    with pytest.raises(ValueError, match="smallest ε that is stated"):
        least_noise(1e-5, DELTA, lambda at: [(TokenDraw(noise_multiplier=at), 1)])

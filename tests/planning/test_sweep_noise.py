"""The noise of every point of a grid is enough, and no more than enough."""

from __future__ import annotations

import math

import pytest

from dpllm.planning import sweep_noise
from dpllm.planning.sweep_noise import TOLERANCE, Budget, Noise, calibrate_grid, least_noise, refined
from dpllm.privacy import accounting
from dpllm.privacy.calibration import calibrate_noise_multiplier

BUDGET = Budget(4.0, 1e-6, 42_000, "zero-out")
START = Noise(1.0, None)
SIZES = [(b, t) for b in (512, 2048) for t in (50, 100, 200)]


def test_the_result_is_that_of_the_plan_s_calibration():
    """The quick search finds the same σ as accounting's own, within its coarse grid and tolerance."""
    for (b, t), noise in calibrate_grid(BUDGET, SIZES[::3], near=SIZES[0]).items():
        sigma = calibrate_noise_multiplier(4.0, 1e-6, b / 42_000, t)
        assert noise.sigma == pytest.approx(sigma, rel=0.01)


def test_neighbours_save_most_of_the_search(monkeypatch):
    """A point of a grid takes at most five values of ε on average, from whichever start the first one had."""
    calls = []
    epsilon = sweep_noise.epsilon
    monkeypatch.setattr(sweep_noise, "epsilon", lambda *given: calls.append(given) or epsilon(*given))
    calibrate_grid(BUDGET, SIZES, near=SIZES[0])
    assert len(calls) <= 5 * len(SIZES)


def test_where_the_coarse_grid_asks_for_too_much_noise_the_fine_one_decides():
    """Over many steps the coarse grid asks for a quarter more noise; the result is the fine grid's."""
    budget = Budget(1.0, 1e-6, 100_000, "zero-out")
    noise = least_noise(budget, 100, 160_000, START, coarse=True)
    assert not noise.coarse
    assert budget.epsilon(100, 160_000, noise.sigma, 1e-3) > 1.2
    assert 1 - TOLERANCE <= budget.epsilon(100, 160_000, noise.sigma, accounting.DISCRETIZATION) <= 1
    assert least_noise(BUDGET, 1024, 200, START, coarse=True).coarse


def test_a_small_target_is_searched_on_the_fine_grid():
    """A target near the width of the coarse grid cannot be met on it."""
    noise = calibrate_grid(Budget(0.01, 1e-6, 42_000, "zero-out"), [(16, 100)], near=(16, 100))[16, 100]
    assert 0.01 * (1 - TOLERANCE) <= noise.epsilon <= 0.01


def test_refining_never_adds_noise():
    """The recommended point gets the plan's σ, or keeps its own where that is smaller."""
    coarse = least_noise(BUDGET, 1024, 200, START, coarse=True)
    fine = refined(BUDGET, 1024, 200, coarse)
    assert fine.sigma <= coarse.sigma
    assert coarse.epsilon <= fine.epsilon <= 4.0
    lucky = Noise(fine.sigma / 2, 3.9)
    assert refined(BUDGET, 1024, 200, lucky) is lucky


def test_what_accounting_refuses_is_the_reason(monkeypatch):
    """A setting that cannot be certified is no point, and its reason is accounting's."""

    def refuse(*_):
        raise ValueError("delta is too small")

    monkeypatch.setattr(sweep_noise, "epsilon", refuse)
    assert least_noise(BUDGET, 1024, 200, START, coarse=True) == Noise(None, None, "delta is too small")


def test_a_cost_with_a_jump_ends_above_the_target_s_noise(monkeypatch):
    """Where ε jumps over the target the σ just above the jump is taken, which is within the target."""
    monkeypatch.setattr(sweep_noise, "epsilon", lambda history, *_: 1.0 if history[0][0].noise_multiplier > 2 else 9.0)
    noise = least_noise(BUDGET, 1024, 200, START, coarse=True)
    assert noise.epsilon == 1.0
    assert noise.sigma == pytest.approx(2.0, rel=1e-6) and noise.sigma > 2


def test_an_infinite_cost_is_left_towards_more_noise(monkeypatch):
    """Too little noise for any ε is a side of the bracket, not a failure."""

    def cost(history, *_):
        sigma = history[0][0].noise_multiplier
        return math.inf if sigma < 3 else 40 / sigma**2

    monkeypatch.setattr(sweep_noise, "epsilon", cost)
    assert least_noise(BUDGET, 1024, 200, Noise(0.1, None), coarse=True).sigma == pytest.approx(math.sqrt(10), rel=0.01)


@pytest.mark.parametrize(("cost", "reason"), [(1.0, "noise_multiplier must be 0 or between"), (40.0, "still costs")])
def test_a_cost_that_does_not_depend_on_the_noise_ends_the_search(monkeypatch, cost, reason):
    """With the reason: the noise falls, or rises, to its bound, and no multiplier is found."""
    monkeypatch.setattr(sweep_noise, "epsilon", lambda *_: cost)
    found = least_noise(BUDGET, 1024, 200, START, coarse=True)
    assert found.sigma is None and reason in (found.reason or "")

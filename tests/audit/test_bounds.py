"""Lower bounds on ε: they hold, they are those of the literature, and they cannot be had by looking twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpllm.audit import bounds
from dpllm.audit.bounds import (
    AuditError,
    gaussian_family,
    one_run_bounds,
    one_run_curve_epsilon,
    one_run_epsilon,
    trial_bounds,
)
from dpllm.mechanism.events import Step
from dpllm.privacy.risk import gaussian_epsilon

DELTA = 1e-5


def gaussian_scores(num: int, mu: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a μ-Gaussian mechanism: one independent coin and one normal draw per canary."""
    rng = np.random.default_rng(seed)
    coins = rng.random(num) < 0.5
    return rng.standard_normal(num) + mu * coins, coins


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """jax_privacy's auditor, whose file needs neither jax nor the rest of its package."""
    spec = importlib.util.find_spec("jax_privacy")
    assert spec is not None and spec.submodule_search_locations, "make setup installs jax-privacy without its parts"
    file = Path(spec.submodule_search_locations[0]) / "auditing.py"
    own = importlib.util.spec_from_file_location("jax_privacy_auditing", file)
    assert own is not None and own.loader is not None
    module = sys.modules["jax_privacy_auditing"] = importlib.util.module_from_spec(own)
    own.loader.exec_module(module)
    return module


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize("mu", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("num", [50, 1000, 4000])
def test_bounds_are_those_of_jax_privacy(reference, num, mu, delta):
    """On the same scores, the same threshold and the same error, all three bounds are the reference's."""
    scores, coins = gaussian_scores(num, mu, seed=num)
    auditor = reference.CanaryScoreAuditor(scores[coins], scores[~coins])
    for quantile in (0.5, 0.9):
        threshold = float(np.quantile(scores, quantile))
        said_in = scores >= threshold
        rung = (int(said_in.sum()), int((said_in & coins).sum()))
        at = reference.Explicit(threshold)
        theirs = auditor.epsilon_one_run(0.05, delta, threshold_strategy=at)
        assert one_run_epsilon(num, *rung, delta, 0.05) == pytest.approx(theirs, abs=1e-5)
        theirs = auditor.epsilon_one_run_fdp(0.05, delta, threshold_strategy=at)
        ours, _ = one_run_curve_epsilon(num, [rung], gaussian_family(delta), 0.05)
        assert ours == pytest.approx(theirs, abs=1e-4)
        theirs = auditor.epsilon_clopper_pearson(0.05, delta, one_sided=False, threshold_strategy=at)
        rates = bounds._rate_bounds(said_in, coins, 0.05)
        assert bounds._epsilon_of_rates(*rates, delta) == pytest.approx(float(theirs), abs=1e-9)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_bounds_of_a_gaussian_mechanism_stay_below_its_epsilon(mu):
    """At 99 % no bound of a true mechanism may pass its ε; the curves show something of it, the better ones much."""
    scores, coins = gaussian_scores(4000, mu)
    pair, curve = one_run_bounds(scores, coins, DELTA, confidence=0.99)
    pair_of_runs, curve_of_runs = trial_bounds(scores, coins, DELTA, confidence=0.99)
    true = gaussian_epsilon(mu, DELTA)
    for bound in (pair, curve, pair_of_runs, curve_of_runs):
        assert 0 <= bound.epsilon < min(true, bound.ceiling)
    assert curve.epsilon > 0.2 * true and curve_of_runs.epsilon > 0.25 * true


def test_independent_runs_see_noise_that_is_too_small_by_the_root_of_two():
    """The bound of independent runs comes close enough to ε to refute the claim of an implementation off by 1.41."""
    scores, coins = gaussian_scores(3000, np.sqrt(2))
    claimed = [(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)]
    curve = trial_bounds(scores, coins, DELTA, history=claimed)[1]
    assert curve.epsilon > gaussian_epsilon(1.0, DELTA)
    assert curve.epsilon < gaussian_epsilon(np.sqrt(2), DELTA)


def test_perfect_scores_reach_the_ceiling():
    """The ceiling is the bound when every guess is right, and it grows with the number of canaries."""
    ceilings = []
    for num in (100, 1000):
        coins = np.random.default_rng(1).random(num) < 0.5
        for bound in one_run_bounds(coins.astype(float), coins, DELTA):
            assert bound.epsilon <= bound.ceiling
            if coins.mean() == pytest.approx(0.5, abs=0.04):
                assert bound.epsilon > 0.8 * bound.ceiling
            ceilings.append(bound.ceiling)
    assert ceilings[0] < ceilings[2] and ceilings[1] < ceilings[3]


def test_scores_that_say_nothing_show_nothing():
    """Ties are broken without the coins: equal scores in a sorted file are no perfect attack."""
    coins = np.arange(1000) < 500
    for bound in (*one_run_bounds(np.zeros(1000), coins, DELTA), *trial_bounds(np.zeros(1000), coins[::-1], DELTA)):
        assert bound.epsilon == 0.0


def test_more_tests_cost_confidence():
    """The error is divided over all attacks, so that the best of many shows less; the correction says so."""
    scores, coins = gaussian_scores(2000, 2.0)
    for bounds_of in (one_run_bounds, trial_bounds):
        alone, among_ten = bounds_of(scores, coins, DELTA), bounds_of(scores, coins, DELTA, tests=10)
        for one, other in zip(alone, among_ten, strict=True):
            assert 0 < other.epsilon < one.epsilon
            assert "10 attacks" in other.correction and "attacks" not in one.correction


def test_a_larger_delta_explains_more():
    """With δ = 1/m, a mechanism that gives each canary away with probability δ explains correct guesses."""
    assert one_run_epsilon(1000, 1000, 900, 1e-3, 0.05) < one_run_epsilon(1000, 1000, 900, 1e-6, 0.05)


def test_no_correct_guess_shows_nothing():
    """A bound of 0, not an error, when nothing was right."""
    assert one_run_epsilon(100, 10, 0, DELTA, 0.05) == 0.0
    assert one_run_curve_epsilon(100, [(10, 0)], gaussian_family(DELTA), 0.05)[0] == 0.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scores": np.zeros((4, 5))}, "each canary needs one score and one coin"),
        ({"included": np.zeros(20)}, "coins must be booleans, got float64"),
        ({"delta": 0.0}, "delta and confidence must be between 0 and 1"),
        ({"confidence": 1.0}, "delta and confidence must be between 0 and 1"),
        ({"scores": np.array([np.nan] * 20)}, "20 of 20 scores are not finite"),
        ({"scores": np.zeros(5), "included": np.ones(5, dtype=bool)}, "5 canaries cannot show anything"),
        ({"included": np.ones(20, dtype=bool)}, "all canaries were included, or none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("bounds_of", [one_run_bounds, trial_bounds])
def test_what_cant_be_audited_is_refused(bounds_of, change, match):
    """No bound is stated of scores or coins that do not carry it."""
    given = {"scores": np.zeros(20), "included": np.arange(20) < 9, "delta": DELTA, "confidence": 0.95} | change
    with pytest.raises(AuditError, match=match):
        bounds_of(**given)

"""Tests of dpllm.privacy.risk. Reference numbers were computed with dp_accounting 0.6.0."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.risk import attack_risk, tradeoff_curve


def plain(sigma: float, rate: float) -> Step:
    return Step(sampling_rate=rate, noise_multiplier=sigma)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "advantage", "rates"),
    [
        (1.0, 0.02, 1500, 0.376185959, (0.003835679, 0.020059348, 0.095734753, 0.388074510)),
        (0.6, 1e-4, 100000, 0.048673627, (0.000190445, 0.001607647, 0.014150573, 0.124065214)),
    ],
)
def test_reference_vectors(sigma: float, rate: float, steps: int, advantage: float, rates: tuple[float, ...]) -> None:
    """Advantage and TPR at four FPRs equal the reference."""
    risk = attack_risk([(plain(sigma, rate), steps)])
    assert risk.advantage == pytest.approx(advantage, abs=1e-7)
    assert list(risk.true_positive_rate) == [1e-4, 1e-3, 1e-2, 1e-1]
    assert list(risk.true_positive_rate.values()) == pytest.approx(rates, abs=2e-6)
    assert risk.bayes_success[0.5] == pytest.approx((1 + advantage) / 2, abs=1e-7)


def test_bounds_cover_the_exact_attack_on_a_gaussian() -> None:
    """For one full-batch step the best attack is known; the bounds hold for it and are tight."""
    sigma = 1.0
    risk = attack_risk([(plain(sigma, 1.0), 1)], discretization=1e-3)
    exact_advantage = 2 * stats.norm.cdf(0.5 / sigma) - 1
    assert exact_advantage <= risk.advantage <= exact_advantage + 1e-5
    for fpr, bound in risk.true_positive_rate.items():
        exact = stats.norm.sf(stats.norm.isf(fpr) - 1 / sigma)
        assert exact <= bound <= exact * 1.01
    threshold = 0.5 + sigma**2 * math.log(0.99 / 0.01)
    exact = 0.01 * stats.norm.sf((threshold - 1) / sigma) + 0.99 * stats.norm.cdf(threshold / sigma)
    assert exact <= risk.bayes_success[0.01] <= exact + 1e-4


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (1.0, 300), (50.0, 1)])
def test_never_below_blind_guessing(adjacency: str, sigma: float, steps: int) -> None:
    """TPR >= FPR, success >= the likelier answer, all at most 1, and rising with the FPR."""
    fprs = [0.0, 1e-6, 1e-3, 0.1, 0.5, 0.999, 1.0]
    priors = [0.0, 1e-3, 0.3, 0.5, 0.9, 1.0]
    risk = attack_risk(
        [(Step(num_units=500, sampling_rate=0.1, max_batch_size=80, noise_multiplier=sigma), steps)],
        adjacency,
        fprs,
        priors,
        discretization=1e-3,
    )
    rates = np.array(list(risk.true_positive_rate.values()))
    assert np.all(rates >= fprs) and np.all(rates <= 1) and np.all(np.diff(rates) >= 0)
    for prior, success in risk.bayes_success.items():
        assert max(prior, 1 - prior) <= success <= 1
    assert 0 < risk.advantage <= 1


def test_less_noise_is_more_risk() -> None:
    """Every figure falls as the noise rises."""
    risky, safe = (attack_risk([(plain(sigma, 0.05), 100)], discretization=1e-3) for sigma in (0.8, 2.0))
    assert risky.advantage > safe.advantage
    assert all(risky.true_positive_rate[fpr] > safe.true_positive_rate[fpr] for fpr in safe.true_positive_rate)
    assert risky.bayes_success[0.5] > safe.bayes_success[0.5]


def test_better_than_what_epsilon_alone_says() -> None:
    """The bound from the whole distribution is at most that of the one (ε, δ) pair."""
    history = [(plain(1.0, 0.02), 300)]
    value = epsilon(history, 1e-5, discretization=1e-3)
    risk = attack_risk(history, discretization=1e-3)
    for fpr, tpr in risk.true_positive_rate.items():
        assert tpr <= math.exp(value) * fpr + 1e-5 + 1e-9


def test_no_noise_is_certainty_and_no_step_is_nothing() -> None:
    """Without noise an attacker may be certain; before the first step nobody learns anything."""
    certain = attack_risk([(plain(0.0, 0.1), 1)])
    assert certain.advantage == 1 and set(certain.true_positive_rate.values()) == {1.0}
    assert set(certain.bayes_success.values()) == {1.0}
    nothing = attack_risk([])
    assert nothing.advantage == 0 and nothing.true_positive_rate[0.01] == 0.01
    assert nothing.bayes_success == {0.5: 0.5, 0.01: 0.99}
    assert set(certain.reconstruction.values()) == {1.0} and nothing.reconstruction == {1e-3: 1e-3, 1e-6: 1e-6}


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_bad_rate_is_refused(value: float) -> None:
    """Rates and priors are probabilities."""
    with pytest.raises(ValueError, match="between 0"):
        attack_risk([], false_positive_rates=[value])
    with pytest.raises(ValueError, match="between 0"):
        attack_risk([], priors=[value])
    with pytest.raises(ValueError, match="between 0"):
        attack_risk([], reconstruction_priors=[value])
    with pytest.raises(ValueError, match="between 0"):
        tradeoff_curve([], false_positive_rates=[value])


def test_nothing_to_guess_is_refused() -> None:
    """A reconstruction prior of 0 has no bound to state."""
    with pytest.raises(ValueError, match="above 0"):
        attack_risk([], reconstruction_priors=[0.0])


def test_reconstruction_covers_the_exact_attack_on_a_gaussian() -> None:
    """One full-batch step, units with one of 1000 orthogonal gradients: the best guess stays below the bound.

    Simulated: the guess that is best under equal chances is the gradient nearest to the noisy sum.
    """
    sigma, kinds, trials = 0.5, 1000, 4000
    rng = np.random.default_rng(0)
    sums = sigma * rng.standard_normal((trials, kinds))
    sums[:, 0] += 1.0  # the unit is of the first kind; by symmetry that costs nothing in generality
    success = (sums.argmax(axis=1) == 0).mean()
    bound = attack_risk([(plain(sigma, 1.0), 1)], discretization=1e-3).reconstruction[1e-3]
    assert 0.05 < success <= bound < 0.2


def test_reconstruction_is_the_rate_at_the_chance_of_a_guess() -> None:
    """The bound equals that on the true positive rate at the same false positive rate, and exceeds the blind guess."""
    risk = attack_risk([(plain(0.8, 0.02), 300)], discretization=1e-3)
    assert list(risk.reconstruction) == [1e-3, 1e-6]
    assert risk.reconstruction[1e-3] == risk.true_positive_rate[1e-3] > 1e-3
    assert risk.reconstruction[1e-6] > 1e-6


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_tradeoff_curve(adjacency: str) -> None:
    """Concave, rising, above the diagonal, and neither below the finer search nor far above it."""
    history = [(Step(num_units=500, sampling_rate=0.1, max_batch_size=80, noise_multiplier=1.0), 50)]
    rates, found = tradeoff_curve(history, adjacency, discretization=1e-3)
    assert rates[0] == pytest.approx(1e-8) and rates[-1] == found[-1] == 1.0
    assert (found >= rates).all() and (np.diff(found) >= 0).all()
    slopes = np.diff(found) / np.diff(rates)
    assert (np.diff(slopes) <= 1e-9 * slopes[:-1]).all()
    finer = attack_risk(history, adjacency, rates.tolist(), discretization=1e-3).true_positive_rate
    fine = np.array([finer[rate] for rate in rates.tolist()])
    assert (fine <= found * (1 + 1e-6)).all() and (found <= fine * 1.003).all()


def test_tradeoff_of_a_gaussian_is_the_exact_one() -> None:
    """For one full-batch step the curve is known: the bound is on it or slightly above."""
    rates, found = tradeoff_curve([(plain(1.0, 1.0), 1)], "zero-out", [1e-4, 1e-2, 0.3], 1e-3)
    exact = stats.norm.sf(stats.norm.isf(rates) - 1.0)
    assert (exact <= found).all() and (found <= exact * 1.01).all()

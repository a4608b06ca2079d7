"""The mechanisms behind a bound: each leaks at most its stated ε, and they are ordered."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special

from dpllm.audit.bounds import MOST_EPSILON, gaussian_family, plan_family
from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.risk import gaussian_epsilon

GAUSSIAN = [(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)]
SAMPLED = [(Step(sampling_rate=0.1, noise_multiplier=0.8), 40)]
RATES = np.linspace(0.001, 0.999, 200)


def test_a_plan_of_one_full_batch_is_a_gaussian_mechanism():
    """The two families agree where both describe the same thing; the table's error only loosens."""
    exact, from_steps = gaussian_family(1e-5).member(1.0), plan_family(GAUSSIAN, 1e-5).member(1.0)
    assert from_steps.epsilon == pytest.approx(exact.epsilon, abs=2e-3)
    for tpr in RATES:
        assert from_steps.least_fpr(tpr) <= exact.least_fpr(tpr) + 1e-12
        assert from_steps.least_fpr(tpr) >= exact.least_fpr(tpr) - 5e-3


def test_the_strength_of_the_claim_is_one():
    """The member of strength 1 has the ε that the accountant states."""
    member = plan_family(SAMPLED, 1e-5).member(1.0)
    assert member.epsilon == pytest.approx(epsilon(SAMPLED, 1e-5), rel=2e-3)


@pytest.mark.parametrize("family", [gaussian_family(1e-5), plan_family(SAMPLED, 1e-5)], ids=lambda f: f.name)
def test_a_stronger_member_leaks_more(family):
    """ε rises with the strength, and the least false positive rate falls: a search by halving finds the border."""
    members = [family.member(strength) for strength in (0.25, 0.5, 1.0, 2.0)]
    assert [m.epsilon for m in members] == sorted(m.epsilon for m in members)
    for tpr in (0.1, 0.5, 0.9):
        rates = [member.least_fpr(tpr) for member in members]
        assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]


def test_no_test_beats_the_curve_of_subsampled_steps():
    """The likelihood ratio test of a simulated sampled mechanism stays above the least false positive rate."""
    rng, (step, count) = np.random.default_rng(0), SAMPLED[0]
    noise = step.noise_multiplier * rng.standard_normal((2, 20_000, count))
    noise[1] += rng.random((20_000, count)) < step.sampling_rate
    q, sigma = step.sampling_rate, step.noise_multiplier
    score = np.log(1 - q + q * np.exp((noise - 0.5) / sigma**2)).sum(2)
    member = plan_family(SAMPLED, 1e-5).member(1.0)
    for threshold in np.quantile(score, [0.2, 0.5, 0.8, 0.95]):
        fpr, tpr = (score > threshold).mean(1)
        deviation = np.sqrt(tpr * (1 - tpr) / 20_000)
        assert fpr + 4 * np.sqrt(fpr * (1 - fpr) / 20_000) >= member.least_fpr(tpr - 4 * deviation)
        assert fpr <= 1.3 * member.least_fpr(tpr) + 0.02  # and the curve is not far away


def test_gaussian_epsilon_is_that_of_the_accountant():
    """The closed form agrees with the composition of the accountant."""
    for mu in (0.3, 1.0, 3.0):
        step = Step(sampling_rate=1.0, noise_multiplier=1 / mu)
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon([(step, 1)], 1e-5), rel=1e-3)
    assert gaussian_epsilon(0.0, 1e-5) == 0.0
    assert gaussian_epsilon(0.1, 0.5) == 0.0


def test_the_search_ends_at_both_ends():
    """Nothing refuted gives 0, everything refuted gives the most that is ever stated."""
    family = gaussian_family(1e-5)
    assert family.most_refuted(lambda member: False) == 0.0
    assert family.most_refuted(lambda member: True) == MOST_EPSILON
    border = family.most_refuted(lambda member: member.epsilon < 2.5)
    assert border == pytest.approx(2.5, abs=1e-6)
    assert family.member(1.0).least_fpr(0.5) == pytest.approx(float(special.ndtr(-1.0)))


@pytest.mark.parametrize(
    "history", [[], [(Step(sampling_rate=1.0, noise_multiplier=0.0), 3)]], ids=["no step", "no noise"]
)
def test_without_a_claim_there_is_no_family(history):
    """A run that promises nothing has no curve."""
    with pytest.raises(ValueError, match="claims"):
        plan_family(history, 1e-5)

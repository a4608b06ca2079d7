"""Counts of answers that nobody listed cost noise and threshold: checked against exact sums over whole numbers."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from dpllm.mechanism.query import Query
from dpllm.methods.aggregate.combination import ThresholdedCounts
from dpllm.privacy import comparison
from dpllm.privacy.accounting import delta, epsilon
from tests.mutations import kills

DELTA = 1e-5
SPREAD = 40


def discrete(s):
    """The probabilities of whole numbers with noise of parameter s."""
    weights = {x: math.exp(-(x**2) / (2 * s**2)) for x in range(-SPREAD, SPREAD + 1)}
    total = math.fsum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


def released(count, s, least):
    """The law of one answer's noisy count; None: below the threshold, or the answer does not occur."""
    law = {None: 0.0}
    for noise, chance in discrete(s).items():
        key = count + noise if count and count + noise >= least else None
        law[key] = law.get(key, 0.0) + chance
    return law


def exact_delta(first, second, eps):
    """δ at ε of two answers whose counts are those of two neighbours, by a sum over all pairs of outcomes."""
    total = 0.0
    for one, p in first[0].items():
        for other, r in first[1].items():
            total += max(0.0, p * r - math.exp(eps) * second[0].get(one, 0.0) * second[1].get(other, 0.0))
    return total


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("counts", "neighbour"),
    [((1, 3), (0, 4)), ((0, 4), (1, 3)), ((1, 0), (0, 1)), ((2, 3), (1, 4)), ((1, 3), (0, 3)), ((0, 3), (1, 3))],
)
def test_the_exact_loss_is_within_the_delta(counts, neighbour, adjacency):
    """A vote goes from one answer to another, and the answers that occur are not the same.

    The threshold leaves room for one step of the grid, which here is one vote.
    """
    s, margin = 1.5, 2.0
    event = ThresholdedCounts(noise_multiplier=s / math.sqrt(2), margin=margin)
    least = 1 + margin * s + 1
    first, second = ([released(count, s, least) for count in one] for one in (counts, neighbour))
    for eps in (0.0, 0.5, 1.0, 2.0, 4.0):
        assert exact_delta(first, second, eps) <= delta([(event, 1)], eps, adjacency) + 1e-12


@kills(
    "the threshold of open answers is no part of δ",
    "dpllm/methods/aggregate/combination.py",
    "return [(_with_failure(pmf, count, beta), times) for",
    "return [(pmf, times) for",
)
def test_the_threshold_is_part_of_delta():
    """β of each answer is in δ for every ε, and no ε is left when it exceeds δ."""
    event = ThresholdedCounts(noise_multiplier=10.0, margin=4.0)
    beta = float(stats.norm.sf(4.0))
    assert event.hidden_mass == beta
    assert delta([(event, 3)], 100.0) == pytest.approx(1 - (1 - beta) ** 3, rel=1e-3)
    assert epsilon([(event, 1)], beta * 0.99) == math.inf
    for adjacency in ("zero-out", "replace-one"):
        counts = Query(noise_multiplier=10.0, replaced=1.0, discrete=True)
        left = epsilon([(counts, 3)], DELTA, adjacency)
        far = ThresholdedCounts(noise_multiplier=10.0, margin=9.0)
        assert left <= epsilon([(far, 3)], DELTA, adjacency) <= left + 1e-6
        near = ThresholdedCounts(noise_multiplier=10.0, margin=float(stats.norm.isf(DELTA / 30)))
        smaller = epsilon([(counts, 3)], 0.9 * DELTA, adjacency)
        assert epsilon([(near, 3)], DELTA, adjacency) == pytest.approx(smaller, rel=1e-3)


def test_a_threshold_below_every_noise_costs_nearly_all():
    """z near 0: β is one half, and the constant loss is many steps of the grid."""
    event = ThresholdedCounts(noise_multiplier=10.0, margin=1e-6)
    assert delta([(event, 1)], 1.0) >= 0.5 - 1e-6
    assert delta([(event, 20)], 1.0) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"margin": 0.0}, "margin must be above 0 and finite"),
        ({"margin": math.inf}, "margin must be above 0 and finite"),
        ({"margin": math.nan}, "margin must be above 0 and finite"),
        ({"margin": True}, "margin must be above 0 and finite"),
        ({"replaced": 2.0}, "replaced is 1"),
        ({"discrete": False}, "have discrete noise"),
        ({"noise_multiplier": 1}, "must be a float"),
    ],
)
def test_impossible_counts_are_refused(fields, text):
    """By name, with the value."""
    with pytest.raises(ValueError, match=text):
        ThresholdedCounts(**{"noise_multiplier": 1.0, "margin": 4.0, **fields})


def test_cross_checks_know_that_a_threshold_has_a_delta():
    """No ρ holds, and the library has no such distribution."""
    event = ThresholdedCounts(noise_multiplier=10.0, margin=5.0)
    assert comparison.zcdp_rho([(event, 1)]) == math.inf
    with pytest.raises(ValueError, match="loss distribution"):
        comparison.library_epsilon([(event, 1)], DELTA)
    assert "which is part of δ" in event.words().accounted_as

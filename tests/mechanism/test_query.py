"""Answers about all units cost what the literature says, under both adjacencies; several answers cost their sum."""

import json
import math

import pytest

from dpllm.mechanism.banded import BandedStep
from dpllm.mechanism.catalogue import from_fields, to_fields
from dpllm.mechanism.events import Step
from dpllm.mechanism.query import Query, Several
from dpllm.privacy import comparison
from dpllm.privacy.accounting import delta, epsilon, merge

DELTA = 1e-5


@pytest.mark.parametrize(("queries", "sigma", "expected"), [(500, 10.0, 17.86), (1000, 40.0, 4.98)])
def test_votes_cost_the_reference_numbers(queries, sigma, expected):
    """PATE's noisy votes: a unit moves one vote, which changes the counts by √2 under both adjacencies."""
    votes = Query(noise_multiplier=sigma / math.sqrt(2), replaced=1.0)
    for adjacency in ("zero-out", "replace-one"):
        assert epsilon([(votes, queries)], DELTA, adjacency) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("replaced", [0.5, 1.0, math.sqrt(2), 2.0])
def test_replacing_a_unit_costs_the_change_that_it_makes(replaced):
    """The same as Gaussian noise that is smaller by that factor; 2 is what a step over all units costs."""
    query, step = Query(noise_multiplier=8.0, replaced=replaced), Step(sampling_rate=1.0, noise_multiplier=8.0)
    smaller = Step(sampling_rate=1.0, noise_multiplier=8.0 / replaced)
    assert epsilon([(query, 3)], DELTA) == epsilon([(step, 3)], DELTA)
    assert epsilon([(query, 3)], DELTA, "replace-one") == pytest.approx(epsilon([(smaller, 3)], DELTA), rel=1e-6)
    if replaced == 2:
        assert epsilon([(query, 3)], DELTA, "replace-one") == epsilon([(step, 3)], DELTA, "replace-one")


def test_an_unknown_change_is_accounted_for_by_group_privacy():
    """Twice a zero-out ε at a smaller δ: never below what the factor 2 costs."""
    unknown, known = Query(noise_multiplier=8.0, replaced=None), Query(noise_multiplier=8.0, replaced=2.0)
    assert epsilon([(unknown, 3)], DELTA) == epsilon([(known, 3)], DELTA)
    assert epsilon([(unknown, 3)], DELTA, "replace-one") > epsilon([(known, 3)], DELTA, "replace-one")


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("sigma", "count"), [(0.4, 1), (1.0, 1), (5.0, 2), (40.0, 300), (300.0, 1)])
def test_discrete_noise_costs_at_least_gaussian_noise_and_at_most_its_zcdp(sigma, count, adjacency):
    """Its Rényi divergences are those of Gaussian noise, and zCDP is the same conversion at every order."""
    discrete = Query(noise_multiplier=sigma, replaced=math.sqrt(2), discrete=True)
    gaussian = Query(noise_multiplier=sigma, replaced=math.sqrt(2))
    moved = 1.0 if adjacency == "zero-out" else math.sqrt(2)
    zcdp = comparison.zcdp_epsilon([(Step(sampling_rate=1.0, noise_multiplier=sigma / moved), count)], DELTA)
    found = epsilon([(discrete, count)], DELTA, adjacency)
    assert epsilon([(gaussian, count)], DELTA, adjacency) <= found <= max(zcdp * 1.01, zcdp + 0.002)


def test_the_exact_tail_of_discrete_noise_is_within_its_delta():
    """Whole numbers, moved by 1: the δ of the true probabilities, summed, is at most the δ that is computed."""
    sigma, at = 1.5, range(-60, 62)
    weight = {x: math.exp(-(x**2) / (2 * sigma**2)) for x in range(-80, 80)}
    total = math.fsum(weight.values())
    for eps in (0.0, 0.5, 1.0, 2.0):
        exact = math.fsum(max(0.0, weight[x] - math.exp(eps) * weight[x - 1]) for x in at) / total
        query = Query(noise_multiplier=sigma, replaced=1.0, discrete=True)
        for adjacency in ("zero-out", "replace-one"):
            assert exact <= delta([(query, 1)], eps, adjacency)


def test_several_answers_are_the_sum_of_their_parts():
    """In the ledger's first line and in a budget: one event, equal to its parts composed, read back as written."""
    parts = [(Query(noise_multiplier=9.0), 3), (Step(sampling_rate=0.1, noise_multiplier=1.0), 20)]
    several = Several.of([*parts, (Query(noise_multiplier=9.0), 2)])
    assert several.parts == ((Query(noise_multiplier=9.0), 5), parts[1])
    assert merge([(several, 2)]) == merge([(event, 2 * count) for event, count in several.parts])
    again = from_fields(json.loads(json.dumps(to_fields(several))))
    assert again == several and hash(again) == hash(several)
    assert several.noise_multiplier == 1.0 and several.moves == 1 and several.clip_norm == 1.0
    assert "5 times" in several.words().accounted_as and not several.words().is_sampled


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sampling_rate": 0.5}, "a query covers all units, so its sampling_rate must be 1, got 0.5"),
        ({"replaced": 2.5}, "replaced must be above 0 and at most 2, got 2.5"),
        ({"noise_multiplier": 1}, "noise_multiplier must be a float"),
    ],
)
def test_impossible_queries_are_refused(fields, text):
    """By name, with the value."""
    with pytest.raises(ValueError, match=text):
        Query(**{"noise_multiplier": 1.0, **fields})


def test_impossible_collections_are_refused():
    """No part, no count, and events whose cost depends on the course of a run."""
    banded = BandedStep(num_units=100, sampling_rate=0.4, max_batch_size=30, noise_multiplier=1.0, bands=4)
    query = Query(noise_multiplier=1.0)
    for parts, text in (
        (((query, 0),), "must be from 1 to"),
        (((banded, 4),), "depends on the course of its run"),
        (((Several.of([(query, 1)]), 1),), "depends on the course of its run"),
    ):
        with pytest.raises(ValueError, match=text):
            Several(parts=parts)


def test_cross_checks_know_queries():
    """ρ is that of Gaussian noise; the library has no distribution of discrete noise."""
    assert comparison.zcdp_rho([(Query(noise_multiplier=2.0), 4)]) == 0.5
    assert comparison.zcdp_rho([(Query(noise_multiplier=2.0, discrete=True), 4)]) == 0.5
    assert comparison.library_epsilon([(Query(noise_multiplier=9.0), 4)], DELTA) == pytest.approx(
        epsilon([(Query(noise_multiplier=9.0), 4)], DELTA), rel=0.01
    )
    with pytest.raises(ValueError, match="loss distribution"):
        comparison.library_epsilon([(Query(noise_multiplier=2.0, discrete=True), 4)], DELTA)

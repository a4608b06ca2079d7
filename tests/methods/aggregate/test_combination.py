"""The answers of groups: bounded influence, noise, thresholds and their cost."""

from __future__ import annotations

import itertools
import math

import pytest
from scipy import stats

from dpllm.mechanism.query import Query
from dpllm.methods.aggregate.combination import ANSWERED, STEPS, Mean, OpenVotes, ThresholdedCounts, Votes
from dpllm.methods.queries.run import Randomness
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


NUMBERS = ["1", "5", "3.3", "-40", "9" * 400, "none", "", "1e99", "٣", "nan", "inf", "-0", "2,500", "4 or 5", "1,23"]


def exact(numbers, change):
    """No noise: for tests of the sums themselves."""
    return [float(number) for number in numbers]


def sums(way, answers):
    """The whole numbers that get noise, and Δ."""
    seen = []

    def noted(numbers, change):
        seen.append((list(numbers), change))
        return exact(numbers, change)

    way.released(answers, 1.0, noted)
    ((numbers, change),) = seen
    assert all(isinstance(number, int) for number in numbers)
    return numbers, change


@kills(
    "the number that a group answers is not clipped to its range",
    "dpllm/methods/aggregate/combination.py",
    'value = min(max(float(found[0].replace(",", "")), self.low), self.high)',
    'value = min(float(found[0].replace(",", "")), 1e300)',
)
@kills(
    "whether a group gave a number moves the sums by more than the noise is for",
    "dpllm/methods/aggregate/combination.py",
    "ANSWERED = math.isqrt(3 * STEPS * STEPS)",
    "ANSWERED = 4 * STEPS",
)
@pytest.mark.parametrize(("low", "high"), [(1.0, 5.0), (-1e12, 1e12), (0.0, 1e-300), (0.1, 0.3)])
def test_one_group_moves_the_sums_of_a_mean_by_no_more_than_the_noise_is_for(low, high):
    """Any answer instead of any other: numbers of any size, words, and nothing."""
    way, others = Mean(low, high), ["2"] * 5
    answers = [*NUMBERS, str(low), str(high), f"{high:.300f}"]
    found = [sums(way, [*others, answer]) for answer in answers]
    for (first, change), (second, _) in itertools.combinations(found, 2):
        assert math.dist(first, second) <= change == 2 * STEPS
    assert math.hypot(STEPS, ANSWERED) <= 2 * STEPS < math.hypot(STEPS, ANSWERED + 1)


def test_a_number_is_read_as_people_write_it():
    """The first one; thousands have commas."""
    way = Mean(0, 10_000)
    for text, value in (("It costs 2,500 pounds, or 3", 2500), ("-3", 0), ("4.5 of 5", 4.5), ("20-25", 20)):
        assert way.contribution(text) == (round((2 * value / 10_000 - 1) * STEPS), ANSWERED)
    assert way.contribution("five") == (0, 0)


def test_the_mean_is_that_of_the_groups_that_gave_a_number():
    """Without noise; and none is given where too few did."""
    way = Mean(1, 5)
    found = way.released(["2", "4", "word", "100"] * 30, 0.01, exact)
    assert found["mean"] == pytest.approx((2 + 4 + 5) / 3, abs=1e-4) and found["groups with a number"] == 90
    assert way.released(["2", "4", "word", "100"], 2.0, exact)["mean"] is None
    assert 1 <= way.released(["1"] * 4, 0.01, lambda n, c: [n[0] * 1.5, n[1]])["mean"] <= 5


@kills(
    "the noise of votes is that of a vote which one answer gains and none loses",
    "dpllm/methods/aggregate/combination.py",
    "VOTE_CHANGE = math.sqrt(2)",
    "VOTE_CHANGE = 1.0",
)
@pytest.mark.parametrize("way", [Votes(("yes", "no", "it depends")), OpenVotes(5.0, 3)])
def test_one_group_moves_the_counts_by_the_root_of_two(way):
    """A vote goes from one answer to another; for open answers, over all answers that there could be."""
    answers = range(3) if isinstance(way, Votes) else ["thai", "Thai!", "french", "fries", ""]
    for first, second in itertools.combinations(answers, 2):
        counts = []
        for own in (first, second):
            votes = [*list(answers)[:3], own]
            numbers, change = sums(way, votes)
            assert change == math.sqrt(2)
            keys = range(3) if isinstance(way, Votes) else dict.fromkeys(filter(None, map(way.word, votes)))
            counts.append(dict(zip(keys, numbers, strict=True)))
        union = counts[0].keys() | counts[1].keys()
        assert math.dist(*([count.get(key, 0) for key in union] for count in counts)) <= math.sqrt(2)


def test_votes_for_nothing_that_is_listed_are_refused():
    """A score is no vote."""
    for wrong in ([3], [-1], [0.5], [True]):
        with pytest.raises(ValueError, match="2 answers"):
            Votes(("yes", "no")).released(wrong, 1.0, exact)


def test_the_counts_of_listed_answers_are_released_with_the_largest():
    """The noise of all of them is paid for."""
    found = Votes(("yes", "no")).released([0, 1, 1, 1], 2.0, exact)
    assert found["answer"] == "no" and found["groups"] == {"yes": 1, "no": 3}


@kills(
    "open answers are released whatever their counts are",
    "dpllm/methods/aggregate/combination.py",
    "if pair[1] >= least",
    "if True",
)
def test_open_answers_below_the_threshold_are_not_released():
    """1 + z s, whatever the answer; noise may hide more."""
    way = OpenVotes(2.0, 2)
    least = way.threshold(3.0)
    assert least == pytest.approx(1 + 2 * 3 * math.sqrt(2), rel=2e-3)
    answers = ["Thai food, I think."] * 10 + ["thai  FOOD"] * 3 + ["french"] * 9 + ["a secret"]
    found = way.released(answers, 3.0, exact)
    assert found["groups"] == {"thai food": 13}
    assert way.released(["", "?"], 3.0, exact)["groups"] == {}
    with pytest.raises(ValueError, match="9 groups"):
        way.settings(3.0, 8)


def test_the_threshold_hides_an_answer_of_one_group_as_often_as_its_event_says():
    """Neighbours: an answer of one group, and none. 4000 draws with the noise of a run, against β = 0.159 of z = 1."""
    way, random_numbers = OpenVotes(1.0, 3), Randomness("discrete")
    event = way.event(4.0)
    assert isinstance(event, ThresholdedCounts) and event.hidden_mass == pytest.approx(0.1587, abs=1e-4)
    words = [f"word{number}" for number in range(4000)]
    found = way.released(words, 4.0, lambda numbers, change: random_numbers.noisy(numbers, 4.0, change))
    seen = len(found["groups"]) / len(words)
    assert 0.13 < seen < event.hidden_mass + 0.02


@pytest.mark.parametrize(("count", "sigma"), [(1, 2.0), (10, 10.0)])
def test_means_and_votes_cost_gaussian_noise(count, sigma):
    """Under both adjacencies: by the formula of Balle and Wang (arXiv:1805.06530), and little more for Rényi."""
    mu = math.sqrt(count) / sigma

    def exact_delta(eps):
        return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * stats.norm.cdf(-mu / 2 - eps / mu)

    for way in (Mean(0, 5), Votes(("yes", "no"))):
        for adjacency in ("zero-out", "replace-one"):
            found = epsilon([(way.event(sigma), count)], 1e-5, adjacency)
            assert exact_delta(found) <= 1e-5 < exact_delta(found * 0.9)

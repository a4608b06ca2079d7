"""A unit moves one vote; votes are bounded, noisy and charged; ε has the digits of the reference."""

import math

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import trial_bounds
from dpllm.methods.pate.votes import CHECKS, LABELS, NO_LABEL, VOTE_CHANGE, Ballots, Vote
from dpllm.privacy.accounting import epsilon
from tests.mutations import kills


def _history(vote, noise_multiplier):
    return [(event, count) for _, event, count in vote.charges(noise_multiplier)]


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(("queries", "stddev", "expected"), [(500, 10.0, 17.86), (1000, 40.0, 4.98)])
def test_the_reference_numbers(queries, stddev, expected, adjacency):
    """Exact Gaussian composition at δ = 1e-5, the same under both adjacencies; by Rényi divergences 20.76 and 6.00."""
    found = epsilon(_history(Vote(queries), stddev / math.sqrt(2)), 1e-5, adjacency)
    assert found == pytest.approx(expected, abs=0.005)


@kills(
    "a vote is thought to change the counts by 1",
    "dpllm/methods/pate/votes.py",
    "VOTE_CHANGE = math.sqrt(2)",
    "VOTE_CHANGE = 1.0",
)
def test_checks_and_labels_compose_to_the_gaussian_of_their_sum():
    """The charge of confident GNMax: n/σ₁² + 2M/σ², as one Gaussian mechanism (analytic δ)."""
    vote = Vote(300, threshold=30.0, max_answers=80, check_noise=2.0)
    stddev, check_stddev = vote.stddevs(20.0)
    assert (stddev, check_stddev) == (20 * math.sqrt(2), 40 * math.sqrt(2))
    mu = math.sqrt(300 / check_stddev**2 + 80 * 2 / stddev**2)
    found = epsilon(_history(vote, 20.0), 1e-6)
    exact = stats.norm.cdf(mu / 2 - found / mu) - math.exp(found) * stats.norm.cdf(-mu / 2 - found / mu)
    assert exact == pytest.approx(1e-6, rel=5e-3)


@kills(
    "checks whether teachers agree are not charged",
    "dpllm/methods/pate/votes.py",
    "return [labels, (CHECKS, check, self.num_prompts)]",
    "return [labels]",
)
def test_every_text_is_charged():
    """One label each, or every check and all planned labels, however many are given."""
    assert [(name, count) for name, _, count in Vote(7).charges(1.0)] == [(LABELS, 7)]
    confident = Vote(7, threshold=3.0, max_answers=2)
    assert {name: count for name, _, count in confident.charges(1.0)} == {LABELS: 2, CHECKS: 7}
    assert Vote(7, threshold=3.0, max_answers=20).most_labels == 7


def test_one_teacher_moves_the_counts_by_the_square_root_of_two():
    """Two neighbours: all teachers vote, and one of them votes differently for every text."""
    rng = np.random.default_rng(0)
    votes = rng.integers(0, 4, (9, 50))
    other = votes.copy()
    other[3] = (other[3] + rng.integers(1, 4, 50)) % 4
    counts = []
    for those in (votes, other):
        ballots = Ballots(50, 4)
        for classes_N in those:
            ballots.add(classes_N)
        assert ballots.num_voters == 9 and np.all(ballots.counts_NC.sum(axis=1) == 9)
        counts.append(ballots.counts_NC)
    moved = np.linalg.norm((counts[0] - counts[1]).astype(float), axis=1)
    assert moved == pytest.approx(np.full(50, VOTE_CHANGE))
    assert np.abs(counts[0].max(axis=1) - counts[1].max(axis=1)).max() <= 1  # the check


@kills(
    "teachers vote with their scores",
    "dpllm/methods/pate/votes.py",
    'if classes_N.dtype.kind != "i" or classes_N.shape != (num_prompts,):',
    "if False:",
)
@pytest.mark.parametrize(
    "votes",
    [
        np.array([0.0, 1.0, 2.0]),  # probabilities or scores of one class
        np.array([[0.1, 0.9], [5.0, -5.0], [0.5, 0.5]]),
        np.array([0, 1]),
        np.array([[1, 0], [0, 1], [7, 0]]),  # several votes
        np.array([True, False, True]),
    ],
)
def test_what_is_no_vote_is_refused(votes):
    """A teacher that votes with its scores has no bound on its influence."""
    with pytest.raises(ValueError, match="3 texts"):
        Ballots(3, 2).add(votes)


@pytest.mark.parametrize("votes", [[0, 1, 2], [0, -1, 1]])
def test_a_vote_is_for_a_class(votes):
    """A negative number would count for the last class."""
    with pytest.raises(ValueError, match="class from 0"):
        Ballots(3, 2).add(np.array(votes))


@kills(
    "votes get no noise",
    "dpllm/methods/pate/votes.py",
    "np.argmax(counts_NC + noise_NC, axis=1)",
    "np.argmax(counts_NC, axis=1)",
)
def test_the_largest_noisy_count_wins():
    """The noise decides, not only the counts."""
    counts = np.array([[10, 9, 0], [3, 2, 5]])
    noise = np.array([[0.0, 1.5, 0.0], [0.0, 0.0, -2.5]])
    assert Vote(2).winners(counts, noise, np.zeros(2)).tolist() == [1, 0]


def test_noise_of_another_shape_is_refused():
    """One number for all classes would cancel in the comparison."""
    counts = np.array([[10, 9], [3, 2]])
    with pytest.raises(ValueError, match="draw one for each"):
        Vote(2).winners(counts, np.zeros((2, 1)), np.zeros(2))
    with pytest.raises(ValueError, match="draw one for each"):
        Vote(2, 1.0, 1).winners(counts, np.zeros((2, 2)), np.zeros(1))


@kills(
    "labels are given that are not charged",
    "dpllm/methods/pate/votes.py",
    "within_N = np.cumsum(passed_N) <= self.most_labels",
    "within_N = passed_N",
)
def test_no_more_labels_than_are_charged():
    """The check decides by the largest count with its own noise, and labels end when all are given."""
    vote = Vote(5, threshold=6.0, max_answers=2)
    counts = np.array([[9, 0], [5, 4], [1, 8], [0, 9], [9, 0]])
    noise_N = np.array([0.0, 0.5, 0.0, 0.0, 0.0])
    assert vote.winners(counts, np.zeros((5, 2)), noise_N).tolist() == [0, NO_LABEL, 1, NO_LABEL, NO_LABEL]
    noise_N = np.array([-4.0, 1.5, 0.0, 0.0, 0.0])
    assert vote.winners(counts, np.zeros((5, 2)), noise_N).tolist() == [NO_LABEL, 0, 1, NO_LABEL, NO_LABEL]


def _labels_of_neighbours(stddev, trials=8000, texts=60):
    """The number of labels 1 among texts for which one unit's teacher decides: with the unit, and without."""
    rng = np.random.default_rng(7)
    counts = []
    for deciding in (0, 1):
        ballots = Ballots(texts, 2)
        for choice in [0] * 5 + [1] * 5 + [deciding]:
            ballots.add(np.full(texts, choice))
        counts.append(ballots.counts_NC)
    included = np.arange(trials) % 2 == 0
    scores = np.empty(trials)
    for trial, there in enumerate(included):
        noise = rng.normal(0, stddev, (texts, 2)) if stddev else np.zeros((texts, 2))
        scores[trial] = Vote(texts).winners(counts[int(there)], noise, np.zeros(texts)).sum()
    return scores, included


@pytest.mark.deep
def test_an_attack_on_the_labels_shows_a_part_of_the_charge_and_no_more():
    """A lower bound on ε from the released labels, for the worst unit; less noise than is charged is refuted."""
    stddev = 6.0
    claim = [(event, count) for _, event, count in Vote(60).charges(stddev / math.sqrt(2))]
    stated = epsilon(claim, 1e-5)
    scores, included = _labels_of_neighbours(stddev)
    bounds = trial_bounds(scores, included, 1e-5, history=claim)
    assert not any(bound.refutes for bound in bounds)
    assert 0.3 * stated < max(bound.epsilon for bound in bounds) <= stated
    for less in (stddev / 3, 0.0):
        planted, included = _labels_of_neighbours(less)
        assert any(bound.refutes for bound in trial_bounds(planted, included, 1e-5, history=claim))

"""The vote of the teachers: the division of units, one vote a teacher, noise, charges, and tokens."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import trial_bounds
from dpllm.data.units import UnitIndex
from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import completion_probe
from dpllm.methods.pate.votes import (
    CHECKS,
    LABELS,
    NO_LABEL,
    TOKENS,
    VOTE_CHANGE,
    Ballots,
    Partition,
    TokenVotes,
    Vote,
    written_tokens,
)
from dpllm.methods.queries.run import Randomness, begin_from
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from tests.methods.pate.school import TEACHERS
from tests.mutations import kills


@kills(
    "teachers share units",
    "dpllm/methods/pate/votes.py",
    "np.flatnonzero(self.teacher_of == teacher)",
    "np.flatnonzero(self.teacher_of >= teacher)",
)
@pytest.mark.parametrize(("num_units", "num_teachers"), [(10, 3), (7, 7), (1000, 50)])
def test_every_unit_has_one_teacher_and_teachers_share_none(num_units, num_teachers):
    """The whole guarantee rests on it: a unit changes one vote."""
    partition = Partition(num_units, num_teachers, np.random.default_rng(0))
    units = UnitIndex.one_row_per_unit(num_units)
    groups = [partition.rows_of(teacher, units).tolist() for teacher in range(num_teachers)]
    assert sorted(itertools.chain(*groups)) == list(range(num_units))
    assert partition.sizes.tolist() == [len(group) for group in groups]
    assert partition.sizes.max() - partition.sizes.min() <= 1


def test_all_rows_of_a_user_go_to_one_teacher():
    """Also where they are scattered; rows that were dropped go to none."""
    ids = ["ann", "bob", "ann", "cyd", "bob", "ann", "dan"]
    units = UnitIndex.from_ids(ids, max_rows_per_unit=2)
    for seed in range(20):
        partition = Partition(4, 2, np.random.default_rng(seed))
        owners = [{ids[row] for row in partition.rows_of(teacher, units)} for teacher in range(2)]
        assert not owners[0] & owners[1] and owners[0] | owners[1] == set(ids)
        assert sorted(np.concatenate([partition.rows_of(t, units) for t in range(2)])) == [0, 1, 2, 3, 4, 6]


def test_divisions_are_uniform():
    """Two units share a teacher with the probability of a uniform division: 1/5 for 6 units in pairs."""
    rng, together = np.random.default_rng(1), np.zeros((6, 6))
    for _ in range(3000):
        teacher_of = Partition(6, 3, rng).teacher_of
        together += teacher_of[:, None] == teacher_of[None, :]
    shares = together[~np.eye(6, dtype=bool)] / 3000
    assert np.abs(shares - 0.2).max() < 4.5 * (0.2 * 0.8 / 3000) ** 0.5


def test_more_teachers_than_units_are_refused():
    """A teacher without a unit learns nothing."""
    with pytest.raises(ValueError, match=r"pate\.teachers=4"):
        Partition(3, 4, np.random.default_rng(0))


def test_units_of_other_records_are_refused():
    """An index with another number of units would give rows to teachers that do not own them."""
    with pytest.raises(ValueError, match="3 units"):
        Partition(3, 2, np.random.default_rng(0)).rows_of(0, UnitIndex.one_row_per_unit(4))


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


END = 9


class Known:
    """Writers with fixed votes: of teacher t for text r at place p, the candidate ``votes[t][r][p]``."""

    def __init__(self, votes, candidates=(5, 6, 7, END)):
        self.votes = np.array(votes)
        self.num_teachers, self.num_texts, _ = self.votes.shape
        self._candidates, self.place = candidates, 0
        self.appended = []

    def candidates(self):
        return np.tile(np.array(self._candidates), (self.num_texts, 1))

    def vote(self, teacher):
        return self.votes[teacher, :, self.place]

    def append(self, tokens_R):
        self.appended.append(tokens_R.tolist())
        self.place += 1


@pytest.fixture
def started(writing_school):
    """A function that begins a run of three texts of five tokens; it returns the run and its vote."""

    def begin(**pate):
        prepared = writing_school(pate=pate)
        return begin_from(prepared.recipe, prepared.plan), prepared

    return begin


def _without_noise(monkeypatch, noise=lambda shape: np.zeros(shape)):
    drawn = []

    def gaussian(self, shape, stddev):
        drawn.append((shape, stddev))
        return noise(shape)

    monkeypatch.setattr(Randomness, "gaussian", gaussian)
    return drawn


def _all_vote(candidate, texts=3, places=5):
    return np.full((TEACHERS, texts, places), candidate)


@kills(
    "the realised length of texts is charged",
    "dpllm/methods/pate/votes.py",
    "        _charge(vote, run)\n        self.left",
    (
        "        winners = self.winners\n"
        "        self.winners = lambda own: run.charge(vote.answers, len(own.counts_NC)) or winners(own)\n"
        "        self.left"
    ),
)
def test_every_planned_token_is_charged_though_texts_end_at_once(started, monkeypatch):
    """How long a text is depends on the votes; a charge of that length would be no bound."""
    _without_noise(monkeypatch)
    run, prepared = started()
    with run:
        votes = TokenVotes(prepared.vote, TEACHERS, run)
        assert run.left(TOKENS) == 0  # before a token is voted on
        assert written_tokens(Known(_all_vote(3)), votes, 5, [END]) == [[], [], []]
    history = read_ledger(Path(prepared.recipe.output_dir) / LEDGER_FILE).history
    assert [(event.noise_multiplier, count) for event, count in history] == [(2.0, 15)]
    assert epsilon(history, 1e-3) == prepared.plan.epsilon


def test_the_winning_token_is_appended_and_a_text_ends_before_an_end(started, monkeypatch):
    """Each text by its own votes; the largest count wins."""
    drawn = _without_noise(monkeypatch)
    votes_TRP = _all_vote(1)
    votes_TRP[:3, 1, 2] = 3  # three of four teachers end the second text at its third place
    votes_TRP[:2, 2, 0] = 2
    votes_TRP[2, 2, 0] = 0
    run, prepared = started()
    with run:
        writers = Known(votes_TRP)
        texts = written_tokens(writers, TokenVotes(prepared.vote, TEACHERS, run), 5, [END])
    assert texts == [[6] * 5, [6, 6], [7, 6, 6, 6, 6]]
    assert writers.appended[2] == [6, END, 6]
    assert drawn[::2] == [((3, 4), 2 * 2**0.5)] * 3 + [((2, 4), 2 * 2**0.5)] * 2


def test_texts_are_written_until_the_planned_tokens_are_used(started, monkeypatch):
    """``max_answers`` without a threshold: texts after that are cut, and none gets a token without a charge."""
    _without_noise(monkeypatch)
    run, prepared = started(max_answers=7)
    with run:
        votes = TokenVotes(prepared.vote, TEACHERS, run)
        texts = written_tokens(Known(_all_vote(1)), votes, 5)
        assert list(map(len, texts)) == [3, 2, 2] and votes.left == 0
        assert written_tokens(Known(_all_vote(1)), votes, 5) == [[], [], []]
    assert prepared.plan.charge(TOKENS).count == 7


def test_without_agreement_the_public_token_is_taken_and_every_check_is_charged(started, monkeypatch):
    """It costs no vote; the check is on the count without the votes of the public model."""
    _without_noise(monkeypatch)
    votes_TRP = _all_vote(1)
    votes_TRP[:2, 0, 1] = 2  # two against two, below the threshold of three
    run, prepared = started(threshold=3.0, max_answers=15, public_votes=3.5)
    with run:
        votes = TokenVotes(prepared.vote, TEACHERS, run, public_votes=3.5)
        assert run.left(CHECKS) == run.left(TOKENS) == 0
        assert written_tokens(Known(votes_TRP), votes, 5)[0] == [6, 5, 6, 6, 6]
        assert votes.left == 15 - 14
    assert {charge.name: charge.count for charge in prepared.plan.charges} == {TOKENS: 15, CHECKS: 15}


def test_votes_of_the_public_model_are_added_to_its_token(started, monkeypatch):
    """They are the same for both neighbours, so they cost nothing."""
    _without_noise(monkeypatch)
    run, prepared = started()
    with run:
        votes = TokenVotes(prepared.vote, TEACHERS, run, public_votes=4.5)
        assert written_tokens(Known(_all_vote(1)), votes, 1) == [[5]] * 3


@kills(
    "more tokens are released than are charged",
    "dpllm/methods/pate/votes.py",
    "if places > min(self.left, self._places):",
    "if False:",
)
def test_more_places_than_are_charged_are_refused(started):
    """Whoever asks: the charge was fixed beforehand."""
    run, prepared = started(max_answers=2)
    with run:
        votes = TokenVotes(prepared.vote, TEACHERS, run)
        ballots = Ballots(3, 4)
        with pytest.raises(ValueError, match="4 teachers"):
            votes.winners(ballots)
        for _ in range(TEACHERS):
            ballots.add(np.zeros(3, dtype=np.int64))
        with pytest.raises(ValueError, match="3 tokens"):
            votes.winners(ballots)
        assert votes.left == 2


def test_checks_that_are_not_charged_are_refused(started, monkeypatch):
    """A failed check uses no token, but the check is an answer."""
    _without_noise(monkeypatch, lambda shape: np.full(shape, -1e9))
    run, prepared = started(threshold=1.0, max_answers=15)
    with run:
        votes, ballots = TokenVotes(prepared.vote, TEACHERS, run), Ballots(8, 2)
        for _ in range(TEACHERS):
            ballots.add(np.zeros(8, dtype=np.int64))
        assert set(votes.winners(ballots)) == {NO_LABEL} and votes.left == 15
        with pytest.raises(ValueError, match="8 tokens"):
            votes.winners(ballots)


@pytest.mark.parametrize("pate", [{}, {"max_answers": 7}, {"threshold": 1.0, "max_answers": 3, "check_noise": 5.0}])
def test_the_audit_reads_the_vote_from_the_plan(writing_school, pate):
    """A trial charges all that the plan charges, with its noise."""
    plan = writing_school(pate=pate).plan
    found = run_trials(plan, completion_probe(plan), 10)
    assert found.history == [(charge.event, charge.count) for charge in plan.charges]

"""Texts by vote: one unit moves one vote at each place, all planned tokens are charged, and no more are released."""

from pathlib import Path

import numpy as np
import pytest

from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import completion_probe
from dpllm.methods.pate.votes import CHECKS, NO_LABEL, TOKENS, Ballots, TokenVotes, written_tokens
from dpllm.methods.queries.run import Randomness, begin_from
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from tests.methods.pate.school import TEACHERS
from tests.mutations import kills

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

    def begin(**teach):
        prepared = writing_school(teach=teach)
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


@pytest.mark.parametrize("teach", [{}, {"max_answers": 7}, {"threshold": 1.0, "max_answers": 3, "check_noise": 5.0}])
def test_the_audit_reads_the_vote_from_the_plan(writing_school, teach):
    """A trial charges all that the plan charges, with its noise."""
    plan = writing_school(teach=teach).plan
    found = run_trials(plan, completion_probe(plan), 10)
    assert found.history == [(charge.event, charge.count) for charge in plan.charges]

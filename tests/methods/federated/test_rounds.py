"""Rounds over clients: Poisson cohorts, bounded updates, noise once and enough, a public denominator, the charge."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import AuditError, Claim
from dpllm.config import ConfigError
from dpllm.methods.attacks.answers import run_rounds
from dpllm.methods.attacks.probes import RoundProbe, small_federation
from dpllm.methods.federated import client
from dpllm.methods.federated.client import Clients, SharedWeights
from dpllm.methods.federated.run import Rounds, against_the_server, require_federated, words_about_the_server
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan
from tests.memory_ledger import MemoryLedger
from tests.methods.federated.small import SIZE, Vector, plan_of, rounds_of
from tests.mutations import kills


class Counting:
    """Clients that remember who was asked for an update."""

    def __init__(self, clients):
        self.clients, self.num_clients, self.cohorts = clients, clients.num_clients, []

    def answers(self, cohort, weights, number):
        self.cohorts.append(sorted(cohort))
        return self.clients.answers(cohort, weights, number)


def units_of(size, count):
    """(count, size): client u moves along one axis, by 1."""
    return np.eye(size)[np.arange(count) % size]


def moved(model):
    return model.weight.detach().numpy().astype(np.float64)


@kills(
    "the cohort of a federated round has a fixed size",
    "dpllm/methods/federated/run.py",
    "plan.mechanism.sampler.steps(secret_rng())",
    "iter(lambda: secret_rng().permutation(plan.num_units)[: plan.expected_batch_size], None)",
)
def test_a_cohort_is_a_poisson_sample_of_all_clients():
    """Every client enters with probability q, independently of the others: sizes vary as those of a binomial."""
    plan, made = plan_of(num_clients=20, batch=6, rounds=600), []
    rounds, *_ = rounds_of(plan, units_of(SIZE, 20), lambda inner: made.append(Counting(inner)) or made[0])
    for _ in range(600):
        rounds.take()
    drawn = np.zeros((600, 20))
    for number, cohort in enumerate(made[0].cohorts):
        drawn[number, cohort] = 1
    assert np.all(np.abs(drawn.mean(0) - 0.3) < 5 * np.sqrt(0.21 / 600))
    assert 0.7 < drawn.sum(1).var() / (20 * 0.21) < 1.4  # a cohort of fixed size has none
    again = np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]
    assert abs(again) < 5 / np.sqrt(600 * 20)


@kills(
    "the sum of a federated round is divided by the realised cohort",
    "dpllm/methods/federated/run.py",
    "mean = total / self._plan.expected_batch_size",
    "mean = total / max(1, len(drawn))",
)
def test_the_sum_is_divided_by_the_public_size():
    """Whatever the cohort: with the realised size the mean of equal updates would always be the same."""
    plan, made = plan_of(num_clients=30, batch=10, rounds=12, noise_multiplier=0.0), []
    update = np.tile(np.full(SIZE, 0.1 / np.sqrt(SIZE)), (30, 1))
    rounds, model, _ = rounds_of(plan, update, lambda inner: made.append(Counting(inner)) or made[0])
    for _ in range(12):
        before = moved(model)
        assert rounds.take()
        assert moved(model) - before == pytest.approx(update[0] * len(made[0].cohorts[-1]) / 10, abs=1e-6)
    assert len({len(cohort) for cohort in made[0].cohorts}) > 1


@kills(
    "the update of a client is not bounded",
    "dpllm/methods/federated/client.py",
    "return update if size <=",
    "return update if size >",
)
@pytest.mark.parametrize("secure", [False, True])
def test_no_client_moves_the_sum_by_more_than_the_clip_norm(secure):
    """Through the public rounds, with an update of norm 100, of infinity, and of NaN; the noise is taken away."""
    noise = {"noise": {"kind": "distributed", "dropouts": 0.0, "min_batch_size": 6}} if secure else {}
    plan = plan_of(6, 6, 3, secure, clip_norm=0.5, noise_multiplier=0.001, max_batch_size=6, **noise)
    for bad, norm in ((100.0, 0.5), (np.inf, 0.0), (np.nan, 0.0), (0.01, 0.01)):
        update = np.zeros((6, SIZE))
        update[2, :] = bad / np.sqrt(SIZE)
        rounds, model, _ = rounds_of(plan, update)
        assert rounds.take()
        assert np.linalg.norm(moved(model) * 6) == pytest.approx(norm, abs=0.02)


@kills(
    "a trusted server adds no noise to the sum of the updates",
    "dpllm/methods/federated/run.py",
    "self._noise.add_share_(",
    "(lambda *_, **__: None)(",
)
def test_a_trusted_server_adds_the_noise_of_the_plan_once():
    """Also to an empty cohort, of which nothing else tells."""
    plan = plan_of(num_clients=2000, batch=1, rounds=60, clip_norm=0.5, noise_multiplier=1.5)
    rounds, model, sends = rounds_of(plan, np.zeros((2000, 500)))
    found = []
    for _ in range(60):
        before = moved(model)
        assert rounds.take()
        found.append(moved(model) - before)
    assert len({number for number, _ in sends.asked}) < 60  # there were empty cohorts
    noise = np.concatenate(found)
    assert stats.kstest(noise / 0.75, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 0.25


class Leaving:
    """Clients of which all but the first n drop out."""

    def __init__(self, clients, staying):
        self.clients, self.num_clients, self.staying = clients, clients.num_clients, staying

    def answers(self, cohort, weights, number):
        return self.clients.answers(sorted(cohort)[: self.staying], weights, number)


def secure_plan(**changes):
    return plan_of(num_clients=40, batch=40, rounds=6, secure=True, max_batch_size=40, **changes)


def test_the_fewest_survivors_have_the_noise_of_the_plan():
    """Shares of σC/√(cohort) each would leave too little when clients drop out."""
    plan = secure_plan(clip_norm=0.5, noise={"kind": "distributed", "dropouts": 0.2, "min_batch_size": 10})
    found = []
    for staying in (10, 40):
        rounds, model, _ = rounds_of(plan, np.zeros((40, 4000)), lambda inner, n=staying: Leaving(inner, n))
        assert rounds.take()
        found.append(moved(model) * 40)
    assert stats.kstest(found[0] / 0.5, "norm").pvalue > 1e-4
    assert found[1].std() == pytest.approx(2 * 0.5, rel=0.06)


def test_a_round_of_too_few_is_given_up_and_stays_charged():
    """The weights do not move, and the next round follows."""
    plan = secure_plan(noise={"kind": "distributed", "dropouts": 0.2, "min_batch_size": 10})
    rounds, model, _ = rounds_of(plan, np.ones((40, SIZE)), lambda inner: Leaving(inner, 9))
    for number in range(6):
        assert not rounds.take()
        assert rounds._ledger.num_steps == number + 1
    assert not moved(model).any()
    with pytest.raises(ValueError, match="6 steps"):
        rounds.take()


def test_a_round_is_charged_before_anybody_is_asked():
    class Fails:
        num_clients = 30

        def answers(self, *_):
            assert ledger.num_steps == 1
            raise OSError("no way")

    plan, ledger, model = plan_of(), MemoryLedger(), Vector()
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(OSError):
        Rounds(plan, ledger, Fails(), SharedWeights(model, "freeze_a"), optimizer).take()
    assert ledger.num_steps == 1


def test_dropouts_leave_a_smaller_sum_and_the_same_noise():
    plan = plan_of(num_clients=50, batch=50, rounds=40, noise_multiplier=0.01, max_batch_size=50)
    update = np.tile(np.full(SIZE, 1 / np.sqrt(SIZE)), (50, 1))
    rounds, model, _ = rounds_of(plan, update, dropouts=0.2)
    for _ in range(40):
        rounds.take()
    assert np.linalg.norm(moved(model)) == pytest.approx(40 * 0.8, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"unit": None, "max_rows_per_unit": None}, "set data.columns.unit"),
        ({"clipping": "automatic"}, "has no 'automatic' clipping"),
        ({"noise": {"kind": "banded", "bands": 2}}, "'banded' noise"),
        ({"seed": 1}, "leave privacy.seed"),
    ],
)
def test_other_plans_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        require_federated(plan_of(**changes))


def test_the_number_of_clients_is_that_of_the_plan():
    """A population that grew or shrank has another sampling rate."""
    import torch

    model = Vector()
    with pytest.raises(ConfigError, match="29 clients"):
        there = Clients(plan_of(num_clients=29), None, None)
        Rounds(plan_of(), MemoryLedger(), there, SharedWeights(model, "freeze_a"), torch.optim.SGD(model.parameters()))


def test_the_server_has_a_weaker_guarantee_and_is_told_so():
    """It knows the cohorts: ε without sampling, as of a Gaussian over all clients."""
    plan = plan_of(num_clients=100, batch=50, rounds=5, secure=True, epsilon=4.0, noise_multiplier=None)
    without = dataclasses.replace(plan.event.against_the_server, sampling_rate=1.0)
    assert against_the_server(plan) == epsilon([(without, 5)], plan.delta) > 4 * 1.2
    assert "the server sees the sum of a round" in words_about_the_server(plan)
    assert "a trusted server sees the bounded update" in words_about_the_server(plan_of())


SECURE = {"noise": {"kind": "distributed", "dropouts": 0.5, "min_batch_size": 3}, "randomness": "discrete"}


def test_rounds_are_consistent_and_unclipped_updates_refuted(monkeypatch):
    """The canary moves the sum by C; without clipping by ten times as much, and the claim is refuted."""
    plan = small_federation(plan_of(noise_multiplier=0.8, clip_norm=0.5), 150)
    found = run_rounds(plan, RoundProbe, 150)
    claim = Claim(found.history, 1e-3, 0.999, 1)
    assert found.scores[found.included].mean() - found.scores[~found.included].mean() == pytest.approx(0.5, abs=0.35)
    assert not claim.refuted_in_trials(found.scores, found.included)
    monkeypatch.setattr(client, "bounded", lambda update, plan: update)
    found = run_rounds(plan, RoundProbe, 150)
    assert claim.refuted_in_trials(found.scores, found.included)


def test_the_noise_of_secure_rounds_is_that_of_the_fewest_survivors():
    """Half of the clients leave, so two of four send; their shares together are σC, and the claim has no sampling."""
    plan = small_federation(plan_of(noise_multiplier=0.8, clip_norm=0.5, **SECURE), 60)
    found = run_rounds(plan, RoundProbe, 60)
    apart = found.scores - np.where(found.included, 0.5, 0.0)
    assert plan.num_units == plan.expected_batch_size == 4
    assert apart.std() == pytest.approx(0.4, rel=0.4)
    ((event, count),) = found.history
    assert (event.sampling_rate, event.noise_multiplier, count) == (1.0, 0.8, 1)


def test_what_is_no_audit_of_rounds_is_refused():
    """Rounds that charge nothing, too few, and a plan of another kind of run."""

    class Free:
        history = ()

        def answer(self, there):
            return 0.0

    plan = small_federation(plan_of(), 20)
    with pytest.raises(AuditError, match="20 rounds"):
        run_rounds(plan, lambda plan, ledger: Free(), 20)
    with pytest.raises(AuditError, match="takes 10"):
        run_rounds(plan, RoundProbe, 9)
    with pytest.raises(ConfigError, match="run protects"):
        small_federation(PrivacyPlan.untruncated(10, 5, 4, 1.0, 1.0, 1e-3), 20)

"""Tests of dpllm.methods.attacks.probes: rounds with and without a canary, for the audit."""

from __future__ import annotations

import numpy as np
import pytest

from dpllm.audit.bounds import AuditError, Claim
from dpllm.config import ConfigError
from dpllm.methods.attacks.answers import run_rounds
from dpllm.methods.attacks.probes import RoundProbe, small_federation
from dpllm.methods.federated import client
from dpllm.privacy.plan import PrivacyPlan
from tests.methods.federated.small import plan_of

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

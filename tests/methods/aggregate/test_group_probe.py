"""Tests of dpllm.methods.attacks.probes: the audit of answers of groups asks what the command asks."""

from __future__ import annotations

import pytest

from dpllm.audit.bounds import Claim
from dpllm.mechanism.query import Query
from dpllm.methods.aggregate import combination as module
from dpllm.methods.aggregate.combination import ThresholdedCounts
from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import group_probe
from dpllm.privacy.query_plan import Charge, QueryPlan

EVENTS = {
    "number": Query(noise_multiplier=1.0, replaced=1.0, discrete=True),
    "choice": Query(noise_multiplier=1.0, replaced=1.0, discrete=True),
    "open": ThresholdedCounts(noise_multiplier=1.0, margin=4.265),
}


def plan_of(kind):
    """The plan of one question."""
    return QueryPlan(
        unit="sequence",
        adjacency="zero-out",
        method="answers of groups",
        num_units=100,
        delta=1e-3,
        charges=(Charge(name=f"answer to {kind!r}", event=EVENTS[kind], count=1),),
        settings=(("groups", 30), ("group size, units", 2), (f"{kind}: kind", kind)),
        randomness="discrete",
    )


def refuted(kind):
    plan = plan_of(kind)
    found = run_trials(plan, group_probe(plan), 150)
    assert found.history == [(EVENTS[kind], 1)]
    assert found.scores[found.included].mean() > found.scores[~found.included].mean()
    return Claim(found.history, 1e-3, 0.999, 1).refuted_in_trials(found.scores, found.included)


@pytest.mark.parametrize("kind", EVENTS)
def test_answers_of_groups_are_consistent_and_unbounded_ones_refuted(kind, monkeypatch):
    """Planted: numbers that are not clipped, votes without noise, open answers without a threshold."""
    assert not refuted(kind)
    if kind == "number":
        far = lambda self, text: (round((2 * float(text) - 1) * module.STEPS), module.ANSWERED)  # noqa: E731
        monkeypatch.setattr(module.Mean, "contribution", far)
    elif kind == "choice":
        released = module.Votes.released
        exact = lambda self, answers, sigma, noisy: released(self, answers, sigma, lambda n, c: [*map(float, n)])  # noqa: E731
        monkeypatch.setattr(module.Votes, "released", exact)
    else:
        monkeypatch.setattr(module.OpenVotes, "threshold", lambda self, noise_multiplier: -1e9)
    assert refuted(kind)

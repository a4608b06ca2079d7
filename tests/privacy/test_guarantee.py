"""Tests of dpllm.privacy.accounting: one value with the ε of its own history, for every plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from scipy import optimize, special

from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Step
from dpllm.mechanism.query import Query
from dpllm.privacy.accounting import Guarantee
from dpllm.privacy.plan import Plan, make_plan
from dpllm.privacy.query_plan import Charge, QueryPlan
from tests.mutations import kills

DELTA = 1e-5


def analytic(distance: float, delta: float) -> float:
    """Return ε of two unit normals this far apart (Balle and Wang, arXiv:1805.06530, theorem 5)."""

    def excess(epsilon: float) -> float:
        upper = special.ndtr(distance / 2 - epsilon / distance)
        return float(upper - math.exp(epsilon) * special.ndtr(-distance / 2 - epsilon / distance) - delta)

    return float(optimize.brentq(excess, 0.0, 100.0, xtol=1e-12))


def whole(sigma: float, count: int = 1) -> tuple[tuple[Step, int], ...]:
    return ((Step(sampling_rate=1.0, noise_multiplier=sigma), count),)


@kills(
    "the guarantee states the other adjacency's ε",
    "dpllm/privacy/accounting.py",
    "        return self.under(self.adjacency)",
    "        return self.under(self.other)",
)
@pytest.mark.parametrize(("adjacency", "moved"), [("zero-out", 1.0), ("replace-one", 2.0)])
def test_epsilon_is_that_of_the_history_under_the_adjacency(adjacency: str, moved: float) -> None:
    """A Gaussian sum over all units: compared with the analytic Gaussian mechanism."""
    found = Guarantee(history=whole(8.0, 4), delta=DELTA, adjacency=adjacency, unit="user")
    due = analytic(moved * 2 / 8.0, DELTA)
    assert due <= found.epsilon <= due * (1 + 1e-3)
    assert found.by_adjacency[adjacency] == found.epsilon == found.under(adjacency)
    assert found.under(found.other) != found.epsilon and {adjacency, found.other} == set(found.by_adjacency)


@kills(
    "the guarantee of other steps keeps the old ones",
    "dpllm/privacy/accounting.py",
    "        return dataclasses.replace(self, history=history)",
    "        return dataclasses.replace(self)",
)
def test_the_guarantee_of_other_steps_has_their_epsilon() -> None:
    """δ, adjacency and unit stay; nobody can set ε."""
    one = Guarantee(history=whole(8.0, 4), delta=DELTA, adjacency="zero-out", unit="user")
    assert one.epsilon > 0
    other = one.of(whole(8.0, 16))
    assert other.epsilon > one.epsilon and (other.delta, other.adjacency, other.unit) == (DELTA, "zero-out", "user")
    assert one.of(()).epsilon == 0.0 and not one.of(whole(0.0)).is_finite
    with pytest.raises((TypeError, AttributeError)):
        dataclasses.replace(one, epsilon=0.1)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        one.delta = 0.5  # type: ignore[misc]


SETTINGS = {"epsilon": 3.0, "clip_norm": 1.0, "expected_batch_size": 20, "delta": DELTA}
PLANS: dict[str, Callable[[], Plan]] = {
    "training": lambda: make_plan(PrivacyConfig(**SETTINGS), 1000, 40),
    "tuning": lambda: make_plan(PrivacyConfig(**SETTINGS, selection={"kind": "geometric", "mean": 3}), 1000, 40),
    "method": lambda: QueryPlan(
        method="label counts",
        unit="sequence",
        adjacency="replace-one",
        num_units=1000,
        charges=(Charge(name="counts", event=Query(noise_multiplier=20.0), count=3),),
        delta=DELTA,
    ),
}


@pytest.mark.parametrize("kind", PLANS)
def test_every_plan_has_the_guarantee_of_its_history(kind: str) -> None:
    """Whoever holds a plan holds ε, δ and adjacency as one value."""
    plan = PLANS[kind]()
    found = plan.guarantee
    assert (found.delta, found.adjacency, found.unit) == (plan.delta, plan.adjacency, plan.unit)
    assert list(found.history) == list(plan.history)
    assert plan.epsilon == found.epsilon and plan.epsilon_under(found.other) == found.under(found.other)
    assert plan.target_epsilon is None or found.epsilon <= plan.target_epsilon

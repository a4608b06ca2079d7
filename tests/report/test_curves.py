"""Tests of dpllm.report.figures."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import Guarantee, epsilon
from dpllm.report.figures import curves

STEP = Step(num_units=1000, sampling_rate=0.02, max_batch_size=60, noise_multiplier=1.0)
DELTA = 1e-4


def curves_of(history: tuple[tuple[Step, int], ...], adjacency: str = "zero-out") -> dict:
    guarantee = Guarantee(history=history, delta=DELTA, adjacency=adjacency, unit="sequence")
    return curves(guarantee).model_dump(mode="json", by_alias=True)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_epsilon_over_the_steps(adjacency: str) -> None:
    """Rising, from the first step to the headline, never below the finer number nor far above it."""
    history = ((STEP, 30), (Step(num_units=1000, sampling_rate=0.02, max_batch_size=60, noise_multiplier=2.0), 20))
    curve = curves_of(history, adjacency)["epsilon_over_steps"]
    assert curve["steps"][0] == 1 and curve["steps"][-1] == 50
    assert curve["epsilon"] == sorted(curve["epsilon"])
    assert curve["epsilon"][-1] == epsilon(history, DELTA, adjacency)
    for steps, value in list(zip(curve["steps"], curve["epsilon"], strict=True))[:-1:4]:
        first = [
            (STEP, min(steps, 30)),
            (Step(num_units=1000, sampling_rate=0.02, max_batch_size=60, noise_multiplier=2.0), max(0, steps - 30)),
        ]
        exact = epsilon(first, DELTA, adjacency)
        assert exact - 1e-9 <= value <= exact + 5e-3


def test_epsilon_over_delta() -> None:
    """δ falls as ε rises, for both adjacencies, and the headline lies on its curve."""
    history = ((STEP, 50),)
    curve = curves_of(history)["epsilon_over_delta"]
    headline = epsilon(history, DELTA)
    for name in ("zero-out", "replace-one"):
        known = [value for value in curve["delta"][name] if value is not None]
        assert len(curve["delta"][name]) == len(curve["epsilon"]) and known == sorted(known, reverse=True)
        assert known[0] > DELTA > known[-1]
    pairs = list(zip(curve["epsilon"], curve["delta"]["zero-out"], strict=True))
    below = max(value for at, value in pairs if at > headline)
    above = min(value for at, value in pairs if at < headline)
    assert below < DELTA < above


def test_tradeoff_is_at_most_what_epsilon_alone_says() -> None:
    """The curve of the whole run lies between guessing and the bound of the single pair (ε, δ)."""
    history = ((STEP, 50),)
    curve = curves_of(history)["tradeoff"]
    for rate, found, alone in zip(
        curve["false_positive_rate"],
        curve["true_positive_rate"],
        curve["from_epsilon_and_delta_alone"],
        strict=True,
    ):
        assert rate <= found <= alone * (1 + 1e-3) <= 1 + 1e-3
    value = epsilon(history, DELTA)
    assert curve["from_epsilon_and_delta_alone"][0] == pytest.approx(math.exp(value) * 1e-8 + DELTA)


def test_a_curve_cannot_be_changed() -> None:
    """It is kept for the next report of the same run."""
    made = curves(Guarantee(history=((STEP, 50),), delta=DELTA, adjacency="zero-out", unit="sequence"))
    with pytest.raises(ValidationError, match="frozen"):
        made.tradeoff = made.tradeoff  # type: ignore[misc]
    assert isinstance(made.tradeoff.true_positive_rate, tuple)


@pytest.mark.parametrize(
    "history",
    [(), ((STEP, 0),), ((Step(num_units=1000, sampling_rate=0.02, max_batch_size=60, noise_multiplier=0.0), 5),)],
)
def test_nothing_to_draw(history: tuple[tuple[Step, int], ...]) -> None:
    """Without a step, or without noise, there is no curve."""
    result = curves_of(history)
    assert result["tradeoff"]["true_positive_rate"] == [] == result["epsilon_over_steps"]["steps"]
    assert result["epsilon_over_delta"]["epsilon"] == [] and result["epsilon_over_delta"]["delta"]["zero-out"] == []

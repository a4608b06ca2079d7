"""Tests of dpllm.plan."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dpllm.accounting import epsilon
from dpllm.config import PrivacyConfig
from dpllm.plan import PrivacyPlan, format_epsilon, format_plan, make_plan


def privacy(**change: Any) -> PrivacyConfig:
    return PrivacyConfig(**{"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 20, **change})


def test_noise_sampler_and_event_come_from_the_plan() -> None:
    """Sampler, noise and charged step carry one set of numbers."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    assert plan.sampling_rate == 0.02 and plan.max_batch_size == 52 and plan.delta == 1e-4
    assert plan.noise_stddev == 0.5
    assert dataclasses.astuple(plan.sampler) == (1000, 0.02, 52)
    assert dataclasses.astuple(plan.step) == (1000, 0.02, 52, 1.0, 0.5)
    event: Any = plan.sampler.event(plan.noise_multiplier)
    assert (event.dataset_size, event.truncated_batch_size, event.noise_multiplier) == (1000, 52, 1.0)
    assert plan.epsilon == epsilon([(plan.step, 50)], 1e-4)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_calibrated_plan_keeps_its_target(adjacency: str) -> None:
    """With a target ε, the planned ε is at most that, under the adjacency asked for."""
    config = privacy(noise_multiplier=None, target_epsilon=3, adjacency=adjacency)
    plan = make_plan(config, num_units=1000, num_steps=50)
    assert 2.99 < plan.epsilon <= 3
    assert plan.epsilon == plan.epsilon_under(adjacency)
    assert plan.epsilon_under("zero-out") < plan.epsilon_under("replace-one")


def test_no_noise_is_planned_as_infinite() -> None:
    """σ = 0 is accepted and costs ε = inf."""
    plan = make_plan(privacy(noise_multiplier=0), num_units=1000, num_steps=50)
    assert plan.epsilon == math.inf and plan.noise_stddev == 0
    assert ("ε, zero-out", "infinite: no privacy") in format_plan(plan)


def test_given_bound_is_kept_and_never_above_the_units() -> None:
    """A given max_batch_size stands, but a batch can't hold more than all units."""
    assert make_plan(privacy(max_batch_size=30), 1000, 5).max_batch_size == 30
    assert make_plan(privacy(max_batch_size=99), 50, 5).max_batch_size == 50
    assert make_plan(privacy(expected_batch_size=50), 50, 5).sampling_rate == 1.0


@pytest.mark.parametrize(
    ("change", "units", "steps", "match"),
    [
        ({}, 0, 5, "empty data set"),
        ({}, 1000, 0, "num_steps must be at least 1"),
        ({}, 19, 5, "expected_batch_size=20 exceeds the number of units, 19"),
        ({"delta": 1e-3}, 1000, 5, r"delta=0.001 is not below 1/N = 0.001 for N=1000"),
        ({"delta": 0.5}, 1000, 5, r"Take 1/\(10 N\) = 0.0001"),
        ({"noise_multiplier": None, "target_epsilon": 1e-5}, 1000, 5, "target_epsilon=1e-05 can't be reached"),
    ],
)
def test_impossible_plan_is_refused(change: dict[str, Any], units: int, steps: int, match: str) -> None:
    """What can't be run truthfully is an error before anything starts."""
    with pytest.raises(ValueError, match=match):
        make_plan(privacy(**change), units, steps)


def test_saved_plan_loads_equal(tmp_path: Path) -> None:
    """A plan survives the file with its hash."""
    plan = make_plan(privacy(unit="user", unit_column="id", max_rows_per_unit=3), 1000, 50)
    plan.save(tmp_path / "plan.json")
    loaded = PrivacyPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.hash == plan.hash
    assert ("rows of one user at most", "3") in format_plan(plan)


def test_hash_depends_on_every_field() -> None:
    """Whatever differs between two plans shows in the hash."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    change: dict[str, Any] = {
        "unit": "user",
        "adjacency": "replace-one",
        "max_batch_size": 60,
        "num_steps": 51,
        "noise_multiplier": 1.1,
        "clip_norm": 0.6,
        "delta": 2e-4,
        "target_epsilon": 8.0,
        "max_rows_per_unit": 2,
        "unit_column": "id",
        "seeded": True,
    }
    hashes = {dataclasses.replace(plan, **{name: value}).hash for name, value in change.items()}
    hashes.add(make_plan(privacy(expected_batch_size=21, max_batch_size=52), 1000, 50).hash)
    hashes.add(make_plan(privacy(delta=1e-4, expected_batch_size=40, max_batch_size=52), 2000, 50).hash)
    assert len(hashes | {plan.hash}) == len(change) + 3


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        ({"num_steps": 10}, "was edited: its numbers don't match its hash"),
        ({"format": 2}, "is not a privacy plan"),
        ({"extra": 1}, "is not a privacy plan"),
    ],
)
def test_edited_plan_is_refused(tmp_path: Path, edit: dict[str, Any], match: str) -> None:
    """A plan file that is not what was saved is an error."""
    path = tmp_path / "plan.json"
    make_plan(privacy(), 1000, 50).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(ValueError, match=match):
        PrivacyPlan.load(path)


def test_unreadable_plan_is_refused(tmp_path: Path) -> None:
    """A missing or broken plan file is an error that names it."""
    with pytest.raises(ValueError, match=r"plan.json can't be read"):
        PrivacyPlan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan.json is not JSON"):
        PrivacyPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sampling_rate": 0.03}, "sampling_rate = expected_batch_size / num_units"),
        ({"max_batch_size": 19}, "expected_batch_size <= max_batch_size"),
        ({"delta": 1e-3}, "0 < delta < 1/num_units"),
        ({"noise_multiplier": math.nan}, "0 <= noise_multiplier < inf"),
        ({"unit": "token"}, "unit in"),
        ({"adjacency": "bounded"}, "adjacency in"),
        ({"num_units": 0}, "num_units >= 1"),
    ],
)
def test_contradictory_plan_is_refused(change: dict[str, Any], match: str) -> None:
    """A plan whose numbers don't fit together can't exist."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(plan, **change)


def test_seeded_plan_says_so_first() -> None:
    """A fixed seed is not private, and that is the first thing said."""
    plan = make_plan(privacy(seed=0), num_units=1000, num_steps=50)
    assert plan.seeded and format_plan(plan)[0][0] == "NOT PRIVATE"
    assert not make_plan(privacy(), num_units=1000, num_steps=50).seeded


def test_printed_epsilon_is_rounded_up() -> None:
    """What is printed holds: ε is never rounded down, and is never shown as 0 after a step."""
    assert format_epsilon(2.00001) == "2.0001"
    assert format_epsilon(2.0) == "2.0000"
    assert format_epsilon(1e-7) == "0.0001"
    assert format_epsilon(math.inf) == "infinite: no privacy"

"""Tests of dpllm.privacy.plan."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Step, StepOfRows
from dpllm.mechanism.sampling import TruncatedPoissonSampler
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan, format_plan, make_plan
from tests.mutations import kills


def privacy(**change: Any) -> PrivacyConfig:
    return PrivacyConfig(**{"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 20, **change})


def test_noise_sampler_and_event_come_from_the_plan() -> None:
    """Sampler, noise and charged step carry one set of numbers."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    assert plan.sampling_rate == 0.02 and plan.max_batch_size == 52 and plan.delta == 1e-4
    assert plan.noise_stddev == 0.5
    assert plan.mechanism.sampler == TruncatedPoissonSampler(1000, 0.02, 52)
    step = Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=1.0, clip_norm=0.5)
    assert plan.event == step
    event: Any = step.dp_event()
    assert (event.dataset_size, event.truncated_batch_size, event.noise_multiplier) == (1000, 52, 1.0)
    assert plan.epsilon == epsilon([(plan.event, 50)], 1e-4)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_calibrated_plan_keeps_its_target(adjacency: str) -> None:
    """With a target ε, the planned ε is at most that, under the adjacency asked for."""
    config = privacy(noise_multiplier=None, epsilon=3, adjacency=adjacency)
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
    """A given max_batch_size is kept, but a batch cannot hold more than all units."""
    assert make_plan(privacy(max_batch_size=30), 1000, 5).max_batch_size == 30
    assert make_plan(privacy(max_batch_size=99), 50, 5).max_batch_size == 50
    assert make_plan(privacy(expected_batch_size=50), 50, 5).sampling_rate == 1.0


@pytest.mark.parametrize(
    ("change", "units", "steps", "match"),
    [
        ({}, 0, 5, "training data is empty"),
        ({}, 1000, 0, "num_steps must be at least 1"),
        ({}, 19, 5, "expected_batch_size=20 exceeds the number of units, 19"),
        ({"delta": 1e-3}, 1000, 5, r"delta=0.001 is not below 1/N = 0.001 for N=1000"),
        ({"delta": 0.5}, 1000, 5, r"Set it to 1/\(10 N\) = 0.0001"),
        ({"noise_multiplier": None, "epsilon": 1e-5}, 1000, 5, "target_epsilon=1e-05 cannot be reached"),
    ],
)
def test_impossible_plan_is_refused(change: dict[str, Any], units: int, steps: int, match: str) -> None:
    """A configuration that would break the guarantee is an error before anything starts."""
    with pytest.raises(ValueError, match=match):
        make_plan(privacy(**change), units, steps)


def test_saved_plan_loads_equal(tmp_path: Path) -> None:
    """A plan survives the file with its hash."""
    plan = make_plan(privacy(unit="id", max_rows_per_unit=3), 1000, 50)
    plan.save(tmp_path / "plan.json")
    loaded = PrivacyPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.hash == plan.hash
    assert ("rows of one user at most", "3 (first)") in format_plan(plan)


def test_hash_depends_on_every_field() -> None:
    """Any difference between two plans changes the hash."""
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
        "rows_kept": "random",
        "num_steps_wanted": 60,
        "dataset": "mail",
        "seeded": True,
        "randomness": "chacha20",
    }
    hashes = {dataclasses.replace(plan, **{name: value}).hash for name, value in change.items()}
    hashes.add(make_plan(privacy(expected_batch_size=21, max_batch_size=52), 1000, 50).hash)
    hashes.add(make_plan(privacy(delta=1e-4, expected_batch_size=40, max_batch_size=52), 2000, 50).hash)
    assert len(hashes | {plan.hash}) == len(change) + 3


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"clipping": "automatic"},
        {"randomness": "chacha20"},
        {"randomness": "discrete"},
        {"selection": {"kind": "geometric", "mean": 3}},
    ],
)
def test_a_plan_of_another_format_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Every plan has all its fields, and one format, which is named."""
    plan = make_plan(privacy(**change), num_units=1000, num_steps=50)
    assert set(plan.to_dict()) == {item.name for item in dataclasses.fields(plan)} | {"format"}
    plan.save(tmp_path / "plan.json")
    assert PrivacyPlan.load(tmp_path / "plan.json") == plan
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert saved["format"] == 1
    for other in (0, 2, "1", True):
        (tmp_path / "plan.json").write_text(json.dumps({**saved, "format": other}), encoding="utf-8")
        with pytest.raises(ValueError, match=f"plan.json is a privacy plan of format {json.dumps(other)}, and this"):
            PrivacyPlan.load(tmp_path / "plan.json")


def test_the_generator_of_the_noise_is_shown_and_known() -> None:
    """Only a plan with another one than the default names it."""
    plan = make_plan(privacy(randomness="chacha20"), num_units=1000, num_steps=50)
    assert ("randomness of the noise", "chacha20") in format_plan(plan)
    assert plan.epsilon == make_plan(privacy(), num_units=1000, num_steps=50).epsilon
    with pytest.raises(ValueError, match="chacha20"):
        dataclasses.replace(plan, randomness="rand")
    with pytest.raises(ValueError, match="randomness must"):
        privacy(randomness="normal")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        ({"num_steps": 10}, "was edited: its numbers do not match its hash"),
        ({"extra": 1}, "is not the privacy plan of a training run"),
    ],
)
def test_edited_plan_is_refused(tmp_path: Path, edit: dict[str, Any], match: str) -> None:
    """A plan file that was changed after saving is an error."""
    path = tmp_path / "plan.json"
    make_plan(privacy(), 1000, 50).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(ValueError, match=match):
        PrivacyPlan.load(path)


def test_unreadable_plan_is_refused(tmp_path: Path) -> None:
    """A missing or broken plan file is an error that names it."""
    with pytest.raises(ValueError, match=r"plan\.json"):
        PrivacyPlan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json"):
        PrivacyPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sampling_rate": 0.03}, "sampling_rate = expected_batch_size / population"),
        ({"max_batch_size": 19}, "expected_batch_size <= max_batch_size"),
        ({"delta": 1e-3}, "0 < delta < 1/num_units"),
        ({"noise_multiplier": math.nan}, "0 <= noise_multiplier < inf"),
        ({"sampling": "example"}, "num_examples and max_rows_per_unit if rows of users are drawn"),
    ],
)
def test_contradictory_plan_is_refused(change: dict[str, Any], match: str) -> None:
    """A plan whose numbers do not fit together cannot exist."""
    plan = make_plan(privacy(), num_units=1000, num_steps=50)
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(plan, **change)


def by_example(**change: Any) -> PrivacyConfig:
    users = {"unit": "id", "max_rows_per_unit": 4, "sampling": "example"}
    return privacy(**users, **change)


@kills(
    "rows that are drawn singly are accounted for as whole units",
    "dpllm/mechanism/noise.py",
    "rows_per_unit=draw.rows_per_unit or 1,",
    "rows_per_unit=1,",
)
def test_rows_drawn_singly_are_planned_over_rows() -> None:
    """q is over the rows, nothing is truncated, and a step is charged for a unit with all its k rows."""
    plan = make_plan(by_example(), num_units=500, num_steps=50, num_examples=1000)
    assert plan.sampling_rate == 0.02 and plan.population == plan.max_batch_size == plan.num_examples == 1000
    assert plan.delta == 1 / 5000
    assert plan.mechanism.sampler == TruncatedPoissonSampler(1000, 0.02, 1000)
    rows = {"num_units": 500, "sampling_rate": 0.02, "rows_per_unit": 4, "noise_multiplier": 1.0, "clip_norm": 0.5}
    assert plan.event == StepOfRows(**rows)
    whole = make_plan(privacy(), num_units=1000, num_steps=50)
    assert plan.epsilon > epsilon([(whole.event, 50)], plan.delta)
    assert ("rows, each drawn and clipped separately", "1,000") in format_plan(plan)
    calibrated = make_plan(by_example(noise_multiplier=None, epsilon=5), 500, 50, 1000)
    assert 4.99 < calibrated.epsilon <= 5


@pytest.mark.parametrize(
    ("units", "examples", "match"),
    [
        (500, None, "Pass num_examples"),
        (5, 19, "expected_batch_size=20 exceeds the number of rows, 19"),
        (500, 499, "num_examples and max_rows_per_unit"),
        (100, 401, "num_examples and max_rows_per_unit"),
    ],
)
def test_impossible_numbers_of_rows_are_refused(units: int, examples: int | None, match: str) -> None:
    """Rows cannot be fewer than users, nor more than k for each."""
    with pytest.raises(ValueError, match=match):
        make_plan(by_example(), units, 5, examples)


def test_a_run_stops_before_the_step_that_would_exceed_the_budget() -> None:
    """With σ and a target, as many steps are planned as keep to it, and one more would not."""
    plan = make_plan(privacy(epsilon=2.0), num_units=1000, num_steps=500)
    assert plan.num_steps_wanted == 500 and 0 < plan.num_steps < 500
    assert plan.epsilon <= 2.0 < epsilon([(plan.event, plan.num_steps + 1)], plan.delta)
    assert ("steps requested, more than the budget allows", "500") in format_plan(plan)
    enough = make_plan(privacy(epsilon=30.0), num_units=1000, num_steps=50)
    assert enough.num_steps == 50 and enough.num_steps_wanted is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"on_budget": "error"},
            r'500 steps at noise_multiplier=1 cost ε = .* of them would stay within.*on_budget="stop"',
        ),
        ({"epsilon": 0.01}, "0 of them would stay within it"),
    ],
)
def test_a_budget_that_does_not_suffice_is_refused(change: dict[str, Any], match: str) -> None:
    """With on_budget="error" the run does not begin; nor does one whose first step is too much."""
    with pytest.raises(ValueError, match=match):
        make_plan(privacy(**{"epsilon": 2.0, **change}), num_units=1000, num_steps=500)


def test_seeded_plan_says_so_first() -> None:
    """A fixed seed is not private, and that is the first thing said."""
    plan = make_plan(privacy(seed=0), num_units=1000, num_steps=50)
    assert plan.seeded and format_plan(plan)[0][0] == "NOT PRIVATE"
    assert not make_plan(privacy(), num_units=1000, num_steps=50).seeded

"""Tests of dpllm.privacy.compose."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.compose import compose, composition_rows
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan


def make_run(
    folder: Path, num_steps: int = 50, num_units: int = 1000, end: str | None = "completed", **change: Any
) -> PrivacyPlan:
    """Write to `folder` the files of a run of `num_steps` out of 50 steps, and return its plan."""
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 20, "delta": 1e-5}
    plan = make_plan(PrivacyConfig(**{**settings, "dataset": "chats", **change}), num_units, 50)
    folder.mkdir()
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for number in range(num_steps):
            ledger.append_step(number, plan.event)
        if end is not None:
            ledger.append_end(end)
    return plan


def test_runs_compose_as_one_history(tmp_path: Path) -> None:
    """ε is that of all stated steps together, those planned where a run stopped early: below the sum, above each."""
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", num_steps=30, noise_multiplier=1.5, clip_norm=3.0)
    folders = [tmp_path / "one", tmp_path / "two"]
    found = compose(folders)
    assert found.epsilon == epsilon([(one.event, 50), (two.event, 50)], 1e-5)
    alone = [epsilon([(one.event, 50)], 1e-5), epsilon([(two.event, 50)], 1e-5)]
    assert [run.epsilon for run in found.runs] == alone
    added_up = epsilon([(one.event, 50)], 5e-6) + epsilon([(two.event, 50)], 5e-6)  # basic composition
    assert max(alone) < found.epsilon < added_up
    assert (found.dataset, found.unit, found.num_units, found.adjacency) == ("chats", "sequence", 1000, "zero-out")
    assert [(run.num_steps, run.num_steps_planned) for run in found.runs] == [(50, 50), (30, 50)]
    assert compose(list(reversed(folders))).epsilon == found.epsilon


def test_given_delta_and_adjacency_are_used(tmp_path: Path) -> None:
    """Values of the caller replace those of the plans, also where these differ."""
    one = make_run(tmp_path / "one", adjacency="replace-one", delta=1e-4)
    make_run(tmp_path / "two")
    folders = [tmp_path / "one", tmp_path / "two"]
    found = compose(folders, delta=1e-6, adjacency="replace-one")
    assert found.epsilon == epsilon([(one.event, 100)], 1e-6, "replace-one")
    with pytest.raises(ValueError, match="plans differ"):
        compose(folders, delta=1e-6)
    with pytest.raises(ValueError, match="--delta"):
        compose(folders, adjacency="zero-out")
    with pytest.raises(ValueError, match="got 'bounded"):
        compose(folders, delta=1e-6, adjacency="bounded")


@pytest.mark.parametrize("delta", [1e-3, 0.5, 0.0, -1.0, math.nan])
def test_delta_out_of_range_is_refused(tmp_path: Path, delta: float) -> None:
    """δ of 1/N or more protects nobody."""
    make_run(tmp_path / "one")
    with pytest.raises(ValueError, match="N=1000"):
        compose([tmp_path / "one"], delta=delta)


def test_same_run_is_never_counted_twice_or_in_part(tmp_path: Path) -> None:
    """A folder given twice, by another name or as a copy, and a single checkpoint, are errors."""
    make_run(tmp_path / "one")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", tmp_path / "one" / "checkpoint-30")
    for other in ("one", "link"):
        with pytest.raises(ValueError, match="are the same folder"):
            compose([tmp_path / "one", tmp_path / other])
    with pytest.raises(ValueError, match=r"copy and .*one hold the same run \([0-9a-f]{16}\): one is a copy"):
        compose([tmp_path / "one", tmp_path / "copy"])
    with pytest.raises(ValueError, match="checkpoint-30"):
        compose([tmp_path / "one" / "checkpoint-30"])


def test_ledger_of_another_plan_is_refused(tmp_path: Path) -> None:
    """Plan and ledger in a folder must belong together, and both must be there and whole."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", clip_norm=0.7)
    (tmp_path / "one" / PLAN_FILE).write_bytes((tmp_path / "two" / PLAN_FILE).read_bytes())
    with pytest.raises(ValueError, match="written under"):
        compose([tmp_path / "one"])
    (tmp_path / "one" / PLAN_FILE).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        compose([tmp_path / "one"])
    text = (tmp_path / "two" / LEDGER_FILE).read_text()
    (tmp_path / "two" / LEDGER_FILE).write_text(text.replace('"step": 7', '"step": 8', 1))
    with pytest.raises(LedgerError, match="line 9"):
        compose([tmp_path / "two"])
    with pytest.raises(ValueError, match="run was given"):
        compose([])


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "letters"},
        {"num_units": 999},
        {"unit": "author", "max_rows_per_unit": 4},
    ],
)
def test_different_data_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Runs on data that differ in name, number of units, unit or its column have no ε together; all are listed."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", **change)
    match = r"different data or units.*one: dataset 'chats', unit 'sequence', .*num_units 1000; .*two: dataset"
    with pytest.raises(ValueError, match=match):
        compose([tmp_path / "one", tmp_path / "two"])


def test_user_columns_must_agree(tmp_path: Path) -> None:
    """Users by two different columns are two units."""
    for name in ("author", "team"):
        make_run(tmp_path / name, unit=name, max_rows_per_unit=4)
    with pytest.raises(ValueError, match="author"):
        compose([tmp_path / "author", tmp_path / "team"])
    assert dict(composition_rows(compose([tmp_path / "team"])))["unit of privacy"] == "one user (column team) of 1,000"


def test_nameless_data_need_somebody_to_vouch(tmp_path: Path) -> None:
    """Runs whose plan names no data set compose only under a given name, and no name in a plan is overruled."""
    make_run(tmp_path / "one", dataset=None)
    make_run(tmp_path / "two")
    folders = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(ValueError, match=r"privacy\.dataset"):
        compose(folders)
    assert compose(folders, dataset="chats").dataset == "chats"
    for asked in (folders, folders[1:]):
        with pytest.raises(ValueError, match="letters"):
            compose(asked, dataset="letters")


def test_runs_that_are_not_private(tmp_path: Path) -> None:
    """A seeded run is refused; one without noise makes ε infinite, in words."""
    make_run(tmp_path / "seeded", seed=0)
    with pytest.raises(ValueError, match="seeded used"):
        compose([tmp_path / "seeded"])
    make_run(tmp_path / "one")
    make_run(tmp_path / "open", noise_multiplier=0)
    found = compose([tmp_path / "one", tmp_path / "open"])
    assert found.epsilon == math.inf
    rows = dict(composition_rows(found))
    assert rows["ε of all together"] == "infinite: no privacy"
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["epsilon"] == "infinite"


def test_rows_and_dictionary_say_everything(tmp_path: Path) -> None:
    """People see each run, whether it ended, and the sum, rounded up; the dictionary holds the same numbers."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", num_steps=20, end=None)
    found = compose([tmp_path / "one", tmp_path / "two"])
    rows = dict(composition_rows(found))
    assert "(20 of 50 steps, not ended: it may still cost more)" in rows[f"ε of {tmp_path / 'two'} alone"]
    assert found.epsilon <= float(rows["ε of all together"]) < found.epsilon + 1e-4
    values = json.loads(json.dumps(found.to_dict()))
    assert values["epsilon"] == found.epsilon and values["delta"] == 1e-5
    assert [run["ended"] for run in values["runs"]] == [True, False]
    assert [len(run["runs"]) for run in values["runs"]] == [1, 1]


def test_a_data_set_that_has_grown_composes(tmp_path: Path) -> None:
    """Runs on the same people with another N are one history, each step with its own N."""
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", num_units=1500, dataset="chats of May")
    folders = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(ValueError, match="--shared-people") as caught:
        compose(folders)
    assert "by themselves" not in str(caught.value)
    found = compose(folders, shared_people=True)
    assert found.epsilon == epsilon([(one.event, 50), (two.event, 50)], 1e-5) > max(one.epsilon, two.epsilon)
    assert (found.dataset, found.num_units) == ("chats and chats of May", 1500)
    make_run(tmp_path / "users", unit="author", max_rows_per_unit=4)
    with pytest.raises(ValueError, match="protect"):
        compose([*folders, tmp_path / "users"], shared_people=True)

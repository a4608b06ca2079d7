"""Counts of labels move by one unit as much as is accounted for, and are noisy; a planted exact histogram is seen."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe, method_in
from dpllm.data.rows import DataError
from dpllm.data.units import UnitIndex
from dpllm.methods.count import counting
from dpllm.methods.count.counting import LabelledUnits, count_labels, plan_count, read_units
from dpllm.methods.queries.run import QueryRun, Randomness
from dpllm.privacy.budget import read_budget
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.query_plan import QueryPlan
from dpllm.report.verify import verify
from tests.methods.queries.making import budget_in
from tests.mutations import kills

CLASSES = ["angry", "calm", "sad"]
RECIPE = """
data: {{path: {path}, format: classification, class_names: [angry, calm, sad]{columns}}}
privacy: {{epsilon: 1, delta: 1.0e-5, dataset: chats{more}}}
count:
output_dir: {folder}
"""
OF_USERS = ", max_rows_per_unit: 3"


def recipe_in(folder: Path, rows: list[tuple[str, str]], more: str = "") -> Path:
    """Write rows of (user, label), and a recipe that counts them."""
    lines = [json.dumps({"id": user, "text": f"text {n}", "label": label}) for n, (user, label) in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "recipe.yaml"
    columns = ", columns: {unit: id}" if more == OF_USERS else ""
    path.write_text(RECIPE.format(path=folder / "rows.jsonl", folder=folder / "run", more=more, columns=columns))
    return path


def exact_of(folder: Path, rows: list[tuple[str, str]], more: str = OF_USERS) -> list[int]:
    folder.mkdir()
    return read_units(load_query_recipe(recipe_in(folder, rows, more))).exact_counts()


def test_one_unit_moves_the_counts_by_no_more_than_is_accounted_for(tmp_path: Path) -> None:
    """Whatever a user holds: at most k under zero-out, k√2 under replace-one, in l2 norm."""
    others = [(f"u{n}", CLASSES[n % 3]) for n in range(30)]
    without = np.array(exact_of(tmp_path / "without", others))
    furthest = 0.0
    for number, labels in enumerate((["sad"] * 50, ["sad", "calm", "angry"] * 5, ["calm"])):
        rows = [*others, *(("new", label) for label in labels)]
        moved = np.array(exact_of(tmp_path / f"with{number}", rows)) - without
        furthest = max(furthest, float(np.linalg.norm(moved)))
        assert np.linalg.norm(moved) <= 3
    assert furthest == 3  # so that the bound is not a loose one
    one = np.array(exact_of(tmp_path / "one", [*others, *(("new", "sad") for _ in range(9))]))
    two = np.array(exact_of(tmp_path / "two", [*others, *(("new", "calm") for _ in range(9))]))
    assert np.linalg.norm(one - two) == pytest.approx(3 * 2**0.5)


def test_people_who_may_be_several_units_are_an_open_point(tmp_path: Path) -> None:
    """Copies of records, ids that number rows, and ids that differ in case; as in training."""

    def points_of(name: str, users: list[str], copies: int = 1, more: str = OF_USERS) -> list[str]:
        (tmp_path / name).mkdir()
        path = recipe_in(tmp_path / name, [(user, "sad") for user in users], more)
        data = tmp_path / name / "rows.jsonl"
        data.write_text(data.read_text().replace("text ", "a text of its own, number ") * copies)
        recipe = load_query_recipe(path)
        units = read_units(recipe)
        count_labels(recipe, units, plan_count(recipe, units))
        found = read_ledger(Path(recipe.output_dir) / LEDGER_FILE).notes.open_points
        assert verify(recipe.output_dir).ok
        return [
            words
            for words in ("are copies of other", "occurs twice", "differ only in case")
            if words in " ".join(found)
        ]

    ids = [f"u{n}" for n in range(30)]
    assert points_of("records", ids, more="") == points_of("users", ids, copies=2) == []
    assert points_of("copied", ids, copies=2, more="") == ["are copies of other"]
    assert points_of("numbers", ids) == ["occurs twice"]
    assert points_of("case", [*ids, "U1"], copies=2) == ["differ only in case"]


def told_apart(folder: Path, trials: int = 12) -> float:
    """Return how often the released counts of two neighbours tell which is which, through the public interface."""
    rows = [(f"u{n}", CLASSES[n % 3]) for n in range(60)]
    right = 0
    for number in range(trials):
        for name, extra in (("in", 3), ("out", 0)):
            place = folder / f"{name}{number}"
            place.mkdir(parents=True)
            recipe = load_query_recipe(recipe_in(place, [*rows, *([("new", "sad")] * extra)], OF_USERS))
            units = read_units(recipe)
            counts = count_labels(recipe, units, plan_count(recipe, units))
            right += (counts["sad"] > 21.5) == (name == "in")
    return right / (2 * trials)


@kills(
    "the counts of labels are exact",
    "dpllm/methods/count/counting.py",
    "    noisy = run.randomness.noisy(counts, event.noise_multiplier, run.plan.max_rows_per_unit or 1)",
    "    noisy = list(counts)",
)
def test_an_exact_histogram_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise an attacker is right at most a few times more often than a coin; a planted bug is always seen."""
    monkeypatch.setattr("dpllm.methods.queries.run.write_report", lambda *_: None)  # pictures take most of the time
    monkeypatch.setattr("dpllm.methods.queries.run.write_release_card", lambda *_: None)
    assert told_apart(tmp_path / "noisy") < 0.95
    monkeypatch.setattr(Randomness, "noisy", lambda self, counts, *_: [float(count) for count in counts])
    assert told_apart(tmp_path / "exact", 2) == 1.0


def test_the_noise_is_that_of_the_plan(tmp_path: Path) -> None:
    """σΔ, with k rows of a user; ε of the plan is the target, and the release names the deviation."""
    recipe = load_query_recipe(recipe_in(tmp_path, [(f"u{n}", "calm") for n in range(3000)], OF_USERS))
    units = read_units(recipe)
    plan = plan_count(recipe, units)
    assert isinstance(plan, QueryPlan) and 0.999 < plan.epsilon <= 1.0 and plan.num_units == 3000
    drawn = np.array(Randomness("discrete").noisy([0] * 20_000, plan.charges[0].event.noise_multiplier, 3))
    assert drawn.std() == pytest.approx(3 * plan.charges[0].event.noise_multiplier, rel=0.03)
    assert dict(plan.settings)["largest change by one unit (l2), zero-out"] == 3


@pytest.mark.parametrize("label", ["furious", 3, -1, 1.5])
def test_a_label_that_is_no_class_ends_the_run_before_a_charge(tmp_path: Path, label) -> None:
    """The error names the row and not the label."""
    units = LabelledUnits(("angry", "calm"), ["angry", label], UnitIndex.one_row_per_unit(2))
    with pytest.raises(DataError, match="2 classes") as found:
        units.exact_counts()
    assert "furious" not in str(found.value)


def test_labels_may_be_numbers_of_classes() -> None:
    """As Hub data sets have them."""
    assert LabelledUnits(("angry", "calm"), [1, 0, 1], UnitIndex.one_row_per_unit(3)).exact_counts() == [1, 2]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["data.class_names="], "data.class_names is missing"),
        (["data.format=text"], "has no labels to count"),
        (["data.eval=0.1"], "uses every record"),
        (["privacy.epsilon="], "give exactly one of epsilon"),
        (["privacy.noise_multiplier=2"], "give exactly one of epsilon"),
        (["privacy.delta=0.5"], "0 < delta < 1/num_units"),
        (["privacy.delta=2"], "delta"),
        (["privacy.clip_norm=1"], "unknown key 'privacy.clip_norm'"),
        (["count.files=x"], "did you mean 'count.file'"),
        (["count.file=a/b.json"], "without a folder"),
        (["count.file=counts.txt"], "ends in .json"),
        (["count.file=privacy_plan.json"], "must not begin with privacy_"),
        (["train.max_steps=3"], "unknown key 'train'"),
        (["output_dir="], "output_dir must be the name"),
        (["privacy.dataset=", "privacy.budget_file=x"], "budget_file needs dataset"),
        (["data=3"], "must be a mapping"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, change: list[str], text: str) -> None:
    """Exit code 2, the key and the value; nothing is written."""
    path = recipe_in(tmp_path, [("a", "calm"), ("b", "sad"), ("c", "sad"), ("d", "sad")])
    result = CliRunner().invoke(app, ["methods", "count", str(path), *change])
    assert result.exit_code == 2 and text in result.output, result.output
    assert not (tmp_path / "run").exists()


def test_recipes_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    """A training recipe names its command, and a recipe with two methods is refused; plan knows both kinds."""
    path = recipe_in(tmp_path, [("a", "calm"), ("b", "sad")])
    assert method_in(path) == "count" and method_in("quickstart") is None
    with pytest.raises(ConfigError, match="run it with `dpllm train`"):
        load_query_recipe("quickstart", method="count")
    with pytest.raises(ConfigError, match="has no section of a method"):
        load_query_recipe("quickstart")
    again = tmp_path / "again.yaml"
    again.write_text(load_query_recipe(path).to_yaml())
    assert load_query_recipe(again) == load_query_recipe(path)
    result = CliRunner().invoke(app, ["plan", "memory", str(path)])
    assert result.exit_code == 2 and "has no steps" in result.output


def test_the_commands_from_recipe_to_verified_release(tmp_path: Path) -> None:
    """plan prints the cost and writes nothing; count charges the budget, and verify finds nothing wrong."""
    budget = budget_in(tmp_path, num_units=600)
    path = recipe_in(tmp_path, [(f"u{n}", CLASSES[n % 3]) for n in range(600)])
    more = [f"privacy.budget_file={budget}", "release.data_holder=A", "release.audience=B"]
    planned = CliRunner().invoke(app, ["plan", str(path), *more, "--json"])
    assert planned.exit_code == 0, planned.output
    assert not (tmp_path / "run").exists() and read_budget(budget).spent == 0.0
    result = CliRunner().invoke(app, ["methods", "count", str(path), *more, f"output_dir={tmp_path / 'out'}"])
    assert result.exit_code == 0, result.output
    body = json.loads((tmp_path / "out" / "counts.json").read_text())
    assert set(body["counts"]) == set(CLASSES) and all(100 < count < 300 for count in body["counts"].values())
    assert 0.99 < read_budget(budget).spent <= 1.0 and verify(tmp_path / "out").ok
    again = CliRunner().invoke(app, ["methods", "count", str(path), *more, f"output_dir={tmp_path / 'out'}"])
    assert again.exit_code == 2 and "holds an earlier run" in again.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """After the charge: the ledger has an end, the report the ε of the plan, and the folder verifies."""
    recipe = recipe_in(tmp_path, [("a", "calm"), ("b", "sad")] * 20, OF_USERS)

    def charged(run: QueryRun, *_) -> None:
        run.charge("label counts")
        os.kill(os.getpid(), number)

    monkeypatch.setattr(counting, "charge_and_count", charged)
    result = CliRunner().invoke(app, ["methods", "count", str(recipe)])
    folder = Path(load_query_recipe(recipe).output_dir)
    assert result.exit_code == 128 + number and f"dpllm report {folder}" in result.stderr.splitlines()[-1]
    contents = read_ledger(folder / LEDGER_FILE)
    assert (contents.end, contents.num_steps) == ("failed", 1) and verify(folder).ok

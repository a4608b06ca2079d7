"""Tests of dpllm.cli.plan_suggest: `dpllm plan suggest`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from dpllm.cli.plan_suggest import CHECKED, NOT_CHECKED
from dpllm.config import load_recipe
from dpllm.config.yaml12 import read_yaml
from dpllm.planning import rehearsal
from dpllm.planning.rehearsal import Material, Rehearsal, Trial
from dpllm.training.weight_size import WeightSize
from tests.cli.test_cli import as_json, refuse, run
from tests.small_model import save_small_model
from tests.tiers import deep_case

RECIPE = """
model: {{name: {model}}}
data: {{path: {folder}/absent.jsonl, max_length: 16}}
privacy: {{noise_multiplier: 2, clip_norm: 1, expected_batch_size: 10, max_batch_size: 60}}
train: {{max_steps: 60, output_dir: {folder}/out}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


@pytest.fixture
def path(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=model, folder=tmp_path))
    return file


def records(folder: Path, name: str, count: int) -> Path:
    file = folder / name
    file.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return file


def test_a_suggestion_needs_no_private_record(path, tmp_path):
    """The private file is absent; the line can be pasted, the file holds the same settings, and no ε is spent."""
    command = ["plan", "suggest", str(path), "--num-units", "200", "--output", str(tmp_path / "new" / "folder")]
    values = as_json(command)
    file = tmp_path / "new" / "folder" / "suggestion.yaml"
    assert values["file"] == str(file) and values["rehearsal"] is None and values["public_text"] is None
    assert values["privacy"] == {
        "depends_on_private_records": False,
        "public_constants_used": ["num_units"],
        "private_records_read": "no",
        "epsilon_spent": 0,
    }
    recipe = load_recipe(path, values["overrides"])
    written = read_yaml(file.read_text())
    assert recipe.privacy.clip_norm == written["privacy"]["clip_norm"] == 0.1
    assert all(recipe.train[name] == value for name, value in written["train"].items())
    shown = run(command)
    pasted = shown.rstrip().splitlines()[-1]
    assert shlex.split(pasted) == values["overrides"]
    words = " ".join(shown.split())
    assert "0.3 · rms(W) / √T · r" in words and "depends on no private record" in words and str(file) in words
    assert not (tmp_path / "out").exists()


def test_the_records_are_counted_without_a_number(path, tmp_path):
    """As by `dpllm plan`."""
    values = as_json(["plan", "suggest", str(path), f"data.path={records(tmp_path, 'here.jsonl', 130)}"])
    assert values["plan"]["num_units"] == 130 and values["privacy"]["private_records_read"] == "to count them"


def test_a_model_that_saw_private_records_is_refused(path, model, tmp_path):
    """A suggestion is said to depend on no private record; the declaration is that of the run."""
    trained = shutil.copytree(model, tmp_path / "trained")
    (trained / "recipe.yaml").write_text("data: {path: private.jsonl}")
    command = ["plan", "suggest", str(path), "--num-units", "200", f"model.name={trained}"]
    message = refuse(command)
    assert "may depend on private records" in message and "start_is_independent" in message
    assert as_json([*command, "model.start_is_independent=true"])["privacy"]["private_records_read"] == "no"


@pytest.mark.parametrize("counted", [False, True])
def test_a_rehearsal_is_shown_and_recommended(path, tmp_path, monkeypatch, counted):
    """The table, the best rate with the computed one, and whether the public text was compared."""
    material = Material(None, None, range(90), range(9), None, "public.jsonl", WeightSize(0.1, 9, "of 9 weights"))  # type: ignore[arg-type]

    def rehearse(suggested, material, shortened, centre, folder, begins):
        begins(centre)(1)
        trials = (Trial(centre / 2, 0.1, 3.25), Trial(centre, 0.2, 2.125), Trial(centre * 2, 0.4, 3.0))
        return Rehearsal(trials, 5.0, shortened, "public.jsonl", 90, 9)

    monkeypatch.setattr(rehearsal, "load_material", lambda *arguments: material)
    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    public = records(tmp_path, "public.jsonl", 100)
    command = ["plan", "suggest", str(path), "--public", str(public), "--around", "0.5"]
    private = records(tmp_path, "here.jsonl", 130)
    command += [f"data.path={private}"] if counted else ["--num-units", "200"]
    values = as_json(command)
    assert values["overrides"][0] == "train.learning_rate=0.5" and values["rehearsal"]["best_rate"] == 0.5
    assert values["public_text"] == (CHECKED if counted else NOT_CHECKED)
    shown = " ".join(run(command).split())
    assert "0.5 0.2 2.125 recommended" in shown and "Computed without it: 0.0039" in shown
    assert "Each rate was trained once" in shown and "15 of 60 steps" not in shown and "20 of 60 steps" in shown
    if counted:
        private.write_text(public.read_text())
        assert "contains private records" in refuse(command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--around", "0.1"], "belong to a rehearsal"),
        (["--public", "x.jsonl", "--around", "0"], "--around must be > 0"),
        (["--num-units", "0"], "--num-units must be at least 1"),
        (["--num-units", "5"], "expected_batch_size=10 exceeds the number of units, 5"),
        ([], "absent.jsonl: no such file"),
        (["--rehearse"], "no public_pretrain section: add --public FILE"),
        (["--public", "absent.jsonl", "data.path=absent.jsonl"], "is a source of the private records"),
        (["--num-units", "200", "model.name=nobody/nothing"], "no model.safetensors here"),
        (["--num-units", "200", "--output", "recipe.yaml"], "is a file: give a folder"),
        deep_case(
            [
                *("--num-units", "200", "data.columns.unit=who"),
                *("privacy.max_rows_per_unit=2", "privacy.sampling=example", "privacy.max_batch_size=null"),
            ],
            "--num-units is for runs that draw whole units",
        ),
    ],
)
def test_mistakes_are_one_line(path, arguments, message, monkeypatch):
    """Also where notes precede the error."""
    monkeypatch.chdir(path.parent)
    if any("nobody" in argument for argument in arguments):
        from typer.testing import CliRunner

        from dpllm.cli.program import app

        done = CliRunner().invoke(app, ["plan", "suggest", str(path), *arguments])
        assert done.exit_code == 2 and message in done.stderr.splitlines()[-1]
    else:
        assert message in refuse(["plan", "suggest", str(path), *arguments])

"""Tests of dpllm.cli. Reference numbers were computed with dp_accounting 0.6.0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.arguments import training_arguments
from dpllm.cli import app
from dpllm.config import PrivacyConfig, load_recipe
from dpllm.footprint import ENGINES, engines_for, footprint_of_recipe, format_bytes
from dpllm.ledger import Ledger
from dpllm.plan import make_plan

EPSILON = ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.02", "--steps", "1500", "--delta", "1e-5"]
CALIBRATE = ["calibrate", "--epsilon", "8", "--delta", "1e-5", "--sampling-rate", "0.0244", "--steps", "410"]

RECIPE = """
model: {{config: {{model_type: gpt2}}}}
data: {{path: {data}, max_length: 16}}
privacy: {{target_epsilon: 8, clip_norm: 1, expected_batch_size: 10}}
train: {{num_train_epochs: 3, output_dir: out}}
"""


def run(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(arguments: list[str]) -> str:
    """Return the one line that a refused command prints."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def as_json(arguments: list[str]) -> dict[str, Any]:
    loaded = json.loads(run([*arguments, "--json"]), parse_constant=pytest.fail)
    assert isinstance(loaded, dict)
    return loaded


def test_epsilon_reference() -> None:
    """`dpllm epsilon` gives the reference ε, an integer σ included."""
    values = as_json(EPSILON)
    assert values["epsilon"] == values["epsilon_zero_out"] == pytest.approx(4.813654994542411, abs=1e-5)
    assert values["epsilon_replace_one"] == pytest.approx(7.915548868450321, abs=1e-5)
    assert values["discretization"] == 1e-4 and values["tool"] == "dp_accounting"
    assert as_json([*EPSILON, "--adjacency", "replace-one"])["epsilon"] == values["epsilon_replace_one"]


def test_epsilon_with_truncation() -> None:
    """The bound on a batch is accounted for."""
    arguments = ["epsilon", "--noise-multiplier", "0.8", "--sampling-rate", str(1024 / 42000), "--steps", "410"]
    arguments += ["--delta", "1e-5", "--num-units", "42000", "--max-batch-size", "1184"]
    assert as_json(arguments)["epsilon"] == pytest.approx(5.215571209662058, abs=1e-5)


def test_tables_for_people() -> None:
    """Without --json there is a table, with ε rounded up."""
    table = run(EPSILON)
    assert "4.8137" in table and "7.9156" in table and "noise multiplier" in table
    assert "infinite: no privacy" in run([*EPSILON, "--noise-multiplier", "0"])
    assert as_json([*EPSILON, "--noise-multiplier", "0"])["epsilon"] == "inf"


def test_calibrate_keeps_the_target() -> None:
    """`dpllm calibrate` gives a σ that `dpllm epsilon` confirms."""
    values = as_json(CALIBRATE)
    assert values["epsilon"] <= values["target_epsilon"] == 8
    sigma = str(values["noise_multiplier"])
    back = as_json(["epsilon", "--noise-multiplier", sigma, *CALIBRATE[3:]])
    assert back["epsilon"] == values["epsilon"]
    assert "target ε" in run(CALIBRATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*EPSILON, "--delta", "2"], "delta must lie between 0 and 1"),
        ([*EPSILON, "--noise-multiplier", "-1"], "noise_multiplier must be at least 0"),
        ([*EPSILON, "--sampling-rate", "2"], "sampling_rate must be above 0"),
        ([*EPSILON, "--max-batch-size", "9"], "max_batch_size needs num_units"),
        ([*EPSILON, "--adjacency", "bounded"], "adjacency must be one of zero-out, replace-one"),
        ([*EPSILON, "--steps", "-1"], "steps must be at least 0"),
        ([*CALIBRATE, "--epsilon", "1e-9"], "can't be reached"),
        (["plan", "nowhere.yaml"], "nowhere.yaml: can't be read"),
        (["report", "nowhere"], "nowhere holds no privacy_plan.json"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    """What is refused prints one line on the error stream and exits with 2."""
    assert message in refuse(arguments)


def test_help_has_examples() -> None:
    """Every command's help shows a command that can be copied."""
    for command in ("epsilon", "calibrate", "plan", "report"):
        assert f"Example: dpllm {command}" in " ".join(run([command, "--help"]).replace("│", " ").split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a run of three steps."""
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=10), 500, 3)
    plan.save(tmp_path / "privacy_plan.json")
    with Ledger.create(tmp_path / "privacy_ledger.jsonl", plan) as ledger:
        for number in range(3):
            ledger.append_step(number, plan.step)
        ledger.append_end("completed")
    return tmp_path


def test_report_recomputes_from_the_ledger(folder: Path) -> None:
    """`dpllm report` prints the statement; the command it names gives the same ε."""
    values = as_json(["report", str(folder)])
    assert values["accounting"]["parameters"]["num_steps_charged"] == 3
    assert "# Privacy report" in run(["report", str(folder)])
    command = values["checkable"]["recompute_from_the_numbers"].split()
    assert command[0] == "dpllm"
    assert as_json(command[1:])["epsilon"] == values["statement"]["epsilon"]


def test_report_of_an_edited_ledger_is_refused(folder: Path) -> None:
    """An edited ledger is named with its line."""
    path = folder / "privacy_ledger.jsonl"
    path.write_text(path.read_text().replace('"noise_multiplier": 2.0', '"noise_multiplier": 9.0', 2))
    assert "line 1: edited" in refuse(["report", str(folder)])
    path.unlink()
    assert "holds no privacy_ledger.jsonl" in refuse(["report", str(folder)])


def test_plan_knows_units_and_steps(tmp_path: Path) -> None:
    """`dpllm plan` counts the units of the data, turns epochs into steps, and takes overrides."""
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps({"text": f"record {number}"}) + "\n" for number in range(205)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(data=data))
    values = as_json(["plan", str(recipe)])
    assert values["num_units"] == 205 and values["num_steps"] == 62 and values["delta"] == 1 / 2050
    assert values["epsilon_zero_out"] <= 8 < values["epsilon_replace_one"]
    given = ["plan", str(recipe), "train.max_steps=7", "privacy.target_epsilon=null", "privacy.noise_multiplier=2"]
    values = as_json(given)
    assert values["num_steps"] == 7 and values["target_epsilon"] is None and values["noise_multiplier"] == 2.0
    assert "steps T" in run(given)
    assert "did you mean 'privacy.clip_norm'" in refuse(["plan", str(recipe), "privacy.clipnorm=1"])


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose data isn't there, and whose precision this machine may not have."""
    path = tmp_path / "recipe.yaml"
    tiny = "{{config: {{model_type: gpt2, vocab_size: 100, n_embd: 32, n_head: 2, n_layer: 2}}}}"
    text = RECIPE.replace("{{config: {{model_type: gpt2}}}}", tiny).replace("out}}", "out, bf16: true, tf32: true}}")
    path.write_text(text.format(data="nowhere.jsonl"))
    return path


def test_memory_of_one_engine(recipe: Path) -> None:
    """`dpllm plan --memory` gives what the formulas do, in bytes and for people, without data and without a GPU."""
    arguments = ["plan", str(recipe), "--memory", "--gpus", "4", "--engine", "fsdp2"]
    values = as_json(arguments)
    (found,) = values["engines"]
    loaded = load_recipe(recipe)
    section = {**loaded.train, "use_cpu": True}
    del section["tf32"]
    expected = footprint_of_recipe(loaded, training_arguments(section), 10, "fsdp2", 4)
    assert found == expected.to_dict() and expected.run.bf16
    assert values["num_gpus"] == 4 and values["trainable_parameters"] == expected.shape.trainable
    table = run(arguments)
    assert "fsdp2 on 4 GPUs" in table and format_bytes(expected.total) in table and "not measured" in table


def test_memory_of_all_engines(recipe: Path) -> None:
    """Without an engine: all that make sense, side by side on a line of 80; one GPU without --gpus."""
    arguments = ["plan", str(recipe), "--memory", "--gpus", "16"]
    assert [engine["engine"] for engine in as_json(arguments)["engines"]] == list(engines_for(16))
    table = run(arguments)
    assert "MB per GPU" in table and "total, at most" in table and "not measured" in table
    assert all(len(line) <= 80 for line in table.splitlines()[1:]) and "…" not in table
    alone = as_json(["plan", str(recipe), "--memory"])
    assert alone["num_gpus"] == 1 and [engine["engine"] for engine in alone["engines"]] == list(engines_for(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "--engine", "fsdp3"], "got 'fsdp3'; did you mean 'fsdp2'"),
        (["--memory", "--gpus", "0"], "num_gpus must be at least 1, got 0"),
        (
            ["--memory", "--gpus", "12", "--engine", "fsdp2-hybrid"],
            "a number of GPUs that shard_size=8 divides, got 12",
        ),
        (["--memory", "--gpus", "2", "--engine", "single"], "the engine single uses 1 GPU, not 2"),
        (["--memory", "train.optim=adafactor"], "train.optim=adafactor"),
        (["--memory", "model.config.n_layers=3"], "has no 'n_layers'; did you mean 'n_layer'"),
        (["--gpus", "8"], "add --memory, or leave them out"),
        (["--engine", "ddp"], "add --memory, or leave them out"),
    ],
)
def test_memory_errors_are_one_line(recipe: Path, arguments: list[str], message: str) -> None:
    """Wrong engines, numbers and options are refused with one line."""
    assert message in refuse(["plan", str(recipe), *arguments])


def test_help_names_every_engine() -> None:
    """What --engine takes is what the formulas know."""
    shown = " ".join(run(["plan", "--help"]).replace("│", " ").split())
    assert all(name in shown for name in ENGINES)


def test_accounting_commands_do_not_import_torch() -> None:
    """The commands that only compute start without torch and transformers."""
    code = (
        "import sys; from dpllm.cli import app\n"
        f"try: app({EPSILON!r})\n"
        "except SystemExit as done: assert not done.code\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)

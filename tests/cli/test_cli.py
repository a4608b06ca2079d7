"""Tests of dpllm.cli. Reference numbers were computed with dp_accounting 0.6.0."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.cli.plan_sweep import Setting
from dpllm.cli.program import app
from dpllm.config import PrivacyConfig, load_recipe
from dpllm.planning.footprint import engines_for, footprint_of_recipe, format_bytes
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import charge
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import PrivacyPlan, make_plan
from dpllm.report.statement import write_report
from dpllm.training.arguments import training_arguments
from tests import children
from tests.privacy.test_compose import make_run
from tests.tiers import deep_case

EPSILON = ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.02", "--steps", "1500", "--delta", "1e-5"]
CALIBRATE = ["epsilon", "--target", "8", "--delta", "1e-5", "--sampling-rate", "0.0244", "--steps", "410"]

RECIPE = """
model: {{config: {{model_type: gpt2}}}}
data: {{path: {data}, max_length: 16}}
privacy: {{epsilon: 8, clip_norm: 1, expected_batch_size: 10}}
train: {{num_train_epochs: 3, output_dir: out}}
"""


def recipe_of_records(folder: Path, count: int = 200) -> Path:
    """A recipe for so many records."""
    data, path = folder / "records.jsonl", folder / "recipe.yaml"
    data.write_text("".join(json.dumps({"text": f"record {number}"}) + "\n" for number in range(count)))
    path.write_text(RECIPE.format(data=data))
    return path


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
    """`dpllm epsilon --target` gives a σ that `dpllm epsilon` confirms."""
    values = as_json(CALIBRATE)
    assert values["epsilon"] <= values["target_epsilon"] == 8
    sigma = str(values["noise_multiplier"])
    back = as_json(["epsilon", "--noise-multiplier", sigma, *CALIBRATE[3:]])
    assert back["epsilon"] == values["epsilon"]
    assert "target ε" in run(CALIBRATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*EPSILON, "--max-batch-size", "9"], "max_batch_size needs num_units"),
        ([*CALIBRATE, "--target", "1e-9"], "cannot be reached"),
        (["plan", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["report", "nowhere"], "nowhere holds no privacy_plan.json"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    """A refusal prints one line on the error stream and exits with 2."""
    assert message in refuse(arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a run of three steps."""
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=10), 500, 3)
    plan.save(tmp_path / "privacy_plan.json")
    with Ledger.create(tmp_path / "privacy_ledger.jsonl", plan) as ledger:
        for number in range(3):
            ledger.append_step(number, plan.event)
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


def test_plan_knows_units_and_steps(tmp_path: Path) -> None:
    """`dpllm plan` counts the units of the data, turns epochs into steps, and takes overrides."""
    recipe = recipe_of_records(tmp_path, 205)
    values = as_json(["plan", str(recipe)])
    assert values["num_units"] == 205 and values["num_steps"] == 62 and values["delta"] == 1 / 2050
    assert values["epsilon_zero_out"] <= 8 < values["epsilon_replace_one"]
    given = ["plan", str(recipe), "train.max_steps=7", "privacy.epsilon=null", "privacy.noise_multiplier=2"]
    values = as_json(given)
    assert values["num_steps"] == 7 and values["target_epsilon"] is None and values["noise_multiplier"] == 2.0
    assert "steps T" in run(given)
    assert "did you mean 'privacy.clip_norm'" in refuse(["plan", str(recipe), "privacy.clipnorm=1"])


def test_plan_reads_the_run_of_its_output_folder(tmp_path: Path, folder: Path) -> None:
    """A folder whose run cannot be resumed is told before anything is started in it."""
    recipe = recipe_of_records(tmp_path, 205)
    assert as_json(["plan", str(recipe)])["run"] is None
    given = ["plan", str(recipe), f"train.output_dir={folder}"]
    found = as_json(given)["run"]
    assert found["charged"] == 3 and found["lost"] is None and "3 of 3 steps are charged" in run(given)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose data is not there, and whose precision this machine may not have."""
    path = tmp_path / "recipe.yaml"
    tiny = "{{config: {{model_type: gpt2, vocab_size: 100, n_embd: 32, n_head: 2, n_layer: 2}}}}"
    text = RECIPE.replace("{{config: {{model_type: gpt2}}}}", tiny).replace("out}}", "out, bf16: true, tf32: true}}")
    path.write_text(text.format(data="nowhere.jsonl"))
    return path


def test_memory_of_one_engine(recipe: Path) -> None:
    """`dpllm plan memory` prints the formulas' results, in bytes and for people, without data and without a GPU."""
    arguments = ["plan", "memory", str(recipe), "--gpus", "4", "--engine", "fsdp2"]
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
    arguments = ["plan", "memory", str(recipe), "--gpus", "16"]
    assert [engine["engine"] for engine in as_json(arguments)["engines"]] == list(engines_for(16))
    table = run(arguments)
    assert "MB per GPU" in table and "total, at most" in table and "not measured" in table
    assert "run row by row: none known" in table
    alone = as_json(["plan", "memory", str(recipe)])
    assert alone["num_gpus"] == 1 and [engine["engine"] for engine in alone["engines"]] == list(engines_for(1))


def test_modules_that_run_row_by_row_are_named_where_the_memory_is_unknown(recipe: Path) -> None:
    """Blocks of another form are those that often have no taps."""
    sizes = "num_hidden_layers: 2, hidden_size: 32, num_heads: 8, head_dim: 8, n_groups: 2, state_size: 8"
    config = f"model.config={{model_type: mamba2, vocab_size: 300, {sizes}}}"
    message = refuse(["plan", "memory", str(recipe), config])
    assert "its memory is unknown" in message
    assert "row by row: 2 (backbone.layers.0.mixer, …), each with 8 times its kernel launches" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "fsdp3"], "got 'fsdp3'; did you mean 'fsdp2'"),
        (["--gpus", "2", "--engine", "single"], "the engine single uses 1 GPU, not 2"),
        (["train.optim=adafactor"], "train.optim=adafactor"),
        (["model.config.n_layers=3"], "'n_layers'; did you mean 'n_layer'"),
    ],
)
def test_memory_errors_are_one_line(recipe: Path, arguments: list[str], message: str) -> None:
    """Wrong engines, numbers and options are refused with one line."""
    assert message in refuse(["plan", "memory", str(recipe), *arguments])


@pytest.mark.deep
def test_rows_drawn_singly_cost_more() -> None:
    """--rows-per-unit is the k of the accounting, in both directions."""
    one, four = (as_json([*EPSILON, "--rows-per-unit", k])["epsilon"] for k in ("1", "4"))
    assert one == as_json(EPSILON)["epsilon"] < four
    sigma = as_json([*CALIBRATE, "--rows-per-unit", "2"])
    assert sigma["noise_multiplier"] > as_json(CALIBRATE)["noise_multiplier"] and 7.99 < sigma["epsilon"] <= 8
    shown = run([*EPSILON, "--rows-per-unit", "4"]).replace("│", " ")
    assert "rows of which a unit has up to 4" in " ".join(shown.split())
    assert "truncated sample of rows" in refuse(
        [*EPSILON, "--rows-per-unit", "4", "--num-units", "1000", "--max-batch-size", "60"]
    )


def test_compare_prints_every_method() -> None:
    """`dpllm epsilon --compare`: the ε of the report first, then by other accountants."""
    values = as_json([*EPSILON, "--compare"])
    methods = {row["name"]: row["epsilon"] for row in values["comparison"]}
    assert methods["PLD"] == values["epsilon"] == pytest.approx(4.81365, abs=1e-4)
    assert methods["PLD, dp_accounting"] == pytest.approx(4.8137, abs=1e-3)
    assert methods["Rényi"] == pytest.approx(5.2960, abs=1e-3)
    assert methods["basic composition"] > methods["advanced composition"] > methods["zCDP"] > methods["PLD"]
    target = ["epsilon", "--target", "8", "--delta", "1e-5", "--sampling-rate", "0.1", "--steps", "3", "--compare"]
    values = as_json(target)
    shown = run(target)
    assert values["target_epsilon"] == 8 and f"{values['noise_multiplier']:.6g}" in shown and "Rényi" in shown
    table = run([*EPSILON, "--compare"])
    assert all(name in table for name in ("PLD", "dp_accounting", "Rényi", "zCDP", "4.8137", "upper bound"))


def test_epsilon_is_checked_by_a_second_accountant() -> None:
    """ε of dp_accounting's own accountant is printed next to ε; if it does not apply, this is said."""
    assert as_json(EPSILON)["dp_accounting"] == pytest.approx(4.8137, abs=1e-3)
    assert "checked by dp_accounting, zero-out" in run(EPSILON) and "4.8142" in run(EPSILON)
    singly = as_json([*EPSILON, "--rows-per-unit", "3"])
    assert singly["dp_accounting"] == pytest.approx(singly["epsilon"], abs=1e-2)
    discrete = [*EPSILON, "--num-units", "1000", "--discrete-sensitivity", "1.003"]
    assert as_json(discrete)["dp_accounting"] is None and "does not apply" in run(discrete)
    silent = [*EPSILON[:2], "0", *EPSILON[3:]]
    assert as_json(silent)["dp_accounting"] == "inf" and "infinite: no privacy" in run(silent)


def test_tuning_is_priced() -> None:
    """--best-of: the cost of releasing the best of a random number of runs."""
    assert as_json([*EPSILON, "--best-of", "10"])["best_of"]["epsilon"] == pytest.approx(9.26, abs=5e-3)
    assert "ε of the best of 10 runs on average" in run([*EPSILON, "--best-of", "10"])
    assert "--best-of" in refuse([*EPSILON, "--best-of", "10", "--rows-per-unit", "2"])
    assert "if noise is discrete" in refuse([*EPSILON, "--best-of", "10", "--discrete-sensitivity", "1.1"])


def test_compose_adds_runs_up(tmp_path: Path) -> None:
    """`dpllm epsilon`: the joint cost of two runs, at least the cost of either and at most their sum."""
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder, noise_multiplier in zip(folders, (3.0, 4.0), strict=True):
        make_run(Path(folder), dataset="notes", noise_multiplier=noise_multiplier)
    values = as_json(["epsilon", *folders])
    alone = [entry["epsilon"] for entry in values["runs"]]
    assert max(alone) < values["epsilon"] < sum(alone) * 1.5 and values["dataset"] == "notes"
    assert "ε of all together" in run(["epsilon", *folders])


def test_one_run_needs_no_name_of_its_data(folder: Path) -> None:
    """Its folder or its ledger; of two runs without names nothing shows that they had the same data."""
    values = as_json(["epsilon", str(folder)])
    assert values["epsilon"] == as_json(["report", str(folder)])["statement"]["epsilon"]
    assert as_json(["epsilon", str(folder / "privacy_ledger.jsonl")])["epsilon"] == values["epsilon"]
    other = shutil.copytree(folder, folder / "other")
    refuse(["epsilon", str(folder), str(other)])


def test_verify_passes_and_fails(folder: Path) -> None:
    """`dpllm verify`: exit code 0 for the files of a run, 1 with the failed check for an edited report."""
    contents = read_ledger(folder / "privacy_ledger.jsonl")
    write_report(folder, PrivacyPlan.load(folder / "privacy_plan.json"), contents)
    assert as_json(["verify", str(folder)])["ok"]
    shown, points = run(["verify", str(folder)]), as_json(["report", str(folder)])["open_points"]
    assert "matches its ledger" in shown and points and f"{len(points)} open point" in shown
    path = folder / "privacy_report.md"
    path.write_text(path.read_text().replace("0.0002", "0.0001"))
    result = CliRunner().invoke(app, ["verify", str(folder)])
    assert result.exit_code == 1 and "FAILED" in result.stdout and "do not rely on the report" in result.stdout
    assert "is not a folder" in refuse(["verify", str(folder / "nowhere")])
    (folder / "runs").mkdir()
    assert "so it is not the folder of a run" in refuse(["verify", str(folder / "runs")])
    shutil.copytree(folder, folder / "runs" / "mine", ignore=shutil.ignore_patterns("runs"))
    assert f"Folders of runs in it: {folder / 'runs' / 'mine'}" in refuse(["verify", str(folder / "runs")])


def test_what_people_know_is_noted(folder: Path) -> None:
    """A note is written into all forms of the report and takes its open point off them and off the card."""
    values = as_json(["report", str(folder)])
    asked = "Not filled in: Who holds the raw data?"
    assert asked in values["open_points"] and not (folder / "privacy_report.html").exists()
    opened = "".join(f"- {point}\n" for point in values["open_points"])
    head = "The privacy report has open points. Each one is a reason not to release yet:"
    (folder / "README.md").write_text(f"# A model\n\n{head}\n\n{opened}\n## Privacy\n")
    noted = as_json(["report", "note", str(folder), "data_holder=the clinic", "other_uses=none"])
    assert noted["setting"]["data_holder"] == "the clinic" and noted["definition"]["other_uses_of_the_data"] == "none"
    assert asked not in noted["open_points"] and len(noted["open_points"]) == len(values["open_points"]) - 2
    card = (folder / "README.md").read_text()
    assert asked not in card and "Who will see the released model?" in card and card.endswith("\n\n## Privacy\n")
    for name in ("privacy_report.md", "privacy_report.html", "privacy_report.json"):
        assert "the clinic" in (folder / name).read_text()
    again = as_json(["report", "note", str(folder), "audience=the public", "utility.accuracy on public data=0.83"])
    assert again["setting"]["data_holder"] == "the clinic", "earlier notes are kept"
    given = ["dataset=notes", "trained_by=IT", "license=mit", "language=en, de"]
    last = as_json(["report", "note", str(folder), *given, "base_model=org/base"])
    assert (last["definition"]["dataset"], last["noted"]["language"]) == ("notes", ["en", "de"])
    assert last["utility"] == {"accuracy on public data": 0.83} and last["open_points"] == []
    assert "is no code of a language" in refuse(["report", "note", str(folder), "language=English"])
    for wrong, words in (
        ("0.83", "must be KEY=VALUE"),
        ("utility.=0.83", "name of the figure"),
        ("utility.accuracy=abc", "utility.accuracy=0.83"),
        ("utility.accuracy=nan", "finite number"),
        ("language=xxq", "is no code of a language"),
        ("by=x", "its person"),
        ("holder=x", "did you mean 'data_holder'"),
        ("utility.a=1 utility.a=2", "given twice"),
    ):
        assert words in refuse(["report", "note", str(folder), *wrong.split()])
    assert "the report has 0 open points" in refuse(["report", "note", str(folder), "1=fine", "by=A. Meyer"])
    assert "its person" in refuse(["report", "note", str(folder), "1=fine"])


def test_people_settle_a_point_with_their_name(folder: Path) -> None:
    """The ledger gets their statement; commands on the screen name the folder as it was given, and files do not."""
    with Ledger.annotate(folder / LEDGER_FILE) as ledger:
        ledger.append_open_point("Rows have one length: confirm it.")
    result = CliRunner().invoke(app, ["report", "note", str(folder), "audience=all", "data_holder=us"])
    points = len(json.loads((folder / "privacy_report.json").read_text())["open_points"])
    assert result.stderr == f"noted in {folder}: audience, data holder; {points} points are open.\n" and points > 1
    shown = result.stdout
    assert f'`dpllm report note {folder} 1="what was checked" by="name and role"`' in shown
    assert str(folder) not in (folder / "privacy_report.md").read_text()
    done = as_json(["report", "note", str(folder), "1=Each is a record", "by=A. Meyer"])
    (settled,) = done["settled_points"]
    assert settled["answer"] == "Each is a record" and settled["by"] == "A. Meyer"
    assert "Rows have one length: confirm it." not in done["open_points"]
    assert read_ledger(folder / LEDGER_FILE).notes.settled[0]["statement"] == "Each is a record"


def test_budget_is_made_and_shown(tmp_path: Path) -> None:
    """`dpllm budget create` creates the file that runs charge, once; `show` prints the spent ε."""
    path = tmp_path / "notes.budget.json"
    create = ["budget", "create", str(path), "--dataset", "notes", "--epsilon", "8", "--delta", "1e-6"]
    created = as_json([*create, "--num-units", "42000"])
    assert created["spent"] == 0 and created["entries"] == []
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=1024, dataset="notes")
    plan = make_plan(config, 42_000, 100)
    charge(path, plan, "notes")
    shown = as_json(["budget", "show", str(path)])
    assert 0 < shown["spent"] < 8 and len(shown["entries"]) == 1
    assert "run 1" in run(["budget", "show", str(path)])
    assert "exists" in refuse([*create, "--num-units", "42000"])
    assert "0 < delta < 1/num_units" in refuse(
        [*create[:2], str(tmp_path / "b"), *create[3:], "--num-units", "2000000"]
    )


SWEEP = ["plan", "sweep", "--num-units", "5000", "--epsilon", "8", "--expected-batch-size", "200", "--steps", "40"]


def test_sweep_of_numbers(tmp_path: Path) -> None:
    """`dpllm plan sweep` from given numbers: every point keeps the budget, one is recommended, and there is a PNG."""
    picture = tmp_path / "sweep.png"
    grid = ["--batch-sizes", "100,200,400", "--step-counts", "20,40,80", "--delta", "1e-5"]
    values = as_json(
        [*SWEEP, *grid, "--tokens-per-unit", "64", "--tokens-per-second", "1e5", "--picture", str(picture)]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    points = values["points"]
    assert len(points) == 9 and all(point["epsilon"] <= 8 for point in points)
    assert all(point["seconds"] == pytest.approx(point["examples"] * 64 / 1e5) for point in points)
    assert [point["recommended"] for point in points].count(True) == 1
    assert values["recommended"]["examples"] == 8000 and values["recommended"]["num_steps"] >= 20
    (fewer,) = (point for point in values["points"] if (point["expected_batch_size"], point["num_steps"]) == (400, 20))
    alone = as_json([*SWEEP, "--batch-sizes", "400,800", "--step-counts", "10,20", "--min-steps", "10"])
    assert alone["recommended"]["num_steps"] == 10 and fewer["noise_multiplier"] is not None
    assert "Recommended:" in run([*SWEEP, *grid])


def test_sweep_of_a_recipe(tmp_path: Path) -> None:
    """The recipe gives units, budget, batch and steps; its model gives the work, and so the time."""
    path = recipe_of_records(tmp_path, 400)
    sizes = "{model_type: gpt2, vocab_size: 100, n_embd: 32, n_head: 2, n_layer: 2}"
    path.write_text(path.read_text().replace("{model_type: gpt2}", sizes))
    arguments = ["plan", "sweep", str(path), "--batch-sizes", "10,20", "--step-counts", "60,120"]
    values = as_json([*arguments, "--peak-tflops", "1", "--gpus", "2"])
    assert values["num_units"] == 400 and values["delta"] == 1 / 4000 and values["points"][0]["tokens"] == 16 * 600
    assert all(point["seconds"] > 0 for point in values["points"])


def test_the_plan_of_correlated_noise_says_what_was_chosen(tmp_path: Path) -> None:
    """Bands, strategy, the predicted noise beside that of independent noise, and ε under both adjacencies."""
    path = recipe_of_records(tmp_path)
    arguments = ["plan", str(path), "privacy.max_batch_size=60", "privacy.epsilon=3"]
    arguments += [
        "privacy.noise={kind: banded, bands: auto}",
        "train.optim=sgd",
        "train.optim_args=momentum=0.9",
        "train.learning_rate=0.1",
    ]
    values = as_json(arguments)
    noise, predicted = values["noise"], values["predicted_noise"]
    assert noise["kind"] == "banded" and noise["bands"] in (3, 4, 6, 8, 12) and noise["strategy"] == "geometric"
    assert 0.9 < noise["ratio"] <= 1 and 0 < predicted["noise"] < 0.9 * predicted["independent"]
    assert values["epsilon_zero_out"] <= 3 < values["epsilon_replace_one"]
    assert f"geometric with ratio {noise['ratio']:g}" in " ".join(run(arguments).replace("│", " ").split())


def test_the_plan_gives_advice_on_the_optimizer(tmp_path: Path) -> None:
    """About Adam's learning rate, and each setting that was measured worse; none about the defaults."""
    path = recipe_of_records(tmp_path)
    arguments = ["plan", str(path), "privacy.max_batch_size=60", "privacy.noise={kind: banded, bands: 4}"]
    arguments += ["train.average=ema", "train.learning_rate=1e-3"]
    assert as_json(arguments)["advice"] == []
    worse = [*arguments, "train.adam_beta1=0.0", "train.warmup_steps=0"]
    advice = as_json(worse)["advice"]
    assert len(advice) == 2 and "momentum is 0" in advice[0] and "no warm-up" in advice[1]
    shown = " ".join(run(worse).replace("│", " ").split())
    assert "Adam divides by it, so its learning rate can be" in shown and shown.count(" advice ") == 2
    assert all(line[:40] in shown for line in advice)


def test_the_plan_names_a_low_passed_second_moment(tmp_path: Path) -> None:
    """Its first moment has no bias correction, so no warm-up is advised; a wrong option is refused."""
    path = recipe_of_records(tmp_path)
    arguments = ["plan", str(path), "privacy.max_batch_size=60", "privacy.noise={kind: banded, bands: 4}"]
    arguments += [
        "train.average=ema",
        "train.learning_rate=1e-3",
        "train.warmup_steps=0",
        "train.optim_args=second_moment=low_passed",
    ]
    found = as_json(arguments)
    assert found["second_moment"] == "low_passed" and found["advice"] == []
    assert "second moment of the optimizer" in run(arguments)
    assert as_json(arguments[:-1])["second_moment"] is None


def test_a_sweep_of_correlated_noise_compares_bands_too(tmp_path: Path) -> None:
    """Its σ is that of the recipe's noise; clipping has the event of DP-SGD. Noise of a fixed order is only listed."""
    path = recipe_of_records(tmp_path, 400)
    arguments = ["plan", "sweep", str(path), "--batch-sizes", "10,20"]
    banded = ["privacy.noise={kind: banded, bands: 4}", "privacy.max_batch_size=60", "--min-steps", "50"]
    values = as_json([*arguments, *banded])
    assert {(p["expected_batch_size"], p["num_steps"], p["tensors_kept"]) for p in values["points"]} == {
        (size, 1200 // size, kept) for size in (10, 20) for kept in (0, 1, 4)
    }
    assert all(
        p["sampled"] == (p["tensors_kept"] != 1) and not (p["recommended"] and not p["sampled"])
        for p in values["points"]
    )
    least = next(point for point in values["points"] if point["sampled"])
    assert least["options"]["bands"] == 4 and least["relative"] < 1
    assert values["recommended"]["recommended"] and values["recommended"]["predicted_noise"] > 0
    for options, words in (
        (["--picture", "x.png"], "takes --batch-sizes, --compute and --min-steps"),
        (["--compute", "max"], "--compute=max is for independent noise"),
    ):
        done = CliRunner().invoke(app, [*arguments, *banded, "privacy.noise_multiplier=1", *options])
        assert done.exit_code == 2 and words in done.stderr.splitlines()[-1]
    grid = [*arguments, "--step-counts", "60,120"]
    assert as_json([*grid, "privacy.clipping=per-layer"])["points"] == as_json(grid)["points"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "sweep"], "give a recipe, or the numbers of a run"),
        (["plan", "sweep", "--num-units", "10"], "--expected-batch-size, --steps and --epsilon: give all four"),
        (["plan", "sweep", "r.yaml", "--steps", "3"], "override the recipe's values instead"),
        ([*SWEEP, "--batch-sizes", "1,x"], "whole numbers separated by commas"),
        ([*SWEEP, "--peak-tflops", "100"], "needs a recipe"),
        deep_case([*SWEEP, "--min-steps", "5000"], "at least min_steps=5000 steps"),
    ],
)
def test_sweep_errors_are_one_line(arguments: list[str], message: str) -> None:
    """Options that do not belong together are refused with one line."""
    assert message in refuse(arguments)


LARGE = {"torch", "transformers", "datasets"}


@pytest.mark.parametrize(
    ("words", "large"),
    [
        (["--help"], LARGE | {"scipy", "dp_accounting", "accelerate", "pandas", "numpy"}),
        (["epsilon", "--help"], LARGE | {"scipy", "dp_accounting"}),
        (EPSILON, LARGE),
    ],
)
def test_help_and_accounting_import_no_large_library(words: list[str], large: set[str]) -> None:
    """In an interpreter of its own; nothing is computed for a help screen."""
    code = (
        "import sys; from dpllm.cli.program import app\n"
        f"try: app({words!r})\n"
        "except SystemExit as done: assert not done.code\n"
        f"assert not {large!r} & set(sys.modules)"
    )
    children.run([sys.executable, "-c", code])


def test_a_sweep_of_discrete_noise_is_refused():
    """It would show the smaller ε of Gaussian noise."""
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=5, randomness="discrete")
    with pytest.raises(ValueError, match="noise is larger"):
        Setting.of_recipe(Path("recipe.yaml"), None, make_plan(config, 100, 5), with_flops=False)


def test_epsilon_of_discrete_noise_is_computed_from_its_sensitivity():
    """As the report's line for recomputing it says; rows drawn singly have no accounting."""
    event = make_plan(
        PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=5, randomness="discrete"), 100, 5
    ).event
    numbers = ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "0.05", "--steps", "5", "--delta", "1e-3"]
    found = as_json([*numbers, *event.words().options.split()])
    assert found["epsilon"] == epsilon([(event, 5)], 1e-3)
    assert "no accounting for rows drawn singly" in refuse(
        [*numbers, "--discrete-sensitivity", "1.01", "--rows-per-unit", "2"]
    )

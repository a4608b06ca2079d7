"""benchmarks/utility.py: every arm trains through the product, and the table compares the best of each."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from tests.benchmarks.material import ROOT, program, save_model, write_records
from tests.tiers import deep_case

benchmark = program("utility")
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, and records for training and for measuring."""
    folder = tmp_path_factory.mktemp("material")
    save_model(folder / "model", max_length=64)
    pick = random.Random(0)
    for name, count in (("train", 120), ("dev", 20)):
        write_records(folder / f"{name}.csv", pick, count, (3, 9))
    return folder


def options(folder: Path, *extra: str) -> list[str]:
    """Three steps of about eight records."""
    places = ["--model", str(folder / "model"), "--data", str(folder / "train.csv"), "--held-out"]
    sizes = ["--units", "100", "--held-out-units", "10", "--batch", "8", "--steps", "3", "--delta", "1e-3"]
    return [*places, str(folder / "dev.csv"), *sizes, "--max-length", "48", "--max-tokens", "384", *extra]


@pytest.mark.deep
@pytest.mark.parametrize(
    "arms", [["non-private", "banded, average", "low-passed"], deep_case([*benchmark.ARMS])], ids=["three", "all"]
)
def test_every_arm_trains_and_the_file_keeps_it(material, tmp_path, arms):
    """Private arms state an ε within the target; a second call repeats no run and prints the same table."""
    file = tmp_path / "runs.json"
    given = options(material, "--epsilons", "8", "--json", str(file), "--arms", *arms)
    benchmark.main(given)
    report = json.loads(file.read_text())
    assert [run["arm"] for run in report["runs"]] == arms
    for run in report["runs"]:
        assert run["perplexity"] > 1
        if run["arm"] != "non-private":
            assert 7 < run["stated_epsilon"] <= 8 and run["noise_multiplier"] > 0
        else:
            assert run["epsilon"] is None and "stated_epsilon" not in run
        assert ("at_floor" in run) == (run["arm"] in ("AdamBC", "low-passed"))
    benchmark.main(given)
    assert json.loads(file.read_text()) == report and str(tmp_path) not in file.read_text()


@pytest.mark.deep
def test_adapters_with_embeddings_and_head(material, tmp_path):
    """The LoRA mode trains adapters and saves a model that loads again."""
    file = tmp_path / "runs.json"
    benchmark.main(options(material, "--epsilons", "8", "--modes", "lora", "--arms", "textbook", "--json", str(file)))
    (run,) = json.loads(file.read_text())["runs"]
    assert run["mode"] == "lora" and run["perplexity"] > 1


@pytest.mark.deep
def test_a_run_that_a_signal_ended_is_not_stored(material, tmp_path, monkeypatch):
    """DPTrainer ends such a run early and without an error; its model would count as that of all steps."""
    file = tmp_path / "runs.json"
    monkeypatch.setattr(benchmark.Experiment, "interrupted_by", signal.SIGTERM)
    with pytest.raises(SystemExit, match="textbook"):
        benchmark.main(options(material, "--epsilons", "8", "--arms", "textbook", "--json", str(file)))
    assert not file.exists()


def test_runs_of_other_settings_are_refused(material, tmp_path):
    """A file of runs with another batch is not continued: its runs cost another compute."""
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"settings": {"batch": 3}, "runs": []}))
    with pytest.raises(SystemExit, match="holds runs"):
        benchmark.main(options(material, "--json", str(file)))


def test_the_best_rate_of_each_arm_is_compared():
    """The table takes each arm's best rate, and the gap is that of the logarithms."""
    found = [
        ("non-private", None, 1.0, 0, 2.0),
        ("textbook", 8.0, 1.0, 0, 9.0),
        ("textbook", 8.0, 2.0, 0, 8.0),
        ("banded, average", 8.0, 1.0, 0, 3.0),
        ("banded, average", 8.0, 1.0, 1, 16 / 3),
    ]
    names = ("arm", "epsilon", "rate", "number", "perplexity")
    runs = [{"mode": "full", **dict(zip(names, values, strict=True))} for values in found]
    best = benchmark.best_runs(runs)
    assert best["textbook", "full", 8.0].rate == 2.0
    assert best["banded, average", "full", 8.0].mean == pytest.approx(4.0)
    table = benchmark.as_markdown({"runs": runs}).splitlines()[2:]
    assert all(part in line for part, line in zip(("**1: 2.000**", "**2: 8.000**", "| 50% |"), table, strict=True))


@pytest.mark.deep
def test_the_page_of_results_has_the_table_of_the_stored_runs():
    """No figure of the page is older than the file of runs."""
    report = json.loads((FOLDER / "utility.json").read_text())
    assert benchmark.as_markdown(report) in (FOLDER / "results.md").read_text()


def test_public_sentences_hold_what_their_prompt_says():
    """Every value of a prompt stands in its sentences, but the yes or no of families."""
    for pair in benchmark.template_pairs(50, ("mr", "ref")):
        slots = dict(part.rstrip("]").split("[") for part in pair["mr"].split(", "))
        assert {"name", "eatType"} <= set(slots)
        assert ("familyFriendly" in slots) == ("family friendly" in pair["ref"])
        assert all(value in pair["ref"] for name, value in slots.items() if name != "familyFriendly")
    assert benchmark.template_pairs(5, ("a", "b"))[:] == benchmark.template_pairs(5, ("a", "b"))[:]

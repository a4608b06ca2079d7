"""Tests of dpllm.methods.synthesize.data_set: a data set's ε is that of the training and of the counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dpllm.config import ConfigError, load_recipe
from dpllm.config.yaml12 import write_yaml
from dpllm.data.records import contents_of, load_train_and_eval
from dpllm.methods.synthesize.data_set import (
    COUNTS_FILE,
    CountedLabels,
    Labels,
    Request,
    make_data_set,
    plan_of,
    read_labels,
)
from dpllm.methods.synthesize.evaluation import DISCLOSED, note_evaluation
from dpllm.methods.synthesize.texts import public_shares
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import load_plan
from dpllm.privacy.run_folder import KEY_FILE, remember_records
from dpllm.report.verify import verify
from tests.methods.synthesize.test_making import Parrot
from tests.mutations import kills
from tests.report.test_standing import folder_of

CLASSES = ("pub", "cafe", "bar")


def records_of(folder: Path, labels: list[str], **privacy: object) -> Path:
    """Records beside a run, and the recipe that names them."""
    path = folder / "private.jsonl"
    path.write_text("".join(json.dumps({"kind": label, "text": "x"}) + "\n" for label in labels))
    columns = {"unit": privacy.pop("unit")} if "unit" in privacy else {}
    recipe = {
        "model": {"name": "gpt2"},
        "data": {"path": str(path), "max_length": 16, "format": "text", "columns": columns},
        "privacy": {"noise_multiplier": 2.0, "clip_norm": 1.0, "expected_batch_size": 10, **privacy},
        "train": {"output_dir": str(folder), "max_steps": 3},
    }
    (folder / "recipe.yaml").write_text(write_yaml(recipe))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished private run of 500 records, 400 of which are of the first class."""
    folder = tmp_path / "run"
    folder.mkdir()
    return records_of(folder_of(folder), ["pub"] * 400 + ["cafe"] * 100)


def counted(noise: float = 20.0) -> Labels:
    return Labels(
        template="kind: {label}", counted=CountedLabels(classes=CLASSES, column="kind", noise_multiplier=noise)
    )


@kills(
    "the histogram of labels of a synthetic data set is exact",
    "dpllm/methods/synthesize/data_set.py",
    "noisy = charge_and_count(run, units, exact)",
    "noisy = dict(zip(units.classes, exact, strict=True))",
)
def test_the_counts_are_charged_with_the_training(run, tmp_path):
    """ε is that of both together; the folder verifies, and one changed text does not."""
    output = tmp_path / "made"
    made = make_data_set(run, output, Parrot(), counted(), Request(number=60))
    plan, trained = load_plan(output / PLAN_FILE), PrivacyPlan.load(run / PLAN_FILE)
    history = [*trained.history, (counted().counted.charge.event, 1)]
    assert plan.epsilon == pytest.approx(epsilon(history, trained.delta), rel=1e-9) and plan.epsilon > trained.epsilon
    counts = json.loads((output / COUNTS_FILE).read_text())
    assert list(counts) == list(CLASSES) and 0 < abs(counts["pub"] - 400) + abs(counts["cafe"] - 100) < 300
    assert read_ledger(output / LEDGER_FILE).num_steps == 1
    lines = [json.loads(line) for line in (output / "texts.jsonl").read_text().splitlines()]
    assert len(lines) == len(made.records) == 60 and {line["prompt"] for line in lines} <= {
        f"kind: {name}" for name in CLASSES
    }
    assert sum(line["label"] == "pub" for line in lines) == pytest.approx(45, abs=15)
    assert verify(output).ok, [check for check in verify(output).checks if not check.ok]
    card = (output / "README.md").read_text()
    assert "A seed of the sampling is no secret" in card and "- texts drawn from the model: " in card
    texts = output / "texts.jsonl"
    texts.write_text(texts.read_text().replace("kind", "kinds", 1))
    failed = [check.detail for check in verify(output).checks if not check.ok]
    assert len(failed) == 1 and "texts.jsonl" in failed[0]


def test_public_labels_and_prompts_cost_nothing(run, tmp_path):
    """No private record is read, not even the recipe; ε is that of the training, and the folder verifies."""
    (run / "private.jsonl").unlink()
    trained = PrivacyPlan.load(run / PLAN_FILE)
    labels = Labels(template="{label}:", shares=public_shares({"pub": 1, "bar": 3}))
    for number, wanted in enumerate((labels, ["one", "two"], [""])):
        output = tmp_path / f"made{number}"
        make_data_set(run, output, Parrot(), wanted, Request(number=8, file_format="parquet"))
        plan = load_plan(output / PLAN_FILE)
        assert plan.charges == () and plan.epsilon == trained.epsilon
        assert read_ledger(output / LEDGER_FILE).num_steps == 0
        assert verify(output).ok, [check for check in verify(output).checks if not check.ok]
        assert "No answer" not in (output / "README.md").read_text()


@kills(
    "an evaluation on real text is not in the ledger of the data set",
    "dpllm/methods/synthesize/evaluation.py",
    "add_disclosure(folder, DISCLOSED)",
    "pass",
)
def test_an_evaluation_is_listed_as_not_covered(run, tmp_path):
    """The ledger of the finished data set gets a line, and report and card still fit it."""
    output = tmp_path / "made"
    make_data_set(run, output, Parrot(), [""], Request(number=3))
    note_evaluation(output)
    assert read_ledger(output / LEDGER_FILE).disclosures == {DISCLOSED: 1}
    assert DISCLOSED in (output / "privacy_report.md").read_text() and verify(output).ok
    assert (output / "not_for_release").stat().st_mode & 0o777 == 0o700


def test_the_budget_holds_training_and_counts(run, tmp_path):
    """The training run is added once, if the file does not hold it; a budget too small refuses before a text."""
    folder = tmp_path / "named"
    folder.mkdir()
    records_of(folder_of(folder, dataset="people"), ["pub"] * 500, dataset="people")
    trained = PrivacyPlan.load(folder / PLAN_FILE)
    budget = tmp_path / "budget.json"
    create_budget(
        budget, dataset="people", num_units=500, unit="sequence", delta=trained.delta, epsilon=trained.epsilon * 1.5
    )
    make_data_set(folder, tmp_path / "a", Parrot(), [""], Request(number=3), budget=budget)
    spent = read_budget(budget)
    assert spent.cost(spent.history) == pytest.approx(trained.epsilon)
    with pytest.raises(ValueError, match="for a total of"):
        make_data_set(folder, tmp_path / "b", Parrot(), counted(0.3), Request(number=3), budget=budget)
    assert not (tmp_path / "b" / "texts.jsonl").exists()


@kills(
    "labels are counted in other records than those of the training",
    "dpllm/methods/synthesize/data_set.py",
    "if units.num_units != plan.num_units or",
    "if",
)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "recipe.yaml").unlink(), "holds no recipe.yaml"),
        (lambda folder: records_of(folder, ["pub"] * 499), "does not have the 500 units"),
        (lambda folder: records_of(folder, ["pub"] * 499 + ["secret place"]), "none of the 3 classes"),
        (lambda folder: (folder / "private.jsonl").write_text('{"text": "x"}\n' * 500), "no column 'kind'"),
    ],
)
def test_records_that_do_not_fit_are_refused_before_a_charge(run, tmp_path, change, words):
    """The message names no private label."""
    change(run)
    with pytest.raises(ValueError, match=words) as found:
        make_data_set(run, tmp_path / "made", Parrot(), counted(), Request(number=3))
    assert "secret" not in str(found.value) and not (tmp_path / "made").exists()


def test_the_records_are_those_of_the_training(run, tmp_path):
    """Other people of the same number would bear an ε that no report states. A label that was added later is none."""
    recipe = load_recipe(run / "recipe.yaml")
    with Ledger.annotate(run / LEDGER_FILE) as ledger:
        remember_records(ledger, contents_of(load_train_and_eval(recipe.data, recipe.privacy)[0]))
    assert (run / KEY_FILE).stat().st_mode & 0o777 == 0o600
    plan, kinds = plan_of(run, counted().counted), ["bar"] * 500
    records_of(run, kinds)  # the text is the same
    assert read_labels(run, plan, counted().counted)[1] is None
    (lines := (run / "private.jsonl").read_text().splitlines())[7] = '{"kind": "pub", "text": "secret"}'
    (run / "private.jsonl").write_text("\n".join(lines))
    with pytest.raises(LedgerError, match="records differ") as found:
        make_data_set(run, tmp_path / "made", Parrot(), counted(), Request(number=3))
    assert "secret" not in str(found.value) and not (tmp_path / "made").exists()
    (run / KEY_FILE).unlink()
    make_data_set(run, tmp_path / "made", Parrot(), counted(), Request(number=3))
    (point,) = read_ledger(tmp_path / "made" / LEDGER_FILE).notes.open_points
    assert "could not be compared with those of the training: not_for_release/data_key.txt is missing" in point


def test_a_run_that_is_not_private_or_not_over_is_refused(tmp_path):
    for name, given in (("none", {"noise_multiplier": 0.0}), ("seeded", {"seed": 1})):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, **given)
    for name in ("none", "seeded"):
        with pytest.raises(ValueError):
            plan_of(tmp_path / name)


def test_a_data_set_is_not_replaced(run, tmp_path):
    make_data_set(run, tmp_path / "made", Parrot(), counted(), Request(number=1))
    with pytest.raises(ConfigError, match="exists already"):
        make_data_set(run, tmp_path / "made", Parrot(), counted(), Request(number=1))
    (tmp_path / "made" / "texts.jsonl").unlink()
    with pytest.raises(LedgerError, match="earlier run"):
        make_data_set(run, tmp_path / "made", Parrot(), [""], Request(number=1))


def test_users_rows_are_cut_and_the_noise_grows_with_them(tmp_path):
    """At most k rows of a user are counted; one more of a user changes nothing, and the noise is σ k."""
    folder = tmp_path / "run"
    folder.mkdir()
    privacy = {"unit": "who", "max_rows_per_unit": 4}
    records_of(folder_of(folder, **privacy), ["pub"] * 500, **privacy)
    lines = [{"kind": "pub", "text": "x", "who": place} for place in range(500)]
    lines += [{"kind": "cafe", "text": "x", "who": 7}] * 50
    (folder / "private.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = plan_of(folder, counted().counted)
    found = read_labels(folder, plan, counted().counted)[0].exact_counts()
    assert sum(found) == 503 and found[1] <= 4
    assert dict(plan.settings)["noise of a count (standard deviation)"] == 80
    assert plan.max_rows_per_unit == 4 and plan.charges[0].event.replaced == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    "given", [{}, {"shares": {"a": 1.0}, "counted": CountedLabels(classes=CLASSES, column="kind")}]
)
def test_labels_have_one_source_of_their_shares(given):
    with pytest.raises(ConfigError, match="give one of them"):
        Labels(template="{label}", **given)


def test_numbers_out_of_range_are_refused():
    for given in ({"number": 0}, {"number": 1, "batch_size": 0}, {"number": 1, "file_format": "csv"}):
        with pytest.raises(ConfigError):
            Request(**given)
    with pytest.raises(ConfigError, match="--count-noise"):
        CountedLabels(classes=CLASSES, column="kind", noise_multiplier=0.0)

"""Tests of dpllm.methods.predict.run: plan, charges, groups and release of a private prediction, through a recipe."""

from __future__ import annotations

import json
from collections import Counter

import datasets
import pytest
import yaml
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config.recipe_file import load_query_recipe
from dpllm.data.records import DataError
from dpllm.methods.attacks.answers import run_trials
from dpllm.methods.attacks.probes import token_probe
from dpllm.methods.predict import run as module
from dpllm.methods.predict import sampler
from dpllm.methods.predict.inputs import read_records
from dpllm.methods.predict.run import CHARGE, FREE_TEXTS, plan_prediction, predict_texts
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model
from tests.tiers import deep_case


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


@pytest.fixture
def recipe(tmp_path, model):
    """Return a function that reads a recipe: 40 records of 20 people, with changes."""
    records = [{"person": f"p{n % 20}", "text": " ".join(WORDS[n % 7 : n % 7 + 4])} for n in range(40)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))

    def read(*overrides):
        sections = {
            "model": {"name": str(model)},
            "data": {"path": str(tmp_path / "records.jsonl"), "max_length": 12},
            "privacy": {"epsilon": 2.0, "delta": 1e-3},
            "predict": {"texts": 4, "max_new_tokens": 6, "group_size": 10, "stop": None, "rows_per_pass": 4},
            "output_dir": str(tmp_path / "run"),
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
        return load_query_recipe(tmp_path / "recipe.yaml", overrides, "predict")

    return read


def carry_out(read):
    records = read_records(read)
    plan = plan_prediction(read, records.num_units)
    return plan, predict_texts(read, records, plan, lambda _: None)


@pytest.mark.parametrize("kind", ["invisible-ink", deep_case("logits")])
def test_a_release_that_verifies(recipe, kind):
    """Texts with their prompts; plan, ledger, report and card agree; ε is the target's."""
    read = recipe(f"predict.kind={kind}", 'predict.prompts=["the","one"]')
    plan, path = carry_out(read)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["the", "one"] * 2
    assert 1.99 < plan.epsilon <= 2.0
    result = verify(path.parent)
    assert result.ok, [check for check in result.checks if not check.passed]


@kills(
    "a private prediction charges fewer tokens than its texts may have",
    "dpllm/methods/predict/run.py",
    "run.charge(CHARGE, tokens.tokens)",
    "run.charge(CHARGE, 1)",
)
def test_every_token_is_charged_before_the_first_whatever_the_texts_become(recipe, monkeypatch):
    """Planted: a charge of the realised length. Each text ends at once here, and all T tokens are charged before."""
    charged = []

    def first(log_weights):
        contents = read_ledger(module.Path(recipe().output_dir) / LEDGER_FILE)
        charged.append(sum(count for _, count in contents.history))
        return 2  # the token that ends a text

    monkeypatch.setattr(sampler, "draw_index", first)
    plan, path = carry_out(recipe())
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [""] * 4
    assert charged == [6] * 4
    assert plan.charge(CHARGE).count == 6 and plan.epsilon == epsilon(plan.history, plan.delta)


def test_each_unit_is_read_for_one_group_only(recipe, monkeypatch):
    """40 records in 4 groups of 10; all of them are used once."""
    seen = []
    original = sampler.GroupSampler.text

    def noted(self, contexts, prompt, public_context=""):
        seen.append([one for unit in contexts for one in unit])
        return original(self, contexts, prompt, public_context)

    monkeypatch.setattr(sampler.GroupSampler, "text", noted)
    read = recipe()
    carry_out(read)
    everything = Counter(" ".join(WORDS[n % 7 : n % 7 + 4]) + "\n" for n in range(40))
    assert [len(group) for group in seen] == [10] * 4
    assert sum(map(Counter, seen), Counter()) == everything


def test_users_enter_with_all_their_records(recipe, monkeypatch):
    """Whole users: of each, at most k records, in one group."""
    seen = []
    monkeypatch.setattr(sampler.GroupSampler, "text", lambda self, contexts, *_: seen.append(contexts) or "")
    read = recipe(
        *("data.columns.unit=person", "privacy.max_rows_per_unit=2"),
        *("predict.group_size=5", 'predict.context="{person}: {text}"'),
    )
    plan, _ = carry_out(read)
    assert plan.num_units == 20
    people = [[{one.split(":")[0] for one in unit} for unit in group] for group in seen]
    assert all(len(unit) == 2 for group in seen for unit in group)
    assert all(len(names) == 1 for group in people for names in group)
    assert len({name for group in people for names in group for name in names}) == 20


@kills(
    "the plan of a private prediction charges one text of each group, and the groups make several",
    "dpllm/methods/predict/run.py",
    "return self.texts_of_group * self.max_new_tokens",
    "return self.max_new_tokens",
)
def test_more_texts_than_groups_cost_more(recipe):
    """Two texts of each group: twice the tokens are charged to a unit, and the target still holds."""
    one, two = (plan_prediction(recipe(f"predict.texts={texts}"), 40) for texts in (4, 8))
    assert (one.charge(CHARGE).count, two.charge(CHARGE).count) == (6, 12)
    assert max(one.epsilon, two.epsilon) <= 2.0
    assert dict(two.settings)["clip c, of a logit"] < dict(one.settings)["clip c, of a logit"]


@pytest.mark.parametrize(
    ("options", "target", "found"),
    [
        (["max_new_tokens=500", "group_size=8"], 10, ("clip c, of a logit", 0.62774)),
        (["kind=logits", "max_new_tokens=100"], 0.9, ("group size s, units", 250)),
        (["kind=logits", "max_new_tokens=500"], 0.4842, ("group size s, units", 1000)),
    ],
)
def test_the_numbers_of_the_papers(recipe, options, target, found):
    """The number that is left out follows from ε: the clip of InvisibleInk, the group size of Amin et al."""
    kept = [] if found[0].startswith("clip") else ["predict.group_size=null"]
    options = [f"predict.{option}" for option in options]
    plan = plan_prediction(recipe(*kept, *options, f"privacy.epsilon={target}", "privacy.delta=1e-6"), 50_000)
    assert dict(plan.settings)[found[0]] == pytest.approx(found[1], abs=5e-6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["privacy.epsilon=1e-7"], "cannot be reached"),
        (["predict.group_size=41"], "there are 40 units"),
        (["predict.clip=5", "predict.temperature=1"], "leave clip out"),
        (['predict.context="{name}"'], "names the column 'name'"),
        (["predict.max_new_tokens=60"], "the model sees 64"),
        (["model.adapter={r: 4}"], "leave model.task"),
        (["model=null"], "give model.name"),
    ],
)
def test_refused_before_anything_is_charged(recipe, tmp_path, overrides, words):
    """No folder, no ledger, no entry of a budget."""
    with pytest.raises(ValueError, match=words):
        carry_out(recipe(*overrides))
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_texts_is_not_charged_for(recipe, tmp_path):
    """It was found after the charge of all tokens."""
    path = tmp_path / "run" / "texts.jsonl"
    path.parent.mkdir()
    path.touch()
    with pytest.raises(ValueError, match="exists already"):
        carry_out(recipe())
    assert list(path.parent.iterdir()) == [path]


def test_the_shipped_recipe_is_planned():
    """At its ε and no more, with a clip that a text can use, for the number of records that its header names."""
    plan = plan_prediction(load_query_recipe("predict_e2e"), 42_061)
    assert 3.999 < plan.epsilon <= 4 and plan.delta < 1 / (10 * 42_061)
    assert dict(plan.settings)["clip c, of a logit"] > 1 and dict(plan.settings)[FREE_TEXTS] == 420


def test_the_command_of_the_shipped_recipe(tmp_path, model, monkeypatch):
    """`dpllm methods predict` with a small model and local records: its texts are in place; --json is one object."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"human_reference": " ".join(WORDS[n % 7 :])}) + "\n" for n in range(12))
    (tmp_path / "e2e.jsonl").write_text(rows)
    small = ["data.path=e2e.jsonl", "data.max_length=20", "predict.texts=2", "predict.group_size=6"]
    more = [f"model.name={model}", "predict.max_new_tokens=2", "predict.public_context=the", "predict.prompts=[the]"]
    command = [
        "methods",
        "predict",
        "predict_e2e",
        *small,
        *more,
        "privacy.delta=1e-3",
        "output_dir=out",
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["texts"] == "out/texts.jsonl" and 3.99 < found["epsilon"] <= 4
    assert len((tmp_path / found["texts"]).read_text().splitlines()) == 2


def test_another_plan_is_refused(recipe):
    """The charge would be that of other numbers."""
    records = read_records(recipe())
    with pytest.raises(ValueError, match="the plan does not match this recipe"):
        predict_texts(recipe(), records, plan_prediction(recipe("predict.max_new_tokens=3"), 40), lambda _: None)


@pytest.mark.parametrize("kind", ["invisible-ink", "logits"])
@pytest.mark.parametrize("unit", [[], ["data.columns.unit=person", "privacy.max_rows_per_unit=2"]])
def test_the_audit_reads_its_numbers_from_the_plan(recipe, kind, unit):
    """Clip, group and temperature in the settings are those of the event that a trial charges."""
    plan = plan_prediction(recipe(f"predict.kind={kind}", *unit), 20 if unit else 40)
    charge = plan.charge(CHARGE)
    assert run_trials(plan, token_probe(plan), 10).history == [(charge.event, charge.count)]


BASE = [{"person": f"p{n}", "text": f"note {n}", "age": 30 + n, "vitals": {"pulse": 60, "last": [1]}} for n in range(6)]
CHANGES = {
    "a fraction": {"age": 37.5},
    "no number": {"age": None},
    "another key": {"vitals": {"pulse": 67, "hiv_load": 3, "last": [1]}},
    "a nested fraction": {"vitals": {"pulse": 60.5, "last": [0.5]}},
    "no object": {"vitals": None},
}


def written(path, records):
    """Write records as files are written: a table's types are those of all records."""
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(records).to_parquet(path)
    elif path.suffix == ".csv":
        datasets.Dataset.from_list([{**one, "vitals": json.dumps(one["vitals"])} for one in records]).to_csv(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@kills(
    "a template writes other people's numbers and keys",
    "dpllm/methods/predict/inputs.py",
    "own_value(record[name])",
    "record[name]",
)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_record_changes_the_context_of_another(recipe, tmp_path, monkeypatch, change, ending):
    """A table has one type for all rows: 30 would become 30.0 for everybody, and every object get another's keys."""
    monkeypatch.setattr("dpllm.data.readers.CHUNK_BYTES", 300)  # several pieces
    found = []
    for number, records in enumerate((BASE, [*BASE[:-1], {**BASE[-1], **CHANGES[change]}])):
        path = written(tmp_path / f"{number}{ending}", records)
        read = recipe(f"data.path={path}", 'predict.context="{age}: {vitals} {text}"')
        private = read_records(read)
        found.append([private.template.of(record) for record in private.records])
    assert found[0][:-1] == found[1][:-1] and found[0][-1] != found[1][-1]
    assert found[0][0].startswith("30: {'last': [1], 'pulse': 60} note 0")


@pytest.mark.parametrize(("ending", "column"), [(".csv", "age"), (".json", "vitals")])
def test_types_that_the_hub_guesses_write_no_context(recipe, tmp_path, monkeypatch, ending, column):
    """`datasets` guesses the types of such files from all records. A local file is read record by record."""
    path = written(tmp_path / f"records{ending}", BASE)
    guessed = datasets.load_dataset(ending[1:], data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: guessed)
    with pytest.raises(DataError, match=f"predict.context names the column '{column}' of own/data, whose type was gue"):
        read_records(recipe("data.path=own/data", f"predict.context='{{{column}}}'"))
    assert read_records(recipe("data.path=own/data", "predict.context='{text}'")).num_units == 6
    read_records(recipe(f"data.path={path}", f"predict.context='{{{column}}}'"))

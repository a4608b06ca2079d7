"""`dpllm methods aggregate`: questions of a recipe, the asking of groups, and the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import ConfigError, ModelConfig
from dpllm.config.recipe_file import load_query_recipe
from dpllm.methods.aggregate import aggregate as module
from dpllm.methods.aggregate.aggregate import Asker, Limits, ask_groups, charge_name, plan_aggregate
from dpllm.methods.predict.inputs import read_records
from dpllm.methods.queries.run import Randomness
from dpllm.methods.sections import AggregateConfig, Question
from dpllm.models.load import load_tokenizer
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import BudgetError, create_budget
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model

NUMBER = {"name": "stars", "ask": "How many?", "kind": "number", "low": 1, "high": 5}
CHOICE = {"name": "side", "ask": "Which?", "kind": "choice", "answers": ["left", "right"]}
OPEN = {"name": "food", "ask": "Which food?", "kind": "open"}


def test_questions_are_read_and_written_back():
    """From mappings of a recipe, and from questions."""
    section = AggregateConfig(questions=[NUMBER, CHOICE, OPEN])
    assert AggregateConfig(questions=section.questions) == section
    assert section.questions[0] == Question(**NUMBER) and section.questions[0].low == 1.0
    assert section.questions[1].answers == ("left", "right")


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("How many?", "question 1 must be a mapping with name, ask and kind"),
        ({**NUMBER, "hihg": 5}, "question 1: unknown key 'hihg'"),
        ({"name": "stars", "kind": "open"}, "question 1: missing key 'ask'"),
        ({**OPEN, "kind": "median"}, "question 1: kind must be one of .*, got 'median'"),
        ({**OPEN, "name": "two\nlines"}, "a name of one line"),
        ({**OPEN, "low": 1}, "question 'food' of the kind 'open' has no low"),
        ({**NUMBER, "high": None}, "question 'stars' of the kind 'number' needs high"),
        ({**NUMBER, "answers": ["a", "b"]}, "of the kind 'number' has no answers"),
        ({**NUMBER, "high": 1}, "low=1 must be below high=1"),
        ({**NUMBER, "high": float("inf")}, "question 1: high must be a finite number"),
        ({**NUMBER, "low": "1"}, "question 1: low must be a finite number"),
        ({**CHOICE, "answers": ["left"]}, "answers must be a list of two texts or more"),
        ({**CHOICE, "answers": "left, right"}, "answers must be a list of two texts or more"),
        ({**CHOICE, "answers": ["left", "left"]}, "lists an answer twice"),
    ],
)
def test_what_is_no_question_is_refused(question, text):
    """By name, with the value."""
    with pytest.raises(ConfigError, match=text):
        AggregateConfig(questions=[question])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"questions": [OPEN, OPEN]}, "two questions have the name 'food'"),
        ({"questions": "food"}, "questions must be a list"),
        ({"groups": 1}, "groups"),
        ({"group_size": 0}, "group_size"),
        ({"max_words": 0}, "max_words"),
        ({"opening": 3}, "opening must be a text"),
        ({"file": "privacy_plan.json"}, "must not begin with privacy_"),
        ({"file": "answers.txt"}, "ends in .json"),
    ],
)
def test_sections_are_checked(fields, text):
    """By name."""
    with pytest.raises(ConfigError, match=text):
        AggregateConfig(**fields)


GROUPS = [
    ["the small dog", "a red house"],
    ["the old man walks over one bridge under seven clouds"],
    [],
    ["the"],
    ["a"],
]
ASK = " and the"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<u>{{ m['content'] | trim }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # an untrained model is nearly the same for every prompt
    return model, load_tokenizer(ModelConfig(name=str(folder)))


def asker(loaded, **changes):
    limits = {"records": 3, "record_tokens": 6, "max_new_tokens": 4, "rows_per_pass": 2, **changes}
    return Asker(*loaded, "records:\n", Limits(**limits))


@torch.no_grad()
def alone(loaded, row, count):
    """The likeliest tokens after a row, one row at a time, without padding and cache."""
    model, ids = loaded[0], list(row)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(row) :]


@pytest.mark.parametrize("cached", [True, False])
def test_the_answer_is_the_likeliest_continuation_of_a_groups_prompt(loaded, cached):
    """Against one row at a time; records are cut to the public number of tokens."""
    one, tokenizer = asker(loaded, cached=cached), loaded[1]
    found = one.texts(GROUPS, ASK)
    for group, text in zip(GROUPS, found, strict=True):
        ids = [token for record in group for token in tokenizer(record, add_special_tokens=False)["input_ids"][:6]]
        start, ask = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("records:\n", ASK))
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        tokens = alone(loaded, [*bos, *start, *ids, *ask], 4)
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(set(found)) > 1


@torch.no_grad()
def test_the_listed_answer_is_the_one_that_the_records_make_likelier(loaded):
    """Against one row at a time: the probability after the records over that without them."""
    one, answers = asker(loaded), ("dog", "seven clouds", "the old man")
    found = one.likeliest(GROUPS, ASK, answers)

    def score(group, answer):
        row, ids = one._row(group, ASK), one._answers(ASK, [answer])[0]
        logs_TV = loaded[0](torch.tensor([[*row, *ids]])).logits[0].log_softmax(dim=1)
        return sum(float(logs_TV[len(row) - 1 + at, token]) for at, token in enumerate(ids))

    for group, number in zip(GROUPS, found, strict=True):
        apart = [score(group, answer) - score([], answer) for answer in answers]
        assert apart[number] == pytest.approx(max(apart), abs=1e-9)
    assert len(set(found)) > 1


@kills(
    "the prompts of a pass are as long as its longest record makes them",
    "dpllm/methods/aggregate/aggregate.py",
    "self._greedy(part, self.length(ask))",
    "self._greedy(part, max(map(len, part)))",
)
def test_no_shape_depends_on_a_record(loaded, monkeypatch):
    """Every pass has the public length and number of rows, so other groups' answers cannot follow from a record."""
    shapes = []

    class Noted(module.Continuation):
        def __init__(self, model, rows, length, rows_per_pass, cached=True):
            shapes.append((len(rows), length, rows_per_pass))
            super().__init__(model, rows, length, rows_per_pass, cached)

    monkeypatch.setattr(module, "Continuation", Noted)
    found = []
    for other in (["the"] * 3, [" ".join(WORDS)] * 3, []):
        shapes.clear()
        one = asker(loaded)
        texts = one.texts([*GROUPS[:4], other], ASK)
        numbers = one.likeliest([*GROUPS[:4], other], ASK, ("dog", "seven clouds"))
        found.append((list(shapes), texts[:4], numbers[:4]))
    assert found[0] == found[1] == found[2]
    assert {length for _, length, _ in found[0][0]} == {asker(loaded).length(ASK)}


def test_a_model_whose_scores_are_not_numbers_answers_something(loaded):
    """It spoils the answer of a group, and nothing else."""

    class Broken:
        config, generation_config = loaded[0].config, loaded[0].generation_config

        def parameters(self):
            return loaded[0].parameters()

        def forward(self):
            raise NotImplementedError

        def __call__(self, **inputs):
            found = loaded[0](**inputs)
            found.logits[0] = torch.nan
            return found

    one = Asker(Broken(), loaded[1], "", Limits(records=3, record_tokens=6, max_new_tokens=2, rows_per_pass=1))
    assert len(one.texts(GROUPS, ASK)) == len(GROUPS)
    assert one.likeliest(GROUPS, ASK, ("dog", "man")) == [0] * len(GROUPS)


def test_a_chat_template_holds_records_and_question(loaded):
    """As one message; its begin is not doubled."""
    tokenizer = loaded[1]
    tokenizer.chat_template = TEMPLATE
    try:
        one = asker(loaded)
        row = one._row(["the dog"], ASK)
        text = tokenizer.decode(row)
        bos = tokenizer.bos_token or ""
        assert text.replace(" ", "") == f"{bos}<u>records:\nthedog{ASK}</u><a>".replace(" ", "")
        tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
        with pytest.raises(ConfigError, match="2 times"):
            asker(loaded)
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("changes", "ask", "answers", "text"),
    [
        ({"record_tokens": 30}, ASK, (), "the model sees 64: lower data.max_length, aggregate.group_size"),
        ({"max_new_tokens": 60}, ASK, (), "the model sees 64"),
        ({}, ASK, ("dog", "the old man walks " * 20), "the model sees 64"),
    ],
)
def test_prompts_without_room_are_refused(loaded, changes, ask, answers, text):
    """With the longest records that there may be: whether they fit says nothing about them."""
    with pytest.raises(ConfigError, match=text):
        asker(loaded, **changes).require_room([(ask, answers)])


def test_a_group_with_too_many_records_is_refused(loaded):
    """The row would be longer than the public length."""
    with pytest.raises(ValueError, match="maximum"):
        asker(loaded).texts([["the"] * 4], ASK)


TARGET = ("privacy.noise_multiplier=null", "privacy.epsilon=8")
QUESTIONS = [
    {"name": "stars", "kind": "number", "ask": " stars:", "low": 1, "high": 5},
    {"name": "animal", "kind": "choice", "ask": " the", "answers": ["dog", "man"]},
    {"name": "thing", "kind": "open", "ask": " a red"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


@pytest.fixture
def recipe(tmp_path, model):
    """Return a function that reads a recipe: 40 records of 20 people, with changes."""
    records = [{"person": f"p{n % 20}", "text": f"{WORDS[n % 7]} {n}"} for n in range(40)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))

    def read(*overrides):
        sections = {
            "model": {"name": str(model)},
            "data": {"path": str(tmp_path / "records.jsonl"), "max_length": 6},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
            "aggregate": {"groups": 20, "group_size": 2, "questions": QUESTIONS, "max_new_tokens": 3},
            "output_dir": str(tmp_path / "run"),
        }
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
        return load_query_recipe(tmp_path / "recipe.yaml", overrides, "aggregate")

    return read


def carry_out(read):
    records = read_records(read)
    plan = plan_aggregate(read, records.num_units)
    return plan, ask_groups(read, records, plan, lambda _: None)


def history(read):
    return read_ledger(Path(read.output_dir) / LEDGER_FILE).history


@pytest.fixture
def echoed(monkeypatch):
    """A model that answers with the number in the first record of a group, and votes by it."""
    monkeypatch.setattr(Asker, "texts", lambda self, groups, ask: [" ".join(group) for group in groups])
    monkeypatch.setattr(Asker, "likeliest", lambda self, groups, ask, answers: [len("".join(g)) % 2 for g in groups])


def test_a_release_that_verifies(recipe, tmp_path):
    """An answer to each question; plan, ledger, report and card agree; ε is the target's; nothing else is written."""
    plan, found = carry_out(recipe(*TARGET))
    assert json.loads((tmp_path / "run" / "answers.json").read_text()) == json.loads(json.dumps(found))
    assert list(found) == ["stars", "animal", "thing"] and set(found["animal"]["groups"]) == {"dog", "man"}
    assert 7.9 < plan.epsilon <= 8.0 and plan.epsilon_under("replace-one") == pytest.approx(plan.epsilon, abs=1e-6)
    result = verify(tmp_path / "run")
    assert result.ok, [check for check in result.checks if not check.passed]
    settings = dict(plan.settings)
    assert settings["stars: largest change of the mean by one unit"] == 4 / 20
    assert 1 < settings["thing: threshold, groups"] <= 20
    assert [path.name for path in (tmp_path / "run" / "not_for_release").iterdir()] == ["writer.json"]
    (tmp_path / "run" / "answers.json").write_text("{}")
    assert not verify(tmp_path / "run").ok


@kills(
    "questions are charged after the groups have answered",
    "dpllm/methods/aggregate/aggregate.py",
    "    for question, _ in ways:\n        run.charge(charge_name(question))\n",
    "",
)
def test_every_question_is_charged_before_a_record_reaches_the_model(recipe, echoed, monkeypatch):
    """Also those whose answers turn out empty."""
    charged = []
    monkeypatch.setattr(Asker, "texts", lambda self, groups, ask: charged.append(history(recipe())) or [""] * 20)
    plan, found = carry_out(recipe())
    assert len(charged) == 2 and all(sum(count for _, count in one) == 3 for one in charged)
    stars = found["stars"]  # in one run of 700 the noise alone looks like enough groups for a mean
    assert (stars["mean"] is None or stars["groups with a number"] > 0) and found["thing"]["groups"] == {}
    assert [charge.name for charge in plan.charges] == [f"answer to {name!r}" for name in ("stars", "animal", "thing")]
    assert epsilon(charged[0], plan.delta) == plan.epsilon


def sums_of(recipe, tmp_path, monkeypatch, groups, changed):
    """The whole numbers of each question before the noise, and their Δ; record 6 has another content."""
    sums = []

    def noted(self, numbers, noise_multiplier, change):
        sums.append((list(numbers), change))
        return [float(number) for number in numbers]

    monkeypatch.setattr(Randomness, "noisy", noted)
    monkeypatch.setattr(module, "secret_groups", lambda *_: groups)
    read = recipe(f"output_dir={tmp_path / str(len(list(tmp_path.iterdir())))}")
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    lines[6] = json.dumps({"person": "p6", "text": changed})
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    carry_out(read)
    return sums


def test_two_neighbours_through_the_public_api(recipe, echoed, tmp_path, monkeypatch):
    """A record with another content: the sums before the noise are Δ apart at most, for every question."""
    groups = list(np.arange(40).reshape(20, 2))
    first, *others = (sums_of(recipe, tmp_path, monkeypatch, groups, text) for text in ("1", "one 99999", "none", ""))
    for other in others:
        for number in (0, 1):
            assert math.dist(first[number][0], other[number][0]) <= first[number][1]
        (counts, change), (after, _) = first[2], other[2]
        assert change == math.sqrt(2) and abs(len(counts) - len(after)) <= 1 and abs(sum(counts) - sum(after)) <= 1
    assert any(first != other for other in others)


def test_each_unit_is_in_one_group_at_most(recipe, echoed, monkeypatch):
    """40 records in 20 groups of 2: all are read once for each question."""
    seen = []
    monkeypatch.setattr(Asker, "texts", lambda self, groups, ask: seen.append(groups) or ["3"] * len(groups))
    carry_out(recipe())
    for groups in seen:
        assert [len(group) for group in groups] == [2] * 20
        assert max(Counter(text for group in groups for text in group).values()) == 1
    assert seen[0] == seen[1]
    other = recipe(f"output_dir={recipe().output_dir}2")
    carry_out(other)
    assert seen[2] != seen[0]  # the division is drawn again


def test_users_enter_with_all_their_records(recipe, echoed, monkeypatch):
    """Whole users: of each, at most k records, all in one group."""
    seen = []
    monkeypatch.setattr(Asker, "texts", lambda self, groups, ask: seen.append(groups) or ["3"] * len(groups))
    read = recipe(
        *("data.columns.unit=person", "privacy.max_rows_per_unit=2", "aggregate.groups=10"),
        *('aggregate.context="{person}: {text} "', "data.max_length=4"),
    )
    plan, _ = carry_out(read)
    people = [{text.split(":")[0] for text in group} for group in seen[0]]
    assert plan.num_units == 20 and all(len(group) == 4 for group in seen[0])
    assert all(len(names) == 2 for names in people) and len(set.union(*people)) == 20


@kills(
    "each open question takes the whole share of δ for thresholds",
    "dpllm/methods/aggregate/aggregate.py",
    "/ max(num_open, 1)",
    "/ 1",
)
def test_open_questions_share_the_delta_of_their_thresholds(recipe):
    """Three of them: together a tenth of δ."""
    questions = [{"name": f"q{n}", "kind": "open", "ask": "a"} for n in range(3)]
    read = recipe(f"aggregate.questions={json.dumps(questions)}")
    plan = plan_aggregate(read, 40)
    assert sum(charge.event.hidden_mass for charge in plan.charges) == pytest.approx(0.1 * plan.delta)
    assert plan.delta == 1e-3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["aggregate.questions=[]"], "aggregate.questions is missing"),
        (["aggregate.groups=21"], "there are 40: take fewer groups"),
        (["privacy.noise_multiplier=9"], "question 'thing': an open answer is released if"),
        (['aggregate.context="{name}"'], "aggregate.context names the column 'name'"),
        (["data.max_length=40"], "the model sees 64"),
        (["model.adapter={r: 4}"], "leave model.task"),
        (["model=null"], "dpllm methods aggregate needs a pretrained public model"),
        (["data.eval=0.1"], "holds records out"),
    ],
)
def test_refused_before_anything_is_charged(recipe, tmp_path, overrides, words):
    """No folder, no ledger."""
    with pytest.raises(ConfigError, match=words):
        carry_out(recipe(*overrides))
    assert not (tmp_path / "run").exists()


def test_a_model_trained_on_private_records_is_refused(recipe, tmp_path, model):
    """Its folder has the ledger of a run."""
    (model / LEDGER_FILE).write_text("{}")
    try:
        with pytest.raises(ConfigError, match="independent"):
            carry_out(recipe())
    finally:
        (model / LEDGER_FILE).unlink()
    assert not (tmp_path / "run").exists()


def test_a_budget_that_does_not_allow_the_run_ends_it_before_the_model_reads(recipe, tmp_path, monkeypatch):
    """Nothing is asked."""
    budget = tmp_path / "budget.json"
    create_budget(budget, dataset="people", epsilon=1.0, delta=1e-2, unit="sequence", num_units=40)
    monkeypatch.setattr(Asker, "texts", lambda *_: pytest.fail("a record reached the model"))
    with pytest.raises(BudgetError):
        carry_out(recipe("privacy.dataset=people", f"privacy.budget_file={budget}"))


def test_a_file_in_the_place_of_the_answers_is_neither_replaced_nor_charged_for(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "answers.json").write_text("my own")
    with pytest.raises(ValueError, match="exists already"):
        carry_out(recipe())
    assert [(path.name, path.read_text()) for path in (tmp_path / "run").iterdir()] == [("answers.json", "my own")]


@kills(
    "a group that gave no answer is left out of the number of groups",
    "dpllm/methods/aggregate/aggregate.py",
    "if len(answers) != num_groups:",
    "if False:",
)
def test_an_answer_that_is_missing_is_refused(recipe, echoed, monkeypatch):
    """The number of groups is public, and so the noise of a mean."""
    monkeypatch.setattr(Asker, "texts", lambda self, groups, ask: ["3"] * 19)
    with pytest.raises(ValueError, match="20 groups"):
        carry_out(recipe())


def test_another_plan_is_refused(recipe):
    """The charges would be those of other questions or groups."""
    read = recipe()
    records = read_records(read)
    for other in ("aggregate.groups=10", f"aggregate.questions={json.dumps(QUESTIONS[:1])}"):
        with pytest.raises(ValueError, match="the plan does not match this recipe"):
            ask_groups(read, records, plan_aggregate(recipe(other), 40), lambda _: None)
    assert charge_name(read.options.questions[0]) == "answer to 'stars'"


def test_the_commands_plan_and_ask(recipe, tmp_path, echoed):
    """`dpllm plan` costs nothing; `dpllm methods aggregate --json` prints one object; mistakes are one line."""
    recipe()
    file = str(tmp_path / "recipe.yaml")
    planned = CliRunner().invoke(app, ["plan", file, "--json"])
    assert planned.exit_code == 0 and len(json.loads(planned.stdout)["charges"]) == 3
    assert not (tmp_path / "run").exists()
    result = CliRunner().invoke(app, ["methods", "aggregate", file, "--json"])
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)) == {"folder", "epsilon", "delta", "stars", "animal", "thing"}
    refused = CliRunner().invoke(
        app, ["methods", "aggregate", file, "aggregate.groups=30", f"output_dir={tmp_path / 'o'}"]
    )
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and not (tmp_path / "o").exists()


def test_the_shipped_recipe_is_planned():
    """At its ε and no more, and its open question can be answered, for the number of records that its header names."""
    plan = plan_aggregate(load_query_recipe("aggregate_e2e"), 42_061)
    assert 1.99 < plan.epsilon <= 2 and plan.delta < 1 / (10 * 42_061)
    assert dict(plan.settings)["food: threshold, groups"] < 400 / 4

"""The recipe and the plan of a PATE run."""

import json

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe
from dpllm.data.records import DataError
from dpllm.methods.pate.prepare import prepare
from dpllm.methods.pate.votes import CHECKS, LABELS, TOKENS
from dpllm.methods.sections import SET_BY_PATE, PateConfig
from tests.cli.test_cli import as_json, run
from tests.methods.pate.school import TEACHERS, write_recipe
from tests.mutations import kills
from tests.small_model import WORDS


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"teachers": 1}, "teachers must be at least 2"),
        ({"threshold": 30}, "threshold needs max_answers: how many votes pass the check depends on the private"),
        ({"max_answers": 30}, "max_answers belongs to threshold"),
        ({"threshold": 51, "max_answers": 3}, "threshold must be at most teachers=50, got 51"),
        ({"threshold": 30, "max_answers": 0}, "max_answers must be at least 1"),
        ({"check_noise": 0}, "check_noise must be greater than 0"),
        ({"max_prompts": 0}, "max_prompts must be at least 1"),
        ({"max_shared_records": -1}, "max_shared_records must be at least 0"),
        ({"student": "no"}, "student must be true or false"),
        ({"train": {"learning_rate": "1e-3"}}, "train.learning_rate must be a finite number"),
        ({"train": {"average": {"kind": "ema", "decay": 0.9}}}, "average is an option of the private training"),
        ({"public_prompts": ""}, "public_prompts must be a text"),
        ({"prompts_column": ""}, "prompts_column must be a text"),
        ({"prompts_split": ""}, "prompts_split must be a text"),
    ],
)
def test_values_that_cannot_be_used_are_refused(values, text):
    """By name, with the remedy."""
    with pytest.raises(ConfigError, match=text):
        PateConfig(**{"public_prompts": "public.jsonl", **values})


@pytest.mark.parametrize("section", ["train", "student_train"])
@pytest.mark.parametrize("name", SET_BY_PATE)
def test_options_that_would_show_a_teacher_are_refused(section, name):
    """Losses, checkpoints and evaluations of a teacher are private."""
    with pytest.raises(ConfigError, match=f"{section}.{name} "):
        PateConfig(public_prompts="public.jsonl", **{section: {name: None}})


def test_the_plan_charges_every_text(school):
    """N, the vote and its settings are in the plan."""
    plan = school(privacy={"noise_multiplier": 2.0}, pate={"max_prompts": 5}).plan
    assert [(charge.name, charge.count, charge.event.noise_multiplier) for charge in plan.charges] == [(LABELS, 5, 2.0)]
    assert plan.num_units == 12 and dict(plan.settings)["teachers"] == 4
    assert plan.epsilon == pytest.approx(plan.epsilon_under("replace-one"))


def test_noise_is_calibrated_to_labels_and_checks(school):
    """The target holds for both together."""
    plan = school(privacy={"noise_multiplier": None, "epsilon": 2.0}, pate={"threshold": 3.0, "max_answers": 2}).plan
    assert {charge.name: charge.count for charge in plan.charges} == {LABELS: 2, CHECKS: 6}
    assert 1.999 < plan.epsilon <= 2.0
    assert dict(plan.settings)["votes for a label, threshold"] == 3.0


@kills(
    "the public texts may hold private records",
    "dpllm/methods/pate/prepare.py",
    "    refuse_shared_records(private, recipe.data, prompts, prompts_data, most, _KEYS, recipe.privacy)\n",
    "",
)
def test_texts_that_hold_private_records_are_refused(school):
    """They would be published with their labels, by name of the recipe's keys, and without the text."""
    text = f"{WORDS[0]} {WORDS[0]} small man"
    prompts = [{"text": text.upper()}, {"text": "one bridge"}]
    with pytest.raises(DataError, match=r"pate\.public_prompts=") as refused:
        school(prompts=prompts)
    assert text not in str(refused.value)
    declared = school(prompts=prompts, pate={"max_shared_records": 1})
    assert any("Up to 1 of the private records" in point for point in declared.points)


@kills(
    "held-out private records are published with labels of teachers",
    "dpllm/data/shared_records.py",
    "    if held_out is not None and not data.eval.public:\n        own",
    "    if False:\n        own",
)
def test_texts_that_hold_held_out_records_are_refused_unless_these_are_public(school, tmp_path):
    """N does not count them, so no ε would cover their publication."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"text": "a record that was held out", "label": 1}\n')
    prompts = [{"text": "a record that was held out"}, {"text": "one bridge"}]
    with pytest.raises(DataError, match=r"held_out\.jsonl"):
        school(prompts=prompts, data={"eval": str(held_out)})
    school(prompts=prompts, data={"eval": {"path": str(held_out), "public": True}})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pate": {"teachers": 13}}, "pate.teachers=13 for 12 units"),
        ({"model": {"task": "causal_lm", "num_labels": None}}, "teachers vote for a class of a text, or for its next"),
        ({"model": {"num_labels": None}}, "the number of classes is not known"),
        ({"pate": {"train": {"max_step": 3}}}, "train.max_step is unknown"),
        ({"pate": {"public_prompts": None}}, "pate.public_prompts is missing"),
        ({"model": None}, "needs the section model"),
    ],
)
def test_recipes_without_a_vote_are_refused(school, changes, text):
    """Before anything is trained or charged."""
    with pytest.raises(ConfigError, match=text):
        school(**changes)


def test_the_plan_of_completions_charges_every_token(writing_school):
    """The most tokens of every text, or the most by vote; the public numbers of the vote are in the plan."""
    plan = writing_school(pate={"max_prompts": 2, "public_votes": 3.0}).plan
    assert [(charge.name, charge.count, charge.event.noise_multiplier) for charge in plan.charges] == [
        (TOKENS, 10, 2.0)
    ]
    settings = dict(plan.settings)
    assert (settings["tokens of a text, at most"], settings["candidates of a token"]) == (5, 8)
    assert settings["votes of the public model"] == 3.0
    assert plan.epsilon == pytest.approx(plan.epsilon_under("replace-one"))
    changed = {"max_answers": 4, "threshold": 2.0}
    plan = writing_school(privacy={"noise_multiplier": None, "epsilon": 2.0}, pate=changed).plan
    assert {charge.name: charge.count for charge in plan.charges} == {TOKENS: 4, CHECKS: 15}
    assert 1.999 < plan.epsilon <= 2.0 and dict(plan.settings)["votes for a token, threshold"] == 2.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pate": {"max_new_tokens": None}}, "pate.max_new_tokens is missing"),
        ({"pate": {"max_new_tokens": 0}}, "max_new_tokens must be"),
        ({"pate": {"candidates": 1}}, "candidates must be"),
        ({"pate": {"temperature": -1}}, "temperature must be"),
        ({"pate": {"public_votes": -1}}, "public_votes must be"),
        ({"pate": {"rows_per_pass": 0}}, "rows_per_pass must be"),
        ({"data": {"format": "chat"}}, "teachers vote for a class of a text, or for its next tokens"),
    ],
)
def test_recipes_without_a_vote_on_tokens_are_refused(writing_school, changes, text):
    """Before anything is trained or charged."""
    with pytest.raises(ConfigError, match=text):
        writing_school(**changes)


def test_the_shipped_recipe_of_completions_is_planned(tmp_path):
    """On local records: its ε and no more, with the tokens that its header names."""
    names = ("meaning_representation", "human_reference")
    for file, start in (("private.jsonl", "name"), ("public.jsonl", "place")):
        rows = [dict(zip(names, (f"{start}[{n}]", f"{start} {n} is open."), strict=True)) for n in range(450)]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [f"data.path={tmp_path / 'private.jsonl'}", f"pate.public_prompts={tmp_path / 'public.jsonl'}"]
    recipe = load_query_recipe("pate_e2e", [*more, "data.eval=0.1"], "pate")
    plan = prepare(recipe).plan
    assert 7.999 < plan.epsilon <= 8 and plan.charge(TOKENS).count == 2000
    assert plan.charge(TOKENS).event.noise_multiplier * 2**0.5 == pytest.approx(40, abs=1)
    assert load_query_recipe("pate_e2e").privacy.delta < 1 / (10 * 42_061)


def test_numbers_of_tokens_are_refused_for_classes(school):
    """They would say nothing."""
    with pytest.raises(ConfigError, match="max_new_tokens=5"):
        school(pate={"max_new_tokens": 5})


def test_a_launcher_is_refused(school, monkeypatch):
    """Several processes would each draw their own division."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without"):
        school()


def test_a_model_of_a_private_run_is_refused(school, tmp_path):
    """All teachers would depend on its records."""
    school()
    (tmp_path / "model" / "privacy_ledger.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="start_is_independent"):
        school()


def test_the_commands_plan_and_teach(tmp_path):
    """The plan costs nothing; the run says each phase, and ends with the folder."""
    recipe = write_recipe(tmp_path)
    planned = as_json(["plan", str(recipe), "pate.max_prompts=3"])
    assert planned["charges"][0]["count"] == 3 and not (tmp_path / "run").exists()
    printed = run(["methods", "pate", str(recipe), "pate.max_prompts=3", f"output_dir={tmp_path / 'other'}"])
    assert f"{TEACHERS} of {TEACHERS} teachers have voted" in printed and "labels: 3" in printed
    assert f"dpllm verify {tmp_path / 'other'}" in printed
    assert len((tmp_path / "other" / "labels.jsonl").read_text().splitlines()) == 3


def test_mistakes_are_one_line(tmp_path):
    """Also those that only the public texts show."""
    recipe = write_recipe(tmp_path)
    refused = CliRunner().invoke(
        app, ["methods", "pate", str(recipe), f"pate.public_prompts={tmp_path / 'private.jsonl'}"]
    )
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "error: pate.public_prompts=" in refused.stderr and not (tmp_path / "run").exists()

"""Recipes with ``train.trainer``: records get TRL's shapes, options are TRL's, and each runs to its report."""

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset

from dpllm.config import ConfigError, DataConfig, load_recipe
from dpllm.config.recipe import refuse_trainer
from dpllm.data.units import UnitIndex
from dpllm.report.verify import verify
from tests import tiers, trl_data
from tests.mutations import kills

FORMATS = {"sft": "prompt_completion", "dpo": "preference"}


def recipe(folder: Path, trainer: str, *overrides: str):
    """A small model, 24 records of eight people, and one recipe."""
    made = trl_data.model()
    made.save_pretrained(folder / "model")
    trl_data.tokenizer().save_pretrained(folder / "model")
    records = [dict(row) for row in trl_data.preferences(24)["prompt"]]
    for number, record in enumerate(records):
        record.update({"question": record.pop("prompt"), "answer": record["chosen"], "person": number % 8})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    settings = {
        "model": {"name": str(folder / "model")},
        "data": {
            **{"path": str(folder / "data.jsonl"), "format": FORMATS[trainer], "max_length": 48, "eval": 0.25},
            "columns": {"prompt": "question", **({"completion": "answer"} if trainer == "sft" else {})},
        },
        "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 6, "delta": 1e-3},
        "train": {
            **{"trainer": trainer, "output_dir": str(folder / "out"), "max_steps": 2, "use_cpu": True, "bf16": False},
            **{"gradient_checkpointing": False, "logging_steps": 1, "disable_tqdm": True},
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(settings))
    return load_recipe(folder / "recipe.yaml", overrides)


@pytest.mark.parametrize("trainer", [tiers.deep_case("sft"), "dpo"])
def test_a_recipe_runs_to_its_report(trainer, tmp_path, capsys):
    """Held-out records are measured before and after, and the folder verifies."""
    pytest.importorskip("trl")
    from dpllm.training import finetune

    assert finetune.run(recipe(tmp_path, trainer)) == 0
    figure = {"sft": "perplexity", "dpo": "preference accuracy"}[trainer]
    printed = capsys.readouterr().out
    assert re.search(rf"held-out {figure} +[\d.e+]+ → [\d.e+]+\n", printed)
    assert verify(tmp_path / "out").ok
    report = json.loads((tmp_path / "out" / "privacy_report.json").read_text())
    assert ("loss of a pair" in json.dumps(report)) == (trainer == "dpo")
    if trainer == "dpo":
        assert re.search(r"held-out preference accuracy +0\.5 → ", printed)


def test_columns_get_the_names_of_trl():
    """The recipe's columns, and that of users; others are left out."""
    pytest.importorskip("trl")
    from dpllm.training.trl_trainers import renamed

    def config(**values):
        return DataConfig(path="x", max_length=8, **values)

    columns = {"q": ["a"], "good": ["b"], "bad": ["c"], "who": [1], "note": ["x"]}
    data = Dataset.from_dict(columns)
    pairs = config(
        format="preference",
        columns={"prompt": "q", "chosen": "good", "rejected": "bad"},
    )
    assert renamed(data, pairs, "who").column_names == ["prompt", "chosen", "rejected", "who"]
    assert renamed(data.remove_columns("q"), pairs, None).column_names == ["chosen", "rejected"]
    answers = config(
        format="prompt_completion",
        columns={"prompt": "q", "completion": "good"},
    )
    assert renamed(data, answers, None).column_names == ["prompt", "completion"]
    with pytest.raises(ConfigError, match="text column"):
        renamed(data, pairs, "q")


@pytest.mark.parametrize(
    ("trainer", "overrides", "says"),
    [
        ("dpo", ["train.trainer=null"], "data.format='preference' needs train.trainer=dpo, and it is null"),
        ("dpo", ["data.format=text", "data.columns={}"], "data.format='text' needs train.trainer=null, and it is dpo"),
        (
            "sft",
            ["data.format=preference", "data.columns={}"],
            "data.format='preference' needs train.trainer=dpo, and it is sft",
        ),
        ("sft", ["train.trainer=kto"], "train.trainer must be one of"),
        ("sft", ["data.long_records=split"], "makes one row of each record"),
        ("dpo", ["microbatch.pack=true"], "a row of train.trainer=dpo has two sequences"),
        ("dpo", ["public_pretrain={data: {path: x, max_length: 8, format: preference}}"], "has two answers, and the"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(trainer, overrides, says, tmp_path):
    """When the recipe is read."""
    with pytest.raises(ConfigError, match=says):
        recipe(tmp_path, trainer, *overrides)


@kills(
    "options of TRL's trainers are not checked before the records are read",
    "dpllm/training/preflight.py",
    'refuse_options(args, table_of(section.get("trainer")))',
    "pass",
)
@pytest.mark.parametrize(
    ("trainer", "override", "says"),
    [
        ("dpo", "train.loss_type=aot", "loss_type='aot' cannot be used in private training: it sorts"),
        ("dpo", "train.betta=0.2", "train.betta is unknown; did you mean 'beta'"),
        ("sft", "train.beta=0.2", "train.beta is unknown"),
        ("sft", "train.assistant_only_loss='yes'", "train.assistant_only_loss must be true or false, got 'yes'"),
        ("sft", "train.packing=true", r"packing=True cannot be used.*pack_rows"),
        ("sft", "train.max_length=9", "train.max_length is not read in a recipe: use data.max_length"),
        ("sft", "train.loss_type=dft", "loss_type='dft' cannot"),
    ],
)
def test_options_are_refused_before_anything_is_read(trainer, override, says, tmp_path):
    """`dpllm plan` says the same."""
    pytest.importorskip("trl")
    from dpllm.training.preflight import check_recipe

    made = recipe(tmp_path, trainer, override)
    (tmp_path / "data.jsonl").unlink()
    for to_train in (True, False):
        with pytest.raises(ConfigError, match=says):
            check_recipe(made, to_train)


@kills(
    "a recipe with rows of TRL's shapes is audited on other rows",
    "dpllm/config/recipe.py",
    "    if trainer is not None:",
    "    if False:",
)
def test_programs_that_make_rows_themselves_refuse_such_a_recipe(tmp_path):
    """They would train on other rows and losses than the recipe says."""
    made = recipe(tmp_path, "dpo")
    with pytest.raises(ConfigError, match="losses itself"):
        refuse_trainer(made, "dpllm methods tune")
    from dpllm.audit.gradient_recipe import audit_recipe
    from dpllm.audit.prepare import prepare as prepare_audit
    from dpllm.training.suggested_run import suggested_run

    for refuses in (
        lambda: audit_recipe(made, None),
        lambda: prepare_audit(made, tmp_path / "audit", None),
        lambda: suggested_run(made, None),
    ):
        with pytest.raises(ConfigError, match="dpo_replies"):
            refuses()
    with pytest.raises(ConfigError, match=r"train\.trainer"):
        refuse_trainer(recipe(tmp_path, "sft"), "dpllm methods tune")


def test_settings_are_suggested_for_supervised_fine_tuning(tmp_path):
    """They follow from N, T and the model; its loss is a mean over tokens, as in the measurements."""
    from dpllm.training.suggested_run import suggested_run

    run = suggested_run(recipe(tmp_path, "sft"), UnitIndex.one_row_per_unit(400))
    assert {"train.average", "privacy.noise", "privacy.clip_norm"} <= {item.key for item in run.settings}
    assert run.plan.num_units == 400


def test_a_pair_counts_as_two_rows_in_the_estimate_of_memory(tmp_path):
    """`dpllm plan memory`: both sequences are in the microbatch, and each unit has twice as many."""
    pytest.importorskip("trl")
    from dpllm.planning.footprint import footprint_of_recipe
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import to_plan

    runs = {}
    for trainer in FORMATS:
        (tmp_path / trainer).mkdir()
        made = recipe(tmp_path / trainer, trainer)
        runs[trainer] = footprint_of_recipe(made, training_arguments(to_plan(made.train)), 6, "single", 1).run
    assert (runs["dpo"].rows, runs["dpo"].unit_rows) == (2 * runs["sft"].rows, 2 * runs["sft"].unit_rows)
    assert runs["dpo"].num_microbatches == runs["sft"].num_microbatches

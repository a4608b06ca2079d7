"""Tests of dpllm.training.suggested_run: the settings that a recipe gets, from public numbers only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dpllm.config import ConfigError, Recipe, load_recipe
from dpllm.data.units import UnitIndex
from dpllm.training.arguments import plan_for, training_arguments
from dpllm.training.preflight import PLAIN
from dpllm.training.settings import Setting
from dpllm.training.suggested_run import RATE, Suggested, suggested_run
from dpllm.training.weight_size import WeightSize

RECIPE = """
model: {config: {model_type: gpt2}}
data: {path: absent.jsonl, max_length: 16}
privacy: {epsilon: 8, clip_norm: 1, expected_batch_size: 10, max_batch_size: 60}
train: {max_steps: 60, output_dir: out}
"""
UNITS = UnitIndex.one_row_per_unit(200)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def run_of(path: Path, *overrides: str) -> Suggested:
    return suggested_run(load_recipe(path, overrides), UNITS)


def values(run: Suggested) -> dict[str, object]:
    return {setting.key: setting.value for setting in run.settings}


def plan_of(recipe: Recipe):
    arguments = training_arguments({**PLAIN, **recipe.train})
    return plan_for(arguments, recipe.privacy, UNITS, average=recipe.train.get("average"))


def test_pasted_into_the_recipe_the_settings_give_the_plan_that_was_suggested(path):
    """Bands, strategy and σ, at the recipe's ε, b and T; then nothing is left to change."""
    run = run_of(path)
    suggestion = run.with_rate(run.rate_for(WeightSize(0.1, 9, "of 9 weights")))
    again = load_recipe(path, suggestion.overrides)
    assert plan_of(again) == run.plan and run.plan.epsilon <= 8
    assert run.plan.noise.kind == "banded" and dict(run.plan.noise.options)["bands"] > 1
    assert (run.plan.expected_batch_size, run.plan.num_steps) == (10, 60)
    after = suggested_run(again, UNITS)
    assert after.with_rate(after.rate_for(WeightSize(0.1, 9, "of 9 weights"))).overrides == []


def test_the_rate_is_the_rule_with_the_step_ratio_of_the_plan(path):
    """r multiplies it, and is 1 for independent noise."""
    run = run_of(path)
    assert run.predicted is not None and run.step_ratio == run.predicted.step_ratio > 1.5
    rate = run.rate_for(WeightSize(0.1, 9, "of 9 weights"))
    assert rate.key == RATE and rate.value == pytest.approx(0.3 * 0.1 / 60**0.5 * run.step_ratio, rel=0.05)
    fixed = run_of(path, "privacy.epsilon=null", "privacy.noise_multiplier=2")
    assert fixed.step_ratio == 1 and values(fixed)["privacy.noise"] == "independent"
    assert "fixes σ" in next(item.reason for item in fixed.settings if item.key == "privacy.noise")


def test_another_optimizer_becomes_adamw_and_its_options_go(path):
    """The rule is for AdamW; an AdamW of another kind stays."""
    other = ["train.optim=sgd", "train.optim_args=momentum=0.9", "train.weight_decay=0.1", "train.adam_beta1=0.5"]
    other += ["privacy.epsilon=null", "privacy.noise_multiplier=2"]
    found = values(run_of(path, *other))
    assert found["train.optim"] == "adamw_torch" and found["train.optim_args"] is None
    assert found["train.weight_decay"] == 0 and found["train.adam_beta1"] == 0.9
    assert "train.optim" not in values(run_of(path, *other[4:], "train.optim=adamw_torch_fused"))


def test_a_remark_says_what_units_that_cannot_be_sampled_would_cost(path):
    """By the prediction of a plan with that noise; a recipe that has it keeps it."""
    run = run_of(path)
    (note,) = (line for line in run.with_rate(Setting(RATE, 0.1, "", 0.1)).notes if "cannot be sampled" in line)
    fixed = run_of(path, "privacy.noise=blt", "privacy.max_batch_size=null")
    assert fixed.predicted is not None and fixed.fixed_order is None
    assert run.fixed_order == pytest.approx(fixed.predicted.noise / fixed.predicted.independent, rel=0.02)
    assert f"is {run.fixed_order:.2f} of that of independent noise, and that of the suggestion 0." in note
    assert values(fixed)["privacy.noise"] == "blt"
    (reason,) = (setting.reason for setting in fixed.settings if setting.key == "privacy.noise")
    assert "its units are not sampled" in reason
    assert not any("cannot be sampled" in line for line in fixed.with_rate(Setting(RATE, 0.1, "", 0.1)).notes)


def test_a_strategy_is_kept_and_bands_are_chosen_again(path):
    """bands: auto compares them for the suggested schedule."""
    noise = values(run_of(path, "privacy.noise={kind: banded, bands: 2, strategy: free}"))["privacy.noise"]
    assert noise["strategy"] == "free" and noise["bands"] > 1


def test_rows_that_are_drawn_singly_keep_independent_noise(path):
    """Correlated noise has no accounting for them."""
    recipe = load_recipe(path, ["train.max_steps=10"])
    users = {"unit": "who", "max_rows_per_unit": 2, "sampling": "example"}
    privacy = dataclasses.replace(recipe.privacy, **users, max_batch_size=None)
    run = suggested_run(
        dataclasses.replace(recipe, privacy=privacy), UnitIndex.from_ids([number // 2 for number in range(200)], 2)
    )
    assert values(run)["privacy.noise"] == "independent" and run.step_ratio == 1


def test_discrete_noise_stays_independent(path):
    """It has no accounting with bands, and a suggestion keeps the recipe's randomness."""
    run = run_of(path, "privacy.randomness=discrete", "privacy.max_batch_size=null", "train.max_steps=10")
    assert values(run)["privacy.noise"] == "independent" and run.step_ratio == 1
    assert run.plan.randomness == "discrete" and run.plan.epsilon <= 8


def test_few_steps_have_no_warm_up(path):
    """A tenth of them would be one step with a rate of 0."""
    found = values(run_of(path, "train.max_steps=5", "privacy.epsilon=null", "privacy.noise_multiplier=2"))
    assert found["train.lr_scheduler_type"] == "constant" and found["train.warmup_steps"] == 0


def test_remarks_on_adapters_and_on_noise_near_the_epsilon_of_adam(path):
    """Two settings that are legal, and were or would be worse."""
    lora = run_of(path, "model.adapter={r: 4}", "privacy.epsilon=null", "privacy.noise_multiplier=2")
    notes = " ".join(lora.with_rate(lora.rate_for(WeightSize(0.1, 9, "x"))).notes)
    assert "modules_to_save" in notes and "adam_epsilon" not in notes
    small = run_of(path, "train.adam_epsilon=0.1", "privacy.epsilon=null", "privacy.noise_multiplier=2")
    assert "lower train.adam_epsilon" in " ".join(small.with_rate(small.rate_for(WeightSize(0.1, 9, "x"))).notes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["privacy.noise_multiplier=0", "privacy.epsilon=null"], "trains without privacy"),
        (["privacy.selection={kind: logarithmic, mean: 10}", "privacy.max_batch_size=null"], "leave privacy.selection"),
    ],
)
def test_runs_without_a_suggestion_are_refused(path, overrides, message):
    """Runs without noise, and runs of a private tuning."""
    with pytest.raises(ConfigError, match=message):
        run_of(path, *overrides)

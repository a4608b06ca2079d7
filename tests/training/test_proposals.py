"""Tests of dpllm.training.proposals: what a recipe leaves out follows from public numbers, and what it names stays."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from transformers import LlamaForCausalLM, TrainingArguments

import dpllm
from dpllm.config import ConfigError, load_recipe
from dpllm.privacy import defaults
from dpllm.training.proposals import complete_recipe, proposals
from tests.conftest import tiny_llama_config
from tests.mutations import kills

RECIPE = """
model: {{config: {{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 16, vocab_size: 300, n_positions: 512}}}}
data: {{path: {path}}}
privacy: {{epsilon: 8}}
train: {{output_dir: out}}
"""


def recipe_of(folder: Path, words: str, count: int = 400) -> str:
    """Return the file of a recipe whose records hold these words."""
    records = folder / "records.jsonl"
    lines = [json.dumps({"text": f"{words} {i}", "who": f"p{i // 2}"}) for i in range(count)]
    records.write_text("\n".join(lines), encoding="utf-8")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(path=records), encoding="utf-8")
    return str(file)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return recipe_of(tmp_path, "a note")


def values(path: str, *overrides: str) -> dict[str, object]:
    return {setting.key: setting.value for setting in proposals(path, overrides)}


@kills(
    "batch and steps of a recipe that leaves them out are those of another number of units",
    "dpllm/training/proposals.py",
    "else units.num_units",
    "else 2 * units.num_units",
)
def test_what_is_left_out_follows_from_the_number_of_units(recipe: str) -> None:
    """Whole recipe, with a reason for each value; half of the units give the values of half of them."""
    assert all(setting.reason for setting in proposals(recipe))
    found = values(recipe)
    batch, steps = defaults.batch_and_steps(400)
    assert (found["privacy.expected_batch_size"], found["train.max_steps"]) == (batch, steps)
    assert {"train.learning_rate", "privacy.noise", "train.average"} <= set(found)
    people = values(recipe, "data.columns.unit=who")
    assert (people["privacy.expected_batch_size"], people["train.max_steps"]) == defaults.batch_and_steps(200)
    whole, _ = complete_recipe(recipe)
    assert (whole.privacy.expected_batch_size, whole.train["max_steps"]) == (batch, steps)
    assert whole.train["learning_rate"] == found["train.learning_rate"] > 1e-4


def test_no_text_of_a_record_has_an_influence(tmp_path: Path, recipe: str) -> None:
    """Other records, as many: every proposal is the same."""
    other = tmp_path / "other"
    other.mkdir()
    assert values(recipe_of(other, "something that is much longer " * 9)) == values(recipe)


@pytest.mark.parametrize(
    "override",
    [
        "privacy.expected_batch_size=10",
        "train.max_steps=7",
        "train.learning_rate=0.5",
        "privacy.noise=independent",
        "train.average={kind: ema, decay: 0.5}",
    ],
)
def test_what_a_recipe_names_stays(recipe: str, override: str) -> None:
    """A key of the file or of the command line is never proposed, whatever its value."""
    key = override.partition("=")[0]
    assert key not in values(recipe, override)
    given, (whole, _) = load_recipe(recipe, [override]), complete_recipe(recipe, [override])
    section, _, name = key.partition(".")
    assert (
        whole.train[name] == given.train[name]
        if section == "train"
        else getattr(whole.privacy, name) == getattr(given.privacy, name)
    )


def test_a_recipe_with_everything_is_not_read_further(recipe: str) -> None:
    """Its records may even be missing."""
    whole = ["privacy.expected_batch_size=10", "train.num_train_epochs=2", "train.learning_rate=0.01"]
    assert proposals(recipe, [*whole, "data.path=absent.jsonl"]) == ()
    assert complete_recipe(recipe, whole) == (load_recipe(recipe, whole), ())


def test_a_rate_is_not_proposed_for_an_optimizer_without_a_rule(recipe: str) -> None:
    """The error names both keys; without noise no rule holds either, and TRL has a rate for pairs."""
    with pytest.raises(ConfigError, match=r"train\.learning_rate.*train\.optim=sgd"):
        proposals(recipe, ["train.optim=sgd"])
    assert "train.learning_rate" not in values(recipe, "privacy.noise_multiplier=0", "privacy.epsilon=null")


def test_a_trainer_takes_the_batch_of_the_rule(tmp_path: Path) -> None:
    """ε alone is a configuration."""
    rows = datasets.Dataset.from_dict(
        {name: [[3 + i % 50, 4, 5] for i in range(300)] for name in ("input_ids", "labels")}
    )
    args = TrainingArguments(str(tmp_path / "run"), max_steps=1, report_to=[], save_strategy="no", use_cpu=True)
    trainer = dpllm.DPTrainer(LlamaForCausalLM(tiny_llama_config()), args, dpllm.PrivacyConfig(epsilon=8), rows)
    assert trainer.plan.expected_batch_size == defaults.batch_and_steps(300)[0]
    assert trainer.plan.epsilon <= 8 and trainer.plan.delta == pytest.approx(1 / 3000)


@kills(
    "the rate is that of other noise than the recipe's",
    "dpllm/training/proposals.py",
    'own_noise=not lacks("privacy.noise")',
    "own_noise=False",
)
def test_the_rate_is_that_of_the_recipes_own_noise(recipe: str) -> None:
    """Independent noise takes a rate several times smaller than correlated noise."""
    own = values(recipe, "privacy.noise=independent")["train.learning_rate"]
    assert own < 0.7 * values(recipe)["train.learning_rate"]
    assert "privacy.noise" not in values(recipe, "privacy.noise=independent")


def test_a_method_beside_train_gets_no_settings_of_a_training(recipe: str) -> None:
    """A federated server has an optimizer of its own."""
    assert proposals(recipe, ["federated={}"]) == ()

"""The learning rate that overrides leave behind: the plan names that of the rule, the training the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpllm.config import load_recipe
from dpllm.planning.learning_rate import rate_words, stale_rate
from dpllm.training.settings import starting_rate
from dpllm.training.weight_size import size_of_model
from tests.cli.test_cli import as_json, run
from tests.small_model import WORDS, save_small_model

RECIPE = """
model: {{name: {folder}/model}}
data: {{path: {folder}/data.jsonl, max_length: 16}}
privacy: {{noise_multiplier: 2, clip_norm: 1, expected_batch_size: 10, noise: {noise}}}
train: {{max_steps: 64, output_dir: {folder}/out, learning_rate: {rate}}}
"""


@pytest.fixture
def recipe(tmp_path: Path):
    """Return a function that writes a recipe with a noise and a rate; None: that of the rule."""
    save_small_model(tmp_path / "model", hidden_size=16)
    lines = [json.dumps({"text": f"{WORDS[n % len(WORDS)]} {n}"}) for n in range(80)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))

    def written(noise: str = "independent", rate: float | None = None) -> Path:
        file = tmp_path / "recipe.yaml"
        file.write_text(RECIPE.format(folder=tmp_path, noise=noise, rate=rate or 1e-3))
        if rate is None:
            size = size_of_model(load_recipe(file).model)
            file.write_text(RECIPE.format(folder=tmp_path, noise=noise, rate=starting_rate(size.rms, 64)))
        return file

    return written


def test_the_plan_names_the_rate_of_the_rule_and_advises_on_one_that_is_stale(recipe):
    """A sixteenth of the steps, four times the rate; the advice has the value to set."""
    path = str(recipe())
    own = as_json(["plan", path])
    assert own["learning_rate"] == own["computed_learning_rate"]
    assert not [line for line in own["advice"] if "the rule gives" in line]
    fewer = as_json(["plan", path, "train.max_steps=4"])
    assert fewer["computed_learning_rate"] == pytest.approx(4 * own["learning_rate"], rel=0.06)
    (line,) = [line for line in fewer["advice"] if "the rule gives" in line]
    assert f"set train.learning_rate={fewer['computed_learning_rate']:g}" in line and "T = 4 steps" in line
    printed = run(["plan", path, "train.max_steps=32"])
    assert printed.startswith(f"planning {path}: loading the libraries, then the records")  # before it takes seconds
    shown = " ".join(printed.replace("│", " ").split())
    assert "by the rule for this plan" in shown and "the rule gives" not in shown  # within the range


def test_bands_change_the_rate_too(recipe):
    """Steps with more noise than those of independent noise allow a larger rate."""
    path = str(recipe())
    banded = as_json(["plan", path, "privacy.noise={kind: banded, bands: 8}"])
    assert banded["computed_learning_rate"] > 1.2 * banded["learning_rate"]


@pytest.mark.parametrize(
    "overrides",
    [["train.optim=sgd"], ["privacy.noise_multiplier=0"], ["public_pretrain={data: {path: x.txt, max_length: 8}}"]],
)
def test_the_rule_is_silent_where_it_does_not_apply(recipe, overrides, tmp_path):
    """Other optimizers, no noise, and weights that a public stage changes first."""
    values = as_json(["plan", str(recipe()), *overrides])
    assert values["computed_learning_rate"] is None


def test_many_parameters_are_not_read_for_a_remark(recipe):
    """The commands that need the size read any number."""
    model = load_recipe(recipe()).model
    assert size_of_model(model, most=10) is None and size_of_model(model, most=10**9) == size_of_model(model)
    assert rate_words(load_recipe(recipe()), None, None) == ([], [])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["train.max_steps=32"], "train.max_steps replaced"),
        (["privacy.noise=independent", "train.max_steps=32"], "privacy.noise and train.max_steps replaced"),
        (["train.max_steps=32", "train.learning_rate=1"], None),
        (["privacy.epsilon=3"], None),
        (["train.max_steps=32", "train.optim=sgd"], None),
        ([], None),
    ],
)
def test_a_training_says_that_an_override_leaves_the_rate_behind(recipe, overrides, named):
    """With the command that names another; a rate that is given as well is meant."""
    if "privacy.epsilon=3" in overrides:
        overrides = [*overrides, "privacy.noise_multiplier=null"]
    path = str(recipe(rate=0.5))
    remark = stale_rate(path, overrides, load_recipe(path, overrides))
    if named is None:
        assert remark is None
        return
    assert remark.startswith(f"note: {named}, and train.learning_rate=0.5 stays")
    assert remark.endswith(f"dpllm plan {path} {' '.join(overrides)}")

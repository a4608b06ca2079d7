"""Tests of dpllm.planning.new_recipe: of the private records only N and the columns determine a setting."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import ConfigError, DataConfig, load_recipe
from dpllm.data.records import DataError, load_train_and_eval
from dpllm.data.rows import unit_index_of
from dpllm.planning import new_recipe as module
from dpllm.planning.new_recipe import ModelAtHand, NewRecipe, Wishes, model_at_hand, new_recipe, task_of
from dpllm.training.arguments import plan_for, training_arguments
from dpllm.training.preflight import to_plan
from tests.mutations import kills
from tests.small_model import WORDS


@pytest.fixture(autouse=True)
def _computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the bands of one recipe takes a second."""
    monkeypatch.setattr(module, "suggested_run", _suggested_run)


_known: dict[str, Any] = {}


def _suggested_run(recipe: Any, units: Any, compute: Any = module.suggested_run) -> Any:
    data = dataclasses.replace(recipe.data, path="any")
    key = repr((dataclasses.replace(recipe, data=data), units.num_units))
    if key not in _known:
        _known[key] = compute(recipe, units)
    return _known[key]


@pytest.fixture(scope="module")
def here(base_model: Path) -> ModelAtHand:
    found = model_at_hand(str(base_model))
    assert found is not None
    return found


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def notes(count: int, words: int, users: int) -> list[dict[str, Any]]:
    """Records of users, of which the first has all that the others do not need."""
    return [
        {"who": f"u{max(0, number - count + users)}", "text": " ".join([*WORDS[:words], str(number)])}
        for number in range(count)
    ]


def wishes(path: Path, model: Path | str, **changes: Any) -> Wishes:
    data = DataConfig(path=str(path), max_length=2, **changes.pop("data", {}))
    return Wishes(**{"data": data, "model": str(model), "epsilon": 8.0, "output_dir": "runs/x", **changes})


def chosen(made: NewRecipe) -> list[tuple[str, Any, str]]:
    return [(item.key, item.value, item.reason) for item in made.settings]


@kills(
    "the batch of a new recipe follows the number of records of a user",
    "dpllm/planning/new_recipe.py",
    "batch, steps = defaults.batch_and_steps(num_units)",
    "batch, steps = defaults.batch_and_steps(len(records))",
)
@pytest.mark.parametrize("unit_column", [None, "who"])
def test_settings_do_not_depend_on_lengths_or_on_rows_per_user(tmp_path, base_model, here, unit_column):
    """Two data sets with the same N and other contents give the same recipe, to the letter; the look differs."""
    path = tmp_path / "notes.jsonl"
    short, long = (notes(count, words, 200) for count, words in ((300, 2), (300 if unit_column is None else 6000, 17)))
    made = [
        new_recipe(wishes(write(path, records), base_model, unit_column=unit_column), here) for records in (short, long)
    ]
    assert made[0].text() == made[1].text() and chosen(made[0]) == chosen(made[1])
    assert made[0].look.tokens[0] < made[1].look.tokens[0]
    assert made[0].population == made[1].population == (300 if unit_column is None else 200)


@pytest.mark.parametrize("unit_column", [None, "who"])
def test_the_recipe_has_the_plan_that_was_computed(tmp_path, base_model, here, unit_column):
    """Read back, with the records divided as a run divides them: N, b, T, δ, σ and the strategy of the noise."""
    path = write(tmp_path / "notes.jsonl", notes(300, 4, 200))
    made = new_recipe(wishes(path, base_model, unit_column=unit_column), here)
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text(), encoding="utf-8")
    recipe = load_recipe(file)
    records, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    units = unit_index_of(records, recipe.privacy)
    plan = plan_for(training_arguments(to_plan(recipe.train)), recipe.privacy, units, average=recipe.train["average"])
    assert plan == made.plan and plan.epsilon <= 8 and held_out is not None
    assert recipe.privacy.protects == ("sequence" if unit_column is None else "user") == plan.unit
    assert recipe.data.max_length == 64 == here.longest and recipe.data.long_records == "split"
    assert recipe.train["learning_rate"] > 1e-3 and plan.clip_norm == 0.1


def test_every_number_has_a_reason(tmp_path, base_model, here):
    """In the line above it, or above the setting that shares it."""
    made = new_recipe(wishes(write(tmp_path / "n.jsonl", notes(300, 4, 200)), base_model, unit_column="who"), here)
    reasons = {item.key: item.reason for item in made.settings}
    for key in (
        *("data.max_length", "data.eval", "privacy.epsilon", "privacy.delta", "privacy.clip_norm"),
        *("privacy.max_rows_per_unit", "privacy.expected_batch_size", "privacy.noise", "train.max_steps"),
        *("train.learning_rate", "train.average", "train.lr_scheduler_type", "microbatch.tokens"),
    ):
        assert reasons[key], key


def test_what_a_person_chose_is_kept_and_marked(tmp_path, base_model, here):
    """A length that may come from the private records is said not to be covered."""
    path = write(tmp_path / "n.jsonl", notes(300, 4, 200))
    own = {"max_length": 48, "held_out": 0.0, "adapter": True, "rank": 4, "rows": 7, "unit_column": "who"}
    made = new_recipe(wishes(path, base_model, epsilon=3.0, **own), here)
    assert made.value("data.max_length") == 48 and made.value("data.eval") is None
    assert made.value("model.adapter")["r"] == 4 and made.value("privacy.max_rows_per_unit") == 7
    assert made.plan.num_units == made.population == 200 and made.plan.target_epsilon == 3
    (length,) = (item.reason for item in made.settings if item.key == "data.max_length")
    assert "ε does not cover this choice" in length


def test_a_model_that_is_not_here(tmp_path):
    """Nothing is downloaded: an adapter, a usual size of weights, and a note."""
    path = write(tmp_path / "n.jsonl", notes(300, 4, 200))
    made = new_recipe(wishes(path, "nobody/nothing"), None)
    assert made.value("model.adapter")["r"] == 16 and made.value("model.dtype") == "auto"
    assert made.value("train.gradient_checkpointing") is True and made.value("data.max_length") == 512
    assert any("not on this machine" in note for note in made.notes) and not made.look.measured


def test_a_classification_takes_its_classes_from_people(tmp_path, base_model, here):
    """Names, or a number; never the labels of the records."""
    path = write(tmp_path / "n.jsonl", ({"text": f"one {n}", "label": "ab"[n % 2]} for n in range(200)))
    form = {"format": "classification"}
    made = new_recipe(wishes(path, base_model, data=form, classes=["a", "b"]), here)
    assert made.value("data.class_names") == ["a", "b"] and made.value("model.task") == "sequence_classification"
    assert made.value("data.long_records") == "truncate"
    with pytest.raises(ConfigError, match="name them"):
        new_recipe(wishes(path, base_model, data=form), here)
    with pytest.raises(DataError, match=r"data\.class_names"):
        new_recipe(wishes(path, base_model, data=form, classes=["a", "c"]), here)


@pytest.mark.parametrize(
    ("changes", "form", "message"),
    [
        ({"encoder_decoder": True}, "text", "give data.format=prompt_completion"),
        ({"encoder_decoder": True}, "chat", "give data.format=prompt_completion"),
        ({}, "chat", "has no chat template"),
    ],
)
def test_formats_that_a_model_cannot_have_are_refused(here, changes, form, message):
    """Before the records are read."""
    asked = wishes(Path("absent.jsonl"), "m", data={"format": form})
    with pytest.raises(ConfigError, match=message):
        task_of(asked, dataclasses.replace(here, **changes))


def test_chats_are_split_and_keep_their_column(tmp_path, base_model, here):
    """With a tokenizer that has a template."""
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "dog"}]
    path = write(tmp_path / "n.jsonl", ({"talk": said} for _ in range(200)))
    data = {"format": "chat", "columns": {"messages": "talk"}}
    with pytest.raises(ConfigError, match="has no chat template"):
        new_recipe(wishes(path, base_model, data=data), here)
    tokenizer = copy.deepcopy(here.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    made = new_recipe(wishes(path, base_model, data=data), dataclasses.replace(here, tokenizer=tokenizer))
    assert made.value("data.columns") == {"messages": "talk"} and made.value("data.long_records") == "split"


def test_an_encoder_decoder_gets_its_task(here):
    """With prompts and completions."""
    asked = wishes(Path("absent.jsonl"), "m", data={"format": "prompt_completion"})
    assert task_of(asked, dataclasses.replace(here, encoder_decoder=True)) == "seq2seq_lm"
    assert task_of(asked, here) == "causal_lm"


@pytest.mark.parametrize("unit_column", [None, "who"])
def test_few_units_are_refused(tmp_path, base_model, here, unit_column):
    """Many records of few users are few."""
    path = write(tmp_path / "n.jsonl", notes(99 if unit_column is None else 500, 3, 99))
    noun = "records" if unit_column is None else "users"
    with pytest.raises(DataError, match=f"99 {noun} are too few.*Collect more"):
        new_recipe(wishes(path, base_model, unit_column=unit_column), here)


def test_a_row_longer_than_the_model_is_refused(tmp_path, base_model, here):
    """By name of the option."""
    with pytest.raises(ConfigError, match=r"data\.max_length=65"):
        new_recipe(wishes(tmp_path / "absent.jsonl", base_model, max_length=65), here)


@kills(
    "a new recipe is computed from the weights of a private run",
    "dpllm/planning/new_recipe.py",
    "    refuse_private_start(wishes.model, wishes.start_is_independent)\n",
    "",
)
def test_a_model_that_saw_private_records_is_refused(tmp_path, base_model, here):
    """The learning rate follows its weights; the declaration is that of the run, and the recipe has it."""
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "recipe.yaml").write_text("data: {path: private.jsonl}")
    path = write(tmp_path / "n.jsonl", notes(300, 4, 200))
    with pytest.raises(ConfigError, match="may depend"):
        new_recipe(wishes(path, trained), here)
    made = new_recipe(wishes(path, trained, start_is_independent=True), here)
    assert made.value("model.start_is_independent") is True


def test_an_adapter_of_gpt2_knows_that_matrices_are_transposed(tmp_path, base_model, here):
    """PEFT warns otherwise."""
    asked = wishes(tmp_path / "absent.jsonl", base_model, adapter=True)
    made = [
        module._model_section(asked, "causal_lm", dataclasses.replace(here, transposed=one)) for one in (True, False)
    ]
    first, second = (next(item.value for item in one if item.key == "model.adapter") for one in made)
    assert first == {**second, "fan_in_fan_out": True}


def test_a_large_model_gets_an_adapter(tmp_path, base_model, here):
    """By its number of parameters, unless a person decides."""
    large = dataclasses.replace(here, parameters=2_000_000_000)
    path = write(tmp_path / "n.jsonl", notes(300, 4, 200))
    made = new_recipe(wishes(path, base_model), large)
    assert made.value("model.adapter")["r"] == 16 and made.value("train.gradient_checkpointing") is True
    whole = new_recipe(wishes(path, base_model, adapter=False), large)
    assert all(item.key != "model.adapter" for item in whole.settings)

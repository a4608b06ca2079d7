"""Every value of a recipe is checked by kind and by range when the recipe is read, before anything else happens."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from dpllm.config import ConfigError, DataConfig, PublicPretrainConfig, load_recipe, save_recipe
from dpllm.config.foreign_kinds import check_kinds
from dpllm.config.train_values import PLAIN, check_train, with_schedule
from dpllm.config.values import shown
from dpllm.config.yaml12 import write_yaml
from dpllm.mechanism.limits import MAX_STEPS
from dpllm.training.arguments import FILES, check_optimizer, private_arguments, training_arguments
from dpllm.training.preflight import check_values

RECIPE: dict[str, Any] = {
    "model": {"name": "somewhere", "adapter": {"r": 4, "target_modules": ["c_attn"]}},
    "data": {"path": "records.jsonl", "max_length": 16},
    "privacy": {"epsilon": 8, "clip_norm": 1, "expected_batch_size": 8, "delta": 1e-5},
    "train": {"output_dir": "out", "max_steps": 3},
    "public_pretrain": {"data": {"path": "public.jsonl", "max_length": 16}, "train": {"max_steps": 3}},
}
NOT_NUMBERS = ["abc", "1e-3", "", True, [1], {"a": 1}, math.nan, math.inf, -math.inf]
NOT_WHOLE = ["two", "3", True, 2.5, [1], math.nan, math.inf]
NOT_FLAGS = ["no", "yes", "true", 1, 0, 2.5, []]
POSITIVE_NUMBERS = ("learning_rate", "adam_epsilon", "num_train_epochs")
SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit", "ddp_timeout")
STEPS = ("logging_steps", "save_steps", "eval_steps")

BAD: list[tuple[str, Any]] = [
    *((f"train.{key}", value) for key in POSITIVE_NUMBERS for value in (*NOT_NUMBERS, 0, -1, -1e-3, 10**400)),
    *(("train.weight_decay", value) for value in (*NOT_NUMBERS, -0.1)),
    *((f"train.{key}", value) for key in ("adam_beta1", "adam_beta2") for value in (*NOT_NUMBERS, -0.1, 1, 1.5)),
    *(("train.warmup_steps", value) for value in (*NOT_NUMBERS, -1, 2.5)),
    *(("train.max_grad_norm", value) for value in (*NOT_NUMBERS, -1)),
    *((f"train.{key}", value) for key in SIZES for value in (*NOT_WHOLE, 0, -1)),
    *(("train.max_steps", value) for value in (*NOT_WHOLE, 0, -5, MAX_STEPS + 1, 10**12, 10**30)),
    *((f"train.{key}", value) for key in STEPS for value in (*NOT_NUMBERS, 0, -1, 2.5)),
    *(("train.seed", value) for value in (*NOT_WHOLE, -1, 2**32)),
    *((f"train.{key}", value) for key in ("bf16", "fp16", "use_cpu", "push_to_hub", "tf32") for value in NOT_FLAGS),
    *(("train.output_dir", value) for value in (None, "", "  ", 3, ["a"], "a\0b")),
    *(("train.lr_scheduler_type", value) for value in ("linaer", 3, True)),
    *(("train.save_strategy", value) for value in ("never", 3, False)),
    *(("train.report_to", value) for value in (3, [3], {"a": 1})),
    *(("train.lr_scheduler_kwargs", value) for value in ("abc", 3, [1])),
    *(("train.resume_from_checkpoint", value) for value in (3, [], "")),
    *(("public_pretrain.train.learning_rate", value) for value in (*NOT_NUMBERS, 0, -1)),
    *(("public_pretrain.train.max_steps", value) for value in (*NOT_WHOLE, 0, 10**12)),
    *(("public_pretrain.train.bf16", value) for value in NOT_FLAGS),
    *(("model.adapter.r", value) for value in ("abc", 0, -1, 2.5, True, math.nan)),
    *(("model.adapter.lora_alpha", value) for value in ("x", 0, -1, math.nan, math.inf, True)),
    *(("model.adapter.lora_dropout", value) for value in (-1, 1, 1.5, math.nan, "0.1", True)),
    *(("model.adapter.bias", value) for value in ("some", True, 3)),
    *(("model.adapter.modules_to_save", value) for value in ("head", [], [3], {"a": 1})),
    *(("model.adapter.target_modules", value) for value in ([], [3], 3)),
    *(("model.adapter.use_dora", value) for value in ("yes", 1)),
    *(("model.adapter", value) for value in ("abc", [1], 3)),
    *(("model.freeze", value) for value in ("abc", [1], 3)),
    *(("model.tie_word_embeddings", value) for value in ("no", 1, 0)),
    *(("model.num_labels", value) for value in (0, 1, "two", 2.5)),
    *(("privacy.epsilon", value) for value in (*NOT_NUMBERS, 0, -1, 1001, 1e6, 1e300)),
    *(("privacy.noise_multiplier", value) for value in (*NOT_NUMBERS, -1, 1e-4, 1e30, 1e300)),
    *(("privacy.clip_norm", value) for value in (*NOT_NUMBERS, 0, -1, 1e-300, 1e300)),
    *(("privacy.expected_batch_size", value) for value in (*NOT_WHOLE, 0, -1)),
    *(("privacy.delta", value) for value in (*NOT_NUMBERS, 0, 1, -0.1)),
    *(("privacy.seed", value) for value in (*NOT_WHOLE, -1)),
    *(("data.max_length", value) for value in (*NOT_WHOLE, 0, 1)),
    *(("data.limit", value) for value in (*NOT_WHOLE, 0)),
    *(("data.eval", value) for value in ("1e-3", True, math.nan, [0.1], 0, -0.1, 1)),
    *(("data.path", value) for value in ("", " ", 3, ["a"])),
    *(("microbatch.tokens", value) for value in ("abc", 0, 2.5, True)),
    *(("microbatch.pack", value) for value in ("no", 1)),
]


def recipe_with(tmp_path: Path, name: str, value: Any) -> Path:
    """Write a good recipe with one value replaced; the value is written as YAML writes it."""
    text = write_yaml(RECIPE)
    assert load_recipe_text(tmp_path, text) is not None
    place: Any = (raw := {key: dict(part) for key, part in RECIPE.items()})
    *sections, key = name.split(".")
    for section in sections:
        place[section] = dict(place.get(section, {}))
        place = place[section]
    place[key] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(str(raw) if isinstance(value, int) and abs(value) > 2**100 else write_yaml(raw))
    return path


def load_recipe_text(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "good.yaml"
    path.write_text(text)
    return load_recipe(path)


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r:.20}" for name, value in BAD])
def test_a_bad_value_is_refused_before_a_record_is_read(tmp_path: Path, name: str, value: Any) -> None:
    """One line that names the place, the key and the value; no folder is made."""
    path = recipe_with(tmp_path, name, value)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        check_values(load_recipe(path))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700 and not re.search(r"Input should|type=|https?:", message)
    assert re.search(r"recipe\.yaml, line \d|recipe\.yaml: is not valid YAML in line \d", message)
    assert name.split(".")[-1] in message or "valid YAML" in message
    given = value[0] if isinstance(value, list) and value else value
    assert shown(value)[:40] in message or shown(given) in message or "valid YAML" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["1:30", "020", "1_6", "0x1F", "0b1", "0o17", "1_0.5", "12:34:56"])
def test_a_number_that_readers_disagree_on_is_refused(tmp_path: Path, text: str) -> None:
    """The number is refused in a file and in an override; in quotes it is a text, which is refused for its kind."""
    good = write_yaml(RECIPE)
    path = tmp_path / "recipe.yaml"
    path.write_text(good.replace("max_steps: 3", f"max_steps: {text}", 1))
    with pytest.raises(ConfigError, match=f"{text} is read differently"):
        load_recipe(path)
    path.write_text(good)
    with pytest.raises(ConfigError, match=f"train.max_steps={text}.*read differently"):
        load_recipe(path, [f"train.max_steps={text}"])
    with pytest.raises(ConfigError, match=r"train\.max_steps"):
        load_recipe(path, [f"train.max_steps='{text}'"])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("model: " + "[" * 5000, "nests lists and mappings more than 32 deep"),
        ("x: &x [*x]", "repeats values by aliases"),
        (
            "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)),
            "repeats values by aliases",
        ),
        ("train: {null: 3}", "key None is neither a text nor a whole number"),
        ("train: {max_steps: 3, max_steps: 4}", "key 'max_steps' is repeated"),
        ("train: {1.5: 3}", "key 1.5 is neither"),
        ("train: {max_steps: !!int abc}", "not a whole number"),
        ("train: {max_steps: !!python/object:os.system x}", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("#" + "x" * 1_000_001, "a recipe has at most 1,000,000"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_no_recipe_needs_is_refused(tmp_path: Path, text: str, match: str) -> None:
    """Depth, aliases, repeated keys and keys of other kinds: one line, without recursion and without expansion."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are an error that gives their position."""
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \xe9")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_recipe(path)


def test_null_in_train_is_the_default(tmp_path: Path) -> None:
    """As elsewhere in a recipe, an empty value means the default; the folder has none and must be given."""
    path = recipe_with(tmp_path, "train.learning_rate", None)
    recipe = load_recipe(path)
    assert training_arguments({**recipe.train, "use_cpu": True}).learning_rate == 5e-5
    with pytest.raises(ConfigError, match=r"train\.output_dir must"):
        load_recipe(path, ["train.output_dir=null"])


def test_every_training_argument_has_a_kind() -> None:
    """By the table, or by the annotation of the installed transformers; a default passes, another kind does not."""
    for field in dataclasses.fields(TrainingArguments):
        if field.init and field.name not in (*PLAIN, "output_dir", "parallelism_config", *FILES):
            default = getattr(field.default, "value", field.default)
            check_kinds("train", {field.name: default}, TrainingArguments)
            with pytest.raises(ConfigError, match=rf"train\.{field.name} must be"):
                check_kinds("train", {field.name: object()}, TrainingArguments)
    assert {*PLAIN} <= {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("name", sorted({*PLAIN, "tf32"} & {name.split(".")[-1] for name, _ in BAD}))
def test_the_trainers_arguments_are_checked_with_the_same_table(tmp_path: Path, name: str) -> None:
    """TrainingArguments made in Python are refused for the values that a recipe is refused for."""
    good = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=3)
    private_arguments(good)
    values = [value for key, value in BAD if key == f"train.{name}"]
    for value in values:
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=3)
        setattr(args, name, value)
        with pytest.raises(ConfigError, match=rf"train\.{name} must be"):
            private_arguments(args)


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}}, "powr"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "train.lr_scheduler_type=cosine_with_min_lr cannot be used"),
        ({"optim": "adamw_torch", "optim_args": "nope"}, "train.optim=adamw_torch, train.optim_args=nope"),
    ],
)
def test_optimizer_and_schedule_are_built_once_before_all_else(tmp_path: Path, section, match: str) -> None:
    """Options that only their classes know are found on a single number instead of after the model."""
    with pytest.raises(ConfigError, match=match):
        check_optimizer(training_arguments({"output_dir": str(tmp_path), "use_cpu": True, **section}))


@pytest.mark.parametrize("section", [{}, {"optim": "sgd"}, {"optim": "adafactor"}, {"lr_scheduler_type": "cosine"}])
def test_ordinary_optimizers_pass(tmp_path: Path, section: dict[str, Any]) -> None:
    """Nothing that works is refused."""
    check_optimizer(training_arguments({"output_dir": str(tmp_path), "use_cpu": True, **section}))


def test_the_average_is_a_value_of_its_own():
    """Checked with the section, left out of ``TrainingArguments``, and refused in a training without privacy."""
    check_train("train", {"average": {"kind": "tail", "share": 0.3}})
    assert training_arguments({"output_dir": "out", "average": "ema", "use_cpu": True}).output_dir == "out"
    with pytest.raises(ConfigError, match=r"train\.average\.decay"):
        check_train("train", {"average": {"kind": "ema", "decay": 7}})
    with pytest.raises(ConfigError, match=r"train\.average"):
        PublicPretrainConfig(data=DataConfig(path="builtin:sotu", max_length=8), train={"average": "ema"})


@pytest.mark.parametrize(
    ("written", "kind", "warmup"),
    [
        ({}, "constant_with_warmup", 0.1),
        ({"lr_scheduler_type": None, "warmup_steps": None}, "constant_with_warmup", 0.1),
        ({"lr_scheduler_type": "constant_with_warmup"}, "constant_with_warmup", 0.1),
        ({"warmup_steps": 7}, "constant_with_warmup", 7),
        ({"warmup_steps": 0}, "constant_with_warmup", 0),
        ({"lr_scheduler_type": "linear"}, "linear", None),
        ({"lr_scheduler_type": "constant"}, "constant", None),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 0.2}, "cosine", 0.2),
        ({"max_steps": 1}, "constant_with_warmup", None),
    ],
)
def test_a_private_training_without_a_schedule_is_constant_after_a_warm_up(
    tmp_path: Path, written: dict[str, Any], kind: str, warmup: float | None
) -> None:
    """Values that are written stay, those of the public training too, and the stored recipe has the default."""
    recipe = load_recipe_text(tmp_path, write_yaml({**RECIPE, "train": {"output_dir": "out", **written}}))
    assert recipe.train["lr_scheduler_type"] == kind and recipe.train.get("warmup_steps") == warmup
    assert recipe.public_pretrain is not None and recipe.public_pretrain.train == {"max_steps": 3}
    assert with_schedule(recipe.train) == recipe.train
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe
    args = training_arguments({**recipe.train, "use_cpu": True, "report_to": "none"})
    assert args.lr_scheduler_type == kind and args.weight_decay == 0

"""Mistakes that can be found without the data are refused before the data are read, in training and in plan."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, Trainer, TrainingArguments
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import load_recipe
from dpllm.config.output_folder import check_output_folder
from dpllm.config.values import ConfigError
from dpllm.config.yaml12 import write_yaml
from dpllm.engines import EngineError
from dpllm.ghost.refusals import GhostError
from dpllm.mechanism.discrete import DiscreteNoise
from dpllm.models.inputs import num_positions
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model, refuse_mismatch
from dpllm.training import finetune
from dpllm.training.arguments import training_arguments
from dpllm.training.preflight import check_recipe
from tests.test_recipes import tiny_model

pytestmark = pytest.mark.usefixtures("rows_not_compared")

LORA = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def write_recipe(tmp_path: Path, model: Path, **train: Any) -> Path:
    """Write a recipe whose data do not exist: an error about anything else came before they were looked for."""
    raw = {
        "model": {"name": str(model), "adapter": LORA},
        "data": {"path": str(tmp_path / "no_such_records.jsonl"), "max_length": 16},
        "privacy": {"noise_multiplier": 1, "clip_norm": 1, "expected_batch_size": 4, "delta": 1e-3},
        "train": {"output_dir": str(tmp_path / "out"), "max_steps": 2, "use_cpu": True, **train},
        "public_pretrain": {
            "data": {"path": str(tmp_path / "no_such_text.txt"), "max_length": 16},
            "train": {"max_steps": 1, "use_cpu": True},
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(write_yaml(raw))
    return path


BAD_OPTIONS = [
    (["train.fp16=true"], r"train\.fp16"),
    (["train.gradient_accumulation_steps=2"], r"train\.gradient_accumulation_steps=2"),
    (["train.load_best_model_at_end=true", "train.eval_strategy=steps", "train.save_strategy=steps"], "load_best"),
    (["train.max_step=3"], "train.max_step is unknown; did you mean 'max_steps'"),
    (["train.optim=adamw_trch"], "adamw_trch"),
    (["train.optim_args=nope"], "train.optim_args=nope"),
    (["train.lr_scheduler_type=cosine_with_min_lr"], "lr_scheduler_type=cosine_with_min_lr"),
    (["train.report_to=tensorbord"], "report_to=tensorbord is unknown; did you mean 'tensorboard'"),
    (["public_pretrain.train.max_step=3"], r"public_pretrain\.train\.max_step is unknown"),
    (["public_pretrain.train.optim_args=nope"], r"public_pretrain\.train\.optim"),
    (["privacy.budget_file=/nowhere/b.json", "privacy.dataset=x"], "/nowhere/b.json cannot be read"),
    (["model.adapter.target_modules=[c_attn, q_prj]"], "target_modules names 'q_prj'"),
    (["model.adapter.modules_to_save=[nope]"], "modules_to_save names 'nope'"),
    (["model.adapter.rr=3"], "LoraConfig has no argument 'rr'; did you mean 'r'"),
    (["train.save_strategy=best"], "train.save_strategy=best follows exact evaluation results"),
    (["train.metric_for_best_model=loss"], "train.metric_for_best_model=loss follows exact evaluation results"),
    (["train.eval_strategy=epoch"], "train.eval_strategy=epoch evaluates during the training"),
    (["train.eval_on_start=true"], "train.eval_on_start=True evaluates during the training"),
    (["public_pretrain.train.eval_strategy=epoch"], r"public_pretrain\.train\.eval_strategy=epoch evaluates"),
    (
        ["privacy.clipping={kind: groups, parameters: {heads: '*lm_head*', rest: '*'}}"],
        "the group heads contains no trainable parameter",
    ),
    (
        ["privacy.clipping={kind: groups, parameters: {down: '*lora_A*'}}"],
        "lora_B.default.weight is in no group, so nothing would bound it",
    ),
    (["model.freeze=['nope.*']"], "no parameter name matches 'nope"),
    (["data.max_length=513"], "data.max_length allows rows of 513 tokens, but the model has 512 positions"),
    (["public_pretrain.data.max_length=513"], "public_pretrain.data.max_length allows rows of 513"),
    (["model.task=seq2seq_lm"], "model.task=seq2seq_lm"),
    (["train.output_dir=/dev/null"], "/dev/null is a file"),
    (["train.output_dir=/dev/null/x"], "a part of its path is a file"),
    (["train.output_dir=/proc/nope"], r"train\.output_dir=/proc/nope cannot be used"),
    ([f"train.output_dir={'x' * 300}"], "the name is too long. Shorten it"),
]


@pytest.mark.parametrize(("overrides", "match"), BAD_OPTIONS, ids=[words[0][:40] for words, _ in BAD_OPTIONS])
def test_options_are_refused_before_the_data_in_training_and_plan(
    tmp_path: Path, model: Path, monkeypatch, capsys, overrides: list[str], match: str
) -> None:
    """One line and exit code 2 from both programs; nothing is written."""
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path, model)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--config", str(path), *overrides])
    with pytest.raises(SystemExit) as ended:
        finetune.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    plan = CliRunner().invoke(app, ["plan", str(path), *overrides])
    assert plan.exit_code == 2
    for text in (said, plan.stderr):
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "Traceback" not in text
        assert "no_such" not in errors[0], "the data were looked for first"
        assert re.search(match, errors[0])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_good_recipe_passes_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    """All checks pass on a sound recipe; the folder that was tried out is removed again."""
    recipe = load_recipe(write_recipe(tmp_path, model))
    assert check_recipe(recipe) == []
    assert not (tmp_path / "out").exists()


def test_discrete_noise_is_refused_before_the_data_where_it_has_no_accounting(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under DeepSpeed, which forms no complete sum, and beyond its limit of trained parameters, in run and plan."""
    discrete = ["privacy.randomness=discrete"]
    recipe = load_recipe(write_recipe(tmp_path, model), discrete)
    assert check_recipe(recipe) == check_recipe(recipe, to_train=False) == []

    def under_deepspeed(section: dict[str, Any]) -> TrainingArguments:
        made = training_arguments(section)
        made.deepspeed_plugin = SimpleNamespace()  # the library would set up its processes
        return made

    with monkeypatch.context() as changed:
        changed.setattr("dpllm.training.preflight.training_arguments", under_deepspeed)
        for to_train in (True, False):
            with pytest.raises(EngineError, match="DeepSpeed never"):
                check_recipe(recipe, to_train=to_train)
    hub = load_recipe(write_recipe(tmp_path, Path("some/model")), discrete)
    assert "at most 1,099,511,627,776 trained parameters" in check_recipe(hub, to_train=False)[1]
    monkeypatch.setattr(DiscreteNoise, "max_entries", 10)
    for to_train in (True, False):
        with pytest.raises(ValueError, match="most 10"):
            check_recipe(recipe, to_train=to_train)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "mixtral", "num_local_experts": 2, "router_jitter_noise": 0.1}, "MixtralSparseMoeBlock"),
        ({"model_type": "mixtral", "num_local_experts": 2}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_a_model_that_cannot_be_clipped_is_refused_before_the_data(
    tmp_path: Path, model: Path, config: dict[str, Any], match: str | None
) -> None:
    """Without weights, so before a public training of hours, and in plan."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = json.dumps({**config, **sizes, "num_key_value_heads": 2, "vocab_size": 300})
    recipe = load_recipe(
        write_recipe(tmp_path, model),
        ["model.name=null", "model.adapter=null", f"model.tokenizer={model}", f"model.config={made}"],
    )
    for to_train in (True, False):
        if match is None:
            assert check_recipe(recipe, to_train) == []
            continue
        with pytest.raises(GhostError, match=match):
            check_recipe(recipe, to_train)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_plan_reads_a_recipe_for_a_gpu_where_there_is_none(tmp_path: Path, model: Path) -> None:
    """bf16 and tf32 are options of the machine that trains."""
    path, data = write_recipe(tmp_path, model), tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps({"text": f"record {number}"}) + "\n" for number in range(40)))
    gpu = ["train.use_cpu=false", "train.bf16=true", "train.tf32=true", f"data.path={data}"]
    result = CliRunner().invoke(app, ["plan", str(path), *gpu])
    assert result.exit_code == 0, result.output
    with pytest.raises(ConfigError, match=r"bf16|tf32"):
        check_recipe(load_recipe(path, gpu))


def test_plan_says_which_model_it_could_not_look_at(tmp_path: Path, model: Path) -> None:
    """A model on the Hub is not downloaded for a plan, and the plan says so."""
    recipe = load_recipe(write_recipe(tmp_path, model), ["model.name=someone/some-model", "model.adapter=null"])
    assert check_recipe(recipe, to_train=False) == [
        "the model someone/some-model is not a folder here, so its parts and its tokenizer are not checked"
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_layer": 1}, "parameters in the files do not exist in the model"),
        ({"n_layer": 3}, "parameters are not in the files and would be random"),
        ({"n_embd": 32}, "mismatch|shape"),
        ({"n_embd": 0}, "config.json"),
        ({"n_head": 0}, "config.json"),
        ({"n_embd": "abc"}, "config.json"),
        ({"model_type": "llama", "intermediate_size": 32}, "would be random"),
        ({"model_type": "nope"}, "nope"),
    ],
)
def test_a_folder_that_is_not_what_its_config_says_is_refused(tmp_path: Path, change: dict, match: str) -> None:
    """transformers would fill the missing parts with random numbers and drop the others."""
    folder = tiny_model(tmp_path / "model", "gpt2")
    tokenizer = load_tokenizer(load_recipe(write_recipe(tmp_path, folder)).model)
    values = json.loads((folder / "config.json").read_text())
    values.update(change)
    for other in ("num_hidden_layers", "hidden_size", "num_attention_heads", "architectures"):
        values.pop(other, None)
    (folder / "config.json").write_text(json.dumps(values))
    recipe = load_recipe(write_recipe(tmp_path, folder), ["model.adapter=null"])
    with pytest.raises(ConfigError, match=match) as caught:
        load_base_model(recipe.model, tokenizer)
    assert "\n" not in str(caught.value)


def test_parts_of_another_shape_are_refused_where_the_library_goes_on() -> None:
    """transformers raises by itself today; asked to ignore it, it fills such parts with random numbers."""
    info = {"mismatched_keys": [("weight", (2, 2), (3, 3))]}
    with pytest.raises(ConfigError, match="1 parameters"):
        refuse_mismatch(nn.Linear(2, 2), info, "somewhere", new_head=False)


def test_a_language_model_without_its_head_is_refused() -> None:
    """Only the head of a classifier may be new; its layers, and the head of a language model, would be random."""
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8, tie_word_embeddings=False)
    with torch.device("meta"):
        model, classifier = GPT2LMHeadModel(config), GPT2ForSequenceClassification(config)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        refuse_mismatch(model, {"missing_keys": ["lm_head.weight"]}, "somewhere", new_head=False)
    refuse_mismatch(classifier, {"missing_keys": ["score.weight"]}, "somewhere", new_head=True)
    with pytest.raises(ConfigError, match=r"transformer\.h\.0\.ln_1\.weight"):
        refuse_mismatch(classifier, {"missing_keys": ["transformer.h.0.ln_1.weight"]}, "somewhere", new_head=True)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage"])
def test_damaged_weights_are_one_line(tmp_path: Path, damage: str) -> None:
    """A broken safetensors file is named, with the remedy."""
    folder = tiny_model(tmp_path / "model", "gpt2")
    tokenizer = load_tokenizer(load_recipe(write_recipe(tmp_path, folder)).model)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"\xff" * 100}[damage])
    recipe = load_recipe(write_recipe(tmp_path, folder), ["model.adapter=null"])
    with pytest.raises(ConfigError, match="folder again"):
        load_base_model(recipe.model, tokenizer)


@pytest.mark.parametrize("text", ["{}", "[]", "abc", ""])
def test_a_damaged_tokenizer_is_found_before_the_data(tmp_path: Path, text: str) -> None:
    """`tokenizer.json` that describes no tokenizer is one line."""
    folder = tiny_model(tmp_path / "model", "gpt2")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        check_recipe(load_recipe(write_recipe(tmp_path, folder)))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError(), KeyboardInterrupt()])
def test_only_unusable_options_are_mistakes(tmp_path: Path, model: Path, error: BaseException, monkeypatch) -> None:
    """A GPU without free memory is not a mistake in train.optim, which a user would then change in vain."""

    def optimizer(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(optimizer))
    with pytest.raises(type(error)):
        check_recipe(load_recipe(write_recipe(tmp_path, model)))


def test_a_classifier_may_have_a_new_head(tmp_path: Path, model: Path) -> None:
    """A classifier on a language model has a head that no file holds; that alone is as it should be."""
    overrides = ["model.adapter=null", "model.task=sequence_classification", "model.num_labels=3"]
    recipe = load_recipe(write_recipe(tmp_path, model), [*overrides, "data.format=classification"])
    base = load_base_model(recipe.model, load_tokenizer(recipe.model))
    assert prepare_model(base, recipe.model).config.num_labels == 3


def test_positions_of_tables_only() -> None:
    """Learned tables bound the rows, RoBERTa's behind its padding; rotary models have no such table."""
    assert num_positions(nn.ModuleDict({"position_embeddings": nn.Embedding(514, 4, padding_idx=1)})) == 512
    assert num_positions(nn.ModuleDict({"wte": nn.Embedding(100, 4)})) is None


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    """The message gives both sizes in units that people read."""
    with pytest.raises(ConfigError, match=r"has .*iB of free space, but the model and its reports need 888 PiB|TiB"):
        check_output_folder("train.output_dir", tmp_path / "a" / "b", needed=10**18)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_another_process_makes_and_removes_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a run try the folder out at the same time, and undo it."""
    make, calls = Path.mkdir, []

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:  # the other one made it now, and has removed it when it is looked at
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    check_output_folder("train.output_dir", tmp_path / "out")
    assert len(calls) == 2 and not (tmp_path / "out").exists()

"""No code of a model's folder runs unless somebody asks for it, and then the report says so."""

import ast
import builtins
import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import TrainingArguments
from typer.testing import CliRunner

import dpllm
from dpllm import DPTrainer, PrivacyConfig
from dpllm.cli.program import app
from dpllm.config import ConfigError, ModelConfig
from dpllm.models.load import load_model, load_tokenizer, skeleton
from dpllm.planning.model_shape import shape_of_model
from tests import trl_data

KNOWN = ("Peft", "GenerationConfig", "(type(tokenizer")  # classes that run no code of a folder

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def coded(tmp_path, monkeypatch):
    """A folder of a model with code, the mark that the code leaves, and a person who answers every question by yes."""
    folder, mark = tmp_path / "coded", tmp_path / "ran"
    trl_data.model().save_pretrained(folder)
    trl_data.tokenizer().save_pretrained(folder)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder, mark


def trainer(model, output, **options):
    args = TrainingArguments(str(output), max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    privacy = PrivacyConfig(noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, expected_batch_size=8)
    rows = Dataset.from_dict({"text": trl_data.texts(16)})
    return DPTrainer(model, args, privacy, rows, **options)


def recipe(folder, tmp_path, **model):
    """Write a recipe for a folder, and return its path."""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in trl_data.texts(40)))
    (tmp_path / "r.yaml").write_text(
        json.dumps(
            {
                "model": {"name": str(folder), **model},
                "data": {"path": str(tmp_path / "t.jsonl"), "max_length": 32},
                "privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 8},
                "train": {"output_dir": str(tmp_path / "run"), "max_steps": 1, "use_cpu": True},
            }
        )
    )
    return str(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda folder, _: trainer(str(folder), folder / "run"), id="a Trainer with a name"),
        pytest.param(
            lambda folder, _: trainer({"name": str(folder), "task": "causal_lm"}, folder / "run"),
            id="a Trainer with a description",
        ),
        pytest.param(
            lambda folder, _: load_model(ModelConfig(name=str(folder)), trl_data.tokenizer()), id="the weights"
        ),
        pytest.param(lambda folder, _: skeleton(ModelConfig(name=str(folder))), id="the configuration"),
        pytest.param(lambda folder, _: shape_of_model(ModelConfig(name=str(folder))), id="the memory of a plan"),
    ],
)
def test_a_folder_with_code_is_refused_by_its_cause_and_nothing_runs(coded, tmp_path, load):
    """Also on a terminal where transformers would ask, and somebody answers without reading."""
    folder, mark = coded
    with pytest.raises(ConfigError, match="code"):
        load(folder, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("command", ["plan", "train", "generate", "init"])
def test_no_command_runs_the_code(coded, tmp_path, command):
    """Whatever the command says, the code did not run."""
    folder, mark = coded
    written = recipe(folder, tmp_path)
    words = {
        "plan": ["plan", written],
        "train": ["train", written],
        "generate": ["generate", str(folder), "--unverified", "--prompt", "a"],
        "init": ["init", str(tmp_path / "t.jsonl"), f"model={folder}", "--yes"],
    }[command]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert not mark.exists()


def test_code_of_a_tokenizer_does_not_run_either(coded):
    folder, mark = coded
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="code"):
        load_tokenizer(ModelConfig(name=str(folder)))
    assert not mark.exists()


def test_a_recipe_that_asks_for_it_runs_the_code_and_the_report_says_so(coded, tmp_path):
    folder, mark = coded
    model = load_model(ModelConfig(name=str(folder), trust_remote_code=True), trl_data.tokenizer())
    assert mark.exists()
    made = trainer(model, tmp_path / "run", processing_class=trl_data.tokenizer())
    made.train()
    assert any("OwnForCausalLM" in point for point in made.privacy_report()["open_points"])


def test_a_class_of_transformers_has_no_such_point(tmp_path):
    made = trainer(trl_data.model(), tmp_path / "run", processing_class=trl_data.tokenizer())
    made.train()
    assert not any("code" in point for point in made.privacy_report()["open_points"])


def test_every_call_says_whether_code_may_run():
    """transformers asks on a terminal if nobody says."""
    silent = []
    for file in Path(dpllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                if called.endswith((".from_pretrained", ".from_config")) and not called.startswith(KNOWN):
                    words = ast.unparse(node)
                    if "trust_remote_code" not in words and "NO_CODE" not in words:
                        silent.append(f"{file.name}: {words}")
    assert not silent

"""Tests of dpllm.planning.new_recipe and of names of models: facts are read from files; nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from dpllm.config import ConfigError, ModelConfig
from dpllm.models.load import is_path, load_tokenizer, require_folder, skeleton
from dpllm.planning.new_recipe import model_at_hand
from tests.small_model import save_small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


def with_model(folder: Path, target: Path, model: object) -> str:
    """A folder with this model and the tokenizer of another one."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    model.save_pretrained(target)  # type: ignore[attr-defined]
    return str(target)


def test_the_facts_of_a_folder(folder):
    """Size, length of a row, and tokenizer."""
    found = model_at_hand(str(folder))
    assert found is not None and not found.encoder_decoder and not found.transposed and found.has_weights
    assert found.longest == 64 and not found.has_template
    expected = sum(p.numel() for p in skeleton(ModelConfig(name=str(folder))).parameters())
    assert found.parameters == expected > 1000


def test_gpt2_stores_its_matrices_transposed_and_t5_has_two_stacks(folder, tmp_path):
    """Facts on which an adapter's options and the task depend."""
    sizes = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=8, n_head=2, n_layer=1, n_positions=32, **sizes))
    found = model_at_hand(with_model(folder, tmp_path / "gpt2", gpt2))
    assert found is not None and found.transposed and found.longest == 32
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=400, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    found = model_at_hand(with_model(folder, tmp_path / "t5", t5))
    assert found is not None and found.encoder_decoder


def test_a_model_of_the_hub_that_is_not_here_is_not_asked_for():
    """Nothing is downloaded; `dpllm init` says so."""
    assert model_at_hand("nobody/nothing") is None


@pytest.mark.parametrize("name", ["./nomodel", "../nomodel", "/no/model", "~/nomodel", "a/b/c", "models/"])
@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_path_without_a_folder_is_not_taken_for_a_hub_id(name, what):
    """The message speaks of the folder and says from where it was looked for."""
    assert is_path(name)
    with pytest.raises(ConfigError, match=rf"the {what} '.*' cannot be loaded: there is no such folder \(seen from"):
        require_folder(what, name)
    with pytest.raises(ConfigError, match="such folder"):
        load_tokenizer(ModelConfig(name=name))
    with pytest.raises(ConfigError, match="such folder"):
        skeleton(ModelConfig(name=name))


def test_a_name_of_the_hub_gets_both_remedies():
    """It might be either."""
    assert not is_path("openai-community/gpt2") and not is_path("gpt2")
    require_folder("model", "nobody/nothing")
    with pytest.raises(ConfigError, match=r"'nobody/nothing' cannot be loaded.* Hub"):
        load_tokenizer(ModelConfig(name="nobody/nothing"))


def test_files_adapters_and_damaged_folders_are_no_models(tmp_path, folder, monkeypatch):
    """Each with its remedy; libraries do not complete the home folder, so the whole path is named."""
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        require_folder("model", str(tmp_path / "weights.bin"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    with pytest.raises(ConfigError, match="LoRA adapter"):
        model_at_hand(str(adapter))
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="folder again"):
        model_at_hand(str(damaged))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"path, {tmp_path}/adapter"):
        require_folder("model", "~/adapter")

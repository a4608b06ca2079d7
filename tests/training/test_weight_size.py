"""Tests of dpllm.training.weight_size: the size of trained weights from files equals that of the loaded model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dpllm.config import ConfigError, ModelConfig
from dpllm.models.load import load_model, load_tokenizer
from dpllm.training import weight_size
from dpllm.training.weight_size import size_of_model, size_of_parameters
from tests.small_model import save_small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)


def rms_of(model: torch.nn.Module) -> float:
    """Reference: all trained entries that are not zero, in one vector."""
    flat = torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad and p.any()])
    return math.sqrt(float(flat.square().mean()))


def loaded(section: ModelConfig) -> torch.nn.Module:
    return load_model(section, load_tokenizer(section))


@pytest.mark.parametrize("freeze", [[], ["*embed*", "*mlp*"]])
def test_files_and_loaded_model_agree(folder, freeze, monkeypatch):
    """Frozen weights are left out; a tensor is read in pieces."""
    monkeypatch.setattr(weight_size, "_ENTRIES", 100)
    section = ModelConfig(name=str(folder), freeze=freeze)
    model, size = loaded(section), size_of_model(section)
    assert size.rms == pytest.approx(rms_of(model), rel=1e-6)
    assert size.entries == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert size_of_parameters(model.parameters(), "here").rms == pytest.approx(size.rms, rel=1e-6)
    assert f"{size.entries:,} trained weights in {folder}" in size.words


def test_tied_weights_count_once_and_bfloat16_is_read(tmp_path):
    """As in the files of most pretrained models."""
    from tests.conftest import tiny_llama_config

    model = LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    size = size_of_model(ModelConfig(name=str(tmp_path)))
    assert size.rms == pytest.approx(rms_of(model), rel=1e-6)
    assert size.entries == sum(p.numel() for p in model.parameters())


def test_several_files_are_read_by_their_index(folder, tmp_path):
    """As large models are saved."""
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    index = {name: f"part{number % 2}.safetensors" for number, name in enumerate(names)}
    for part in set(index.values()):
        save_file({name: weights[name] for name in names if index[name] == part}, tmp_path / part, {"format": "pt"})
    place = tmp_path / "model.safetensors.index.json"
    place.write_text(json.dumps({"weight_map": index}))
    expected = size_of_model(ModelConfig(name=str(folder)))
    assert size_of_model(ModelConfig(name=str(tmp_path))).rms == pytest.approx(expected.rms, rel=1e-9)
    place.write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        size_of_model(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("kind", [True, "gaussian"])
def test_new_adapters_have_the_size_of_their_initialisation(folder, kind):
    """One factor of LoRA is zero at the start and left out."""
    peft = {"r": 16, "target_modules": "all-linear", "init_lora_weights": kind}
    section = ModelConfig(name=str(folder), adapter=peft)
    torch.manual_seed(0)
    assert size_of_model(section).rms == pytest.approx(rms_of(loaded(section)), rel=0.05)
    with_head = ModelConfig(name=str(folder), adapter={**peft, "modules_to_save": ["embed_tokens", "lm_head"]})
    assert size_of_model(with_head).rms == pytest.approx(rms_of(loaded(with_head)), rel=0.05)


def test_adapters_of_unknown_size_are_refused(folder):
    """Their factors come from the weights."""
    section = ModelConfig(name=str(folder), adapter={"target_modules": "all-linear", "init_lora_weights": "pissa"})
    with pytest.raises(ConfigError, match="pissa"):
        size_of_model(section)


def test_a_new_model_has_the_size_of_its_initialisation():
    """There is no file."""
    config = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 48, "n_head": 2, "n_layer": 2}
    size = size_of_model(ModelConfig(config=config))
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    )
    assert size.rms == pytest.approx(rms_of(model), rel=0.1)
    assert "new weights" in size.words


def test_without_usable_files_there_is_one_line(folder, tmp_path):
    """No download is tried; damaged, missing, foreign and zero weights are named."""
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        size_of_model(ModelConfig(name="nobody/nothing-of-this-name"))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"nothing")
    section = ModelConfig(name=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        size_of_model(section)
    save_file({"other": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="hold none"):
        size_of_model(section)
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in weights.items()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="all zero, or not finite"):
        size_of_model(section)

"""`dpllm plan memory` names the modules that run row by row: those that a clipper finds in its first call."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from dpllm import GhostClipper, per_sequence_loss
from dpllm.config import ModelConfig
from dpllm.models.load import prepare_model
from dpllm.planning.model_shape import row_by_row_modules, row_by_row_words
from tests.mutations import kills

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
LLAMA = {"model_type": "llama", **HEADS}
MAMBA = {"model_type": "mamba2", **SIZES, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8}
GPT_OSS = {"model_type": "gpt_oss", **HEADS, "num_local_experts": 4}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def by_clipper(model: ModelConfig) -> list[str]:
    """The modules that run row by row in a call of the model with its weights."""
    settings = dict(model.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, use_cache=False)
    real = prepare_model(AutoModelForCausalLM.from_config(config, experts_implementation="eager"), model)
    ids = torch.randint(3, 300, (3, 7))
    clipper = GhostClipper(real, 1.0)
    clipper.backward(per_sequence_loss(real(input_ids=ids).logits, ids))
    paths = sorted(clipper.row_by_row)
    clipper.remove()
    return paths


@kills(
    "the plan does not know that a function without a tap runs row by row",
    "dpllm/planning/model_shape.py",
    "            ladder.discover(lambda: prepared(input_ids=ids))\n",
    "",
)
@pytest.mark.parametrize(
    ("config", "peft", "expected"),
    [
        (LLAMA, None, 0),
        (LLAMA, LORA, 0),
        (MAMBA, None, 2),
        (GPT_OSS, None, 2),
        (GPT_OSS, LORA, 0),
        ({**LLAMA, "model_type": "diffllama"}, None, 2),
    ],
)
def test_the_modules_are_those_that_the_clipper_finds(config, peft, expected):
    """Mamba's mixers, sinks of attention, and the parameters of differential attention have no taps."""
    model = ModelConfig(config=config, adapter=peft)
    paths = row_by_row_modules(model)
    assert paths == by_clipper(model) and len(paths) == expected


def test_a_model_that_needs_values_is_not_known(monkeypatch):
    """Its code reads a number of a tensor; a plan is made all the same."""
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, input_ids: self.lm_head.weight.sum().item())
    assert row_by_row_modules(ModelConfig(config=LLAMA)) is None
    assert "unknown" in row_by_row_words(None, 4)

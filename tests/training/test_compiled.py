"""Training with compiled blocks: the same weights as without, what is compiled in the log, nothing left behind."""

import logging
import os

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, TrainingArguments

from dpllm import DPTrainer, PrivacyConfig
from dpllm.config import ConfigError
from dpllm.config.recipe import ModelConfig
from tests.conftest import tiny_llama_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def trained(folder, **compiler):
    """Train with fixed seeds; return the model and its parameters."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    ids = torch.randint(3, 61, (24, 6), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = DPTrainer(
        model=LlamaForCausalLM(tiny_llama_config()),
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **compiler,
        ),
        privacy=PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=8, delta=1e-3, seed=5),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
    )
    trainer.train()
    return trainer.model, [p.detach().clone() for p in trainer.model.parameters()]


def test_the_weights_are_those_without_compilation(tmp_path, caplog):
    """And the log has what is compiled, once; accelerate compiles nothing."""
    _, expected = trained(tmp_path / "eager")
    with caplog.at_level(logging.INFO, "dpllm"):
        model, found = trained(tmp_path / "compiled", torch_compile=True, torch_compile_backend="aot_eager")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    told = [record.getMessage() for record in caplog.records if "blocks are compiled" in record.getMessage()]
    assert len(told) == 1 and f"{len(model.model.layers)} blocks" in told[0]
    assert not any(name.startswith("ACCELERATE_DYNAMO") for name in os.environ)


def test_the_key_of_a_recipe():
    """Blocks, or nothing."""
    assert ModelConfig(name="m").compile == "none"
    assert ModelConfig(name="m", compile="blocks").compile == "blocks"
    with pytest.raises(ConfigError, match="compile must be"):
        ModelConfig(name="m", compile="model")

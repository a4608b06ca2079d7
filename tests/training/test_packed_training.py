"""Packed rows through the Trainer: the same weights as from padded ones, and no padding on the way."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from dpllm import per_sequence_loss
from dpllm.config import ConfigError
from tests.conftest import tiny_llama_config
from tests.training.test_trainer import arguments, privacy, rows, trainer, update_of, users


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_give_the_same_update(tmp_path, checkpointing):
    """Two steps at σ = 0, over microbatches of tokens: the model sees no padding, and the weights become the same."""
    updates, tokens = [], []
    for name, packed in (("padded", False), ("packed", True)):
        torch.manual_seed(0)
        folder = tmp_path / name
        run = trainer(
            folder,
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, seed=3),
            args=arguments(folder, max_steps=2, optim="sgd", gradient_checkpointing=checkpointing),
            max_tokens_per_microbatch=60,
            pack_rows=packed,
        )
        seen = []
        run.model.register_forward_pre_hook(lambda _, a, kw, s=seen: s.append(kw["input_ids"].shape), with_kwargs=True)
        updates.append(update_of(run))
        tokens.append(list(seen))
        assert run.evaluate(rows(8))["eval_loss"] > 0  # of padded rows, by the model's own attention
    assert float((updates[1] - updates[0]).norm()) <= 1e-4 * float(updates[0].norm())
    assert all(shape[0] == 1 and shape[1] <= 60 for shape in tokens[1]) and any(s[0] > 1 for s in tokens[0])


def test_packed_rows_of_users_and_of_an_adapter(tmp_path):
    """A user's rows over several packed microbatches, LoRA factors, evaluation in between: the sum of padded rows."""
    updates = []
    for name, packed, size in (("padded", False, 5), ("packed", True, 5), ("small", True, 2)):
        torch.manual_seed(0)
        folder = tmp_path / name
        model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), LoraConfig(r=2, target_modules="all-linear"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        run = trainer(
            folder,
            model,
            rows(who=[n % 8 for n in range(64)]),
            users(noise_multiplier=0.0, clip_norm=0.05, expected_batch_size=8),
            arguments(folder, per_device_train_batch_size=size, max_steps=1, optim="sgd", eval_strategy="steps"),
            eval_dataset=rows(8),
            pack_rows=packed,
        )
        updates.append(update_of(run))
    for update in updates[1:]:
        assert float((update - updates[0]).norm()) <= 2e-3 * float(updates[0].norm()) > 0


def test_models_that_can_not_be_packed_are_refused_before_training(tmp_path):
    """By name; nothing is charged."""
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration"):
        trainer(tmp_path, T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_ff=24)), pack_rows=True)
    with pytest.raises(ConfigError, match="compute_loss_func"):
        trainer(tmp_path, compute_loss_func=per_sequence_loss, pack_rows=True)
    assert not list(tmp_path.iterdir())

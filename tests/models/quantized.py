"""Small models with random weights, stored in 4 or 8 bits by bitsandbytes, with LoRA on every linear layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dpllm import per_sequence_loss
from dpllm.config import ModelConfig
from dpllm.data.rows import train_tokenizer
from dpllm.models.load import load_model, load_tokenizer

KINDS = ("nf4", {"kind": "nf4", "double": False}, "fp4", "int8")
SIZES = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "roberta": {
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
        "max_position_embeddings": 66,
    },
}


def save_model(folder: Any, kind: str = "llama", spread: float = 0.1) -> str:
    """Write a model with larger weights than usual, so that a gradient depends on them, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the small dog sees a red house"] * 9, vocab_size=280, max_length=64)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), initializer_range=spread, **ids, **SIZES[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def adapted(folder: str, quantization: Any, **changes: Any) -> Any:
    """Load it as a recipe does; both factors of LoRA are random, so both have a gradient."""
    peft = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **changes.pop("adapter", {})}
    model = ModelConfig(name=folder, quantization=quantization, adapter=peft, **changes)
    torch.manual_seed(1)
    loaded = load_model(model, load_tokenizer(model))
    for module in loaded.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return loaded.train()


def losses(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of each row."""
    return per_sequence_loss(model(input_ids=inputs["ids"]).logits, inputs["ids"])


def batch(rows: int = 4, tokens: int = 9) -> dict[str, torch.Tensor]:
    """Random tokens."""
    return {"ids": torch.randint(3, 250, (rows, tokens), generator=torch.Generator().manual_seed(2))}

"""In place of pretrained weights and real text: a tiny model with random weights and a few made-up records."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import torch

from dpllm.data.rows import train_tokenizer

WORDS = ["a", "rose", "is", "no", "river", "and", "the", "garden", "grows"]


def make_material(folder: Path, records: int = 60) -> Path:
    """The folders that the stages expect, made by the first that asks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    weights, text = folder / "stories15M", folder / "e2e"
    if text.exists():
        return folder
    text.mkdir(parents=True)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280, max_length=64)
    tokenizer.save_pretrained(weights)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(weights)
    pick = random.Random(0)
    for name in ("trainset", "devset"):
        with open(text / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["mr", "ref"])
            for _ in range(records):
                writer.writerow([" ".join(pick.choices(WORDS, k=pick.randint(1, most))) for most in (3, 12)])
    return folder

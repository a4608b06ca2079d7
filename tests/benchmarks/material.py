"""What several tests of the benchmarks need: the program as a module, a tiny model, and files of records."""

from __future__ import annotations

import csv
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from transformers import LlamaForCausalLM

from dpllm.data.rows import train_tokenizer
from tests.conftest import tiny_llama_config

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["a", "rose", "is", "no", "river", "and", "the", "garden", "grows"]


def program(name: str) -> ModuleType:
    """Return the program benchmarks/<name>.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def save_model(folder: Path, max_length: int) -> None:
    """Save a tiny model and its tokenizer."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280, max_length=max_length)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": max(64, max_length)}
    LlamaForCausalLM(tiny_llama_config(**sizes)).save_pretrained(folder)


def write_records(path: Path, pick: random.Random, count: int, most: Sequence[int]) -> None:
    """Write a CSV file of prompts and references, each of at most as many words as ``most`` says for its column."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mr", "ref"])
        for _ in range(count):
            writer.writerow([" ".join(pick.choices(WORDS, k=pick.randint(1, n))) for n in most])

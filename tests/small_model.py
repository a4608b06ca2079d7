"""A small untrained model with its tokenizer, in a folder as people have them, and the words that it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from dpllm import TrainingRows
from dpllm.data.rows import train_tokenizer
from dpllm.data.units import UnitIndex
from tests.conftest import tiny_llama_config

SMALL_QUICKSTART = [  # less data, and a smaller model
    "data.limit=300",
    "public_pretrain.data.limit=40",
    "public_pretrain.train.max_steps=1",
    "public_pretrain.train.use_cpu=true",
    "model.config.hidden_size=24",
    "model.config.num_hidden_layers=1",
    "model.tokenizer_vocab_size=300",
]
WORDS = [
    "the",
    "small",
    "dog",
    "sees",
    "a",
    "red",
    "house",
    "and",
    "the",
    "old",
    "man",
    "walks",
    "over",
    "one",
    "bridge",
    "under",
    "seven",
    "clouds",
]


def save_small_model(folder: Path, hidden_size: int) -> Path:
    """Write the model and its tokenizer, and return the folder."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=320, max_length=64)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "max_position_embeddings": 64}
    LlamaForCausalLM(tiny_llama_config(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_by_number(rows: Sequence[Any], collate: Callable[..., Any], lengths: Any = None, **more: Any) -> TrainingRows:
    """Rows that are units of their own, of one token each unless ``lengths`` says otherwise."""
    return TrainingRows(
        units=more.pop("units", None) or UnitIndex.one_row_per_unit(len(rows)),
        lengths=np.ones(len(rows), dtype=np.int64) if lengths is None else np.array(lengths),
        fetch=lambda numbers: [rows[int(number)] for number in numbers],
        collate=collate,
        **{"max_rows": 4, **more},
    )

"""Count operations and memory of private training of a mixture of experts, beside the same work without privacy.

    python benchmarks/experts.py

The model is a Mixtral of 2 layers with 8 experts, of which each token takes 2, in float32 on the CPU; B rows of T
tokens. Both sides are one forward and backward pass of a loss per row; the private one clips each row and forms the
sum. Without privacy the experts run as transformers' "eager" implementation, which counts the same operations as its
others.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from counting import LiveBytes, count_flops
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from dpllm import GhostClipper, per_sequence_loss

SHAPES = ((8, 128), (4, 256), (2, 512))
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
MODES = {
    "full": None,
    "LoRA r=8 on experts": {"target_modules": [], "target_parameters": EXPERTS},
    "LoRA r=8 on attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}


def model_of(mode: str) -> nn.Module:
    """The model of a mode, with random weights."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        use_cache=False,
        experts_implementation="eager",
    )
    model = MixtralForCausalLM(config)
    settings = MODES[mode]
    return (model if settings is None else get_peft_model(model, LoraConfig(r=8, **settings))).train()


def peak_of(model: nn.Module, step: Callable[[], None]) -> int:
    """Peak bytes of live tensors, weights included."""
    live = LiveBytes()
    for tensor in (*model.parameters(), *model.buffers()):
        live.watch(tensor)
    with live:
        step()
    return live.peak


def counted(mode: str, rows: int, tokens: int, private: bool) -> tuple[int, int]:
    """FLOPs and peak bytes of one step, after one that is not counted."""
    model = model_of(mode)
    ids_BT = torch.randint(0, 1000, (rows, tokens), generator=torch.Generator().manual_seed(1))

    def losses() -> Tensor:
        return per_sequence_loss(model(input_ids=ids_BT).logits, ids_BT)

    clipper = GhostClipper(model, 1.0) if private else None

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if clipper is None:
            losses().sum().backward()
        else:
            clipper.backward(losses())

    step()
    flops = sum(count_flops(step).values())
    model.zero_grad(set_to_none=True)
    return flops, peak_of(model, step)


def main() -> None:
    """Print a table."""
    warnings.simplefilter("ignore")
    print("| mode | B×T | GFLOP without privacy | FLOPs | MB without privacy | memory |")
    print("|---|---|---:|---:|---:|---:|")
    for mode in MODES:
        for rows, tokens in SHAPES:
            (flops, bytes_), (private_flops, private_bytes) = (
                counted(mode, rows, tokens, private) for private in (False, True)
            )
            print(
                f"| {mode} | {rows}×{tokens} | {flops / 1e9:.2f} | {private_flops / flops:.3f} | "
                f"{bytes_ / 1e6:.0f} | {private_bytes / bytes_:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

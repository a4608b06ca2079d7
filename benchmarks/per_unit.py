"""One unit at a time (privacy.gradients=per_unit): how exact is it for all structures, and how much slower than ghost?

    python benchmarks/per_unit.py
    OMP_NUM_THREADS=1 python benchmarks/per_unit.py --times --compiled

The first table has ten tiny models of transformers with random weights, and a module for which no rule exists: it
returns a tuple, has an autograd Function of its own, and sums over the rows of a call. The clipped sum and the norms of
single rows in float32 are compared with a float64 loop of single rows. "ghost" says whether `GhostClipper` takes it.

The second table (``--times``) has processor seconds of one microbatch of equal rows on a small Llama: ghost, one unit
at a time, the same compiled (``--compiled``, after its compilation), and forward and backward without privacy. The best
of several rounds, in turn.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    RwkvConfig,
)
from transformers.models.auto import AutoModelForCausalLM

from dpllm import GhostClipper, GhostError, PerUnitClipper, per_sequence_loss

VOCABULARY, ROWS, TOKENS = 61, 5, 12
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_BLOCK = {**_SIZES, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: LlamaConfig(**_BLOCK),
    "GPT-2, tied head": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **_NO_DROPOUT_GPT2),
    "Gemma, tied head": lambda: GemmaConfig(**_BLOCK, head_dim=8, num_key_value_heads=1),
    "GPT-NeoX": lambda: GPTNeoXConfig(**_BLOCK),
    "OPT": lambda: OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, dropout=0.0,
        word_embed_proj_dim=32,
    ),
    "BLOOM": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "Falcon": lambda: FalconConfig(**_SIZES, num_attention_heads=4),
    "Mixtral, experts": lambda: MixtralConfig(**_BLOCK, num_key_value_heads=2, num_local_experts=4),
    "Mamba": lambda: MambaConfig(**_SIZES, state_size=8),
    "RWKV": lambda: RwkvConfig(**_SIZES, attention_hidden_size=32, intermediate_size=48, context_length=64),
}  # fmt: skip
_NO_DROPOUT_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Cube(torch.autograd.Function):
    """x³, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x³."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient."""
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


class Pair(nn.Module):
    """Returns a tuple, and uses one parameter twice."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.inner, self.gate = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors."""
        return Cube.apply(self.inner(x)) * self.gate, (x * self.gate).sum(-1, keepdim=True)


class Odd(nn.Module):
    """A tied table, a block that returns a tuple, and a mean over the rows of a call."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.table, self.block = nn.Embedding(VOCABULARY, 32), Pair()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        one, other = self.block(self.table(input_ids))
        return (one + one.mean(0, keepdim=True) + other) @ self.table.weight.T


def losses(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Return one loss per row (B,)."""
    given = model(input_ids=ids_BT)
    return per_sequence_loss(given if isinstance(given, Tensor) else given.logits, ids_BT)


def flat(tensors: Any) -> Tensor:
    """Return one vector in float64."""
    return torch.cat([t.flatten().double() for t in tensors])


def errors(model: nn.Module) -> tuple[float, float, str]:
    """Return the relative error of the clipped sum, the largest of a norm, and whether ghost takes the model."""
    ids_BT = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    wide = copy.deepcopy(model).double()
    parameters = list(wide.parameters())
    grads = [
        torch.autograd.grad(losses(wide, ids_BT[n : n + 1]).sum(), parameters, materialize_grads=True)
        for n in range(ROWS)
    ]
    rows = torch.stack([flat(one) for one in grads])
    norm_B = rows.norm(dim=1)
    clip_norm = float(norm_B.median()) * 1.000001
    expected = (clip_norm / norm_B).clamp(max=1) @ rows
    clipper = PerUnitClipper(model, clip_norm)
    found = [clipper.backward(losses(model, ids_BT[n : n + 1])) for n in range(ROWS)]
    total = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    clipper.remove()
    norms = torch.cat([one.norms for one in found]).double()
    for p in model.parameters():
        p.grad = None
    try:
        ghost = GhostClipper(model, clip_norm)
        try:
            ghost.backward(losses(model, ids_BT))
        finally:
            ghost.remove()
        taken = "exact"
    except (GhostError, RuntimeError):
        taken = "refused"
    return float((total - expected).norm() / expected.norm()), float((norms / norm_B - 1).abs().max()), taken


def seconds(rounds: int, steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the least processor seconds of each step."""
    best = dict.fromkeys(steps, float("inf"))
    for number in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if number:  # the first round warms up
                best[name] = min(best[name], time.process_time() - begin)
    return best


def times(tokens: int, rows: int, rounds: int, compiled: bool) -> dict[str, float]:
    """Return the seconds of each way for a microbatch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=704
    )
    model = AutoModelForCausalLM.from_config(config)
    ids_BT = torch.randint(0, 2048, (rows, tokens))
    one, other, third = (copy.deepcopy(model) for _ in range(3))
    clippers = GhostClipper(one, 1.0), PerUnitClipper(other, 1.0)  # once: the first batch has further checks

    def plain() -> None:
        losses(third, ids_BT).sum().backward()
        third.zero_grad()

    def ghost() -> None:
        clippers[0].backward(losses(one, ids_BT))
        one.zero_grad()

    def per_unit() -> None:
        for row in range(rows):
            clippers[1].backward(losses(other, ids_BT[row : row + 1]))
        other.zero_grad()

    steps = {"without privacy": plain, "ghost": ghost, "one unit at a time": per_unit}
    best = seconds(rounds, steps)
    if compiled:
        other.compile()
        best |= seconds(rounds, {"one unit at a time, compiled": per_unit})
    return best


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true", help="also measure times")
    parser.add_argument("--compiled", action="store_true", help="and those of a compiled model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| model | error of the clipped sum | largest error of a norm | ghost |\n|---|---|---|---|")
    for name, make in [*CONFIGS.items(), ("tuple, own autograd Function, coupled rows", None)]:
        torch.manual_seed(0)
        model = (
            (Odd() if make is None else AutoModelForCausalLM.from_config(make(), experts_implementation="eager"))
            .float()
            .train()
        )
        total, norm, ghost = errors(model)
        print(f"| {name} | {total:.1e} | {norm:.1e} | {ghost} |", flush=True)
    if not given.times:
        return
    print("\n| rows × tokens | way | processor seconds | of ghost |\n|---|---|---|---|")
    for tokens in (64, 512):
        found = times(tokens, given.rows, given.rounds, given.compiled)
        for name, value in found.items():
            print(f"| {given.rows} × {tokens} | {name} | {value:.2f} | {value / found['ghost']:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""Measure every row of the target table: the cost of privacy for models of one and eight billion parameters.

    python benchmarks/targets.py                                    # all rows; on CUDA time and memory
    python benchmarks/targets.py --rows 1 4 --markdown targets.md --json targets.json

Llama architecture, random weights, bfloat16, SDPA attention, vocabulary 32 000 with an untied head; one microbatch,
forward to clipped sum, no noise, no optimizer, as in throughput.py. Ratios: speed is non-private / private (1 is
parity, more is better), memory is private / non-private (less is better).

On CUDA the whole models run. Elsewhere two shallower models of the same width run at the full batch and length, and
their figures are extended to the whole depth. Under activation checkpointing the deeper one is the whole model of 1B:

FLOPs   operations are linear in the depth, so that the extended count is exact
memory  bytes of live tensors. Their peak is the largest of several sums, each linear in the depth, so that an extended
        figure is an estimate; it is exact at the whole depth
values  products of matrices and attention return zeros at once instead of being computed: only shapes decide which
        operations run and which tensors are kept. Everything else runs unchanged
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

sys.path.insert(0, str(Path(__file__).resolve().parent))

from counting import FORMULAS
from methods import LAYERS, OURS, PEERS, PLAIN, TWICE
from throughput import Settings, count_flops, machine, measure, peak_memory, prepare

DEPTHS = (2, 3)  # of the shallow models; the peak of a single layer is at another place than that of many
# Under checkpointing few layers have their peak at the loss, and many at the end of the backward pass.
DEPTHS_RECOMPUTED = (8, 16)
WIDTHS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}


@dataclass(frozen=True)
class Target:
    """A row of the table; the targets are None where the row is for comparison."""

    model: str
    mode: str
    batch: int
    tokens: int
    checkpointing: str = "none"
    method: str = OURS
    speed: float | None = None
    memory: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the row."""
        kept = "" if self.checkpointing == "none" else ", checkpointing"
        kept += {TWICE: ", two passes", LAYERS: ", per-layer clipping"}.get(self.method, "")
        return f"Llama {self.model}, {'LoRA r=16' if self.mode == 'lora' else 'full'}, {self.batch}×{self.tokens}{kept}"

    @property
    def layers(self) -> int:
        """Depth of the whole model."""
        return WIDTHS[self.model]["num_hidden_layers"]

    @property
    def depths(self) -> tuple[int, int]:
        """Depths of the models that are counted."""
        return DEPTHS if self.checkpointing == "none" else DEPTHS_RECOMPUTED

    def settings(self, layers: int, device: str, rounds: int, dtype: str = "bfloat16") -> Settings:
        """Return the settings for throughput.py at this depth."""
        config = {
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32_000,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            **WIDTHS[self.model],
            "num_hidden_layers": layers,
        }
        return Settings(
            config=json.dumps(config),
            mode=self.mode,
            rank=16,
            batch=self.batch,
            tokens=self.tokens,
            dtype=dtype,
            checkpointing=self.checkpointing,
            device=device,
            rounds=rounds,
            warmup=3,
        )


TARGETS = (
    Target("1B", "full", 8, 512, speed=0.95, memory=1.10),
    Target("1B", "full", 8, 1024, speed=0.92, memory=1.10),
    Target("8B", "full", 4, 512, speed=0.96, memory=1.15),
    Target("8B", "lora", 8, 512, speed=0.985, memory=1.03),
    Target("8B", "lora", 8, 512, "reentrant", speed=0.985, memory=1.05),
    Target("1B", "full", 8, 512, "reentrant"),
    Target("1B", "full", 8, 512, "reentrant", LAYERS, memory=1.10),
    Target("1B", "full", 4, 2048, "reentrant"),
    Target("1B", "full", 4, 2048, "reentrant", TWICE, memory=1.15),
    Target("1B", "full", 4, 2048, "reentrant", LAYERS, memory=1.10),
    Target("1B", "lora", 8, 512),
    Target("1B", "lora", 8, 512, "reentrant", memory=1.05),
)


class WithoutProducts(TorchDispatchMode):
    """Products and attention return zeros of the right shape, or write them; in-place sums return their argument."""

    SKIPPED = frozenset(flop_registry) | frozenset(FORMULAS)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Skip operations that have a FLOP formula, run all others."""
        kwargs = kwargs or {}
        if func._overloadpacket not in self.SKIPPED:
            return func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = kwargs[argument.name] if argument.name in kwargs else args[position]
                return written.zero_() if argument.name == "out" else written
        shapes = func(*tree_map_only(Tensor, _meta, args), **tree_map_only(Tensor, _meta, kwargs))
        return tree_map_only(Tensor, lambda like: torch.zeros_like(like, device="cpu"), shapes)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def counted(settings: Settings, method: str = OURS, peers: Sequence[str] = ()) -> dict[str, tuple[int, int] | str]:
    """FLOPs and peak bytes of a step without and with privacy, without computing the products.

    Args:
        settings: the settings.
        method: this package's.
        peers: libraries of others, counted in the same way.

    Returns:
        The figures under `PLAIN`, `OURS` and the peers' names; of a method that fails on the model, the reason.
    """
    short = replace(settings, batch=2, tokens=4, warmup=1)  # the one-off checks of a first batch, with all values
    steps, refused, _ = prepare(short, [PLAIN, method, *peers])
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 1000, (settings.batch, settings.tokens), generator=generator)
    figures: dict[str, tuple[int, int] | str] = {OURS if name == method else name: why for name, why in refused.items()}
    for name, step in steps.items():
        step.forget()
        with WithoutProducts():
            flops = sum(count_flops(lambda step=step: step.run(ids_BT)).values())
            peak = peak_memory(step, ids_BT)  # separately: the FLOP counter keeps gradients of recomputed modules
        figures[OURS if name == method else name] = flops, peak
        step.forget()
    return figures


def extended(shallow: int, deeper: int, depths: tuple[int, int], layers: int) -> int:
    """A figure that is linear in the depth, at `layers`, from those at two depths."""
    return shallow + (layers - depths[0]) * (deeper - shallow) // (depths[1] - depths[0])


def measured(settings: Settings, method: str = OURS) -> dict[str, Any]:
    """Times and memory of a step without and with privacy. FLOPs are not counted, because Triton's are not seen.

    If the private step fails, the figures are those of the step without privacy, and ``error`` gives the reason.
    """
    results = measure(settings, [PLAIN, method], counting=False)
    base, own = results[PLAIN], results[method]
    if own.refused:
        only = {"peak_bytes": {PLAIN: base.peak_bytes}, "ms": {PLAIN: base.times_ms}}
        return {"speed_ratio": None, "flops": None, "error": own.refused, **only}
    return {
        "speed_ratio": base.median_ms / own.median_ms,
        "flops": None,
        "peak_bytes": {PLAIN: base.peak_bytes, OURS: own.peak_bytes},
        "ms": {PLAIN: base.times_ms, OURS: own.times_ms},
    }


def peer(settings: Settings, name: str, plain_bytes: int) -> dict[str, Any]:
    """The same of a library of others, beside steps without privacy of its own.

    Args:
        settings: the settings.
        name: one of `PEERS`, or another method of throughput.py.
        plain_bytes: peak without privacy, measured separately: memory that another library keeps after its step counts
            during the steps beside it.

    Returns:
        Ratios and times, or only the reason why there are none.
    """
    if name in PEERS and importlib.util.find_spec(PEERS[name]) is None:
        return {"refused": "not installed"}
    results = measure(settings, [PLAIN, name], counting=False)
    base, theirs = results[PLAIN], results[name]
    if theirs.refused:
        return {"refused": theirs.refused}
    return {
        "speed_ratio": base.median_ms / theirs.median_ms,
        "memory_ratio": theirs.peak_bytes / plain_bytes,
        "peak_bytes": theirs.peak_bytes,
        "ms": {PLAIN: base.times_ms, name: theirs.times_ms},
    }


def free_memory() -> None:
    """Of models that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_row(target: Target, device: str, rounds: int) -> dict[str, Any]:
    """The ratios of one row; of others where they are installed and a GPU is there."""
    row: dict[str, Any] = {"name": target.name, **asdict(target)}
    if torch.device(device).type == "cuda":
        settings = target.settings(target.layers, device, rounds)
        row |= measured(settings, target.method)
        for name in PEERS:
            free_memory()
            row[name] = peer_cell(peer(settings, name, row["peak_bytes"][PLAIN]))
    else:
        row |= counted_row(target, device, rounds)
    flops, peak = row["flops"], row["peak_bytes"]
    row["flop_ratio"] = flops[PLAIN] / flops[OURS] if flops and OURS in flops else None
    row["memory_ratio"] = peak[OURS] / peak[PLAIN] if OURS in peak else None
    free_memory()
    return row


def counted_row(target: Target, device: str, rounds: int) -> dict[str, Any]:
    """The counts of one row, of the whole depth; FLOPs and memory of others where they are installed."""
    installed = [name for name, package in PEERS.items() if importlib.util.find_spec(package) is not None]
    shallow, deeper = (
        counted(target.settings(layers, device, rounds), target.method, installed) for layers in target.depths
    )
    row: dict[str, Any] = dict.fromkeys(PEERS, "not installed")
    flops, peak = {}, {}
    for name in (PLAIN, OURS, *installed):
        if isinstance(shallow[name], str):
            row["error" if name == OURS else name] = shallow[name]
            continue
        flops[name], peak[name] = (
            extended(one, more, target.depths, target.layers)
            for one, more in zip(shallow[name], deeper[name], strict=True)
        )
        if name in PEERS:
            row[name] = f"{flops[PLAIN] / flops[name]:.3f} / {peak[name] / peak[PLAIN]:.3f}"
    return row | {"speed_ratio": None, "flops": flops, "peak_bytes": peak}


def peer_cell(figures: dict[str, Any]) -> str:
    """Return the table's entry for another library."""
    return figures.get("refused") or f"{figures['speed_ratio']:.2f} / {figures['memory_ratio']:.2f}"


def heading(where: dict[str, Any], on_gpu: bool) -> list[str]:
    """The lines above the rows: the machine, what was measured, and the columns."""
    depths = f"{DEPTHS}, under checkpointing {DEPTHS_RECOMPUTED}"
    how = "whole models" if on_gpu else f"counted on {depths} layers, extended to the whole depth"
    of_others = "speed" if on_gpu else "FLOPs"
    return [
        f"{where['device']}, {where['threads']} CPU threads, PyTorch {where['torch']}; bfloat16; {how}.",
        "",
        "| model, mode, B×T | target speed | speed | FLOPs, non-private / private | target memory | memory | "
        f"GiB, non-private | GiB, private | Opacus, {of_others} / memory | fastDP, {of_others} / memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]


def line_of(row: dict[str, Any]) -> str:
    """One row of the table."""
    speed, memory = row["speed"], row["memory"]
    cells = [
        row["name"],
        f"≥ {speed:g}" if speed else "-",
        f"{row['speed_ratio']:.3f}" if row["speed_ratio"] is not None else "-",
        f"{row['flop_ratio']:.3f}" if row["flop_ratio"] is not None else "-",
        f"≤ {memory:g}" if memory else "-",
        f"{row['memory_ratio']:.3f}" if row["memory_ratio"] is not None else row["error"],
        *(f"{row['peak_bytes'][name] / 2**30:.1f}" if name in row["peak_bytes"] else "-" for name in (PLAIN, OURS)),
        *(row[name] for name in PEERS),
    ]
    return f"| {' | '.join(cells)} |"


def as_markdown(report: dict[str, Any]) -> str:
    """The table, with the machine it is of."""
    on_gpu = any(row["speed_ratio"] is not None for row in report["rows"])
    return "\n".join([*heading(report["machine"], on_gpu), *map(line_of, report["rows"])])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(range(1, len(TARGETS) + 1)), metavar="N", help="these alone, from 1"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--rounds", type=int, default=6, help="timed steps on CUDA (default %(default)s)")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; at least 1 is needed")
    for number in options.rows:
        if not 1 <= number <= len(TARGETS):
            parser.error(f"--rows has {number}; the table has the rows 1 to {len(TARGETS)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for message in ("`is_gradient_checkpointing`", "Full backward hook is firing"):  # of peft's call, Opacus' hooks
        warnings.filterwarnings("ignore", message=message)
    device = str(Settings(device=options.device).resolved_device())
    report: dict[str, Any] = {"machine": machine(torch.device(device)), "rows": []}
    print(*heading(report["machine"], torch.device(device).type == "cuda"), sep="\n", flush=True)
    for number in options.rows:
        report["rows"].append(measure_row(TARGETS[number - 1], device, options.rounds))
        print(line_of(report["rows"][-1]), flush=True)
    if options.markdown:
        options.markdown.write_text(as_markdown(report) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if any("error" in row for row in report["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

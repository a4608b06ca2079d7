"""Measure the processor time of privacy: forward, backward, norms and clipped sums over plain forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --sizes 64 --modes full --ways compiled --json host_time.json

Both sides are in one process, on the same weights and batch, on one thread. A pair is a plain sample and a private one,
in an order that alternates; a sample has as many steps as take a twentieth of a second. Compiled steps are compared
with plain ones whose blocks are compiled in the same way.

ratio       median of the pairs' private / plain
interval    of 95 % for that median, by resampling the pairs
bar         the goal; it is missed only where the lower end of the interval exceeds it
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from methods import CLIP_NORM, compile_blocks
from throughput import Settings, batch_of, build_model, machine, reason, twin

from dpllm import GhostClipper, per_sequence_loss

MODES = ("full", "lora")
WAYS = ("eager", "compiled")
LAYERS, VOCABULARY, WARMUP = 4, 2000, 3
SAMPLE_S = 0.05
LEAST_PAIRS = 15


@dataclass(frozen=True)
class Size:
    """A Llama of `LAYERS` layers and its batch; the bars are of eager and compiled steps, by what is trained."""

    hidden: int
    intermediate: int
    batch: int
    tokens: int
    bars: dict[str, tuple[float, float]]

    def settings(self, mode: str) -> Settings:
        """Return the settings of model and batch."""
        config = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": VOCABULARY,
        }
        sizes = {"mode": mode, "rank": 8, "batch": self.batch, "tokens": self.tokens}
        return Settings(config=json.dumps(config), device="cpu", clock="cpu", **sizes)


SIZES = {
    "64": Size(64, 128, 4, 16, {"full": (1.6, 1.45), "lora": (1.2, 1.3)}),
    "512": Size(512, 1408, 4, 256, {"full": (1.1, 1.08), "lora": (1.05, 1.05)}),
    "1024": Size(1024, 2816, 4, 64, {"full": (1.04, 1.05)}),
}


@dataclass
class Row:
    """The figures of one size, mode and way.

    Attributes:
        size: a key of `SIZES`.
        mode: one of `MODES`.
        way: one of `WAYS`.
        plain_ms: milliseconds of a plain step in each pair.
        private_ms: the same of a private step.
        refused: why there are none.
        eager: reasons of blocks that stay eager, by path.
    """

    size: str
    mode: str
    way: str
    plain_ms: list[float] = field(default_factory=list)
    private_ms: list[float] = field(default_factory=list)
    refused: str = ""
    eager: dict[str, str] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        """Private over plain, of each pair."""
        return [private / plain for plain, private in zip(self.plain_ms, self.private_ms, strict=True)]

    @property
    def bar(self) -> float | None:
        """The goal, if there is one."""
        bars = SIZES[self.size].bars.get(self.mode)
        return bars and bars[WAYS.index(self.way)]


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the median, by resampling with a fixed seed."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def steps_of(row: Row) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return a plain step and a private one on the same weights, warm."""
    settings = SIZES[row.size].settings(row.mode)
    model = build_model(settings)
    ids_BT = batch_of(settings, VOCABULARY)
    plain_model, private_model = twin(model), twin(model)
    clipper: Any = GhostClipper(private_model, CLIP_NORM)
    if row.way == "compiled":
        clipper.compile(backend="inductor")
        compile_blocks(plain_model, dynamic=None)

    def losses_of(model: nn.Module) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        return per_sequence_loss(model(input_ids=ids_BT).logits, ids_BT)

    steps = lambda: losses_of(plain_model).sum().backward(), lambda: clipper.backward(losses_of(private_model))
    for step in steps:
        for _ in range(WARMUP):
            step()
    row.eager = {path: str(why) for path, why in clipper.compiled.eager.items()}
    return steps


def measure(row: Row, pairs: int) -> Row:
    """Fill in the times, or the reason why there are none."""
    torch._dynamo.reset()
    try:
        steps = steps_of(row)
    except Exception as error:
        row.refused = reason(error)
        return row
    repeats = max(1, math.ceil(SAMPLE_S * 1e3 / _milliseconds(steps[0], 1)))
    gc.collect()
    gc.disable()
    try:
        for pair in range(pairs):
            found = {}
            for place in (0, 1) if pair % 2 else (1, 0):
                found[place] = _milliseconds(steps[place], repeats)
            row.plain_ms.append(found[0])
            row.private_ms.append(found[1])
            gc.collect()
    finally:
        gc.enable()
    return row


def _milliseconds(step: Callable[[], Any], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        step()
    return 1e3 * (time.process_time() - start) / repeats


HEAD = ("hidden, rows × tokens", "trained", "", "plain, ms", "private, ms", "ratio", "interval", "bar", "")


def line_of(row: Row) -> str:
    """Return a line of the table."""
    size = SIZES[row.size]
    cells = [f"{size.hidden}, {size.batch}×{size.tokens}", row.mode, row.way]
    bar = "-" if row.bar is None else f"≤ {row.bar:g}"
    if row.refused:
        cells += ["-", "-", "-", "-", bar, row.refused]
    else:
        low, high = interval(row.ratios)
        verdict = "" if row.bar is None else "missed" if low > row.bar else "met"
        blocks = f"; {len(row.eager)} blocks stay eager: {next(iter(row.eager.values()))}" if row.eager else ""
        cells += [f"{statistics.median(times):.1f}" for times in (row.plain_ms, row.private_ms)]
        cells += [f"{statistics.median(row.ratios):.2f}", f"{low:.2f} to {high:.2f}", bar, verdict + blocks]
    return f"| {' | '.join(cells)} |"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in (("sizes", SIZES), ("modes", MODES), ("ways", WAYS)):
        parser.add_argument(f"--{name}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--pairs", type=int, default=21, help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    if options.pairs < LEAST_PAIRS:
        parser.error(f"--pairs is {options.pairs}; a median needs at least {LEAST_PAIRS}")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    where = machine(torch.device("cpu"))
    print(f"{where['device']}, 1 thread, PyTorch {where['torch']}; {options.pairs} pairs, processor time.\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    rows = []
    for size in options.sizes:
        for mode in options.modes:
            for way in options.ways:
                rows.append(measure(Row(size, mode, way), options.pairs))
                print(line_of(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The speed-up of torch.compile for the step without privacy, and dpllm's refusal of a compiled model.

    python benchmarks/compiled.py
    OMP_NUM_THREADS=1 python benchmarks/compiled.py --clock cpu --hidden 256 --json compiled.json

The model and the options are those of throughput.py. The step without privacy is run unchanged and with
``torch.compile(model)``, in turn, and then the private step on the unchanged model. It needs the compiler that
torch.compile needs: a C++ compiler on the CPU, Triton on CUDA.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from methods import CLIP_NORM, PLAIN, GhostStep, Step
from throughput import CLOCKS, Settings, batch_of, build_model, machine, timed, twin

from dpllm.ghost import GhostClipper, GhostError

COMPILED, OURS = "non-private, compiled", "dpllm, not compiled"


def refusal(model: Any) -> str:
    """Return the error of GhostClipper for this model.

    Raises:
        RuntimeError: there was no error; it accepted the model.
    """
    try:
        GhostClipper(model, CLIP_NORM).remove()
    except GhostError as error:
        return str(error)
    raise RuntimeError("GhostClipper took the compiled model: measure it beside the others.")


def measure(settings: Settings) -> dict[str, Any]:
    """Return the times of the three steps, in turn, and the refusal."""
    model = build_model(settings)
    ids_BT = batch_of(settings, model.config.vocab_size)
    compiled: Any = torch.compile(twin(model))
    steps = {PLAIN: Step(twin(model)), COMPILED: Step(compiled), OURS: GhostStep(twin(model))}
    clock = CLOCKS[settings.clock]
    first_s = {name: timed(step, ids_BT, clock) / 1000 for name, step in steps.items()}
    for step in steps.values():
        for _ in range(settings.warmup):
            timed(step, ids_BT, clock)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(settings.rounds):
        for name, step in steps.items():
            times[name].append(timed(step, ids_BT, clock))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "settings": asdict(settings),
        "machine": machine(settings.resolved_device()),
        "methods": {
            name: {
                "median_ms": medians[name],
                "time_ratio": medians[name] / medians[PLAIN],
                "first_step_s": first_s[name],
                "times_ms": times[name],
            }
            for name in steps
        },
        "refusal": refusal(compiled),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Return the table, the machine and the refusal."""
    where, settings = report["machine"], report["settings"]
    lines = [
        f"{where['device']}, {where['threads']} CPU threads, PyTorch {where['torch']}; Llama {settings['layers']} × "
        f"{settings['hidden']}, {settings['batch']}×{settings['tokens']}, {settings['dtype']}; ms of "
        f"{settings['clock']} time, medians of {settings['rounds']} steps.",
        "",
        "| step | ms | time over non-private | first step, s |",
        "|---|---|---|---|",
    ]
    for name, row in report["methods"].items():
        lines.append(f"| {name} | {row['median_ms']:.0f} | {row['time_ratio']:.2f} | {row['first_step_s']:.1f} |")
    return "\n".join([*lines, "", f"GhostClipper refuses the compiled model: {report['refusal']}"])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    d = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("hidden", "layers", "vocab", "heads", "batch", "tokens", "rounds", "warmup"):
        parser.add_argument(f"--{name}", type=int, default=getattr(d, name), help="default %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=d.dtype)
    parser.add_argument("--device", default=d.device, help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default=d.clock, help="wall time, or processor time")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    for name in ("hidden", "layers", "vocab", "heads", "batch", "tokens", "rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; at least 1 is needed")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = vars(parse_arguments(arguments))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    path = options.pop("json")
    report = measure(replace(Settings(), **options))
    print(as_markdown(report))
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

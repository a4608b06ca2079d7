"""Checks and measurements on one GPU: first contact, targets, profile, a whole run, engines, quantized weights.

    benchmarks/gpu.sh                             # all stages, at most 20 minutes
    benchmarks/gpu.sh 1 2                         # only these; 1 2 and 3 4 5 6 end within ten minutes each
    benchmarks/gpu.sh --toy                       # tiny sizes, on the CPU: shows that the script runs, and no speed
    benchmarks/gpu.sh wheels FOLDER [MORE...]     # wheels for a machine without a network; MORE: source folders
    benchmarks/gpu.sh report FILE...              # a section for results.md from one or several gpu.json

stages
  1  first contact: kernels against float64, rounding, noise, autocast, TF32, packed rows, memory that runs out
  2  the target table, beside training without privacy and, where they are installed, Opacus and fastDP
  3  a profile: share of the time in which the GPU is busy, launches, the kernels that take most
  4  a whole run: pretrained weights of 15 million parameters on E2E, and tokens per second against the stock Trainer
  5  NCCL with one process through FSDP2 and ZeRO-3
  6  LoRA on weights of four bits, where bitsandbytes is installed

Each stage is a process with a time limit. Every step is printed and saved as it ends, in gpu.json of the output
folder; a step that fails says why, and the next goes on. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[0] = str(BENCHMARKS)  # for this package, and for the benchmarks that it runs

from gpu.record import Record, run_stage  # noqa: E402

STAGES = {1: "first_contact", 2: "targets_table", 3: "busy", 4: "whole_run", 5: "nccl", 6: "quantized"}
# Seconds of each: 1 and 2 in 555, 3 to 6 in 555, which leaves time for the wheels in pieces of ten minutes.
LIMITS = {1: 245, 2: 310, 3: 75, 4: 295, 5: 110, 6: 75}
TOY_LIMIT = 3600  # only catches a deadlock
FIGURES, LOG = "gpu.json", "gpu.log"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Command line of a run."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", type=int, metavar="N", help="stages to run; none: all")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-figures")), help="output folder")
    parser.add_argument("--material", type=Path, help="folder with stories15M and e2e, for stage 4")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the stages' steps those with this in their name")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.stages = options.stages or list(STAGES)
    for number in options.stages:
        if number not in STAGES:
            parser.error(f"stage {number} is none of {', '.join(map(str, STAGES))}")
    if options.material is not None and not options.material.is_dir():
        parser.error(f"--material is {options.material}, which is no folder")
    return options


def material_of(options: argparse.Namespace) -> Path | None:
    """Return the folder as given, or the usual one."""
    usual = [BENCHMARKS.parent / ".material", BENCHMARKS.parents[1] / "shared" / "data"]
    for path in (options.material, *usual):
        if path is not None and (path / "stories15M").is_dir():
            return path.resolve()
    return None


def environment(toy: bool) -> dict[str, str]:
    """Of a stage's process; a toy sees no GPU and takes one thread."""
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning"}
    if not toy:
        return quiet
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return {**quiet, **hidden}


def start(options: argparse.Namespace, numbers: list[int]) -> None:
    """Run some stages in a separate process, print and keep its output, and end it when its time is over."""
    command = [sys.executable, str(BENCHMARKS / "gpu"), *map(str, numbers), "--child", f"--out={options.out}"]
    command += [f"--only={options.only}", *["--toy"] * options.toy]
    command += [f"--material={options.material}"] if options.material else []
    limit = TOY_LIMIT if options.toy else sum(LIMITS[number] for number in numbers)
    process = subprocess.Popen(
        command,
        env=environment(options.toy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(limit, end, [process])
    timer.start()
    try:
        with open(options.out / LOG, "a", encoding="utf-8") as log:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
        code = process.wait()
    finally:
        timer.cancel()
        end(process)
    if code != 0:
        why = f"stopped after {limit} s" if code == -signal.SIGKILL else f"its process ended with status {code}"
        Record(options.out / FIGURES).close(numbers, why)
        print(f"== {why}", flush=True)


def end(process: subprocess.Popen) -> None:
    """Kill a process and everything in its session; nothing happens if they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_here(options: argparse.Namespace) -> None:
    """Run stages in this process, which ends without the interpreter's own end: NCCL's threads may hang in it."""
    import datasets
    from transformers.utils import logging

    from gpu.setting import Setting, describe, is_lost

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    scratch = Path(tempfile.mkdtemp(prefix="dpllm-gpu-"))
    setting = Setting(options.toy, scratch, material_of(options))
    record = Record(options.out / FIGURES)
    record.values["machine"] = describe(setting)
    for number in options.stages:
        stage = importlib.import_module(f"gpu.{STAGES[number]}")
        steps = [step for step in stage.STEPS if options.only in step[0]]
        limit = TOY_LIMIT if options.toy else LIMITS[number]
        run_stage(record, number, stage.TITLE, steps, setting, limit, lambda: is_lost(setting.device))
    shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def summary(options: argparse.Namespace) -> int:
    """Return the failures in a few lines, and their number."""
    record = Record(options.out / FIGURES)
    failed = 0
    print(f"\n== {record.values['machine'].get('device')}; figures in {options.out / FIGURES}")
    for number in options.stages:
        states = [step["state"] for step in record.values["stages"][str(number)]["steps"].values()]
        failed += record.failed(number)
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        print(f"   stage {number}: {counts}")
    return failed


def main(arguments: list[str]) -> int:
    """Wheels, a report, or stages."""
    if arguments[:1] == ["wheels"]:
        from gpu.wheels import main as wheels

        return wheels(arguments[1:])
    if arguments[:1] == ["report"]:
        from gpu.report import as_markdown

        try:
            print(as_markdown([json.loads(Path(path).read_text()) for path in arguments[1:]]))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        run_here(options)
    for group in [options.stages] if options.toy else [[number] for number in options.stages]:
        start(options, group)
    return 1 if summary(options) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

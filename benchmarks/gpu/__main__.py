"""Checks and measurements on one GPU, in two visits of at most 590 and 150 seconds.

    benchmarks/gpu.sh prepare [SOURCE...]         # before, with a network: what has to travel, and its size
    benchmarks/gpu.sh first                       # on the machine: correctness, speed, memory, whole steps, kernels
    benchmarks/gpu.sh second                      # on the machine, with the material: real text, engines, 4 bits
    benchmarks/gpu.sh first --only headline       # some steps of a command
    benchmarks/gpu.sh first --toy                 # tiny sizes on the CPU: shows that the command runs, and no speed
    benchmarks/gpu.sh report FILE...              # a section for results.md from one or several gpu.json

The output folder is --out, else the variable OUT, else gpu-figures. gpu.json there is rewritten after every method, and
gpu.log has all output. Each part of a step has a time limit, and so has the whole command. An error, a crash or a limit
in one part loses no figure of another one. The tables and all WRONG lines come again at the end. The exit status is 1
if a figure is WRONG or a part was not reached.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[0] = str(BENCHMARKS)  # for this package, and for the benchmarks that it runs

from gpu import plan, summary, watch  # noqa: E402
from gpu.record import AVOIDED, DOUBTFUL, NOT_REACHED, OK, SKIPPED, TRUSTED, WRONG, Figures, Record, run_part  # noqa: E402

FIGURES, LOG = "gpu.json", "gpu.log"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TOY_SECONDS = 3600  # only catches a deadlock


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Command line of a visit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=tuple(plan.COMMANDS))
    parser.add_argument("--only", nargs="+", metavar="STEP", help="only these steps, by name or number")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-figures")), help="output folder")
    parser.add_argument("--material", type=Path, help="folder with stories15M and e2e")
    parser.add_argument("--seconds", type=float, help="most seconds of the whole command; the plan's if not given")
    parser.add_argument("--limit", type=float, help="most seconds of each part; the plan's if not given")
    parser.add_argument("--part", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    steps = plan.COMMANDS[options.command].steps
    named = [steps[int(one)] if one.isdecimal() and int(one) < len(steps) else one for one in options.only or steps]
    for one in named:
        if one not in steps:
            parser.error(f"{one} is no step of {options.command}; its steps are {', '.join(steps)}")
    options.only = [step for step in steps if step in named]
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


def run_here(options: argparse.Namespace) -> None:
    """Run parts in this process, which ends without the interpreter's own end: NCCL's threads may hang in it."""
    from transformers.utils import logging

    from gpu.device import describe
    from gpu.setting import LOST, Setting, is_lost
    from tests import interpreted

    interpreted.mend()
    gc.freeze()  # the libraries' objects, so that freeing memory between methods is quick
    if sys.platform == "linux":  # end with the process that watches, however that one ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.disable_progress_bar()
    scratch = Path(tempfile.mkdtemp(prefix="dpllm-gpu-"))
    record = Record(options.out / FIGURES)
    earlier, facts = record.values["machine"], describe(Setting(options.toy, scratch))
    if earlier and any(earlier.get(name) != facts[name] for name in ("device", "source", "toy")):
        record.values["steps"] = {}  # of another machine or other code
    record.values["machine"] = facts
    parts = {f"{part.step}/{part.name}": part for part in plan.COMMANDS[options.command].parts}
    status = 0
    for key in options.part:
        part = parts[key]
        seconds = options.limit or (TOY_SECONDS if options.toy else part.limit)
        deadline = time.monotonic() + 0.8 * seconds
        setting = Setting(options.toy, scratch, material_of(options), record.values["kernels"]["state"], deadline)
        state = run_part(record, part.step, part.name, functools.partial(call, part, setting))
        lost = state == WRONG and is_lost(setting.device)
        if part.function == plan.PROGRAMS and state == WRONG:
            record.doubt_kernels(AVOIDED if lost else DOUBTFUL, "a Triton program is WRONG")
        if lost:
            status = LOST
            break
    shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def call(part: plan.Part, setting: Any, figures: Figures) -> None:
    """Import a part's module and run its function; an import that fails is an error of this part."""
    module, function = part.function.split(":")
    getattr(importlib.import_module(f"gpu.{module}"), function)(figures, setting, *part.arguments)


def environment(toy: bool) -> None:
    """Set the variables of the processes; a toy sees no GPU and takes one thread."""
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"
    if toy:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        os.environ.update(hidden)


def visit(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a command, and print its summary; return the exit status."""
    began = float(os.environ.get("DPLLM_GPU_BEGAN", time.time()))
    command = plan.COMMANDS[options.command]
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / FIGURES
    parts = [part for part in command.parts if part.step in options.only]
    book = Record(record)
    if running := book.running():  # the end of an earlier visit
        book.values["steps"][running[0]][running[1]] |= {"state": NOT_REACHED, "error": "its visit was stopped"}
    for part in parts:  # measured again
        book.values["steps"].get(part.step, {}).pop(part.name, None)
    book.values["kernels"] = {"state": TRUSTED, "why": ""}
    book.save()
    environment(options.toy)
    seconds = options.seconds or (TOY_SECONDS if options.toy else command.seconds)
    limits = watch.Limits(began + seconds - plan.MARGIN, options.limit or (TOY_SECONDS if options.toy else None))
    with open(options.out / LOG, "a", encoding="utf-8") as log:
        for process in command.processes:
            watch.run([part for part in process if part in parts], arguments, record, log, limits)
        book = Record(record)
        for part in parts:
            if book.part(part.step, part.name) is None:
                book.enter(part.step, part.name, state=NOT_REACHED, error="the command's time was over")
        book.values.setdefault("seconds", {})[options.command] = round(time.time() - began, 1)
        book.save()
        text = summary.text_of(book.values, options.only, f"{time.time() - began:.0f} s; figures in {record}")
        print("\n" + text, flush=True)
        log.write("\n" + text + "\n")
    states = {(book.part(part.step, part.name) or {}).get("state") for part in parts}
    return 0 if states <= {OK, SKIPPED} else 1


def main(arguments: list[str]) -> int:
    """What has to travel, a report, or a visit."""
    if arguments[:1] == ["prepare"]:
        from gpu.prepare import main as prepare

        return prepare(arguments[1:])
    if arguments[:1] == ["report"]:
        from gpu.report import main as report

        return report(arguments[1:])
    options = parse_arguments(arguments)
    if options.part:
        run_here(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the process of the parts is ended as well
    return visit(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

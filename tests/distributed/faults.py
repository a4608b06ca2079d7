"""Runs of a recipe in forked ranks, one of which fails; nobody ends the others, as a launcher on another node does not.

A fault is a function of this module, called on one rank where the model runs, in a step of the private training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpllm.privacy.ledger import read_ledger
from tests import children
from tests.distributed.launching import RECIPE, write_data
from tests.distributed.world import ROOT, environment, free_port

_STATE = "accelerator_config.use_configured_state=true"
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""What `accelerate launch` makes of accelerate_configs/cpu_fsdp2.yaml."""
OVERRIDES = {"fsdp2": (f"train.{_STATE}", f"public_pretrain.train.{_STATE}")}


def variables(engine: str) -> dict[str, str]:
    """The environment with which `accelerate launch` starts a process of an engine: ddp, fsdp2, zero1, zero2, zero3."""
    if engine == "fsdp2":
        return FSDP2
    if engine == "ddp":
        return {"ACCELERATE_USE_CPU": "true"}
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / f"accelerate_configs/deepspeed/{engine}.json"),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_USE_CPU": "true",
    }


def key_error() -> None:
    raise KeyError("text")


def os_error() -> None:
    raise OSError(5, "Input/output error", "/data/notes.jsonl")


def value_error() -> None:
    raise ValueError("this row cannot be used")


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def exits() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def sleep() -> None:
    time.sleep(20)


def spin() -> None:
    while True:
        pass


def log_blocks() -> None:
    """As a pipe whose reader has stopped."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 4096)
    os.set_blocking(end, True)
    for stream in (1, 2):
        os.dup2(end, stream)
    print("a line", flush=True)


def clock_jumps() -> None:
    """As after NTP has set the clock: an hour back; what reads it from now on in this process sees that."""
    now = time.time
    time.time = lambda: now() - 3600


@dataclass(frozen=True)
class Ended:
    """The end of all ranks.

    Attributes:
        codes: exit codes; None: it was still running at the end of the patience.
        seconds: until the last of them ended, or until the patience ended.
        logs: what each printed.
        charged: steps in the ledger.
    """

    codes: list[int | None]
    seconds: float
    logs: list[str] = field(repr=False)
    charged: int = 0

    def errors(self, rank: int) -> list[str]:
        """The lines of a rank that name an error or a wait."""
        return re.findall(r"(?:error: |nothing came further|stopped ).*", self.logs[rank])


def run(
    folder: Path,
    engine: str,
    fault: str = "",
    rank: int = 1,
    step: int = 3,
    patience: float = 60.0,
    size: int = 2,
    overrides: Sequence[str] = (),
    ranks: dict[int, Sequence[str]] | None = None,
) -> Ended:
    """Run the recipe ``tiny.yaml`` without public training, and wait until all ranks have ended.

    Args:
        folder: with the data.
        engine: as for `variables`.
        fault: name of a function above; "": none.
        rank: on which it is called.
        step: in which it is called.
        patience: seconds to wait.
        size: number of ranks.
        overrides: of the recipe, on every rank.
        ranks: further overrides of single ranks.
    """
    if not (folder / "private.jsonl").exists():
        write_data(folder)
    given = []
    for number in range(size):
        what = json.dumps({"engine": engine, "fault": fault if number == rank else "", "step": step})
        given.append([what, [*OVERRIDES.get(engine, ()), *overrides, *(ranks or {}).get(number, ())]])
    ended = until_all_end(folder, main, given, patience, variables(engine))
    ledger = folder / "out" / "privacy_ledger.jsonl"
    return replace(ended, charged=read_ledger(ledger).num_steps if ledger.exists() else 0)


def until_all_end(
    folder: Path, function: Callable, arguments: Sequence[Sequence[Any]], patience: float, env: Mapping[str, str]
) -> Ended:
    """Call a function in a forked rank for each list of arguments, and wait until all have ended."""
    port, size, began = free_port(), len(arguments), time.monotonic()
    started = [
        children.Forked(
            function, *given, env={**environment(rank, size, port), **env}, log=folder / f"log.{rank}", cwd=folder
        )
        for rank, given in enumerate(arguments)
    ]
    try:
        while any(one.poll() is None for one in started) and time.monotonic() - began < patience:
            time.sleep(0.05)
        codes, seconds = [one.poll() for one in started], time.monotonic() - began
    finally:
        for one in started:
            one.kill()
    return Ended(codes, seconds, [(folder / f"log.{rank}").read_text(errors="replace") for rank in range(size)])


def scenario(name: str, fails: int) -> None:
    """Processes of one group without a model: rank ``fails`` does something else than wait with the others."""
    from dpllm.config.mistakes import tell
    from dpllm.engines import board
    from dpllm.engines.processes import Processes

    board.GRACE = 2.0
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    processes = Processes()
    processes.set_time_limit(8.0 if name in ("stop", "deadlock") else 600.0, lambda: None)
    own = processes.rank == fails
    if name == "slow":
        board._NAMED_AFTER = 4.0
    code = 0
    try:
        with processes.during("the reading", patient=name != "deadlock"):
            if own:
                SCENARIOS[name]()
            processes.wait() if name == "slow" else dist.barrier()
            print("all went on")
    except Exception as error:
        code = tell(error)
        time.sleep(10)  # its connections are open, so the others learn of it by the board alone
    os._exit(code)


def no_file() -> None:
    raise FileNotFoundError(2, "No such file or directory", "/data/notes.jsonl")


def wait_forever() -> None:
    while True:
        time.sleep(0.1)


SCENARIOS = {"barrier": no_file, "stop": stop, "deadlock": wait_forever, "slow": lambda: time.sleep(12)}


def main(what: str, overrides: list[str]) -> None:
    """One rank."""
    from dpllm.training import finetune
    from dpllm.training.row_losses import RowLosses

    given = json.loads(what)
    if given["engine"] == "fsdp2":
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    if given["fault"]:
        _plant(RowLosses, globals()[given["fault"]], given["step"])
    finetune.carry_out(RECIPE, overrides)


def _plant(losses: Any, fault: Any, step: int) -> None:
    from dpllm.training.run import PrivateRun

    whole, take, at = losses.__call__, PrivateRun.step, {"step": 0, "done": False}

    def call(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        if at["step"] >= step and not at["done"]:
            at["done"] = True
            fault()
        return whole(self, model, inputs, **options)

    def taking(self: Any, *arguments: Any, **options: Any) -> Any:
        at["step"] += 1
        return take(self, *arguments, **options)

    losses.__call__, PrivateRun.step = call, taking

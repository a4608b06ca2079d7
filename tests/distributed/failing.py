"""Runs in the processes of `test_failing`: loss, collator or backward pass fail on one of two processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpllm.config.mistakes import words_of
from dpllm.engines.processes import OtherProcessError, Processes
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.run import PrivateRun
from tests.distributed.checks import caught
from tests.distributed.drifting import begin, local
from tests.scarce import BreaksOff
from tests.training.test_run import loop, loss_of, network, plan_of, rows_of

STEPS, FAILS = 6, 2  # the third step has no check of the rows before it, unlike the first, second and fourth


BREAKS: set[str] = set()
"""The part that fails on this process; the collator is the same function on all, since the processes compare it."""


class Broken(RuntimeError):
    """The error of one process."""


def fail(at: str) -> None:
    if at in BREAKS:
        raise Broken(f"of the {at} of rank {Processes().rank}")


def collate(items: Any) -> Any:
    fail("collator")
    return rows_of().collate(items)


def losses(model: Any, inputs: Any) -> torch.Tensor:
    fail("loss")
    made = loss_of(model, inputs)
    return InBackward.apply(made) if "backward" in BREAKS else made


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: torch.Tensor) -> torch.Tensor:
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        raise Broken("of the backward pass\nin two lines")


def everything(root: Path) -> dict[str, Any]:
    """All cases in one start of the processes; each leaves the group usable."""
    return {
        "loss": case(root / "loss"),
        "loss, caught": case(root / "caught", catch=True),
        "loss in a check": case(root / "check", fails=1),
        "backward": case(root / "backward", where="backward", rank=0),
        "collator": case(root / "collator", where="collator"),
        "both": case(root / "both", rank=None),
    }


def sharded(root: Path) -> None:
    """The loop of rank 1 catches its error and goes on; rank 0 is ended."""
    mesh = DeviceMesh("cpu", list(range(Processes().size)))
    found = case(root / "sharded", wrap=lambda model: fully_shard(model, mesh=mesh), catch=True)
    (root / f"result.{dist.get_rank()}").write_bytes(pickle.dumps(found))
    os._exit(0)


def case(
    folder: Path,
    where: str = "loss",
    rank: int | None = 1,
    fails: int = FAILS,
    catch: bool = False,
    wrap: Callable = DistributedDataParallel,
) -> dict[str, Any]:
    """Take steps, of which one fails on a rank (None: on both); the loop of that rank goes on, if it catches."""
    own = rank in (None, Processes().rank)
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(
        folder, plan_of(0.8, num_steps=STEPS), dataclasses.replace(rows_of(max_rows=1), collate=collate)
    )
    run.attach(model, optimizer)
    found: dict[str, Any] = {"taken": 0, "own": None}

    def go() -> None:
        for unit_ids in run.draws(STEPS):
            if own and found["taken"] == fails:
                BREAKS.add(where)
            found["before"] = local(model)
            try:
                run.step(unit_ids, losses)
            except Broken as error:
                found["own"] = (str(error), list(getattr(error, "__notes__", ())))
                if not catch:
                    raise
            else:
                found["taken"] += 1
            optimizer.step()
            optimizer.zero_grad()

    began = time.perf_counter()
    found["error"] = caught(go)
    BREAKS.clear()
    found["seconds"] = time.perf_counter() - began
    optimizer.step()  # a loop that goes on all the same has nothing to release
    found["unmoved"] = bool(torch.equal(found.pop("before"), local(model)))
    found["charged"] = read_ledger(folder / LEDGER_FILE).num_steps
    if wrap is DistributedDataParallel:
        run.finish("failed")
        run.processes.wait()  # until rank 0 has written
        found["end"] = read_ledger(folder / LEDGER_FILE).end
        found["plan"] = run.plan.epsilon
    else:
        run.detach()
    return found


def main_only(root: Path) -> None:
    """Only rank 0 ends the run; the other process has ended."""
    run, _, optimizer = begin(root / "main only")
    loop(run, optimizer, 1)
    found = caught(run.finish) if run.is_main else None
    (root / "world" / f"result.{dist.get_rank()}").write_bytes(pickle.dumps(found))
    os._exit(0)


def ended_in_mid_step(root: Path) -> None:
    """Rank 1 is gone in the middle of the second step, as when the system ends it for its memory."""
    run, _, optimizer = begin(root / "ended")
    result = root / "world" / f"result.{dist.get_rank()}"

    def leaving(model: Any, inputs: Any) -> torch.Tensor:
        result.write_bytes(pickle.dumps(None))
        os._exit(0)

    def go() -> None:
        for unit_ids in run.draws(2):
            run.step(unit_ids, leaving if run.ledger.num_steps == 2 and dist.get_rank() == 1 else loss_of)
            optimizer.step()
            optimizer.zero_grad()

    found = caught(go)
    result.write_bytes(pickle.dumps((found, words_of(OtherProcessError(found[1])))))
    os._exit(0)


def ended_in_the_sum(root: Path) -> None:
    """Memory runs out on rank 1 while the processes add up the sums of the second step, and it ends."""
    run, model, optimizer = begin(root / "ended")
    broken = BreaksOff(1, torch.OutOfMemoryError("none left"), within="_packed")

    def go() -> None:
        for unit_ids in run.draws(2):
            with broken if run.ledger.num_steps == 2 and dist.get_rank() == 1 else contextlib.nullcontext():
                run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()

    before, found = local(model), None
    try:
        go()
    except Exception as error:
        found = type(error).__name__, str(error), list(getattr(error, "__notes__", ())), local(model)
    (root / "world" / f"result.{dist.get_rank()}").write_bytes(pickle.dumps((found, before)))
    os._exit(0)

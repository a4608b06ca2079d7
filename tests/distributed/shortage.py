"""The program in the processes of `test_shortage`: memory that runs out on one of two, and budgets found by all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpllm.engines.processes import Processes
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger
from tests.distributed.checks import caught
from tests.scarce import more_than
from tests.training.test_microbatch_size import Counted, gated, known
from tests.training.test_run import flat, loss_of, plan_of, rows_of

STEPS = 3
LIMITS = {"never": 10**6, "at first": 12, "at every size": 1}
"""Rows for which rank 1 has memory; rank 0 has enough."""


def everything(root: Path) -> dict[str, Any]:
    """Run all, in an order that is the same on every rank."""
    here = Processes()
    results: dict[str, Any] = {}
    for name, limit in LIMITS.items():
        for direction in ("forward", "backward"):
            refuse = more_than(limit if here.rank == 1 else 10**6, direction)
            results[f"{name}, {direction}"] = steps(root / f"{name} {direction}", refuse, max_tokens=2000)
    gate = gated()
    memory = Counted(gate[1], 100 + 10 * (3 + here.rank))
    results["auto"] = steps(root / "auto", None, max_tokens="auto", model_and_gate=gate, memory=memory)
    results["sharded"] = caught(lambda: sharded(root / "sharded"))
    return results


def steps(folder: Path, refuse: Any, max_tokens: Any, model_and_gate: Any = None, memory: Any = None) -> dict[str, Any]:
    """Noiseless steps with replicated parameters; the second is empty."""
    here, plan = Processes(), plan_of(noise_multiplier=0.0, num_steps=STEPS, seeded=True)
    inner, _ = model_and_gate or gated(refuse)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = dataclasses.replace(rows_of(), max_rows=None, max_tokens=max_tokens)
    # The seed settles who has which units: with other shares a later step may have to divide once more.
    run = PrivateRun(plan, rows, SharedLedger.create(folder / LEDGER_FILE, plan, here), seed=3)
    run.attach(model, optimizer)
    done = []
    with known(memory):
        for number in range(STEPS):
            done.append(run.step(run.choose(np.arange(30 if number != 1 else 0)), loss_of))
            optimizer.step()
            optimizer.zero_grad()
    run.detach()
    return {
        "parameters": flat(model),
        "divided": [one.num_divided for one in done],
        "units": [one.num_units for one in done],
        "max_tokens": run.max_tokens,
        "num_steps": run.ledger.num_steps,
    }


def sharded(folder: Path) -> None:
    """Ask for an automatic budget under FSDP2."""
    model = gated()[0]
    fully_shard(model, mesh=init_device_mesh("cpu", (Processes().size,)))
    plan = plan_of(noise_multiplier=0.0)
    rows = dataclasses.replace(rows_of(), max_rows=None, max_tokens="auto")
    run = PrivateRun(plan, rows, SharedLedger.create(folder / LEDGER_FILE, plan, Processes()))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.3))

"""The program in the processes of `test_per_unit`: runs that compute one unit at a time, on replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpllm.engines.processes import Processes
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger
from tests.training.test_gradients import Pooled
from tests.training.test_per_unit import Coupled, Remembers
from tests.training.test_run import loss_of, network, plan_of, rows_of

UNITS = ([1, 5, 8, 11, 2], [], [3])  # an empty step, and one in which a process has no unit


def gradients(root: Path, way: str, model: nn.Module, freeze: bool = False, max_rows: int = 2) -> dict[str, Any]:
    """The private gradients of three steps, the frozen names, and whether one unit is run at a time."""
    plan = plan_of(noise_multiplier=0.0)
    ledger = SharedLedger.create(root / LEDGER_FILE, plan, Processes())
    run = PrivateRun(plan, rows_of(max_rows=max_rows), ledger)
    names = run.freeze_unused(model, loss_of) if freeze else []
    trained = [p for p in model.parameters() if p.requires_grad]
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained, lr=0.3)
    run.attach(wrapped, optimizer, gradients=way, loss_of=loss_of)
    found, error = [], None
    try:
        for units in UNITS:
            run.step(run.choose(np.array(units, dtype=np.int64)), loss_of)
            found.append(torch.cat([p.grad.flatten() for p in trained]))
            optimizer.step()
            optimizer.zero_grad()
        one_unit = run._attached.clipper.one_unit
    except ValueError as raised:
        error, one_unit = str(raised), None
    run.detach()
    ledger.close()
    return {"gradients": found, "frozen": names, "one unit": one_unit, "error": error}


def everything(root: Path) -> dict[str, Any]:
    """All runs, in one order on every rank."""
    torch.manual_seed(3)
    return {
        "ghost": gradients(root / "ghost", "ghost", network()),
        "per_unit": gradients(root / "per_unit", "per_unit", network()),
        "auto": gradients(root / "auto", "auto", Coupled(), max_rows=1),
        "freeze": gradients(root / "freeze", "auto", Pooled(), freeze=True),
        "unused": gradients(root / "unused", "per_unit", Pooled()),
        "state": gradients(root / "state", "per_unit", Remembers("cache"), max_rows=1),
    }

"""QLoRA on two processes: replicas of a base in 4 bits agree, and the sum is that of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dpllm.engines import model_inside
from dpllm.ghost.refusals import scales_of
from dpllm.training.run import PrivateRun
from tests.distributed.matrix import plan_of
from tests.distributed.setups import prepare
from tests.distributed.watching import NUM_ROWS, loss_of, rows_of
from tests.memory_ledger import MemoryLedger
from tests.models.quantized import adapted


def outcome(base: str, engine: str, other_scales: bool) -> Any:
    """The private gradient of a step over all rows, or the error.

    Args:
        base: folder of the base model.
        engine: "single" (every process by itself is not a run, so only in a group of one), "ddp" or another.
        other_scales: whether the second process has other scales in one layer.
    """
    model = adapted(base, "nf4")
    if other_scales and dist.get_rank() == 1:
        layer = next(module for module in model.modules() if scales_of(module))
        scales_of(layer)["weight.offset"].add_(1e-3)
    try:
        prepared, optimizer = prepare(engine, model, lr=1e-3)
        run = PrivateRun(plan_of(0.5, noise_multiplier=0.0, num_units=NUM_ROWS), rows_of(2), MemoryLedger())
        run.attach(prepared, optimizer)
        run.step(run.choose(np.arange(NUM_ROWS)), loss_of)
        parts = [p.grad.flatten() for p in model_inside(prepared).parameters() if p.requires_grad]
        run.detach()
        return torch.cat(parts).tolist()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

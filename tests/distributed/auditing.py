"""The program in the processes of `test_gradient_audit`: the gradient audit of every engine, in one start of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dpllm import PrivateRun
from dpllm.audit.gradient import Design, Steps, judge_releases, observe
from tests.audit.planted import CONFIDENCE, basis_of, plan_of, vectors
from tests.distributed.setups import dispose, prepare
from tests.memory_ledger import MemoryLedger

NOISE_MULTIPLIER = 0.5
DESIGN = Design(num_base=1, num_canaries=24, num_blocks=120)


def every_engine(engines: list[str]) -> dict[str, Any]:
    """The coins, the projections and the result of an audit of each engine, every unit in every step."""
    found = {}
    num_units = DESIGN.num_base + DESIGN.num_canaries
    plan = plan_of(num_units, num_units, NOISE_MULTIPLIER, DESIGN.num_blocks)
    for engine in engines:
        model, rows, loss_of = vectors(*[2.0] * num_units)
        basis = basis_of(model, rows, loss_of, DESIGN)
        prepared, optimizer = prepare(engine, model, lr=1.0)
        run = PrivateRun(plan, rows, MemoryLedger())
        run.attach(prepared, optimizer)
        seen = observe(Steps(run, prepared, optimizer, loss_of, 1), basis, DESIGN, num_units)
        run.detach()
        dispose(prepared)
        result = judge_releases(seen, plan, DESIGN, engine, CONFIDENCE) if dist.get_rank() == 0 else None
        found[engine] = (seen.included_RM, seen.canary_RTM, result)
    return found

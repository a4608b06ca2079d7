"""On every engine: the weights after steps of AdamW with a second moment that lacks the known noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dpllm.engines import model_inside
from dpllm.engines.guard import innermost
from dpllm.mechanism.strategies import KnownNoise
from dpllm.training.corrected_adamw import CorrectedAdamW
from dpllm.training.run import PrivateRun
from tests.distributed.averaging import Ledger
from tests.distributed.matrix import plan_of
from tests.distributed.setups import dispose, prepare, update, whole_parameters
from tests.distributed.watching import NUM_ROWS, loss_of, rows_of
from tests.reference.zoo import Case, build_model

NUM_STEPS, LR = 4, 0.05
NOISE = KnownNoise((1.0, -0.5, 0.2, 0.1), 2e-3)  # as large as the signal


def every_engine(engines: list[tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    """For each engine, dtype and second moment, what was found."""
    found = {}
    for one in engines:
        print(*one, flush=True)  # in the log, should a process hang
        found["-".join(one)] = outcome(*one)
    return found


def outcome(engine: str, dtype: str, kind: str) -> dict[str, Any]:
    """Weights before and after, the optimizer's progress, the dtypes of its moments, and the share of entries at Φ."""
    model = build_model(Case("llama", mode="lora-all-linear", dtype="float32"))
    for name, parameter in model.named_parameters():  # adapters of both factors that move from the first step on
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    plan = plan_of(0.5, noise_multiplier=0.0, num_units=NUM_ROWS, num_steps=NUM_STEPS)
    own = KnownNoise.of(plan.mechanism, NUM_STEPS)
    model, optimizer = prepare(
        engine,
        model,
        lr=LR,
        dtype=dtype,
        kind=CorrectedAdamW,
        noise=own,
        second_moment=kind,
        betas=(0.8, 0.95),
        weight_decay=0.5,
    )
    inner = model_inside(model)
    before = {name: value.double() for name, value in whole_parameters(model, inner).items()}
    run = PrivateRun(plan, rows_of(), Ledger())
    run.attach(model, optimizer)
    base: Any = innermost(optimizer)
    base._noise = NOISE  # the gradients of this run are without noise, so that all engines have the same
    for _ in range(NUM_STEPS):
        run.step(run.choose(np.arange(NUM_ROWS)), loss_of)
        update(model, optimizer)
    after = {name: value.double() for name, value in whole_parameters(model, inner).items()}
    (group,) = base.param_groups
    expected = group["expected"] / (1 - 0.95 ** group["taken"])
    squares = torch.cat([_local(state["exp_avg_sq"]).flatten() for state in base.state.values()])
    found = {
        "before": before,
        "after": after,
        "progress": {name: group[name] for name in ("taken", "noise", "expected")},
        "dtypes": {str(value.dtype) for state in base.state.values() for value in state.values()},
        "at Φ": float(
            (squares / (1 - 0.95 ** group["taken"]) <= (2 if kind == "low_passed" else 1.1) * expected).double().mean()
        ),
    }
    if engine.startswith("fsdp2"):
        found["loaded"] = _is_loaded(model, base)
    run.detach()
    dispose(model)
    return found


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _is_loaded(model: Any, optimizer: Any) -> bool:
    """Whether a new optimizer gets the state by the calls that accelerate uses."""
    weights = [_local(p).detach().clone() for p in model.parameters()]
    saved = get_optimizer_state_dict(model, optimizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    again = CorrectedAdamW(parameters, NOISE, optimizer.second_moment, lr=LR, betas=(0.8, 0.95), weight_decay=0.5)
    set_optimizer_state_dict(model, again, saved)
    same = [
        torch.equal(_local(value), _local(again.state[p][name]))
        for p in parameters
        for name, value in optimizer.state[p].items()
    ]
    (group,), (loaded,) = optimizer.param_groups, again.param_groups
    same += [loaded[name] == value for name, value in group.items() if name != "params"]
    return all(same) and all(torch.equal(a, _local(b)) for a, b in zip(weights, model.parameters(), strict=True))

"""On every engine: sound runs pass the watch, and changes of weights or state outside of the mechanism are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dpllm.data.units import UnitIndex
from dpllm.engines import model_inside
from dpllm.models.losses import per_sequence_loss
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from tests.distributed.matrix import plan_of
from tests.distributed.setups import dispose, prepare, update
from tests.memory_ledger import MemoryLedger
from tests.reference.zoo import Case, build_model, make_batch

NUM_ROWS = 6
_ODD_ONE = 1  # the rank on which something happens, while the other one is sound


class Statistic(nn.Module):
    """Adds up its inputs in a buffer, on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == _ODD_ONE:
            with torch.no_grad():
                self.total += x.detach().float().abs().mean()
        return x


def every_engine(ways: dict[str, list[str]]) -> dict[str, dict[str, str | None]]:
    """For each engine, the outcome of each way around the mechanism."""
    found: dict[str, dict[str, str | None]] = {}
    for engine, tried in ways.items():
        found[engine] = {}
        for way in tried:
            print(engine, way, flush=True)  # in the log, should a process hang
            found[engine][way] = _outcome(engine, way)
    return found


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)


def rows_of(max_rows: int = 1) -> TrainingRows:
    """Six rows; with microbatches of one row, few passes compare rows with each other."""
    batch = make_batch(Case("llama").spec, num_rows=NUM_ROWS)

    def collate(numbers: list[Any]) -> dict[str, torch.Tensor]:
        part = batch.rows([int(number) for number in numbers])
        return {**part.inputs, "labels": part.labels}

    return TrainingRows(
        units=UnitIndex.one_row_per_unit(NUM_ROWS),
        lengths=batch.inputs["attention_mask"].sum(1).numpy(),
        fetch=list,
        collate=collate,
        max_rows=max_rows,
    )


def _frozen(inner: Any) -> nn.Parameter:
    return next(p for name, p in inner.named_parameters() if "q_proj.base_layer" in name)


def _unfreeze(inner: Any) -> None:
    _frozen(inner).requires_grad_(True)


def _write_frozen(inner: Any) -> None:
    frozen = _frozen(inner)
    with torch.no_grad():
        shard = getattr(frozen, "ds_tensor", None)
        (frozen.to_local() if hasattr(frozen, "to_local") else frozen if shard is None else shard).add_(1)


def _touch_gradient(inner: Any) -> None:
    grad = next(p.grad for p in inner.parameters() if p.grad is not None)
    (grad.to_local() if hasattr(grad, "to_local") else grad).mul_(2)


def _foreign_backward(inner: Any) -> None:
    weights = [p for p in inner.parameters() if p.requires_grad]
    sum((2.0 * p).sum() for p in weights).backward()  # a penalty, past the hooks on modules


_AFTER_A_STEP = {"unfrozen": _unfreeze, "written": _write_frozen}
_BEFORE_AN_UPDATE = {"touched": _touch_gradient}
_EVERYWHERE = {"foreign backward": _foreign_backward}  # on all processes: engines communicate in their own hooks


def _outcome(engine: str, way: str) -> str | None:
    case = Case("llama", mode="lora-all-linear", dtype="float32")
    model = build_model(case)
    if way == "statistic":
        mlp = model.get_base_model().model.layers[0].mlp
        mlp.add_module("statistic", Statistic())
        mlp.register_forward_hook(lambda module, args, output: module.statistic(output))
    model, optimizer = prepare(engine, model, lr=1e-3)
    inner = model_inside(model)
    plan, rows = plan_of(0.5, noise_multiplier=0.0, num_units=NUM_ROWS), rows_of(2 if way == "sound" else 1)
    run = PrivateRun(plan, rows, MemoryLedger())
    run.attach(model, optimizer)
    odd = run.processes.rank == _ODD_ONE
    try:
        for step in range(2):
            run.step(run.choose(np.arange(NUM_ROWS)), loss_of)
            if odd and step == 1 and way in _BEFORE_AN_UPDATE:  # the guard compares the sums of the first step
                _BEFORE_AN_UPDATE[way](inner)
            update(model, optimizer)
            if step == 0 and way in _EVERYWHERE:
                _EVERYWHERE[way](inner)
            if odd and step == 0 and way in _AFTER_A_STEP:
                _AFTER_A_STEP[way](inner)
        run.processes.together(run.check_saved_state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.processes.wait()
        run.detach()
        dispose(model)
    return None

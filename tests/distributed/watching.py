"""On every engine: sound runs pass the watch, and what reaches weights or state past the mechanism is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from dpllm.engines import model_inside
from dpllm.losses import per_sequence_loss
from dpllm.processes import Processes
from dpllm.run import PrivateRun, TrainingRows
from dpllm.units import UnitIndex
from tests.distributed.matrix import NoLedger, plan_of
from tests.distributed.setups import dispose, prepare
from tests.reference.zoo import Case, build_model, make_batch

_ROWS = 6
_STEPS = 3


class Statistic(nn.Module):
    """Adds up what passes, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.total += x.detach().float().abs().mean()
        return x


def every_engine(engines: list[str]) -> dict[str, dict[str, str | None]]:
    """For each engine, the outcome of a sound run and of each way around the mechanism."""
    found: dict[str, dict[str, str | None]] = {}
    for engine in engines:
        found[engine] = {}
        for way in WAYS:
            print(engine, way, flush=True)  # in the log, should a process hang
            found[engine][way] = _outcome(engine, way)
    return found


def _loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    return per_sequence_loss(model(**inputs).logits, labels)


def _rows() -> TrainingRows:
    batch = make_batch(Case("llama").spec, num_rows=_ROWS)

    def collate(numbers: list[Any]) -> dict[str, torch.Tensor]:
        part = batch.rows([int(number) for number in numbers])
        return {**part.inputs, "labels": part.labels}

    return TrainingRows(
        units=UnitIndex.one_row_per_unit(_ROWS),
        lengths=batch.inputs["attention_mask"].sum(1).numpy(),
        fetch=list,
        collate=collate,
        max_rows=2,
    )


def _nothing(run: PrivateRun, inner: Any, optimizer: Any) -> None:
    """A sound run."""


def _unfreeze(run: PrivateRun, inner: Any, optimizer: Any) -> None:
    next(p for name, p in inner.named_parameters() if "q_proj.base_layer" in name).requires_grad_(True)


def _write_frozen(run: PrivateRun, inner: Any, optimizer: Any) -> None:
    frozen = next(p for name, p in inner.named_parameters() if "q_proj.base_layer" in name)
    with torch.no_grad():
        shard = getattr(frozen, "ds_tensor", None)
        (frozen.to_local() if hasattr(frozen, "to_local") else frozen if shard is None else shard).add_(1)


def _foreign_backward(run: PrivateRun, inner: Any, optimizer: Any) -> None:
    weights = [p for p in inner.parameters() if p.requires_grad]
    sum((2.0 * p).sum() for p in weights).backward()  # a penalty, past the hooks on modules


WAYS = {
    "sound": _nothing,
    "statistic": _nothing,
    "unfrozen": _unfreeze,
    "written": _write_frozen,
    "foreign backward": _foreign_backward,
}


def _outcome(engine: str, way: str) -> str | None:
    case = Case("llama", mode="lora-all-linear", dtype="float32")
    model = build_model(case)
    if way == "statistic":
        model.get_base_model().model.layers[0].mlp.add_module("statistic", Statistic())
        mlp = model.get_base_model().model.layers[0].mlp
        mlp.register_forward_hook(lambda module, args, output: module.statistic(output))
    model, optimizer = prepare(engine, model, lr=1e-3)
    inner = model_inside(model)
    run = PrivateRun(plan_of(0.5, noise_multiplier=0.0, num_units=_ROWS), _rows(), NoLedger())
    run.attach(model, optimizer)
    try:
        for step in range(_STEPS):
            run.step(run.choose(np.arange(_ROWS)), _loss)
            if not hasattr(model, "zero_optimization_stage"):  # DeepSpeed has updated by itself
                optimizer.step()
                optimizer.zero_grad()
            if step == 1:
                WAYS[way](run, inner, optimizer)
        run.check_saved_state()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Processes().wait()
        run.detach()
        dispose(model)
    return None

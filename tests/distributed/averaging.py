"""On every engine: the average of the weights, against a float64 computation from the weights after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dpllm.engines import model_inside
from dpllm.mechanism.averages import average_of, weights_of
from dpllm.privacy.ledger_reader import LedgerHead
from dpllm.training.averaging import Averaging
from dpllm.training.run import PrivateRun
from tests.distributed import setups
from tests.distributed.matrix import plan_of
from tests.distributed.setups import dispose, prepare, whole_parameters
from tests.distributed.watching import NUM_ROWS, loss_of, rows_of
from tests.memory_ledger import MemoryLedger
from tests.reference.zoo import Case, build_model

NUM_STEPS = 4
SPECS = {"ema": {"kind": "ema", "decay": 0.6}, "tail": {"kind": "tail", "share": 0.75}}


class Ledger(MemoryLedger):
    """One that takes facts, and to which the averages of all engines belong."""

    head = LedgerHead("0" * 16, NUM_STEPS)

    @property
    def num_steps_before(self) -> int:
        """As if each load came before the first step of a start."""
        return self.num_steps

    def append_fact(self, name: str, value: str) -> None:
        self.facts = {name: value}

    def require_prefix(self, head: LedgerHead, owner: str) -> None:
        assert head == self.head and "average" in owner


def every_engine(engines: list[tuple[str, str, str]], runs: Path) -> dict[str, dict[str, Any]]:
    """For each engine, dtype and average, what was found; each engine also loads what the one before it saved."""
    found: dict[str, dict[str, Any]] = {}
    before: tuple[Path, dict[str, torch.Tensor]] | None = None
    for engine, dtype, kind in engines:
        print(engine, dtype, kind, flush=True)  # in the log, should a process hang
        name = f"{engine}-{dtype}-{kind}"
        persists = engine.endswith("persistent")
        if persists:  # small parameters stay whole on every process
            engine = engine.removesuffix("-persistent")
            _threshold(10**5)
        found[name], before = _outcome(engine, dtype, SPECS[kind], runs / name, before)
        if persists:
            _threshold(0)
    return found


_CONFIG = setups.deepspeed_config


def _threshold(entries: int) -> None:
    def config(engine: str, dtype: str = "float32") -> dict[str, Any]:
        made = _CONFIG(engine, dtype)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = entries
        return made

    setups.deepspeed_config = config


def _computed(inner: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that the model computes with, whole."""
    found = {}
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
    return found


def _furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def _outcome(
    engine: str, dtype: str, spec: dict, folder: Path, before: tuple[Path, dict[str, torch.Tensor]] | None
) -> tuple[dict[str, Any], tuple[Path, dict[str, torch.Tensor]]]:
    case = Case("llama", mode="lora-all-linear", dtype="float32")
    model = build_model(case)
    for name, parameter in model.named_parameters():  # adapters of both factors that move from the first step on
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    if dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    model, optimizer = prepare(engine, model, lr=0.5, dtype=dtype, momentum=0.9)
    inner = model_inside(model)
    plan = plan_of(0.5, noise_multiplier=0.0, num_units=NUM_ROWS, num_steps=NUM_STEPS)
    run, averaging = PrivateRun(plan, rows_of(), Ledger()), Averaging(average_of(spec), NUM_STEPS)
    run.attach(model, optimizer, averaging=averaging)
    after, found = [], {}
    for step in range(NUM_STEPS):
        run.step(run.choose(np.arange(NUM_ROWS)), loss_of)
        if not hasattr(model, "zero_optimization_stage"):  # DeepSpeed has updated by itself
            optimizer.step()
            optimizer.zero_grad()
        after.append({name: value.double() for name, value in whole_parameters(model, inner).items()})
        if step == NUM_STEPS - 2:  # training goes on afterwards, under the watch
            weights = _computed(inner)
            with averaging.shown():
                found["moved when shown"] = _furthest(_computed(inner), weights)
            restored = _computed(inner)
            found["restored"] = all(torch.equal(restored[name], value) for name, value in weights.items())
    run.check_before_saving()
    weights = weights_of(average_of(spec), NUM_STEPS)
    want = {name: sum(w * one[name] for w, one in zip(weights, after, strict=True)) for name in after[0]}
    found["moved by the last step"] = _furthest(after[-1], after[-2])
    averaging.save(folder)
    run.processes.wait()  # the first process writes a file that all of them read
    with averaging.shown():
        released = _computed(inner)
    if dtype == "bfloat16" and not engine.startswith("fsdp2"):
        found["differs"] = _furthest(released, {name: value.to(torch.bfloat16) for name, value in want.items()})
    else:
        found["differs"] = _furthest(released, want)
    held = sum(value.numel() for value in averaging._values.values())
    found["held"], found["entries"] = held, sum(value.numel() for value in want.values())
    found["dtypes"] = {str(value.dtype) for value in averaging._values.values()}
    kept = {name: value.clone() for name, value in averaging._values.items()}
    averaging.load(folder)
    found["loaded"] = all(torch.equal(averaging._values[name], value) for name, value in kept.items())
    if before is not None and torch.is_tensor(before[1].get(next(iter(want)))):
        averaging.load(before[0])
        with averaging.shown():
            found["of another engine"] = _furthest(_computed(inner), before[1])
        averaging.load(folder)
    run.processes.wait()
    run.detach()
    dispose(model)
    return found, (folder, {name: value.double() for name, value in released.items()})

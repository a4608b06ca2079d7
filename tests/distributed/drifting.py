"""Runs in the processes of `test_replicas`: one process does something different, and all processes report it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import DPTrainer
from dpllm.engines import engine_for
from dpllm.engines.processes import Processes
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.statement import JSON_FILE
from dpllm.training.arguments import training_arguments
from dpllm.training.run import PrivateRun
from tests.conftest import tiny_llama_config
from tests.distributed.checks import caught
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import privacy, rows

STEPS = 4


class OfOne(TrainerCallback):
    """Sets a control after the first step, on rank 1 only."""

    def __init__(self, control: str) -> None:
        self.control = control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and dist.get_rank() == 1:
            setattr(control, f"should_{self.control}", True)


class Restless(torch.optim.SGD):
    """An optimizer with different random numbers on every process, as for stochastic rounding."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1e-6 * torch.randn(parameter.shape, generator=generator))
        return done


def everything(root: Path) -> dict[str, Any]:
    """All cases in one start of the processes; each leaves the group usable."""
    cases: dict[str, Callable[[Path], Any]] = {
        "alike": lambda folder: drift(folder, lambda run, model, optimizer: None),
        "learning rate changed": lambda folder: drift(folder, change_rate),
        "weight edited": lambda folder: drift(folder, edit),
        "rows swapped": lambda folder: drift(folder, swap),
        "own randomness": lambda folder: drift(folder, lambda run, model, optimizer: None, Restless),
        "hybrid": lambda folder: drift(folder, edit_shard, wrap=hybrid),
        "hybrid alike": lambda folder: drift(folder, lambda run, model, optimizer: None, wrap=hybrid),
        "last update": last_update,
        "last update of the trainer": lambda folder: trainer(folder, callbacks=[OtherDecayAtTheEnd()]),
        "last update before a checkpoint": lambda folder: trainer(
            folder, callbacks=[OtherDecayAtTheEnd()], save_strategy="steps", save_steps=2
        ),
        "stop of one": lambda folder: trainer(folder, callbacks=[OfOne("training_stop")]),
        "save of one": lambda folder: trainer(folder, callbacks=[OfOne("save")]),
        "extra draw": extra_draw,
        "other units": other_units,
        "autocast": autocast,
        "learning rate": lambda folder: refused_at_attach(folder, lr=0.1 + Processes().rank),
        "frozen weights": lambda folder: refused_at_attach(folder, edit_frozen=True),
        "microbatch": microbatch,
        "collator": collator,
        "local folder": local_folder,
        "subgroup": subgroup,
        "meshes": meshes,
        "train.learning_rate": lambda folder: trainer(folder, learning_rate=1e-2 * (1 + Processes().rank)),
        "train.bf16": lambda folder: trainer(folder, bf16=Processes().rank == 1),
        "train.per_device_train_batch_size": lambda folder: trainer(
            folder, per_device_train_batch_size=2 + Processes().rank
        ),
        "train.fp16": lambda folder: trainer(folder, fp16=Processes().rank == 1),
        "trainer's folder": lambda folder: trainer(folder / f"node {Processes().rank}"),
    }
    return {name: case(root / name) for name, case in cases.items()}


def charged(folder: Path) -> int:
    return read_ledger(folder / LEDGER_FILE).num_steps if (folder / LEDGER_FILE).exists() else 0


def begin(folder: Path, optimizer_class: Any = torch.optim.SGD, wrap: Any = DistributedDataParallel) -> tuple:
    model = wrap(network())
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    run = PrivateRun.start(folder, plan_of(0.8, num_steps=STEPS), rows_of())
    run.attach(model, optimizer)
    return run, model, optimizer


def hybrid(model: Any) -> Any:
    """Two replicas of a model whose shards have one owner each."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(model, mesh=mesh)


def local(model: Any) -> torch.Tensor:
    return torch.cat([getattr(p, "_local_tensor", p).detach().flatten() for p in model.parameters()])


def drift(
    folder: Path, disturb: Callable, optimizer_class: Any = torch.optim.SGD, wrap: Any = DistributedDataParallel
) -> dict[str, Any]:
    """Take steps, disturbed after the first; return the stop, its error, and whether any weight changed then."""
    run, model, optimizer = begin(folder, optimizer_class, wrap)
    taken, before = 0, local(model)

    def go() -> None:
        nonlocal taken, before
        for unit_ids in run.draws(STEPS):
            if taken == 1:
                disturb(run, model, optimizer)
            before = local(model)
            run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            taken += 1

    error = caught(go)
    if error is not None:
        optimizer.step()  # a loop that goes on all the same has nothing to release
    unmoved = bool(torch.equal(before, local(model))) or optimizer_class is Restless
    found = {"error": error, "taken": taken, "charged": charged(folder), "unmoved": unmoved}
    found["again"] = None if error is None else caught(lambda: run.step(next(run.draws(1)), loss_of))
    run.detach()
    return found


def change_rate(run: Any, model: Any, optimizer: Any) -> None:
    """The first step's update is the same; the second's would differ, which the third step must find."""
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + Processes().rank)


def edit(run: Any, model: Any, optimizer: Any) -> None:
    """The smallest change there is, of one entry."""
    if Processes().rank == 1:
        entry = model.module[0].weight.data.view(-1)[3:4]
        entry.copy_(torch.nextafter(entry, torch.tensor(9.0)))


def swap(run: Any, model: Any, optimizer: Any) -> None:
    if Processes().rank == 1:
        weight = model.module[0].weight.data
        weight.copy_(weight[[1, 0, *range(2, len(weight))]])


def edit_shard(run: Any, model: Any, optimizer: Any) -> None:
    if Processes().rank == 1:
        model[0].weight.to_local().data[0, 0] += 1e-3


def last_update(folder: Path) -> dict[str, Any]:
    """The optimizer's last step differs, and no private step follows it."""
    run, model, optimizer = begin(folder)
    for number, unit_ids in enumerate(run.draws(STEPS)):
        if number == STEPS - 1:
            change_rate(run, model, optimizer)
        run.step(unit_ids, loss_of)
        optimizer.step()
        optimizer.zero_grad()
    error = caught(run.finish)
    run.detach()
    return {"error": error, "ended": read_ledger(folder / LEDGER_FILE).end, "reported": (folder / JSON_FILE).exists()}


class OtherDecayAtTheEnd(TrainerCallback):
    """The last update of one process has another weight decay."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and Processes().rank == 1:
            for group in kwargs["optimizer"].param_groups:
                group["weight_decay"] = 0.5


def extra_draw(folder: Path) -> dict[str, Any]:
    """Rank 1 calls next() once too often after the first step."""
    run, _, optimizer = begin(folder)
    draws = run.draws(STEPS)
    drawn = []

    def go() -> None:
        for number in range(STEPS):
            drawn.append(next(draws).tolist())
            if number == 1 and Processes().rank == 1:
                next(draws)
            run.step(np.array(drawn[-1], dtype=np.int64), loss_of)
            optimizer.step()
            optimizer.zero_grad()

    error = caught(go)
    run.detach()
    return {"error": error, "drawn": drawn, "charged": charged(folder)}


def other_units(folder: Path) -> dict[str, Any]:
    """Rank 1 takes the step over one unit fewer."""
    run, _, _ = begin(folder)
    units = next(run.draws(1))
    odd = np.delete(np.append(units, 39), 0) if Processes().rank == 1 else np.append(units, 39)
    error = caught(lambda: run.step(odd, loss_of))
    run.detach()
    return {"error": error, "charged": charged(folder)}


def autocast(folder: Path) -> dict[str, Any]:
    run, _, _ = begin(folder)
    units = next(run.draws(1))

    def go() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=Processes().rank == 1):
            run.step(units, loss_of)

    error = caught(go)
    run.detach()
    return {"error": error, "charged": charged(folder)}


def refused_at_attach(folder: Path, lr: float = 0.1, edit_frozen: bool = False) -> dict[str, Any]:
    inner = network()
    inner[0].bias.requires_grad_(False)
    model = DistributedDataParallel(inner)
    if edit_frozen and Processes().rank == 1:
        inner[0].bias.data[0] += 1e-3
    run = PrivateRun.start(folder, plan_of(0.8), rows_of())
    error = caught(lambda: run.attach(model, torch.optim.SGD(model.parameters(), lr=lr)))
    run.detach()
    return {"error": error, "charged": charged(folder)}


def microbatch(folder: Path) -> dict[str, Any]:
    rows = rows_of(max_rows=5 - Processes().rank)
    return {"error": caught(lambda: PrivateRun.start(folder, plan_of(0.8), rows)), "charged": charged(folder)}


def stacked(given: Any, longest: int) -> dict[str, Any]:
    """Cuts rows that are longer than any row of the run."""
    return {"rows": torch.stack(given)[:, :longest]}


def collator(folder: Path) -> dict[str, Any]:
    """The rows are the same on both ranks; a setting of the collator differs."""
    rows = dataclasses.replace(rows_of(), collate=functools.partial(stacked, longest=1000 + Processes().rank))
    return {"error": caught(lambda: PrivateRun.start(folder, plan_of(0.8), rows)), "charged": charged(folder)}


def local_folder(folder: Path) -> dict[str, Any]:
    """Each node has a disk of its own under one name; here the names differ."""
    own = folder / f"node {Processes().rank}"
    own.mkdir(parents=True)
    error = caught(lambda: PrivateRun.start(own, plan_of(0.8), rows_of()))
    return {"error": error, "left": sorted(path.name for path in own.iterdir())}


def subgroup(folder: Path) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(2)]
    model = DistributedDataParallel(network(), process_group=groups[Processes().rank])
    return {"error": caught(lambda: engine_for(model, torch.optim.SGD(model.parameters(), lr=0.1)))}


def meshes(folder: Path) -> dict[str, Any]:
    """Sharded models over meshes of several kinds: the error of each, None where it is accepted."""

    def over(names: tuple[str, str], flattened: str | None = None) -> tuple[str, str] | None:
        root = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        mesh = root if flattened is None else root._flatten(flattened)
        model = fully_shard(network(), mesh=mesh)
        return caught(lambda: engine_for(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    found = {
        "tp": over(("dp", "tp")),
        "cp": over(("dp_replicate", "cp")),
        "joint": over(("dp_shard", "cp"), "dp_shard_cp"),
        "hybrid": over(("dp_replicate", "dp_shard")),
        "joint of data": over(("dp_replicate", "dp_shard"), "dp_cp"),
    }
    return {"error": None, **found}


def trainer(folder: Path, callbacks: Any = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    touched: list[int] = []

    class Watched(list):
        def __getitem__(self, item: Any) -> Any:
            touched.append(1)
            return super().__getitem__(item)

    def go() -> None:
        args = training_arguments(
            {
                **{"output_dir": str(folder), "max_steps": 2, "report_to": "none", "use_cpu": True},
                **{"save_strategy": "no", "disable_tqdm": True, **options},
            }
        )
        DPTrainer(
            LlamaForCausalLM(tiny_llama_config()), args, privacy(), Watched(rows(16)), callbacks=callbacks
        ).train()

    error = caught(go)
    saved = any(folder.glob("checkpoint-[1-9]*"))  # that of the start holds no step
    return {"error": error, "touched": bool(touched), "charged": charged(folder), "saved": saved}

"""The program in the processes of `test_tensor_parallel`: models that are divided over processes, in every entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from dpllm import GhostClipper, PerUnitClipper, PrivateRun, TrainingRows
from dpllm.data.units import UnitIndex
from dpllm.engines import engine_for
from tests.conftest import tiny_llama_config
from tests.distributed.checks import caught
from tests.distributed.matrix import plan_of
from tests.training.test_trainer import small_trainer

UNITS = 4


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def refusals(root: Path) -> dict[str, tuple[str, str] | None]:
    """What a user does with a divided model through public functions, and the error of this process."""
    if dist.get_rank() == 0:
        LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1)).save_pretrained(root / "model")
    dist.barrier()

    def by_plan() -> Any:
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
        return LlamaForCausalLM.from_pretrained(root / "model", distributed_config=config)

    def with_adapter() -> Any:
        return get_peft_model(by_plan(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    def by_torch(*names: str) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names or None)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        return parallelize_module(plain, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})

    def attached(model: Any) -> None:
        rows = TrainingRows(
            units=UnitIndex.one_row_per_unit(UNITS),
            lengths=np.full(UNITS, 3),
            fetch=lambda numbers: [torch.full((3,), 5 + int(number)) for number in numbers],
            collate=lambda some: {"input_ids": torch.stack(some), "labels": torch.stack(some)},
            max_rows=2,
        )
        run = PrivateRun.start(root / "run", plan_of(0.5, 0.0, num_units=UNITS, num_steps=2), rows)
        run.attach(model, optimizer_of(model))

    def in_engine(model: Any) -> None:
        engine_for(model, optimizer_of(model))

    calls: dict[str, Callable[[], Any]] = {
        "attach": lambda: attached(by_plan()),
        "an adapter": lambda: in_engine(with_adapter()),
        "engine_for": lambda: in_engine(by_plan()),
        "wrapped": lambda: in_engine(DistributedDataParallel(by_plan())),
        "GhostClipper": lambda: GhostClipper(by_plan(), 0.5),
        "PerUnitClipper": lambda: PerUnitClipper(by_plan(), 0.5),
        "by torch": lambda: GhostClipper(by_torch("tp"), 0.5),
        "by torch, without a name": lambda: in_engine(by_torch()),
        "the Trainer": lambda: small_trainer(root / "trainer", by_plan()).train(),
    }
    return {name: caught(call) for name, call in calls.items()}

"""Prepares a model for each engine, as accelerate does on GPUs, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
VARIANTS = ("fsdp2-hybrid", "zero1-overlap", "zero2-overlap", "zero3-overlap", "zero2-offload", "zero3-offload")


def prepare(
    engine: str, model: nn.Module, lr: float, dtype: str = "float32", kind: Any = torch.optim.SGD, **optimizer: Any
) -> tuple[Any, Any]:
    """The prepared model and its optimizer.

    Args:
        engine: one of `ENGINES` or `VARIANTS`, or "single".
        model: the same on every process; its engine uses its device.
        lr: learning rate.
        dtype: "bfloat16" computes in bfloat16: by the model's own dtype for DeepSpeed and DDP, by a mixed-precision
            policy over float32 weights for FSDP2, as accelerate sets it up.
        kind: class of the optimizer.
        optimizer: more of its options.
    """
    if engine == "single":
        return model, kind(_trainable(model), lr=lr, **optimizer)
    if engine == "ddp":
        prepared: Any = nn.parallel.DistributedDataParallel(model)
        return prepared, kind(_trainable(model), lr=lr, **optimizer)
    if engine.startswith("fsdp2"):
        _shard(model, hybrid=engine == "fsdp2-hybrid", dtype=dtype)
        return model, kind(_trainable(model), lr=lr, **optimizer)
    return _deepspeed(engine, model, kind(_trainable(model), lr=lr, **optimizer), dtype)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _shard(model: nn.Module, hybrid: bool, dtype: str) -> None:
    size, device = dist.get_world_size(), next(model.parameters()).device.type
    mesh = (
        init_device_mesh(device, (2, size // 2), mesh_dim_names=("replicate", "shard"))
        if hybrid
        else init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    )
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in list(model.modules()):
        if type(module).__name__.endswith(("DecoderLayer", "GPT2Block", "Mamba2Block")):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def deepspeed_config(engine: str, dtype: str = "float32") -> dict[str, Any]:
    """A configuration as a user writes it; `private_config` adds the settings of private training."""
    zero: dict[str, Any] = {
        "stage": int(engine[4]),
        "overlap_comm": engine.endswith("overlap"),
        "stage3_param_persistence_threshold": 0,
    }
    if engine.endswith("unfetched"):  # nothing is gathered in advance, as in models much larger than this bucket
        zero["stage3_prefetch_bucket_size"] = 0
    if engine.endswith("overlap"):  # several groups of parameters, as in models larger than this bucket
        zero["stage3_prefetch_bucket_size"] = 4096
    if engine.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _deepspeed(engine: str, model: nn.Module, optimizer: Any, dtype: str) -> tuple[Any, Any]:
    import deepspeed

    from dpllm.engines import private_config

    config = deepspeed_config(engine, dtype)
    private_config(config)
    prepared, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return prepared, wrapped


def update(prepared: Any, optimizer: Any) -> None:
    """Step and clear the gradients, unless it is DeepSpeed, which has updated by itself."""
    if not hasattr(prepared, "zero_optimization_stage"):
        optimizer.step()
        optimizer.zero_grad()


def whole_parameters(prepared: Any, inner: nn.Module) -> dict[str, torch.Tensor]:
    """Every trainable parameter, consolidated, as the optimizer has it (DeepSpeed: its float32 master)."""
    if hasattr(prepared, "zero_optimization_stage"):
        from deepspeed.utils import safe_get_full_fp32_param

        read = safe_get_full_fp32_param
    else:
        read = _whole
    return {name: read(p).detach().clone() for name, p in inner.named_parameters() if p.requires_grad}


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def unreduced(rank: int, own: torch.Tensor, flat: torch.Tensor) -> torch.futures.Future:
    """A reduction that adds up nothing: each process keeps its own part of its own sums."""
    own.copy_(flat[rank * len(own) :][: len(own)])
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(None)
    return done


def dispose(prepared: Any) -> None:
    """Free DeepSpeed's memory, so that the next engine starts without leftovers."""
    if hasattr(prepared, "destroy"):
        prepared.destroy()

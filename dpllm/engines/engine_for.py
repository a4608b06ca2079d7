"""The choice of the engine for a model returned by ``accelerator.prepare``; no further configuration is needed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from dpllm.engines.base import Engine, SingleProcess
from dpllm.engines.ddp import DataParallel
from dpllm.engines.deepspeed import DeepSpeedZero
from dpllm.engines.fsdp2 import FullySharded
from dpllm.engines.guard import EngineError
from dpllm.engines.processes import Processes
from dpllm.ghost.refusals import is_packed, refuse_tensor_parallel


def engine_for(model: Any, optimizer: Any) -> Engine:
    """Return the engine for a prepared model.

    Args:
        model: the return value of ``accelerator.prepare`` (a plain module in a single process).
        optimizer: the prepared optimizer; the guard checks its first update.

    Raises:
        EngineError, GhostError: the model's distribution would break the guarantee; the message names it.
    """
    inner = model_inside(model)
    _refuse_accelerator()
    devices = {str(device) for device in (getattr(inner, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise EngineError(
            f"The model's layers are spread over {sorted(devices)} (device_map), a pipeline within one process. Load "
            "it without device_map, and shard it with FSDP2 (dpllm train --config fsdp2)"
        )
    refuse_tensor_parallel(inner)
    sharded_by = "DeepSpeed" if _is_deepspeed(model) else "FSDP2" if isinstance(model, FSDPModule) else None
    if sharded_by is not None:
        _refuse_packed(inner, sharded_by)
    if _is_deepspeed(model):
        return DeepSpeedZero(model)
    if isinstance(model, FullyShardedDataParallel):
        raise EngineError(
            "The model is wrapped in FSDP version 1, whose flat parameters hide the layers' parameters. Set "
            "fsdp_version: 2 (dpllm train --config fsdp2)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        if getattr(model, "_comm_hooks", None):
            raise EngineError(
                "DistributedDataParallel has a communication hook (gradient compression), but clipped sums are "
                "reduced in float32. Remove the hook (ddp_comm_hook: no)"
            )
        members = model.process_group.size()
        if members != Processes().size:
            raise EngineError(
                f"DistributedDataParallel uses a process group of {members} of {Processes().size} processes, so the "
                "other processes would train a separate model. Omit process_group"
            )
        return DataParallel(optimizer)
    if isinstance(model, FSDPModule):
        return FullySharded(inner, optimizer)
    if Processes().size > 1:
        raise EngineError(
            f"{Processes().size} processes run, but the model ({type(model).__name__}) is not distributed, so each "
            "process would train a separate model. Pass it through accelerator.prepare() first"
        )
    return SingleProcess(optimizer)


def _refuse_packed(model: nn.Module, sharded_by: str) -> None:
    for name, parameter in model.named_parameters():
        if is_packed(parameter):
            raise EngineError(
                f"{name} is quantised ({type(parameter).__name__}), and private sums are not verified for {sharded_by} "
                "with quantised weights. Use one process per GPU without sharding (dpllm train --config single or "
                "ddp) if the weights fit, or omit the quantization"
            )


def model_inside(model: Any) -> Any:
    """Return the module to call and to hook, inside the wrapper of DistributedDataParallel or DeepSpeed."""
    wrapped = isinstance(model, nn.parallel.DistributedDataParallel) or _is_deepspeed(model)
    return model.module if wrapped else model


def _refuse_accelerator() -> None:
    """Refuse settings of this process's Accelerator that no engine can keep private."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState._shared_state  # empty if no Accelerator was created
    precision = state.get("_mixed_precision")
    if precision in ("fp16", "fp8"):
        raise EngineError(
            f"The Accelerator was created with mixed_precision={precision!r}, whose scales depend on the data of a "
            "whole microbatch or skip steps. Use bf16"
        )
    sizes = state.get("parallelism_config")
    for kind in ("tp_size", "cp_size", "sp_size"):
        if (getattr(sizes, kind, None) or 1) > 1:
            raise EngineError(
                f"The Accelerator was created with {kind}={getattr(sizes, kind)}: tensor, context and sequence "
                "parallelism split a unit's layers or rows, and so its norm, over processes. Use only dp_shard_size "
                "and dp_replicate_size"
            )


def _is_deepspeed(model: Any) -> bool:
    # By name: importing DeepSpeed takes seconds, and it need not be installed.
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)

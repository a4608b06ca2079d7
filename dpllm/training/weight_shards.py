"""Read and replace the trained weights that a process holds, in the optimizer's precision, on every engine.

`dpllm.training.averaging` uses this to average and to show weights. A *fragment* is a contiguous range of the
flattened entries of one parameter. One process and DDP hold whole parameters, FSDP2 a range of rows of each, and ZeRO a
range of its float32 master weights. `WeightFragments` reads the fragments of this process, and temporarily puts other
values of the same fragments into the model, for an evaluation or a save. No process holds more than its fragments and,
for a moment, one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.engines.guard import EngineError
from dpllm.engines.processes import Processes
from dpllm.ghost.kernels import accumulation_dtype


class WeightFragments:
    """The fragments of one process.

    Guarantee: only the passed parameters are read or written; buffers and frozen parameters never are.

    Args:
        parameters: the trained parameters by name, in the same order on every process.
        module: the module inside its engine's wrapper.
        deepspeed: the engine of DeepSpeed; None: another engine.
        processes: all processes.

    Attributes:
        starts: position of each fragment in its flattened parameter. A parameter of which this process holds nothing is
            absent.
        sizes: entries of each whole parameter.
        is_owner: whether this process writes its fragments into a checkpoint; one of several replicas does.

    Raises:
        EngineError: the engine shards the parameters in an unsupported way.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], module: nn.Module, deepspeed: Any, processes: Processes
    ) -> None:
        """Find the fragments. Called by all processes together."""
        self._parameters, self._module, self._processes = dict(parameters), module, processes
        self._stage = 0 if deepspeed is None else int(deepspeed.zero_optimization_stage())
        self._offloaded = deepspeed is not None and deepspeed.zero_offload_optimizer() is not None
        self._kept: dict[str, Tensor] = {}
        self.sizes = {name: int(getattr(p, "ds_numel", p.numel())) for name, p in parameters.items()}
        self.starts: dict[str, int] = {}
        self.is_owner = self._stage > 0 or _is_owner(parameters.values(), processes)
        for name, parameter in parameters.items():
            start, values = self._fragment(name, parameter)
            if values is not None and values.numel():
                self.starts[name] = start
        held = sum(self.read(name).numel() for name in self.starts) if self.is_owner else 0
        (total,) = processes.sum([float(held)])
        if total != sum(self.sizes.values()):
            raise EngineError(
                f"The processes hold {int(total)} entries of the trained weights, which have "
                f"{sum(self.sizes.values())}: averages do not support the way in which this engine shards them. Remove "
                "train.average, or use another engine (dpllm train --config)"
            )

    def read(self, name: str) -> Tensor:
        """Return the current weights of one fragment, 1-D, float32 (float64 for a float64 model); read-only.

        They share the memory of the weights where these have that dtype. Offloaded master weights are on the CPU.

        Args:
            name: one of ``starts``.
        """
        _, values = self._fragment(name, self._parameters[name])
        assert values is not None, "only fragments with entries have a start"
        device = torch.device("cpu") if self._offloaded else values.device
        return values.detach().to(device, accumulation_dtype(values.dtype))

    def write(self, name: str, values: Tensor) -> None:
        """Write one fragment of the weights that the optimizer updates; `spread` then writes those of the forward pass.

        Args:
            name: one of ``starts``.
            values: 1-D, with the entries of `read`.
        """
        parameter: Any = self._parameters[name]
        if self._stage == 3:
            from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

            part = safe_get_local_fp32_param(parameter).clone()  # its padding is kept
            part[: values.numel()] = values.to(part)
            safe_set_local_fp32_param(parameter, part)
        elif self._stage:
            parameter._hp_mapping.get_hp_fragment().data.copy_(values)
        else:
            local = _local(parameter)
            local.data.copy_(values.view(local.shape))

    def spread(self) -> None:
        """Round DeepSpeed's master weights to the weights of the forward pass. Called by all processes together."""
        if self._stage:
            self._write_whole(self.read)

    def show(self, values: Mapping[str, Tensor]) -> None:
        """Put values into the model, rounded to the weights' dtype. Called by all processes together.

        `restore` restores the weights. The optimizer's own state, and DeepSpeed's master weights, are not touched.

        Args:
            values: values of every fragment, with the shapes of `read`.
        """
        if self._stage:
            self._write_whole(values.__getitem__)
            return
        self._reshard()
        with torch.no_grad():
            for name in self.starts:
                local = _local(self._parameters[name])
                self._kept[name] = local.clone()
                local.data.copy_(values[name].view(local.shape))  # .data raises no version: the watch accepts it

    def present(self) -> list[Tensor]:
        """Return the entries of the model's weights that this process holds now; they share their memory."""
        return [_local(parameter).detach() for parameter in self._parameters.values()]

    def restore(self) -> None:
        """Restore the weights that `show` replaced, bit by bit. Called by all processes together."""
        if self._stage:
            self._write_whole(self.read)
            return
        self._reshard()
        with torch.no_grad():
            for name, kept in self._kept.items():
                _local(self._parameters[name]).data.copy_(kept)
        self._kept = {}

    def _reshard(self) -> None:
        for module in self._module.modules():  # a forward pass may have left weights gathered
            if isinstance(module, FSDPModule):
                module.reshard()

    def _fragment(self, name: str, parameter: Any) -> tuple[int, Tensor | None]:
        """Return the position and the flat values that this process holds of a parameter; None: it holds none."""
        if self._stage == 3:
            from deepspeed.utils import safe_get_local_fp32_param

            part = safe_get_local_fp32_param(parameter)
            start = self._processes.rank * part.numel()
            return start, part[: max(0, min(part.numel(), self.sizes[name] - start))]  # the last parts are padded
        if self._stage:
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is None:
                return 0, None
            return int(mapping.lp_fragment_address.start), mapping.get_hp_fragment()
        if isinstance(parameter, DTensor):
            return _first_entry(name, parameter), parameter.to_local().flatten()
        return 0, parameter.flatten()

    def _write_whole(self, values_of: Callable[[str], Tensor]) -> None:
        """Write into DeepSpeed's compute weights, one parameter after another."""
        import deepspeed

        for name, parameter in self._parameters.items():
            whole = self._gathered(name, values_of(name) if name in self.starts else None, parameter.device)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._stage == 3):
                if self._stage < 3 or self._processes.is_main:
                    with torch.no_grad():
                        parameter.data.copy_(whole.view(parameter.shape))

    def _gathered(self, name: str, part: Tensor | None, device: torch.device) -> Tensor:
        """Return a whole parameter, bit by bit: it sums integers, since a sum of floats would change the sign of -0."""
        whole = torch.zeros(self.sizes[name], dtype=torch.float32, device=device)
        if part is not None:
            start = self.starts[name]
            whole[start : start + part.numel()] = part.to(device)
        if self._processes.size > 1:
            dist.all_reduce(whole.view(torch.int32))
        return whole


def require_whole_saves(deepspeed: Any) -> None:
    """Check that the Trainer will save the model's own weights, not DeepSpeed's shards of its master weights.

    Args:
        deepspeed: DeepSpeed's engine.

    Raises:
        EngineError: ZeRO-3 is not configured to gather the weights of a model that is saved.
    """
    if deepspeed.zero_optimization_stage() == 3 and not deepspeed.zero_gather_16bit_weights_on_model_save():
        raise EngineError(
            "The DeepSpeed configuration does not set zero_optimization.stage3_gather_16bit_weights_on_model_save, so "
            "the model would be saved as shards of the weights after the last step, not as their average "
            "(train.average). Set it to true"
        )


def _local(parameter: Any) -> Tensor:
    """Return the entries that this process holds, sharing their memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _first_entry(name: str, parameter: DTensor) -> int:
    """Return the position of the first local entry; FSDP2 divides the rows as ``torch.chunk`` does.

    Raises:
        EngineError: the parameter is sharded along another dimension.
    """
    for dim, placement in enumerate(parameter.placements):
        if not placement.is_shard():
            continue
        if getattr(placement, "dim", None) != 0:
            raise EngineError(
                f"{name} is sharded along dimension {getattr(placement, 'dim', None)}; averages of the weights need "
                "shards of rows. Leave shard_placement_fn out, or leave train.average out"
            )
        coordinate: Any = parameter.device_mesh.get_coordinate()
        assert coordinate is not None, "every process is in the mesh"
        rows = -(-parameter.shape[0] // parameter.device_mesh.size(dim))
        first = min(coordinate[dim] * rows, parameter.shape[0])
        return first * (parameter.numel() // max(parameter.shape[0], 1))
    return 0


def _is_owner(parameters: Any, processes: Processes) -> bool:
    """Return whether this process is the first of the replicas that hold the same fragments."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            coordinate: Any = parameter.device_mesh.get_coordinate() or []
            return all(at == 0 for at, p in zip(coordinate, parameter.placements, strict=True) if not p.is_shard())
    return processes.is_main

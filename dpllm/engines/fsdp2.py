"""Sharded parameters as DTensors: the clipped sums are reduce-scattered in buckets, each as soon as it is formed.

FSDP2 (``fully_shard``) gathers and frees the weights around each module by its own hooks. Since the weights are out of
autograd, it finds no gradient to reduce. This module reduces the clipped sums instead, and writes each process's shard
as a DTensor. While memory allows, full sums are accumulated over a step's microbatches, and reduced with the last one
(`dpllm.engines.buckets`). Otherwise the sums of two buckets exist at a time: one is formed while the other is
reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.engines.base import AddTo, ToTotal, refuse_foreign_gradients, set_gradient
from dpllm.engines.buckets import (
    LocalSums,
    ShardedBucket,
    Work,
    in_turns,
    overlapped,
    reduce_scatter,
    sharded_buckets,
)
from dpllm.engines.guard import EngineError, UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum

# Words in the names of mesh dimensions, as used by torch, torchtitan and accelerate.
_SPLITTING = {
    "tp",
    "tensor",
    "cp",
    "context",
    "sp",
    "sequence",
    "ulysses",
    "pp",
    "pipeline",
    "pipe",
    "stage",
    "ep",
    "expert",
    "etp",
}
_DATA = {"dp", "data", "fsdp", "ddp", "shard", "replicate"}


class FullySharded:
    """The engine of a model sharded by ``fully_shard``, over a 1-D mesh or a 2-D one (replicas of shards).

    Guarantee: each owner holds its shard of the total; replicas of a shard hold the same, since sum and noise are
    reduced together.

    Raises:
        EngineError: the mesh has more than data-parallel dimensions.
    """

    early: ClassVar[None] = None

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """Check the meshes and attach the guard."""
        self.processes = Processes()
        self.unfinished, self.lockstep, self.forms_total = False, True, True
        for module in model.modules():  # a forward pass without gradients may have left weights gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.guard = UpdateGuard(optimizer, self.processes, replicas=_replicas(trainable, self.processes.size))
        self._local = LocalSums(model, self.processes)
        self._buckets: list[ShardedBucket] = []
        self._parts: dict[ShardedBucket, Tensor] = {}  # reduced sums

    def begin(self) -> None:
        """Begin a step; no other step is accepted until this one is finished."""
        self.guard.withdraw()
        self.unfinished = True

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Add one microbatch's sums; after the last, each shard of the total times ``scale`` is in ``.grad``.

        Raises:
            EngineError: autograd wrote a gradient, which would be released unclipped.
        """
        refuse_foreign_gradients(parameters)
        if not last and self._local.fit():
            for parameter in parameters.values():
                self._local.keep(parameter, self._formed(parameter, add_to))
            return
        if not self._buckets:
            self._buckets = sharded_buckets(parameters.values())
        in_turns(self._work(bucket, add_to, last, scale, to_total) for bucket in self._buckets)

    def _work(self, bucket: ShardedBucket, add_to: AddTo, last: bool, scale: float, to_total: ToTotal | None) -> Work:
        """Reduce a bucket's sums, and after the last microbatch write the shards."""
        flat = bucket.packed([self._formed(parameter, add_to).filled() for parameter in bucket.parameters])
        part = flat.new_empty(flat.shape[1])
        yield from overlapped(partial(reduce_scatter, part, flat.view(-1), group=bucket.shards, async_op=True))
        del flat
        before = self._parts.pop(bucket, None)
        part = part if before is None else before.add_(part)
        if not last:
            self._parts[bucket] = part
            return
        for group in bucket.replicas:  # once per step
            yield from overlapped(partial(dist.all_reduce, part, group=group, async_op=True))
        if to_total is not None:
            bucket.complete_(part, to_total)
        total = Sum.onto(part)
        total.finish_in(bucket.dtype, scale)
        for parameter, shard in bucket.unpacked(total.finished()):
            self._leave(parameter, shard)

    def _formed(self, parameter: Any, add_to: AddTo) -> Sum:
        """Return this process's sum of one whole parameter, over this and earlier accumulated microbatches."""
        total = self._local.begun(parameter)
        add_to(parameter, total)
        return total

    def _leave(self, parameter: Any, shard: Tensor) -> None:
        """Write the finished shard for the optimizer, on the device of the weights, if they are offloaded."""
        grad: Any = set_gradient(
            parameter,
            DTensor.from_local(
                shard.to(parameter.to_local().device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
        )
        self.guard.leave(grad.to_local())

    def finish(self) -> None:
        """End the step; the caller of the private step steps the optimizer."""
        self.unfinished = False


def _replicas(parameters: Mapping[str, Any], num_processes: int) -> int:
    """Return the number of processes that hold each shard.

    Raises:
        EngineError: a parameter is not sharded, or its mesh has dimensions that are not data-parallel.
    """
    counts = set()
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise EngineError(
                f"{name} is not sharded like the rest of the model, so its sum would not be reduced. Add adapters "
                "before sharding the model (accelerator.prepare)"
            )
        mesh, placements = parameter.device_mesh, parameter.placements
        split = _dimensions_that_split(mesh)
        sharded = [p for p in placements if p.is_shard()]
        others = [p for p in placements if not (p.is_shard() or p.is_replicate())]
        if split or others or len(sharded) > 1 or mesh.size() != num_processes:
            named = f", with the dimension{'s' * (len(split) > 1)} {', '.join(split)}" if split else ""
            raise EngineError(
                f"{name} is on a mesh of {mesh.size()} of {num_processes} processes ({mesh}){named}: tensor, pipeline, "
                "context or expert parallelism splits a unit's rows or layers, and so its norm. Use only FSDP2 (dpllm "
                "train --config fsdp2)"
            )
        counts.add(num_processes // math.prod(mesh.size(dim) for dim, p in enumerate(placements) if p.is_shard()))
    if len(counts) > 1:
        raise EngineError(
            f"Parameters have different numbers of replicas ({sorted(counts)}). Shard all of them in the same way."
        )
    return counts.pop()


def _dimensions_that_split(mesh: DeviceMesh) -> list[str]:
    """Return the names of mesh dimensions that split a unit's rows or layers, also in the root mesh."""
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    found = []
    for one in (mesh, root):
        for dimension, name in enumerate(one.mesh_dim_names or ()):
            # "dp_shard_cp" is accelerate's name for the shards of data and context parallelism together.
            words = set(name.lower().replace("-", "_").split("_"))
            if one.size(dimension) > 1 and words & _SPLITTING and not words & _DATA:
                found.append(name)
    return list(dict.fromkeys(found))


def whole_state(model: nn.Module, processes: Processes, trainable_only: bool) -> dict[str, Tensor]:
    """Return the state of a sharded model, gathered tensor by tensor onto rank 0's CPU.

    Args:
        model: the sharded model.
        processes: all processes, which call this together.
        trainable_only: omit frozen parameters, as for an adapter whose base model fits on no process.

    Returns:
        On rank 0, tensors by name as in ``state_dict``; on other ranks an empty dictionary.
    """
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad} if trainable_only else set()
    state = {}
    for name, value in model.state_dict().items():
        if name in frozen:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if processes.is_main:
            state[name] = whole.detach().cpu()
    return state

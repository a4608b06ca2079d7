"""Tensor parallelism: parameters divided over processes that compute the same rows together.

Place in the flow: between the rules, which see a module's own input and output, and the norms. transformers divides a
model by its ``tp_plan`` (`transformers.distributed.tensor_parallel`, 5.17 to 5.23). Every process then runs every row,
and a module's input and output are plain tensors: whole, or this process's columns. So a process can form

* of a *divided* parameter (a `Shard` of a DTensor) its own shard of each unit's gradient: squared norms add up;
* of a *whole* parameter (norm layers, biases after a sum, LoRA's replicated factor) the whole gradient, the same on
  every process: the first process counts it;
* of a parameter whose gradient is *in parts* (norms of attention heads, of which each process has some) a summand of
  it: the summands of each unit are added up before they are squared. The plan marks it.

Guarantee: the norm of a unit is that of its contribution to the sums as they are released, so a plan that is wrong
cannot break the bound. It is refused where it shows: by inputs, units or losses that differ between processes, or by a
whole parameter whose gradients differ.

Shape suffixes: B rows, G groups of parameters, R processes, U units, W whole parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from dpllm.ghost import kernels
from dpllm.ghost.call import flatten_tensors
from dpllm.ghost.contributions import Instance, Lookup, Outer, RowGradients, Use, merge
from dpllm.ghost.errors import GhostError
from dpllm.ghost.passes import Pass
from dpllm.ghost.routed import Routed
from dpllm.ghost.tally import NormTally

_DIMENSION = "tp"
_IN_PARTS = "replicated_with_grad_allreduce"
_STYLES = {
    _IN_PARTS,
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_rep",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
}
"""Styles of a plan under which norms and sums were compared with those of one process."""
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}
_ALIKE = 1e-2  # relative difference of squared norms, or losses, that the same computation may show
_BLOCK = 1 << 20  # bytes of an input that are hashed at a time
_MIXED = (-7046029254386353131, -4658895280553007687)  # odd, of the SplitMix64 generator (Steele et al. 2014)


@dataclass(frozen=True)
class Part:
    """The part of one parameter for which this process forms gradients.

    Attributes:
        shape: of the part.
        dim: the dimension that is divided; None if the process holds the whole parameter.
        start: position of the part in that dimension.
        size: of that dimension over all processes.
        in_parts: whether this process sees a summand of the gradient only.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    size: int = 0
    in_parts: bool = False

    def local(self, name: str, use: Use) -> Use:
        """Return the use as one of this part, from a use of the part or of the whole parameter.

        Raises:
            GhostError: it is a use of something else.
        """
        if self.dim is None:
            return use
        shape = _shape_of(use)
        if shape == self.shape:
            return use
        if not isinstance(use, Routed) and len(shape) == len(self.shape):
            begin, length, dim = self.start, self.shape[self.dim], self.dim
            others = [one == own for at, (one, own) in enumerate(zip(shape, self.shape, strict=True)) if at != dim]
            if all(others) and shape[dim] == self.size:
                return _narrow(use, dim, begin, length)
        raise GhostError(
            f"{name}: this process holds a part of shape {self.shape}, and the gradient seen at its module has shape "
            f"{shape}. The style of this module in tp_plan is not one that can be clipped exactly. Freeze the "
            "parameter, or give the module a style that was tested (dpllm.ghost.shards)."
        )


class TensorShards:
    """The parts of all trainable parameters on this process, and the norms over all processes.

    Args:
        mesh: the processes that share the model.
        parts: by the ids of the parameters.
        names: of the parameters, by their ids, in an order that is the same on every process.
        model: the model; its inputs are compared in each call with gradients.
    """

    def __init__(self, mesh: DeviceMesh, parts: Mapping[int, Part], names: Mapping[int, str], model: nn.Module) -> None:
        """Remember the parts."""
        self._group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._device = torch.device(mesh.device_type)
        self._parts, self._names = parts, names
        whole = [key for key in names if parts[key].dim is None and not parts[key].in_parts]
        self._whole = {key: at for at, key in enumerate(whole)}
        self._in_parts = [key for key in names if parts[key].in_parts]
        self._handles: list[Any] = []
        self._model = model

    @classmethod
    def of(cls, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> TensorShards | None:
        """Find the parts of a model that transformers has divided; None for any other model.

        Args:
            model: the model, PEFT-wrapped or not.
            parameters: the trainable parameters by name.

        Raises:
            GhostError: it is divided in a way that was not tested.
        """
        mesh = _mesh_of(model)
        if mesh is None:
            return None
        styles = _styles_of(model)
        _refuse_untested(model, mesh, styles)
        in_parts = {
            id(p)
            for path, module in model.named_modules()
            if styles.get(path) == _IN_PARTS
            for p in module.parameters(recurse=False)
        }
        parts = {id(p): _part_of(name, p, mesh, id(p) in in_parts) for name, p in parameters.items()}
        return cls(mesh, parts, {id(p): name for name, p in parameters.items()}, model)

    def attach(self) -> None:
        """Compare the inputs of the model's calls between the processes, from now on."""
        self._handles.append(self._model.register_forward_pre_hook(self._compare_inputs, with_kwargs=True))

    def remove(self) -> None:
        """Undo `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of this process's part."""
        return self._parts[id(parameter)].shape

    def is_divided(self, parameter: nn.Parameter) -> bool:
        """Whether each process holds entries of its own; if not, all hold the same ones."""
        return self._parts[id(parameter)].dim is not None

    def adds(self, parameter: nn.Parameter) -> bool:
        """Whether this process adds to the parameter's clipped sum: of a whole gradient only the first one does."""
        part = self._parts[id(parameter)]
        return part.dim is not None or part.in_parts or self.rank == 0

    def local(self, name: str, parameter: nn.Parameter, use: Use) -> Use:
        """Return the use as one of this process's part."""
        return self._parts[id(parameter)].local(name, use)

    def norms(
        self, one: Pass, loss_B: Tensor, num_groups: int, tally: Callable[[int], NormTally]
    ) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_GU, slack_GU)`` over all processes, the same on each; called by all of them together.

        Args:
            one: the pass with its contributions.
            loss_B: (B,) the losses that were differentiated.
            num_groups: G.
            tally: returns an empty tally of a number of groups.

        Raises:
            GhostError: the processes differ in their units, in their losses, or in the gradient of a whole parameter;
                or a gradient that the plan says to be in parts is whole. The same error on every process.
        """
        unit_B = one.rows.unit_B
        self._refuse_different("units of the rows", [len(loss_B), one.rows.num_units, _digest([unit_B])])
        own, whole = tally(num_groups), tally(max(1, len(self._whole)))
        for key, contributions in one.contributions.items():
            one.contributions[key] = merge(contributions, one.rows)
            if self._parts[key].dim is not None:
                own.add(one.contributions[key], one.groups.get(key, 0))
            elif not self._parts[key].in_parts:
                whole.add(one.contributions[key], self._whole[key])
        (sq_norm_GU, slack_GU), (sq_norm_WU, slack_WU) = own.total(), whole.total()
        summands = [self._summand(one, key).to(sq_norm_GU) for key in self._in_parts]
        sent = [sq_norm_GU, slack_GU, sq_norm_WU, slack_WU, loss_B.detach().to(sq_norm_GU), *summands]
        of_R = self._gathered(sent)
        self._refuse_different_losses(of_R[4])
        self._refuse_different_gradients(of_R[2])
        total_GU, total_slack_GU = of_R[0].sum(0), of_R[1].sum(0)
        for key, at in self._whole.items():
            group = one.groups.get(key, 0)
            total_GU[group] += of_R[2][0, at]
            total_slack_GU[group] += of_R[3][0, at]
        together = tally(num_groups)
        for key, summand_RUP in zip(self._in_parts, of_R[5:], strict=True):
            self._refuse_whole(key, summand_RUP)
            mass_U = torch.linalg.vector_norm(summand_RUP, dim=2).sum(0)
            slack_U = kernels.rounding_slack(mass_U.dtype) * mass_U.square()
            together.add_measured(one.groups.get(key, 0), summand_RUP.sum(0).square().sum(1), slack_U)
        in_parts_GU, more_GU = together.total()
        return total_GU + in_parts_GU, total_slack_GU + more_GU

    @staticmethod
    def _summand(one: Pass, key: int) -> Tensor:
        """Return (U, P): this process's summand of each unit's gradient."""
        (instance,) = merge([Instance(c.instance(one.rows)) for c in one.contributions[key]], one.rows)
        return kernels.entries(instance.instance(one.rows))

    def _gathered(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return each tensor of every process, (R, ...): one collective, and the same numbers on every process."""
        flat = torch.cat([tensor.flatten() for tensor in tensors]).contiguous()
        everywhere = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(everywhere, flat, group=self._group)
        pieces = torch.stack(everywhere).split([tensor.numel() for tensor in tensors], dim=1)
        return [piece.unflatten(1, tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]

    def _refuse_different(self, what: str, numbers: list[int]) -> None:
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        (of_R,) = self._gathered([sent])
        if bool((of_R != of_R[0]).any()):
            raise GhostError(
                f"The processes of a tensor-parallel model differ in the {what}: each of them holds a part of every "
                "layer, so the gradient would mix different rows. Give all of them the same rows in the same order, "
                "from the same collator and random state (PrivateRun does)."
            )

    def _compare_inputs(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled():
            tensors = list(flatten_tensors((args, kwargs)))
            self._refuse_different("inputs of the model", [len(tensors), _digest(tensors)])

    def _refuse_different_losses(self, loss_RB: Tensor) -> None:
        low_B, high_B = loss_RB.amin(0), loss_RB.amax(0)
        if bool((high_B - low_B > _ALIKE * (1 + high_B.abs())).any()):
            raise GhostError(
                "The processes of a tensor-parallel model computed different losses for the same rows: other labels, "
                "another loss, other weights that should be equal, or other dropout masks. Give all of them the same "
                "model, labels and random state (PrivateRun does)."
            )

    def _refuse_different_gradients(self, sq_norm_RWU: Tensor) -> None:
        low_WU, high_WU = sq_norm_RWU.amin(0), sq_norm_RWU.amax(0)  # not finite where one is not, and then not larger
        differ_W = (high_WU - low_WU > _ALIKE * high_WU).any(1)
        if bool(differ_W.any()):
            name = self._names[list(self._whole)[int(torch.nonzero(differ_W)[0])]]
            raise GhostError(
                f"{name} is the same on all processes, and they see different gradients of it, so each sees a part: "
                f"its module works on a part of the features or heads. Give this module the style {_IN_PARTS!r} in "
                "tp_plan, or freeze the parameter."
            )

    def _refuse_whole(self, key: int, summand_RUP: Tensor) -> None:
        if not summand_RUP.numel():  # no unit
            return
        first, size = summand_RUP[0], summand_RUP[0].abs().amax()
        if bool((size > 0) & ((summand_RUP - first).abs().amax() <= _ALIKE**2 * size)):
            raise GhostError(
                f"{self._names[key]} has the style {_IN_PARTS!r} in tp_plan, and all processes see the same gradient "
                "of it: the sum over processes would be a multiple of the gradient. Leave this module out of tp_plan, "
                "or freeze the parameter."
            )


def _shape_of(use: Use) -> tuple[int, ...]:
    if isinstance(use, Outer):
        return use.left_BTL.shape[2], use.right_BTR.shape[2]
    if isinstance(use, Lookup):
        return use.num_entries, use.right_BTR.shape[2]
    if isinstance(use, RowGradients):
        return tuple(use.value_B.shape[1:])
    return ()  # experts: no style of theirs was tested


def _narrow(use: RowGradients | Outer | Lookup, dim: int, start: int, length: int) -> Use:
    """Return the use of some entries along one dimension of a parameter."""
    if isinstance(use, RowGradients):
        return RowGradients(use.value_B.narrow(dim + 1, start, length).contiguous())
    if isinstance(use, Outer):
        if dim == 0:
            return Outer(use.left_BTL.narrow(2, start, length), use.right_BTR, use.input_side)
        return Outer(use.left_BTL, use.right_BTR.narrow(2, start, length), use.input_side)
    if dim == 1:
        return Lookup(use.index_BT, use.right_BTR.narrow(2, start, length), use.num_entries)
    index_BT = use.index_BT - start
    elsewhere_BT = (index_BT < 0) | (index_BT >= length)
    return Lookup(index_BT.masked_fill(elsewhere_BT, 0), use.right_BTR.masked_fill(elsewhere_BT[:, :, None], 0), length)


def _mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which tensor parallelism divides parameters; None if nothing is divided so."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return None  # dpllm.engines.fsdp2 refuses what is divided beside it
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and _DIMENSION in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh
    return None


def _styles_of(model: nn.Module) -> dict[str, str]:
    """Return the style of each module in the plan, by its path, also in a model that PEFT wraps."""
    config: Any = getattr(model, "config", None)
    given = getattr(getattr(config, "distributed_config", None), "tp_plan", None)
    plan = {**(getattr(model, "tp_plan", None) or {}), **(given if isinstance(given, Mapping) else {})}
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    paths = {id(module): path for path, module in base.named_modules()}
    styles = {}
    for path, module in model.named_modules():
        name = re.sub(r"\.\d+(?=\.|$)", ".*", paths.get(id(module), path))
        if name in plan:
            styles[path] = plan[name]
    return styles


def _refuse_untested(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    if mesh.ndim > 1:
        raise GhostError(
            f"The model is divided over {mesh}: other parallelism beside tensor parallelism was not compared with one "
            "process. Set tp_size to the number of processes and nothing else, or use FSDP2 "
            "(dpllm train --config fsdp2)."
        )
    if not styles:
        raise GhostError(
            f"The model is divided over the mesh dimension {_DIMENSION!r}, and has no tp_plan of transformers, so it "
            "is not known which gradients are whole. Load it by from_pretrained(distributed_config="
            "DistributedConfig(tp_size=…, tp_plan='auto')), or use FSDP2 (dpllm train --config fsdp2)."
        )
    for path, style in styles.items():
        if style not in _STYLES:
            raise GhostError(
                f"{path} has the style {style!r} in tp_plan, which was not compared with one process. Leave it out "
                f"of tp_plan, or use FSDP2 (dpllm train --config fsdp2). Tested are {', '.join(sorted(_STYLES))}."
            )
    config: Any = getattr(model, "config", None)
    for path, style in styles.items():
        heads = getattr(config, _HEADS.get(path.rpartition(".")[2], ""), None)
        if style == "colwise" and isinstance(heads, int) and heads % mesh.size():
            raise GhostError(
                f"{path} has {heads} heads, which {mesh.size()} processes cannot share: a head would be cut. Use as "
                "many processes as divide the heads, or leave the attention out of tp_plan."
            )
    _refuse_copies(model)
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and isinstance(weight, DTensor) and module.in_features != weight.shape[1]:
            raise GhostError(
                f"{path}.in_features is {module.in_features}, and its weight takes {weight.shape[1]} features over all "
                "processes: PEFT notes the features of one process, and transformers from 5.21 reads those of all. "
                "Set in_features of this module to weight.shape[1], or give adapters to column-parallel layers only."
            )


def _refuse_copies(model: nn.Module) -> None:
    forwards: dict[int, str] = {}
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is not None and (other := forwards.setdefault(id(forward), path)) != path:
            raise GhostError(
                f"{path} is a copy of {other} that still runs the weights of {other}: tensor parallelism had put a "
                "function in place of its forward pass before it was copied (PEFT's modules_to_save). Its own weights "
                "would get gradients and have no effect. Leave it out of modules_to_save."
            )


def _part_of(name: str, parameter: nn.Parameter, mesh: DeviceMesh, in_parts: bool) -> Part:
    """Return this process's part of a parameter.

    Raises:
        GhostError: it is divided over other processes, or in another way than in slices of equal length.
    """
    if not isinstance(parameter, DTensor):
        return Part(tuple(parameter.shape), in_parts=in_parts)
    local = tuple(parameter.to_local().shape)
    (placement, *more) = parameter.placements
    if parameter.device_mesh == mesh and mesh.ndim == 1 and not more:
        if placement.is_replicate():
            return Part(local, in_parts=in_parts)
        if type(placement) is Shard:
            dim = placement.dim % parameter.ndim
            length = -(-parameter.shape[dim] // mesh.size())
            start = min(parameter.shape[dim], mesh.get_local_rank() * length)
            if 0 < local[dim] == min(length, parameter.shape[dim] - start):
                return Part(local, dim, start, parameter.shape[dim])
    raise GhostError(
        f"{name} is divided as {parameter.placements} over {parameter.device_mesh}, and this process holds {local} of "
        f"{tuple(parameter.shape)}. Tensor parallelism was tested for slices of equal length along one dimension, over "
        "one mesh dimension. Use fewer processes, no other parallelism beside it, or freeze the parameter."
    )


def _digest(tensors: list[Tensor]) -> int:
    """Return a checksum of the bits and shapes of tensors; it depends on the order of the entries."""
    total = 0
    for tensor in tensors:
        at, value = 0, torch.zeros((), dtype=torch.int64, device=tensor.device)
        for block in tensor.detach().contiguous().reshape(-1).view(torch.uint8).split(_BLOCK):
            places = torch.arange(at + 1, at + len(block) + 1, dtype=torch.int64, device=block.device)
            for multiplier in _MIXED:
                places = places * multiplier
                places = places ^ (places >> 29)
            at, value = at + len(block), value + (block.to(torch.int64) * (places | 1)).sum()
        total = hash((total, tuple(tensor.shape), tensor.element_size(), int(value)))
    return total

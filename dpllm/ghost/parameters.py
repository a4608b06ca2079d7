"""The trainable parameters of one model: their names, and the groups that have separate norms and clip factors.

Place in the flow: found when a clipper is attached, and read by the book for every contribution and every tally. A
clipping names its groups then; from there on norms and factors are (G, U). Flat clipping has one group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.ghost.checks import refuse_missing, refuse_others, refuse_outside, refuse_uses_in_loss
from dpllm.ghost.errors import GhostError
from dpllm.ghost.rules import refuse_tensor_parallel, trainable_parameters

Groups = Callable[[Mapping[str, tuple[int, ...]]], Sequence[Sequence[str]]]
"""Maps names and shapes of all trainable parameters to the names in each group."""


def one_group(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Return one group with all names."""
    return [list(shapes)]


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each parameter, also of one that DeepSpeed has partitioned."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}


def numbered(groups: Groups, parameters: Mapping[str, nn.Parameter]) -> tuple[int, dict[int, int]]:
    """Return the number of groups, and the index of each parameter's group, by the parameter's id.

    Raises:
        GhostError: the groups are not a partition of the parameters.
    """
    named = [list(group) for group in groups(shapes_of(parameters))]
    every = [name for group in named for name in group]
    if sorted(every) != sorted(parameters):
        wrong = sorted(set(every) ^ set(parameters)) or sorted(name for name in set(every) if every.count(name) > 1)
        raise GhostError(
            f"The groups of a clipping must hold each trainable parameter once; {wrong[0]} is in none, in two, or is "
            "not a parameter of the model. A parameter without a group would have no bound."
        )
    return len(named), {id(parameters[name]): number for number, group in enumerate(named) for name in group}


class TrainedParameters:
    """The parameters that are trainable when this object is made.

    Attributes:
        by_name: the parameters, each once.
        groups: the number of each parameter's group, by the parameter's id.
        num_groups: G.
        sharded: whether processes hold parts of the parameters.

    Args:
        model: the model.
        groups: returns the groups of names from all names and shapes.

    Raises:
        GhostError: there is none, one has a hook on its gradient, the groups are not a partition, or the model is
            divided by tensor parallelism.
    """

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        """Find and number the parameters."""
        refuse_tensor_parallel(model)
        self.by_name: Mapping[str, nn.Parameter] = trainable_parameters(model)
        self.num_groups, self.groups = numbered(groups, self.by_name)
        self.sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self.by_name.values())
        self._names = {id(p): name for name, p in self.by_name.items()}
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._model = model

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of one of the parameters."""
        return self._names[id(parameter)]

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which norms add up: float64 if a parameter has it, otherwise float32."""
        wide = any(p.dtype == torch.float64 for p in self.by_name.values())
        return torch.float64 if wide else torch.float32

    def refuse_missing(self, seen: Collection[int]) -> None:
        """Raise `GhostError` for a parameter that is not among the ids of those that received a gradient."""
        refuse_missing(self.by_name, seen)

    def refuse_others(self, added: bool = True) -> None:
        """Make sure that these and no other parameters of the model are trainable; of sharded ones nothing is known.

        Args:
            added: whether to look for parameters that the model did not have when this object was made.

        Raises:
            GhostError: one was frozen, unfrozen or added after this object was made.
        """
        for name, parameter in self.by_name.items():
            if not parameter.requires_grad:
                raise GhostError(
                    f"{name} was frozen after GhostClipper was made, and would still be clipped and trained. Call "
                    "remove() and make another GhostClipper for the parameters that are trained now"
                )
        if not self.sharded and (added or any(p.requires_grad for p in self._frozen)):
            refuse_others(self._model, self._names)

    def refuse_outside(self, loss_B: Tensor) -> None:
        """Raise `GhostError` for a trainable parameter in the graph of losses (B,) that the model does not hold."""
        refuse_outside(loss_B, self._names)

    def refuse_uses_in_loss(self, loss_B: Tensor, name_of: Callable[[Tensor], str | None] | None = None) -> None:
        """Raise `GhostError` for a parameter that the losses (B,) use where no rule sees it.

        Args:
            loss_B: losses with a graph.
            name_of: also knows the tensors that a sharded model puts in place of its parameters.
        """

        def name(leaf: nn.Parameter) -> str | None:
            return self._names.get(id(leaf)) or (name_of(leaf) if name_of is not None else None)

        refuse_uses_in_loss(loss_B, name)

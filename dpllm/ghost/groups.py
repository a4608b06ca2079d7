"""Groups of parameters with separate norms and clip factors.

Place in the flow: a clipping names its groups when the clipper is attached; from then on norms and factors are (G, U).
Flat clipping has one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from dpllm.ghost.errors import GhostError

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

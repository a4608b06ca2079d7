"""The tensors in nested values, and those in the graph behind losses, which a backward pass from them reaches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def flatten_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    for _, item in items_of(value):
        yield from flatten_tensors(item)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a tuple, list, mapping or dataclass holds, each with its place; nothing for any other value."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, Mapping):  # before dataclasses: the outputs of transformers are both
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (each.name, getattr(value, each.name)) for each in dataclasses.fields(value) if hasattr(value, each.name)
        ]
    return []


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, list, mapping or dataclass with each item changed; any other value as it is."""
    items = [(key, change(item)) for key, item in items_of(value)]
    if isinstance(value, (tuple, list)):
        new = [item for _, item in items]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, dict) and dataclasses.is_dataclass(value):
        return type(value)(**dict(items))
    if all(item is getattr(value, str(key), None) for key, item in items) and not isinstance(value, dict):
        return value
    other = copy.copy(value)
    for key, item in items:
        if isinstance(value, Mapping):
            other[key] = item
        else:
            object.__setattr__(other, key, item)
    return other


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors in which the losses have a gradient, each at least once.

    Args:
        loss: with or without a graph; of any shape.

    >>> import torch
    >>> head = torch.nn.Linear(2, 1, bias=False)
    >>> [leaf is head.weight for leaf in leaves_of(head(torch.ones(3, 2)).sum(1))]
    [True]
    """
    for node in _nodes(loss):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def nodes_of(loss: Tensor) -> Iterator[str]:
    """Yield the name of each operation in the graph behind losses, such as "AddmmBackward0"."""
    for node in _nodes(loss):
        yield node.name()


def _nodes(loss: Tensor) -> Iterator[Any]:
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]

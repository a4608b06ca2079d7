"""The graph behind losses: the tensors that a backward pass from them reaches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


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

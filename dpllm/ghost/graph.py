"""The graph behind losses: the tensors that a backward pass from them reaches."""

from __future__ import annotations

from collections.abc import Iterator

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
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]

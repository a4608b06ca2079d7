"""The optimizer that updates weights, below the wrappers of accelerate and DeepSpeed."""

from __future__ import annotations

from typing import Any


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which keep it as their attribute ``optimizer``.

    A wrapper may be a `torch.optim.Optimizer` itself (accelerate's is) or not (DeepSpeed's are not).

    >>> innermost(None) is None
    True
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer

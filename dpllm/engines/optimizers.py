"""The optimizer that updates weights, below the wrappers of accelerate and DeepSpeed."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from dpllm.engines.errors import EngineError


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which store it in their attribute ``optimizer``.

    A wrapper may be a `torch.optim.Optimizer` itself (accelerate's is) or not (DeepSpeed's are not).

    >>> innermost(None) is None
    True
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_unsteppable(optimizer: Any) -> None:
    """Check that an optimizer can step from dense gradients without a closure, before a step is charged.

    Args:
        optimizer: with or without wrappers.

    Raises:
        EngineError: it needs a closure (LBFGS), or sparse gradients.

    >>> refuse_unsteppable(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    """
    inner = innermost(optimizer)
    step = getattr(type(inner), "step", None)
    if not inspect.isfunction(step):
        return  # its first step will show it
    name, asked = type(inner).__name__, list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(one.default is one.empty and one.kind in kinds for one in asked):
        raise EngineError(
            f"step() of {name} needs the argument {asked[0].name}, such as a closure that recomputes the loss, but a "
            "private step has one noisy gradient per draw. Use an optimizer whose step() needs no argument"
        )
    if isinstance(inner, torch.optim.SparseAdam):
        raise EngineError(f"{name} takes only sparse gradients, but private gradients are dense. Use torch.optim.Adam")

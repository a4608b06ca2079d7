"""Whole parameters and gradients of a prepared model, on every engine: for inspection, never for training.

Place in the flow: beside the engines. Each function gathers one parameter after another, so all processes call it
together, and each of them gets the same vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def updates_by_itself(model: Any) -> bool:
    """Whether the engine updates the parameters within the private step, as DeepSpeed does."""
    return hasattr(model, "zero_optimization_stage")


def whole_parameters(model: Any, inner: nn.Module) -> Tensor:
    """Return the trainable parameters as the optimizer has them (DeepSpeed: its float32 masters), end to end.

    Args:
        model: the return value of ``accelerator.prepare``.
        inner: the module inside (`dpllm.engines.model_inside`).

    Returns:
        (P,) float32, or float64 for a float64 model; a copy.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> whole_parameters(model, model).shape
    torch.Size([2])
    """
    if updates_by_itself(model):
        from deepspeed.utils import safe_get_full_fp32_param

        return _laid_out(inner, safe_get_full_fp32_param)
    return _laid_out(inner, lambda parameter: parameter)


def whole_gradient(inner: nn.Module) -> Tensor:
    """Return ``.grad`` of the trainable parameters for the optimizer, end to end; 0 for a parameter without one.

    Returns:
        (P,) float32, or float64 for a float64 model; a copy.
    """
    return _laid_out(inner, lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _laid_out(inner: nn.Module, read: Callable[[Any], Any]) -> Tensor:
    pieces = []
    for parameter in inner.parameters():
        if parameter.requires_grad:
            value = read(parameter).detach()
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            pieces.append(whole.flatten().to(torch.float64 if whole.dtype == torch.float64 else torch.float32))
    return torch.cat(pieces)

"""A module's call, kept so that it can be repeated with other parameters or for one row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def flatten_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from flatten_tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from flatten_tensors(item)


def tensors_of(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors in the arguments of a call, in order; at once for the call of most layers, with one tensor."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return [args[0]]
    return list(flatten_tensors((args, kwargs)))


def replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same nesting with each tensor replaced by the next of ``tensors``."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        items = [replace_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replace_tensors(item, tensors) for key, item in value.items()}
    return value


def has_own_forward(module: nn.Module) -> bool:
    """Whether another ``forward`` was put on this module than that of its class, which then says nothing about it."""
    return "forward" in vars(module)


class _Bare(nn.Module):
    """A module's own computation, without the hooks on it: hooks that gather and free weights do not apply here."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def call_with(module: nn.Module, parameters: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
    """Call a module, without its hooks, with other values of the named parameters.

    Only the named places are replaced. Where a parameter has a second place in an inner module (a tied one), that use
    belongs to the rule of the inner module, and keeps the parameter's own value here.
    """
    values = {f"module.{name}": value for name, value in parameters.items()}
    return functional_call(_Bare(module), values, args, kwargs, tie_weights=False)


class Call:
    """A module's call without its tensors, so that autograd can save them and they can be put back."""

    def __init__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Keep everything but the tensors, and the automatic mixed precision under which the call was made."""
        self.module = module
        device = next((p.device.type for p in module.parameters()), "cpu")
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.tensors = list(flatten_tensors((args, kwargs)))
        self._frame = replace_tensors((args, kwargs), iter([torch.empty(0)] * len(self.tensors)))

    def forget_tensors(self) -> list[Tensor]:
        """Return the tensors; the call no longer holds them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def again(self, parameters: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        """Call the module once more, with other values of the named parameters."""
        args, kwargs = replace_tensors(self._frame, iter(tensors))
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            return call_with(self.module, parameters, args, kwargs)

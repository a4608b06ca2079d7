"""Copies of a microbatch to the device for which the host does not wait, and host copies that travel with them.

Place in the flow: `dpllm.training.microbatches` copies what a collator returns, `dpllm.training.out_of_memory` pins it
in the thread that fetches and sends it to the device; `dpllm.ghost` sends the numbers of rows and units likewise.

Reading one number from a GPU makes the host wait until all queued work is done, and the GPU is then idle until the next
launch arrives. What the host knows already is therefore never read back: `host_values` returns the tensor from which a
device tensor was copied.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from dpllm.config import ConfigError

_IMMUTABLE = frozenset(
    {int, float, bool, complex, str, bytes, type(None), np.bool_, np.int32, np.int64, np.float32, np.float64}
)
_SOURCES = WeakTensorKeyDictionary()  # device tensor -> the host tensor that it was copied from, and its version then


def own_copy(value: Any) -> Any:
    """Return a row, or the inputs of a model, in memory of its own.

    A data set or a collator may fill the same object again for the next rows. These would replace the rows of a
    microbatch that waits, runs, or is divided, and a unit would be counted twice. A collator may also change the rows
    that it is given, and they are collated again where memory runs out.

    Args:
        value: anything that can be copied deeply; nothing in it is changed.

    Raises:
        ConfigError: something in it cannot be copied.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, Tensor):
        return value.clone()
    if kind is dict:
        return {name: own_copy(one) for name, one in value.items()}
    if kind in (list, tuple):
        return kind(value if _IMMUTABLE.issuperset(map(type, value)) else map(own_copy, value))
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    try:
        with _TensorClones():
            made = copy.deepcopy(value)
        if isinstance(value, dict) and getattr(value, "__dict__", None) is value:  # entries that are attributes, too
            made.__dict__ = made
        return made
    except Exception as error:
        raise ConfigError(
            f"A {kind.__name__} in a row or in the collator's result cannot be copied ({error}). Rows and inputs are "
            "copied, because a data set or a collator may fill them again. Return tensors, arrays, numbers, text, and "
            "lists or dictionaries of these"
        ) from error


class _TensorClones(TorchFunctionMode):
    """Within a deep copy, copies the values of a tensor only: PyTorch would copy the whole storage of a view."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__deepcopy__ and type(args[0]) is Tensor:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.clone())
        return func(*args, **(kwargs or {}))


def pin(inputs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return the inputs of a model with their CPU tensors in pinned memory, for a CUDA device.

    Copies from pinned memory run while the host and the device work.

    Args:
        inputs: names to tensors, nested containers of tensors, or other values. It is not changed.
        device: the device to which `send` will copy them; for any other the inputs are returned as they are.
    """
    if device.type != "cuda":
        return inputs
    return _replaced(inputs, lambda one: one.pin_memory() if _is_dense(one) else one)


def send(inputs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return the inputs of a model on a device. The collator's mapping is not changed.

    Args:
        inputs: names to tensors, nested containers of tensors, or other values; best from `pin`.
        device: the device. For the CPU, and for weights that are elsewhere, the inputs are returned as they are.
    """
    if device.type in ("cpu", "meta"):
        return inputs
    sent = _replaced(inputs, lambda one: one.to(device, non_blocking=True))
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            _SOURCES[sent[name]] = value, sent[name]._version
    return sent


def send_array(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a NumPy array as a tensor on a device."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def host_values(x: Tensor) -> Tensor:
    """Return the values of a tensor on the CPU: those that `send` copied, if nothing has changed them since.

    For any other tensor of a device the host waits.

    >>> host_values(torch.tensor([0, 3])).tolist()
    [0, 3]
    """
    if x.device.type == "cpu":
        return x
    source, version = _SOURCES.get(x, (None, -1))
    return x.cpu() if source is None or version != x._version else source


def _is_dense(one: Tensor) -> bool:
    return one.device.type == "cpu" and one.layout == torch.strided


def _replaced(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a value with a function applied to the tensors in it; nothing in the value is changed."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return like(value, {name: _replaced(one, function) for name, one in value.items()})
    if isinstance(value, list):
        return [_replaced(one, function) for one in value]
    if isinstance(value, tuple):
        parts = [_replaced(one, function) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def like(given: Mapping[str, Any], items: dict[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of these items, of the class of another one where that gives one of its own; else a dictionary.

    A copy may share what the class keeps inside: an attribute then still has the collator's tensor.
    """
    try:
        if isinstance(given, UserDict):  # transformers' BatchEncoding and BatchFeature
            made: Any = copy.copy(given)
            made.data = items
        elif isinstance(given, dict):
            made = type(given)(items)
        else:
            return items
    except Exception:  # of a class whose constructor takes something else
        return items
    same = made.keys() == items.keys() and all(made[name] is one for name, one in items.items())
    shared = any(getattr(made, name, one) is not one for name, one in items.items() if isinstance(name, str))
    return made if same and not shared else items

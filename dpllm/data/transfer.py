"""Copies of a microbatch to the device for which the host does not wait, and host copies that travel with them.

Place in the flow: `dpllm.training.microbatches` copies what a collator returns, `dpllm.training.out_of_memory` pins it
in the thread that fetches and sends it to the device; `dpllm.ghost` sends the numbers of rows and units likewise.

Reading one number from a GPU makes the host wait until all queued work is done, and the GPU is then idle until the next
launch arrives. What the host knows already is therefore never read back: `host_values` returns the tensor from which a
device tensor was copied.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_SOURCES = WeakTensorKeyDictionary()  # device tensor -> the host tensor that it was copied from, and its version then


def own_copy(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the inputs of a model in memory of their own.

    A collator may fill the same tensors again for the next rows. These would replace the rows of a microbatch that
    waits or runs, and a unit would be counted twice.

    Args:
        inputs: names to tensors, NumPy arrays, nested containers of these, or other values. It is not changed.
    """
    return _replaced(inputs, lambda one: one.copy() if isinstance(one, np.ndarray) else one.clone())


def pin(inputs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return the inputs of a model with their CPU tensors in pinned memory, for a CUDA device.

    Copies from pinned memory run while the host and the device work.

    Args:
        inputs: as for `own_copy`.
        device: the device to which `send` will copy them; for any other the inputs are returned as they are.
    """
    if device.type != "cuda":
        return inputs
    return _replaced(inputs, lambda one: one.pin_memory() if isinstance(one, Tensor) and not one.is_cuda else one)


def send(inputs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Return the inputs of a model on a device. The collator's mapping is not changed.

    Args:
        inputs: names to tensors, nested containers of tensors, or other values; best from `pin`.
        device: the device. For the CPU, and for weights that are elsewhere, the inputs are returned as they are.
    """
    if device.type in ("cpu", "meta"):
        return inputs
    sent = _replaced(inputs, lambda one: one.to(device, non_blocking=True) if isinstance(one, Tensor) else one)
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


def _replaced(inputs: Mapping[str, Any], function: Any) -> Mapping[str, Any]:
    """Return a copy of a mapping, of its own class where possible, with a function applied to tensors and arrays."""
    made = copy.copy(inputs) if isinstance(inputs, MutableMapping) else dict(inputs)
    for name, value in inputs.items():
        made[name] = tree_map_only((Tensor, np.ndarray), function, value)
    return made

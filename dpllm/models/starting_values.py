"""Restore values that modules store next to parameters and buffers: the longest row so far, a number of hash buckets.

`dpllm.methods.pate` and `dpllm.methods.federated` load one model and train it repeatedly, for one teacher or client
after another. Some models choose a size by the first rows that they see (Reformer), or store the longest one (dynamic
rotary embeddings). Without this, the next teacher or client would start from that choice.

This is only for a model that dpllm itself loaded. A training run of the user's own model restores nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
_DATA = (bool, int, float, complex, str, bytes, type(None), *_CONTAINERS, tuple, Tensor, np.ndarray)
_COPIED = 1 << 12  # the largest number of entries of a container that is copied, one level deep
_PARTS = ("_buffers", "_parameters", "_modules")
_INTERNAL = frozenset(vars(nn.Module()))  # of every module, among them parameters, buffers and submodules


class StartingValues:
    """The attributes of all modules, and of their configurations, at one moment.

    A tensor or a container with more than 4096 entries that is changed in place is not restored.

    Args:
        model: a model that dpllm loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        """Store the values; containers are copied."""
        self._holders = _holders(model)
        self._values = [_data(holder) for holder in self._holders]
        self._entries = [
            {name: value.copy() for name, value in values.items() if _is_copied(value)} for values in self._values
        ]

    def restore(self) -> None:
        """Restore these values, and remove attributes that are new."""
        for holder, values, entries in zip(self._holders, self._values, self._entries, strict=True):
            for name in _data(holder).keys() - values.keys():
                del vars(holder)[name]
            parts = [vars(holder).get(part, ()) for part in _PARTS]  # an attribute would hide a part of the same name
            vars(holder).update({name: value for name, value in values.items() if not any(name in p for p in parts)})
            for name, copied in entries.items():
                container = values[name]
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(copied)


def _holders(model: nn.Module) -> list[Any]:
    """Return the modules and their configurations, each once."""
    modules = list(model.modules())
    configs = [vars(module).get("config") for module in modules]
    found = [*modules, *(config for config in configs if hasattr(config, "to_dict"))]
    return list({id(holder): holder for holder in found}.values())


def _data(holder: Any) -> dict[str, Any]:
    internal = _INTERNAL if isinstance(holder, nn.Module) else frozenset()
    return {name: value for name, value in vars(holder).items() if isinstance(value, _DATA) and name not in internal}


def _is_copied(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and len(value) <= _COPIED

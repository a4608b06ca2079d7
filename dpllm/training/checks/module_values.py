"""Values that the modules of a model keep beside parameters and buffers: sizes, choices, caches, and their settings.

Place in the flow: `dpllm.training.checks.independence` compares them with those of before the run. Some models of
libraries choose a size or an algorithm by the first rows that they see, and keep it: the number of hash buckets
(Reformer), the capacity of experts (NLLB-MoE). All later rows follow these rows then, and where the settings of the
model take the choice over, it is saved without noise. `dpllm.training.checks.kept` searches what the user's own classes
hold, in depth; here the attributes of all modules and of their configurations are read, one level deep.

A value that changed is refused if it acts: with the values of before the run, a row has another loss or norm. Caches
give the same, and are nothing. A tensor or a long container that is changed in place is not seen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)
_DATA = (*_PLAIN, *_CONTAINERS, tuple, Tensor, np.ndarray)
_COPIED = 1 << 12  # the most entries of a container that is copied
_INTERNAL = frozenset(vars(nn.Module()))
_PARTS = ("_parameters", "_buffers", "_modules")
_MISSING = object()

LEFT = (
    "The model keeps what it chose by rows that it saw before, and the values of a row follow it: {where}. With the "
    "values of before the run, a row has another loss or gradient, so a unit cannot be bounded, and ε would not hold. "
    "Set these values before the run is attached (most have an option in model.config), and let neither a callback "
    "nor an evaluation change them"
)


class ModuleValues:
    """The values at one moment.

    Args:
        model: the module that computes the losses.
    """

    def __init__(self, model: nn.Module) -> None:
        """Read them; containers are copied, one level deep."""
        self._model = model
        self._held: list[Any] = []  # so that no other object gets the id of one
        self._names: dict[int, str] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._copies: dict[int, dict[str, Any]] = {}
        for holder, (name, attributes) in _holders(model).items():
            self._held.append(attributes)
            self._names[holder] = name
            self._values[holder] = {key: value for key, value in attributes.items() if isinstance(value, _DATA)}
            self._copies[holder] = {
                key: value.copy()
                for key, value in self._values[holder].items()
                if isinstance(value, _CONTAINERS) and len(value) <= _COPIED
            }

    def differing(self, before: ModuleValues) -> list[str]:
        """Return the paths of values that are others now, or new; holders that are new are left out."""
        return [
            f"{self._names[holder]}.{key}"
            for holder in self._values.keys() & before._values.keys()
            for key in self._changed(holder, before)
        ]

    @contextlib.contextmanager
    def at(self, moment: ModuleValues) -> Iterator[None]:
        """Put back the values of a moment for the duration of the block; then those of this one."""
        try:
            moment.put()
            yield
        finally:
            self.put()

    def put(self) -> None:
        """Give the modules these values."""
        now = ModuleValues(self._model)
        holders = _holders(self._model)
        for holder in self._values.keys() & holders.keys():
            attributes = holders[holder][1]
            for key in now._changed(holder, self):
                value = self._values[holder].get(key, _MISSING)
                if value is _MISSING:
                    attributes.pop(key, None)
                    continue
                if key in self._copies[holder]:
                    _refill(value, self._copies[holder][key])
                attributes[key] = value

    def words(self, paths: list[str]) -> str:
        """Return the first few paths; values may be private."""
        return ", ".join(sorted(paths)[:3])

    def _changed(self, holder: int, before: ModuleValues) -> list[str]:
        now, earlier = self._values[holder], before._values[holder]
        copies, earlier_copies = self._copies[holder], before._copies[holder]
        return [
            key
            for key in now.keys() | earlier.keys()
            if not _same(now.get(key, _MISSING), earlier.get(key, _MISSING))
            or not _same_entries(copies.get(key), earlier_copies.get(key))
        ]


def _holders(model: nn.Module) -> dict[int, tuple[str, dict[str, Any]]]:
    """Return name and attributes of each module and each configuration, by the id of the object."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for path, module in model.named_modules():
        parts = [vars(module).get(part, {}) for part in _PARTS]
        own = {key for key in vars(module) if key not in _INTERNAL and not any(key in part for part in parts)}
        found[id(module)] = (path or "model", _Attributes(vars(module), own, parts))
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) not in found:
            found[id(config)] = (f"{path}.config" if path else "model.config", vars(config))
    return found


class _Attributes(dict):
    """The attributes of a module without its parts; what is written goes to the module."""

    def __init__(self, of: dict[str, Any], names: set[str], parts: list[Mapping[str, Any]]) -> None:
        super().__init__({name: of[name] for name in names})
        self._of, self._parts = of, parts

    def __setitem__(self, name: str, value: Any) -> None:
        if not any(name in part for part in self._parts):  # it would hide a buffer of the same name
            self._of[name] = value

    def pop(self, name: str, default: Any = None) -> Any:
        return self._of.pop(name, default)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are one, or equal plain values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and (one == other or (one != one and other != other))


def _same_entries(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and _same(value, other[key]) for key, value in one.items())
    return one == other if isinstance(one, set) else all(map(_same, one, other))


def _refill(container: Any, entries: Any) -> None:
    """Give a container these entries."""
    if not _same_entries(container, entries):
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(entries)

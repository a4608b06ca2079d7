"""The part of the watch over buffers and frozen parameters, which do not change during a run.

Place in the flow: under `dpllm.training.checks.watch`. It also watches the places of all parameters in the model: none
is replaced by another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.checksums import Checksum, values
from dpllm.ghost.refusals import scales_of
from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of


@dataclass
class _Fixed:
    """A tensor that must not change.

    Attributes:
        name: its path in the model.
        kind: "buffer", "frozen parameter" or "scale of a quantised weight".
        holder: the module that has it.
        attribute: its name in that module.
        held: the object, if the engine replaces it temporarily (FSDP2) or it is no attribute. None: the holder's.
        saved: whether it is part of the saved state.
        shape: its shape.
        stamp: see `Stamp`.
        checksum: checksum of its values.
    """

    name: str
    kind: str
    holder: nn.Module
    attribute: str
    held: Tensor | None
    saved: bool
    shape: tuple[int, ...] = ()
    stamp: Stamp = ()
    checksum: int = 0

    def tensor(self) -> Tensor | None:
        return self.held if self.held is not None else getattr(self.holder, self.attribute, None)


class FixedTensors:
    """The buffers and frozen parameters of a model, and the places of its parameters.

    Args:
        model: the module inside its engine's wrapper.
        trained: the ids of the parameters that are trained.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        """Store the present state of all."""
        self._model, self._trained = model, frozenset(trained)
        self._sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self._fixed: dict[tuple[str, str], _Fixed] = {}
        self._places: dict[str, int] = {}
        self.rebase()

    def rebase(self) -> None:
        """Store the present state for later comparisons."""
        self._fixed = {(fixed.name, fixed.kind): fixed for fixed in self._find_fixed()}
        _take(self._fixed.values())
        self._places = self._find_places()

    def check(self, when: str, everything: bool = False) -> None:
        """Compare the tensors that were written since the last comparison.

        Args:
            when: the moment of the write, for the message.
            everything: whether all tensors are compared by their values.

        Raises:
            WatchError: a tensor has other values.
        """
        with torch.no_grad():
            suspects = [f for f in self._fixed.values() if everything or stamp_of(f.tensor()) != f.stamp]
            if not suspects:
                return
            for fixed, checksum in zip(suspects, _checksums([f.tensor() for f in suspects]), strict=True):
                tensor = fixed.tensor()
                if checksum != fixed.checksum and not _has_grown(fixed, tensor):
                    raise WatchError(
                        f"The {fixed.kind} {fixed.name} changed {when}. Values computed from private rows must reach "
                        "the model only through the noisy gradient, unlike running statistics, max_norm of an "
                        "embedding, or weights written by a callback. Freeze the statistic, leave max_norm out, or "
                        "remove the callback; do not release any output of this run"
                    )
                fixed.checksum, fixed.stamp, fixed.shape = checksum, stamp_of(tensor), _shape(tensor)

    def check_places(self) -> None:
        """Check that every parameter is where it was.

        Raises:
            WatchError: one was replaced, added or removed.
        """
        now = self._find_places()
        moved = [name for name in self._places.keys() | now.keys() if self._places.get(name) != now.get(name)]
        if moved:
            raise WatchError(
                f"{min(moved)} is another parameter than when the run was attached: it, or a module that holds it, was "
                "replaced, added or removed. No noise covers the new one. Change the model before the run is attached, "
                "or after it has ended, in a copy that is saved elsewhere"
            )

    def take_in_new(self) -> None:
        """Watch buffers that a forward pass has made.

        Raises:
            WatchError: one is part of the saved state, or a trainable parameter was added.
        """
        if self._sharded:  # modules hold other tensors temporarily
            return
        new = [fixed for fixed in self._find_fixed() if (fixed.name, fixed.kind) not in self._fixed]
        for fixed in new:
            tensor = fixed.tensor()
            if fixed.saved or (tensor is not None and tensor.requires_grad):
                raise WatchError(
                    f"The {fixed.kind} {fixed.name} was added to the model after the run was attached, and it would be "
                    "saved or trained: no noise covers it. Register it before the run starts, or with persistent=False"
                )
        _take(new)
        self._fixed.update({(fixed.name, fixed.kind): fixed for fixed in new})

    def unfrozen(self) -> list[str]:
        """Return the names of the frozen parameters that now require a gradient."""
        return [
            fixed.name
            for fixed in self._fixed.values()
            if fixed.kind == "frozen parameter" and (tensor := fixed.tensor()) is not None and tensor.requires_grad
        ]

    def refuse_gradients(self, when: str) -> None:
        """Check that no frozen parameter received a gradient.

        Raises:
            WatchError: one did.
        """
        for fixed in self._fixed.values():
            tensor = fixed.tensor() if fixed.kind == "frozen parameter" else None
            if tensor is not None and tensor.grad is not None:
                raise WatchError(
                    f"{fixed.name} is not trained and received a gradient {when}: it is not clipped, and no noise "
                    "covers it. Set requires_grad of all parameters before the run is attached"
                )

    def _find_places(self) -> dict[str, int]:
        """Return the tensor at each path of the model, except where the engine replaces it temporarily."""
        if self._sharded:
            return {}
        return {name: id(p) for name, p in self._model.named_parameters(remove_duplicate=False)}

    def _find_fixed(self) -> list[_Fixed]:
        found, seen = [], set(self._trained)
        for path, module in self._model.named_modules():
            for kind, members in (
                ("frozen parameter", module.named_parameters(recurse=False)),
                ("buffer", module.named_buffers(recurse=False)),
            ):
                for attribute, tensor in members:
                    if id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    # The names of the saved buffers: a public list of them would gather the whole state.
                    saved = attribute not in getattr(module, "_non_persistent_buffers_set", ())
                    held = tensor if isinstance(tensor, DTensor) else None
                    name = f"{path}.{attribute}" if path else attribute
                    found.append(_Fixed(name, kind, module, attribute, held, saved))
            for attribute, tensor in scales_of(module).items():
                name = f"{path}.{attribute}" if path else attribute
                found.append(_Fixed(name, "scale of a quantised weight", module, attribute, tensor, saved=True))
        return found


def _shape(tensor: Any) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def _take(all_fixed: Iterable[_Fixed]) -> None:
    with torch.no_grad():
        taken = list(all_fixed)
        for fixed, checksum in zip(taken, _checksums([f.tensor() for f in taken]), strict=True):
            fixed.checksum, fixed.stamp = checksum, stamp_of(fixed.tensor())
            fixed.shape = _shape(fixed.tensor())


def _has_grown(fixed: _Fixed, tensor: Any) -> bool:
    """Return whether a cache that is not saved grew along one dimension and still begins with the old values."""
    if fixed.saved or tensor is None or len(tensor.shape) != len(fixed.shape) or not fixed.shape:
        return False
    longer = [dim for dim, (new, old) in enumerate(zip(tensor.shape, fixed.shape, strict=True)) if new != old]
    if len(longer) != 1 or tensor.shape[longer[0]] < fixed.shape[longer[0]]:
        return False
    return _checksums([tensor.narrow(longer[0], 0, fixed.shape[longer[0]])]) == [fixed.checksum]


def _checksums(tensors: Iterable[Any]) -> list[int]:
    """Return the checksum of each tensor, with one read per device."""
    return values([Checksum([tensor]) for tensor in tensors])

"""Tell whether ``.grad`` holds what one clipper added, and nothing else.

Place in the flow: `dpllm.ghost.unit_clipper.UnitClipper.backward` notes what it leaves; noise that is added outside of
a run asks (`dpllm.mechanism.starts`). A gradient from elsewhere would be released without a bound.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn import Parameter

from dpllm.ghost.errors import GhostError


class OwnSums:
    """What a clipper left in the ``.grad`` of its parameters since they were empty: None, or zeros."""

    def __init__(self) -> None:
        """Begin without a sum."""
        self._left: dict[str, tuple[Any, int]] = {}  # the tensor, weakly, and its version
        self._foreign: set[str] = set()
        self._units = 0
        self._broken_off = False

    @contextlib.contextmanager
    def unwritten(self, parameters: Mapping[str, Parameter]) -> Iterator[None]:
        """Make sure that a backward pass within the block does not write to ``.grad``; what it wrote to is dropped.

        Raises:
            GhostError: it did, past all rules: by a use of a parameter that no hook saw. An error of the block goes on.
        """
        before, written = {name: state_of_gradient(p) for name, p in parameters.items()}, []
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                if state_of_gradient(parameter) != before[name]:
                    parameter.grad = None
                    written.append(name)
        if written:
            raise GhostError(
                f"The backward pass wrote a gradient that is not clipped to {written[0]}.grad, and it was dropped: the "
                "parameter is used where no rule sees it. Call zero_grad(), compute all units of the step again, and "
                "make GhostClipper after the last change of the model's dtype or device."
            )

    def begin(self, parameters: Mapping[str, Parameter]) -> None:
        """Look at ``.grad`` before a clipped sum is added."""
        self._foreign = set(self._other(parameters))
        if self._are_empty(parameters):
            self._units = 0
        self._broken_off = True  # until `end`

    def refuse_broken_off(self, parameters: Mapping[str, Parameter]) -> None:
        """Make sure that ``.grad`` does not hold a part of a sum only.

        Raises:
            GhostError: an error or Ctrl-C came while the last sum was added.
        """
        if self._broken_off and any(p.grad is not None and bool(p.grad.any()) for p in parameters.values()):
            raise GhostError(
                "The last backward() was broken off while it added its sum to .grad, so some parameters have the "
                "gradients of its units, and a second attempt would add these again. Call "
                "optimizer.zero_grad(set_to_none=True), and compute all units of the step again."
            )
        self._broken_off = False

    def end(self, parameters: Mapping[str, Parameter], num_units: int) -> None:
        """Note ``.grad`` after the sum of so many units was added."""
        self._units += num_units
        self._broken_off = False
        self._left = {name: (weakref.ref(p.grad), p.grad._version) for name, p in parameters.items()}  # type: ignore[union-attr]

    def foreign(self, parameters: Mapping[str, Parameter]) -> str | None:
        """Return a parameter whose ``.grad`` has numbers from elsewhere; None: there is none."""
        return next(iter(sorted(self._other(parameters))), None)

    def num_units(self, parameters: Mapping[str, Parameter]) -> int:
        """Return the number of units in the sums; a unit that was clipped twice counts twice."""
        return 0 if self._are_empty(parameters) else self._units

    def _other(self, parameters: Mapping[str, Parameter]) -> list[str]:
        names = []
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            own = self._is_as_left(name, parameter)
            if (name in self._foreign) if own else bool(parameter.grad.any()):
                names.append(name)
        return names

    def _are_empty(self, parameters: Mapping[str, Parameter]) -> bool:
        given = [(name, p) for name, p in parameters.items() if p.grad is not None]
        return not any(self._is_as_left(name, p) or bool(p.grad.any()) for name, p in given)  # type: ignore[union-attr]

    def _is_as_left(self, name: str, parameter: Parameter) -> bool:
        left, version = self._left.get(name, (lambda: None, -1))
        return left() is parameter.grad and parameter.grad is not None and parameter.grad._version == version


def state_of_gradient(parameter: Parameter) -> tuple[int, int] | None:
    """Return what changes when a gradient is written to ``.grad``."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)

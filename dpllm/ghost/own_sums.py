"""Make sure that ``.grad`` gets whole clipped sums from a clipper, and nothing else during its backward pass.

Place in the flow: `dpllm.ghost.unit_clipper.UnitClipper.backward` uses it. A gradient that is not clipped would be
released without a bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch.nn import Parameter

from dpllm.ghost.errors import GhostError


class OwnSums:
    """Watches what `backward` writes to the ``.grad`` of the clipper's parameters."""

    def __init__(self) -> None:
        """Begin without a sum."""
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

    def begin(self) -> None:
        """Note that a clipped sum is being added to ``.grad``, until `end`."""
        self._broken_off = True

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

    def end(self) -> None:
        """Note that the sum was added to every parameter."""
        self._broken_off = False


def state_of_gradient(parameter: Parameter) -> tuple[int, int] | None:
    """Return what changes when a gradient is written to ``.grad``."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)

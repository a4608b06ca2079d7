"""What clipped a sum: all its parameters need noise, scaled to its bound.

Place in the flow: `dpllm.ghost.GhostClipper` names itself here; `dpllm.mechanism.starts.Start` adds noise in a loop of
one's own and asks. It is the only place that knows both, in a loop that gives neither to the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dpllm.mechanism.parts import Clipping


@runtime_checkable
class Clipped(Protocol):
    """Clipped sums in ``.grad``, and the bound that they keep: `dpllm.GhostClipper`."""

    @property
    def clipping(self) -> Clipping:
        """How contributions were bounded."""
        ...

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """All parameters that are clipped together, by name."""
        ...

    @property
    def foreign_gradient(self) -> str | None:
        """A parameter whose ``.grad`` holds more than clipped sums; None: there is none."""
        ...

    @property
    def num_summed(self) -> int:
        """The units in the sums since ``.grad`` was empty; one that was clipped twice counts twice."""
        ...


_CLIPPERS: weakref.WeakSet[Any] = weakref.WeakSet()


def note_clipper(clipper: Clipped) -> None:
    """Note a clipper, until it is removed or not used any more."""
    _CLIPPERS.add(clipper)


def forget_clipper(clipper: Clipped) -> None:
    """Forget a clipper that was removed from its model."""
    _CLIPPERS.discard(clipper)


def clippers_of(parameters: Iterable[Parameter]) -> list[Clipped]:
    """Return the clippers that clip one of these parameters."""
    known = {id(parameter) for parameter in parameters}
    return [one for one in list(_CLIPPERS) if known & {id(p) for p in one.parameters.values() if p.requires_grad}]

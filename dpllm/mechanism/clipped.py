"""The parameters that a clipper clips together: each of them needs noise, or its sum is released without.

Place in the flow: `dpllm.ghost.GhostClipper` names itself here; `dpllm.mechanism.starts.Start` adds noise in a loop of
one's own and asks. It is the only place that knows both, in a loop that gives neither to the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class _Clipper(Protocol):
    @property
    def parameters(self) -> Mapping[str, Any]: ...


_CLIPPERS: weakref.WeakSet[Any] = weakref.WeakSet()


def note_clipper(clipper: _Clipper) -> None:
    """Note a clipper, until it is removed or not used any more."""
    _CLIPPERS.add(clipper)


def forget_clipper(clipper: _Clipper) -> None:
    """Forget a clipper that was removed from its model."""
    _CLIPPERS.discard(clipper)


def left_out(given: Iterable[Any]) -> list[str]:
    """Return the names of parameters that a clipper clips together with some of those given, and that are not given.

    Args:
        given: parameters; of a model without a clipper, none is left out.
    """
    known = {id(parameter) for parameter in given}
    found: list[str] = []
    for clipper in list(_CLIPPERS):
        own = {name: parameter for name, parameter in clipper.parameters.items() if parameter.requires_grad}
        if known & {id(parameter) for parameter in own.values()}:
            found += [name for name, parameter in own.items() if id(parameter) not in known]
    return found

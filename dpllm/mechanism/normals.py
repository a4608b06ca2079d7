"""Where the numbers of the noise come from: the protocols of their sources.

Place in the flow: below `dpllm.mechanism.parts`, whose noise draws from them. `dpllm.mechanism.generators` has the
sources of dpllm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


class Normals(Protocol):
    """Standard normal numbers, from which the noise of a run is made."""

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add independent N(0, noise_stddev²) to every entry, in place, without a second tensor of its size."""
        ...

    def normal_like(self, total: Tensor) -> Tensor:
        """Return independent N(0, 1) of the shape, dtype and device of a tensor, from fresh entropy."""
        ...


@runtime_checkable
class Written(Protocol):
    """A source whose noise can be written where nothing is yet."""

    def write_(self, grad: Tensor, noise_stddev: float) -> None:
        """Write what `Normals.add_` makes of zeros, without reading the tensor."""
        ...


class SkippingGenerator(Normals, Protocol):
    """A source of draws with addresses."""

    def skip(self, draws: int) -> None:
        """Leave out the next draws, at no cost."""
        ...

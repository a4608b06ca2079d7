"""Where the numbers of the noise come from: the protocols of their sources.

Place in the flow: below `dpllm.mechanism.parts`, whose noise draws from them. `dpllm.mechanism.generators` has the
sources of dpllm, `dpllm.mechanism.sources` asks those of a loop of one's own.
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


class NormalGenerator(Normals, Protocol):
    """A source of noise for a loop of one's own: `dpllm.NoiseSource`, or a class of yours with these three members.

    `Mechanism.start` takes one. Independent noise calls ``add_`` once per step and parameter, correlated noise
    ``normal_like``. Runs with a ledger (`dpllm.PrivateRun`, the trainers, recipes) take no generator of one's own:
    ``privacy.randomness`` chooses among those of dpllm, and the report states which.

    Guarantee: the ε of a history assumes that the numbers are independent in each entry and call, exactly N(0, 1) up to
    floating point, and unknown to everybody. `NoiseSource` keeps this. Of another class dpllm measures some numbers
    before the first noise, and refuses missing, scaled, repeated or non-Gaussian noise. It cannot measure secrecy, nor
    all dependence: `Start.words` then says on what ε depends, and states no level by itself.
    """

    @property
    def is_secret(self) -> bool:
        """Whether all numbers come from the operating system's entropy, and nobody can repeat them.

        False for numbers from a seed. They need ``start(..., for_tests=True)``, whose history has ε = inf.
        """
        ...


class SkippingGenerator(Normals, Protocol):
    """A source of draws with addresses."""

    def skip(self, draws: int) -> None:
        """Leave out the next draws, at no cost."""
        ...

"""What a mechanism is made of: who is drawn, how a contribution is bounded, and which noise is added.

Place in the flow: the plan fixes a mechanism beforehand; sampler, step, noise, accounting and report ask it and nothing
else. A mechanism is a *specification*: public, frozen, without tensors. What a run keeps while it goes on (draws, noise
that later steps need) is made from it, and is never written to a disk.

A new mechanism is one file beside this one and one line in `dpllm.mechanism.catalogue`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from dpllm.mechanism.events import Event


class Sampler(Protocol):
    """Draws the units of each step."""

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of one step after the other, in rising order, without end.

        One iterator serves one run, or one resume; it is never begun again within it.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        ...


class Clipping(Protocol):
    """Bounds what one unit adds to the sum of a step."""

    kind: ClassVar[str]

    @property
    def clip_norm(self) -> float:
        """C."""
        ...

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """Return the names of the parameters of each group, each parameter in one.

        Args:
            shapes: name and shape of each trainable parameter.
        """
        ...

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return the factor by which each unit's gradient is multiplied, in each group.

        Args:
            norm_GU: (G, U) l2 norms, rounded up, finite. A unit whose gradient is not finite gets the factor 0
                elsewhere.

        Returns:
            (G, U) factors, at least 0, under which the norm over all groups is at most ``sensitivity("zero-out")``.
        """
        ...

    def sensitivity(self, adjacency: str) -> float:
        """Return the largest change of the clipped sum between neighbours, in l2 norm."""
        ...

    def words(self) -> str:
        """Return how a gradient is bounded, for the report: "is clipped ..."."""
        ...


class OneGroup:
    """A clipping that has one norm over all parameters together."""

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """All parameters."""
        return [list(shapes)]


class NormalGenerator(Protocol):
    """A source of standard normal numbers."""

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add independent N(0, noise_stddev²) to every entry, in place, without a second tensor of its size."""
        ...

    def normal_like(self, total: Tensor) -> Tensor:
        """Return independent N(0, 1) of the shape, dtype and device of a tensor, from fresh entropy."""
        ...


class NoiseStream(Protocol):
    """The noise of a run, from its start or resume onwards; never written to a disk."""

    def begin(self, step: int) -> None:
        """Begin the noise of a step, counted from the start or resume; each step once, in order."""
        ...

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add one process's slice of a parameter's noise, in place.

        Args:
            name: of the parameter.
            total: this process's clipped sum, contiguous, float32 or float64.
            stddev: σ·C.
            rank: this process.
            size: processes whose tensors will be added up.
        """
        ...


class Noise(Protocol):
    """How the noise of the steps hangs together, and with it how units must be drawn."""

    kind: ClassVar[str]

    def sampler(self, draw: Draw) -> Sampler:
        """Return the sampler that the accounting is for.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return what a step is charged as.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def variance(self, step: int, num_steps: int) -> float:
        """Return the variance of the noise of a step over (σC)², counted from the start or resume."""
        ...

    def stream(self, generator: NormalGenerator, num_steps: int) -> NoiseStream:
        """Return the noise of a run, or of a resume.

        Args:
            generator: of this process, its stream independent of the others'.
            num_steps: T of the plan.
        """
        ...

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report: "in each step ...".

        Args:
            draw: what is drawn from.
            drawn: what is drawn: "record", "user" or "row".
        """
        ...

    def words(self) -> str:
        """Return which noise is added, for the report: "Gaussian noise ..."."""
        ...

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return what the accounting assumes of sampling and noise, and for each how the run ensures it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What a step draws from, in public numbers."""

    num_units: int
    """N."""
    population: int
    """What there is to draw: N units, or their rows."""
    expected_batch_size: int
    """b."""
    max_batch_size: int
    """B_max."""
    rows_per_unit: int | None = None
    """k where the rows of a unit are drawn, and clipped, each by itself; None where units are drawn."""

    @property
    def sampling_rate(self) -> float:
        """Q = b / population: the share of all steps that a unit, or a row, enters."""
        return self.expected_batch_size / self.population


@dataclass(frozen=True)
class Spec:
    """A part of a mechanism as recipes and plans name it: its kind, and its options.

    >>> Spec.of({"kind": "automatic", "stability": 0.01}).kind
    'automatic'
    """

    kind: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, value: Any) -> Spec:
        """Return the specification that a recipe gives as a word or as a mapping with ``kind``.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(value, Spec):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
            options = sorted((str(name), option) for name, option in value.items() if name != "kind")
            return cls(value["kind"], tuple(options))
        raise ValueError(f"a word, or a mapping with kind and its options, is needed, got {value!r}")

    def to_plain(self) -> str | dict[str, Any]:
        """Return what `of` takes."""
        return {"kind": self.kind, **dict(self.options)} if self.options else self.kind


@dataclass(frozen=True)
class Mechanism:
    """A sampler, a clipping and a noise that have an accounting together.

    Raises:
        ValueError: they have none.
    """

    draw: Draw
    clipping: Clipping
    noise: Noise
    noise_multiplier: float
    """σ."""

    def __post_init__(self) -> None:
        """Refuse parts without an accounting."""
        self.noise.sampler(self.draw)
        self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)
        if not math.isclose(self.clipping.sensitivity("zero-out"), self.clipping.clip_norm):
            raise ValueError(
                f"clipping {self.clipping.kind!r} lets one unit change the sum by "
                f"{self.clipping.sensitivity('zero-out'):g}, and the noise is scaled to clip_norm="
                f"{self.clipping.clip_norm:g}. Let the sensitivity be the clip norm"
            )

    @property
    def sampler(self) -> Sampler:
        """Who draws."""
        return self.noise.sampler(self.draw)

    @property
    def event(self) -> Event:
        """What each step is charged as."""
        return self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)

    @property
    def noise_stddev(self) -> float:
        """σC, in units of the gradient."""
        return self.noise_multiplier * self.clipping.clip_norm

    def history(self, num_steps: int) -> list[tuple[Event, int]]:
        """Return what so many steps from a start onwards are charged as."""
        return [(self.event, num_steps)]

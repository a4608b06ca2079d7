"""The parts of a mechanism: the sampler, the bound on a contribution, and the noise.

Place in the flow: the plan fixes a mechanism beforehand; sampler, step, noise, accounting and report all read from it.
A mechanism is a *specification*: public, frozen, without tensors. The state of a run (draws, noise that later steps
need) is made from it, and is never written to a disk.

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
    from dpllm.mechanism.workload import Workload


class Sampler(Protocol):
    """Draws the units of each step."""

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in rising order, without end.

        A run, or a resume, uses one iterator and never restarts it.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        ...


class Clipping(Protocol):
    """Bounds the contribution of one unit to the sum of a step."""

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

        A column of factors depends only on the same column of norms: otherwise one unit could change the contributions
        of others. The caller checks this for a clipping that is not in the catalogue.

        Args:
            norm_GU: (G, U) l2 norms, rounded up, finite. A unit whose gradient is not finite gets the factor 0
                from the caller.

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
        """Return one group of all parameters."""
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
    """The noise of a run, from its start or resume onwards; never written to a disk.

    A run makes a stream for each block of a parameter's entries (`dpllm.mechanism.regenerated`), and may make it again
    to regenerate the noise: its noise is a function of its generator's draws, in the order of the steps.
    """

    def begin(self, step: int) -> None:
        """Begin the noise of a step, counted from the start or resume; called once per step, in order."""
        ...

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add one process's slice of a parameter's noise, in place.

        Args:
            name: of the parameter.
            total: this process's clipped sum, contiguous, float32 or float64.
            stddev: σ·C.
            rank: this process.
            size: processes whose tensors will be added up.

        Raises:
            ValueError: the sum has another dtype (`dpllm.mechanism.noise.slice_of` checks it).
        """
        ...


class Noise(Protocol):
    """The correlation of the noise of different steps, and the sampling that it requires."""

    kind: ClassVar[str]

    def candidates(self, draw: Draw, workload: Workload) -> Sequence[Noise]:
        """Return the noises from which the planner chooses, the one that needs the least memory first.

        All their numbers are set: the plan stores them, and nothing is computed again. A noise that leaves nothing
        open returns itself.

        Args:
            draw: the numbers of the draw.
            workload: the map from the noise of the steps to the released weights.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def error(self, workload: Workload) -> float:
        """Return the standard deviation of the noise of the released weights, divided by σC and the learning rate."""
        ...

    def sampler(self, draw: Draw) -> Sampler:
        """Return the sampler for which the accounting holds.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return the event that a step is charged with.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    @property
    def tensors_kept(self) -> int:
        """How many tensors of the gradient's size all processes together keep between two steps."""
        ...

    def variance(self, step: int, num_steps: int) -> float:
        """Return the variance of a step's noise, divided by (σC)²; steps count from the start or resume."""
        ...

    def stream(self, generator: NormalGenerator, num_steps: int) -> NoiseStream:
        """Return the noise of a run, or of a resume.

        Args:
            generator: that of this process, independent of the other processes.
            num_steps: T of the plan.
        """
        ...

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report: "in each step ...".

        Args:
            draw: the numbers of the draw.
            drawn: the word for a drawn item: "record", "user" or "row".
        """
        ...

    def words(self) -> str:
        """Return the description of the noise, for the report: "Gaussian noise ..."."""
        ...

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions on sampling and noise, and how the run ensures each."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The public numbers of a draw."""

    num_units: int
    """N."""
    population: int
    """The size of the population: N units, or their rows."""
    expected_batch_size: int
    """b."""
    max_batch_size: int
    """B_max."""
    rows_per_unit: int | None = None
    """k if the rows of a unit are drawn and clipped separately; None if units are drawn."""

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
            options = sorted(
                (str(name), tuple(option) if isinstance(option, list) else option)
                for name, option in value.items()
                if name != "kind"
            )
            return cls(value["kind"], tuple(options))
        raise ValueError(f"a word, or a mapping with kind and its options, is needed, got {value!r}")

    def to_plain(self) -> str | dict[str, Any]:
        """Return the value that `of` accepts."""
        options = {name: list(option) if isinstance(option, tuple) else option for name, option in self.options}
        return {"kind": self.kind, **options} if options else self.kind


@dataclass(frozen=True)
class Mechanism:
    """A sampler, a clipping and a noise for whose combination there is an accounting.

    Raises:
        ValueError: there is no accounting for them.
    """

    draw: Draw
    clipping: Clipping
    noise: Noise
    noise_multiplier: float
    """σ."""

    def __post_init__(self) -> None:
        """Refuse parts without an accounting."""
        if not isinstance(getattr(self.clipping, "kind", None), str):
            raise ValueError(
                f"the clipping has the kind {getattr(self.clipping, 'kind', None)!r}; its kind must be a word, for "
                "instance kind = 'mine'"
            )
        self.noise.sampler(self.draw)
        self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)
        if not math.isclose(self.clipping.sensitivity("zero-out"), self.clipping.clip_norm):
            raise ValueError(
                f"clipping {self.clipping.kind!r} lets one unit change the sum by "
                f"{self.clipping.sensitivity('zero-out'):g}, but the noise is scaled to clip_norm="
                f"{self.clipping.clip_norm:g}. Make the sensitivity equal to the clip norm"
            )

    @property
    def sampler(self) -> Sampler:
        """The sampler of the units."""
        return self.noise.sampler(self.draw)

    @property
    def event(self) -> Event:
        """The event that each step is charged with."""
        return self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)

    @property
    def noise_stddev(self) -> float:
        """σC, in units of the gradient."""
        return self.noise_multiplier * self.clipping.clip_norm

    def release_stddevs(self, num_steps: int) -> tuple[float, float]:
        """Return the standard deviations of the noise in the first and in the last of ``num_steps`` releases."""
        first, last = (self.noise.variance(step, num_steps) for step in (0, num_steps - 1))
        return self.noise_stddev * math.sqrt(first), self.noise_stddev * math.sqrt(last)

    def history(self, num_steps: int) -> list[tuple[Event, int]]:
        """Return the charge of ``num_steps`` steps from a start onwards."""
        return [(self.event, num_steps)]

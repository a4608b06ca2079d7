"""The parts of a mechanism: the sampler, the bound on a contribution, and the noise.

The plan fixes a mechanism in advance; sampler, step, noise, accounting and report all read it. A mechanism is a
*specification*: public, frozen, without tensors. A run's state (draws, noise that later steps need) is created from it,
and is never written to disk.

A new mechanism is one file in this folder and one line in `dpllm.mechanism.catalogue`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from dpllm.mechanism.events import Event
    from dpllm.mechanism.strategies import Workload


class Sampler(Protocol):
    """Draws the units of each step."""

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in ascending order, without end.

        A run, or a resume, uses one iterator and never restarts it. Creating the iterator again, for instance in each
        epoch, is another start, which costs more if noise is correlated over steps: pass the steps of each start to
        `Mechanism.history`.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        ...


class Clipping(Protocol):
    """Bounds the contribution of one unit to the sum of a step; a frozen dataclass (`frozen_copy`)."""

    kind: ClassVar[str]

    @property
    def clip_norm(self) -> float:
        """C."""
        ...

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """Return the names of each group's parameters, with each parameter in one group."""
        ...

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return the factor by which each unit's gradient is multiplied, in each group.

        A column of factors depends only on the same column of norms; otherwise one unit could change other units'
        contributions. The caller checks this for a clipping that is not in the catalogue.

        Args:
            norm_GU: (G, U) l2 norms, rounded up, finite. The caller gives the factor 0 to a unit whose gradient is not
                finite; with `SeparateGroups`, in the groups in which it is not finite.

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


@runtime_checkable
class SeparateGroups(Clipping, Protocol):
    """A clipping whose factors in a group depend only on the norms of that group.

    A group's clipped sum can then be formed during the backward pass, and its kept tensors are freed.
    """

    def group_factors(self, group: int, num_groups: int, norm_U: Tensor) -> Tensor:
        """Return one row of `factors`.

        Args:
            group: its index in the order of `groups`.
            num_groups: G.
            norm_U: (U,) l2 norms of that group, as in `factors`.

        Returns:
            (U,) factors.
        """
        ...


@runtime_checkable
class SizedGroups(Clipping, Protocol):
    """A clipping whose factors depend on the group sizes, for instance a bound C √(d_k / d) for each group.

    One object serves every model, so it cannot store the sizes: a model's clipper requests an object with them.
    """

    def sized(self, sizes: Sequence[int]) -> Self:
        """Return the same clipping for groups of these sizes, with the same C and sensitivity.

        Args:
            sizes: the number of trainable entries of each group, in the order of `groups`.
        """
        ...


@runtime_checkable
class AdaptiveClipping(Clipping, Protocol):
    """A clipping whose threshold follows a private statistic of the norms.

    In each step a unit contributes its gradient, of norm at most C, and a number between -½ and ½. Both sums get noise
    from the same stream: the gradients of standard deviation σ_g C, the statistic of σ_b. Together they are one event
    with noise multiplier σ (`gradient_noise_multiplier`). An object belongs to one step and does not change.
    """

    @property
    def threshold(self) -> float:
        """The norm above which a gradient is scaled down; a function of releases, fixed before the step."""
        ...

    def statistic(self, norm_U: Tensor) -> Tensor:
        """Return each unit's number, (U,), between -½ and ½, from its own norm, which may be non-finite."""
        ...

    def statistic_noise(self, expected_batch_size: int) -> float:
        """Return σ_b, the standard deviation of the noise on the sum of the units' numbers."""
        ...

    def at(self, threshold: float) -> Self:
        """Return the same clipping with a different threshold."""
        ...

    def updated(self, noisy_statistic: float, expected_batch_size: int) -> Self:
        """Return the clipping of the next step.

        Args:
            noisy_statistic: sum of the units' numbers of this step, with its noise.
            expected_batch_size: b, a public constant. The realised size must not be used: it is private.
        """
        ...


def gradient_noise_multiplier(noise_multiplier: float, statistic_noise: float) -> float:
    """Return σ_g = (σ⁻² - (2σ_b)⁻²)^(-½), with which gradients and a statistic together are one event of σ.

    A unit changes the gradients by at most C and the statistic by at most ½; in standard deviations of the noise, the
    squared norm of both is 1/σ_g² + 1/(2σ_b)² = 1/σ² (Andrew et al. 2021, arXiv:1905.03871, Theorem 1).

    Args:
        noise_multiplier: σ.
        statistic_noise: σ_b > 0.

    Raises:
        ValueError: the statistic alone has too little noise for σ.

    >>> round(gradient_noise_multiplier(0.71758, 51.2), 6), round(gradient_noise_multiplier(1.0, 10.0), 6)
    (0.717598, 1.001252)
    """
    if noise_multiplier >= 2 * statistic_noise:
        raise ValueError(
            f"the noise on the clipping's count has standard deviation {statistic_noise:g}, but more than σ/2 = "
            f"{noise_multiplier / 2:g} is needed: the count alone would cost more than the step. Set "
            f"clipping.count_noise to a larger number, for instance {10 * noise_multiplier:.3g}, or raise "
            "expected_batch_size"
        )
    return noise_multiplier / math.sqrt(1 - (noise_multiplier / (2 * statistic_noise)) ** 2)


def frozen_copy(clipping: Clipping) -> Clipping:
    """Return an immutable copy of a clipping, so that C remains the one for which the noise was chosen.

    A clipping that follows the norms of the private gradients would get noise for a different C, and would publish the
    norms: no ε covers either.

    Raises:
        ValueError: its class is not itself a frozen dataclass; a class that only inherits from one has attributes that
            can be set.
    """
    parameters = vars(type(clipping)).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise ValueError(
            f"{type(clipping).__name__} is not a frozen dataclass, so its numbers could follow the private gradients, "
            "which no ε covers. Put @dataclass(frozen=True) on the class, and choose C without the private rows. The "
            "kind 'quantile' follows the norms through noisy counts that ε covers"
        )
    return copy.deepcopy(clipping)


class OneGroup:
    """A clipping with one norm over all parameters together."""

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Sequence[str]]:
        """Return one group of all parameters."""
        return [list(shapes)]


class Normals(Protocol):
    """Standard normal numbers, from which a run's noise is made."""

    def add_(self, grad: Tensor, noise_stddev: float) -> None:
        """Add independent N(0, noise_stddev²) to every entry, in place, without a second tensor of its size."""
        ...

    def normal_like(self, total: Tensor) -> Tensor:
        """Return independent N(0, 1) of the shape, dtype and device of a tensor, from fresh entropy."""
        ...


@runtime_checkable
class Written(Protocol):
    """A source whose noise can be written to an uninitialised tensor."""

    def write_(self, grad: Tensor, noise_stddev: float) -> None:
        """Write the noise that `Normals.add_` would add to zeros, without reading the tensor."""
        ...


class SkippingGenerator(Normals, Protocol):
    """A source of draws with addresses."""

    def skip(self, draws: int) -> None:
        """Skip the next draws, at no cost."""
        ...


class NoiseStream(Protocol):
    """The noise of a run, from its start or resume onwards; never written to disk.

    A run creates one stream per block of a parameter's entries (`dpllm.mechanism.generators`), and may recreate it to
    regenerate the noise, which is a function of its generator's draws, in the order of the steps.
    """

    def begin(self, step: int) -> None:
        """Begin the noise of a step, counted from the start or resume; called once per step, in order."""
        ...

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add one process's slice of a parameter's noise, in place.

        Args:
            name: the parameter's name.
            total: this process's clipped sum, contiguous, float32 or float64.
            stddev: σ·C.
            rank: this process.
            size: the number of processes whose tensors will be summed.

        Raises:
            ValueError: the sum has a wrong dtype (`dpllm.mechanism.noise.slice_of` checks it).
        """
        ...


@runtime_checkable
class SingleStep(Protocol):
    """A stream that makes the noise of one step from fewer draws than all previous steps need."""

    def add_once_(self, step: int, total: Tensor, stddev: float, numbers: SkippingGenerator) -> None:
        """Add a step's noise to all entries, in place, with the same bits as a stream that takes every step.

        Args:
            step: counted from the start or resume.
            total: one block, contiguous.
            stddev: σ·C.
            numbers: at its first draw.
        """
        ...


class Noise(Protocol):
    """The correlation of the noise of different steps, and the sampling that it requires."""

    kind: ClassVar[str]
    wants_total: ClassVar[bool]
    """Whether one process per entry adds the noise to complete sums, instead of each process to its share."""
    only_discrete: ClassVar[bool]
    """Whether a recipe may name it only with ``privacy.randomness=discrete``."""
    max_entries: ClassVar[int | None]
    """The largest number of trained parameters for which the accounting holds; None: any number."""
    is_sampled: ClassVar[bool]
    """Whether a step's units are a random sample. False: they are visited in an order, B per step."""

    @property
    def unit_groups(self) -> int | None:
        """The number of groups into which it divides the units; a step draws from one of them; None: still open."""
        ...

    def max_batch_size(self, draw: Draw) -> int | None:
        """Return B_max of a plan whose recipe does not set it; None: the smallest that costs no ε.

        Args:
            draw: the numbers of the draw, without truncation.
        """
        ...

    def candidates(self, draw: Draw, workload: Workload) -> Sequence[Noise]:
        """Return the noises from which the planner chooses, starting with the one that needs the least memory.

        All their numbers are set: the plan stores them, and nothing is recomputed. A noise without open numbers returns
        itself.

        Args:
            draw: the numbers of the draw.
            workload: the map from the noise of the steps to the released weights.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def error(self, workload: Workload) -> float:
        """Return the released weights' noise standard deviation, divided by σC and the learning rate."""
        ...

    def sampler(self, draw: Draw) -> Sampler:
        """Return the sampler for which the accounting holds.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return the event charged for a step.

        Raises:
            ValueError: there is no accounting for this draw.
        """
        ...

    @property
    def tensors_kept(self) -> int:
        """The number of tensors of the gradient's size that all processes together keep between steps."""
        ...

    def column(self, num_steps: int) -> tuple[float, ...]:
        """Return the first column of the lower triangular Toeplitz matrix M, whose inverse correlates the noise.

        The audit uses it to remove the correlation.
        """
        ...

    def separation(self, draw: Draw) -> int:
        """Return the minimal number of steps between two steps of one unit that the accounting assumes; 1: any.

        A run refuses draws in which a unit recurs earlier.
        """
        ...

    def variance(self, step: int, num_steps: int) -> float:
        """Return the variance of a step's noise, divided by (σC)²; steps count from the start or resume."""
        ...

    def stream(self, generator: Normals, num_steps: int) -> NoiseStream:
        """Return the noise of a run, or of a resume.

        Creating a stream again, for instance in each epoch, is another start, as for `Sampler.steps`.

        Args:
            generator: this process's generator, independent of the other processes.
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
        """Return the accounting's assumptions on sampling and noise, and how the run ensures each of them."""
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


class _Pairs(tuple[tuple[str, Any], ...]):
    """The sorted pairs of a mapping, which make a plan that holds them hashable."""

    __slots__ = ()


def _frozen(value: Any) -> Any:
    """Return lists as tuples and mappings as pairs, at any depth, so that they are immutable.

    Raises:
        ValueError: an option name is not text: 1 and "1" would become one name in a plan.
    """
    if isinstance(value, Mapping):
        other = next((name for name in value if not isinstance(name, str)), None)
        if other is not None:
            raise ValueError(f"the option name {other!r} is not text; write it in quotes: '{other}'")
        return _Pairs(sorted((name, _frozen(option)) for name, option in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    """Return the lists and mappings from which `_frozen` made its argument, as in JSON."""
    if isinstance(value, _Pairs):
        return {name: _thawed(option) for name, option in value}
    return [_thawed(option) for option in value] if isinstance(value, tuple) else value


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
            ValueError: it is neither, or an option name is not text.
        """
        if isinstance(value, Spec):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
            return cls(value["kind"], _Pairs(pair for pair in _frozen(value) if pair[0] != "kind"))
        raise ValueError(f"expected a word, or a mapping with kind and its options, got {value!r}")

    def to_plain(self) -> str | dict[str, Any]:
        """Return the value that `of` accepts."""
        return {"kind": self.kind, **self.plain_options} if self.options else self.kind

    @property
    def plain_options(self) -> dict[str, Any]:
        """The options with their lists and mappings, as in JSON."""
        return {name: _thawed(option) for name, option in self.options}


@dataclass(frozen=True)
class Mechanism:
    """A combination of sampler, clipping and noise with an accounting.

    Raises:
        ValueError: the combination has no accounting, or the clipping is not a frozen dataclass.
    """

    draw: Draw
    clipping: Clipping
    noise: Noise
    noise_multiplier: float
    """σ."""

    def __post_init__(self) -> None:
        """Refuse combinations without an accounting."""
        if not isinstance(getattr(self.clipping, "kind", None), str):
            raise ValueError(
                f"the clipping has the kind {getattr(self.clipping, 'kind', None)!r}; its kind must be a string, for "
                "instance kind = 'mine'"
            )
        object.__setattr__(self, "clipping", frozen_copy(self.clipping))
        self.noise.sampler(self.draw)
        self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)
        if not math.isclose(self.clipping.sensitivity("zero-out"), self.clipping.clip_norm):
            raise ValueError(
                f"clipping {self.clipping.kind!r} lets one unit change the sum by "
                f"{self.clipping.sensitivity('zero-out'):g}, but the noise is scaled to clip_norm="
                f"{self.clipping.clip_norm:g}. Make the sensitivity equal to the clip norm"
            )
        if self.noise.wants_total and isinstance(self.clipping, AdaptiveClipping):
            raise ValueError(
                f"randomness='discrete' has no accounting for clipping {self.clipping.kind!r}, whose threshold follows "
                "a noisy count in each step. Use a different clipping, for instance flat or automatic, or "
                "randomness='chacha20'"
            )
        _ = self.noise_stddev  # refuses a statistic with too little noise

    @property
    def sampler(self) -> Sampler:
        """The sampler of the units."""
        return self.noise.sampler(self.draw)

    @property
    def event(self) -> Event:
        """The event charged for each step."""
        return self.noise.event(self.draw, self.noise_multiplier, self.clipping.clip_norm)

    @property
    def gradient_noise_multiplier(self) -> float:
        """σ; for an adaptive clipping σ_g, which is slightly larger."""
        if not isinstance(self.clipping, AdaptiveClipping):
            return self.noise_multiplier
        return gradient_noise_multiplier(
            self.noise_multiplier, self.clipping.statistic_noise(self.draw.expected_batch_size)
        )

    @property
    def noise_stddev(self) -> float:
        """σC, the noise on the sum of gradients, in units of the gradient; for an adaptive clipping σ_g C."""
        return self.gradient_noise_multiplier * self.clipping.clip_norm

    @property
    def first_threshold(self) -> float | None:
        """The clip threshold of the first step, if the clipping is adaptive."""
        return self.clipping.threshold if isinstance(self.clipping, AdaptiveClipping) else None

    @property
    def statistic_stddev(self) -> float:
        """σ_b, the noise on the sum of an adaptive clipping's statistic; 0 if there is no noise or no statistic."""
        if self.noise_multiplier == 0 or not isinstance(self.clipping, AdaptiveClipping):
            return 0.0
        return self.clipping.statistic_noise(self.draw.expected_batch_size)

    def allows(self, clipping: Clipping) -> bool:
        """Return whether a clipping is the mechanism's; an adaptive one may have a different threshold."""
        mine = self.clipping
        if isinstance(mine, AdaptiveClipping) and type(clipping) is type(mine):
            clipping = clipping.at(mine.threshold)
        return clipping == mine

    def require_entries(self, num_entries: int) -> None:
        """Check that the accounting holds for a model of this size.

        Args:
            num_entries: the number of all trained parameters together, on all processes.

        Raises:
            ValueError: there are more than the noise allows.
        """
        require_entries(self.noise, num_entries)

    def release_stddevs(self, num_steps: int) -> tuple[float, float]:
        """Return the standard deviations of the noise in the first and in the last of ``num_steps`` releases."""
        first, last = (self.noise.variance(step, num_steps) for step in (0, num_steps - 1))
        return self.noise_stddev * math.sqrt(first), self.noise_stddev * math.sqrt(last)

    def history(self, num_steps: int | Sequence[int]) -> list[tuple[Event, int]]:
        """Return the charge of steps, for `dpllm.epsilon`.

        Args:
            num_steps: the steps since a start; if sampler or noise was recreated (a resume, or an epoch or cell that
                calls ``steps`` or ``stream``), the steps of each start. If noise is correlated over steps, two starts
                cost more than one with the same number of steps.
        """
        event = self.event
        return [(event, count) for count in (num_steps if isinstance(num_steps, Iterable) else [num_steps])]


def require_entries(noise: Noise, num_entries: int) -> None:
    """Do the same as `Mechanism.require_entries`, for a noise before its mechanism is created.

    Raises:
        ValueError: there are more parameters than the noise allows.
    """
    if noise.max_entries is not None and num_entries > noise.max_entries:
        raise ValueError(
            f"{num_entries:,} parameters are trained, but the accounting of randomness='discrete' holds for at most "
            f"{noise.max_entries:,}. Train fewer, for instance with LoRA, or use randomness='chacha20'"
        )

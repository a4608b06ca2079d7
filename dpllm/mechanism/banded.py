"""Noise that is correlated over steps: banded matrix factorisation under cyclic Poisson sampling.

Over many steps the optimizer adds up gradients and their noise. The total noise is smaller if later draws cancel part
of the earlier ones. The release of step t is g_t + σC (M⁻¹z)_t with independent z and a lower triangular Toeplitz
matrix M (the *strategy*) that has b bands and columns of norm at most 1 (Choquette-Choo et al. 2023, arXiv:2306.08153).

The privacy cost is that of a few independent rounds. The units are split once, in secret, into b groups, and step t
draws from group t mod b. Two steps that one unit can enter are therefore at least b apart, and their columns of M have
no row in common. So the unit's contributions are released as if each had separate Gaussian noise of standard deviation
at least σC. This holds for gradients that depend on all earlier releases, since M is lower triangular (Denisov et al.
2022, arXiv:2202.08312). A unit takes part in ⌈T/b⌉ rounds, each over a Poisson sample of its group, with probability
q' = b B / N.

A run keeps b - 1 or b noise tensors of the gradient's size, in memory only and never on a disk, because they would
allow a reader to subtract the noise from the last updates. If they do not fit, they are recomputed in each step
(`dpllm.mechanism.generators`). A resumed run begins with fresh noise and a fresh split, which costs one more round if
it continues in the middle of a cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.events import Event, EventWords, Numbers, Round, Step
from dpllm.mechanism.noise import CorrelatedStream, IndependentNoise
from dpllm.mechanism.parts import Draw, NoiseStream, Normals, SkippingGenerator
from dpllm.mechanism.strategies import (
    Workload,
    best_ratio,
    coefficients,
    free_column,
    geometric_column,
    inverse,
    require_column,
    require_norm,
    rounded,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BandedStep(Numbers):
    """A step whose noise is correlated with that of the previous b - 1 steps, over a Poisson sample of one of b groups.

    Raises:
        ValueError: a field is out of range.
    """

    kind: ClassVar[str] = "banded"
    max_batch_size: int
    """B_max, the largest number of units in a step."""
    bands: int
    """b."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        for name in ("num_units", "max_batch_size", "bands"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            object.__setattr__(self, name, int(value))
        super().__post_init__()
        if self.num_units is None or not 1 <= self.bands <= self.num_units:
            raise ValueError(f"bands must be between 1 and the number of units, got {self.bands} of {self.num_units}")
        _ = self._round  # checks its fields

    @property
    def _round(self) -> Step:
        assert self.num_units is not None
        return Step(
            num_units=-(-self.num_units // self.bands),
            sampling_rate=self.sampling_rate,
            max_batch_size=self.max_batch_size,
            noise_multiplier=self.noise_multiplier,
        )

    @property
    def restarts(self) -> bool:
        """Whether a resume costs more: it begins a new cycle."""
        return self.bands > 1

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the maximal rounds of a unit: one per cycle of b steps, including the last, partial cycle."""
        return self._round.rounds(-(-num_steps // self.bands))

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        if self.bands == 1:
            return self._round.words()
        return EventWords(
            sampling=f"cyclic Poisson over {self.bands} groups, at most {self.max_batch_size} units",
            accounted_as="a Gaussian sum over a truncated Poisson sample (arXiv:2508.15089), once every "
            f"{self.bands} steps: the noise has {self.bands} bands, and a unit is in one of {self.bands} groups "
            "(arXiv:2306.08153)",
            options=f"--num-units {-(-(self.num_units or 0) // self.bands)} --max-batch-size {self.max_batch_size}",
        )


def _units_only(draw: Draw) -> None:
    if draw.rows_per_unit is not None:
        raise ValueError(
            'noise="banded" has no accounting where single rows are drawn (sampling="example"): omit sampling, '
            "and each user is drawn as a whole"
        )


@dataclass(frozen=True)
class CyclicPoissonSampler:
    """Splits the units into b groups, in secret, and draws from one group after another.

    Raises:
        ValueError: the groups are smaller than an expected batch.
    """

    num_units: int
    bands: int
    expected_batch_size: int
    max_batch_size: int

    def __post_init__(self) -> None:
        """Check that the groups have enough units."""
        if self.bands * self.expected_batch_size > self.num_units:
            raise ValueError(
                f"bands={self.bands} split {self.num_units} units into groups smaller than "
                f"expected_batch_size={self.expected_batch_size}. Use at most "
                f"{self.num_units // self.expected_batch_size} bands"
            )

    @property
    def sampling_rate(self) -> float:
        """Q' = b B / N: the probability that a unit enters a step of its group."""
        return min(1.0, self.bands * self.expected_batch_size / self.num_units)

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in ascending order, without end.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        groups = np.array_split(rng.permutation(self.num_units), self.bands)
        while True:
            for group in groups:
                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)
                yield np.sort(rng.choice(group, size=size, replace=False, shuffle=False)).astype(np.int64)


_CHOSEN_FROM = (1, 2, 3, 4, 6, 8, 12, 16)
"""The bands that ``bands: auto`` considers. More bands have less predicted noise but gave worse models: in a
fine-tuning with N = 5000, B = 128 and T = 160, 8 to 16 bands gave the best perplexity, 11.65, and 39 bands gave
12.65."""


@dataclass(frozen=True)
class BandedNoise:
    """Noise of b bands over units that are drawn in b groups.

    A recipe names bands and strategy. `candidates` computes the strategy's numbers, which the plan stores. If only the
    bands are given, the column is that of `coefficients`.

    Attributes:
        bands: b >= 1, or "auto"; with b = 1 it is `IndependentNoise`.
        strategy: "geometric" or "free" (`dpllm.mechanism.strategies`); None: the planner's default.
        ratio: γ of the geometric strategy, above 0 and at most 1; None: not yet chosen.
        coefficients: the b entries of the free strategy's column; None: not yet chosen.

    Raises:
        ValueError: a value is out of range, or two values contradict each other.
    """

    kind: ClassVar[str] = "banded"
    wants_total: ClassVar[bool] = False
    is_sampled: ClassVar[bool] = True
    only_discrete: ClassVar[bool] = False
    max_entries: ClassVar[int | None] = None
    bands: int | Literal["auto"] = "auto"
    strategy: Literal["geometric", "free"] | None = None
    ratio: float | None = None
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check the numbers, above all the column's norm, on which the guarantee depends."""
        bands = self.bands
        if bands != "auto" and (isinstance(bands, bool) or not isinstance(bands, int) or not 1 <= bands <= 1000):
            raise ValueError(f"bands must be a whole number between 1 and 1000, or auto, got {bands!r}")
        if self.strategy not in (None, "geometric", "free"):
            raise ValueError(f"noise.strategy must be geometric or free, got {self.strategy!r}")
        if bands == 1 and (self.ratio is not None or self.coefficients is not None):
            raise ValueError("noise with bands=1 is independent and has no ratio or coefficients: omit them")
        for name, strategy in (("ratio", "geometric"), ("coefficients", "free")):
            if getattr(self, name) is not None and (self.strategy != strategy or bands == "auto"):
                raise ValueError(f"noise.{name} needs strategy: {strategy} and a number of bands: add both")
        if self.ratio is not None:
            if isinstance(self.ratio, bool) or not isinstance(self.ratio, (int, float)) or not 0 < self.ratio <= 1:
                raise ValueError(f"noise.ratio must be above 0 and at most 1, got {self.ratio!r}")
            require_norm(geometric_column(self._number, self.ratio))
        if self.coefficients is not None:
            if not isinstance(self.coefficients, (tuple, list)) or len(self.coefficients) != bands:
                raise ValueError(f"noise.coefficients must be a list of bands={bands} numbers")
            object.__setattr__(self, "coefficients", tuple(self.coefficients))
            require_norm(self.coefficients)  # before the next function's cache, which takes numbers only
            require_column(self.coefficients)

    @property
    def _number(self) -> int:
        if self.bands == "auto":
            raise ValueError("noise.bands=auto has no number yet: create the plan with make_plan, which chooses it")
        return self.bands

    @property
    def _open(self) -> bool:
        """Whether the strategy is named but its numbers are not chosen."""
        return self.bands != 1 and self.strategy is not None and self.ratio is None and self.coefficients is None

    def candidates(self, draw: Draw, workload: Workload) -> list[BandedNoise]:
        """Return the noises, with all numbers, from which the planner chooses, starting with the fewest bands.

        Raises:
            ValueError: single rows are drawn.
        """
        if self.ratio is not None or self.coefficients is not None:
            return [self]
        if self.bands != "auto":
            self.sampler(draw)
        _units_only(draw)
        most = min(draw.num_units // draw.expected_batch_size, workload.num_steps)
        numbers = [b for b in _CHOSEN_FROM if b <= most] if self.bands == "auto" else [self.bands]
        strategy = self.strategy or ("free" if workload.over_time else "geometric")
        return [self._made(number, strategy, workload) for number in numbers]

    @staticmethod
    def _made(bands: int, strategy: Literal["geometric", "free"], workload: Workload) -> BandedNoise:
        if bands == 1:
            return BandedNoise(1)
        if strategy == "geometric":
            return BandedNoise(bands, strategy, ratio=best_ratio(bands, workload))
        return BandedNoise(bands, strategy, coefficients=rounded(free_column(bands, workload)))

    def column(self, num_steps: int) -> tuple[float, ...]:
        """Return c, the first column of M.

        Raises:
            ValueError: its numbers are not chosen.
        """
        if self._open:
            raise ValueError(
                f"noise has strategy={self.strategy} but no numbers yet: create the plan with make_plan, which "
                "computes them"
            )
        if self.coefficients is not None:
            return self.coefficients
        if self.ratio is not None:
            return geometric_column(self._number, self.ratio)
        return coefficients(self._number, num_steps)

    def separation(self, draw: Draw) -> int:
        """Return b: columns that far apart have no row in common."""
        return self._number

    def error(self, workload: Workload) -> float:
        """Return the standard deviation of the noise in the released weights, over σC and the learning rate."""
        return workload.error(self.column(workload.num_steps))

    @property
    def tensors_kept(self) -> int:
        """The number of gradient-sized tensors that all processes together keep between steps ("auto": at most)."""
        if self.bands == "auto":
            return max(_CHOSEN_FROM)
        return self._number if self._by_recursion else self._number - 1

    @property
    def unit_groups(self) -> int | None:
        """b; None for "auto"."""
        return None if self.bands == "auto" else self.bands

    def max_batch_size(self, draw: Draw) -> int | None:
        """Return None: the smallest that costs no ε."""
        return None

    @property
    def _by_recursion(self) -> bool:
        """Whether the geometric recursion takes fewer passes over the noise than the general one."""
        return self.ratio is not None and self._number > 2

    def sampler(self, draw: Draw) -> CyclicPoissonSampler:
        """Return the cyclic sampler.

        Raises:
            ValueError: single rows are drawn, or the groups are smaller than an expected batch.
        """
        _units_only(draw)
        return CyclicPoissonSampler(draw.num_units, self._number, draw.expected_batch_size, draw.max_batch_size)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step of one cycle.

        Raises:
            ValueError: as for `sampler`, or the strategy's numbers are not chosen.
        """
        if self._open:
            self.column(1)
        return BandedStep(
            num_units=draw.num_units,
            sampling_rate=self.sampler(draw).sampling_rate,
            max_batch_size=draw.max_batch_size,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            bands=self._number,
        )

    def variance(self, step: int, num_steps: int) -> float:
        """Return the square of the norm of row t of M⁻¹."""
        return float(np.square(inverse(self.column(num_steps), num_steps)[: step + 1]).sum())

    def stream(self, generator: Normals, num_steps: int) -> NoiseStream:
        """Return the noise of a run."""
        if self.bands == 1:
            return IndependentNoise().stream(generator, num_steps)
        if self._by_recursion and self.ratio is not None:
            return GeometricStream(generator, self._number, self.ratio)
        return BandedStream(generator, self.column(num_steps))

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report."""
        if self.bands == 1:
            return IndependentNoise().drawing(draw, drawn)
        return (
            f"the {draw.num_units} {drawn}s are split once, in secret, into {self.bands} groups, and the steps cycle "
            f"through the groups; in each step every {drawn} of the group is drawn independently with probability q' = "
            f"{self.sampler(draw).sampling_rate:.6g}, and if more than {draw.max_batch_size} are drawn, "
            f"{draw.max_batch_size} of them are kept, chosen uniformly (cyclic truncated Poisson sampling)"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        if self.bands == 1:
            return IndependentNoise().words()
        return (
            f"Gaussian noise, correlated with that of the previous {self._before} (banded factorisation{self._named}) "
            "and made from independent noise"
        )

    @property
    def _before(self) -> str:
        return "step" if self.bands == 2 else f"{self._number - 1} steps"

    @property
    def _named(self) -> str:
        if self.ratio is not None:
            return f", geometric with ratio {self.ratio:g}"
        return "" if self.coefficients is None else ", with free coefficients"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions, and how the run ensures each of them."""
        if self.bands == 1:
            return IndependentNoise().ensured(draw, drawn, noise_stddev)
        return [
            (
                "Units are drawn by cyclic Poisson sampling and truncated to the maximal batch (not shuffled)",
                f"the sampler is built from the plan: {self.bands} groups of about {draw.num_units / self._number:.0f} "
                f"units each ({draw.num_units} in all), split by secret entropy at each start and resume, "
                f"q' = {self.sampler(draw).sampling_rate:.6g}, at most {draw.max_batch_size} in a step; each "
                "step in the ledger carries these numbers",
            ),
            (
                f"Noise is that of a strategy with {self.bands} bands{self._named} whose columns have norm at most 1",
                f"independent noise of standard deviation {noise_stddev:.6g} is drawn once per step for every entry "
                "of the complete sum, by exactly one process. The strategy subtracts a part of the noise of the "
                f"previous {self._before} and scales up the difference. The noise is kept only in memory, and redrawn "
                "after a resume",
            ),
        ]


class BandedStream(CorrelatedStream):
    """The noise of a run, (M⁻¹z)_t, step by step: x_t = (z_t - Σ_k c_k x_{t-k}) / c_0.

    Keeps the last b - 1 values of x, the newest first.

    Args:
        generator: draws z.
        strategy: c, the first column of M.
    """

    def __init__(self, generator: Normals, strategy: tuple[float, ...]) -> None:
        """Begin without earlier noise."""
        super().__init__(generator)
        self._strategy = strategy

    def _begun(self, share: Tensor) -> deque[Tensor]:
        return deque(maxlen=max(1, len(self._strategy) - 1))

    def _next(self, kept: deque[Tensor], like: Tensor) -> Sequence[Tensor]:
        noise = self._generator.normal_like(like)
        for coefficient, before in zip(self._strategy[1:], kept, strict=False):
            noise.sub_(before, alpha=coefficient)
        kept.appendleft(noise.div_(self._strategy[0]))
        return kept

    def _add_(self, share: Tensor, drawn: Sequence[Tensor], stddev: float) -> None:
        share.add_(drawn[0], alpha=stddev)


class GeometricStream(BandedStream):
    """The same noise for c_j = c_0 γ^j, j < b, in four passes over the noise instead of about 3 b.

    M is c_0 (1 - γ^b S^b) / (1 - γ S) with the shift S by one step, so that y_t = γ^b y_{t-b} + (z_t - γ z_{t-1}) /
    c_0. With u_t = z_t + γ^b u_{t-b} this is y_t = (u_t - γ u_{t-1}) / c_0. The last b values of u are kept, one tensor
    more than in the general recursion, but a step allocates none, since u_t replaces u_{t-b}.

    Args:
        generator: draws z.
        bands: b.
        ratio: γ.
    """

    def __init__(self, generator: Normals, bands: int, ratio: float) -> None:
        """Begin without earlier noise."""
        super().__init__(generator, geometric_column(bands, ratio))
        self._bands, self._ratio = bands, ratio

    def _begun(self, share: Tensor) -> deque[Tensor]:
        return deque()

    def _next(self, kept: deque[Tensor], like: Tensor) -> Sequence[Tensor]:
        oldest = kept.pop() if len(kept) == self._bands else None
        kept.appendleft(self._following(oldest, like, self._generator))
        return kept

    def _following(self, before: Tensor | None, like: Tensor, numbers: Normals) -> Tensor:
        """Return u of a step from that of b steps earlier, in place; None: there is none."""
        if before is None:
            return numbers.normal_like(like)
        before.mul_(self._ratio**self._bands)
        numbers.add_(before, 1.0)
        return before

    def add_once_(self, step: int, total: Tensor, stddev: float, numbers: SkippingGenerator) -> None:
        """Add the noise of one step, in place, from two of every b draws.

        The noise of step t needs u_t and u_{t-1}, and u_t only the draws of steps t, t - b, t - 2b, …
        """
        share, drawn = total.view(-1), 0
        latest: dict[int, Tensor] = {}  # 0: of step t and those b, 2b, … before; 1: of step t - 1 and those before
        for earlier in range(step + 1):
            which = (step - earlier) % self._bands
            if which < 2:
                numbers.skip(earlier - drawn)
                drawn = earlier + 1
                latest[which] = self._following(latest.get(which), share, numbers)
        self._add_(share, [latest[which] for which in sorted(latest)], stddev)

    def _add_(self, share: Tensor, drawn: Sequence[Tensor], stddev: float) -> None:
        scale = stddev / self._strategy[0]
        share.add_(drawn[0], alpha=scale)
        if len(drawn) > 1:
            share.add_(drawn[1], alpha=-scale * self._ratio)

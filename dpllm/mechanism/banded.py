"""Noise that is correlated over steps: banded matrix factorisation under cyclic Poisson sampling.

Over many steps the optimizer adds up gradients and their noise. The total noise is smaller if later draws cancel a part
of the earlier ones. The release of step t is g_t + σC (M⁻¹z)_t with independent z and a lower triangular Toeplitz
matrix M (the *strategy*) that has b bands and columns of norm at most 1 (Choquette-Choo et al. 2023, arXiv:2306.08153).

The privacy cost equals that of few independent rounds. The units are split once, in secret, into b groups, and step t
draws from group t mod b. Two steps that one unit can enter are therefore at least b apart, and their columns of M have
no row in common. So the unit's contributions are released as if each had separate Gaussian noise of deviation at least
σC. This holds for gradients that depend on all earlier releases, since M is lower triangular (Denisov et al. 2022,
arXiv:2202.08312). A unit takes part in ⌈T/b⌉ rounds, each over a Poisson sample of its group, with probability
q' = b B / N.

The noise of a run is kept in memory, in total b - 1 tensors of the size of the gradient, and never on a disk: it would
allow a reader to subtract the noise from the last updates. A resumed run begins with fresh noise and a fresh split.
This costs one more round if it continues in the middle of a cycle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.events import Event, EventWords, Numbers, Round, Step
from dpllm.mechanism.noise import IndependentNoise, slice_of
from dpllm.mechanism.parts import Draw, NormalGenerator

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=64)
def coefficients(bands: int, num_steps: int) -> tuple[float, ...]:
    """Return the first column of the strategy M, of norm 1, with the least mean square of the noise's prefix sums.

    With w = M⁻¹ 1 (prefix sums), the mean square over T steps is ‖c‖² Σ_j (1 - j/T) w_j². It does not depend on the
    scale of c, so c_0 = 1 is fixed and the others are optimised, starting from the coefficients of (1 - x)^(-1/2), the
    best ones without a bound on the bands (Fichtenberger et al. 2022, arXiv:2202.11205).

    Args:
        bands: b.
        num_steps: T.

    >>> [round(value, 4) for value in coefficients(2, 410)]
    [0.7643, 0.6449]
    """
    if bands > num_steps:
        return (*coefficients(num_steps, num_steps), *[0.0] * (bands - num_steps))
    from scipy import optimize, signal  # takes as long to load as all of the command line's help

    share = 1 - np.arange(num_steps) / num_steps

    def loss(rest: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        c = np.concatenate(([1.0], rest))
        w = signal.lfilter([1.0], c, np.ones(num_steps))
        mean_square, square = float(share @ w**2), float(c @ c)
        adjoint = signal.lfilter([1.0], c, (2 * share * w)[::-1])[::-1]
        slope = np.array([-float(adjoint[k:] @ w[: num_steps - k]) for k in range(1, bands)])
        return square * mean_square, 2 * rest * mean_square + square * slope

    start = np.cumprod([(2 * k - 1) / (2 * k) for k in range(1, bands)])
    if bands == 1:
        return (1.0,)
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "gtol": 1e-12})
    c = np.concatenate(([1.0], found.x))
    return tuple(float(value) for value in c / np.linalg.norm(c))


def prefix_error(bands: int, num_steps: int) -> float:
    """Return the root mean square of the prefix sums of the noise, divided by σC.

    >>> round(prefix_error(1, 410), 3), round(prefix_error(8, 410), 3)
    (14.335, 5.573)
    """
    w = np.cumsum(_inverse(bands, num_steps))
    return math.sqrt(float((1 - np.arange(num_steps) / num_steps) @ w**2))


@lru_cache(maxsize=64)
def _inverse(bands: int, num_steps: int) -> NDArray[np.float64]:
    """Return the first column of M⁻¹."""
    from scipy import signal

    return np.asarray(signal.lfilter([1.0], coefficients(bands, num_steps), np.eye(1, num_steps)[0]))


@dataclass(frozen=True, kw_only=True)
class BandedStep(Numbers):
    """A step whose noise is correlated with that of the b - 1 steps before, over a Poisson sample of one of b groups.

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
        """Return the most rounds of a unit: one in each cycle of b steps, including the last, partial one."""
        return self._round.rounds(-(-num_steps // self.bands))

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        if self.bands == 1:
            return self._round.words()
        return EventWords(
            sampling=f"cyclic Poisson over {self.bands} groups, at most {self.max_batch_size} units",
            accounted_as="a Gaussian sum over a truncated Poisson sample (arXiv:2508.15089), once for every "
            f"{self.bands} steps: the noise has {self.bands} bands, and a unit is in one of {self.bands} groups "
            "(arXiv:2306.08153)",
            options=f"--num-units {-(-(self.num_units or 0) // self.bands)} --max-batch-size {self.max_batch_size}",
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
        """Check that a group has enough units."""
        if self.bands * self.expected_batch_size > self.num_units:
            raise ValueError(
                f"bands={self.bands} split {self.num_units} units into groups smaller than expected_batch_size="
                f"{self.expected_batch_size}: take at most {self.num_units // self.expected_batch_size} bands"
            )

    @property
    def sampling_rate(self) -> float:
        """Q' = b B / N: the probability that a unit enters a step of its group."""
        return min(1.0, self.bands * self.expected_batch_size / self.num_units)

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in rising order, without end.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        groups = np.array_split(rng.permutation(self.num_units), self.bands)
        while True:
            for group in groups:
                size = min(int(rng.binomial(len(group), self.sampling_rate)), self.max_batch_size)
                yield np.sort(rng.choice(group, size=size, replace=False, shuffle=False)).astype(np.int64)


@dataclass(frozen=True)
class BandedNoise:
    """Noise of b bands over units that are drawn in b groups.

    Attributes:
        bands: b >= 1; with 1 it is `IndependentNoise`.
    """

    kind: ClassVar[str] = "banded"
    bands: int

    def __post_init__(self) -> None:
        """Check the number."""
        if not isinstance(self.bands, int) or isinstance(self.bands, bool) or not 1 <= self.bands <= 1000:
            raise ValueError(f"bands must be a whole number between 1 and 1000, got {self.bands!r}")

    def sampler(self, draw: Draw) -> CyclicPoissonSampler:
        """Return the cyclic sampler.

        Raises:
            ValueError: rows are drawn, or the groups are smaller than an expected batch.
        """
        if draw.rows_per_unit is not None:
            raise ValueError(
                'noise="banded" has no accounting where rows are drawn singly (sampling="example"): leave sampling '
                "out, and each user is drawn as a whole"
            )
        return CyclicPoissonSampler(draw.num_units, self.bands, draw.expected_batch_size, draw.max_batch_size)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step of one cycle."""
        return BandedStep(
            num_units=draw.num_units,
            sampling_rate=self.sampler(draw).sampling_rate,
            max_batch_size=draw.max_batch_size,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            bands=self.bands,
        )

    def variance(self, step: int, num_steps: int) -> float:
        """Return the square of the norm of row t of M⁻¹."""
        return float(np.square(_inverse(self.bands, num_steps)[: step + 1]).sum())

    def stream(self, generator: NormalGenerator, num_steps: int) -> BandedStream:
        """Return the noise of a run."""
        return BandedStream(generator, coefficients(self.bands, num_steps))

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report."""
        if self.bands == 1:
            return IndependentNoise().drawing(draw, drawn)
        return (
            f"the {draw.num_units} {drawn}s are split once, in secret, into {self.bands} groups, which the steps take "
            f"in turn; in each step every {drawn} of the group is drawn independently with probability "
            f"q' = {self.sampler(draw).sampling_rate:.6g}, and of more than {draw.max_batch_size} drawn a uniform "
            f"{draw.max_batch_size} stay (cyclic truncated Poisson sampling)"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        if self.bands == 1:
            return IndependentNoise().words()
        return (
            f"Gaussian noise, correlated with that of the {self._before} before (banded factorisation) and made from "
            "independent noise"
        )

    @property
    def _before(self) -> str:
        return "step" if self.bands == 2 else f"{self.bands - 1} steps"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the assumptions of the accounting, and how the run ensures each."""
        if self.bands == 1:
            return IndependentNoise().ensured(draw, drawn, noise_stddev)
        return [
            (
                "Units are drawn by cyclic Poisson sampling and cut to the maximal batch (not shuffled)",
                f"the sampler is made from the plan: {self.bands} groups of about {draw.num_units / self.bands:.0f} "
                f"units each ({draw.num_units} in all), split by secret entropy at each start and resume, "
                f"q' = {self.sampler(draw).sampling_rate:.6g}, at most {draw.max_batch_size} in a step; each "
                "step in the ledger carries these numbers",
            ),
            (
                f"Noise is that of a strategy with {self.bands} bands whose columns have norm 1",
                f"independent noise of standard deviation {noise_stddev:.6g} is drawn once per step for every entry of "
                f"the complete sum, by exactly one process. A part of the noise of the {self._before} before is "
                "subtracted, and the difference is scaled up, as the strategy says. The noise is kept in memory only, "
                "and drawn again after a resume",
            ),
        ]


class BandedStream:
    """The noise of a run, (M⁻¹z)_t, step by step: x_t = (z_t - Σ_k c_k x_{t-k}) / c_0.

    Each process keeps the last b - 1 of its own slice of each parameter, in float32.

    Args:
        generator: of z.
        strategy: c, the first column of M.
    """

    def __init__(self, generator: NormalGenerator, strategy: tuple[float, ...]) -> None:
        """Begin without earlier noise."""
        self._generator, self._strategy = generator, strategy
        self._past: dict[str, deque[Tensor]] = {}
        self._added: set[str] = set()
        self._step = -1

    def begin(self, step: int) -> None:
        """Begin a step. Skipped steps still draw their noise, since the groups advance with every draw.

        Raises:
            ValueError: the step is not after the last one, or a parameter had no noise in the step before.
        """
        if step <= self._step:
            raise ValueError(
                f"the noise of step {step} was already drawn; the last step is {self._step}: take steps in order"
            )
        if missing := sorted(set(self._past) - self._added):
            raise ValueError(f"{missing[0]} had no noise in step {self._step}: every parameter needs it in every step")
        for _ in range(self._step + 1, step):
            for past in self._past.values():
                self._next(past, past[0])
        self._step, self._added = step, set()

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add the noise of this step to one process's slice of the entries, in place.

        Raises:
            ValueError: the parameter already had its noise of this step, or changed its shape, or the dtype is neither
                float32 nor float64.
        """
        if name in self._added:
            raise ValueError(f"{name} already had its noise of step {self._step}: add it once per step")
        share = slice_of(total, rank, size)
        past = self._past.setdefault(name, deque(maxlen=max(1, len(self._strategy) - 1)))
        if past and past[0].shape != share.shape:
            raise ValueError(
                f"{name} has {share.numel()} entries for this process and had {past[0].numel()} in the steps before, "
                "with whose noise it is correlated: keep the model's shapes, or start a new run"
            )
        self._added.add(name)
        share.add_(self._next(past, share), alpha=stddev)

    def _next(self, past: deque[Tensor], like: Tensor) -> Tensor:
        noise = self._generator.normal_like(like)
        for coefficient, before in zip(self._strategy[1:], past, strict=False):
            noise.sub_(before, alpha=coefficient)
        noise.div_(self._strategy[0])
        past.appendleft(noise)
        return noise

"""Independent noise, and the common part of all noise streams whose steps are correlated.

With independent noise (DP-SGD) every step is a separate mechanism. A stream of correlated noise keeps tensors of
earlier noise for each parameter. The step's noise is made from fresh independent numbers and these tensors. Each
parameter must receive the noise of each step exactly once and in order, even for a draw whose step was not taken;
otherwise later noise would belong to a different matrix than the accounting assumes.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.events import Event, dp_sgd
from dpllm.mechanism.parts import Draw, NoiseStream, Normals, Written
from dpllm.mechanism.sampling import TruncatedPoissonSampler
from dpllm.mechanism.strategies import Workload

if TYPE_CHECKING:
    from torch import Tensor


def slice_of(total: Tensor, rank: int, size: int) -> Tensor:
    """Return the slice of a tensor's entries for which one process draws the noise.

    The slices of all ranks cover each entry once. When the processes' tensors are summed afterwards, every entry of the
    sum has the noise of exactly one process, so all processes that receive the sum have equal replicas.

    Args:
        total: contiguous.
        rank: this process, 0 <= rank < size.
        size: the number of processes whose tensors will be summed.

    Raises:
        ValueError: the rank is out of range, or the tensor's precision is lower than float32.

    >>> import torch
    >>> [slice_of(torch.arange(5.0), rank, 2).tolist() for rank in (0, 1)]
    [[0.0, 1.0], [2.0, 3.0, 4.0]]
    """
    if not (total.dtype.is_floating_point and total.dtype.itemsize >= 4):
        raise ValueError(
            f"Noise is added in float32 or float64, but the gradient is {total.dtype}. Keep the clipped sum in float32 "
            "until the noise is added, also when no unit was drawn."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size} processes, but 0 <= rank < size is needed.")
    entries = total.numel()
    return total.view(-1)[rank * entries // size : (rank + 1) * entries // size]


@dataclass(frozen=True)
class IndependentNoise:
    """Noise drawn independently in every step, over a truncated Poisson sample of units or a Poisson sample of rows."""

    kind: ClassVar[str] = "independent"
    wants_total: ClassVar[bool] = False
    is_sampled: ClassVar[bool] = True
    only_discrete: ClassVar[bool] = False
    max_entries: ClassVar[int | None] = None

    @property
    def tensors_kept(self) -> int:
        """None: the steps do not depend on each other."""
        return 0

    @property
    def unit_groups(self) -> int:
        """One: every step draws from all units."""
        return 1

    def max_batch_size(self, draw: Draw) -> int | None:
        """Return None: the smallest that costs no ε."""
        return None

    def candidates(self, draw: Draw, workload: Workload) -> list[IndependentNoise]:
        """Return itself, since it has no open numbers."""
        return [self]

    def error(self, workload: Workload) -> float:
        """Return the norm of the workload's response."""
        return workload.error([1.0])

    def sampler(self, draw: Draw) -> TruncatedPoissonSampler:
        """Return the Poisson sampler."""
        return TruncatedPoissonSampler(draw.population, draw.sampling_rate, draw.max_batch_size)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step of DP-SGD."""
        by_row = draw.rows_per_unit is not None
        return dp_sgd(
            num_units=draw.num_units,
            sampling_rate=draw.sampling_rate,
            max_batch_size=None if by_row else draw.max_batch_size,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            rows_per_unit=draw.rows_per_unit or 1,
        )

    def column(self, num_steps: int) -> tuple[float, ...]:
        """Return one entry, since a step's noise enters only this step."""
        return (1.0,)

    def separation(self, draw: Draw) -> int:
        """Return 1: a unit may be in any step."""
        return 1

    def variance(self, step: int, num_steps: int) -> float:
        """Return 1, since σC is the standard deviation of the noise itself."""
        return 1.0

    def stream(self, generator: Normals, num_steps: int) -> NoiseStream:
        """Return the noise of a run.

        Raises:
            ValueError: the generator's noise is discrete.
        """
        if getattr(generator, "randomness", None) == "discrete":
            raise ValueError(
                "the generator draws discrete noise, but the plan accounts for Gaussian noise, so its ε would not "
                "hold. Create the plan with randomness='discrete', or pass dpllm.NoiseSource()"
            )
        return IndependentStream(generator)

    def drawing(self, draw: Draw, drawn: str) -> str:
        """Return how a step is drawn, for the report."""
        each = (
            f"in each step every one of {draw.population} {drawn}s is drawn independently with probability "
            f"q = {draw.sampling_rate:.6g}"
        )
        if draw.rows_per_unit is not None:
            return each + ", regardless of who wrote it"
        return (
            f"{each}, and if more than {draw.max_batch_size} are drawn, {draw.max_batch_size} of them are kept, chosen "
            "uniformly (truncated Poisson sampling)"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        return "Gaussian noise"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions, and how the run ensures each of them."""
        numbers = f"the sampler is built from the plan: q = {draw.sampling_rate:.6g}"
        carried = "each step in the ledger carries these numbers"
        sampling = (
            "Units are drawn by Poisson sampling and truncated to the maximal batch (not shuffled)",
            f"{numbers}, at most {draw.max_batch_size} of {draw.num_units} units; {carried}",
        )
        if draw.rows_per_unit is not None:
            sampling = (
                "Rows are drawn by Poisson sampling, independently of each other (not shuffled)",
                f"{numbers} of {draw.population} rows; the batch is not truncated; {carried}",
            )
        noise = (
            "Noise is independent in every step and parameter entry",
            f"Gaussian noise of standard deviation {noise_stddev:.6g} is drawn once per step, on the complete sum; if "
            "the model is sharded, exactly one process draws each entry's noise",
        )
        return [sampling, noise]


class IndependentStream:
    """The noise of a run; it is not stored."""

    def __init__(self, generator: Normals) -> None:
        """Store the generator."""
        self._generator = generator

    def begin(self, step: int) -> None:
        """Do nothing, since steps do not depend on each other."""

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add independent noise to one process's slice of the entries, in place (`slice_of`)."""
        self._generator.add_(slice_of(total, rank, size), stddev)

    def write_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Write the noise that `add_share_` would add to zeros: one memory pass less for a tensor without a sum."""
        share = slice_of(total, rank, size)
        if size > 1:
            total.zero_()
        if isinstance(self._generator, Written):
            self._generator.write_(share, stddev)
        else:
            self._generator.add_(share.zero_(), stddev)


_FRESH = "Resume the run from a checkpoint, or start it again: both begin with fresh noise"


class StepOrder:
    """Refuses noise that is drawn twice, too late, partly, or not at all.

    The noise of a step is correlated with that of previous steps. A stream counts its steps here, so that each
    parameter receives the noise of each step exactly once.

    Attributes:
        step: the last step that began; -1 before the first.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self.step = -1
        self._known: set[str] = set()
        self._added: set[str] = set()
        self._changing: str | None = None  # the parameter whose noise is being made; still set after an error

    def begin(self, step: int) -> None:
        """Begin a step; steps may be skipped.

        Raises:
            ValueError: the step does not follow the last one, or a parameter received no noise, or only part of it, in
                the previous step.
        """
        self._require_whole()
        if step <= self.step:
            raise ValueError(
                f"the noise of step {step} was already drawn, and the last step is {self.step}: take the steps in order"
            )
        if missing := sorted(self._known - self._added):
            raise ValueError(
                f"{missing[0]} received no noise in step {self.step}, but every parameter needs it in every step. If "
                f"that step failed: {_FRESH}"
            )
        self.step, self._added = step, set()

    def _require_whole(self) -> None:
        if self._changing is not None:
            raise ValueError(
                f"An error interrupted the noise of {self._changing} in step {self.step}, and the noise of later steps "
                f"is made from it. {_FRESH}"
            )

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Enter the section in which a parameter's kept tensors change; after an error there, no noise is made.

        Raises:
            ValueError: an error occurred in such a section before.
        """
        self._require_whole()
        self._changing = name
        yield
        self._changing = None

    def require_first(self, name: str) -> None:
        """Check that a parameter has not received its noise of this step.

        Raises:
            ValueError: it has.
        """
        if name in self._added:
            raise ValueError(f"{name} already received its noise of step {self.step}: add it once per step")

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """Enter the section in which a parameter receives its noise of this step; recorded if no error occurs."""
        self.require_first(name)
        with self.changing(name):
            yield
        self._known.add(name)
        self._added.add(name)


class UnitsApart:
    """Refuses draws in which a unit recurs earlier than the noise's accounting assumes.

    Correlated noise costs what its event states only if two steps of one unit are far enough apart: for b bands at
    least b steps, so that the strategy's columns for these steps are orthogonal. The sampler ensures this. This class
    checks it with the separation of the noise itself, so that a sampler with different groups, or with a unit in two of
    them, is refused.

    Args:
        separation: the minimal number of steps between two steps of one unit (`Noise.separation`); 1: any.
    """

    def __init__(self, separation: int) -> None:
        """Begin without a draw."""
        self._separation, self._draws = separation, 0
        self._last_N = np.empty(0, dtype=np.int64)  # the index of each unit's last draw; grows with the units seen

    def check(self, unit_ids: NDArray[np.int64]) -> None:
        """Check the next draw.

        Args:
            unit_ids: (U,) its units, each once.

        Raises:
            ValueError: a unit occurs twice, has a negative index, or was in a previous draw that is too recent.
        """
        if not len(unit_ids):
            return
        if len(np.unique(unit_ids)) < len(unit_ids):
            raise ValueError("A draw contains a unit twice, so the sampler is not the one that the accounting assumes")
        if unit_ids.min() < 0:
            raise ValueError(f"A draw has the unit {unit_ids.min()}, but units are numbered from 0. Fix the sampler")
        if self._separation == 1:
            return
        seen = unit_ids[unit_ids < len(self._last_N)]
        steps = self._draws - self._last_N[seen]
        if len(seen) and steps.min() < self._separation:
            unit, near = seen[steps.argmin()], int(steps.min())
            raise ValueError(
                f"Unit {unit} was drawn again after {near} step{'s' * (near > 1)}, but the plan's noise needs at least "
                f"{self._separation} steps between two draws of a unit: ε would be larger than stated. Draw with the "
                "sampler of the plan's mechanism, and report this error if you did"
            )

    def take(self, unit_ids: NDArray[np.int64]) -> None:
        """Record a draw that is returned to the caller."""
        if self._separation == 1:
            return
        if len(unit_ids) and (most := int(unit_ids.max())) >= len(self._last_N):
            never = np.full(max(most + 1, 2 * len(self._last_N)) - len(self._last_N), -self._separation)
            self._last_N = np.concatenate((self._last_N, never))
        self._last_N[unit_ids] = self._draws
        self._draws += 1


class CorrelatedStream(ABC):
    """The noise of a run, (M⁻¹z)_t, step by step (`NoiseStream`).

    Each process keeps the tensors of its own slice of each parameter, in memory only.

    Args:
        generator: draws z.
    """

    def __init__(self, generator: Normals) -> None:
        """Begin without earlier noise."""
        self._generator = generator
        self._kept: dict[str, deque[Tensor]] = {}
        self._order = StepOrder()

    @abstractmethod
    def _begun(self, share: Tensor) -> deque[Tensor]:
        """Return the tensors that are kept for a parameter before its first noise."""

    @abstractmethod
    def _next(self, kept: deque[Tensor], like: Tensor) -> Sequence[Tensor]:
        """Draw the numbers of the next step and advance the kept tensors, in place.

        Args:
            kept: the kept tensors of one parameter.
            like: a tensor of the slice's shape and dtype.

        Returns:
            The tensors from which `_add_` makes the noise of the step.
        """

    @abstractmethod
    def _add_(self, share: Tensor, drawn: Sequence[Tensor], stddev: float) -> None:
        """Add the noise of the step that `_next` drew, in place."""

    def begin(self, step: int) -> None:
        """Begin a step. Skipped steps still draw their noise, since the order of units advances with every draw.

        Raises:
            ValueError: the step does not follow the last one, or a parameter received no noise in the previous step, or
                only part of it because of an error.
        """
        skipped = step - self._order.step - 1
        self._order.begin(step)
        for _ in range(skipped):
            for name, kept in self._kept.items():
                with self._order.changing(name):
                    self._next(kept, kept[0])

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Add the noise of this step to one process's slice of the entries, in place.

        Raises:
            ValueError: the parameter already received its noise of this step, or changed its shape or dtype, or the
                dtype is neither float32 nor float64.
        """
        self._order.require_first(name)
        share = slice_of(total, rank, size)
        if name not in self._kept:
            self._kept[name] = self._begun(share)
        kept = self._kept[name]
        if kept and (kept[0].shape != share.shape or kept[0].dtype != share.dtype):
            raise ValueError(
                f"{name} has {share.numel()} entries ({share.dtype}) on this process, but had {kept[0].numel()} "
                f"({kept[0].dtype}) in the previous steps, with whose noise it is correlated. Keep the model's shapes, "
                "or start a new run"
            )
        with self._order.adding(name):
            self._add_(share, self._next(kept, share), stddev)

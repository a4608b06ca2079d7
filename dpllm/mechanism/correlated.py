"""The common part of all noise streams whose steps are correlated, and the order of their steps and units.

A stream keeps tensors of earlier noise for each parameter. The step's noise is made from fresh independent numbers and
these tensors. Each parameter must receive the noise of each step exactly once and in order, even for a draw whose step
was not taken; otherwise later noise would belong to a different matrix than the accounting assumes.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.noise import slice_of
from dpllm.mechanism.parts import Normals

if TYPE_CHECKING:
    from torch import Tensor


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

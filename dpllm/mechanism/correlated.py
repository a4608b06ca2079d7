"""The common part of all noise streams whose steps are correlated.

A stream keeps tensors of earlier noise for each parameter. The step's noise is made from fresh independent numbers and
these tensors. Each parameter must receive the noise of each step exactly once and in order, even for a draw whose step
was not taken; otherwise later noise would belong to a different matrix than the accounting assumes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpllm.mechanism.noise import slice_of
from dpllm.mechanism.order import StepOrder
from dpllm.mechanism.parts import Normals

if TYPE_CHECKING:
    from torch import Tensor


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

"""Automatic clipping: every gradient is scaled to nearly the same norm, so C needs no tuning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpllm.mechanism.clipping import check_clip_norm, sensitivity_of
from dpllm.mechanism.parts import OneGroup

if TYPE_CHECKING:
    from torch import Tensor

_MIN_STABILITY = 1e-9  # the norm of a gradient that means anything is far longer
_MAX_FACTOR = 1e30  # far within float32


@dataclass(frozen=True)
class AutomaticClipping(OneGroup):
    """Scale each unit's gradient by C / (norm + stability), AUTO-S (Bu et al. 2022, arXiv:2206.07136).

    A contribution is always shorter than C, so the privacy event is that of `FlatClipping`. C only scales the learning
    rate; with an optimizer that normalises, such as Adam, it has no effect.

    Attributes:
        clip_norm: C > 0.
        stability: γ, at least 1e-9 and at least C / 1e30, so that every factor is finite. It keeps short gradients
            short: with γ = 0 a nearly flat loss would count as much as a steep one.
    """

    kind: ClassVar[str] = "automatic"
    clip_norm: float
    stability: float = 0.01

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_clip_norm(self.clip_norm)
        known = isinstance(self.stability, (int, float)) and not isinstance(self.stability, bool)
        least = max(_MIN_STABILITY, self.clip_norm / _MAX_FACTOR)
        if not known or not least <= self.stability <= sys.float_info.max:
            huge = known and isinstance(self.stability, int) and self.stability > 0
            shown = "beyond every float" if huge and self.stability > sys.float_info.max else repr(self.stability)
            raise ValueError(f"stability is {shown}; a finite number of at least {least:g} is needed, usually 0.01")

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / (||g_u|| + γ).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors; above 1 where a gradient is shorter than C - γ.

        >>> import torch
        >>> AutomaticClipping(1.0).factors(torch.tensor([0.99, 0.09]))
        tensor([ 1., 10.])
        """
        return self.clip_norm / (norm_GU + self.stability)

    def sensitivity(self, adjacency: str) -> float:
        """Return the largest l2 change of the clipped sum between neighbouring data sets (`sensitivity_of`)."""
        return sensitivity_of(self.clip_norm, adjacency)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return f"is scaled by C / (its norm + {self.stability:g}), to a norm below C = {self.clip_norm:g} (AUTO-S)"

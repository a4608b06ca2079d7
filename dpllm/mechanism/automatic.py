"""Automatic clipping: most gradients are scaled to nearly the same norm, so C needs no tuning."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpllm.mechanism.clipping import NormBound
from dpllm.mechanism.parts import OneGroup

if TYPE_CHECKING:
    from torch import Tensor

_MIN_STABILITY = 1e-9  # the norm of a gradient that means anything is far longer
_MAX_FACTOR = 1e30  # far within float32


@dataclass(frozen=True)
class AutomaticClipping(NormBound, OneGroup):
    """Scale each unit's gradient by C / (norm + stability), AUTO-S (Bu et al. 2022, arXiv:2206.07136).

    A contribution is always shorter than C, so the privacy event is that of `FlatClipping`. C only scales the learning
    rate; with an optimizer that normalises, such as Adam, it has no effect.

    Attributes:
        stability: γ, at least 1e-9 and at least C / 1e30, so that every factor is finite. It keeps short gradients
            short: with γ = 0 a nearly flat loss would count as much as a steep one.
    """

    kind: ClassVar[str] = "automatic"
    stability: float = 0.01

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        known = isinstance(self.stability, (int, float)) and not isinstance(self.stability, bool)
        least = max(_MIN_STABILITY, self.clip_norm / _MAX_FACTOR)
        if not known or not least <= self.stability <= sys.float_info.max:
            huge = known and isinstance(self.stability, int) and self.stability > 0
            shown = "beyond every float" if huge and self.stability > sys.float_info.max else repr(self.stability)
            raise ValueError(f"stability is {shown}; it must be a finite number of at least {least:g}, usually 0.01")

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

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return f"is scaled by C / (its norm + {self.stability:g}), to a norm below C = {self.clip_norm:g} (AUTO-S)"


@dataclass(frozen=True)
class AdaptiveScaleClipping(AutomaticClipping):
    """Scale each unit's gradient by C / (norm + r / (norm + r)), DP-PSAC (Xia et al. 2023, arXiv:2212.00328).

    Long gradients get nearly the norm C, as in `AutomaticClipping`. A gradient shorter than about √r is not scaled up
    in the same way: its factor falls to C again, where AUTO-S gives it the largest factor of all. A contribution is
    always shorter than C, so the privacy event is that of `FlatClipping`.

    Attributes:
        stability: r, at most 1 and with the lower bounds of `AutomaticClipping`. No factor exceeds C / (2√r - r).
    """

    kind: ClassVar[str] = "psac"

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.stability > 1:
            raise ValueError(f"stability is {self.stability:g}; for psac it must be at most 1, usually 0.01")

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / (||g_u|| + r / (||g_u|| + r)).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors; largest at ||g_u|| = √r - r.

        >>> import torch
        >>> AdaptiveScaleClipping(1.0, 0.04).factors(torch.tensor([1e-9, 0.16, 4.0])).round(decimals=2)
        tensor([1.0000, 2.7800, 0.2500])
        """
        return self.clip_norm / (norm_GU + self.stability / (norm_GU + self.stability))

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        r = f"{self.stability:g}"
        return f"is scaled by C / (its norm + {r} / (its norm + {r})), to a norm below C = {self.clip_norm:g} (DP-PSAC)"

"""Clip factors computed from norms, and the sensitivity of the clipped sum."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpllm.mechanism.parts import OneGroup

if TYPE_CHECKING:
    from torch import Tensor


def sensitivity_of(clip_norm: float, adjacency: str) -> float:
    """Return the largest l2 change between neighbours of a sum of contributions of at most ``clip_norm``.

    Args:
        clip_norm: C.
        adjacency: "zero-out" (a unit's contribution is replaced by nothing) gives C; "replace-one" gives 2C.
    """
    if adjacency not in ("zero-out", "replace-one"):
        raise ValueError(f"adjacency is {adjacency!r}; choose 'zero-out' or 'replace-one'.")
    return clip_norm if adjacency == "zero-out" else 2 * clip_norm


def check_clip_norm(clip_norm: float) -> None:
    """Refuse a clip norm that is not a positive finite number.

    Raises:
        ValueError: it is not above 0, or not finite.
    """
    if not (isinstance(clip_norm, (int, float)) and math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm is {clip_norm!r}; it must be a finite number above 0, for instance 1.0.")


@dataclass(frozen=True)
class NormBound:
    """The shared part of clippings: a contribution has an l2 norm of at most C over all parameters together.

    Attributes:
        clip_norm: C > 0.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        """Check the clip norm."""
        check_clip_norm(self.clip_norm)

    def sensitivity(self, adjacency: str) -> float:
        """Return the largest l2 change of the clipped sum between neighbouring data sets (`sensitivity_of`)."""
        return sensitivity_of(self.clip_norm, adjacency)


@dataclass(frozen=True)
class FlatClipping(NormBound, OneGroup):
    """Scale each unit's whole gradient to a norm of at most C (Abadi et al. 2016, arXiv:1607.00133)."""

    kind: ClassVar[str] = "flat"

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = min(1, C / ||g_u||).

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, 1].

        >>> import torch
        >>> FlatClipping(1.0).factors(torch.tensor([2.0, 0.5]))
        tensor([0.5000, 1.0000])
        """
        return (self.clip_norm / norm_GU).clamp_max(1)

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        return f"is clipped once to norm C = {self.clip_norm:g}"


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

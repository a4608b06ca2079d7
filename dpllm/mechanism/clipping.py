"""Clip factors computed from norms, and the sensitivity of the clipped sum."""

from __future__ import annotations

import math
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

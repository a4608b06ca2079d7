"""Norms to clip factors, and the sensitivity they give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatClipping:
    """Scale each unit's whole gradient to a norm of at most ``clip_norm`` (Abadi et al. 2016, arXiv:1607.00133).

    Attributes:
        clip_norm: C > 0, one bound over all parameters together.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        """Refuse a bound that bounds nothing."""
        if not (isinstance(self.clip_norm, (int, float)) and math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise ValueError(f"clip_norm is {self.clip_norm!r}; a finite number above 0 is needed, for instance 1.0.")

    def factors(self, sq_norm_U: Tensor, slack_U: Tensor | None = None) -> Tensor:
        """c_u = min(1, C / ||g_u||), rounded down.

        Args:
            sq_norm_U: (U,) squared norms; may be non-finite.
            slack_U: (U,) what rounding may have taken from them. It is added before the root, so that the
                contribution really released, as computed in floating point, has a norm of at most C.

        Returns:
            (U,) factors in [0, 1]; exactly 0 where the norm isn't finite.

        >>> FlatClipping(1.0).factors(torch.tensor([4.0, 0.25, float("inf")]))
        tensor([0.5000, 1.0000, 0.0000])
        """
        upper_U = sq_norm_U if slack_U is None else sq_norm_U + slack_U
        finite_U = torch.isfinite(upper_U)
        norm_U = torch.where(finite_U, upper_U, 1).clamp_min(torch.finfo(upper_U.dtype).tiny).sqrt()
        margin = 1 - 8 * torch.finfo(upper_U.dtype).eps
        return torch.where(finite_U, (self.clip_norm * margin / norm_U).clamp_max(1), 0)

    def sensitivity(self, adjacency: str) -> float:
        """Largest change of the clipped sum, in l2 norm, between neighbouring data sets.

        Args:
            adjacency: "zero-out" (a unit's contribution is replaced by nothing) gives C; "replace-one" gives 2C.
        """
        if adjacency not in ("zero-out", "replace-one"):
            raise ValueError(f"adjacency is {adjacency!r}; known are 'zero-out' and 'replace-one'.")
        return self.clip_norm if adjacency == "zero-out" else 2 * self.clip_norm

"""The clipping of a clipper, held as it was when the clipper was made.

Place in the flow: `dpllm.ghost.GhostClipper` asks before each sum. C, sensitivity and groups never change. The factors
do not change either, but for the threshold of a clipping that adapts to a statistic which gets noise and is part of
each step's event (`dpllm.mechanism.parts.AdaptiveClipping`): its object of the next step takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpllm.ghost.errors import GhostError
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.parts import AdaptiveClipping, Clipping, SizedGroups

REMEDY = (
    "The noise and ε are of the first, and no ε covers a clipping that follows the data. Leave the clipping as it is "
    "during the run, and choose C without the private rows; the kind 'quantile' follows the norms by noisy counts that "
    "ε covers"
)


@dataclass(frozen=True)
class Bound:
    """C and the sensitivity of a clipping at one moment, as numbers that do not change with it."""

    clip_norm: float
    sensitivity: float

    @classmethod
    def of(cls, clipping: Clipping) -> Bound:
        """Return the present bound of a clipping."""
        return cls(float(clipping.clip_norm), float(clipping.sensitivity("zero-out")))

    def change_of(self, clipping: Clipping) -> str | None:
        """Return the error about a clipping whose bound is another one now; None if it is the same.

        >>> from dpllm.mechanism.clipping import FlatClipping
        >>> Bound.of(FlatClipping(1.0)).change_of(FlatClipping(1.0)) is None
        True
        >>> Bound.of(FlatClipping(1.0)).change_of(FlatClipping(0.5))[:62]
        "clipping 'flat' had clip_norm=1 and sensitivity 1, and now has"
        """
        now = Bound.of(clipping)
        if now == self:
            return None
        return (
            f"clipping {clipping.kind!r} had clip_norm={self.clip_norm:g} and sensitivity {self.sensitivity:g}, and "
            f"now has clip_norm={now.clip_norm:g} and sensitivity {now.sensitivity:g}. {REMEDY}"
        )


_TRIED = 17  # norms at which the factors are compared, from a millionth of C to a million times C


class HeldClipping:
    """The record of a clipping.

    Args:
        clipping: the clipping.
        shapes: name and shape of each trainable parameter.

    Raises:
        GhostError: with the sizes of the groups it has another C, sensitivity or class.
    """

    def __init__(self, clipping: Clipping, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Record the bound and the groups."""
        self._shapes = dict(shapes)
        self._clipping, self._bound, self._groups = clipping, Bound.of(clipping), self._groups_of(clipping)
        self._sizes = [sum(math.prod(self._shapes[name]) for name in group) for group in self._groups]
        self._first = self._now = _threshold_of(clipping)
        self._factors: Tensor | None = None  # at some norms and the first threshold, from the first use on
        self.for_model(clipping)

    def for_model(self, clipping: Clipping) -> Clipping:
        """Return the clipping whose factors this model gets: with the sizes of its groups, if they depend on them.

        Raises:
            GhostError: with the sizes it has another C, sensitivity or class.
        """
        if not isinstance(clipping, SizedGroups):
            return clipping
        sized = clipping.sized(self._sizes)
        if type(sized) is not type(clipping):
            raise GhostError(
                f"clipping {clipping.kind!r} with the sizes of its groups is a {type(sized).__name__}, whose bound may "
                f"be another one. Return a {type(clipping).__name__} from sized()"
            )
        if changed := self._bound.change_of(sized):
            raise GhostError(changed)
        return sized

    def require(self, clipping: Clipping, norm_GU: Tensor) -> None:
        """Refuse a clipping that differs from the recorded one.

        Args:
            clipping: the clipping of this use.
            norm_GU: (G, U) norms, for their dtype and device; the values are not used.

        Raises:
            GhostError: C, sensitivity, groups or factors have changed, or another clipping took its place.
        """
        if changed := self._bound.change_of(clipping):
            raise GhostError(changed)
        is_same = clipping is self._clipping
        if type(clipping) is not type(self._clipping):
            raise GhostError(f"clipping {self._clipping.kind!r} was replaced by {clipping.kind!r}. {REMEDY}")
        frozen = is_same and type(clipping) in CLIPPINGS.values()
        if not frozen and self._groups_of(clipping) != self._groups:
            raise GhostError(f"the groups of clipping {clipping.kind!r} have changed. {REMEDY}")
        if frozen and self._factors is not None:
            return
        now = _threshold_of(clipping)
        at_first = clipping.at(self._first) if isinstance(clipping, AdaptiveClipping) and self._first else clipping
        factors = self._factors_of(at_first, norm_GU)
        if (is_same and now != self._now) or not (self._factors is None or _equal(factors, self._factors)):
            raise GhostError(f"clipping {clipping.kind!r} gives other factors to the same norms than before. {REMEDY}")
        self._clipping, self._factors, self._now = clipping, factors, now

    def _groups_of(self, clipping: Clipping) -> list[list[str]]:
        return [list(group) for group in clipping.groups(self._shapes)]

    def _factors_of(self, clipping: Clipping, norm_GU: Tensor) -> Tensor:
        """Return the factors of units that have the same norm in every group, (G, tried)."""
        tried = self._bound.clip_norm * torch.logspace(-6, 6, _TRIED, dtype=norm_GU.dtype, device=norm_GU.device)
        return self.for_model(clipping).factors(tried.expand(len(self._groups), _TRIED).clone()).clone()


def _threshold_of(clipping: Clipping) -> float | None:
    return float(clipping.threshold) if isinstance(clipping, AdaptiveClipping) else None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)

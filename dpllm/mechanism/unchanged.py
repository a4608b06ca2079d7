"""A clipping that is refused when it is no longer the one for which the noise was chosen.

Place in the flow: `dpllm.mechanism.parts.Mechanism` records the bound of its clipping, and `dpllm.ghost.GhostClipper`
records its groups and factors too. A clipping that follows the norms of the private gradients would get noise for
another C, and would publish the norms: no ε covers either of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpllm.mechanism.parts import Clipping

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

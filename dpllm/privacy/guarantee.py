"""Define the guarantee: ε and δ of a history, under an adjacency, for a unit.

ε is computed from the history that the guarantee holds, so it cannot belong to different steps, a different δ or a
different adjacency.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting
from dpllm.privacy.accounting import History
from dpllm.privacy.rounding import format_delta, format_epsilon


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy of what some steps release.

    >>> from dpllm import Step
    >>> steps = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]
    >>> str(Guarantee(history=steps, delta=1e-5, adjacency="zero-out", unit="user"))
    'ε = 4.8137 at δ = 1e-05 (zero-out)'
    """

    history: History
    """(event, count) pairs: the steps."""
    delta: float
    """δ."""
    adjacency: str
    """Adjacency of the headline ε: "zero-out" or "replace-one"."""
    unit: str
    """"sequence" or "user"."""

    @cached_property
    def epsilon(self) -> float:
        """ε at δ under the headline's adjacency; an upper bound, inf without noise."""
        return self.under(self.adjacency)

    def under(self, adjacency: str) -> float:
        """Return ε at the same δ under "zero-out" or "replace-one"."""
        return accounting.epsilon(self.history, self.delta, adjacency)

    @property
    def by_adjacency(self) -> dict[str, float]:
        """ε at the same δ under each adjacency."""
        return {name: self.under(name) for name in ADJACENCIES}

    @property
    def other(self) -> str:
        """The adjacency that is not the headline's."""
        return next(name for name in ADJACENCIES if name != self.adjacency)

    @property
    def is_finite(self) -> bool:
        """Whether ε is finite."""
        return math.isfinite(self.epsilon)

    @property
    def one_unit(self) -> str:
        """The word for one unit: "record" or "user"."""
        return "record" if self.unit == "sequence" else "user"

    @property
    def num_steps(self) -> int:
        """Number of steps or answers in the history."""
        return sum(count for _, count in self.history)

    def of(self, history: History) -> Guarantee:
        """Return the guarantee of different steps, at the same δ, under the same adjacency, for the same unit."""
        return dataclasses.replace(self, history=history)

    def __str__(self) -> str:
        """Return ε, rounded up, and δ."""
        return f"ε = {format_epsilon(self.epsilon)} at δ = {format_delta(self.delta)} ({self.adjacency})"

"""The topics of a plan: the protected unit, the draw of a step, and the noise of a step.

Place in the flow: below `dpllm.privacy.plan`, whose `PrivacyPlan` inherits their fields. Each part checks its own
fields. A function that reads one topic only names the part as its type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpllm.config import SAMPLINGS, UNITS
from dpllm.mechanism.limits import ADJACENCIES, RANDOMNESS
from dpllm.mechanism.parts import Draw, Spec

FLAT, INDEPENDENT = Spec("flat"), Spec("independent")
"""Clipping and noise of DP-SGD."""


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """Some public constants of a private run that belong together.

    Raises:
        ValueError: the values contradict each other.
    """

    remedy = "Make the plan with make_plan"

    def __post_init__(self) -> None:
        """Check all rules; the message names each one that is broken."""
        broken = [rule for rule, holds in self.rules().items() if not holds]
        if broken:
            raise ValueError(f"a privacy plan needs {'; '.join(broken)}. {self.remedy}")

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds. A part adds its rules to those of its bases."""
        return {}


@dataclass(frozen=True, kw_only=True)
class PlannedUnit(PlanPart):
    """The protected unit, its neighbours, and the data set."""

    unit: str
    """"sequence" or "user"."""
    adjacency: str
    """Adjacency of the headline ε, "zero-out" or "replace-one"."""
    max_rows_per_unit: int | None = None
    """k, the rows of one user that may be used; None at sequence level."""
    unit_column: str | None = None
    """The column of the user's id; None at sequence level."""
    rows_kept: str | None = None
    """Which k rows are kept of a user with more rows: "first" or "random"; None at sequence level."""
    dataset: str | None = None
    """Public name of the data set."""

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        return {
            **super().rules(),
            f"unit in {UNITS}": self.unit in UNITS,
            f"adjacency in {ADJACENCIES}": self.adjacency in ADJACENCIES,
        }


@dataclass(frozen=True, kw_only=True)
class PlannedDraw(PlannedUnit):
    """The number of units, and the draw of a step."""

    sampling: str = "unit"
    """"unit": whole units are drawn and clipped. "example": single rows are drawn and clipped."""
    num_units: int
    """N."""
    num_examples: int | None = None
    """Number of rows to draw from, at most k of each user; None where units are drawn."""
    sampling_rate: float
    """q = b / N, or b over `num_examples` where rows are drawn."""
    expected_batch_size: int
    """b, the divisor of the noisy sum."""
    max_batch_size: int
    """B_max. Where rows are drawn, their number: no draw is truncated."""

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        population, size = self.population, self.expected_batch_size
        return {
            **super().rules(),
            f"sampling in {SAMPLINGS}": self.sampling in SAMPLINGS,
            "num_units >= 1": self.num_units >= 1,
            "1 <= expected_batch_size <= population": 1 <= size <= population,
            "expected_batch_size <= max_batch_size <= population": size <= self.max_batch_size <= population,
            "sampling_rate = expected_batch_size / population": (
                population >= 1 and self.sampling_rate == size / population
            ),
            "num_examples and max_rows_per_unit where rows of users are drawn": self._examples_fit(),
        }

    def _examples_fit(self) -> bool:
        if self.sampling != "example":
            return self.num_examples is None
        k, rows = self.max_rows_per_unit, self.num_examples
        if k is None or rows is None or self.unit != "user":
            return False
        return self.num_units <= rows <= k * self.num_units and self.max_batch_size == rows

    @property
    def population(self) -> int:
        """The number to draw from in every step: N units, or `num_examples` rows."""
        return self.num_units if self.num_examples is None else self.num_examples

    @property
    def draw(self) -> Draw:
        """The numbers of the draw of a step."""
        return Draw(
            num_units=self.num_units,
            population=self.population,
            expected_batch_size=self.expected_batch_size,
            max_batch_size=self.max_batch_size,
            rows_per_unit=self.max_rows_per_unit if self.sampling == "example" else None,
        )


@dataclass(frozen=True, kw_only=True)
class PlannedNoise(PlanPart):
    """The clipping of a contribution, and the noise of a step."""

    clip_norm: float
    """C, in units of the gradient."""
    clipping: Spec = FLAT
    """How a contribution is bounded by C (`dpllm.mechanism.catalogue`)."""
    noise_multiplier: float
    """σ, dimensionless."""
    noise: Spec = INDEPENDENT
    """Whether and how the noise of the steps is correlated."""
    randomness: str = "os"
    """The generator of the noise (`dpllm.mechanism.generators`)."""
    seeded: bool = False
    """Whether sampling and noise come from a fixed seed; then nothing is private."""

    def rules(self) -> dict[str, bool]:
        """Return the rules for the fields, and whether each holds."""
        return {
            **super().rules(),
            "0 <= noise_multiplier < inf": 0 <= self.noise_multiplier < math.inf,
            "0 < clip_norm < inf": 0 < self.clip_norm < math.inf,
            f"randomness in {RANDOMNESS}": self.randomness in RANDOMNESS,
        }

"""The plan of a run as a part of its report: that of a training run, and that of a query run.

Place in the flow: below `dpllm.report.models`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag

from dpllm.mechanism.limits import RANDOMNESS
from dpllm.privacy.release_words import require_release
from dpllm.report.kinds import (
    Adjacency,
    AtLeastOne,
    ClippingSpec,
    Count,
    NoiseSpec,
    NotNegative,
    OneOf,
    Part,
    Positive,
    Probability,
    Rate,
    RowsKept,
    Sampling,
    SelectionSpec,
    Unit,
)

Value = str | bool | int | float


class DrawNumbers(Part):
    """The numbers of a draw, which the plan and the parameters of the mechanism share."""

    sampling: Sampling = Field(description="Unit of a draw: units, or rows.")
    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    num_examples: AtLeastOne | None = Field(
        description="Rows there are to draw, with example-level sampling; null otherwise."
    )
    sampling_rate: Rate = Field(description="q, the share of units, or of rows, that a step draws on average.")
    expected_batch_size: AtLeastOne = Field(description="b, which the noisy sum is divided by.")
    max_batch_size: AtLeastOne = Field(description="B_max, the most that a step draws.")


class ProtectedUnit(Part):
    """The protected unit, its neighbours, and the data set."""

    unit: Unit = Field(description="Unit of privacy.")
    adjacency: Adjacency = Field(description="Adjacency of the headline ε.")
    max_rows_per_unit: AtLeastOne | None = Field(
        description="k, rows of one user that may be used; null at sequence level."
    )
    unit_column: str | None = Field(description="Column of the user's id; null at sequence level.")
    rows_kept: RowsKept = Field(description="Which k rows of a user with more were kept; null at sequence level.")
    dataset: str | None = Field(description="Public name of the data set.")


class Plan(DrawNumbers, ProtectedUnit):
    """Every number that the guarantee rests on, fixed before the run."""

    clip_norm: Positive = Field(description="C, in units of the gradient.")
    noise_multiplier: NotNegative = Field(description="σ, without unit.")
    seeded: bool = Field(description="Whether sampling and noise come from a fixed seed; then nothing is private.")
    num_steps: AtLeastOne = Field(description="T, the steps planned.")
    num_steps_wanted: AtLeastOne | None = Field(
        description="Steps asked for where the budget allows fewer; null otherwise."
    )
    delta: Probability = Field(description="δ.")
    target_epsilon: Positive | None = Field(description="The ε that the run may cost; null when none was given.")
    format: Literal[1] = Field(description="Format of the plan.")
    clipping: ClippingSpec = Field(description="How a contribution is bounded.")
    noise: NoiseSpec = Field(description="Whether and how the noise of the steps is correlated.")
    randomness: Annotated[str, OneOf(RANDOMNESS)] = Field(description="Generator of the noise.")
    selection: SelectionSpec | None = Field(
        description="Distribution of the number of runs of which only the best is released; null for a single run."
    )


class PlanOfQueries(ProtectedUnit):
    """The plan of a query run: a private release that is no training run."""

    format: Literal[1] = Field(description="Format of the plan.")
    method: Annotated[str, AfterValidator(require_release)] = Field(description="The method of the release.")
    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    charges: tuple[dict[str, JsonValue], ...] = Field(
        description="All that the run may charge: name, event and its number."
    )
    settings: dict[str, Value] = Field(description="Public settings on which sensitivity and events rest.")
    delta: Probability = Field(description="δ.")
    target_epsilon: Positive | None = Field(description="The ε that the run may cost; null when none was given.")
    randomness: Literal["os", "discrete"] = Field(description="Generator of the noise.")
    after: dict[str, JsonValue] | None = Field(
        description="The released training run on which this one builds, with its history; ε is that of both."
    )

    @property
    def seeded(self) -> bool:
        """False: a query run has no seed."""
        return False


def _kind_of_plan(value: Any) -> str:
    return "queries" if isinstance(value, PlanOfQueries) or (isinstance(value, dict) and "method" in value) else "steps"


AnyPlan = Annotated[
    Annotated[Plan, Tag("steps")] | Annotated[PlanOfQueries, Tag("queries")], Discriminator(_kind_of_plan)
]


def is_selection(plan: Plan | PlanOfQueries) -> bool:
    """Return whether the run is one of several, of which only the best is released."""
    return isinstance(plan, Plan) and plan.selection is not None


class Answers(Part):
    """One kind of private answer of a query run."""

    name: str = Field(description="Its name.")
    planned: AtLeastOne = Field(description="How often it is charged at most.")
    charged: Count = Field(description="How often it was charged.")
    accounted_as: str = Field(description="The accounting of one answer, with its source.")


class QueryParameters(Part):
    """Every parameter of a query run."""

    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    num_steps_planned: Count = Field(description="Answers planned; 0 for texts of a model without counts.")
    num_steps_charged: Count = Field(description="Answers charged.")
    answers: tuple[Answers, ...] = Field(description="Each kind of private answer.")
    settings: dict[str, Value] = Field(description="Public settings on which sensitivity and events rest.")
    after: str | None = Field(description="The released training run on which this one builds, and its cost alone.")
    target_epsilon: Positive | None = Field(description="The ε that the run may cost; null without a limit.")
    delta: Probability = Field(description="δ.")
    why_this_delta: str = Field(description="Why this δ.")
    max_rows_per_unit: AtLeastOne | None = Field(description="k, the most rows of one user; null at sequence level.")
    rows_kept: RowsKept = Field(description="Which rows of a user with more were kept; null at sequence level.")

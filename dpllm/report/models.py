"""Define the privacy report as typed values: every key of its JSON and its meaning.

`dpllm.report.statement` fills these models in. The JSON file, its schema, the Markdown and HTML pages and the model
card are written from them. An unknown key or a value out of range is refused, so a forged report or a later version's
report is never read partially.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, JsonValue, Tag, ValidationError

from dpllm.config.versions import version_words
from dpllm.mechanism.limits import RANDOMNESS
from dpllm.registry import require_release
from dpllm.report.kinds import (
    Adjacency,
    AtLeastOne,
    Chances,
    ClippingSpec,
    Count,
    Epsilon,
    Event,
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
    SeveralEvents,
    Sha256,
    Shown,
    Unit,
)

FORMAT: Final = 1
"""Format of the report's JSON."""
TIERS = ("strong", "reasonable", "weak", "none")
NOT_FILLED: Final = "**not filled in**"
"""The text on a page in place of what people have not filled in."""
NO_TRAINER: Final = 'not noted. This command notes it: `dpllm report note . trained_by="…"`'
"""Words of a report in which nobody noted who trained the model; no question of the checklist asks it."""
_MOST_LISTED = 12


SECTIONS: Final = {
    "to-do": "Still to be done",
    "do-not-publish": "Do not publish these files",
    "strength": "How strong the guarantee is",
    "setting": "The people",
    "definition": "The protection in detail",
    "not-covered": "Not covered",
    "accounting": "How the numbers were computed",
    "utility": "How useful the model is",
    "checkable": "Check it yourself",
    "checklist": "Checklist",
    "glossary": "Glossary",
}
"""Sections of the page after the first screen: title by anchor, in the page's order."""


_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


def day_in_words(text: str) -> str:
    """Return a date in words; a text that is not a date is returned unchanged.

    >>> day_in_words("2026-11-23T14:29:00+00:00"), day_in_words("now")
    ('23 November 2026', 'now')
    """
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


class Noted(Part):
    """Facts that only people know, in addition to those in the setting and the definition."""

    trained_by: Annotated[str | None, Shown("setting", "Who {made} the {thing}", if_none=NO_TRAINER)] = Field(
        description="Who trained the model; null: not noted."
    )
    base_model: str | None = Field(description="Name of the model that was fine-tuned; null: not noted.")
    license: str | None = Field(description="License of the released model; null: not noted.")
    language: tuple[str, ...] = Field(description="Languages of the model, as ISO codes; empty: not noted.")
    dataset: str | None = Field(description="Public name of the data set, if the plan has none; null: not noted.")
    preprocessing: Annotated[str | None, Shown("definition", "Computed from the records before the run")] = Field(
        description="Numbers, names or settings that were computed from the records before the run; null: not noted."
    )


class Odds(Part):
    """A bound on one kind of attack."""

    attack: str = Field(description="What the attacker tries.")
    without: str = Field(description="Success without the model, in words.")
    with_the_model: str = Field(description="Largest success with the model, in words, rounded up.")
    share_without: Probability = Field(description="Success without the model.")
    at_most: Probability = Field(description="Largest success with the model.")


class Front(Part):
    """The first screen: what happened, in sentences. Numbers are rounded to two digits, in the safe direction."""

    alert: str = Field(description="Why the model should not be released yet, in one line; empty: no point is open.")
    what: str = Field(description="What was trained on what.")
    who: str = Field(description="Who trained it, who holds the data, who gets the model.")
    when: str = Field(description="When, and how many steps.")
    protected: str = Field(description="The protected unit.")
    odds: str = Field(description="An attacker's odds, in one sentence; or why there is no guarantee.")
    table: tuple[Odds, ...] = Field(description="A few bounds; empty if there is no guarantee.")
    numbers: str = Field(description="ε and δ behind the odds, and how strong they are; empty if there are no odds.")
    not_covered: str = Field(description="What is not covered.")
    to_do: str = Field(description="How many points are open.")


class Settled(Part):
    """An open point that people settled, as recorded in the ledger."""

    point: str = Field(description="The point.")
    answer: str = Field(description="What was checked.")
    by: str = Field(description="Who checked it.")
    at: str = Field(description="Time at which it was written into the ledger, in UTC (ISO 8601).")

    @property
    def in_words(self) -> str:
        """The statement in words, with its date and its author."""
        return f"{self.answer} (settled on {day_in_words(self.at)} by {self.by})"


class KeptFiles(Part):
    """Files of a run's folder that must not be released."""

    files: str = Field(description="Which files.")
    why: str = Field(description="Why they must not be released.")


class Line(Part):
    """A question that every report must answer (Ponomareva et al., JAIR 2023)."""

    section: Annotated[str, OneOf(tuple(SECTIONS))] = Field(description="Which section of the page answers it.")
    question: str = Field(description="The question.")
    filled: bool = Field(description="Whether it is answered; otherwise it is an open point.")


Value = str | bool | int | float


class DrawNumbers(Part):
    """The parameters of a draw, which the plan and the mechanism's parameters share."""

    sampling: Sampling = Field(description="What a step draws: units or rows.")
    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    num_examples: AtLeastOne | None = Field(
        description="Number of rows to draw from, with example-level sampling; null otherwise."
    )
    sampling_rate: Rate = Field(description="q, the share of units or of rows that a step draws on average.")
    expected_batch_size: AtLeastOne = Field(description="b, by which the noisy sum is divided.")
    max_batch_size: AtLeastOne = Field(description="B_max, the largest number that a step draws.")


class ProtectedUnit(Part):
    """The protected unit, its neighbours, and the data set."""

    unit: Unit = Field(description="Unit of privacy.")
    adjacency: Adjacency = Field(description="Adjacency of the headline ε.")
    max_rows_per_unit: AtLeastOne | None = Field(
        description="k, the largest number of rows used per user; null at sequence level."
    )
    unit_column: str | None = Field(description="Column with the user's id; null at sequence level.")
    rows_kept: RowsKept = Field(description="Which k rows of a user with more were kept; null at sequence level.")
    dataset: str | None = Field(description="Public name of the data set.")


class Plan(DrawNumbers, ProtectedUnit):
    """Every number that the guarantee depends on, fixed before the run."""

    clip_norm: Positive = Field(description="C, in the gradient's units.")
    noise_multiplier: NotNegative = Field(description="σ, dimensionless.")
    seeded: bool = Field(description="Whether sampling and noise come from a fixed seed; if so, nothing is private.")
    num_steps: AtLeastOne = Field(description="T, the planned number of steps.")
    num_steps_wanted: AtLeastOne | None = Field(
        description="Requested number of steps, if the budget allows fewer; null otherwise."
    )
    delta: Probability = Field(description="δ.")
    target_epsilon: Annotated[Positive | None, Shown("accounting", "The ε that the run may cost", "number")] = Field(
        description="The ε that the run may cost; null: none was given."
    )
    format: Literal[1] = Field(description="Format of the plan.")
    clipping: ClippingSpec = Field(description="How a contribution is bounded.")
    noise: NoiseSpec = Field(description="Whether and how the noise of the steps is correlated.")
    randomness: Annotated[str, OneOf(RANDOMNESS)] = Field(description="Generator of the noise.")
    selection: SelectionSpec | None = Field(
        description="Distribution of the number of runs, of which only the best is released; null for a single run."
    )


class PlanOfQueries(ProtectedUnit):
    """The plan of a query run: a private release without a private training run."""

    format: Literal[1] = Field(description="Format of the plan.")
    method: Annotated[str, AfterValidator(require_release)] = Field(description="The method of the release.")
    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    charges: tuple[dict[str, JsonValue], ...] = Field(
        description="Everything that the run may charge: name, event and count."
    )
    settings: dict[str, Value] = Field(description="Public settings that determine sensitivity and events.")
    delta: Probability = Field(description="δ.")
    target_epsilon: Annotated[Positive | None, Shown("accounting", "The ε that the run may cost", "number")] = Field(
        description="The ε that the run may cost; null: none was given."
    )
    randomness: Literal["os", "discrete"] = Field(description="Generator of the noise.")
    after: dict[str, JsonValue] | None = Field(
        description="The released training run on which this one builds, with its history; ε covers both."
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
    planned: AtLeastOne = Field(description="Largest number of times it may be charged.")
    charged: Count = Field(description="Number of times it was charged.")
    accounted_as: str = Field(description="How one answer is accounted for, with the source.")


class QueryParameters(Part):
    """Every parameter of a query run."""

    num_units: AtLeastOne = Field(description="N, the number of units; public.")
    num_steps_planned: Count = Field(description="Planned answers; 0 for a model's texts without counts.")
    num_steps_charged: Count = Field(description="Charged answers.")
    answers: tuple[Answers, ...] = Field(description="Each kind of private answer.")
    settings: dict[str, Value] = Field(description="Public settings that determine sensitivity and events.")
    after: str | None = Field(
        description="The released training run on which this one builds, and the cost of that run."
    )
    why_this_delta: str = Field(description="Why this δ was chosen.")
    max_rows_per_unit: AtLeastOne | None = Field(
        description="k, the largest number of rows used per user; null at sequence level."
    )
    rows_kept: RowsKept = Field(description="Which rows of a user with more were kept; null at sequence level.")


class _ByAdjacency(Part):
    model_config: ClassVar[ConfigDict] = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    def items(self) -> list[tuple[str, Any]]:
        """Return the keys as the JSON has them, with their values."""
        return [(name.replace("_", "-"), value) for name, value in self]


class EpsilonByAdjacency(_ByAdjacency):
    """ε under each adjacency."""

    zero_out: Epsilon = Field(
        description="Under zero-out: one unit contributes nothing, and the public number of units is unchanged."
    )
    replace_one: Epsilon = Field(description="Under replace-one: a different unit replaces one unit.")

    def of(self, adjacency: str) -> float:
        """Return ε under "zero-out" or "replace-one"."""
        return dict(self.items())[adjacency]


class Statement(Part):
    """The guarantee in one place."""

    private: bool = Field(description="Whether there is a guarantee: a finite ε and no fixed seed.")
    words: str = Field(description="The guarantee in plain words, with numbers rounded up.")
    epsilon: Epsilon = Field(description="ε of the headline.")
    delta: Probability = Field(description="δ of the headline.")
    adjacency: Adjacency = Field(description="The headline's neighbouring data sets.")
    epsilon_by_adjacency: EpsilonByAdjacency = Field(description="ε at the same δ under each adjacency.")
    unit: Unit = Field(description="Unit of privacy.")


class Setting(Part):
    """Who is trusted with what."""

    model: Annotated[str, Shown("setting", "Setting")] = Field(description="The setting of differential privacy.")
    data_holder: Annotated[str | None, Shown("setting", "Who holds the raw data", if_none=NOT_FILLED)] = Field(
        description="Who holds the raw data; null: not filled in."
    )
    audience: Annotated[str | None, Shown("setting", "Who sees the {thing}", if_none=NOT_FILLED)] = Field(
        description="Who will see the released model; null: not filled in."
    )


class WrittenOut(Part):
    """A result that depends on the private data and was written out."""

    what: str = Field(description="What was written out.")
    count: AtLeastOne = Field(description="Number of times.")


class NeverCovered(Part):
    """A use of the data that ε never covers."""

    what: str = Field(description="What is not covered.")
    advice: str = Field(description="What to do about it.")


class Fact(Part):
    """A fact that the run recorded in its ledger."""

    name: str = Field(description="Its name.")
    values: tuple[str | int | float, ...] = Field(
        min_length=1, description="Its distinct values, in the order in which they were recorded."
    )

    @property
    def in_words(self) -> str:
        """The values in words, in their order."""
        return ", then ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in self.values)


class Definition(Part):
    """The definition of differential privacy as this run instantiates it."""

    dataset: Annotated[str | None, Shown("setting", "Data set", if_none=NOT_FILLED)] = Field(
        description="Public name of the data set; null: not filled in."
    )
    unit: Annotated[str, Shown("definition", "Unit of privacy")] = Field(description="What one unit of privacy is.")
    adjacency: Annotated[str, Shown("definition", "Neighbouring data sets")] = Field(
        description="Which data sets are neighbours."
    )
    mechanism: Annotated[str, Shown("accounting", "Mechanism")] = Field(
        description="Description of one step, with all its parameters."
    )
    public: Annotated[tuple[str, ...], Shown("definition", "Taken as public")] = Field(
        description="What is taken as public."
    )
    data_accesses_covered: Annotated[tuple[str, ...], Shown("definition", "Use of the data that is covered")] = Field(
        description="Uses of the data that the guarantee covers."
    )
    other_uses_of_the_data: Annotated[
        str | None, Shown("definition", "Other uses of the same data", if_none=NOT_FILLED)
    ] = Field(description="Other uses of the same data; their ε adds up. null: not filled in.")
    released_under_the_guarantee: Annotated[tuple[str, ...], Shown("definition", "Released under the guarantee")] = (
        Field(description="What may be released.")
    )
    written_out_and_not_covered: tuple[WrittenOut, ...] = Field(
        description="Results that the run wrote out and that depend on the private data."
    )
    never_covered: tuple[NeverCovered, ...] = Field(description="What ε never covers.")
    facts: tuple[Fact, ...] = Field(description="Facts that the run recorded in its ledger.")


class BudgetEntry(Part):
    """An entry in the budget file of a data set."""

    file: str = Field(description="Name of the file, without its folder.")
    entry: str = Field(description="Id of the entry.")

    @property
    def in_words(self) -> str:
        """The entry in words."""
        return f"entry {self.entry} of {self.file}"


class CrossCheck(Part):
    """ε by a different accountant."""

    name: str = Field(description="Name of the accountant.")
    epsilon: Epsilon | None = Field(description="Its ε; null if it does not apply.")
    must_agree: bool = Field(
        description="Whether it must agree with ours within 1 %; false: it is always a looser upper bound."
    )
    pld_of_the_same_steps: Epsilon | None = Field(
        description="The ε of this report's accountant with which it is compared; null if it does not apply."
    )
    note: str = Field(description="What it computes and what it omits.")


class CurveRow(_ByAdjacency):
    """ε at one δ."""

    delta: Probability = Field(description="δ.")
    zero_out: Epsilon = Field(description="ε under zero-out.")
    replace_one: Epsilon = Field(description="ε under replace-one.")


class Steps(Part):
    """The numbers of steps, and why there were no more."""

    wanted: Count = Field(description="Requested steps; 0 for a data set from a model without further queries.")
    planned: Count = Field(description="Planned steps; fewer than requested if the budget allows fewer.")
    charged: Count = Field(description="Steps taken and charged.")
    stated: Count = Field(
        description="Steps whose ε is stated: those charged, or all planned ones if the run stopped early."
    )
    torn_by_a_crash: Count = Field(description="Charged steps whose line in the ledger a crash left incomplete.")
    words: str = Field(description="The same in words, and why the run ended.")

    @property
    def in_words(self) -> str:
        """The same in words."""
        return self.words


class Parameters(DrawNumbers):
    """Every parameter of the mechanism."""

    num_steps_planned: AtLeastOne = Field(description="T, the planned number of steps.")
    num_steps_charged: Count = Field(description="T, the number of steps taken.")
    noise_multiplier: NotNegative = Field(description="σ, the noise multiplier.")
    clip_norm: Positive = Field(description="C, the clip norm.")
    noise_stddev: NotNegative = Field(
        description="Standard deviation of the noise; σC, or σ_g C if the clip threshold adapts."
    )
    why_this_delta: str = Field(description="Why this δ was chosen.")
    max_rows_per_unit: AtLeastOne | None = Field(
        description="k, the largest number of rows used per user; null at sequence level."
    )
    rows_kept: RowsKept = Field(description="Which rows of a user with more were kept; null at sequence level.")


class Assumption(Part):
    """One assumption behind the numbers."""

    assumption: str = Field(description="What is assumed.")
    how_ensured: str = Field(description="How this run ensured it.")


class Accountant(Part):
    """The kind of accounting, and the software behind it."""

    kind: Annotated[str, Shown("accounting", "Kind")] = Field(description="Kind of accounting.")
    event: Annotated[str, Shown("accounting", "Event of one {step}")] = Field(
        description="The privacy event as which one step is accounted for, with its source."
    )
    tool: Annotated[str, Shown("accounting", "Library")] = Field(description="Library behind the numbers.")
    tool_version: Annotated[str, Shown("accounting", "Version of the library")] = Field(description="Its version.")
    discretization: Annotated[Positive, Shown("accounting", "Grid of privacy losses", "number")] = Field(
        description="Width of the grid of privacy losses."
    )
    composition: Annotated[str, Shown("accounting", "Composition")] = Field(description="What was composed.")


def _kind_of_parameters(value: Any) -> str:
    queries = "answers" in value if isinstance(value, dict) else isinstance(value, QueryParameters)
    return "queries" if queries else "steps"


class Accounting(Accountant):
    """How the numbers were computed."""

    budget: Annotated[tuple[BudgetEntry, ...], Shown("accounting", "Charged to the budget of the data set")] = Field(
        description="The data set's budgets to which the runs were charged, each once."
    )
    cross_checks: tuple[CrossCheck, ...] = Field(description="ε by other accountants, under zero-out.")
    zcdp_rho: Annotated[Epsilon, Shown("accounting", "ρ-zCDP, without the gain from sampling", "rho")] = Field(
        description="ρ of zero-concentrated privacy under zero-out, without the gain from sampling."
    )
    curve: tuple[CurveRow, ...] = Field(description="ε at a few smaller δ.")
    steps: Annotated[Steps, Shown("accounting", "{Step}s")] = Field(
        description="The numbers of steps, and why there were no more."
    )
    parameters: Annotated[
        Annotated[Parameters, Tag("steps")] | Annotated[QueryParameters, Tag("queries")],
        Discriminator(_kind_of_parameters),
    ] = Field(description="Every parameter of the mechanism.")
    assumptions: tuple[Assumption, ...] = Field(min_length=1, description="The assumptions behind the numbers.")


class Strength(Part):
    """The strength of the guarantee, in terms of attacks."""

    tier: Annotated[str, OneOf(TIERS)] = Field(
        description="strong: ε at most 1; reasonable: at most 10; weak: above; none: no guarantee."
    )
    words: str = Field(description="The tier in words.")
    advantage: Probability = Field(description="Largest true minus false positive rate of any attack.")
    bayes_success: Chances = Field(
        description="Largest probability of guessing correctly whether a unit took part, by the prior probability."
    )
    true_positive_rate: Chances = Field(
        description="Largest true positive rate of any attack, by its false positive rate."
    )
    reconstruction: Chances = Field(
        description="Largest probability of guessing a unit's contents with the release (arXiv:2302.07225), by the "
        "probability of guessing them without it."
    )
    audit: str | None = Field(description="Result of an empirical audit; null: none noted.")
    audit_noted: str | None = Field(description="What people noted about an audit; null: nothing.")


class Tradeoff(Part):
    """The best attack's true positive rate over its false positive rate; three lists of equal length."""

    false_positive_rate: tuple[Probability, ...] = Field(
        description="Shares of the units outside the data that are accused."
    )
    true_positive_rate: tuple[Probability, ...] = Field(
        description="Largest shares of the units in the data that are found."
    )
    from_epsilon_and_delta_alone: tuple[Probability, ...] = Field(description="The same, bounded by (ε, δ) alone.")


class EpsilonOverSteps(Part):
    """ε over the steps; two lists of equal length."""

    steps: tuple[AtLeastOne, ...] = Field(description="Numbers of steps.")
    epsilon: tuple[NotNegative, ...] = Field(description="ε after each number of steps.")


class DeltasByAdjacency(_ByAdjacency):
    """The δ of each ε, under each adjacency."""

    zero_out: tuple[Probability | None, ...] = Field(description="Under zero-out.")
    replace_one: tuple[Probability | None, ...] = Field(description="Under replace-one.")


class EpsilonOverDelta(Part):
    """δ for each ε; lists of equal length."""

    epsilon: tuple[NotNegative, ...] = Field(description="Values of ε.")
    delta: DeltasByAdjacency = Field(description="The δ of each ε; null if it is too small to be resolved.")


class Curves(Part):
    """The values from which the pictures are drawn, at the statement's δ and under its adjacency.

    Lists are empty if there is no step or no noise.
    """

    tradeoff: Tradeoff = Field(description="The best attack's true positive rate over its false positive rate.")
    epsilon_over_steps: EpsilonOverSteps = Field(description="ε over the steps.")
    epsilon_over_delta: EpsilonOverDelta = Field(description="δ for each ε.")


class Run(Part):
    """A start or resumption of the run."""

    run: str = Field(description="Random id.")
    plan_hash: Sha256 = Field(description="SHA-256 of its plan.")
    version: str = Field(description="Version of dpllm.")
    commit: str | None = Field(description="Commit of dpllm; null: unknown.")
    changed: bool = Field(description="Whether dpllm had uncommitted changes.")
    started_at: str = Field(description="Start time, in UTC (ISO 8601).")
    entropy: str = Field(description="Source of randomness for sampling and noise.")
    public: tuple[str, ...] = Field(description="What it had learnt from public data beforehand.")
    planned_step: Event = Field(
        description="The parameters of a step that determine its privacy cost, and the kind of its event."
    )
    budget: BudgetEntry | None = Field(description="The data set's budget to which the run is charged; null: none.")
    file: str = Field(description="Keyed hash of the ledger file's inode.")

    @property
    def code(self) -> str:
        """The version of dpllm that ran, with its commit, in words."""
        return version_words(self.version, self.commit, self.changed)

    @property
    def in_words(self) -> str:
        """The start in words."""
        return f"{self.run}: {self.started_at} with dpllm {self.code}; entropy: {self.entropy}"


class QueryStart(Run):
    """The start of a query run."""

    planned_step: SeveralEvents = Field(description="All answers of the plan, as one event.")  # type: ignore[assignment]


class ResumedRun(Run):
    """A resumption that costs more than an uninterrupted run, so that the run has fewer steps than planned."""

    num_steps: AtLeastOne = Field(description="Total number of steps of all starts that this resume allows.")


class Versions(Part):
    """Versions of the software; null: not installed."""

    dpllm: str = Field(description="dpllm.")
    python: str = Field(description="Python.")
    dp_accounting: str | None = Field(description="dp_accounting.")
    numpy: str | None = Field(description="numpy.")
    scipy: str | None = Field(description="scipy.")
    matplotlib: str | None = Field(description="matplotlib.")
    torch: str | None = Field(description="torch.")
    transformers: str | None = Field(description="transformers.")
    peft: str | None = Field(description="peft.")

    @property
    def in_words(self) -> str:
        """The installed versions in words."""
        return ", ".join(f"{name} {version}" for name, version in self if version)


def _kind_of_run(value: Any) -> str:
    if not isinstance(value, dict):
        return "queries" if isinstance(value, QueryStart) else "resumed" if isinstance(value, ResumedRun) else "started"
    event = value.get("planned_step")
    if isinstance(event, dict) and event.get("event") == "several":
        return "queries"
    return "resumed" if "num_steps" in value else "started"


class Checkable(Part):
    """How to check the report."""

    verify: str = Field(description="Command that recomputes everything and fails if anything differs.")
    recompute_from_the_ledger: str = Field(description="Command that recomputes the report.")
    recompute_from_the_numbers: str | None = Field(
        description="Command that computes ε from the parameters; null if no single command can express them."
    )
    plan: AnyPlan = Field(description="Every number that the guarantee depends on, fixed before the run.")
    plan_hash: Annotated[Sha256, Shown("checkable", "Plan, SHA-256", "verbatim_code")] = Field(
        description="SHA-256 of the plan's fields."
    )
    ledger_sha256: Annotated[Sha256, Shown("checkable", "Ledger, SHA-256", "verbatim_code")] = Field(
        description="SHA-256 of the ledger file, without its last lines, which hold the hashes of the report's files."
    )
    runs: Annotated[
        tuple[
            Annotated[
                Annotated[Run, Tag("started")]
                | Annotated[ResumedRun, Tag("resumed")]
                | Annotated[QueryStart, Tag("queries")],
                Discriminator(_kind_of_run),
            ],
            ...,
        ],
        Shown("checkable", "Start"),
    ] = Field(min_length=1, description="Every start and resumption.")
    ended: Annotated[str | None, Shown("checkable", "Ended", if_none="no")] = Field(
        description="Why the last run ended; null: it has not ended, or it crashed."
    )
    torn_lines: Annotated[
        tuple[AtLeastOne, ...], Shown("checkable", "Lines of the ledger torn by a crash", "or_none")
    ] = Field(description="Lines of the ledger that a crash left incomplete, counted from 1.")
    diagnostics_not_covered: str = Field(
        description="Where counts for single steps are, which ε does not cover; the same text in every report."
    )
    commit: str | None = Field(description="Commit of dpllm that wrote the report; null: unknown.")
    changed: bool = Field(description="Whether that dpllm had uncommitted changes.")
    machine: str = Field(description="Kind of processor that computed the numbers.")
    versions: Annotated[Versions, Shown("checkable", "Versions")] = Field(
        description="Versions of the software; null: not installed."
    )

    @property
    def code(self) -> str:
        """The version of dpllm that wrote the report, with its commit, in words."""
        return version_words(self.versions.dpllm, self.commit, self.changed)

    @property
    def code_of_runs(self) -> list[str]:
        """The versions of dpllm that wrote the ledger, with their commits, each once."""
        return list(dict.fromkeys(run.code for run in self.runs))


class Computed(Part):
    """The parts of a report that are computed from plan and ledger, including a few of people's notes."""

    format: Literal[1] = Field(description="Format of the report; changes when a key does.")
    statement: Statement = Field(description="The guarantee in one place.")
    setting: Setting = Field(description="Who is trusted with what.")
    definition: Definition = Field(description="The definition as this run instantiates it.")
    accounting: Accounting = Field(description="How the numbers were computed.")
    strength: Strength = Field(description="The strength of the guarantee, in terms of attacks.")
    curves: Curves = Field(description="The values from which the pictures are drawn.")
    checkable: Checkable = Field(description="How to check the report.")


class Findings(Computed):
    """A report without its first screen, its checklist and its open points, which are derived from the rest."""

    noted_open_points: tuple[str, ...] = Field(
        description="Reasons not to release that the run recorded in its ledger."
    )
    settlements: tuple[Settled, ...] = Field(
        description="Statements in the ledger by which people settled points; the last one for a point counts."
    )
    utility: dict[str, JsonValue] | None = Field(
        description="The model's figures that may be released, by name; null: not filled in."
    )
    utility_elsewhere: tuple[str, ...] = Field(
        description="Names of figures that ε does not cover; they are in a file of the run that must not be released."
    )
    noted: Noted = Field(
        description="Facts that only people know, in addition to those in the setting and the definition."
    )


class PrivacyReport(Findings):
    """The guarantee of a differentially private run, its assumptions, and what it does not cover.

    All bounds are upper bounds.
    """

    front: Front = Field(description="The first screen: what happened, in sentences.")
    checklist: tuple[Line, ...] = Field(
        min_length=1, description="Every question that a report must answer (Ponomareva et al., JAIR 2023)."
    )
    open_points: tuple[str, ...] = Field(description="Reasons not to release yet; each can be cleared.")
    how_to_clear: tuple[str, ...] = Field(description="For each open point, the command or setting that clears it.")
    settled_points: tuple[Settled, ...] = Field(
        description="Open points that people settled: who checked what, and when."
    )
    do_not_publish: tuple[KeptFiles, ...] = Field(description="Files of the run's folder that must not be released.")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite ε is "inf"."""
        return self.model_dump(mode="json", by_alias=True)

    def with_part(self, name: str, **values: Any) -> Self:
        """Return the report with new values in one of its parts; derived parts stay unchanged."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=values)})

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the report that JSON values describe, such as those of its JSON file.

        Raises:
            ValueError: they are not a report of this format; the message names the keys in one line.
        """
        try:
            return cls.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise ValueError(" ".join(listed(list(_complaints(error, values))).split())) from error


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the report, generated from the models."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PrivacyReport.model_json_schema(by_alias=True),
        "title": "Privacy report of dpllm",
    }


def complaints(model: type[Part], values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with JSON values that should be a report or a part of it, with one line per key."""
    try:
        model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        return list(_complaints(error, values))
    return []


def listed(lines: Sequence[str], most: int | None = None) -> str:
    """Join lines into one; of more than ``most`` (default: 12), the last ones are only counted."""
    most = most or _MOST_LISTED
    more = f"; and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more


def _complaints(error: ValidationError, values: Any) -> Iterator[str]:
    for found in error.errors(include_url=False, include_context=False, include_input=False):
        path = _path(found["loc"], values)
        words = {"missing": "is missing", "extra_forbidden": "is not a key of the report"}
        yield f"{path} {words.get(found['type'], ': ' + found['msg'])}".replace(" :", ":")


def _path(place: tuple[int | str, ...], values: Any) -> str:
    """Return the path of a key in a report, without the internal names of its alternatives."""
    path, part = "", values
    for number, key in enumerate(place):
        if isinstance(part, list) and isinstance(key, int):
            path, part = f"{path}[{key}]", part[key] if key < len(part) else None
        elif (isinstance(part, dict) and key in part) or number == len(place) - 1:
            path, part = f"{path}.{key}" if path else str(key), part.get(key) if isinstance(part, dict) else None
    return path

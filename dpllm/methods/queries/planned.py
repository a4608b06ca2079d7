"""What every query run does alike, around its method: the run that it builds on, its plan, its start from a recipe.

Place in the flow: between a recipe (`dpllm.config.query_recipe`) and the method's own plan. The people of a training
run on whose model a query run builds bear the ε of both, so plan and report state them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpllm.config.query_recipe import QueryRecipe
from dpllm.mechanism.events import Event
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.calibration import least_noise
from dpllm.privacy.compose import check_run
from dpllm.privacy.ledger import LEDGER_FILE, is_being_written, read_ledger, require_own_file
from dpllm.privacy.query_plan import Charge, PriorRelease, QueryPlan, Value, training_plan
from dpllm.privacy.rounding import format_delta, format_epsilon
from dpllm.privacy.stated import stated_history
from dpllm.registry import release_words
from dpllm.report.definition import selection_points
from dpllm.report.release_notes import ReleaseNotes


@dataclasses.dataclass(frozen=True)
class QueryCommand:
    """One method: from its recipe to its release."""

    reading: str
    """What `read` does, for the screen."""
    read: Callable[[QueryRecipe], Any]
    """From the recipe to whatever plan and run need of the data."""
    plan: Callable[[QueryRecipe, Any], Any]
    """From the recipe and that to the plan; nothing is charged."""
    carry_out: Callable[[QueryRecipe, Any, Any, Callable[[str], None]], dict[str, Any]]
    """From the recipe, that, the plan and a function that prints a line to what is shown at the end."""


def prior_release(folder: str | Path) -> PriorRelease:
    """Return the released training run of a folder, for `QueryPlan.after`.

    Guarantee: its history is the one whose ε its own report states. It is refused if that ε may still grow, or does not
    hold.

    Args:
        folder: of the run.

    Raises:
        ValueError: the folder holds no training run, plan and ledger do not belong together, the run was not private,
            has not ended, or is one of a private tuning that did not select it.
        LedgerError: the ledger is missing or was edited; or it is a copy of one whose stop was declared independent,
            and the original may have been resumed since.
    """
    folder = Path(folder)
    plan = training_plan(folder, "A run that builds on a model")
    ledger = folder / LEDGER_FILE
    contents = read_ledger(ledger)
    check_run(folder, plan, contents)
    if contents.end is None or is_being_written(ledger):
        raise ValueError(
            f"the run in {folder} has not ended, or crashed: it may still take steps, and its ε would grow. Let it "
            "end, or resume it"
        )
    if contents.notes.stopped_independently:
        require_own_file(contents)  # a copy from before a resume states fewer steps than were taken
    if points := selection_points(plan, contents):
        raise ValueError(f"{folder}: {points[0]}")
    budget = contents.runs[0].get("budget")
    return PriorRelease(
        folder=folder.resolve().name,
        run=str(contents.runs[0]["run"]),
        plan_hash=plan.hash,
        chain=contents.chain,
        history=tuple(stated_history(plan, contents)),
        unit=plan.unit,
        unit_column=plan.unit_column,
        num_units=plan.num_units,
        dataset=plan.dataset,
        budget=None if budget is None else (str(budget["file"]), str(budget["entry"])),
    )


def plan_from(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges_of: Callable[[float], Sequence[tuple[str, Event, int]]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
) -> QueryPlan:
    """Return the plan of a recipe: δ, and noise that is given or calibrated to the target.

    Args:
        recipe: of the run.
        method: of `dpllm.registry.release_words`.
        num_units: N.
        charges_of: from σ/Δ to the charges: name, event, count.
        settings: public settings on which sensitivity and events rest.
        randomness: "os" or "discrete".

    Raises:
        ValueError: δ is out of range, or no noise reaches the target.
    """
    privacy, delta = recipe.privacy, recipe.privacy.delta_for(num_units)
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None
        sigma = least_noise(
            privacy.epsilon,
            delta,
            lambda at: [(event, count) for _, event, count in charges_of(at)],
            privacy.adjacency,
        )
    return plan_with(recipe, method, num_units, charges_of(sigma), settings=settings, randomness=randomness)


def plan_with(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges: Sequence[tuple[str, Event, int]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
) -> QueryPlan:
    """Return the plan of a recipe whose charges are known; as `plan_from`, which finds them.

    Raises:
        ValueError: δ is out of range.
    """
    privacy = recipe.privacy
    return QueryPlan(
        unit=privacy.protects,
        adjacency=privacy.adjacency,
        max_rows_per_unit=privacy.max_rows_per_unit,
        unit_column=privacy.unit,
        rows_kept=privacy.rows_kept if privacy.protects == "user" else None,
        dataset=privacy.dataset,
        method=method,
        num_units=num_units,
        charges=tuple(Charge(name=name, event=event, count=count) for name, event, count in charges),
        settings=tuple(settings),
        delta=privacy.delta_for(num_units),
        target_epsilon=privacy.epsilon,
        randomness=randomness,
    )


def begin_from(recipe: QueryRecipe, plan: QueryPlan, **more: Any) -> QueryRun:
    """Start the run of a recipe: its folder, budget, recipe file and notes of the release.

    Args:
        recipe: of the run.
        plan: as `plan_from` made it.
        more: further arguments of `QueryRun.begin`.

    Raises:
        ValueError: as `QueryRun.begin`.
    """
    return QueryRun.begin(
        recipe.output_dir,
        plan,
        dataset=recipe.privacy.dataset,
        budget=recipe.privacy.budget_file,
        recipe_text=recipe.to_yaml(),
        notes=ReleaseNotes(**dataclasses.asdict(recipe.release)),
        **more,
    )


def format_query_plan(plan: QueryPlan) -> list[tuple[str, str]]:
    """Return a plan as (name, value) rows for people."""
    unit = plan.unit if plan.unit == "sequence" else f"user (column {plan.unit_column})"
    rows = [
        ("release", release_words()[plan.method].result),
        ("unit of privacy", unit),
        ("units N", f"{plan.num_units:,}"),
    ]
    if plan.max_rows_per_unit is not None:
        rows.append(("rows of one user at most", f"{plan.max_rows_per_unit} ({plan.rows_kept})"))
    rows += [
        (f"{charge.name}, at most", f"{charge.count:,}, each {charge.event.words().accounted_as}")
        for charge in plan.charges
    ]
    rows += [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in plan.settings]
    if plan.after is not None:
        rows.append(("builds on the model of", f"{plan.after.folder}; ε is that of both together"))
    rows += [
        ("δ", format_delta(plan.delta)),
        ("ε, zero-out", format_epsilon(plan.epsilon_under("zero-out"))),
        ("ε, replace-one", format_epsilon(plan.epsilon_under("replace-one"))),
        ("adjacency of the headline", plan.adjacency),
        ("randomness of the noise", plan.randomness),
    ]
    return rows

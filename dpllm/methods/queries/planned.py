"""What every query run does alike, around its method: numbers of the plan, rows for people, start from a recipe.

Place in the flow: between a recipe (`dpllm.config.query_recipe`) and the method's own plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dpllm.config.query_recipe import QueryRecipe
from dpllm.mechanism.events import Event
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import Charge, PriorRelease, QueryPlan, Value, calibrated
from dpllm.privacy.release_words import release_words
from dpllm.privacy.rounding import format_delta, format_epsilon
from dpllm.report.release_notes import ReleaseNotes


def plan_from(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges_of: Callable[[float], Sequence[tuple[str, Event, int]]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
    after: PriorRelease | None = None,
) -> QueryPlan:
    """Return the plan of a recipe: δ, and noise that is given or calibrated to the target.

    Args:
        recipe: of the run.
        method: of `dpllm.privacy.release_words.release_words`.
        num_units: N.
        charges_of: from σ/Δ to the charges: name, event, count.
        settings: public settings on which sensitivity and events rest.
        randomness: "os" or "discrete".
        after: the released run on whose model this one builds.

    Raises:
        ValueError: δ is out of range, or no noise reaches the target.
    """
    privacy, delta = recipe.privacy, recipe.privacy.delta_for(num_units)
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.target_epsilon is not None
        sigma = calibrated(
            privacy.target_epsilon,
            delta,
            lambda at: [(event, count) for _, event, count in charges_of(at)],
            adjacency=privacy.adjacency,
            after=after,
        )
    return plan_with(
        recipe, method, num_units, charges_of(sigma), settings=settings, randomness=randomness, after=after
    )


def plan_with(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges: Sequence[tuple[str, Event, int]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
    after: PriorRelease | None = None,
) -> QueryPlan:
    """Return the plan of a recipe whose charges are known; as `plan_from`, which finds them.

    Raises:
        ValueError: δ is out of range.
    """
    privacy = recipe.privacy
    return QueryPlan(
        unit=privacy.unit,
        adjacency=privacy.adjacency,
        max_rows_per_unit=privacy.max_rows_per_unit,
        unit_column=privacy.unit_column,
        rows_kept=privacy.rows_kept if privacy.unit == "user" else None,
        dataset=privacy.dataset,
        method=method,
        num_units=num_units,
        charges=tuple(Charge(name=name, event=event, count=count) for name, event, count in charges),
        settings=tuple(settings),
        delta=privacy.delta_for(num_units),
        target_epsilon=privacy.target_epsilon,
        randomness=randomness,
        after=after,
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

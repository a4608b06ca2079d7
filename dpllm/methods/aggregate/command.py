"""`dpllm aggregate`: questions that a public model answers for groups of private records, combined with noise.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from dpllm.cli.common import AsJson, Overrides, RecipeName, one_line_errors
from dpllm.config.query_recipe import QueryRecipe
from dpllm.methods.queries.command import OutputDir, QueryCommand, run_method


def _read(recipe: QueryRecipe) -> Any:
    from dpllm.methods.predict.inputs import read_records

    return read_records(recipe)


def _plan(recipe: QueryRecipe, records: Any) -> Any:
    from dpllm.methods.aggregate.aggregate import plan_aggregate

    return plan_aggregate(recipe, records.num_units)


def _carry_out(recipe: QueryRecipe, records: Any, plan: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from dpllm.methods.aggregate.aggregate import ask_groups

    return ask_groups(recipe, records, plan, say)


QUERY = QueryCommand("reading the records", _read, _plan, _carry_out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dpllm aggregate aggregate_e2e privacy.target_epsilon=1")(aggregate)


@one_line_errors
def aggregate(
    recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
) -> None:
    """Answer questions about private records: a public model answers for each group, and noise is added.

    The answers are numbers in a public range, one of listed answers, or short answers that many groups give (sample and
    aggregate). Nothing is trained. `dpllm plan RECIPE` prints the cost.
    """
    run_method("aggregate", recipe, overrides or [], output_dir, as_json)

"""`dpllm count`: counts of public classes with noise.

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
    from dpllm.methods.count.counting import read_units

    return read_units(recipe)


def _plan(recipe: QueryRecipe, units: Any) -> Any:
    from dpllm.methods.count.counting import plan_count

    return plan_count(recipe, units)


def _carry_out(recipe: QueryRecipe, units: Any, plan: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from dpllm.methods.count.counting import count_labels

    return {"counts": count_labels(recipe, units, plan)}


QUERY = QueryCommand("reading the labels", _read, _plan, _carry_out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dpllm count label_counts privacy.target_epsilon=0.5")(count)


@one_line_errors
def count(
    recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
) -> None:
    """Count the records of each public class with noise, from a recipe to counts with their privacy report."""
    run_method("count", recipe, overrides or [], output_dir, as_json)

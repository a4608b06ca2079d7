"""`dpllm evolve`: synthetic text by votes of private records.

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
    from dpllm.methods.evolve.evolving import read_voters

    return read_voters(recipe)


def _plan(recipe: QueryRecipe, voters: Any) -> Any:
    from dpllm.methods.evolve.evolving import evolution_plan

    return evolution_plan(recipe, voters)


def _carry_out(recipe: QueryRecipe, voters: Any, plan: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from dpllm.methods.evolve.evolving import run_evolution

    return {"texts": run_evolution(recipe, voters, plan, say)}


QUERY = QueryCommand("reading the records", _read, _plan, _carry_out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dpllm evolve evolve_e2e privacy.target_epsilon=2")(evolve)


@one_line_errors
def evolve(
    recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
) -> None:
    """Make synthetic text without training: a public model writes, and private records vote with noise."""
    run_method("evolve", recipe, overrides or [], output_dir, as_json)

"""`dpllm teach`: labels or completions of public texts by a noisy vote of teachers, and a student.

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
    from dpllm.methods.pate.prepare import prepare

    return prepare(recipe)


def _carry_out(recipe: QueryRecipe, prepared: Any, plan: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from dpllm.methods.pate.teach import teach

    teachers, every = recipe.options.teachers, max(1, recipe.options.teachers // 10)

    def done(number: int) -> None:
        if number % every == 0 or number == teachers:
            say(f"  {number} of {teachers} teachers {'are trained' if prepared.tokens else 'have voted'}")

    taught = teach(prepared, say, done)
    figures = {name: float(f"{value:.4g}") for name, value in taught.figures.items()}
    return {"texts" if prepared.tokens else "labels": taught.num_texts, **figures}


QUERY = QueryCommand(
    "reading the records and the public texts", _read, lambda recipe, prepared: prepared.plan, _carry_out
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dpllm teach teach_sst2 privacy.target_epsilon=4")(teach)


@one_line_errors
def teach(
    recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
) -> None:
    """Label or continue public texts by a noisy vote of models trained on disjoint units (PATE), and train a student.

    The teachers are trained without privacy, one after the other, over one base model in memory. Their votes are
    private. Each label or token costs privacy, and the student none. `dpllm plan RECIPE` prints the cost.
    """
    run_method("teach", recipe, overrides or [], output_dir, as_json)

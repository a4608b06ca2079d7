"""`dpllm predict`: private prediction, token by token.

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
    from dpllm.methods.predict.run import plan_prediction

    return plan_prediction(recipe, records.num_units)


def _carry_out(recipe: QueryRecipe, records: Any, plan: Any, say: Callable[[str], None]) -> dict[str, Any]:
    from dpllm.methods.predict.run import predict_texts

    return {"texts": str(predict_texts(recipe, records, plan, say))}


QUERY = QueryCommand("reading the records", _read, _plan, _carry_out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm predict predict_e2e predict.texts=100\n\n"
        "Example: dpllm predict mine.yaml predict.kind=logits privacy.target_epsilon=3 --output-dir runs/eps3"
    )(predict)


@one_line_errors
def predict(
    recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
) -> None:
    """Draw texts from a public model that reads private records, without training.

    Each text is made by a secret group of records, whose logits are clipped and averaged (private prediction,
    InvisibleInk). All tokens that the texts may have are charged before the first. `dpllm plan` prints the cost.
    """
    run_method("predict", recipe, overrides or [], output_dir, as_json)

"""`dpllm federate`: federated training, from a recipe to a model with its report."""

from __future__ import annotations

from typing import Annotated

import typer

import dpllm
from dpllm.cli.common import one_line_errors
from dpllm.config import load_recipe
from dpllm.config.shipped import recipe_file


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm federate federate_users\n\n"
        "Example: dpllm federate federate_users federate.simulated_dropouts=0.2 train.output_dir=runs/dropouts\n\n"
        "Example: dpllm federate federate_users privacy.noise=distributed privacy.randomness=discrete"
    )(federate)


@one_line_errors
def federate(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file with a section federate, or the name of a shipped recipe.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Replace values of the recipe.", show_default=False),
    ] = None,
) -> None:
    """Train a language model over clients with records of their own, with a guarantee for each client.

    The clients are simulated: each has the records of one user. A trusted server adds the noise of a round, or with
    privacy.noise=distributed every client adds a share of it, and secure aggregation shows the server only the sum.
    Ctrl-C ends the run after the current round, with the model and its report; it is not resumed.
    """
    typer.echo(
        f"dpllm {dpllm.__version__}: federated training of {recipe_file(recipe)}"
    )  # first: the rest takes seconds
    read = load_recipe(recipe, overrides or ())
    typer.echo(f"output in {read.train.get('output_dir')}; loading the libraries")
    from dpllm.methods.federated.run import run

    if code := run(read):
        raise typer.Exit(code)

"""`dpllm methods federated`: federated training, from a recipe to a model with its report."""

from __future__ import annotations

import typer

import dpllm
from dpllm.cli.common import Overrides, RecipeName, command
from dpllm.config import load_recipe
from dpllm.config.shipped import recipe_file


@command("dpllm methods federated federated_users federated.simulated_dropouts=0.2")
def federated(
    recipe: RecipeName,
    overrides: Overrides = None,
) -> None:
    """Train over clients with records of their own.

    The clients are simulated, and each has the records of one user and its own guarantee. A trusted server adds the
    noise of a round, or with privacy.noise=distributed every client adds a share of it, and secure aggregation shows
    the server only the sum. Ctrl-C ends the run after the current round, with the model and its report; a run cannot
    be resumed.
    """
    typer.echo(
        f"dpllm {dpllm.__version__}: federated training of {recipe_file(recipe)}"
    )  # first: the rest takes seconds
    read = load_recipe(recipe, overrides or ())
    typer.echo(f"output in {read.train.get('output_dir')}; loading the libraries")
    from dpllm.methods.federated.run import run

    if code := run(read):
        raise typer.Exit(code)

"""`dpllm merge`: the adapter of a finished run, merged into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, command, show_json


@command("dpllm merge runs/mine")
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT", help="The new folder; by default merged, inside that of the run.", show_default=False
        ),
    ] = None,
    num_labels: Annotated[
        int | None, typer.Option(help="Number of classes, for a classifier whose recipe leaves it to the data.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a run with its LoRA adapter merged: an ordinary model, with its own report and card.

    The guarantee is that of the adapter; no ε is spent. The run keeps its adapter, and its ledger names the new files.
    """
    from dpllm.training.merge_run import merge_run

    folder = merge_run(run, output, num_labels)
    if as_json:
        show_json({"run": str(run), "merged": str(folder)})
    else:
        typer.echo(f"{folder}: the model of {run} with its adapter merged (check it with: dpllm verify {folder})")

"""`dpllm audit exposure`: how far canaries rank above texts that the model never saw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, one_line_errors, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit exposure audits/quickstart/run --canaries audits/quickstart/canaries.json"
    )(exposure)


@one_line_errors
def exposure(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.", show_default=False)],
    canaries: Annotated[Path, typer.Option(help="canaries.json of the audit.", show_default=False)],
    model: Annotated[
        Path | None, typer.Option(help="Another model of the run, such as a checkpoint; the run's own without it.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of a model that never saw the data; default: the run's starting model, if known."
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="The model was trained without privacy, and claims nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the exposure of the canaries of `dpllm audit prepare`: their rank among texts that were not trained on.

    A canary that was never seen has a median of 1 bit. Exposure is no bound on ε, and no verdict follows from it; that
    is `dpllm audit run`.
    """
    from rich.console import Console

    from dpllm.methods.attacks.exposure import exposure_of_run

    with Console(stderr=True).status("scoring the canaries"):
        found = exposure_of_run(run_folder, canaries, model, reference, plain)
    show(found.to_dict(), [("exposure", str(found))], f"Exposure in {run_folder}", as_json)

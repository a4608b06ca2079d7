"""`dpllm audit run`: audit a trained model with its canaries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, one_line_errors, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit run audits/quickstart/run --canaries audits/quickstart/canaries.json"
        "\n\nExample: dpllm audit run runs/plain --canaries audits/quickstart/canaries.json --plain"
    )(run)


@one_line_errors
def run(
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
    confidence: Annotated[float, typer.Option(help="Confidence of all lower bounds together.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Score every canary under the trained model, and print the lower bounds on ε.

    The command writes audit.json and audit.png into the folder of the run. The verdict is FAIL, with exit code 1, if a
    lower bound exceeds the ε of the ledger. If not, the claim is consistent with the scores, which is not a proof.
    """
    from rich.console import Console

    from dpllm.audit.run import audit_run

    with Console(stderr=True).status("scoring the canaries"):
        result = audit_run(run_folder, canaries, model, reference, plain, confidence)
    show(result.to_dict(), result.rows(), f"Audit of {run_folder}", as_json)
    if result.failed:
        raise typer.Exit(1)

"""`dpllm audit texts`: whether synthetic texts repeat the canaries that their model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, one_line_errors, show


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit texts synthetic --run audits/quickstart/run "
        "--canaries audits/quickstart/canaries.json"
    )(texts)


@one_line_errors
def texts(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="What `dpllm synthesize RUN --output` made.", show_default=False),
    ],
    run: Annotated[Path, typer.Option(help="The folder of the training, RUN.", show_default=False)],
    canaries: Annotated[Path, typer.Option(help="canaries.json of the audit.", show_default=False)],
    confidence: Annotated[float, typer.Option(help="Confidence of all lower bounds together.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Search released texts for canaries, and compute a lower bound on the ε of the data set.

    The run was trained on data of `dpllm audit prepare`, which included each canary by a fair coin. A canary's score is
    its longest run of words that a text repeats. The command writes audit.json and audit.png into the folder of the
    data set. Exit code 1: the claim is refuted. Otherwise it is consistent with the texts, which is not a proof.
    """
    from rich.console import Console

    from dpllm.methods.attacks.exposure import Exposure
    from dpllm.methods.attacks.texts import audit_texts
    from dpllm.methods.synthesize.echo import longest_runs
    from dpllm.methods.synthesize.texts import read_texts

    with Console(stderr=True).status("searching the texts"):
        released = read_texts(folder).texts
        result = audit_texts(folder, run, canaries, lambda own: longest_runs(released, own), confidence)
    words = {"exposure": str(Exposure(**result.details["exposure"]))} if "exposure" in result.details else {}
    rows = [(name, words.get(name, value)) for name, value in result.rows()]
    show(result.to_dict(), rows, f"Audit of the texts in {folder}", as_json)
    if result.failed:
        raise typer.Exit(1)

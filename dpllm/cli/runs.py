"""`dpllm report`, `dpllm verify`: what a run left behind, said and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dpllm.cli.common import AsJson, one_line_errors, show_json

OutputDir = Annotated[Path, typer.Argument(help="The folder of a run or of a checkpoint.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: dpllm report runs/quickstart")(report)
    app.command(epilog="Example: dpllm verify runs/quickstart")(verify)
    app.command(epilog="Example: dpllm adopt /scratch/moved/run")(adopt)


@one_line_errors
def report(
    output_dir: OutputDir,
    data_holder: Annotated[str | None, typer.Option(help="Note who holds the raw data.")] = None,
    audience: Annotated[str | None, typer.Option(help="Note who will see the released model.")] = None,
    other_uses: Annotated[
        str | None,
        typer.Option(help='Note other uses of the same data, such as tuning runs; "none" if there were none.'),
    ] = None,
    audit: Annotated[str | None, typer.Option(help="Note what an empirical audit of the model found.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check the ledger of a run, compute ε from it anew, and print the privacy report.

    With a note, which fills in what only people know, the report's files are written anew, and so are the open points
    of the model card.
    """
    from dpllm.report.model_card import add_notes
    from dpllm.report.statement import render_markdown

    given = {"data_holder": data_holder, "audience": audience, "other_uses": other_uses, "audit": audit}
    values = add_notes(output_dir, {name: text for name, text in given.items() if text is not None})
    typer.echo(json.dumps(values, ensure_ascii=False, allow_nan=False) if as_json else render_markdown(values))


@one_line_errors
def verify(output_dir: OutputDir, as_json: AsJson = False) -> None:
    """Compute everything that a run's report says anew from its ledger and plan, and fail on any difference."""
    from dpllm.report.verify import verification_rows
    from dpllm.report.verify import verify as verify_folder

    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is no folder")
    result = verify_folder(output_dir)
    if as_json:
        show_json(result.to_dict())
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for check, (what, words) in zip(result.checks, verification_rows(result), strict=True):
            console.print(f"{what}: {words}", style="" if check.ok else "bold red")
        failed = sum(not check.ok for check in result.checks)
        console.print(
            f"\n{output_dir} is what its ledger says."
            if result.ok
            else f"\n{failed} of {len(result.checks)} checks failed: do not rely on the report in {output_dir}."
        )
    if not result.ok:
        raise typer.Exit(1)


@one_line_errors
def adopt(output_dir: OutputDir, as_json: AsJson = False) -> None:
    """Declare that this copy of a run's folder is the one that goes on, and that no other copy does.

    Needed once before a resume where the folder was copied, moved to another file system or restored. The report then
    has an open point that says so: report and model card are written again where they exist.
    """
    from dpllm.report.model_card import adopt_run

    steps = adopt_run(output_dir)
    if as_json:
        show_json({"folder": str(output_dir), "steps_charged": steps})
    else:
        typer.echo(f"{output_dir} is adopted; its ledger charges {steps} steps.")

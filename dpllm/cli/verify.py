"""`dpllm verify`: is the report of a run true?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpllm import registry
from dpllm.cli.common import AsJson, command, show_json, wrapped

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run or of a checkpoint.", show_default=False)
]


@command("dpllm verify runs/quickstart")
def verify(
    output_dir: RunFolder,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="First declare that this copy of the folder is the one to continue, and no other: once before a "
            "resume, if it was copied, moved to another file system or restored. The report gets an open point.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute the numbers of a run's report from its ledger and plan, and fail on any difference.

    Files of the report and the model are compared with the hashes in the ledger. What could not be checked is named.
    """
    if not output_dir.is_dir():
        raise ValueError(f"{output_dir} is not a folder. Give the folder of a run or of a checkpoint")
    _require_run(output_dir)
    if adopt:
        from dpllm.report.model_card import adopt_run
        from dpllm.report.statement import JSON_FILE

        steps = adopt_run(output_dir)
        typer.echo(f"{output_dir} is adopted; its ledger charges {steps} steps.", err=as_json)
        if not (output_dir / JSON_FILE).is_file():  # the run has not ended, so there is no report to verify
            if as_json:
                show_json({"folder": str(output_dir), "steps_charged": steps})
            return
    if not as_json:  # the rest takes seconds
        typer.echo(f"checking {output_dir}: computing ε again from the ledger")
    from dpllm.report.verify import verification_rows
    from dpllm.report.verify import verify as verify_folder

    of_method = registry.folder_of_method(output_dir)
    if of_method is not None:
        verify_folder = registry.load(of_method.verify)
    result = verify_folder(output_dir)
    if as_json:
        show_json(result.to_dict())
    else:
        for check, (what, words) in zip(result.checks, verification_rows(result), strict=True):
            colour = {True: None, False: "red", None: "yellow"}[check.passed]
            typer.secho(wrapped(f"{what}: {words}"), fg=colour, bold=check.passed is False)
        failed = sum(not check.ok for check in result.checks)
        unchecked = sum(check.passed is None for check in result.checks)
        typer.echo(f"\n{len(result.checks) - failed - unchecked} ok · {failed} failed · {unchecked} not checked")
        typer.echo(
            f"{output_dir} matches its ledger."
            if result.ok
            else f"{failed} of {len(result.checks)} checks failed: do not rely on the report in {output_dir}."
        )
        if result.ok:
            typer.echo(wrapped(_left_to_people(output_dir)))
    if not result.ok:
        raise typer.Exit(1)


def _left_to_people(folder: Path) -> str:
    """Return what the checks leave to people: the report's open points, and whether the program that ran was honest."""
    from dpllm.report.statement import JSON_FILE

    report = folder / JSON_FILE
    points = len(json.loads(report.read_text(encoding="utf-8")).get("open_points", ())) if report.is_file() else 0
    left = f"{points} open point{'' if points == 1 else 's'}: do not release it yet (dpllm report). " if points else ""
    return f"{left}No check can tell who wrote these files, or whether the training did what they say."


def _require_run(folder: Path) -> None:
    """Check that a folder has at least one file of a run, or is the folder of a method.

    Raises:
        ValueError: it has none; folders of runs in it are named.
    """
    from dpllm.privacy.ledger import LEDGER_FILE
    from dpllm.privacy.plan import PLAN_FILE
    from dpllm.report.statement import JSON_FILE

    if any((folder / name).is_file() for name in (LEDGER_FILE, PLAN_FILE, JSON_FILE)):
        return
    if registry.folder_of_method(folder) is not None:
        return
    runs = sorted(str(file.parent) for file in folder.glob(f"*/{LEDGER_FILE}"))
    inside = f" Folders of runs in it: {', '.join(runs)}" if runs else ""
    raise ValueError(
        f"{folder} holds neither plan, ledger nor report, so it is not the folder of a run, and nothing in it has a "
        f"guarantee. Give the folder of a run or of a checkpoint.{inside}"
    )

"""`dpllm report` and `dpllm verify`: print and check the files of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dpllm import registry
from dpllm.cli.common import AsJson, one_line_errors, show_json

OutputDir = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a run or of a checkpoint.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: dpllm report runs/quickstart")(report)
    app.command(epilog="Example: dpllm verify runs/quickstart")(verify)


@one_line_errors
def report(
    output_dir: OutputDir,
    data_holder: Annotated[str | None, typer.Option(help="Note the holder of the raw data.")] = None,
    audience: Annotated[str | None, typer.Option(help="Note the audience of the released model.")] = None,
    other_uses: Annotated[
        str | None,
        typer.Option(help='Note other uses of the same data, such as tuning runs; "none" if there were none.'),
    ] = None,
    preprocessing: Annotated[
        str | None,
        typer.Option(
            help="Note what was computed from these records before the run, such as names of classes, class weights or "
            'the scale of targets, and what of it is public; "none" if there was nothing.'
        ),
    ] = None,
    audit: Annotated[str | None, typer.Option(help="Note the result of an empirical audit of the model.")] = None,
    trained_by: Annotated[str | None, typer.Option(help="Note who trained the model and answers for it.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Note the public name of the data set.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Note the name of the model that was fine-tuned.")] = None,
    license: Annotated[str | None, typer.Option(help="Note the license of the model, such as apache-2.0.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Note a language of the model, as an ISO code such as en. Repeatable.")
    ] = None,
    utility: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Note a figure of the model that may be released: measured on public data, or covered by ε. "
            "Repeatable.",
        ),
    ] = None,
    settle: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER=STATEMENT",
            help="Settle an open point of the report: its number, and what was checked. The ledger, the report and the "
            "card get the statement, with --by and the date. Repeatable.",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="With --settle: the name and role of the person who checked it.")
    ] = None,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write the report's files again, as this version of dpllm makes them, without a new note."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the ledger of a run, recompute ε from it, and print the privacy report.

    A note adds a fact that only people know; with one, the report's files and the open points of the model card are
    rewritten.
    """
    from dpllm.config.hub import is_language
    from dpllm.report.checklist import settled_by
    from dpllm.report.model_card import add_notes
    from dpllm.report.model_card import settle as settle_points
    from dpllm.report.pages import in_folder
    from dpllm.report.statement import notes_in, render_markdown

    wrong = [code for code in language or () if not is_language(code)]
    if wrong:
        raise ValueError(f"--language {wrong[0]!r} is no code of a language: give one such as en, de or pt-BR")
    given: dict[str, Any] = {"data_holder": data_holder, "audience": audience, "other_uses": other_uses}
    given |= {
        "preprocessing": preprocessing,
        "audit": audit,
        "trained_by": trained_by,
        "dataset": dataset,
        "base_model": base_model,
    }
    given |= {"license": license, "language": tuple(language) if language else None}
    if utility:
        given["utility"] = {**notes_in(output_dir).utility, **_figures(utility)}
    if bool(settle) != (by is not None):
        raise ValueError('--settle and --by belong together: --settle "1=each person has one row" --by "A. Meyer, DPO"')
    if settle and by is not None:
        # Before other notes, since these change the numbers of the points.
        settle_points(output_dir, settled_by(add_notes(output_dir, {}), settle), by)
    noted = {name: value for name, value in given.items() if value is not None}
    made = add_notes(output_dir, noted, write=write)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), ensure_ascii=False, allow_nan=False))
    else:
        typer.echo(in_folder(render_markdown(made), output_dir))
    if noted or settle:
        _say_noted(output_dir, [*noted, *(["settled points"] if settle else [])], len(made.open_points))


def _say_noted(output_dir: Path, noted: list[str], still_open: int) -> None:
    """Print the result of notes below the report, which is longer than a screen."""
    left = {0: "no point is open", 1: "1 point is open"}.get(still_open, f"{still_open} points are open")
    names = ", ".join(name.replace("_", " ") for name in noted)
    typer.echo(f"noted in {output_dir}: {names}; {left}.", err=True)


def _figures(given: list[str]) -> dict[str, str]:
    """Return figures of the form NAME=VALUE by name."""
    pairs = [one.partition("=") for one in given]
    for one, (name, equals, value) in zip(given, pairs, strict=True):
        if not (name.strip() and equals and value.strip()):
            raise ValueError(
                f'--utility {one!r} must be a name, =, and a value: --utility "accuracy on public data=0.83"'
            )
    return {name.strip(): value.strip() for name, _, value in pairs}


@one_line_errors
def verify(
    output_dir: OutputDir,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="First declare that this copy of the run's folder is the one to continue, and that no other copy is. "
            "Needed once before a resume if the folder was copied, moved to another file system or restored. The "
            "report then has an open point about it.",
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
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for check, (what, words) in zip(result.checks, verification_rows(result), strict=True):
            console.print(f"{what}: {words}", style={True: "", False: "bold red", None: "yellow"}[check.passed])
        failed = sum(not check.ok for check in result.checks)
        unchecked = sum(check.passed is None for check in result.checks)
        left = f" {unchecked} of {len(result.checks)} checks could not be made: see above." if unchecked else ""
        console.print(
            f"\n{output_dir} matches its ledger.{left}"
            if result.ok
            else f"\n{failed} of {len(result.checks)} checks failed: do not rely on the report in {output_dir}.{left}"
        )
    if not result.ok:
        raise typer.Exit(1)


def _require_run(folder: Path) -> None:
    """Make sure that a folder has at least one file of a run, or is one that a method makes.

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

"""`dpllm report`: the report of a run, and answers to its open points."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, command, show_json
from dpllm.cli.verify import RunFolder
from dpllm.config.values import nearest, number

if TYPE_CHECKING:
    from dpllm.report.models import PrivacyReport

KEYS = {
    "data_holder": "who holds the raw data",
    "audience": "who will see the released model",
    "other_uses": 'other uses of the same data, such as tuning runs; or "none"',
    "preprocessing": 'what was computed from the records before the run; or "none"',
    "audit": "the result of an empirical audit",
    "trained_by": "who trained the model and answers for it",
    "dataset": "public name of the data set",
    "base_model": "the model that was fine-tuned",
    "license": "of the model, such as apache-2.0",
    "language": "codes of its languages: en,de",
    "utility.NAME": "a figure that may be released, such as utility.accuracy=0.83",
    "NUMBER": "what was checked about this open point, with by",
    "by": "name and role of the person who checked it",
}
"""The keys of `dpllm report note`."""


@command("dpllm report runs/quickstart --open")
def report(
    output_dir: RunFolder,
    in_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser instead.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write its files again, as this version of dpllm makes them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the ledger of a run, recompute ε from it, and print the privacy report."""
    from dpllm.report.model_card import add_notes
    from dpllm.report.statement import HTML_FILE

    made = add_notes(output_dir, {}, write=write)
    if not in_browser:
        _show(output_dir, made, as_json)
        return
    page = output_dir / HTML_FILE
    if not page.is_file():
        raise ValueError(f"{page}: there is no such page yet: add --write")
    webbrowser.open(page.resolve().as_uri())
    typer.echo(f"opened {page}")


@command('dpllm report note runs/quickstart audience="the public" other_uses=none')
def note(
    output_dir: RunFolder,
    notes: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE",
            help="; ".join(f"{key}: {words}" for key, words in KEYS.items()),
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Note facts that only people know, or settle open points; report and model card are written again."""
    from dpllm.config.hub import is_language
    from dpllm.report.checklist import settled_by
    from dpllm.report.model_card import add_notes, settle
    from dpllm.report.statement import notes_in

    given = _read(notes)
    answers = [f"{key}={given.pop(key)}" for key in [*given] if key.isdecimal()]
    by = given.pop("by", None)
    if bool(answers) != (by is not None):
        raise ValueError('a settled point needs its person: 1="each person has one row" by="A. Meyer, DPO"')
    figures = {key.partition(".")[2]: _figure(key, given.pop(key)) for key in [*given] if key.startswith("utility.")}
    noted: dict[str, Any] = {**given}
    if "language" in given:
        noted["language"] = tuple(code.strip() for code in given["language"].split(","))
        if wrong := [code for code in noted["language"] if not is_language(code)]:
            raise ValueError(
                f"language: {wrong[0]!r} is no code of a language (BCP 47): give one such as en, de or pt-BR"
            )
    if figures:
        noted["utility"] = {**notes_in(output_dir).utility, **figures}
    if by is not None:  # before other notes, since these change the numbers of the points
        settle(output_dir, settled_by(add_notes(output_dir, {}), answers), by)
    made = add_notes(output_dir, noted)
    _show(output_dir, made, as_json)
    left = {0: "no point is open", 1: "1 point is open"}.get(len(made.open_points))
    names = ", ".join([*(name.replace("_", " ") for name in noted), *(["settled points"] if answers else [])])
    typer.echo(f"noted in {output_dir}: {names}; {left or f'{len(made.open_points)} points are open'}.", err=True)


def _read(notes: list[str]) -> dict[str, str]:
    """Return the values of the notes by their keys.

    Raises:
        ValueError: one is not KEY=VALUE, is given twice, or has a key that is no note.
    """
    given: dict[str, str] = {}
    for one in notes:
        key, equals, value = (part.strip() for part in one.partition("="))
        if not equals or not value:
            raise ValueError(f'{one!r} must be KEY=VALUE, such as audience="the public"')
        if key not in KEYS and not key.isdecimal() and not key.removeprefix("utility.") != key:
            raise ValueError(f"{key!r} is no note{nearest(key, KEYS) or '.'} Known are {', '.join(KEYS)}")
        if key in ("utility.", "utility.NAME", "NUMBER"):
            raise ValueError(f"{one!r}: put the name of the figure, or the number of the point, into the key")
        if key in given:
            raise ValueError(f"{key} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    return given


def _figure(key: str, text: str) -> float:
    """Return the number of a figure.

    Raises:
        ValueError: it is not a finite number.
    """
    try:
        return number(key, float(text))
    except ValueError as error:
        raise ValueError(f"{key}={text}: a figure is a finite number, such as {key}=0.83") from error


def _show(output_dir: Path, made: PrivacyReport, as_json: bool) -> None:
    from dpllm.report.pages import in_folder
    from dpllm.report.statement import render_markdown

    if as_json:
        show_json(made.to_dict())
    else:
        typer.echo(in_folder(render_markdown(made), output_dir))

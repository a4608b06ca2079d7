"""Shared parts of all commands: options, output, and errors in one line."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dpllm.config.json_values import json_value
from dpllm.config.mistakes import print_any_character, tell

_Command = TypeVar("_Command", bound=Callable[..., None])

_RECIPE = typer.Argument(
    metavar="RECIPE", help="A recipe file, or the name of a shipped recipe (dpllm recipes).", show_default=False
)
RecipeName = Annotated[str, _RECIPE]
RecipePath = Annotated[Path, _RECIPE]
AnyRecipe = Annotated[Path | None, _RECIPE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Replace values of the recipe: privacy.epsilon=3.", show_default=False),
]
SamplingRate = Annotated[float, typer.Option(help="q: expected batch size over number of units.")]
Steps = Annotated[int, typer.Option(help="T: number of steps.")]
Delta = Annotated[float, typer.Option(help="δ, below 1/N; usual is 1/(10 N).")]
NumUnits = Annotated[int | None, typer.Option(help="N: number of units. Needed with --max-batch-size.")]
MaxBatchSize = Annotated[
    int | None, typer.Option(help="Largest number of units in one step. Without it: plain Poisson sampling.")
]
RowsPerUnit = Annotated[
    int, typer.Option(help="k: rows of one unit that are drawn and clipped singly; 1 when whole units are drawn.")
]
Adjacency = Annotated[
    str, typer.Option(help="Definition of neighbours: zero-out (a unit against nothing) or replace-one.")
]
METHODS_PANEL = "Methods (experimental)"
EXPERIMENTAL = (
    "Experimental: options, recipes and files of this command may change between versions. Its guarantee is held to "
    "the same rules as that of training."
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def fill_help_screens(app: typer.Typer) -> None:
    """Give each command its docstring with every paragraph on one line.

    The help screen breaks lines at its own width, and keeps those of the source.

    Args:
        app: with all its commands and groups.
    """
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            fill_help_screens(group.typer_instance)


def mark_experimental(app: typer.Typer) -> None:
    """Say of each command of a method that it is experimental, on its own help screen and in the list of commands.

    Args:
        app: with all its commands and groups, after `fill_help_screens`.
    """
    for command in app.registered_commands:
        command.help = f"{command.help}\n\n{EXPERIMENTAL}"
        command.rich_help_panel = METHODS_PANEL
    for group in app.registered_groups:
        group.rich_help_panel = METHODS_PANEL
        if group.typer_instance is not None:
            mark_experimental(group.typer_instance)


def one_line_errors(command: _Command) -> _Command:
    """Turn a user's mistake into one line and exit code 2, a bug into a traceback and exit code 1."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        print_any_character()
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # any error ends the command, and `tell` prints the traceback of a bug
            raise typer.Exit(tell(error, lambda text: typer.echo(text, err=True))) from error

    return guarded  # type: ignore[return-value]


def show(values: Mapping[str, Any], rows: Iterable[tuple[str, str]], title: str, as_json: bool) -> None:
    """Print one result: names and values for people, or JSON."""
    if as_json:
        show_json(values)
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def show_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object, an infinite number as "inf"."""
    typer.echo(json.dumps(json_value(values), ensure_ascii=False, allow_nan=False))


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str, left: Iterable[int] = (0,)) -> None:
    """Print a table with a header, numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)

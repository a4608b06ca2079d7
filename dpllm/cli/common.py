"""What all commands share: help screens, options, output, and errors in one line."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from dpllm.config.extras import hush
from dpllm.config.mistakes import print_any_character, tell
from dpllm.config.values import json_value

_Command = TypeVar("_Command", bound=Callable[..., None])

_RECIPE = typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.", show_default=False)
RecipeName = Annotated[str, _RECIPE]
RecipePath = Annotated[Path, _RECIPE]
AnyRecipe = Annotated[Path | None, _RECIPE]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Replaces values of the recipe.", show_default=False),
]
SamplingRate = Annotated[float | None, typer.Option(help="q: expected batch size over number of units.")]
Steps = Annotated[int | None, typer.Option(help="T: number of steps.")]
Adjacency = Annotated[str, typer.Option(help="Neighbours: zero-out (a unit against nothing) or replace-one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
WIDTH, WIDEST = 80, 120
"""Columns where there is no terminal, and the most of a line."""
_VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def command(*examples: str) -> Callable[[_Command], _Command]:
    """Return a decorator for a command: its mistakes end in one line, and its help screen has the examples."""

    def decorate(function: _Command) -> _Command:
        guarded = one_line_errors(function)
        guarded.examples = examples  # type: ignore[attr-defined]
        return guarded

    return decorate


def add(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Add a decorated function as a command; the default name is that of the function."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    app.command(
        function.__name__ if name is None else name,
        cls=Command,
        help="\n\n".join(" ".join(one.split()) for one in paragraphs),
        epilog="\n".join(function.examples),  # type: ignore[attr-defined]
    )(function)


OWN = "(own)"
"""Name of the command of a group that is called by the group's name alone."""


class Group(TyperGroup):
    """Commands of one topic. A command named `OWN` gets all arguments that begin with no other command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `OWN` before words that name no command."""
        if OWN in self.commands and (not args or args[0] not in self.commands):
            args = [OWN, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command, its name as it was typed, and its words."""
        name, found, rest = super().resolve_command(ctx, args)
        return "" if name == OWN else name, found, rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write one line for each command; with one named `OWN`, `Command.format_help` writes the screen."""
        formatter.write(f"{ctx.command_path} COMMAND\n\n{wrapped(self.help or '')}\n\n{listed(self._rows())}\n")
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")

    def _rows(self) -> list[tuple[str, str]]:
        return [(name, str(one.help).partition("\n")[0]) for name, one in self.commands.items() if name != OWN]


class Command(TyperCommand):
    """A command whose help screen is short: usage, purpose, one line for each argument and option, an example."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the words of the command, its arguments, and the options that it needs."""
        formatter.write(f"Usage: {self._usage(ctx)}\n")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the screen; options of a panel are named in one line."""
        shown: list[Any] = [one for one in self.get_params(ctx) if one.name != "help"]
        panels: dict[str, list[str]] = {}
        rows = []
        for one in shown:
            if one.rich_help_panel:
                panels.setdefault(one.rich_help_panel, []).append("/".join([*one.opts[:1], *one.secondary_opts]))
            else:
                rows.append((self._name(one), self._about(one)))
        group = ctx.parent.command if ctx.parent is not None and self.name == OWN else None
        more = [] if group is None else group._rows()
        parts = [
            self._usage(ctx),
            wrapped(str(self.help or "")),
            listed([*rows, *((name, " ".join(options)) for name, options in panels.items())]),
            *([listed(more)] if more else []),
            "\n".join(example_lines(str(self.epilog or "").splitlines())),
        ]
        formatter.write("\n\n".join(part for part in parts if part) + "\n")

    def _usage(self, ctx: Any) -> str:
        words = " ".join(ctx.command_path.split())
        pieces = []
        for one in self.get_params(ctx):
            if one.param_type_name == "argument":
                name = one.metavar or str(one.name).upper()
                pieces.append((name if one.required else f"[{name}]") + ("…" if one.nargs == -1 else ""))
            elif one.required:
                pieces.append(self._name(one))
        return "\n    ".join(_fold(" ".join([words, *pieces, "[options]"]), WIDTH - 4))

    def _name(self, one: Any) -> str:
        if one.param_type_name == "argument":
            return str(one.metavar or str(one.name).upper())
        names = "/".join([*sorted(one.opts, key=len, reverse=True)[:1], *one.secondary_opts])
        short = next((name for name in one.opts if not name.startswith("--")), None)
        names = names if short is None else f"{short}, {names}"
        return names if one.is_flag else f"{names} {one.metavar or self._value(one)}"

    def _value(self, one: Any) -> str:
        annotation = (
            inspect.signature(cast(Callable[..., None], self.callback), eval_str=True).parameters[one.name].annotation
        )
        kinds = str(getattr(annotation, "__origin__", annotation))
        return next((word for kind, word in _VALUES.items() if kind.__name__ in kinds), "TEXT")

    @staticmethod
    def _about(one: Any) -> str:
        about = (one.help or "").rstrip(".")
        if isinstance(one.show_default, str):
            return f"{about} ({one.show_default})"
        if not one.show_default or one.default is None or isinstance(one.default, bool):
            return about
        return f"{about} ({one.default})"


def example_lines(examples: Sequence[str]) -> list[str]:
    """Return command lines for a help screen; one that is longer than a line is continued by a backslash."""
    room = WIDTH - len("example: ")
    lines = [one if len(one) <= room else " \\\n           ".join(_fold(one, room - 4)) for one in examples]
    return [f"{'example:' if place == 0 else '        '} {line}" for place, line in enumerate(lines)]


def one_line_errors(command: _Command) -> _Command:
    """Turn a user's mistake into one line and exit code 2, a bug into a traceback and exit code 1."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        print_any_character()
        hush()
        try:
            command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # any error ends the command, and `tell` prints the traceback of a bug
            raise typer.Exit(tell(error, lambda text: typer.echo(text, err=True))) from error

    return guarded  # type: ignore[return-value]


def width() -> int:
    """Return the columns of the screen; 80 in a pipe."""
    return max(40, min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST))


def _fold(text: str, columns: int) -> list[str]:
    """Return the lines of a text, broken between words only."""
    return [
        line
        for paragraph in text.split("\n")
        for line in textwrap.wrap(paragraph, columns, break_long_words=False, break_on_hyphens=False) or [""]
    ]


def wrapped(text: str, indent: int = 0) -> str:
    """Return a text in lines of the screen's width; no word and no number is broken."""
    return "\n".join(" " * indent + line for line in _fold(text, width() - indent))


def listed(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and their values or words, indented; a name that is longer than a third has a line of its own."""
    pairs = list(rows)
    most = width() // 3
    column = max((len(name) for name, _ in pairs if len(name) <= most), default=0)
    lines = []
    for name, value in pairs:
        first, *more = _fold(value, width() - column - 4)
        head = f"  {name:<{column}}  "
        if len(name) > column:
            lines.append(f"  {name}")
            head = " " * (column + 4)
        lines += [f"{head}{first}".rstrip(), *(" " * (column + 4) + line for line in more)]
    return "\n".join(lines)


def show(values: Mapping[str, Any], rows: Iterable[tuple[str, str]], title: str, as_json: bool) -> None:
    """Print one result: names and values for people, or JSON."""
    if as_json:
        show_json(values)
    else:
        typer.echo(f"{wrapped(title)}\n{listed(rows)}")


def show_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object, an infinite number as "inf"."""
    typer.echo(json.dumps(json_value(values), ensure_ascii=False, allow_nan=False))


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str, left: Iterable[int] = (0,)) -> None:
    """Print a table with a header, numbers to the right; cells and headers are broken between words only.

    Args:
        head: the names of the columns.
        rows: their cells.
        title: printed above; "": none.
        left: the columns of words; the widest of them are narrowed to the screen.
    """
    lines = [list(row) for row in rows]
    words, columns = set(left), range(len(head))
    cells = [[line[place] for line in lines] for place in columns]
    least = [max(map(len, [*head[place].split(), ""])) for place in columns]
    widths = [max(least[place], *(len(cell) for cell in cells[place]), 0) for place in columns]
    for place in columns:
        if place in words:
            least[place] = max([least[place], *(len(word) for cell in cells[place] for word in cell.split())])
    while (over := sum(widths) + 2 * len(head) - 2 - width()) > 0:
        spare = {place: widths[place] - least[place] for place in words if widths[place] > least[place]}
        if not spare:
            break
        widest = max(spare, key=lambda place: widths[place])
        widths[widest] -= min(over, spare[widest], max(1, widths[widest] // 4))
    if title:
        typer.echo(wrapped(title))
    for line in [list(head), *lines]:
        parts = [_fold(cell, widths[place]) for place, cell in enumerate(line)]
        for number in range(max(map(len, parts))):
            row = [part[number] if number < len(part) else "" for part in parts]
            aligned = [
                f"{cell:<{widths[place]}}" if place in words else f"{cell:>{widths[place]}}"
                for place, cell in enumerate(row)
            ]
            typer.echo("  ".join(aligned).rstrip())

"""`dpllm methods`: the commands of the installed methods, which are experimental."""

from __future__ import annotations

import typer

from dpllm import registry
from dpllm.cli.common import AsJson, Group, Overrides, RecipeName, add, command

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Releases of something else than a fine-tuned model, and attacks on releases. Experimental: options, recipes "
    "and files may change between versions. Each guarantee is held to the same rules as that of training.",
)


def summary() -> str:
    """Return the names of the commands, in lines for the first screen of the program."""
    names = ["(experimental)", *(str(one.name) for one in app.registered_commands)]
    lines, line = [], ""
    for name in names:
        if len(line) + len(name) > 56:
            lines.append(line)
            line = ""
        line += name + ("" if name == names[-1] else " " if name == names[0] else ", ")
    return "\n".join([*(one.rstrip() for one in lines), line])


def _add_carried_out(made: typer.Typer, method: registry.Method) -> None:
    """Add the command that carries out a method's recipe; the function behind it is imported when it is called."""

    def carry_out(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
        registry.load(str(method.carry_out))(method.name, recipe, overrides or [], as_json)

    carry_out.__doc__ = method.help
    add(made, command(*method.examples)(carry_out), method.name)


def _add_all() -> None:
    """Add the commands of all methods; a broken method is named and left out."""
    for method in registry.methods():
        made = typer.Typer()
        with registry.leave_out_broken(method.name):
            if method.carry_out is not None:
                _add_carried_out(made, method)
            for place in method.commands:
                add(made, registry.load(place))
            app.registered_commands += made.registered_commands
    for error in registry.BROKEN.values():
        typer.echo(f"warning: {error}", err=True)


app.callback()(lambda: None)
_add_all()

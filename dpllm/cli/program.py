"""The command line: a run from its recipe to its publication, and its cost before and after it.

Place in the flow: a thin layer over training, accounting, plan, budget and report; nothing is computed here. With
`--json` a command prints only one JSON object. A mistake is one line, `error: ...`, on the error stream, with exit code
2; a failed check (`dpllm verify`) has exit code 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dpllm
from dpllm import registry
from dpllm.cli import auditing, budgets, cost, generating, planning, recipes, releasing, runs, starting, training
from dpllm.cli.common import AsJson, Overrides, RecipeName, fill_help_screens, mark_experimental, one_line_errors

OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", help="The folder of the run, in place of the recipe's output_dir.")
]

app = typer.Typer(
    name="dpllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private fine-tuning of language models: the run, and its cost before and after it.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpllm {dpllm.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Differentially private fine-tuning of language models: the run, and its cost before and after it."""


starting.register(app)
training.register(app)
recipes.register(app)
cost.register(app)
planning.register(app)
runs.register(app)
releasing.register(app)
generating.register(app)
app.add_typer(budgets.app, name="budget")
app.add_typer(auditing.app, name="audit")
fill_help_screens(app)


def _add_command(goal: typer.Typer, method: registry.Method) -> None:
    """Add the command that carries out a method's recipe; the function behind it is imported when it is called."""

    def command(
        recipe: RecipeName, overrides: Overrides = None, output_dir: OutputDir = None, as_json: AsJson = False
    ) -> None:
        registry.load(str(method.carry_out))(method.name, recipe, overrides or [], output_dir, as_json)

    command.__doc__ = method.help
    epilog = "\n\n".join(f"Example: {line}" for line in method.examples)
    goal.command(method.name, epilog=epilog)(one_line_errors(command))


def _add_methods() -> None:
    """Add the commands of the installed methods, marked as experimental; a broken method is named and left out."""
    for method in registry.methods():
        of_method, of_audit = typer.Typer(), typer.Typer()
        with registry.leave_out_broken(method.name):
            if method.carry_out is not None:
                _add_command(of_method, method)
            for register in method.commands:
                registry.load(register)(of_method)
            for register in method.audit_commands:
                registry.load(register)(of_audit)
            for made, goal in ((of_method, app), (of_audit, auditing.app)):
                fill_help_screens(made)
                mark_experimental(made)
                goal.registered_commands += made.registered_commands
                goal.registered_groups += made.registered_groups
    for error in registry.BROKEN.values():
        typer.echo(f"warning: {error}", err=True)


_add_methods()


def main() -> None:
    """Run the command line."""
    app()

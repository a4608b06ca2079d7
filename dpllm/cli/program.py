"""The program `dpllm` with its commands and first screen.

Each command has a file of its name. With `--json` a command prints one JSON object only. A mistake is one line,
`error: ...`, on the error stream, with exit code 2; a failed check (`dpllm verify`) has exit code 1.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import dpllm
from dpllm.cli import (
    audit,
    budget,
    epsilon,
    generate,
    init,
    merge,
    methods,
    plan,
    plan_suggest,
    plan_sweep,
    push,
    recipes,
    report,
    train,
    verify,
)
from dpllm.cli.common import OWN, Group, add

GROUPS = {
    "start": {
        "init": "look at your records, write a recipe",
        "recipes": "list, show, copy the shipped ones",
        "plan": "what a recipe costs: ε, steps, memory, time\nplan sweep · plan memory · plan suggest",
    },
    "run": {"train": "recipe to model and report"},
    "after": {
        "verify": "is the report true?  ok · failed · not checked",
        "report": "open the report, or answer its open points (report note)",
        "generate": "texts, or a chat (--chat)",
        "merge": "adapter into the base",
        "push": "to the Hub, with its guarantee",
    },
    "numbers": {
        "epsilon": "of a run, several, or settings; σ for a target (--target)",
        "budget": "what is left for a data set",
    },
    "evidence": {"audit": "attack a run: canaries, one run, gradient releases"},
    "more": {"methods": ""},
}
"""The first screen: topic -> command -> what it does."""


class Program(Group):
    """The program, whose first screen has the commands by topic."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the screen."""
        formatter.write(f"dpllm {dpllm.__version__} · private fine-tuning of language models\n\n")
        for topic, commands in GROUPS.items():
            for number, (name, words) in enumerate(commands.items()):
                first, *more = (words or methods.summary()).split("\n")
                formatter.write(f"{topic if number == 0 else '':<8} {name:<9} {first}\n")
                formatter.write("".join(f"{'':<19}{line}\n" for line in more))
        formatter.write("\ndpllm COMMAND --help explains a command; dpllm --version prints the version\n")


app = typer.Typer(
    name="dpllm",
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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
    """Private fine-tuning of language models."""


def _group(name: str, words: str, commands: dict[str, Any]) -> None:
    """Add commands under a name; the one named `OWN` is that of the name alone."""
    group = typer.Typer(cls=Group, no_args_is_help=OWN not in commands, help=words)
    group.callback()(lambda: None)
    for own, function in commands.items():
        add(group, function, own)
    app.add_typer(group, name=name)


for one in (init.init, recipes.recipes, train.train, verify.verify, generate.generate, merge.merge, push.push):
    add(app, one)
add(app, epsilon.epsilon)
_group(
    "plan",
    "What a recipe costs.",
    {OWN: plan.plan, "sweep": plan_sweep.sweep, "memory": plan.memory, "suggest": plan_suggest.suggest},
)
_group("report", "The report of a run.", {OWN: report.report, "note": report.note})
_group(
    "budget",
    "The ε that all runs on a data set may cost together: each run with privacy.budget_file charges it first.",
    {"create": budget.create, "show": budget.show_budget, "settle": budget.settle},
)
_group(
    "audit",
    "Attack the claim of a run: lower bounds on ε by canaries, each included by a fair coin.",
    {"prepare": audit.prepare, "run": audit.run, "gradient": audit.gradient},
)
app.add_typer(methods.app, name="methods")


def main() -> None:
    """Run the command line."""
    app()

"""The command line: the cost of a run, before and after it.

Place in the flow: a thin layer over accounting, plan, budget and report; nothing is computed here. With `--json` a
command prints only one JSON object. A mistake is one line, `error: ...`, on the error stream, with exit code 2; a
failed check (`dpllm verify`) has exit code 1.
"""

from __future__ import annotations

import typer

from dpllm.cli import auditing, budgets, cost, planning, runs, training, tuning

app = typer.Typer(
    name="dpllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private fine-tuning of language models: the cost of a run, before and after it.",
)
training.register(app)
cost.register(app)
planning.register(app)
runs.register(app)
tuning.register(app)
app.add_typer(budgets.app, name="budget")
app.add_typer(auditing.app, name="audit")


def main() -> None:
    """Run the command line."""
    app()

"""`dpllm audit`: attacks on the claim of a run."""

from __future__ import annotations

import typer

from dpllm.cli.auditing import gradient, prepare, run

app = typer.Typer(
    no_args_is_help=True,
    help="Attack the claim of a run: canaries by coin flips, lower bounds on ε, and the highest bound possible.",
)
prepare.register(app)
run.register(app)
gradient.register(app)

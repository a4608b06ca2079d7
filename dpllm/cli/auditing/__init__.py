"""`dpllm audit`: attacks on what a run claims."""

from __future__ import annotations

import typer

from dpllm.cli.auditing import attack, gradient, prepare, run

app = typer.Typer(
    no_args_is_help=True,
    help="Attack what a run claims: canaries by coin flips, lower bounds on ε, and the most that they could show.",
)
prepare.register(app)
run.register(app)
attack.register(app)
gradient.register(app)

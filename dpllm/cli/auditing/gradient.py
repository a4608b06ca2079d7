"""`dpllm audit gradient`: measure the releases of the private steps of this installation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, Overrides, one_line_errors, show
from dpllm.config.launched import process_number


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit gradient --config quickstart privacy.noise=independent\n\n"
        "Example, with several processes: accelerate launch --config_file ddp.yaml -m dpllm.cli audit gradient "
        "--config quickstart privacy.noise=independent"
    )(gradient)


@one_line_errors
def gradient(
    config: Annotated[Path, typer.Option(help="The recipe; its data are not read.", show_default=False)],
    overrides: Overrides = None,
    blocks: Annotated[int, typer.Option(help="R: independent repetitions, each with its own coins.")] = 1000,
    canaries: Annotated[
        int, typer.Option(help="Canaries, each included by a fair coin in each block; one per block shows most.")
    ] = 1,
    base: Annotated[int, typer.Option(help="Units that are always present.")] = 2,
    steps: Annotated[int, typer.Option(help="T: steps of a block; the claim is the ε of these steps.")] = 1,
    sampling_rate: Annotated[float, typer.Option(help="q; q times the units must be a whole number.")] = 1.0,
    noise_multiplier: Annotated[float, typer.Option(help="σ of the audited steps.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ of the claim.")] = 1e-5,
    tokens: Annotated[int, typer.Option(help="Tokens of a canary's row.")] = 16,
    confidence: Annotated[float, typer.Option(help="A sound stack passes with at least this probability.")] = 0.95,
    output: Annotated[Path | None, typer.Option(help="Folder for audit.json.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Take private steps with canaries of known gradients, and compute a lower bound on ε from their releases.

    The rows are random tokens, and the model hardly changes. If the recipe releases an average of the weights
    (train.average), each block is a run of its own, which takes longer, and its average is read too. Exit code 1: the
    lower bound is above ε, so a part of this installation breaks the guarantee.
    """
    from rich.console import Console
    from rich.progress import Progress

    from dpllm.audit.gradient_recipe import Settings, audit_recipe
    from dpllm.config import load_recipe

    settings = Settings(
        blocks=blocks,
        canaries=canaries,
        base=base,
        steps=steps,
        sampling_rate=sampling_rate,
        noise_multiplier=noise_multiplier,
        delta=delta,
        tokens=tokens,
        confidence=confidence,
    )
    quiet = as_json or process_number("RANK") > 0
    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("blocks", total=blocks)
        result = audit_recipe(load_recipe(config, overrides or []), settings, lambda: progress.advance(task))
    if result is None:
        return
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        result.save(output)
    show(result.to_dict(), result.rows(), "Gradient canaries", as_json)
    if result.failed:
        raise typer.Exit(1)

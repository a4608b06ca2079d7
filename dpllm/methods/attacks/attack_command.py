"""`dpllm audit attack`: membership inference and extraction on the records that a model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, one_line_errors, show_json, show_table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: dpllm audit attack runs/quickstart --records 1000 --shadows 16")(attack)


@one_line_errors
def attack(
    run_folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A model folder with its recipe.yaml; private or not.", show_default=False),
    ],
    reference: Annotated[
        str | None,
        typer.Option(help="A model that saw none of the records. Default: the starting model of the training."),
    ] = None,
    records: Annotated[
        int, typer.Option(help="Largest number of members, and of held-out records; an FPR of 0.1 % needs 1000.")
    ] = 1000,
    shadows: Annotated[int, typer.Option(help="Run LiRA with this many shadow adapters; they are trained here.")] = 0,
    shadow_epochs: Annotated[float, typer.Option(help="Passes of each shadow over its half of the records.")] = 4.0,
    extract: Annotated[int, typer.Option(help="Texts sampled per kind of prompt; 0: no extraction.")] = 200,
    span: Annotated[int, typer.Option(help="Consecutive tokens that count as verbatim.")] = 20,
    prefix: Annotated[int, typer.Option(help="Target tokens of a record given before it must be continued.")] = 10,
    new_tokens: Annotated[int, typer.Option(help="Largest number of tokens of a sampled text.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")] = 40,
    word: Annotated[str, typer.Option(help="The word that one kind of prompt repeats.")] = "company",
    seed: Annotated[int, typer.Option(help="Seed of the draw of records, the samples and the shadows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack a finished model: test whether it reveals its training records, and whether it writes them verbatim.

    Members and non-members are drawn at random from the records that the recipe names. The share of members found is
    printed beside the share that the ledger allows for any attack. The command writes attacks.json and attacks.png into
    the folder. They come from private records, and ε does not cover them.
    """
    from rich.console import Console

    from dpllm.methods.attacks.attack_figure import plot_attacks
    from dpllm.methods.attacks.attacks import (
        PICTURE_FILE,
        AttackSettings,
        attack_facts,
        attack_folder,
        attack_tables,
    )
    from dpllm.methods.attacks.extraction import ExtractionSettings
    from dpllm.methods.attacks.lira import ShadowTraining

    extraction = None
    if extract:
        extraction = ExtractionSettings(
            num_samples=extract,
            new_tokens=new_tokens,
            span=span,
            prefix=prefix,
            temperature=temperature,
            top_k=top_k,
            word=word,
            seed=seed,
        )
    settings = AttackSettings(
        num_records=records,
        reference=reference,
        shadows=shadows,
        shadow_training=ShadowTraining(num_epochs=shadow_epochs),
        extraction=extraction,
        seed=seed,
    )
    with Console(stderr=True).status("reading") as status:
        report = attack_folder(run_folder, settings, status.update)
    path = report.save(run_folder)
    picture = plot_attacks({str(run_folder): report}, run_folder / PICTURE_FILE)
    if as_json:
        show_json(report.to_dict())
        return
    for title, head, rows in attack_tables(report):
        typer.echo(title)
        show_table(head, rows, "")
        typer.echo("")
    facts = [*attack_facts(report), ("written", f"{path}, {picture}")]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        typer.echo(f"{name:<{width}}  {value}")

"""`dpllm audit prepare`: data with canaries, and the recipe that trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, Overrides, one_line_errors, show
from dpllm.privacy.rounding import format_delta, up

if TYPE_CHECKING:
    from dpllm.audit.prepare import Prepared


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit prepare --config quickstart --output audits/quickstart"
        "\n\nExample: dpllm audit prepare --config gpt2_e2e_lora --output audits/e2e --kind sampled "
        "privacy.target_epsilon=3"
    )(prepare)


@one_line_errors
def prepare(
    config: Annotated[Path, typer.Option(help="The recipe to audit.", show_default=False)],
    output: Annotated[Path, typer.Option(help="A new folder for data, recipe and canaries.", show_default=False)],
    overrides: Overrides = None,
    canaries: Annotated[int, typer.Option(help="m: number of canaries, each with its own coin.")] = 1000,
    kind: Annotated[
        str,
        typer.Option(
            help="random-tokens; rare-suffix (public text, then rare tokens); sampled (written by the model at a high "
            "temperature)."
        ),
    ] = "random-tokens",
    length: Annotated[int | None, typer.Option(help="Tokens of a canary's own text; at most 32 without it.")] = None,
    records_per_user: Annotated[
        int | None, typer.Option(help="User level: different records of one canary user; at most 8 without it.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="User level: how often each of them is in the data.")] = 1,
    prefixes: Annotated[
        Path | None,
        typer.Option(
            help="For rare-suffix: a file with one public text per line; the recipe's public text without it."
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="For sampled: folder or Hub id of a model; the recipe's model.name without it.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="For sampled: 0.8 or more.")] = 1.0,
    candidates: Annotated[
        int | None,
        typer.Option(help="Further texts of the kind, without coins, for exposure; default: the number of canaries."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put canaries into the data of a recipe, each by a secret fair coin, and write the recipe that trains on them.

    Then train with that recipe, and audit with `dpllm audit run`. canaries.json is a secret until then: it lists the
    included canaries, and only its owner can read it. The folder holds a copy of the private records.
    """
    from dpllm.audit.prepare import CanaryOptions, read_prefixes
    from dpllm.audit.prepare import prepare as prepare_audit
    from dpllm.config import load_recipe

    options = CanaryOptions(
        num=canaries,
        kind=kind,
        length=length,
        records_per_user=records_per_user,
        repetitions=repetitions,
        prefixes=None if prefixes is None else read_prefixes(prefixes),
        sampler=sampler,
        temperature=temperature,
        num_candidates=candidates,
    )
    prepared = prepare_audit(load_recipe(config, overrides or ()), output, options)
    show(_values(prepared), _rows(prepared), f"Audit of {config}", as_json)


def _values(prepared: Prepared) -> dict[str, Any]:
    """Return the values for programs."""
    made = prepared.made
    return {
        "canaries": len(made.canaries),
        "kind": made.kind,
        "unit": made.unit,
        "records_per_canary": _records_per_canary(prepared),
        "num_units": made.num_units,
        "delta": made.delta,
        "ceiling": prepared.ceiling,
        "power": dict(prepared.power),
        "recipe": str(prepared.recipe_path),
        "data": str(prepared.folder / made.data_name),
        "secret": str(prepared.secret_path),
        "run_folder": str(prepared.run_folder),
        "created_at": made.created_at,
    }


def _rows(prepared: Prepared) -> list[tuple[str, str]]:
    """Return the rows for people."""
    from dpllm.audit.power import power_in_words

    made, per_unit = prepared.made, _records_per_canary(prepared)
    return [
        ("canaries m", f"{len(made.canaries):,} ({made.kind}), {per_unit} record(s) each, in one {made.unit}"),
        ("included", "each by its own fair coin; the coins are secret"),
        ("units N, with those included", f"{made.num_units:,}"),
        (
            "ceiling",
            f"ε ≥ {up(prepared.ceiling, 2)} at δ = {format_delta(made.delta)}: the most this many can show, at 95 %",
        ),
        *([("power", power_in_words(prepared.power))] if prepared.power else []),
        ("data", str(prepared.folder / made.data_name)),
        ("secret until the audit", f"{prepared.secret_path} (mode 0600)"),
        ("train", f"dpllm train {prepared.recipe_path}"),
        ("then", f"dpllm audit run {prepared.run_folder} --canaries {prepared.secret_path}"),
    ]


def _records_per_canary(prepared: Prepared) -> int:
    return len(prepared.made.canaries[0].records) * prepared.made.repetitions

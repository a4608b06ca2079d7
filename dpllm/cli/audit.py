"""`dpllm audit`: attacks on the claim of a run, by canaries and by the releases of private steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, Overrides, command, show
from dpllm.config.launched import process_number
from dpllm.privacy.rounding import format_delta, up

if TYPE_CHECKING:
    from dpllm.audit.prepare import Prepared

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.", show_default=False)]
CanariesFile = Annotated[Path, typer.Option(help="canaries.json of the audit.", show_default=False)]
Model = Annotated[
    Path | None, typer.Option(help="Another model of the run, such as a checkpoint; the run's own without it.")
]
Reference = Annotated[
    str | None,
    typer.Option(
        help="Folder or Hub id of a model that never saw the data; default: the run's starting model, if known."
    ),
]
Plain = Annotated[bool, typer.Option("--plain", help="The model was trained without privacy, and claims nothing.")]


@command("dpllm audit prepare --config quickstart --output audits/quickstart")
def prepare(
    config: Annotated[Path, typer.Option(help="The recipe to audit.", show_default=False)],
    output: Annotated[Path, typer.Option(help="A new folder for data, recipe and canaries.", show_default=False)],
    overrides: Overrides = None,
    canaries: Annotated[int, typer.Option(help="m: number of canaries, each with its own coin.")] = 1000,
    kind: Annotated[
        str,
        typer.Option(help="random-tokens; rare-suffix: public text, then rare tokens; sampled: written by the model."),
    ] = "random-tokens",
    length: Annotated[int | None, typer.Option(help="Tokens of a canary; at most 32 without it.")] = None,
    records_per_user: Annotated[
        int | None, typer.Option(help="User level: records of a canary user; at most 8.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="User level: copies of each of them.")] = 1,
    prefixes: Annotated[
        Path | None,
        typer.Option(help="For rare-suffix: public texts, a line each; the recipe's."),
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="For sampled: a model; the recipe's without it.")] = None,
    temperature: Annotated[float, typer.Option(help="For sampled: 0.8 or more.")] = 1.0,
    candidates: Annotated[
        int | None,
        typer.Option(help="Texts without coins, for exposure; as many as canaries."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put canaries into the data of a recipe, each by a secret fair coin, and write the recipe that trains on them.

    Train with it, then audit with `dpllm audit run`. Until then canaries.json is a secret.
    """
    from dpllm.audit.prepare import CanaryOptions, read_prefixes
    from dpllm.audit.prepare import prepare as prepare_audit
    from dpllm.config import load_recipe
    from dpllm.config.recipe_file import located

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
    recipe = load_recipe(config, overrides or ())
    with located(recipe):
        prepared = prepare_audit(recipe, output, options)
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
    from dpllm.audit.bounds import power_in_words

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


@command("dpllm audit run audits/quickstart/run --canaries audits/quickstart/canaries.json")
def run(
    run_folder: RunFolder,
    canaries: CanariesFile,
    model: Model = None,
    reference: Reference = None,
    plain: Plain = False,
    confidence: Annotated[float, typer.Option(help="Confidence of all lower bounds together.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """Score every canary under the trained model, and print the lower bounds on ε.

    The verdict, also in audit.json and audit.png of the run, is FAIL, with exit code 1, if a lower bound exceeds the
    ledger's ε. If not, the claim is consistent with the scores, which is not a proof.
    """
    from rich.console import Console

    from dpllm.audit.run import audit_run

    with Console(stderr=True).status("scoring the canaries"):
        result = audit_run(run_folder, canaries, model, reference, plain, confidence)
    show(result.to_dict(), result.rows(), f"Audit of {run_folder}", as_json)
    if result.failed:
        raise typer.Exit(1)


@command("dpllm audit gradient --config quickstart privacy.noise=independent")
def gradient(
    config: Annotated[Path, typer.Option(help="The recipe; its data are not read.", show_default=False)],
    overrides: Overrides = None,
    blocks: Annotated[int, typer.Option(help="R: repetitions, each with its own coins.")] = 1000,
    canaries: Annotated[int, typer.Option(help="Per block, each with a fair coin; 1 shows most.")] = 1,
    base: Annotated[int, typer.Option(help="Units that are always present.")] = 2,
    steps: Annotated[int, typer.Option(help="T of a block; the claim is the ε of these steps.")] = 1,
    sampling_rate: Annotated[float, typer.Option(help="q; q times the units must be whole.")] = 1.0,
    noise_multiplier: Annotated[float, typer.Option(help="σ of the audited steps.")] = 1.0,
    delta: Annotated[float, typer.Option(help="δ of the claim.")] = 1e-5,
    tokens: Annotated[int, typer.Option(help="Tokens of a canary's row.")] = 16,
    confidence: Annotated[float, typer.Option(help="At which a sound stack passes.")] = 0.95,
    output: Annotated[Path | None, typer.Option(help="Folder for audit.json.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Take private steps with canaries of known gradients, and compute a lower bound on ε from their releases.

    With train.average each block is a run of its own, which takes longer. Exit code 1: the bound is above ε, so a part
    of this installation breaks the guarantee.
    """
    from rich.console import Console
    from rich.progress import Progress

    from dpllm.audit.gradient_recipe import Settings, audit_recipe
    from dpllm.config import load_recipe
    from dpllm.config.recipe_file import located

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
    recipe = load_recipe(config, overrides or [])
    with located(recipe), Progress(console=Console(stderr=True), disable=quiet, transient=True) as progress:
        task = progress.add_task("blocks", total=blocks)
        result = audit_recipe(recipe, settings, lambda: progress.advance(task))
    if result is None:
        return
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        result.save(output)
    show(result.to_dict(), result.rows(), "Gradient canaries", as_json)
    if result.failed:
        raise typer.Exit(1)

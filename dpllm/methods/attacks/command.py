"""`dpllm methods attack`, `exposure`, `answers` and `texts`: attacks on released models and texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpllm.cli.audit import CanariesFile, Model, Plain, Reference, RunFolder
from dpllm.cli.common import AsJson, Overrides, command, show, show_json, show_table
from dpllm.config import RECIPE_FILE, ConfigError, load_recipe
from dpllm.config.recipe_file import load_query_recipe, read_raw
from dpllm.methods.queries.command import query_command

if TYPE_CHECKING:
    from dpllm.methods.attacks.answers import Trials
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.privacy.query_plan import QueryPlan


@command("dpllm methods attack runs/quickstart --records 1000 --shadows 16")
def attack(
    run_folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A model folder with its recipe.yaml; private or not.", show_default=False),
    ],
    reference: Annotated[
        str | None,
        typer.Option(help="A model that saw none of the records; default: the start of the training."),
    ] = None,
    records: Annotated[int, typer.Option(help="Most members and held-out records; an FPR of 0.1 % needs 1000.")] = 1000,
    shadows: Annotated[int, typer.Option(help="Number of shadow adapters that LiRA trains; 0: no LiRA.")] = 0,
    shadow_epochs: Annotated[float, typer.Option(help="Passes of a shadow over its half of the records.")] = 4.0,
    extract: Annotated[int, typer.Option(help="Texts sampled per kind of prompt; 0: no extraction.")] = 200,
    span: Annotated[
        int, typer.Option(help="Consecutive tokens that count as verbatim.", rich_help_panel="of extraction")
    ] = 20,
    prefix: Annotated[
        int,
        typer.Option(
            help="Target tokens of a record that the model gets before it continues.", rich_help_panel="of extraction"
        ),
    ] = 10,
    new_tokens: Annotated[
        int, typer.Option(help="Largest number of tokens of a sampled text.", rich_help_panel="of extraction")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the sampling.", rich_help_panel="of extraction")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample among this many likeliest tokens; 0: all.", rich_help_panel="of extraction")
    ] = 40,
    word: Annotated[
        str, typer.Option(help="The word that one kind of prompt repeats.", rich_help_panel="of extraction")
    ] = "company",
    seed: Annotated[int, typer.Option(help="Seed of the draws of records, samples and shadows.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Membership attacks on a finished model, and extraction of its records.

    It prints the share of members found, and the share that the ledger allows for any attack. Results also go to
    attacks.json and attacks.png in the folder: they come from private records, and ε does not cover them.
    """
    from rich.console import Console

    from dpllm.methods.attacks.attacks import (
        PICTURE_FILE,
        AttackSettings,
        attack_facts,
        attack_folder,
        attack_tables,
        plot_attacks,
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


@command("dpllm methods exposure audits/quickstart/run --canaries audits/quickstart/canaries.json")
def exposure(
    run_folder: RunFolder,
    canaries: CanariesFile,
    model: Model = None,
    reference: Reference = None,
    plain: Plain = False,
    as_json: AsJson = False,
) -> None:
    """Exposure of canaries of `dpllm audit prepare`.

    It is their rank among texts that were not trained on. A canary that was never seen has a median of 1 bit. Exposure
    is no bound on ε, and no verdict follows from it; that is `dpllm audit run`.
    """
    from rich.console import Console

    from dpllm.methods.attacks.exposure import exposure_of_run

    with Console(stderr=True).status("scoring the canaries"):
        found = exposure_of_run(run_folder, canaries, model, reference, plain)
    show(found.to_dict(), [("exposure", str(found))], f"Exposure in {run_folder}", as_json)


@command("dpllm methods answers label_counts --trials 4000", "dpllm methods answers runs/counts")
def answers(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FOLDER",
            help="A recipe of count, predict, aggregate, evolve, pate or federated, or the folder of such a run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    trials: Annotated[int, typer.Option(help="Number of trials, each with all answers of the plan.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Confidence with which a sound installation passes.")] = 0.95,
    output: Annotated[
        Path | None, typer.Option(help="Folder for audit.json and audit.png. Default: FOLDER.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A lower bound on the ε of a method, by its own questions.

    They are asked again and again, with and without a canary, about made-up records: the worst that the method's bounds
    allow. Of a recipe's records only their number is used. In a finished folder, the verdict is added to the report.
    Exit code 1: the bound is above ε, so a part of this installation breaks the guarantee.
    """
    from rich.console import Console
    from rich.progress import Progress

    from dpllm.methods.attacks.answers import save_answers

    folder = Path(target)
    finished = folder.is_dir()
    plan = _plan_of_folder(folder, overrides) if finished else _plan_of_recipe(target, overrides or [])
    with Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task("trials", total=trials)
        found, canary = _asked(plan, trials, lambda: progress.advance(task))
    with Console(stderr=True).status("computing the bounds"):
        result = found.result(plan, canary, confidence)
    places = ([folder] if finished else []) if output is None else [output]
    for place in places:
        save_answers(found, result, place, of_run=finished and place == folder)
    show(result.to_dict(), result.rows(), f"Audit of the answers of {target}", as_json)
    if result.failed:
        raise typer.Exit(1)


def _asked(plan: QueryPlan | PrivacyPlan, trials: int, on_trial: Callable[[], None]) -> tuple[Trials, str]:
    """Return the observations of all trials, and the canary in words.

    Raises:
        ConfigError: there is no audit of the plan's method.
    """
    from dpllm.methods.attacks.answers import run_rounds, run_trials
    from dpllm.methods.attacks.probes import CANARY, RoundProbe, probe_of, small_federation
    from dpllm.privacy.query_plan import QueryPlan

    if not isinstance(plan, QueryPlan):
        return run_rounds(small_federation(plan, trials), RoundProbe, trials, on_trial), CANARY
    probe = probe_of(plan)
    return run_trials(plan, probe, trials, on_trial), probe.canary


def _plan_of_folder(folder: Path, overrides: list[str] | None) -> QueryPlan | PrivacyPlan:
    """Return the plan of a finished run.

    Raises:
        ValueError: it has none, or that of a training run in one place, or the command has overrides.
    """
    from dpllm.privacy.plan import PLAN_FILE
    from dpllm.privacy.query_plan import QueryPlan, load_plan

    if overrides:
        raise ConfigError(f"{overrides[0]}: the plan of a finished run is fixed; give the recipe to change its values")
    plan = load_plan(folder / PLAN_FILE)
    recipe = folder / RECIPE_FILE
    federated = recipe.is_file() and "federated" in read_raw(recipe, [])
    if not isinstance(plan, QueryPlan) and not federated:
        raise ConfigError(
            f"{folder} holds a training run: audit its steps with `dpllm audit gradient --config "
            f"{recipe}`, or its model with canaries (`dpllm audit prepare`)"
        )
    return plan


def _plan_of_recipe(recipe: str, overrides: list[str]) -> QueryPlan | PrivacyPlan:
    if "federated" in read_raw(recipe, overrides):
        from dpllm.methods.attacks.probes import plan_of_recipe

        typer.echo("note: reading the records, for the number of clients", err=True)
        return plan_of_recipe(load_recipe(recipe, overrides))
    read = load_query_recipe(recipe, overrides)
    known = query_command(read.method)
    typer.echo(f"note: {known.reading}, for their number", err=True)
    plan: QueryPlan = known.plan(read, known.read(read))
    return plan


@command("dpllm methods texts synthetic --run audits/quickstart/run --canaries audits/quickstart/canaries.json")
def texts(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="What `dpllm methods synthesize RUN --output` made.", show_default=False),
    ],
    run: Annotated[Path, typer.Option(help="The folder of the training, RUN.", show_default=False)],
    canaries: Annotated[Path, typer.Option(help="canaries.json of the audit.", show_default=False)],
    confidence: Annotated[float, typer.Option(help="Confidence of all lower bounds together.")] = 0.95,
    as_json: AsJson = False,
) -> None:
    """A lower bound on the ε of synthetic texts, from canaries in them.

    The run was trained on data of `dpllm audit prepare`. A canary's score is the longest run of its words that a text
    repeats. audit.json and audit.png go into the folder. Exit code 1: the claim is refuted. Otherwise it is consistent
    with the texts, which is not a proof.
    """
    from rich.console import Console

    from dpllm.methods.attacks.exposure import Exposure, audit_texts
    from dpllm.methods.synthesize.evaluation import longest_runs, read_texts

    with Console(stderr=True).status("searching the texts"):
        released = read_texts(folder).texts
        result = audit_texts(folder, run, canaries, lambda own: longest_runs(released, own), confidence)
    words = {"exposure": str(Exposure(**result.details["exposure"]))} if "exposure" in result.details else {}
    rows = [(name, words.get(name, value)) for name, value in result.rows()]
    show(result.to_dict(), rows, f"Audit of the texts in {folder}", as_json)
    if result.failed:
        raise typer.Exit(1)

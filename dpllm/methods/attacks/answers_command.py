"""`dpllm audit answers`: lower bounds on ε from counts, votes, tokens, and sums of federated rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpllm.cli.common import AsJson, Overrides, one_line_errors, show
from dpllm.config import RECIPE_FILE, ConfigError, load_recipe
from dpllm.config.query_recipe import load_query_recipe
from dpllm.config.recipe import read_raw
from dpllm.methods.queries.command import query_command

if TYPE_CHECKING:
    from dpllm.methods.attacks.answers import Trials
    from dpllm.methods.queries.probe import Probe
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.privacy.query_plan import QueryPlan


def _counts(plan: QueryPlan) -> Probe:
    from dpllm.methods.queries.probe import count_probe

    return count_probe(plan)


def _evolution(plan: QueryPlan) -> Probe:
    from dpllm.methods.evolve.probe import vote_probe

    return vote_probe(plan)


def _labels(plan: QueryPlan) -> Probe:
    from dpllm.methods.pate.probe import vote_probe

    return vote_probe(plan)


def _tokens(plan: QueryPlan) -> Probe:
    from dpllm.methods.predict.probe import token_probe

    return token_probe(plan)


def _completions(plan: QueryPlan) -> Probe:
    from dpllm.methods.pate.probe import completion_probe

    return completion_probe(plan)


def _group_answers(plan: QueryPlan) -> Probe:
    from dpllm.methods.aggregate.probe import group_probe

    return group_probe(plan)


PROBES: dict[str, Callable[[QueryPlan], Probe]] = {
    "label counts": _counts,
    "synthetic text": _counts,  # its own charge, if it has one, is that of label counts
    "private evolution": _evolution,
    "predicted text": _tokens,
    "public labels by PATE": _labels,
    "public completions by PATE": _completions,
    "answers of groups": _group_answers,
}
"""Method of a plan -> the function that makes its probe."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm audit answers label_counts --trials 4000\n\n"
        "Example: dpllm audit answers predict_e2e predict.max_new_tokens=32\n\n"
        "Example, for a finished release: dpllm audit answers runs/counts"
    )(answers)


@one_line_errors
def answers(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FOLDER",
            help="Recipe of `dpllm count`, `predict`, `aggregate`, `evolve`, `teach` or `federate`, or the folder of "
            "such a run.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    trials: Annotated[
        int, typer.Option(help="Trials, each with all answers of the plan and a coin of its own.")
    ] = 1000,
    confidence: Annotated[
        float, typer.Option(help="A sound installation passes with at least this probability.")
    ] = 0.95,
    output: Annotated[
        Path | None, typer.Option(help="Folder for audit.json and audit.png. Default: FOLDER.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a method's questions again and again, with and without a canary, and compute a lower bound on ε.

    The records are made up, and are the worst that the method's bounds allow. Clipping, groups, votes, charge and noise
    are those of the command. No private record is asked about; of a recipe's records only their number is used. In a
    finished folder, the verdict is added to the report. Exit code 1: the lower bound is above ε, so a part of this
    installation breaks the guarantee.
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
    from dpllm.privacy.query_plan import QueryPlan

    if not isinstance(plan, QueryPlan):
        from dpllm.methods.federated.probe import CANARY, RoundProbe, small_federation

        return run_rounds(small_federation(plan, trials), RoundProbe, trials, on_trial), CANARY
    if plan.method not in PROBES:
        raise ConfigError(f"there is no audit of {plan.method!r} yet; there is one of {', '.join(PROBES)}")
    probe = PROBES[plan.method](plan)
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
    federated = recipe.is_file() and "federate" in read_raw(recipe, [])
    if not isinstance(plan, QueryPlan) and not federated:
        raise ConfigError(
            f"{folder} holds a training run: audit its steps with `dpllm audit gradient --config "
            f"{recipe}`, or its model with canaries (`dpllm audit prepare`)"
        )
    return plan


def _plan_of_recipe(recipe: str, overrides: list[str]) -> QueryPlan | PrivacyPlan:
    if "federate" in read_raw(recipe, overrides):
        from dpllm.methods.federated.probe import plan_of_recipe

        typer.echo("note: reading the records, for the number of clients", err=True)
        return plan_of_recipe(load_recipe(recipe, overrides))
    read = load_query_recipe(recipe, overrides)
    known = query_command(read.method)
    typer.echo(f"note: {known.reading}, for their number", err=True)
    plan: QueryPlan = known.plan(read, known.read(read))
    return plan

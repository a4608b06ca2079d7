"""`dpllm plan suggest`: the settings to start from, and their rehearsal on public text."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, Overrides, RecipePath, command, show_json, show_table, wrapped
from dpllm.cli.plan import training_recipe
from dpllm.config.values import between, integer

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.planning.rehearsal import Rehearsal
    from dpllm.training.settings import Setting, Suggestion
    from dpllm.training.suggested_run import Suggested

SUGGESTION_FILE = "suggestion.yaml"
CHECKED = "compared with the private records: the public text has none of them beyond the declared number"
NOT_CHECKED = (
    "not checked: whether the public text contains private records. Only the names of files were compared, because the "
    "private records were not read. Leave out --num-units to compare the records"
)

_BEFORE_THE_STAGE = (
    "The weights were measured before the public stage, which changes them: a rehearsal (--rehearse) measures them "
    "after it."
)


@command("dpllm plan suggest quickstart --rehearse --output runs/suggested")
def suggest(
    recipe: RecipePath,
    overrides: Overrides = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Take the best of three or four learning rates by short trainings with the plan's noise on public "
            "text: about the compute of the run.",
        ),
    ] = False,
    public: Annotated[
        str | None,
        typer.Option(
            help="Public text to rehearse on, in the format of the private records, or .txt; default: that of "
            "public_pretrain. It must not contain private records."
        ),
    ] = None,
    around: Annotated[float | None, typer.Option(help="Middle rate to rehearse; default: the computed one.")] = None,
    rehearsal_steps: Annotated[
        int | None, typer.Option(help="Steps of each training; default: a quarter of the run's.")
    ] = None,
    num_units: Annotated[
        int | None, typer.Option(help="N, so that the private records are not read and need not be here.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help=f"Folder in which to write {SUGGESTION_FILE}.")] = None,
    as_json: AsJson = False,
) -> None:
    """Suggest learning rate, clip norm, schedule, averaging and bands to start from, with reasons and as overrides.

    They follow from the plan and the size of the model's weights. No private record enters, and no ε is spent.
    """
    path, recipe_read = recipe, training_recipe(recipe, overrides)
    rehearses = rehearse or public is not None
    _check_options(rehearses, around, rehearsal_steps, output, num_units)
    from dpllm.config.recipe import refuse_trainer
    from dpllm.models.starting_point import refuse_private_start
    from dpllm.planning.rehearsal import public_section
    from dpllm.training.preflight import check_recipe
    from dpllm.training.suggested_run import suggested_run
    from dpllm.training.weight_size import size_of_model

    if rehearses:
        refuse_trainer(recipe_read, "A rehearsal")
    refuse_private_start(recipe_read.model.name, recipe_read.model.start_is_independent)
    section = public_section(recipe_read, public) if rehearses else None  # before anything is read
    for line in check_recipe(recipe_read, to_train=False):
        typer.echo(f"note: {line}", err=True)
    run = suggested_run(recipe_read, _units(recipe_read, num_units, section))
    rehearsal: Rehearsal | None = None
    if section is None:
        rate = run.rate_for(size_of_model(recipe_read.model))
        staged = (_BEFORE_THE_STAGE,) if recipe_read.public_pretrain is not None else ()
        suggestion = run.with_rate(rate, (*staged, run.range_around(rate)))
    else:
        suggestion, rehearsal = _rehearse(run, section, around, rehearsal_steps)
    read = num_units is None
    privacy = {
        "depends_on_private_records": False,
        "public_constants_used": ["num_units"],
        "private_records_read": "to count them" + (" and to compare the public text" if section else "")
        if read
        else "no",
        "epsilon_spent": 0,
    }
    checked = None if section is None else CHECKED if read else NOT_CHECKED
    file = None if output is None else _write(output, suggestion, path, checked)
    if as_json:
        values = _values(path, run, suggestion, rehearsal)
        show_json({**values, "privacy": privacy, "public_text": checked, "file": None if file is None else str(file)})
        return
    _show(path, run, suggestion, rehearsal, checked, file)


def _check_options(
    rehearses: bool, around: float | None, steps: int | None, output: Path | None, num_units: int | None
) -> None:
    if not rehearses and (around is not None or steps is not None):
        raise ValueError("--around and --rehearsal-steps belong to a rehearsal: add --rehearse or --public FILE")
    if around is not None:
        between("--around", around, 0, 1e6, above=True)
    for name, count in (("--rehearsal-steps", steps), ("--num-units", num_units)):
        if count is not None:
            integer(name, count, 1)
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: give a folder, in which {SUGGESTION_FILE} is written")


def _units(recipe: Recipe, num_units: int | None, section: Any) -> Any:
    """Return the index of units: from the private records, or only their number."""
    from dpllm.data.rows import load_train_and_eval, unit_index_of
    from dpllm.data.units import UnitIndex
    from dpllm.planning.rehearsal import refuse_private_records

    if num_units is not None:
        if recipe.privacy.sampling == "example":
            raise ValueError(
                "--num-units is for runs that draw whole units, and privacy.sampling=example draws rows: omit "
                "--num-units, so that the records are counted"
            )
        return UnitIndex.one_row_per_unit(num_units)
    records, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    if section is not None:
        private = [records] if held_out is None or recipe.data.eval.public else [records, held_out]
        refuse_private_records(recipe, section, private)
    return unit_index_of(records, recipe.privacy)


def _rehearse(run: Suggested, section: Any, around: float | None, steps: int | None) -> tuple[Suggestion, Rehearsal]:
    """Rehearse, with a progress bar on the error stream; the private records are not opened."""
    from dpllm.planning.rehearsal import Steps, load_material, rehearse, shorten
    from dpllm.training.save_rehearsal import quiet
    from dpllm.training.settings import Setting
    from dpllm.training.suggested_run import RATE

    with tempfile.TemporaryDirectory(prefix="dpllm-rehearsal-") as name, _bars() as bar:
        folder = Path(name)
        staged = [] if run.recipe.public_pretrain is None else [Steps(bar("public stage", None))]
        with quiet():
            material = load_material(run.recipe, section, folder / "start", staged)
        computed = run.rate_for(material.size)
        shortened = shorten(run, len(material.rows), steps)
        centre, total = computed.value if around is None else around, shortened.num_steps
        found = rehearse(run, material, shortened, centre, folder, lambda rate: bar(f"learning rate {rate:g}", total))
    reason = (
        f"The least held-out loss, {found.best.loss:.4g}, of {len(found.trials)} rates that were rehearsed on public "
        f"text ({found.source}). Computed without it: {computed.value:g} = {computed.reason}"
    )
    best = Setting(RATE, found.best.rate, reason, computed.before)
    units = ("In the rehearsal each public row is a unit; in the run a user is.",) if run.plan.unit == "user" else ()
    return run.with_rate(best, (*found.shortened.words(), *units, *found.notes())), found


@contextlib.contextmanager
def _bars() -> Iterator[Callable[[str, int | None], Callable[[int], None]]]:
    """Yield a function that returns a new bar's function of steps; a bar appears with its first step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    shown: list[bool] = []

    def bar(words: str, total: int | None) -> Callable[[int], None]:
        task: list[Any] = []

        def moved(step: int) -> None:
            if not shown:
                shown.append(True)
                progress.start()
            if not task:
                task.append(progress.add_task(words, total=total))
            progress.update(task[0], completed=step)

        return moved

    try:
        yield bar
    finally:
        if shown:
            progress.stop()


def _write(folder: Path, suggestion: Suggestion, path: Path, checked: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SUGGESTION_FILE
    comments = [
        f"Settings that dpllm plan suggest gives for {path}: copy them into the recipe.",
        "They do not depend on private records, except for their public number. No ε was spent.",
        *([f"Public text: {checked}."] if checked else []),
    ]
    file.write_text(suggestion.to_yaml(comments), encoding="utf-8")
    return file


def _values(path: Path, run: Suggested, suggestion: Suggestion, rehearsal: Rehearsal | None) -> dict[str, Any]:
    from dataclasses import asdict

    plan = run.plan
    values = {
        "recipe": str(path),
        **suggestion.to_dict(),
        "step_ratio": run.step_ratio,
        "predicted_noise": None if run.predicted is None else asdict(run.predicted),
        "plan": plan.to_dict(),
        "epsilon": plan.epsilon,
        "rehearsal": None,
    }
    if rehearsal is not None:
        values["rehearsal"] = {**asdict(rehearsal), "best_rate": rehearsal.best.rate, "edge": rehearsal.edge}
    return values


def _show(
    path: Path,
    run: Suggested,
    suggestion: Suggestion,
    rehearsal: Rehearsal | None,
    checked: str | None,
    file: Path | None,
) -> None:
    from dpllm.training.settings import flow

    if rehearsal is not None:
        _show_trials(rehearsal)
    parts = (
        (("setting", "suggested", "in the recipe"), suggestion.settings, f"Settings for {path}"),
        (("kept as in the recipe", "by the rule", "in the recipe"), suggestion.guides, "Rules for a new recipe"),
    )
    for head, settings, title in parts:
        rows = [(row.key, flow(row.value), flow(row.before)) for row in settings]
        show_table(head, rows, title, left=(0, 1, 2))
        typer.echo("")
        for reason, keys in _by_reason(settings).items():
            typer.echo(wrapped(f"{', '.join(keys)}: {reason}"))
        typer.echo("")
    more = [f"Note: {note}" for note in suggestion.notes]
    if checked is not None:
        more.append(f"Public text: {checked}.")
    more.append(
        f"The run keeps {run.plan.guarantee}. The suggestion depends on no private record, only on their public "
        "number, and spends no ε."
    )
    typer.echo(wrapped("\n".join(more)))
    if file is not None:
        typer.echo(f"File: {file}")
    if suggestion.overrides:
        typer.echo(f"\nTo be added to the command of the run:\n{suggestion.pasteable}")


def _by_reason(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return reason -> keys that have it."""
    seen: dict[str, list[str]] = {}
    for setting in settings:
        seen.setdefault(setting.reason, []).append(setting.key)
    return seen


def _show_trials(rehearsal: Rehearsal) -> None:
    rows = [
        (
            f"{trial.rate:g}",
            f"{trial.rehearsed_rate:g}",
            f"{trial.loss:.4g}",
            "recommended" if trial is rehearsal.best else "",
        )
        for trial in rehearsal.trials
    ]
    title = (
        f"Rehearsal on {rehearsal.source}: {rehearsal.shortened.num_steps} steps each, {rehearsal.num_held_out} rows "
        f"held out, loss {rehearsal.loss_before:.4g} before"
    )
    show_table(("learning rate", "in the rehearsal", "held-out loss", ""), rows, title, left=(3,))
    typer.echo("")

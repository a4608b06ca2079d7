"""`dpllm plan --suggest`: the settings to start from, and their rehearsal on public text."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpllm.cli.common import show_json, show_table
from dpllm.config.values import between, integer

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.planning.rehearsal import Rehearsal
    from dpllm.planning.suggest import Setting, Suggestion
    from dpllm.planning.suggested import Suggested

SUGGESTION_FILE = "suggestion.yaml"
CHECKED = "compared with the private records: the public text has none of them beyond the declared number"
NOT_CHECKED = (
    "not checked: whether the public text contains private records. Only the names of files were compared, because the "
    "private records were not read. Leave out --num-units to compare the records"
)

Suggest = Annotated[
    bool,
    typer.Option(
        "--suggest",
        help="Give learning rate, clip norm, schedule, averaging and bands to start from, with reasons, and as "
        "overrides. It spends no ε.",
    ),
]
Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse",
        help="With --suggest: compare three or four learning rates by short trainings with the plan's noise on public "
        "text, that of public_pretrain or --public. About the compute of the run.",
    ),
]
Public = Annotated[
    str | None,
    typer.Option(
        help="With --suggest: public text for a rehearsal, in the format of the private records, or .txt. It must not "
        "contain private records."
    ),
]
Around = Annotated[
    float | None, typer.Option(help="With a rehearsal: the middle learning rate; the computed one without it.")
]
RehearsalSteps = Annotated[
    int | None,
    typer.Option(help="With a rehearsal: steps of each training; about a quarter of the run's without it."),
]
Output = Annotated[Path | None, typer.Option(help=f"With --suggest: the folder in which to write {SUGGESTION_FILE}.")]


@dataclass(frozen=True)
class SuggestOptions:
    """The options of a suggestion.

    Attributes:
        rehearse: whether to rehearse on the public stage's text.
        public: path of other public text.
        around: the middle learning rate of a rehearsal.
        rehearsal_steps: steps of each training.
        output: folder for the file.
        num_units: N, instead of reading the private records. It is an option of --sweep too.
    """

    rehearse: bool
    public: str | None
    around: float | None
    rehearsal_steps: int | None
    output: Path | None
    num_units: int | None

    def refuse_without_suggest(self) -> None:
        """Refuse options that need --suggest.

        Raises:
            ValueError: one is given.
        """
        given = [item.name for item in fields(self) if getattr(self, item.name) and item.name != "num_units"]
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} is an option of --suggest: add --suggest, or omit it")

    def check(self) -> None:
        """Check the options of --suggest.

        Raises:
            ValueError: options that need a rehearsal without one, or a number out of range.
        """
        if not self.rehearses and (self.around is not None or self.rehearsal_steps is not None):
            raise ValueError("--around and --rehearsal-steps belong to a rehearsal: add --rehearse or --public FILE")
        if self.around is not None:
            between("--around", self.around, 0, 1e6, above=True)
        if self.rehearsal_steps is not None:
            integer("--rehearsal-steps", self.rehearsal_steps, 1)
        if self.num_units is not None:
            integer("--num-units", self.num_units, 1)
        if self.output is not None and self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output {self.output} is a file: give a folder, in which {SUGGESTION_FILE} is written")

    @property
    def rehearses(self) -> bool:
        """Whether there is a rehearsal."""
        return self.rehearse or self.public is not None


def run_suggest(path: Path, recipe: Recipe, options: SuggestOptions, as_json: bool) -> None:
    """Compute the suggestion, rehearse it if that is wanted, print it, and write its file."""
    from dpllm.config.recipe import refuse_trainer
    from dpllm.models.starting_point import refuse_private_start
    from dpllm.planning.public_text import public_section
    from dpllm.planning.suggested import suggested_run
    from dpllm.planning.weight_size import size_of_model
    from dpllm.training.preflight import check_recipe

    options.check()
    if options.rehearses:
        refuse_trainer(recipe, "A rehearsal")
    refuse_private_start(recipe.model.name, recipe.model.start_is_independent)
    section = public_section(recipe, options.public) if options.rehearses else None  # before anything is read
    for line in check_recipe(recipe, to_train=False):
        typer.echo(f"note: {line}", err=True)
    units = _units(recipe, options, section)
    run = suggested_run(recipe, units)
    rehearsal: Rehearsal | None = None
    if section is None:
        rate = run.rate_for(size_of_model(recipe.model))
        suggestion = run.with_rate(rate, (*_before_the_stage(recipe), run.range_around(rate)))
    else:
        suggestion, rehearsal = _rehearse(run, section, options)
    read = options.num_units is None
    privacy = {
        "depends_on_private_records": False,
        "public_constants_used": ["num_units"],
        "private_records_read": "to count them" + (" and to compare the public text" if section else "")
        if read
        else "no",
        "epsilon_spent": 0,
    }
    checked = None if section is None else CHECKED if read else NOT_CHECKED
    file = None if options.output is None else _write(options.output, suggestion, path, checked)
    if as_json:
        values = _values(path, run, suggestion, rehearsal)
        show_json({**values, "privacy": privacy, "public_text": checked, "file": None if file is None else str(file)})
        return
    _show(path, run, suggestion, rehearsal, checked, file)


def _units(recipe: Recipe, options: SuggestOptions, section: Any) -> Any:
    """Return the index of units: from the private records, or only their number."""
    from dpllm.data.rows import load_train_and_eval, unit_index_of
    from dpllm.data.units import UnitIndex
    from dpllm.planning.public_text import refuse_private_records

    if options.num_units is not None:
        if recipe.privacy.sampling == "example":
            raise ValueError(
                "--num-units is for runs that draw whole units, and privacy.sampling=example draws rows: omit "
                "--num-units, so that the records are counted"
            )
        return UnitIndex.one_row_per_unit(options.num_units)
    records, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    if section is not None:
        private = [records] if held_out is None or recipe.data.eval.public else [records, held_out]
        refuse_private_records(recipe, section, private)
    return unit_index_of(records, recipe.privacy)


def _before_the_stage(recipe: Recipe) -> tuple[str, ...]:
    if recipe.public_pretrain is None:
        return ()
    return (
        "The weights were measured before the public stage, which changes them: a rehearsal (--rehearse) measures them "
        "after it.",
    )


def _rehearse(run: Suggested, section: Any, options: SuggestOptions) -> tuple[Suggestion, Rehearsal]:
    """Rehearse, with a progress bar on the error stream; the private records are not opened."""
    from dpllm.planning.public_text import load_material
    from dpllm.planning.rehearsal import Steps, rehearse, shorten
    from dpllm.planning.suggest import Setting
    from dpllm.planning.suggested import RATE
    from dpllm.training.save_rehearsal import quiet

    with tempfile.TemporaryDirectory(prefix="dpllm-rehearsal-") as name, _bars() as bar:
        folder = Path(name)
        staged = [] if run.recipe.public_pretrain is None else [Steps(bar("public stage", None))]
        with quiet():
            material = load_material(run.recipe, section, folder / "start", staged)
        computed = run.rate_for(material.size)
        shortened = shorten(run, len(material.rows), options.rehearsal_steps)
        centre = computed.value if options.around is None else options.around
        steps = shortened.num_steps
        found = rehearse(run, material, shortened, centre, folder, lambda rate: bar(f"learning rate {rate:g}", steps))
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
        f"Settings that dpllm plan --suggest gives for {path}: copy them into the recipe.",
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
    from dpllm.planning.suggest import flow

    console = Console(highlight=False, markup=False)
    plan = run.plan
    if rehearsal is not None:
        _show_trials(rehearsal, console)
    head = ("setting", "suggested", "in the recipe")
    rows: Sequence[Setting] = suggestion.settings
    show_table(
        head, [(row.key, flow(row.value), flow(row.before)) for row in rows], f"Settings for {path}", left=(0, 1, 2)
    )
    console.print()
    for reason, keys in _by_reason(rows).items():
        console.print(f"{', '.join(keys)}: {reason}")
    console.print()
    kept = [(row.key, flow(row.value), flow(row.before)) for row in suggestion.guides]
    show_table(
        ("kept as in the recipe", "by the rule", "in the recipe"), kept, "Rules for a new recipe", left=(0, 1, 2)
    )
    console.print()
    for reason, keys in _by_reason(suggestion.guides).items():
        console.print(f"{', '.join(keys)}: {reason}")
    for note in suggestion.notes:
        console.print(f"Note: {note}")
    if checked is not None:
        console.print(f"Public text: {checked}.")
    console.print(
        f"The run keeps {plan.guarantee}. The "
        "suggestion depends on no private record, only on their public number, and spends no ε."
    )
    if file is not None:
        console.print(f"File: {file}", soft_wrap=True)
    if suggestion.overrides:
        console.print("\nTo be added to the command of the run:")
        console.print(suggestion.pasteable, soft_wrap=True)


def _by_reason(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return reason -> keys that have it."""
    seen: dict[str, list[str]] = {}
    for setting in settings:
        seen.setdefault(setting.reason, []).append(setting.key)
    return seen


def _show_trials(rehearsal: Rehearsal, console: Console) -> None:
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
    console.print()

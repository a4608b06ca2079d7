"""`dpllm init`: a recipe for one's own records, from a few questions or from options."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dpllm.cli.common import one_line_errors
from dpllm.config.formats.catalogue import COLUMNS, FORMATS, formats_of
from dpllm.config.formats.record_format import TextLabel, columns_in
from dpllm.config.values import between, choice, integer, nearest

if TYPE_CHECKING:
    from dpllm.config import DataConfig
    from dpllm.data.columns import Columns
    from dpllm.models.local_model import ModelAtHand
    from dpllm.planning.new_recipe import NewRecipe, Wishes

EPSILON = 8.0
ASKED_FORMATS = tuple(name for name, kind in FORMATS.items() if kind.asked)
_ALIASES = {alias: name for name, kind in FORMATS.items() for alias in kind.aliases}
_COLUMNS = {name: columns_in(FORMATS[name]) for name in ASKED_FORMATS}
_RECORD = "record"
_OUTPUT = "recipe.yaml"


_RECORDS = "The private records: .jsonl, .csv, .parquet, .xlsx, .txt and more; a file, a folder or a pattern."
Records = Annotated[
    str | None, typer.Argument(metavar="DATA", help=f"{_RECORDS} The same as --data.", show_default=False)
]
Data = Annotated[str | None, typer.Option(help=_RECORDS)]
Format = Annotated[
    str | None, typer.Option(help="; ".join(f"{name}: {FORMATS[name].about}" for name in ASKED_FORMATS) + ".")
]
Classes = Annotated[
    str | None, typer.Option(help="Of a classification: the names of the classes, in order, or their number.")
]
UnitColumn = Annotated[
    str | None,
    typer.Option(help="Protect all records with the same value in this column together, such as patient_id."),
]
Unit = Annotated[str | None, typer.Option(help="record protects each record by itself; user needs a column.")]
MaxRowsPerUnit = Annotated[int | None, typer.Option(help="k: how many records of one user may be used.")]
Model = Annotated[str | None, typer.Option(help="A folder with a transformers model, or a Hub id.")]
Adapter = Annotated[
    bool | None,
    typer.Option("--adapter/--full", help="Train a LoRA adapter, or all weights.", show_default="by the size"),
]
Rank = Annotated[int | None, typer.Option(help="Rank of the adapter; by default 16.")]
Epsilon = Annotated[float | None, typer.Option(help="ε of the whole run; by default 8.")]
MaxLength = Annotated[int | None, typer.Option(help="The most tokens of a row; by default at most 512.")]
HeldOut = Annotated[float | None, typer.Option(help="Share of the units to hold out; 0 holds out none.")]
Encoding = Annotated[str | None, typer.Option(help="Encoding of a text file; by default found by looking.")]
StartIsIndependent = Annotated[
    bool,
    typer.Option("--start-is-independent", help="Declare that the model holds nothing of the private records."),
]
Reading = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="How the records are read, as in a recipe: data.missing=drop, data.split, data.field.",
        show_default=False,
    ),
]
Output = Annotated[Path | None, typer.Option(help="The recipe to write; by default recipe.yaml.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the proposal for each missing option.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "init",
        epilog="Example: dpllm init\n\n"
        "Example: dpllm init notes.jsonl --model models/gpt2 --unit-column patient_id --epsilon 8 --yes\n\n"
        "Example: dpllm init reviews.csv data.missing=drop --classes negative,positive --model models/gpt2 --yes\n\n"
        "Example: dpllm init tickets.csv --format prompt_completion --prompt-column question "
        "--completion-column answer --model openai-community/gpt2 --output tickets.yaml --yes",
    )(init)


def _with_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each column that a format of `ASKED_FORMATS` has, in the place of its ``**``."""
    options: list[inspect.Parameter] = []
    for key in COLUMNS:
        if any(key in own for own in _COLUMNS.values()):
            about = f"The column of {COLUMNS[key].words}; by default found by its name."
            kind = Annotated[str | None, typer.Option(help=about, show_default=False)]
            options.append(
                inspect.Parameter(f"{key}_column", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            )
    signature = inspect.signature(command, eval_str=True)
    own = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in signature.parameters.values()][:-1]
    place = [item.name for item in own].index("format") + 1
    command.__signature__ = signature.replace(parameters=[*own[:place], *options, *own[place:]])  # type: ignore[attr-defined]
    return command


@one_line_errors
@_with_columns
def init(
    records: Records = None,
    reading: Reading = None,
    data: Data = None,
    format: Format = None,
    classes: Classes = None,
    unit_column: UnitColumn = None,
    unit: Unit = None,
    max_rows_per_unit: MaxRowsPerUnit = None,
    model: Model = None,
    adapter: Adapter = None,
    rank: Rank = None,
    epsilon: Epsilon = None,
    max_length: MaxLength = None,
    held_out: HeldOut = None,
    encoding: Encoding = None,
    start_is_independent: StartIsIndependent = False,
    output: Output = None,
    yes: Yes = False,
    **columns: str | None,
) -> None:
    """Write a recipe for your own records: it asks what it needs, and computes the other settings with a reason each.

    It reads the records here and writes only the recipe. Of the records, only their public number and the names and
    kinds of their columns determine a setting.
    """
    options = _Options(unit_column, unit, max_rows_per_unit, adapter, rank, max_length, held_out, start_is_independent)
    options.check()
    columns = {key.removesuffix("_column"): name for key, name in columns.items()}
    ask = _Questions(yes)
    keys = [*(reading or ())]
    if records is not None and data is not None and "=" in records:  # the records are given by --data
        keys.insert(0, records)
        records = None
    given = _one_of(records, data)
    if epsilon is not None:
        _epsilon(epsilon)
    target = None if output is None and not yes else _checked_output(output or _OUTPUT)
    how = _reading_keys(keys, encoding)
    path, found = _records(ask, given, how)
    section = _data(ask, path, found, how, format, columns)
    of_user = _unit(ask, options, found, section)
    used = [*section.form.names, of_user]
    typer.echo(f"read as {section.format}: {', '.join(name for name in used if name in found.kinds)}")
    if unused := [name for name in found.kinds if name not in used]:
        typer.echo(f"not used: {', '.join(unused)}")
    if "missing" not in how:
        section = _without_missing(ask, found, section, of_user)
    of_classes = _classes(ask, section.form.name, classes)
    name, at_hand = _model(ask, model)
    value = ask.value("epsilon", epsilon, "ε of the whole run (up to 1 strong, up to 10 reasonable)", EPSILON, _epsilon)
    if target is None:
        target = ask.value("output", None, "The recipe to write", _OUTPUT, _checked_output)
    wishes = options.wishes(section, name, value, str(_new_folder(target.stem)), of_user, of_classes)
    typer.echo(f"reading all records of {path}; then computing noise and learning rate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers, about names of options that will change
        from dpllm.planning.new_recipe import new_recipe

        made = new_recipe(wishes, at_hand)
        notes = _write(target, made)
    _show(target, wishes, made, notes if at_hand is not None else ())


def _one_of(records: str | None, data: str | None) -> str | None:
    """Return the private records, which are given by their place or by --data."""
    if records is not None and data is not None and records != data:
        raise ValueError(f"the private records are given twice, {records} and --data {data}: give one of them")
    return data if records is None else records


@dataclass(frozen=True)
class _Options:
    """The options that are numbers or choices, checked before anything is read."""

    unit_column: str | None
    unit: str | None
    max_rows_per_unit: int | None
    adapter: bool | None
    rank: int | None
    max_length: int | None
    held_out: float | None
    start_is_independent: bool

    def check(self) -> None:
        """Check ranges and combinations.

        Raises:
            ValueError: an option is out of range, or contradicts another one.
        """
        if self.unit not in (None, _RECORD, "user"):
            raise ValueError(f"--unit must be record or user, got {self.unit!r}")
        if self.unit == _RECORD and self.unit_column is not None:
            raise ValueError("--unit record protects single records, and --unit-column names users: give one of them")
        if self.unit == _RECORD and self.max_rows_per_unit is not None:
            raise ValueError("--max-rows-per-unit belongs to users: omit it, or give --unit-column")
        if self.rank is not None and self.adapter is False:
            raise ValueError("--rank belongs to an adapter, and --full trains all weights: give one of them")
        for name, number, least in (("max-rows-per-unit", self.max_rows_per_unit, 1), ("rank", self.rank, 1)):
            if number is not None:
                integer(f"--{name}", number, least)
        if self.max_length is not None:
            integer("--max-length", self.max_length, 2)
        if self.held_out is not None:
            between("--held-out", self.held_out, 0, 1, below=True)

    def wishes(
        self,
        data: DataConfig,
        model: str,
        epsilon: float,
        output_dir: str,
        unit_column: str | None,
        classes: int | list[str] | None,
    ) -> Wishes:
        """Return all wishes, with the answers to the questions."""
        from dpllm.planning.new_recipe import Wishes

        return Wishes(
            data=data,
            model=model,
            epsilon=epsilon,
            output_dir=output_dir,
            unit_column=unit_column,
            rows=self.max_rows_per_unit,
            classes=classes,
            adapter=self.adapter,
            rank=self.rank,
            max_length=self.max_length,
            held_out=self.held_out,
            start_is_independent=self.start_is_independent,
        )


@dataclass(frozen=True)
class _Questions:
    """Asks for a value that no option gives; with --yes it takes the proposal.

    Attributes:
        yes: whether nothing is asked.
    """

    yes: bool

    def value(
        self, option: str, given: Any, words: str, proposal: Any, check: Callable[[Any], Any], note: str = ""
    ) -> Any:
        """Return a checked value; a wrong answer is asked again, a wrong option is an error.

        Args:
            option: name of the option, without dashes.
            given: its value; None: it was not given.
            words: the question.
            proposal: the value without an answer; None: there is none.
            check: returns the value as it is used, or raises ValueError.
            note: printed above the question.

        Raises:
            ValueError: the option is wrong, or there is neither an option nor an answer nor a proposal.
        """
        if given is not None:
            return check(given)
        if self.yes:
            if proposal is None:
                raise ValueError(f"--{option} is missing, and there is no proposal for it: give --{option}")
            return check(proposal)
        if note:
            typer.echo(note)
        while True:
            try:
                answer = typer.prompt(
                    words, default="" if proposal is None else proposal, show_default=proposal is not None
                )
            except typer.Abort as error:
                typer.echo("")
                raise ValueError(
                    f"the questions ended at --{option}, and nothing was written: give --{option}, or take the "
                    "proposals with --yes"
                ) from error
            try:
                return check(answer)
            except ValueError as error:
                typer.echo(f"  {error}")


def _reading_keys(overrides: Sequence[str], encoding: str | None) -> dict[str, Any]:
    """Return the keys of the section ``data`` that say how records are read, as they are given.

    Raises:
        ValueError: an override names another key.
    """
    from dpllm.config.data_section import READING
    from dpllm.config.recipe_file import apply_override

    raw: dict[str, Any] = {} if encoding is None else {"data": {"encoding": encoding}}
    known = {f"data.{key}" for key in READING}
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and key not in known:
            raise ValueError(f"{key}: init takes {', '.join(sorted(known))}; change other keys in the recipe it writes")
        apply_override(raw, override)
    return dict(raw.get("data", {}))


def _records(ask: _Questions, given: str | None, how: dict[str, Any]) -> tuple[str, Columns]:
    """Return the place of the records, and the columns of the file.

    Args:
        ask: the questions.
        given: the place.
        how: keys of the section ``data`` that are known.
    """

    def check(name: str) -> tuple[str, Columns]:
        path = _some_text(name)
        typer.echo(f"reading the first records of {path}")
        from dpllm.config import DataConfig
        from dpllm.data.columns import columns_of

        return path, columns_of(DataConfig(path=path, max_length=2, **how))

    path, found = ask.value("data", given, "The private records (file, folder or pattern)", None, check)
    width = max(map(len, found.facts), default=0)
    typer.echo("columns, each with an example (private, for your eyes only):")
    for name, facts in found.facts.items():
        typer.echo(f"  {name:<{width}}  {facts.example:<34}  {facts.words}")
    return path, found


def _data(
    ask: _Questions, path: str, found: Columns, how: dict[str, Any], form: str | None, given: dict[str, str | None]
) -> DataConfig:
    """Return the section ``data`` without its length."""
    from dpllm.config import DataConfig

    proposal = _format_of_options(given) or found.guessed_format()
    other = found.format_of_others()
    if proposal is None and form is None and other is not None:
        raise ValueError(
            f"{path}: the columns {' and '.join(FORMATS[other]().required)} are those of {FORMATS[other].about} (data."
            f"format {other}), for which init writes no recipe: begin with one of recipes/README.md, or give --format "
            "and the columns"
        )
    if proposal is None and form is None and ask.yes:
        longest = found.longest_prose()
        option = "--text-column NAME" if longest is None else f"--text-column {longest}"
        raise ValueError(
            f"{path}: no column has both a usual name and sentences in it, so nothing is proposed: say what the "
            f"columns above are, such as {option}"
        )
    chosen = ask.value("format", form, f"Format: {', '.join(ASKED_FORMATS)}", proposal, _format)
    strange = [key for key, name in given.items() if name is not None and key not in _COLUMNS[chosen]]
    if strange:
        raise ValueError(
            f"--{strange[0]}-column does not belong to the format {chosen}, whose columns are "
            f"{' and '.join(f'--{key}-column' for key in _COLUMNS[chosen])}"
        )
    names: dict[str, Any] = {}
    for key, about in _COLUMNS[chosen].items():
        option = f"{key}-column"
        proposed = found.proposed(key, list(names.values()))
        words = f"Column of {about.words}"
        if about.optional and given[key] is None and proposed is None:
            continue
        names[key] = ask.value(option, given[key], words, proposed, lambda name: _column(path, found, name))
    return DataConfig(path=path, format=chosen, max_length=2, **how, columns=names)


def _unit(ask: _Questions, options: _Options, found: Columns, section: DataConfig) -> str | None:
    """Return the column of the user's id; None: records are the units."""
    if options.unit == _RECORD:
        return None
    proposal = found.people[0] if found.people else None
    check = lambda name: _column(section.path, found, name)  # noqa: E731
    if options.unit_column is not None:
        return check(options.unit_column)
    if options.unit == "user" or options.max_rows_per_unit is not None:
        return ask.value("unit-column", None, "Column with the user's id", proposal, check)
    note = (
        "Who is protected: one record by itself, or all records of one person together? If a person may have several "
        "records, name the column of their ids."
    )
    answer = ask.value(
        "unit-column",
        None,
        f"Column with the person's id, or {_RECORD}",
        proposal or _RECORD,
        lambda name: name if name == _RECORD else check(name),
        note,
    )
    if answer == _RECORD and _RECORD not in found.kinds:
        return None
    if ask.yes:
        typer.echo(f"all records with the same {answer} are protected together (--unit record: each by itself)")
    return str(answer)


def _without_missing(ask: _Questions, found: Columns, section: DataConfig, of_user: str | None) -> DataConfig:
    """Return the section with what happens to records that lack a value; it is asked where the first records do."""
    from dpllm.config.data_section import MISSING

    needed = [*section.form.required, *([] if of_user is None else [of_user])]
    lacking = [name for name in needed if name in found.facts and found.facts[name].empty]
    if not lacking:
        return section
    words = f"some records have no value in {' and '.join(lacking)}"
    if ask.yes:
        raise ValueError(
            f"{words}: data.missing=drop, after the path, leaves them out before N is counted; or fill the values in"
        )

    def check(answer: str) -> str:
        choice("data.missing", answer, MISSING)
        return answer

    answer = ask.value("data.missing", None, f"{words}: drop them, before N is counted, or error", "drop", check)
    return replace(section, missing=answer)


def _classes(ask: _Questions, form: str, given: str | None) -> int | list[str] | None:
    if FORMATS[form].holds is not TextLabel:
        if given is not None:
            fitting = " or ".join(formats_of(TextLabel))
            raise ValueError(f"--classes belongs to the format {fitting}, and the format is {form}: omit it")
        return None
    if given is None and ask.yes:
        raise ValueError(
            "--classes is missing: name the classes in order (--classes no,yes) or give their number. They are public "
            "facts, and are not collected from the private labels. --format text trains on the texts alone"
        )
    words = "Names of the classes, in order, separated by commas, or their number"
    return ask.value("classes", given, words, None, _class_names)


def _model(ask: _Questions, given: str | None) -> tuple[str, ModelAtHand | None]:
    """Return the name of the model, and its facts if it is here."""

    def check(name: str) -> tuple[str, ModelAtHand | None]:
        place = Path(_some_text(name)).expanduser()
        typer.echo(f"looking at the model {name}; loading torch and transformers takes some seconds")
        from dpllm.models.local_model import model_at_hand

        path = str(place) if place.is_dir() else name
        return path, model_at_hand(path)

    return ask.value("model", given, "The model (a folder, or a Hub id such as openai-community/gpt2)", None, check)


def _new_folder(name: str) -> Path:
    """Return a folder for the run that does not exist yet."""
    folders = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in folders if not folder.exists())


def _write(target: Path, made: NewRecipe) -> list[str]:
    """Write the recipe after it was read back and checked; return the parts that were not checked."""
    from dpllm.config import load_recipe
    from dpllm.training.preflight import check_recipe

    target.parent.mkdir(parents=True, exist_ok=True)
    trial = target.with_name(f".{target.name}.new")
    try:
        trial.write_text(made.text(), encoding="utf-8")
        notes = check_recipe(load_recipe(trial), to_train=False)
        trial.rename(target)
    finally:
        trial.unlink(missing_ok=True)
    return notes


def _show(target: Path, wishes: Wishes, made: NewRecipe, notes: Sequence[str]) -> None:
    from dpllm.planning.suggest import flow

    plan, look, console = made.plan, made.look, Console(highlight=False, soft_wrap=True)
    noun = "users" if plan.unit == "user" else "records"
    of = f", by {wishes.unit_column}" if plan.unit == "user" else ""
    rows = [
        ("records", f"{look.records:,}"),
        ("protected", f"{made.population:,} {noun}{of}; {plan.num_units:,} are trained on, the others are held out"),
        ("guarantee", f"{plan.guarantee}, for each of them"),
        ("steps", f"{plan.num_steps} of {plan.expected_batch_size:,} {noun} on average"),
        ("noise", f"{flow(made.value('privacy.noise'))}, σ = {plan.noise_multiplier:.4g}"),
        ("learning rate", f"{made.value('train.learning_rate'):g}"),
        ("trained", "an adapter" if any(item.key == "model.adapter" for item in made.settings) else "all weights"),
        ("row", f"at most {made.value('data.max_length')} tokens"),
        *(("read", line) for line in look.read),
    ]
    console.print(f"\n[bold]{escape(str(target))}[/bold]")
    for name, value in rows:
        console.print(f"  [dim]{name:<13}[/dim]  {escape(value)}")
    how = "counted by the model's tokenizer" if look.measured else "estimated, 4 characters a token"
    seen = [
        f"tokens of a record: half have at most {look.tokens[0]:,}, 95 % at most {look.tokens[1]:,} ({how}); "
        f"{look.cut:.0%} are longer than a row"
    ]
    if look.rows is not None:
        seen.append(f"records of a user: half have at most {look.rows[0]:,}, 95 % at most {look.rows[1]:,}")
    console.print("\n[bold]Private, for your eyes only[/bold]; no setting depends on it:")
    for line in seen:
        console.print(f"  {line}", markup=False)
    console.print("  A setting that you choose because of these figures is not covered by ε.")
    console.print(
        f"\nDependence on private records: the settings follow from N = {plan.num_units:,}, which is public by the "
        "definition of the guarantee, and from the names and kinds of the columns."
    )
    for note in (*made.notes, *notes):
        console.print(f"Note: {note}", markup=False)
    console.print("\n[bold]Next[/bold]")
    for command, about in _next(target):
        console.print(f"  {command}", markup=False, end="")
        console.print(f"   # {about}", style="dim")


def _next(target: Path) -> list[tuple[str, str]]:
    import shlex

    name = shlex.quote(str(target))
    return [
        (f"dpllm plan {name}", "the guarantee and the predicted noise; nothing is trained"),
        (f"dpllm train {name}", "train, and write model and privacy report"),
    ]


def _some_text(value: Any) -> str:
    if not str(value).strip():
        raise ValueError("give a name")
    return str(value).strip()


def _format(name: str) -> str:
    chosen = _ALIASES.get(name, name).replace("-", "_")
    if chosen not in ASKED_FORMATS:
        others = [one for one in FORMATS if one not in ASKED_FORMATS]
        raise ValueError(
            f"--format must be one of {', '.join(ASKED_FORMATS)}, got {name!r}{nearest(name, ASKED_FORMATS) or '.'} "
            f"For {' and '.join(others)}, begin with a recipe of your own (recipes/README.md)"
        )
    return chosen


def _format_of_options(given: dict[str, str | None]) -> str | None:
    """Return the format that the given columns imply."""
    keys = {key for key, name in given.items() if name is not None}
    fitting = [name for name, own in _COLUMNS.items() if keys & own.keys()]
    return min(fitting, key=lambda name: (len(keys - _COLUMNS[name].keys()), len(_COLUMNS[name])), default=None)


def _column(path: str, found: Columns, name: str) -> str:
    if name not in found.kinds:
        raise ValueError(
            f"{path}: no column '{name}'{nearest(name, found.kinds) or '.'} It has {', '.join(found.kinds)}"
        )
    return name


def _class_names(text: str) -> int | list[str]:
    if text.strip().isdecimal():
        return integer("--classes", int(text), 2)
    names = [name.strip() for name in text.split(",")]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"--classes must be two or more different names, or their number, got {text!r}")
    return names


def _epsilon(value: Any) -> float:
    from dpllm.mechanism.limits import MAX_TARGET_EPSILON

    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"ε must be a number such as 8, got {value!r}") from None
    return between("--epsilon", number, 0, MAX_TARGET_EPSILON, above=True)


def _checked_output(path: Any) -> Path:
    target = Path(path)
    if target.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output {target}: a recipe's name ends in .yaml")
    if target.exists():
        raise ValueError(f"--output {target} exists already, and it is not replaced: give another name, or remove it")
    return target

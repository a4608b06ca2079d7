"""`dpllm init`: write a recipe for the user's records, from their columns, a few answers, and rules."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import command, listed, show_table, wrapped
from dpllm.config.formats.catalogue import FORMATS
from dpllm.config.formats.record_format import TextLabel, columns_in
from dpllm.config.values import choice, integer, nearest

if TYPE_CHECKING:
    from dpllm.config import DataConfig
    from dpllm.data.columns import Columns
    from dpllm.planning.new_recipe import ModelAtHand, NewRecipe, Wishes

EPSILON = 8.0
RECORD = "record"
"""The answer that protects each record by itself."""
ASKED_FORMATS = tuple(name for name, kind in FORMATS.items() if kind.asked)
_ALIASES = {alias: name for name, kind in FORMATS.items() for alias in kind.aliases}
_COLUMNS = {name: columns_in(FORMATS[name]) for name in ASKED_FORMATS}
_OUTPUT = "recipe.yaml"
_UNIT = "data.columns.unit"


@command("dpllm init notes.csv model=openai-community/gpt2 data.columns.unit=patient_id --yes")
def init(
    records: Annotated[
        str | None,
        typer.Argument(
            metavar="RECORDS",
            help="The private records: .jsonl, .csv, .parquet, .xlsx, .txt and more; a file, a folder or a pattern.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="What you have decided, as in a recipe: model=FOLDER, privacy.epsilon=3, data.columns.text=note, "
            "data.columns.unit=patient_id (null: each record by itself), data.eval=0.1, data.max_length=256, "
            "data.class_names=[no, yes], data.missing=drop, model.adapter=null (train all weights) or {r: 8}.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The recipe to write; by default recipe.yaml.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what the columns show.")] = False,
) -> None:
    """Look at your records, and write a recipe for them: every setting is computed, with its reason.

    In a terminal it asks for what the columns do not show; elsewhere it stops with the key that answers. Only their
    public number and the names and kinds of their columns determine a setting.
    """
    words = [*(keys or ())]
    if records is not None and "=" in records and not Path(records).exists():
        words, records = [records, *words], None
    given = _Given.of(words, records)
    ask = _Questions(not yes and at_terminal())
    if output is not None or not ask.asks:
        output = _checked_output(output or _OUTPUT)
    path, found = _records(ask, given)
    section = _data(ask, path, found, given)
    of_user = _unit(ask, given, found, section)
    if "missing" not in given.reading:
        section = _without_missing(ask, found, section, of_user)
    classes = _classes(ask, section, given)
    name, at_hand = _model(ask, given)
    epsilon = ask.value(
        "privacy.epsilon", given.epsilon, "ε of the whole run (up to 1 strong, up to 10 reasonable)", EPSILON, _epsilon
    )
    target = output or ask.value("--output", None, "The recipe to write", _OUTPUT, _checked_output)
    typer.echo(f"reading all records of {path}; then computing noise and learning rate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers, about names of options that will change
        from dpllm.planning.new_recipe import Wishes, new_recipe

        wishes = Wishes(
            data=section,
            model=name,
            epsilon=epsilon,
            output_dir=given.output_dir or str(_new_folder(target.stem)),
            unit_column=of_user,
            rows=given.rows,
            classes=classes,
            adapter=given.adapter,
            rank=given.rank,
            max_length=given.max_length,
            held_out=given.held_out,
            start_is_independent=given.start_is_independent,
        )
        made = new_recipe(wishes, at_hand)
        notes = _write(target, made)
    _show(target, wishes, made, notes if at_hand is not None else ())


def at_terminal() -> bool:
    """Return whether somebody can answer."""
    return sys.stdin.isatty()


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The keys of the command line, checked before anything is read; None: not given."""

    path: str | None
    reading: Mapping[str, Any]
    """How the records are read: keys of `READING`."""
    columns: Mapping[str, Any]
    form: str | None
    classes: Any
    max_length: int | None
    held_out: float | None
    model: str | None
    adapter: bool | None
    rank: int | None
    start_is_independent: bool
    epsilon: Any
    rows: int | None
    output_dir: str | None

    @classmethod
    def of(cls, words: Sequence[str], records: str | None) -> _Given:
        """Return the values of key=value.

        Raises:
            ValueError: a key is none that init takes, a value is out of range, or two contradict each other.
        """
        from dpllm.config import DataConfig, ModelConfig, PrivacyConfig
        from dpllm.config.data_section import READING
        from dpllm.config.recipe_file import apply_override, build

        others = ("path", "columns", "format", "class_names", "max_length", "eval")
        known = [f"data.{name}" for name in (*READING, *others)]
        known += ["model", "model.name", "model.adapter", "model.start_is_independent", "model.num_labels"]
        known += ["privacy.epsilon", "privacy.max_rows_per_unit", "train.output_dir"]
        raw: dict[str, Any] = {}
        for word in words:
            key = word.partition("=")[0].strip()
            if "=" in word and key not in known and not key.startswith(("data.columns.", "model.adapter.")):
                raise ValueError(
                    f"{key}: init takes {', '.join(known)}{nearest(key, known) or '.'} Change other keys in the recipe "
                    "that it writes"
                )
            apply_override(raw, word)
        data, model, privacy = raw.get("data", {}), raw.get("model", {}), raw.get("privacy", {})
        model = model if isinstance(model, dict) else {"name": model}
        if records is not None and data.get("path", records) != records:
            raise ValueError(f"the private records are given twice, {records} and data.path={data['path']}")
        unknown = [key for key in model if f"model.{key}" not in known]
        if unknown:
            raise ValueError(f"model.{unknown[0]}: init takes {', '.join(one for one in known if one[:5] == 'model')}")
        if isinstance(data.get("eval"), str | dict):
            raise ValueError("data.eval: init takes a share of the units, or null; set a path in the recipe it writes")
        columns, rows, epsilon = data.get("columns") or {}, privacy.get("max_rows_per_unit"), privacy.get("epsilon")
        if not isinstance(columns, dict) or not all(one is None or isinstance(one, str) for one in columns.values()):
            raise ValueError(f"data.columns must be names of columns such as {{text: note}}, got {columns!r}")
        if rows is not None and "unit" in columns and columns["unit"] is None:
            raise ValueError(f"privacy.max_rows_per_unit belongs to people, and {_UNIT}=null protects single records")
        plain = {key: value for key, value in data.items() if key not in ("path", "columns", "format", "class_names")}
        build(DataConfig, {**plain, "path": "records", "eval": data.get("eval") or None}, "data")
        read = build(ModelConfig, {**model, "name": model.get("name") or "model"}, "model")
        build(
            PrivacyConfig, {"unit": "column", **privacy, "epsilon": EPSILON if epsilon is None else epsilon}, "privacy"
        )
        if strange := [key for key in read.adapter or {} if key != "r"]:
            raise ValueError(f"model.adapter.{strange[0]}: init takes the rank r, and computes the rest")
        if (rank := (read.adapter or {}).get("r")) is not None:
            integer("model.adapter.r", rank, 1)
        return cls(
            path=records or data.get("path"),
            reading={key: value for key, value in data.items() if key in READING},
            columns=columns,
            form=data.get("format"),
            classes=data.get("class_names", model.get("num_labels")),
            max_length=data.get("max_length"),
            held_out=(data["eval"] or 0.0) if "eval" in data else None,
            model=model.get("name"),
            adapter=None if "adapter" not in model else model["adapter"] is not None,
            rank=rank,
            start_is_independent=read.start_is_independent,
            epsilon=epsilon,
            rows=rows,
            output_dir=raw.get("train", {}).get("output_dir"),
        )


@dataclass(frozen=True)
class _Questions:
    """Asks for values that the command line lacks, or takes the proposals where nobody can answer.

    Attributes:
        asks: whether somebody answers.
    """

    asks: bool

    def value(
        self, key: str, given: Any, words: str, proposal: Any, check: Callable[[Any], Any], note: str = ""
    ) -> Any:
        """Return a checked value; a wrong answer is asked again, a wrong key is an error.

        Args:
            key: the key of the recipe, or the option.
            given: its value; None: it was not given.
            words: the question.
            proposal: the value without an answer; None: there is none.
            check: returns the value as it is used, or raises ValueError.
            note: printed above the question.

        Raises:
            ValueError: the given value is wrong, or there is neither a value nor an answer nor a proposal.
        """
        if given is not None:
            return check(given)
        if not self.asks:
            if proposal is None:
                raise ValueError(f"{key} is missing, and nothing shows it: add {key}=…")
            return check(proposal)
        if note:
            typer.echo(wrapped(note))
        while True:
            try:
                answer = typer.prompt(
                    words, default="" if proposal is None else proposal, show_default=proposal is not None
                )
            except typer.Abort as error:
                typer.echo("")
                raise ValueError(
                    f"the questions ended at {key}, and nothing was written: add {key}=…, or take what the columns "
                    "show with --yes"
                ) from error
            try:
                return check(answer)
            except ValueError as error:
                typer.echo(f"  {error}")


def _records(ask: _Questions, given: _Given) -> tuple[str, Columns]:
    """Return the place of the records, and the columns of the file."""

    def check(name: str) -> tuple[str, Columns]:
        path = _some_text(name)
        typer.echo(f"reading the first records of {path}")
        from dpllm.config import DataConfig
        from dpllm.data.columns import columns_of

        return path, columns_of(DataConfig(path=path, max_length=2, **given.reading))

    path, found = ask.value("RECORDS", given.path, "The private records (file, folder or pattern)", None, check)
    decided = {"unit"} < given.columns.keys()  # nothing is proposed for the unit, nor for the texts
    for name, fault in found.faults.items():
        if name in given.columns.values() or not decided:
            raise ValueError(f"{fault}. Or name the columns to use: data.columns.text=… and {_UNIT}=… (or null)")
    _show_columns(path, found, _uses(found, given))
    return path, found


def _uses(found: Columns, given: _Given) -> dict[str, str]:
    """Return column -> use: the given ones, and the proposed ones."""
    form = given.form or _format_of(given.columns) or found.guessed_format()
    uses: dict[str, str] = {}
    for key in _COLUMNS.get(str(form), {}):
        name = given.columns.get(key) or found.proposed(key, list(uses))
        if name is not None:
            uses[name] = key
    unit = given.columns.get("unit", next(iter(found.people), None))
    return {**uses, **({unit: "unit"} if unit is not None else {})}


def _show_columns(path: str, found: Columns, uses: Mapping[str, str]) -> None:
    rows = [
        (name, facts.example and f'"{facts.example}"', facts.words, f"→ {uses[name]}" if name in uses else "not used")
        for name, facts in found.facts.items()
    ]
    title = f"{path}, {len(rows)} columns (the examples are private, for your eyes only)"
    show_table(("column", "first value", "", "use"), rows, title, left=(0, 1, 2, 3))


def _data(ask: _Questions, path: str, found: Columns, given: _Given) -> DataConfig:
    """Return the section ``data`` without its length."""
    from dpllm.config import DataConfig

    columns = {key: name for key, name in given.columns.items() if key != "unit"}
    proposal = _format_of(columns) or found.guessed_format()
    other = found.format_of_others()
    if proposal is None and given.form is None and other is not None:
        raise ValueError(
            f"{path}: the columns {' and '.join(FORMATS[other]().required)} are those of {FORMATS[other].about} (data."
            f"format={other}), for which init writes no recipe: begin with one of recipes/README.md, or give data."
            "format and the columns"
        )
    if proposal is None and given.form is None and not ask.asks:
        raise ValueError(
            f"{path}: no column has both a usual name and sentences in it, so nothing is proposed: say what the "
            f"columns above are, such as data.columns.text={found.longest_prose() or 'NAME'}"
        )
    chosen = ask.value("data.format", given.form, f"Format: {', '.join(ASKED_FORMATS)}", proposal, _format)
    if strange := [key for key in columns if key not in _COLUMNS[chosen]]:
        raise ValueError(
            f"data.columns.{strange[0]} does not belong to the format {chosen}, whose columns are "
            f"{', '.join(_COLUMNS[chosen])}"
        )
    names: dict[str, Any] = {}
    for key, about in _COLUMNS[chosen].items():
        proposed = found.proposed(key, list(names.values()))
        if about.optional and columns.get(key) is None and proposed is None:
            continue
        names[key] = ask.value(
            f"data.columns.{key}",
            columns.get(key),
            f"Column of {about.words}",
            proposed,
            lambda name: _column(path, found, name),
        )
    return DataConfig(path=path, format=chosen, max_length=2, **given.reading, columns=names)


def _unit(ask: _Questions, given: _Given, found: Columns, section: DataConfig) -> str | None:
    """Return the column of the person's id; None: records are the units."""

    def column(name: Any) -> str:
        own = _column(section.path, found, name)
        replace(section, columns={**section.columns, "unit": own})  # which refuses a column of texts
        return own

    if "unit" in given.columns:
        name = given.columns["unit"]
        return None if name is None else column(name)
    note = (
        "Who is protected: one record by itself, or all records of one person together? If a person may have several "
        "records, name the column of their ids."
    )
    proposal = next(iter(found.people), None) or (None if given.rows is not None else RECORD)
    answer = ask.value(
        _UNIT,
        None,
        f"Column with the person's id, or {RECORD}",
        proposal,
        lambda name: name if name == RECORD else column(name),
        note,
    )
    alone = answer == RECORD and RECORD not in found.kinds
    if not ask.asks:
        typer.echo(
            wrapped(
                f"each record is protected by itself ({_UNIT}=COLUMN: all records of a person together)"
                if alone
                else f"all records with the same {answer} are protected together ({_UNIT}=null: each by itself)"
            )
        )
    return None if alone else str(answer)


def _without_missing(ask: _Questions, found: Columns, section: DataConfig, of_user: str | None) -> DataConfig:
    """Return the section with ``missing``; ask for it if one of the first records lacks a value."""
    from dpllm.config.data_section import MISSING

    needed = [*section.form.required, *([] if of_user is None else [of_user])]
    lacking = [name for name in needed if name in found.facts and found.facts[name].empty]
    if not lacking:
        return section
    words = f"some records have no value in {' and '.join(lacking)}"
    if not ask.asks:
        raise ValueError(
            f"{words}: data.missing=drop leaves them out before N is counted; or fill the values in the file"
        )

    def check(answer: str) -> str:
        choice("data.missing", answer, MISSING)
        return answer

    answer = ask.value("data.missing", None, f"{words}: drop them, before N is counted, or error", "drop", check)
    return replace(section, missing=answer)


def _classes(ask: _Questions, section: DataConfig, given: _Given) -> int | list[str] | None:
    if section.form.holds is not TextLabel:
        if given.classes is not None:
            raise ValueError(f"classes belong to a classification, and the format is {section.form.name}: omit them")
        return None
    if given.classes is None and not ask.asks:
        raise ValueError(
            "the classes are missing: name them in order (data.class_names=[no, yes]) or give their number "
            "(model.num_labels=2). They are public facts, and are not collected from the private labels. data.format="
            "text trains on the texts alone"
        )
    words = "Names of the classes, in order, separated by commas, or their number"
    return ask.value("data.class_names", given.classes, words, None, _class_names)


def _model(ask: _Questions, given: _Given) -> tuple[str, ModelAtHand | None]:
    """Return the name of the model, and its facts if it is here."""

    def check(name: str) -> tuple[str, ModelAtHand | None]:
        place = Path(_some_text(name)).expanduser()
        typer.echo(f"looking at the model {name}; this loads torch")
        from dpllm.planning.new_recipe import model_at_hand

        path = str(place) if place.is_dir() else name
        return path, model_at_hand(path)

    words = "The model (a folder, or a Hub id such as openai-community/gpt2)"
    return ask.value("model", given.model, words, None, check)


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
    from dpllm.training.settings import flow

    plan, look = made.plan, made.look
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
    typer.echo(f"\n{target}\n{listed(rows)}")
    how = "counted by the model's tokenizer" if look.measured else "estimated, 4 characters a token"
    seen = [
        f"tokens of a record: half have at most {look.tokens[0]:,}, 95 % at most {look.tokens[1]:,} ({how}); "
        f"{look.cut:.0%} are longer than a row"
    ]
    if look.rows is not None:
        seen.append(f"records of a user: half have at most {look.rows[0]:,}, 95 % at most {look.rows[1]:,}")
    seen.append("A setting that you choose because of these figures is not covered by ε.")
    typer.echo("\nPrivate, for your eyes only; no setting depends on it:\n" + wrapped("\n".join(seen), 2))
    typer.echo(
        "\n"
        + wrapped(
            f"Dependence on private records: the settings follow from N = {plan.num_units:,}, which is public by the "
            "definition of the guarantee, and from the names and kinds of the columns."
        )
    )
    for note in (*made.notes, *notes):
        typer.echo(wrapped(f"Note: {note}"))
    name = shlex.quote(str(target))
    typer.echo(f"\nNext\n  dpllm plan {name}    # the guarantee and every setting; nothing is trained")
    typer.echo(f"  dpllm train {name}   # train, and write model and privacy report")


def _some_text(value: Any) -> str:
    if not str(value).strip():
        raise ValueError("give a name")
    return str(value).strip()


def _format(name: str) -> str:
    chosen = _ALIASES.get(name, name).replace("-", "_")
    if chosen not in ASKED_FORMATS:
        others = [one for one in FORMATS if one not in ASKED_FORMATS]
        raise ValueError(
            f"data.format must be one of {', '.join(ASKED_FORMATS)}, got {name!r}{nearest(name, ASKED_FORMATS) or '.'} "
            f"For {' and '.join(others)}, begin with a recipe of your own (recipes/README.md)"
        )
    return chosen


def _format_of(columns: Mapping[str, Any]) -> str | None:
    """Return the format that the given columns imply."""
    keys = {key for key, name in columns.items() if name is not None}
    fitting = [name for name, own in _COLUMNS.items() if keys & own.keys()]
    return min(fitting, key=lambda name: (len(keys - _COLUMNS[name].keys()), len(_COLUMNS[name])), default=None)


def _column(path: str, found: Columns, name: Any) -> str:
    if name not in found.kinds:
        raise ValueError(
            f"{path}: no column '{name}'{nearest(str(name), found.kinds) or '.'} It has {', '.join(found.kinds)}"
        )
    return str(name)


def _class_names(given: Any) -> int | list[str]:
    if isinstance(given, int) or (isinstance(given, str) and given.strip().isdecimal()):
        return integer("model.num_labels", int(given), 2)
    names = [str(name).strip() for name in (given if isinstance(given, list) else str(given).split(","))]
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"data.class_names must be two or more different names, or their number, got {given!r}")
    return names


def _epsilon(value: Any) -> float:
    from dpllm.config import PrivacyConfig
    from dpllm.config.recipe_file import build

    with contextlib.suppress(TypeError, ValueError):  # an answer is a text
        value = float(value)
    return float(build(PrivacyConfig, {"epsilon": value}, "privacy").epsilon or 0)


def _checked_output(path: Any) -> Path:
    target = Path(path)
    if target.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output {target}: a recipe's name ends in .yaml")
    if target.exists():
        raise ValueError(f"--output {target} exists already, and it is not replaced: give another name, or remove it")
    return target

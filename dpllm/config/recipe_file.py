"""Read recipe files with overrides, check them by section, and write them.

Every error names the key, its value, and the line or the override that is at fault. Values are checked when they are
read (`dpllm.config.sections`). An unknown key is an error: a misspelt `noise_multiplier` must never be ignored. The
functions import the sections, so that the command line's help does not wait for pydantic.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dpllm import registry
from dpllm.config import values
from dpllm.config.files import write_file
from dpllm.config.shipped import recipe_file, shipped_recipes
from dpllm.config.values import ConfigError, nearest
from dpllm.config.yaml12 import read_yaml, read_yaml_lines, write_yaml

if TYPE_CHECKING:
    from dpllm.config.query_recipe import QueryRecipe
    from dpllm.config.recipe import Recipe

RECIPE_FILE = "recipe.yaml"
"""The recipe of a run, in its folder."""
UNIT = "unit"
"""The key of ``data.columns`` for the column whose value identifies the protected unit."""

_Section = TypeVar("_Section")
_Made = TypeVar("_Made")
_SHORT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "model": lambda value: {"name": value},
    "data.eval": lambda value: {"path" if isinstance(value, str) else "share": value},
}
"""Keys whose value may be short for a mapping."""


class RecipeError(ConfigError):
    """An error of a recipe's key, whose place in the file or the overrides is added by `Source`.

    Attributes:
        key: the dotted path; "": the whole recipe.
    """

    def __init__(self, key: str, words: str) -> None:
        """Store the key with the words of the error."""
        super().__init__(words)
        self.key = key


@dataclass(frozen=True)
class Source:
    """The file and the overrides of a recipe, for errors.

    Attributes:
        name: the file.
        lines: line of each key, by its path.
        overrides: the assignments, in their order.
    """

    name: str
    lines: Mapping[tuple[Any, ...], int]
    overrides: Sequence[str]

    def place(self, key: str, cause: int = 0) -> str:
        """Return the place of a key: the last override that wrote it, or the line of it or of the section around it.

        Args:
            key: the dotted path.
            cause: number of an override, from 1 on, that is named unless a later one wrote the key. 0: none.
        """
        written = [
            number
            for number, override in enumerate(self.overrides, 1)
            if f"{key}.".startswith(f"{override.partition('=')[0].strip()}.")
        ]
        if last := max([cause, *written]):
            return f"{self.name}, override {values.shown_text(self.overrides[last - 1])}"
        parts = key.split(".") if key else []
        lines = (self.lines.get(tuple(parts[:count])) for count in range(len(parts), 0, -1))
        line = next((line for line in lines if line is not None), None)
        return self.name if line is None else f"{self.name}, line {line}"


@contextlib.contextmanager
def located(recipe: Recipe) -> Iterator[None]:
    """Add the place in a recipe to an error that begins with one of its keys, such as one of ``TrainingArguments``.

    Args:
        recipe: the recipe, which need not be from a file.
    """
    try:
        yield
    except ConfigError as error:
        key = re.match(r"(\w+)((?:\.[\w-]+)+|(?=:))", str(error))
        if recipe.source is None or key is None or not (hasattr(recipe, key[1]) or key[1] in recipe.beside):
            raise
        raise ConfigError(f"{recipe.source.place(key[0])}: {error}") from error


class RawRecipe(dict[str, Any]):
    """The plain values of a recipe file, and where they are from."""

    source: Source


def read_raw(path: str | Path, overrides: Sequence[str] = ()) -> RawRecipe:
    """Return the sections of a recipe file as plain values, with overrides applied; see `load_recipe`.

    Raises:
        ConfigError: the file cannot be read or is no mapping, or an override has another form.
    """
    try:
        raw, lines = read_yaml_lines(recipe_file(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason} at {error.start}"
        if isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{path}: there is no such file, and no shipped recipe has this name{_similar(Path(path).stem)} "
                "dpllm recipes lists the shipped recipes, and dpllm init writes one for your own records"
            ) from error
        raise ConfigError(f"{path}: cannot be read ({words})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a mapping with the sections model, data, privacy and train")
    made = RawRecipe(raw)
    made.source = Source(str(path), lines, tuple(overrides))
    for override in overrides:
        apply_override(made, override)
    _refuse_epochs_without_effect(made, overrides)
    if isinstance(made.get("model"), str):
        made["model"] = _SHORT["model"](made["model"])
    return made


def _similar(name: str) -> str:
    """Return the names of the shipped recipes that are close to a name, as a question; a full stop if there are none.

    >>> _similar("users")
    '; did you mean federated_users or quickstart_users?'
    """
    known = list(shipped_recipes())
    found = [one for one in known if name and name in one] or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(found)}?" if found else "."


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Write the value of ``key=value`` into the sections of a recipe; see `load_recipe`.

    Raises:
        ConfigError: it has another form, or its value is no YAML.
    """
    key, equals, text = override.partition("=")
    parts = (key := key.strip()).split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} must read key=value, such as privacy.epsilon=3")
    try:
        value = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {values.shown(override)}: the value {error}") from error
    place = raw
    for depth, part in enumerate(parts[:-1]):
        if place.get(part) is None:
            place[part] = {}
        if (short := _SHORT.get(".".join(parts[: depth + 1]))) and not isinstance(place[part], dict):
            place[part] = short(place[part])
        place = place[part]
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: '{'.'.join(parts[: depth + 1])}' is a value, not a section")
    if not text.strip() and isinstance(lost := place.get(parts[-1]), dict) and lost:
        raise ConfigError(
            f"override {override!r} has no value, and would remove {', '.join(f'{key}.{one}' for one in lost)}: add "
            f"the value, or write {key}=null to remove them"
        )
    _refuse_lost_unit(raw, parts, value, override)
    place[parts[-1]] = value


def _refuse_lost_unit(raw: Mapping[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Refuse a mapping that silently drops the column of the units: single records would be protected."""
    columns = (raw.get("data") or {}).get("columns") if isinstance(raw.get("data"), Mapping) else None
    unit = columns.get(UNIT) if isinstance(columns, Mapping) else None
    if unit is None or parts not in (["data"], ["data", "columns"]):
        return
    inside = (
        value if parts == ["data", "columns"] else (value or {}).get("columns") if isinstance(value, dict) else None
    )
    if not isinstance(inside, Mapping) or UNIT not in inside:
        raise ConfigError(
            f"override {override!r} replaces the whole mapping and drops data.columns.{UNIT}={unit}, so single records "
            f"would be protected. Override one column, such as data.columns.text=note, or add {UNIT}: {unit}; "
            f"{UNIT}: null protects single records"
        )


def _refuse_epochs_without_effect(raw: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse num_train_epochs next to max_steps: TrainingArguments would ignore it."""
    train, key = raw.get("train"), "train.num_train_epochs"
    override = next((one for one in reversed(overrides) if one.partition("=")[0].strip() == key), None)
    if override is None or not isinstance(train, Mapping) or train.get("num_train_epochs") is None:
        return
    if (steps := train.get("max_steps")) not in (None, -1):
        raise ConfigError(f"override {override} has no effect while train.max_steps={steps}: add train.max_steps=")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key=value` overrides.

    Numbers such as ``1e-6`` are floats, and only ``true`` and ``false`` are booleans (so ``eval_strategy: no`` stays
    the text "no"). A repeated key is refused.

    Args:
        path: a YAML file with the sections of `Recipe`, or the name of a shipped recipe ("quickstart").
        overrides: dotted assignments, each value parsed as YAML: ``"privacy.epsilon=3"``. A later assignment
            overrides an earlier one; ``key=`` and ``key=null`` reset a key to nothing, and only ``key=null`` a section.

    Returns:
        The checked recipe.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    from dpllm.config.recipe import Recipe

    def make(raw: RawRecipe) -> Recipe:
        _hand_over_unit(raw)
        recipe = build(Recipe, raw)
        object.__setattr__(recipe, "source", raw.source)
        return recipe

    return _placed(path, overrides, make)


def _placed(path: str | Path, overrides: Sequence[str], make: Callable[[RawRecipe], _Made]) -> _Made:
    """Make a recipe from a file; an error gets the line of its key, or the override that caused it.

    Raises:
        ConfigError: as `load_recipe`.
    """
    raw = read_raw(path, overrides)
    try:
        return make(raw)
    except RecipeError as error:
        cause = next(
            (count for count in range(len(overrides), 0, -1) if not _fails(path, overrides[: count - 1], make, error)),
            0,
        )
        raise ConfigError(f"{raw.source.place(error.key, cause)}: {error}") from error


def _fails(path: str | Path, overrides: Sequence[str], make: Callable[[RawRecipe], Any], error: RecipeError) -> bool:
    """Return whether a recipe has this error with fewer overrides too."""
    try:
        make(read_raw(path, overrides))
    except ConfigError as other:
        return str(other) == str(error)
    return False


def _hand_over_unit(raw: RawRecipe) -> None:
    """Copy ``data.columns.unit`` of a file into its section ``privacy``.

    Raises:
        ConfigError: the section has a unit of its own.
    """
    data, privacy = raw.get("data"), raw.get("privacy")
    if isinstance(privacy, dict):
        if UNIT in privacy:
            raise RecipeError(
                "privacy.unit",
                "unknown key 'privacy.unit'; the column whose value identifies the unit is data.columns.unit",
            )
        columns = data.get("columns") if isinstance(data, dict) else None
        if isinstance(columns, Mapping) and isinstance(columns.get(UNIT), str):
            raw["privacy"] = {**privacy, UNIT: columns[UNIT]}


def read_section(section: type[_Section], raw: Mapping[str, Any], source: str, name: str) -> _Section:
    """Make one section of its mapping, with the errors of a recipe.

    Args:
        section: its class, such as `PrivacyConfig`.
        raw: keys and values.
        source: where the mapping is from, for messages.
        name: of the section.

    Raises:
        ConfigError: a key is unknown, missing or unusable; the message names it.
    """
    try:
        return build(section, raw, name)
    except RecipeError as error:
        raise ConfigError(f"{source}: {error}") from error


def build(section: type[_Section], raw: Mapping[str, Any], name: str = "") -> _Section:
    """Make a section of its mapping, and the sections inside.

    Args:
        section: its class.
        raw: keys and values; an empty value means the default, as in ``train:`` with nothing below it.
        name: dotted path of the section; "": the whole recipe.

    Raises:
        RecipeError: a key is unknown, missing or unusable; the message names it.
    """
    from dpllm.config.recipe import NESTED, Recipe
    from dpllm.config.sections import with_section

    of_methods = registry.sections_beside_train() if section is Recipe else {}
    fields = {item.name: item for item in dataclasses.fields(section) if item.name != "beside"}  # type: ignore[arg-type]
    prefix, known = f"{name}." if name else "", [*fields, *of_methods]
    for key in raw:
        if key not in known:
            close = _likely(str(key), known, prefix)
            hint = f"did you mean '{close}'? " if close else ""
            methods = f"; installed methods: {registry.installed()}" if section is Recipe else ""
            raise RecipeError(
                f"{prefix}{key}", f"unknown key '{prefix}{key}'; {hint}Known here: {', '.join(known)}{methods}"
            )
    given = {key: copy.deepcopy(value) for key, value in raw.items() if value is not None}
    for key, item in fields.items():
        required = item.default is item.default_factory is dataclasses.MISSING
        if required and key not in given:
            raise RecipeError(name, f"missing key '{prefix}{key}'; it has no default")
    for key, nested in {**NESTED.get(section, {}), **of_methods}.items():
        if key in given and not isinstance(given[key], Mapping):
            raise _no_mapping(f"{prefix}{key}", nested, given[key])
        if key in given:
            given[key] = build(nested, given[key], f"{prefix}{key}")
    if of_methods:
        given["beside"] = {key: given.pop(key) for key in of_methods if key in given}
    try:
        return section(**given)
    except ConfigError as error:
        path, words = with_section(str(error), name, section)
        raise RecipeError(path, f"{f'section {name!r}: ' if path == name != '' else ''}{words}") from error


_MAIN_KEYS = {"data": "path", "privacy": "epsilon", "microbatch": "tokens"}
"""Section -> the key that a value without one is meant for."""


def _no_mapping(name: str, section: type, value: Any) -> RecipeError:
    """Return the error of a section that has a value instead of keys."""
    known = [item.name for item in dataclasses.fields(section) if item.name != UNIT]
    main = _MAIN_KEYS.get(name.rpartition(".")[2], known[0])
    keys = f"its keys are {', '.join(known)}; " if len(known) < 9 else ""
    given = values.shown_text(str(value))
    return RecipeError(
        name, f"'{name}' must be a mapping, got {values.shown(value)}: {keys}perhaps you mean {name}.{main}={given}"
    )


def _likely(key: str, known: Sequence[str], prefix: str) -> str | None:
    """Return the known dotted key that is probably meant by an unknown one, or None.

    >>> _likely("eval_path", ["path", "eval"], "data."), _likely("text_column", ["columns"], "data.")
    ('data.eval', 'data.columns.text')
    """
    if key == UNIT or key.endswith("_column"):
        return f"data.columns.{key.removesuffix('_column')}"
    longer = next((f"{prefix}{one}" for one in known if key.startswith(f"{one}_")), None)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return longer or (f"{prefix}{close[0]}" if close else None)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain nested dictionaries, including every default."""
    plain = dataclasses.asdict(recipe)
    beside = plain.pop("beside")
    del plain["privacy"][UNIT]  # it is data.columns.unit
    return {**plain, **beside}


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the resolved recipe; `load_recipe` returns an equal recipe from the file."""
    write_file(path, write_yaml(recipe_to_dict(recipe)))


def method_in(path: str | Path, overrides: Sequence[str] = ()) -> str | None:
    """Return the name of the method's section in a recipe file; None for the recipe of a training run.

    Raises:
        ConfigError: the file cannot be read, or has several such sections.
    """
    return _method_of(read_raw(path, overrides))


def load_query_recipe(path: str | Path, overrides: Sequence[str] = (), method: str | None = None) -> QueryRecipe:
    """Read the recipe of a query run and apply ``key=value`` overrides; as `load_recipe`.

    Args:
        path: a YAML file, or the name of a shipped recipe.
        overrides: dotted assignments, such as ``"privacy.epsilon=1"``.
        method: the section that it must have, with all its defaults if it is left out of the file. None: any.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    return _placed(path, overrides, lambda raw: _query_recipe(raw, path, method))


def _query_recipe(raw: RawRecipe, path: str | Path, method: str | None) -> QueryRecipe:
    from dpllm.config.query_recipe import SECTIONS, QueryRecipe

    named = _method_of(raw)
    if method is not None and named not in (None, method):
        raise ConfigError(f"{path} has the section {named}: run it with `{registry.method(named).invocation} {path}`")
    if method is not None and named is None and "train" in raw:
        raise ConfigError(
            f"{path} is the recipe of a training run: run it with `dpllm train`, or replace the section train by the "
            f"section {method}"
        )
    name = named or method
    if name is None:
        raise ConfigError(
            f"{path} has no section of a method: {', '.join(registry.query_sections()) or 'none is installed'}"
        )
    sections = {**SECTIONS, name: registry.query_sections()[name]}
    known = (*sections, "output_dir")
    for key in raw:
        if key not in known:
            raise RecipeError(
                key, f"unknown key {key!r}{nearest(str(key), known) or '.'} Known here: {', '.join(known)}"
            )
    _hand_over_unit(raw)
    made: dict[str, Any] = {}
    for key, section in sections.items():
        value = raw.get(key)
        if value is None and key in ("model", "release"):
            continue
        if value is not None and not isinstance(value, Mapping):
            raise _no_mapping(key, section, value)
        if value is None and key in ("data", "privacy"):
            raise RecipeError("", f"missing key {key!r}; it has no default")
        made[key] = build(section, value or {}, key)
    if not isinstance(raw.get("output_dir"), str) or not raw["output_dir"].strip():
        raise RecipeError(
            "output_dir", f"output_dir must be the name of the run's folder, got {raw.get('output_dir')!r}"
        )
    recipe = QueryRecipe(method=name, options=made.pop(name), output_dir=raw["output_dir"], **made)
    if recipe.data.eval.any and not registry.method(name).holds_records_out:
        raise RecipeError(
            "data.eval",
            f"data.eval holds records out, and `{registry.method(name).invocation}` uses every record: leave it out, "
            "and keep records that it must not use in another file",
        )
    return recipe


def _method_of(raw: RawRecipe) -> str | None:
    named = [name for name in registry.query_sections() if name in raw]
    if len(named) > 1:
        raise ConfigError(
            f"{raw.source.name} has the sections {' and '.join(named)}: a run has one method, keep one of them"
        )
    return named[0] if named else None

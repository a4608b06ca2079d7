"""Recipe files: read with overrides, checked by section, and written; each error names the key and its line.

Place in the flow: first. Every value is checked as soon as it is read (`dpllm.config.sections`). An unknown key is an
error: a misspelt `noise_multiplier` must never be ignored. The sections are imported where a recipe is made: the
command line's help does not wait for pydantic.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
_SHORT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "model": lambda value: {"name": value},
    "data.eval": lambda value: {"path" if isinstance(value, str) else "share": value},
}
"""Keys whose value may be short for a mapping."""


@dataclass(frozen=True)
class Source:
    """Where the values of a recipe are from, for errors.

    Attributes:
        name: of the file or the call.
        lines: of the keys, by their paths.
        overrides: the assignments, by the dotted paths that they set.
    """

    name: str
    lines: Mapping[tuple[Any, ...], int] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)

    def at(self, path: str) -> str:
        """Return the place of a key: the override that set it, or its line, or that of the section around it."""
        parts = path.split(".") if path else []
        around = [parts[:count] for count in range(len(parts), 0, -1)]
        for one in around:
            if (override := self.overrides.get(".".join(one))) is not None:
                return f"{self.name}, override {values.shown_text(override)}"
        lines = (self.lines.get(tuple(one)) for one in around)
        line = next((line for line in lines if line is not None), None)
        return self.name if line is None else f"{self.name}, line {line}"


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
    made.source = Source(str(path), lines)
    for override in overrides:
        apply_override(made, override)
        made.source.overrides[override.partition("=")[0].strip()] = override
    _refuse_epochs_without_effect(made, made.source.overrides)
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
    parts = key.strip().split(".")
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
    _refuse_lost_unit(raw, parts, value, override)
    place[parts[-1]] = value


def _refuse_lost_unit(raw: Mapping[str, Any], parts: Sequence[str], value: Any, override: str) -> None:
    """Refuse a mapping that replaces the column of the units by nothing without a word: fewer would be protected."""
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


def _refuse_epochs_without_effect(raw: Mapping[str, Any], overrides: Mapping[str, str]) -> None:
    """Refuse a number of epochs that the number of steps hides: TrainingArguments would ignore it."""
    train, override = raw.get("train"), overrides.get("train.num_train_epochs")
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
            overrides an earlier one; ``key=`` and ``key=null`` reset a key to nothing.

    Returns:
        The checked recipe.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, missing or unusable; the message names both.
    """
    from dpllm.config.recipe import Recipe

    raw = read_raw(path, overrides)
    _hand_over_unit(raw)
    return build(Recipe, raw, raw.source)


def _hand_over_unit(raw: RawRecipe) -> None:
    """Write ``data.columns.unit`` of a file into its section ``privacy``, which reads it.

    Raises:
        ConfigError: the section has a unit of its own.
    """
    data, privacy = raw.get("data"), raw.get("privacy")
    if isinstance(privacy, dict):
        if UNIT in privacy:
            raise ConfigError(
                f"{raw.source.at('privacy.unit')}: unknown key 'privacy.unit'; the column whose value identifies the "
                "unit is data.columns.unit"
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
    return build(section, raw, Source(source), name)


def build(section: type[_Section], raw: Mapping[str, Any], source: Source, name: str = "") -> _Section:
    """Make a section of its mapping, and the sections inside.

    Args:
        section: its class.
        raw: keys and values; an empty value means the default, as in ``train:`` with nothing below it.
        source: where the mapping is from.
        name: dotted path of the section; "": the whole recipe.

    Raises:
        ConfigError: a key is unknown, missing or unusable; the message names it and its place.
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
            raise ConfigError(
                f"{source.at(f'{prefix}{key}')}: unknown key '{prefix}{key}'; {hint}Known here: {', '.join(known)}"
                f"{methods}"
            )
    given = {key: copy.deepcopy(value) for key, value in raw.items() if value is not None}
    for key, item in fields.items():
        required = item.default is item.default_factory is dataclasses.MISSING
        if required and key not in given:
            raise ConfigError(f"{source.at(name)}: missing key '{prefix}{key}'; it has no default")
    for key, nested in {**NESTED.get(section, {}), **of_methods}.items():
        if key in given and not isinstance(given[key], Mapping):
            where = source.at(f"{prefix}{key}")
            raise ConfigError(f"{where}: '{prefix}{key}' must be a mapping, got {values.shown(given[key])}")
        if key in given:
            given[key] = build(nested, given[key], source, f"{prefix}{key}")
    if of_methods:
        given["beside"] = {key: given.pop(key) for key in of_methods if key in given}
    try:
        return section(**given)
    except ConfigError as error:
        path, words = with_section(str(error), name, section)
        raise ConfigError(f"{source.at(path)}: {f'section {name!r}: ' if path == name != '' else ''}{words}") from error


def _likely(key: str, known: Sequence[str], prefix: str) -> str | None:
    """Return the dotted key that an unknown one stands for, if one is likely.

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
    from dpllm.config.query_recipe import SECTIONS, QueryRecipe

    raw = read_raw(path, overrides)
    source, named = raw.source, _method_of(raw)
    if method is not None and named not in (None, method):
        raise ConfigError(f"{path} has the section {named}: run it with `dpllm {named} {path}`")
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
            raise ConfigError(
                f"{source.at(key)}: unknown key {key!r}{nearest(str(key), known) or '.'} Known here: {', '.join(known)}"
            )
    _hand_over_unit(raw)
    made: dict[str, Any] = {}
    for key, section in sections.items():
        value = raw.get(key)
        if value is None and key in ("model", "release"):
            continue
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{source.at(key)}: {key!r} must be a mapping, got {values.shown(value)}")
        if value is None and key in ("data", "privacy"):
            raise ConfigError(f"{path}: missing key {key!r}; it has no default")
        made[key] = build(section, value or {}, source, key)
    if not isinstance(raw.get("output_dir"), str) or not raw["output_dir"].strip():
        where = source.at("output_dir")
        raise ConfigError(f"{where}: output_dir must be the name of the run's folder, got {raw.get('output_dir')!r}")
    recipe = QueryRecipe(method=name, options=made.pop(name), output_dir=raw["output_dir"], **made)
    if recipe.data.eval.any and not registry.method(name).holds_records_out:
        raise ConfigError(
            f"{source.at('data.eval')}: data.eval holds records out, and `dpllm {name}` uses every record: leave it "
            "out, and keep records that it must not use in another file"
        )
    return recipe


def _method_of(raw: RawRecipe) -> str | None:
    named = [name for name in registry.query_sections() if name in raw]
    if len(named) > 1:
        raise ConfigError(
            f"{raw.source.name} has the sections {' and '.join(named)}: a run has one method, keep one of them"
        )
    return named[0] if named else None

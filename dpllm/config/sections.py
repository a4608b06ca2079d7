"""The base of a recipe's sections: pydantic checks kinds and ranges, and its errors become `ConfigError`.

A section is a frozen dataclass with keyword arguments only. Its values are checked when it is made from YAML or in
Python, and again by `dataclasses.replace`. Kinds are strict: a text is no number, 1 is not true, 8.5 is no whole
number. A whole number is accepted for a float.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import core_schema

from dpllm.config.values import ConfigError, is_number_in_quotes, nearest, shown

_Section = TypeVar("_Section")
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

BASIC = Field(json_schema_extra={"basic": True})
"""Mark of a key that most recipes have; the others are advanced."""


class OneOf:
    """Kind of a text that is one of several.

    Attributes:
        choices: the texts.
    """

    def __init__(self, choices: Sequence[str]) -> None:
        """Store the texts."""
        self.choices = choices

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Return the schema of one of the texts."""
        return core_schema.literal_schema(list(self.choices))


class Why(str):
    """The reason for an upper bound and the remedy, at the end of the error of a value beyond it."""


def _python_values(value: Any) -> Any:
    """Return NumPy's scalars as Python's, in mappings and lists too; anything else as it is."""
    numpy = sys.modules.get("numpy")  # without it there are none
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {_python_values(key): _python_values(one) for key, one in value.items()}
    return [_python_values(one) for one in value] if type(value) is list else value


def _text(value: str) -> str:
    if not value.strip() or "\0" in value:
        raise ValueError("must be a text that is not empty")
    return value


def _names(value: Any) -> Any:
    """Check a mapping whose keys are names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of names to values")
    return dict(value)


Number = float
Whole = int
Count = Annotated[Whole, Field(ge=1)]
Share = Annotated[Number, Field(ge=0, lt=1)]
Text = Annotated[str, AfterValidator(_text)]
Names = Annotated[Any, BeforeValidator(_names)]


def OwnFile(ending: str) -> Any:
    """Return the check of a name of a new file, with this ending, in the folder of a run."""

    def check(value: str) -> str:
        if "/" in value or "\\" in value or not value.endswith(ending) or value == ending:
            raise ValueError(f"must be a name that ends in {ending}, without a folder")
        if value.startswith("privacy_"):
            raise ValueError("must not begin with privacy_, as plan, ledger and report of a run do")
        return value

    return AfterValidator(check)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section(cls: type[_Section]) -> type[_Section]:
    """Make a frozen dataclass whose values are checked when it is made.

    Raises:
        ConfigError: of its ``__init__``: a key is unknown or missing, or a value is of the wrong kind or out of range.
    """
    made: Any = dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, **given: Any) -> None:
        try:
            init(self, **{key: _python_values(value) for key, value in given.items()})
        except ValidationError as error:
            raise_first(error, made)

    made.__init__ = checked
    return made


def make(kind: type[_Section], given: Mapping[Any, Any], name: str) -> _Section:
    """Make a section inside another one; a value of None means the default.

    Raises:
        ConfigError: as of its ``__init__``, with the name of the section before the key.
    """
    try:
        return kind(**{str(key): value for key, value in given.items() if value is not None})
    except ConfigError as error:
        raise ConfigError(with_section(str(error), name, kind)[1]) from None


def with_section(words: str, name: str, kind: Any) -> tuple[str, str]:
    """Return the key that an error of a section begins with, as a dotted path, and the error with this path.

    Args:
        words: the error.
        name: dotted path of the section; "" for the whole recipe.
        kind: its class.

    Returns:
        The path, and the words. The path is `name`, and the words are as they were, if they begin with no key.
    """
    found = re.match(r"((?:unknown|missing) key ')?([\w.-]+)", words)
    if found is None or not (found[1] or found[2].partition(".")[0] in kind.__pydantic_fields__):
        return name, words
    path = f"{name}.{found[2]}" if name else found[2]
    return path, f"{found[1] or ''}{path}{words[found.end() :]}"


def assign(one: Any, **values: Any) -> None:
    """Set values of a section inside its ``__post_init__``: those that follow from others, or their converted form."""
    for name, value in values.items():
        object.__setattr__(one, name, value)


def raise_first(error: ValidationError, kind: Any = None) -> NoReturn:
    """Raise the first error of pydantic in dpllm's words.

    Args:
        error: of the values of a section.
        kind: the section.
    """
    # An unknown key is reported first: a missing key may be its correct spelling.
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "unexpected_keyword_argument")[0]
    place, cause = found["loc"], found.get("ctx", {}).get("error")
    if not place and isinstance(cause, ConfigError):
        raise cause from None
    name, known = ".".join(map(str, place)), list(getattr(kind, "__pydantic_fields__", {}))
    if found["type"] == "unexpected_keyword_argument":
        raise ConfigError(f"unknown key '{name}'{nearest(name, known) or '.'} Known: {', '.join(known)}") from None
    if found["type"] in ("missing", "missing_keyword_only_argument", "missing_argument"):
        raise ConfigError(f"missing key '{name}'; it has no default") from None
    if isinstance(cause, ConfigError):  # of a section inside
        raise ConfigError(str(cause)) from None
    error_kind, ctx = found["type"], found.get("ctx", {})
    words = str(cause) if cause is not None else _words(error_kind, ctx)
    field = getattr(kind, "__pydantic_fields__", {}).get(place[0]) if place else None
    reasons = [one for one in getattr(field, "metadata", ()) if isinstance(one, Why)]
    reason = f": {reasons[0]}" if reasons and error_kind.startswith("less_than") else ""
    raise ConfigError(f"{name} {words}, got {_given(error_kind, ctx, found['input'])}{reason}") from None


_RANGES: Mapping[str, Callable[[Any], str]] = {
    "greater_than": lambda ctx: f"must be greater than {ctx['gt']:,g}",
    "greater_than_equal": lambda ctx: f"must be at least {ctx['ge']:,g}",
    "less_than": lambda ctx: f"must be less than {ctx['lt']:,g}",
    "less_than_equal": lambda ctx: f"must be at most {ctx['le']:,g}",
}
_KINDS = {
    "int": "must be a whole number",
    "float": "must be a finite number",
    "finite": "must be a finite number",
    "bool": "must be true or false",
    "string": "must be a text that is not empty",
    "list": "must be a list",
    "dict": "must be a mapping",
    "mapping": "must be a mapping",
    "dataclass": "must be a mapping",
}


def _words(kind: str, ctx: Mapping[str, Any]) -> str:
    if kind in _RANGES:
        return _RANGES[kind](ctx)
    if kind == "literal_error":
        return f"must be one of {str(ctx['expected']).replace(' or ', ', ')}"
    if kind == "too_short":
        return f"must be a list of at least {ctx['min_length']}"
    return _KINDS.get(kind.partition("_")[0], "cannot be used")


def _given(kind: str, ctx: Mapping[str, Any], value: Any) -> str:
    words = shown(value)
    if kind == "literal_error" and isinstance(value, str):
        return words + nearest(value, re.findall(r"'([^']*)'", str(ctx["expected"])))
    if kind.partition("_")[0] in ("int", "float", "finite", "bool"):
        words += f" ({type(value).__name__})"
        if isinstance(value, str) and is_number_in_quotes(value):
            words += ": it is in quotes, so it is a text; write it without them"
    return words

"""Check the kinds of values for another library's dataclass, such as ``TrainingArguments`` or ``LoraConfig``.

The libraries convert nothing and check little: a quoted number, or the text "no" for a boolean, would fail hours later
or never. The check runs before any record is read.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import cache
from typing import Any

from dpllm.config.values import ConfigError, is_number_in_quotes, nearest, shown


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool), "a whole number"),
    float: (_number, "a finite number"),
    str: (lambda value: isinstance(value, str) and bool(value.strip()), "a text that is not empty"),
    dict: (lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value), "a mapping"),
}
_hints = cache(typing.get_type_hints)


def check_kinds(
    name: str,
    values: Mapping[str, Any],
    kind: type,
    known: Mapping[str, Any] | None = None,
    unchecked: Collection[str] = (),
) -> None:
    """Check the kind of each value by the annotations of a dataclass.

    Args:
        name: dotted path of the values, for messages.
        values: by the names of the fields; None and a field's default pass, and so do unknown names.
        kind: the dataclass.
        known: annotations that replace those of the dataclass where the library accepts more or fewer kinds.
        unchecked: fields that the library checks itself.

    Raises:
        ConfigError: a value is of another kind, or an empty list.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     rate: float = 1.0
    >>> check_kinds("train", {"rate": "1e-3"}, Options)
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: train.rate must be a finite number, got '1e-3' (str): it is in quotes, so it is a
    text; write it without them
    """
    annotations = {**_hints(kind), **(known or {})}
    defaults = {item.name: item.default for item in dataclasses.fields(kind)}
    for key, value in values.items():
        if value is None or key not in annotations or key in unchecked:
            continue
        if type(value) is type(defaults.get(key)) and value == defaults[key]:
            continue
        words = _words(annotations[key], value)
        if words is not None:
            quoted = isinstance(value, str) and is_number_in_quotes(value) and "number" in words
            remedy = ": it is in quotes, so it is a text; write it without them" if quoted else ""
            raise ConfigError(f"{name}.{key} must be {words}, got {shown(value)} ({type(value).__name__}){remedy}")


def plain_names(kind: type) -> list[str]:
    """Return the fields of a dataclass that are numbers or booleans, which an object keeps as they were given."""
    return [name for name, hint in _hints(kind).items() if {*_members(hint)} <= {bool, int, float}]


def _words(annotation: Any, value: Any) -> str | None:
    """Return the kinds of an annotation, for an error; None if the value has one of them, or a kind is unknown."""
    found = _members(annotation)
    if any(_is_enum(one) for one in found):  # a text is one of its words
        found = [one for one in found if one is not str]
    if dict in map(_origin, found):  # a text would be JSON
        found = [one for one in found if one is not str or (isinstance(value, str) and value.startswith("{"))]
    words = []
    for one in found:
        origin = _origin(one)
        if origin is list:
            (inner,) = typing.get_args(one) or (Any,)
            if isinstance(value, list | tuple) and value and all(_words(inner, item) is None for item in value):
                return None
            words.append("a list that is not empty")
        elif origin is typing.Literal:
            if any(value is choice or (isinstance(choice, str) and value == choice) for choice in typing.get_args(one)):
                return None
            words.append(f"one of {', '.join(map(repr, typing.get_args(one)))}")
        elif _is_enum(one):
            choices = [item.value for item in one]
            if value in choices if isinstance(value, str) else isinstance(value, one):
                return None
            hint = nearest(value, choices) if isinstance(value, str) else ""
            words.append(f"one of {', '.join(map(repr, choices))}{hint.rstrip('?') and f' ({hint[2:]})'}")
        elif origin in _PLAIN:
            if _PLAIN[origin][0](value):
                return None
            words.append(_PLAIN[origin][1])
        else:  # a class of the library
            return None
    return " or ".join(dict.fromkeys(words))


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(annotation) for one in _members(part) if one is not types.NoneType]
    return [annotation]


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)

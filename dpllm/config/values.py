"""Checks of single values by kind and by range, and the error that every configuration mistake raises.

Every error names the key, the value and the remedy in one line.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NUMBER_IN_QUOTES = re.compile(r"\s*[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*")
_LONGEST_SHOWN = 120


class ConfigError(ValueError):
    """A value or a key of a configuration that cannot be used; the message names it and the remedy."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known word closest to `word`, or an empty string.

    >>> nearest("clipnorm", ["clip_norm", "delta"])
    "; did you mean 'clip_norm'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def shown(value: Any) -> str:
    """Return the value for an error message: on one line, and cut where it is long.

    >>> shown([0] * 1000)[-10:]
    ', 0, 0,...'
    """
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__} of very many digits"
    return shown_text(text)


def number(name: str, value: Any) -> float:
    """Return `value` as a float; booleans and strings are not numbers.

    Raises:
        ConfigError: it is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name} must be a finite number, got {_kind(value)}")
    try:
        found = float(value)
    except OverflowError:
        raise ConfigError(f"{name} must be a finite number, got one of more than 300 digits") from None
    if not math.isfinite(found):
        raise ConfigError(f"{name} must be a finite number, got {_kind(value)}")
    return found


def between(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: bool = False,
    below: bool = False,
) -> float:
    """Return `value` as a float within a range.

    Args:
        name: name of the key, for the message.
        value: any object.
        least: the lower end. None: no lower end.
        most: the upper end. None: no upper end.
        above: whether the lower end itself is refused.
        below: whether the upper end itself is refused.

    Raises:
        ConfigError: it is not a number, or outside the range.
    """
    found = number(name, value)
    if least is not None and (found <= least if above else found < least):
        raise ConfigError(f"{name} must be {'>' if above else '>='} {least:g}, got {shown(value)}")
    if most is not None and (found >= most if below else found > most):
        raise ConfigError(f"{name} must be {'<' if below else '<='} {most:g}, got {shown(value)}")
    return found


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an int within a range; booleans, strings and fractions are refused.

    Raises:
        ConfigError: it is not a whole number, or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ConfigError(f"{name} must be a whole number, got {_kind(value)}")
    found = int(value)
    if found < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {shown(found)}")
    if maximum is not None and found > maximum:
        raise ConfigError(f"{name} must be at most {maximum:,}, got {shown(found)}")
    return found


def flag(name: str, value: Any) -> None:
    """Raise unless `value` is true or false; the texts 'no' and 'yes' are neither.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {_kind(value)}")


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`.

    Raises:
        ConfigError: it is another value; the message names the nearest choice.
    """
    if not isinstance(value, str) or value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}{hint}")


def text(name: str, value: Any) -> None:
    """Raise unless `value` is a string that is not empty.

    Raises:
        ConfigError: it is empty or not a string.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError(f"{name} must be a text that is not empty, got {shown(value)}")


def shown_text(text: str) -> str:
    """Return a text for an error message, as it is: on one line, and cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def is_number_in_quotes(text: str) -> bool:
    """Whether a text has the form of a number."""
    return _NUMBER_IN_QUOTES.fullmatch(text) is not None


def _kind(value: Any) -> str:
    """Return the value with its kind, and the remedy for a number in quotes."""
    words = f"{shown(value)} ({type(value).__name__})"
    if isinstance(value, str) and is_number_in_quotes(value):
        return f"{words}: it is in quotes, so it is a text; write it without them"
    return words


def json_value(value: Any) -> Any:
    """Return a value with every infinite number replaced by "inf", in mappings and sequences too.

    >>> json_value({"epsilon": math.inf, "curve": (1, 2.5)})
    {'epsilon': 'inf', 'curve': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value

"""Keep the values of a record independent of all other records in its table.

A table has one type for all rows, so the value 37.5 in one record would turn 30 in another record into 30.0. A single
record would then change the rows of all people, and no clip norm bounds that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import datasets

from dpllm.data.readers import DataError, nested_kinds

_WHOLE, _FRACTION = "a whole number", "a fraction"


def own_value(value: Any) -> Any:
    """Return a value from a table in a form that does not depend on the table's other rows.

    A table has one type for all rows: an object gets the keys of every row, filled with null and in the order of the
    first row, and a column with one float turns all whole numbers into floats. Here, keys without a value are omitted,
    keys are sorted, and floats that are whole numbers become integers. A template that renders the arguments of a tool
    would otherwise also render those of other records.

    >>> own_value({"day": "Monday", "city": None, "count": 2.0})
    {'count': 2, 'day': 'Monday'}
    """
    if isinstance(value, Mapping):
        return {key: own_value(value[key]) for key in sorted(value) if value[key] is not None}
    if isinstance(value, list):
        return [own_value(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def decoded(columns: Mapping[str, list[Any]], features: datasets.Features) -> dict[str, list[Any]]:
    """Return columns of an Arrow table with the values of `datasets.Json` in them, which Arrow has as encoded text.

    Whether a place holds such values depends on other records, and a text in it would be written with quotes.
    """
    found = dict(columns)
    for name in columns:
        if "Json(" in str(features.get(name)):
            found |= datasets.Features({name: features[name]}).decode_batch({name: columns[name]})
    return found


class ColumnKinds:
    """The kinds of the values of rows that code made, which no file has typed. Each column has one.

    Args:
        words: name of the data set, for messages.

    >>> kinds = ColumnKinds("train_dataset")
    >>> kinds.add(0, {"age": 30})
    >>> kinds.add(1, {"age": None})
    >>> kinds.add(2, {"age": 37.5})
    Traceback (most recent call last):
        ...
    dpllm.data.readers.DataError: The column 'age' of train_dataset holds a whole number in row 0 and a fraction in row
    2. In a table or a batch, one row would decide how those of others are written: give all rows one kind, such as
    30.0 in place of 30, or text
    """

    def __init__(self, words: str) -> None:
        """Begin without rows."""
        self._words = words
        self._found: dict[tuple[str, str], tuple[str, int]] = {}  # column and place -> kind, and the first such row

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Compare the kinds of a row with those of earlier rows; None has no kind.

        Args:
            number: of the row, for messages.
            row: columns to values. The numbers in a list or an array have a kind, too.

        Raises:
            DataError: a column has two kinds, of which whole numbers and fractions are two.
        """
        for name in row:
            for place, kind in _kinds(row[name]):
                first, where = self._found.setdefault((name, place), (kind, number))
                if first != kind:
                    raise DataError(
                        f"The column '{name}' of {self._words} holds {first}{place} in row {where} and {kind}{place} "
                        f"in row {number}. In a table or a batch, one row would decide how those of others are "
                        "written: give all rows one kind, such as 30.0 in place of 30, or text"
                    )


def _kinds(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the kind of a value; and those of the values in it, if it is a list, an array or an object."""
    dtype = getattr(value, "dtype", None)
    single = dtype is None or getattr(value, "ndim", 0) == 0
    if value is None:
        return
    listed = not single or isinstance(value, list | tuple)
    yield "", "a list" if listed else _kind(value) if dtype is None else _kind_of_numbers(str(dtype))
    if dtype is not None:
        yield from [(" in a list", _kind_of_numbers(str(dtype)))] if listed else []
    elif listed and (kinds := set(map(type, value))) and kinds <= {int, float}:
        yield " in a list", _FRACTION if float in kinds else _WHOLE
    elif listed or isinstance(value, dict):
        found = nested_kinds({"": list(value) if listed else value})
        yield from ((f" at {place}", kind) for place, kind in found if place and kind != "nothing")


def _kind(value: Any) -> str:
    if isinstance(value, str | bool):
        return "text" if isinstance(value, str) else "true or false"
    if isinstance(value, float):
        return _FRACTION
    return _WHOLE if isinstance(value, int) else "an object"


def _kind_of_numbers(dtype: str) -> str:
    """Return the kind of the values of an array or a tensor, by the name of its type."""
    name = dtype.removeprefix("torch.")
    if name.startswith(("int", "uint")):
        return _WHOLE
    if name.startswith(("float", "bfloat")):
        return _FRACTION
    return "true or false" if name == "bool" else "text" if name.startswith("<U") else "an object"

"""Rows that are read and made one at a time: no function of the user's sees two rows, and dpllm pads.

Place in the flow: between a data set and a collator, which make the model's inputs of one row, and the microbatches of
`dpllm.training.microbatches`. A collator that is given several rows can mix, sort or count them, share a random number
among them, or read their common width. With one row it can do none of this.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.data.labels import BOUNDARIES, IGNORE, KEY_BOUNDARIES
from dpllm.data.transfer import like, own_copy
from dpllm.data.units import UnitIndex

Collate = Callable[[list[Any]], Mapping[str, Any]]
_LONGEST = ("max_length_q", "max_length_k")
_TARGETS = re.compile(r"(^|_)(labels|label_ids|targets?|tags)(_|$)")
_ZEROS = re.compile(r"mask|type_ids|position_ids")


FETCH = (
    "fetch gets an array of row numbers and returns a list of rows: "
    "fetch=lambda numbers: [data[int(n)] for n in numbers]"
)


def fetch_rows(dataset: Any, numbers: np.ndarray) -> list[dict[str, Any]]:
    """Read rows by number.

    Guarantee: a row is computed from its own record. The formats of a `datasets.Dataset` make rows together: a
    transform is called with all rows that are read, and one missing number makes floats of the others. Rows of any
    format are therefore read one at a time.

    Args:
        dataset: a `datasets.Dataset`, or anything with ``__getitem__``.
        numbers: (R,) row numbers.

    Returns:
        R rows, in the order of ``numbers``.
    """
    if not hasattr(dataset, "column_names"):
        return [own_copy(dataset[int(number)]) for number in numbers]  # one buffer may be filled for each row
    if (getattr(dataset, "format", None) or {}).get("type") is not None:  # NumPy's and PyTorch's make one array of all
        return [row for number in numbers for row in _rows_of(dataset[[int(number)]])]
    return _rows_of(dataset[numbers.tolist()])


def _is_transformed(dataset: Any) -> bool:
    return (getattr(dataset, "format", None) or {}).get("type") == "custom"


def _rows_of(columns: Any) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class StoredRows:
    """Reads the rows of a Trainer's data set by number (`fetch_rows`), so that no row depends on those beside it.

    Attributes:
        dataset: data set of the run.
    """

    dataset: Any

    def __call__(self, numbers: np.ndarray) -> list[dict[str, Any]]:
        """Return the rows of these numbers (R,)."""
        return fetch_rows(self.dataset, numbers)


@dataclass(frozen=True)
class RowReader:
    """Reads rows by calling a function with one number at a time.

    Guarantee: what the function returns for a row does not depend on the numbers of other rows, and a row that still
    has the column of the units' ids belongs to the unit that the index says.

    Attributes:
        fetch: row numbers to rows; `StoredRows` gets all numbers at once.
        units: made of these rows. None: their units are not compared.
    """

    fetch: Callable[[np.ndarray], Sequence[Any]]
    units: UnitIndex | None = None

    def __call__(self, numbers: np.ndarray) -> list[Any]:
        """Return the rows of these numbers (R,), in their order.

        Raises:
            ConfigError: the function does not return a list of one row; a row is of a different unit, or its unit
                cannot be read any more.
        """
        together = isinstance(self.fetch, StoredRows)
        rows = list(self.fetch(numbers)) if together else [self._row(number) for number in numbers]
        self._compare_units(numbers, rows)
        return rows

    def _compare_units(self, numbers: np.ndarray, rows: Sequence[Any]) -> None:
        """Compare the units of rows with the index, except of a table, whose rows cannot be moved in place."""
        ids = None if self.units is None else self.units.ids
        if self.units is None or ids is None or ids.column is None:
            return
        stored = self.fetch.dataset if isinstance(self.fetch, StoredRows) else None
        is_table = hasattr(stored, "column_names")
        if is_table and not _is_transformed(stored):
            return
        known = [isinstance(row, Mapping) and ids.column in row for row in rows]
        if stored is not None and not is_table and not all(known):
            raise ConfigError(
                f"Row {numbers[known.index(False)]} of train_dataset has no column '{ids.column}' any more, so its "
                "unit cannot be compared with the units that ε is computed for. Keep the column in every row; the "
                "default collator ignores it"
            )
        found = [(n, row[ids.column]) for n, row, has in zip(numbers, rows, known, strict=True) if has]
        self.units.refuse_moved([n for n, _ in found], [one for _, one in found])

    def _row(self, number: Any) -> Any:
        found = self.fetch(np.array([number]))
        if isinstance(found, Mapping | str) or not hasattr(found, "__len__") or len(found) != 1:
            shown = f" with the keys {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            raise ConfigError(
                f"For one row number, fetch returned a {type(found).__name__}{shown}, not one row. {FETCH}"
            )
        return own_copy(found[0])  # a data set may fill the same object for the next row


def reader_of(fetch: Callable[[np.ndarray], Sequence[Any]]) -> RowReader:
    """Return a reader of single rows: itself, or made of a function."""
    return fetch if isinstance(fetch, RowReader) else RowReader(fetch)


@dataclass(frozen=True)
class RowByRow:
    """A collator of several rows that calls another collator with one row at a time, and pads.

    Guarantee: the values of a row depend on no other row of the batch, apart from the padding that it gets. Padding is
    ``pad_token_id`` in token ids; -100 in labels, targets and tags that are whole numbers; 0 in masks and in other
    columns with one value for each token. Columns of equal shapes are put together as they are. Packed rows are
    concatenated without padding.

    Attributes:
        collate: makes the inputs of one row, by name. Each is a tensor whose first dimension is 1, a list with one
            entry, or a tuple or dictionary of such tensors.
        pad_token_id: token that fills short rows. None: that of the collator or its tokenizer; if it has none, 0.
        padding_side: "right" or "left". None: that of the collator's tokenizer; if it has none, right.
        columns: columns of a row that the collator is given. None: all.
        predicts_next: whether a label is predicted at the position before it, as by a causal language model. The first
            label of a row is then no target, also where padding on the left comes before it.
        packed: whether the collator is `dpllm.data.rows.PackedCollator`, which names the boundaries of rows.

    >>> rows = RowByRow(lambda rows: {"input_ids": torch.tensor([rows[0]["ids"]])}, pad_token_id=9)
    >>> rows([{"ids": [1, 2, 3]}, {"ids": [4]}])["input_ids"].tolist()
    [[1, 2, 3], [4, 9, 9]]
    """

    collate: Collate
    pad_token_id: int | None = None
    padding_side: str | None = None
    columns: frozenset[str] | None = None
    predicts_next: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        """Take the token and the side of the collator where they are not given."""
        tokenizer = getattr(self.collate, "tokenizer", None) or getattr(self.collate, "processing_class", None)
        if self.pad_token_id is None:
            known = (getattr(one, "pad_token_id", None) for one in (self.collate, tokenizer))
            object.__setattr__(self, "pad_token_id", next((pad for pad in known if isinstance(pad, int)), None))
        if self.padding_side is None:
            object.__setattr__(self, "padding_side", getattr(tokenizer, "padding_side", None) or "right")
        if self.padding_side not in ("left", "right"):
            raise ConfigError(f'padding_side is {self.padding_side!r}; give "right" or "left"')

    def __call__(self, rows: Sequence[Any]) -> Mapping[str, Any]:
        """Return the batch of some rows; see `row` and `batch`."""
        return self.batch([self.row(row) for row in rows])

    def row(self, row: Any) -> Mapping[str, Any]:
        """Return the inputs of one row, in memory of their own.

        Raises:
            ConfigError: the collator does not return the inputs of one row by name.
        """
        row = own_copy(row)  # collators may change it
        if self.columns is not None and isinstance(row, Mapping):
            row = {name: value for name, value in row.items() if name in self.columns}
        inputs = self.collate([row])
        if not isinstance(inputs, Mapping):
            raise ConfigError(
                f"collate returned a {type(inputs).__name__}; it gets a list of one row and returns the model's "
                'inputs by name, for instance {"input_ids": torch.stack(rows)}'
            )
        inputs = own_copy(inputs)
        self._check(inputs)
        return inputs

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the inputs of B rows together, of the class of the first where it can be made.

        Args:
            rows: results of `row`, at least one.

        Raises:
            ConfigError: two rows have a column of other kinds, or of shapes that cannot be padded; it is named.
        """
        if len(rows) == 1:
            return rows[0]
        if self.packed and BOUNDARIES in rows[0]:
            return like(rows[0], _concatenated(rows))
        return like(rows[0], self._columns(rows, _widths(rows)))

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """Check that the inputs are those of one row."""
        if self.packed and BOUNDARIES in inputs:
            _check_boundaries(inputs, inputs[BOUNDARIES])
            return
        for name, value in inputs.items():
            if isinstance(value, Tensor | np.ndarray) and (value.ndim == 0 or value.shape[0] != 1):
                raise ConfigError(
                    f"The collator turned one row into '{name}' of shape {tuple(value.shape)}. The first dimension has "
                    "to be 1, that row: a collator that packs, pairs, doubles, squeezes or drops rows would mix the "
                    "gradients of different units. Return one row per input row; dpllm packs with pack_rows=True, and "
                    "trains on pairs with dpllm.DPDPOTrainer. Several images of a row are one entry, (1, images, ...)"
                )

    def _columns(self, rows: Sequence[Mapping[str, Any]], widths: Sequence[Sequence[int]]) -> dict[str, Any]:
        names = dict.fromkeys(name for row in rows for name in row)
        for name in names:
            if not all(name in row for row in rows):
                raise ConfigError(
                    f"The collator returned the column '{name}' for some rows and not for others, so they make no "
                    "batch. Return the same columns for every row"
                )
        return {name: self._column(str(name), [row[name] for row in rows], widths) for name in names}

    def _column(self, name: str, values: list[Any], widths: Sequence[Sequence[int]]) -> Any:
        first = values[0]
        if any(type(one) is not type(first) for one in values):
            kinds = sorted({type(one).__name__ for one in values})
            raise ConfigError(
                f"The collator returned '{name}' as {' and as '.join(kinds)}. Return one kind of value for every row"
            )
        if isinstance(first, Tensor):
            return self._tensor(name, values, widths)
        if isinstance(first, np.ndarray) and not first.dtype.hasobject:
            return self._tensor(name, [torch.from_numpy(one) for one in values], widths).numpy()
        if isinstance(first, Mapping):
            return self._columns(values, widths)
        if isinstance(first, list) and all(len(one) == 1 for one in values):
            return [one[0] for one in values]
        if isinstance(first, list | tuple) and all(len(one) == len(first) for one in values):
            parts = [self._column(name, [one[place] for one in values], widths) for place in range(len(first))]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        if all(same_values(first, one) for one in values[1:]):
            return first
        raise ConfigError(
            f"The collator returned '{name}' as a {type(first).__name__} that is another one for another row, and with "
            "no place for rows. Return a tensor whose first dimension is 1, or a list with one entry"
        )

    def _tensor(self, name: str, values: list[Tensor], widths: Sequence[Sequence[int]]) -> Tensor:
        if len({one.dtype for one in values}) > 1:
            kinds = sorted(str(one.dtype) for one in {one.dtype: one for one in values}.values())
            raise ConfigError(f"The collator returned '{name}' as {' and as '.join(kinds)}: give all rows one dtype")
        shapes = {tuple(one.shape[1:]) for one in values}
        if len(shapes) == 1:
            return torch.cat(values)
        if len({shape[1:] for shape in shapes}) > 1 or () in shapes:
            _refuse_shapes(name, values)
        fill = self._fill(name, values, widths)
        width = max(one.shape[1] for one in values)
        padded = values[0].new_full((len(values), width, *values[0].shape[2:]), fill)
        for place, one in enumerate(values):
            start = width - one.shape[1] if self.padding_side == "left" else 0
            padded[place, start : start + one.shape[1]] = one[0]
            if start and fill == IGNORE and self.predicts_next and one.ndim == 2:
                padded[place, start] = IGNORE
        return padded

    def _fill(self, name: str, values: Sequence[Tensor], widths: Sequence[Sequence[int]]) -> int:
        """Return what fills a column with one value for each token, of the input or of a decoder."""
        of_tokens = [one.shape[1] for one in values] in widths
        if _TARGETS.search(name) and not values[0].is_floating_point():
            return IGNORE
        if "input_ids" in name:
            return self.pad_token_id or 0
        if of_tokens or (_ZEROS.search(name) and values[0].ndim == 2):
            return 0
        _refuse_shapes(name, values)


def _refuse_shapes(name: str, values: Sequence[Tensor]) -> NoReturn:
    one, other = next((values[0], two) for two in values if two.shape != values[0].shape)
    raise ConfigError(
        f"The collator returned '{name}' of shape {tuple(one.shape)} for one row and {tuple(other.shape)} for another. "
        "dpllm pads columns with one value for each token of input_ids, labels (-100) and masks (0). Give any other "
        "column one shape (a processor's fixed size, padding='max_length'), or train with "
        "per_device_train_batch_size=1"
    )


def _widths(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the tokens of each row, for each column of token ids."""
    columns: list[list[Any]] = [[row.get(name) for row in rows] for name in rows[0] if "input_ids" in str(name)]
    return [[one.shape[1] for one in ids] for ids in columns if all(getattr(one, "ndim", 0) > 1 for one in ids)]


def _check_boundaries(inputs: Mapping[str, Any], boundaries: Tensor) -> None:
    """Check that one row was packed, and that all of its inputs have its length."""
    if boundaries.tolist() != [0, int(boundaries[-1])] or int(boundaries[-1]) < 1:
        raise ConfigError(
            f"The collator turned one row into packed rows with the boundaries {boundaries.tolist()}, so the gradients "
            "would be those of other units. A row has two boundaries: its begin, 0, and its end"
        )
    for name, value in inputs.items():
        own = name not in (BOUNDARIES, KEY_BOUNDARIES) and isinstance(value, Tensor)
        if own and value.shape[:2] != (1, int(boundaries[-1])):
            raise ConfigError(
                f"The collator packed {int(boundaries[-1])} tokens, but '{name}' has shape {tuple(value.shape)}; "
                "return one row of all tokens"
            )


def _concatenated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows of `dpllm.data.rows.PackedCollator` as one, with their boundaries."""
    lengths = [int(row[BOUNDARIES][-1]) for row in rows]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(rows[0][BOUNDARIES].dtype)
    joined: dict[str, Any] = {}
    for name, value in rows[0].items():
        if name in (BOUNDARIES, KEY_BOUNDARIES):
            joined[name] = boundaries
        elif name in _LONGEST:
            joined[name] = max(lengths)
        else:
            joined[name] = torch.cat([row[name] for row in rows], 1) if isinstance(value, Tensor) else value
    return joined


def same_values(one: Any, other: Any) -> bool:
    """Return whether two batches, or two rows, hold the same values; NaN, such as a missing label, equals NaN."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same_values(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, Tensor):
        one, other = (x.to_dense() if x.layout != torch.strided else x for x in (one, other))
        return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and bool(np.all((one == other) | (one != one) & (other != other)))
    return bool(one == other or (one != one and other != other))


def collator_of(rows: Collate | RowByRow, packed: bool) -> RowByRow:
    """Return a collator that makes rows one at a time: itself, or made of another one."""
    return rows if isinstance(rows, RowByRow) else RowByRow(rows, packed=packed)

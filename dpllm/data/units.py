"""Index the privacy units: which rows belong to which unit.

The sampler draws units, and this index returns their rows. A neighbouring data set lacks one whole unit, so all rows of
a unit must be used or omitted together: a long record that was split into several rows is still one unit, and so is a
user with many records. The number of units never changes after the index was built.

Regular sequences of numbers are stored as a `range`, which takes no memory: the index of a data set with 10^9 rows,
each of them a unit, consists of two ranges.

The ids are private. The errors name a row number and never an id.
"""

from __future__ import annotations

import numbers
import re
import secrets
import unicodedata
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.config import ConfigError

Int64Array = NDArray[np.int64]
ONE_ROW = "one row as given"
SAME_ID = "all rows with the same id"
_INVISIBLE = ("Cf", "Cc")  # Unicode's categories of format and control characters
_EXACT = 2**53  # up to this number, a float represents every whole number
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_BLOCK = 1 << 20  # entries read together, since reading all of them would double the memory
_KEY = secrets.randbits(64)  # key of the id hashes, which never leave the process


@dataclass(frozen=True, eq=False)
class RowIds:
    """The unit id of each row as a keyed 64-bit hash, to detect rows that moved after the index was built.

    Attributes:
        hashes: (number of rows in the data set,) uint64, including rows that no unit keeps.
        normalize: whether text ids are equal if `normalized_id` makes them equal.
        column: name of the column with the ids. None: unknown.
    """

    hashes: NDArray[np.uint64] = field(repr=False)
    normalize: bool = False
    column: str | None = None


@dataclass(frozen=True, eq=False)
class UnitIndex:
    """Maps the units 0..num_units-1 to row numbers.

    The rows of unit u are ``rows[offsets[u] : offsets[u + 1]]``. No row belongs to two units.

    Raises:
        ValueError: the arrays do not describe such a map.
    """

    offsets: Int64Array | range
    """(num_units + 1,): the position in `rows` at which each unit begins."""
    rows: Int64Array | range
    """(num_rows,): row numbers; those of a unit are consecutive."""
    rows_dropped: int = 0
    """Number of rows dropped because their unit already had its maximum."""
    rows_per_owner: int = 1
    """Largest number of these units that one privacy unit may have; more than 1 only in the result of `each_row`."""
    differ_in_case: bool = False
    """Whether two text ids differ only in case. They count as two units."""
    made_of: str | None = None
    """How the units were built, in words for the report: `ONE_ROW`, or `SAME_ID` with its column. None: from arrays."""
    many_copies: bool = False
    """Whether many records are copies of other units' records (`dpllm.data.records.has_many_copies`)."""
    in_public_rows: bool = False
    """Whether evaluation rows that are declared public contain training records."""
    ids: RowIds | None = field(default=None, repr=False)
    """Hashes of the ids from which the units were built. None: they were built without ids."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for a copy or a pickle, without the hashes, which are valid only in this process."""
        return {**self.__dict__, "ids": None}

    def __post_init__(self) -> None:
        """Check the arrays and make them read-only."""
        for name in ("offsets", "rows"):
            values = getattr(self, name)
            if not isinstance(values, range):
                array = np.array(values, dtype=np.int64)
                array.setflags(write=False)
                object.__setattr__(self, name, array)
        if any(getattr(values, "ndim", 1) != 1 for values in (self.offsets, self.rows)) or len(self.offsets) == 0:
            raise ValueError("a unit index needs two one-dimensional arrays, and offsets with at least one entry")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.rows) or not _rises(self.offsets):
            raise ValueError("offsets must rise from 0 to the number of rows: every unit has at least one row")
        if not (isinstance(self.rows, range) or _rises(self.rows) or _rises(np.sort(self.rows))):
            raise ValueError("a row belongs to two units, so the clip norm would bound neither. Assign it to one unit")

    @classmethod
    def one_row_per_unit(cls, num_rows: int) -> UnitIndex:
        """Return the index of a data set in which every row is a unit; it takes no memory.

        >>> UnitIndex.one_row_per_unit(3).num_units
        3
        """
        return cls(offsets=range(num_rows + 1), rows=range(num_rows), made_of=ONE_ROW)

    @classmethod
    def from_ids(
        cls,
        ids: Sequence[Any],
        max_rows_per_unit: int | None = None,
        rng: np.random.Generator | None = None,
        normalize: bool = False,
        column: str | None = None,
    ) -> UnitIndex:
        """Return the index in which rows with the same id are one unit; units are in the order of their first row.

        Args:
            ids: one id per row, all texts or all whole numbers. An array of whole numbers is used directly, without a
                Python object per row.
            max_rows_per_unit: largest number of rows per unit; the others are dropped and counted in `rows_dropped`.
                None: no bound.
            rng: generator that draws the rows to keep, uniformly among the unit's rows. None: keep the first ones.
            normalize: treat text ids as equal when `normalized_id` makes them equal.
            column: name of the column of the ids, for the report and for `refuse_moved`.

        Raises:
            ValueError: an id is missing or is neither text nor whole number; texts and numbers are mixed; or two text
                ids are the same number, or differ only in spaces or Unicode form (the same user could then be two
                units). The message gives the first such row.

        >>> index = UnitIndex.from_ids(["ann", "bob", "ann", "ann"], max_rows_per_unit=2)
        >>> index.num_units, index.rows.tolist(), index.rows_dropped
        (2, [0, 2, 1], 1)
        """
        if max_rows_per_unit is not None and max_rows_per_unit < 1:
            raise ValueError(f"max_rows_per_unit must be at least 1, got {max_rows_per_unit}")
        ids, differ_in_case = _checked_texts(ids, normalize)
        units = _unit_of_each_row(ids)
        facts: dict[str, Any] = {
            "differ_in_case": differ_in_case,
            "made_of": f"{SAME_ID} in column '{column}'" if column is not None else SAME_ID,
            "ids": RowIds(_hashes(ids, normalize=False), normalize, column),  # normalized already
        }
        counts = np.bincount(units) if len(units) else np.zeros(0, dtype=np.int64)
        if len(counts) == len(units):  # each unit has one row, and units are in the order of their rows
            return cls(range(len(units) + 1), range(len(units)), **facts)
        if max_rows_per_unit is None:
            together = bool(np.all(units[:-1] <= units[1:]))
            rows = range(len(units)) if together else np.argsort(units, kind="stable")
            return cls(_offsets(counts), rows, **facts)
        # Sorting by (unit, random key) puts each unit's own rows in uniformly random order.
        by_unit = np.argsort(units, kind="stable") if rng is None else np.lexsort((rng.random(len(units)), units))
        rank_in_unit = np.arange(len(units)) - np.repeat(_offsets(counts)[:-1], counts)
        kept = by_unit[rank_in_unit < max_rows_per_unit]
        kept = kept[np.lexsort((kept, units[kept]))]
        offsets = _offsets(np.minimum(counts, max_rows_per_unit))
        return cls(offsets, kept, rows_dropped=len(units) - len(kept), **facts)

    def refuse_moved(self, rows: Sequence[int] | Int64Array | range, ids: Sequence[Any]) -> None:
        """Check that rows still belong to the units of this index; an index that was built without ids accepts any.

        Args:
            rows: (R,) row numbers.
            ids: (R,) the current id of each of these rows, as for `from_ids`.

        Raises:
            ConfigError: a row has a different id; the message gives its number and never an id.

        >>> index = UnitIndex.from_ids(["ann", "bob", "ann"], column="author")
        >>> index.refuse_moved([2, 0], ["ann", "ann"])
        """
        if self.ids is None or not len(rows):
            return
        moved = np.flatnonzero(self.ids.hashes[np.asarray(rows)] != _hashes(ids, self.ids.normalize))
        if len(moved):
            column = "" if self.ids.column is None else f" in the column '{self.ids.column}'"
            raise ConfigError(
                f"Row {rows[int(moved[0])]} has a different id{column} than when the units were built: the rows were "
                "shuffled, sorted, filtered or changed since. A unit would mix several people's rows, and ε would hold "
                "for none of them. Create a new DPTrainer or a new UnitIndex after the last change"
            )

    def doubts(self, column: str | None) -> list[str]:
        """Return the reasons to doubt that a unit is all data of one person, as open points of a report.

        Args:
            column: column of the users' ids; None: a unit is a record.
        """
        found = []
        if self.many_copies and column is None:
            found.append(
                "More than 1% of the records are copies of other records, apart from case, punctuation, spaces or a "
                "label before them. Each copy is a separate unit, so a text that is in k records is protected k times "
                "less. Remove the copies, or confirm that they are from different people."
            )
        elif self.many_copies:
            found.append(
                "More than 1% of the records are copies of other users' records, apart from case, punctuation, spaces "
                "or a label before them. A text that k users have is protected k times less. Remove the copies, or "
                "confirm that they are from different people."
            )
        if self.in_public_rows:
            found.append(
                "The evaluation rows, which are declared public (eval_is_public), contain training records. ε does not "
                "cover results on them, or decisions that follow from these results. Remove the records from the rows, "
                "or confirm that they are public."
            )
        if column is None:
            return found
        if self.num_units == self.num_rows > 1 and self.rows_dropped == 0 and self.rows_per_owner == 1:
            found.append(
                f"No id in column '{column}' occurs twice. The column may number rows or messages instead of people. A "
                "person with several rows is then protected less than this report says. Confirm that each person has "
                "one row, or run again with the column that contains the person's id."
            )
        if self.differ_in_case:
            found.append(
                f"Some ids in column '{column}' differ only in case, and count as different users. "
                "Confirm that they are different people, or set privacy.normalize_ids: true."
            )
        return found

    def each_row(self) -> UnitIndex:
        """Return the index in which every kept row is drawn and clipped separately.

        The guarantee still protects the units of this index: the accounting uses `rows_per_owner`, the largest number
        of rows that one of them has.

        >>> UnitIndex.from_ids(["ann", "bob", "ann"]).each_row().rows_per_owner
        2
        """
        rows = self.rows if isinstance(self.rows, range) else np.sort(self.rows)
        return replace(self, offsets=range(self.num_rows + 1), rows=rows, rows_per_owner=self.max_rows)

    @property
    def num_units(self) -> int:
        """N, the number of units."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """Number of rows that belong to a unit, without the dropped ones."""
        return len(self.rows)

    @property
    def max_rows(self) -> int:
        """Largest number of rows that a unit has."""
        if isinstance(self.offsets, range):
            return self.offsets.step if self.num_units else 0
        blocks = (self.offsets[at : at + _BLOCK + 1] for at in range(0, self.num_units, _BLOCK))
        return max((int(np.diff(block).max()) for block in blocks), default=0)

    def rows_of(self, unit_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows of some units.

        Args:
            unit_ids: (U,) unit numbers.

        Returns:
            Two arrays of the same length: the row numbers, unit after unit, and for each row the position of its unit
            within `unit_ids` (not the unit's number).

        Raises:
            ValueError: a unit number is out of range.

        >>> rows, position = UnitIndex.from_ids(["ann", "bob", "ann"]).rows_of(np.array([1, 0]))
        >>> rows.tolist(), position.tolist()
        ([1, 0, 2], [0, 1, 1])
        """
        unit_ids = np.asarray(unit_ids, dtype=np.int64)
        if unit_ids.size and (unit_ids.min() < 0 or unit_ids.max() >= self.num_units):
            raise ValueError(f"unit numbers must be in 0..{self.num_units - 1}")
        starts = _take(self.offsets, unit_ids)
        counts = _take(self.offsets, unit_ids + 1) - starts
        position = np.repeat(np.arange(len(unit_ids)), counts)
        rank_in_unit = np.arange(counts.sum()) - np.repeat(_offsets(counts)[:-1], counts)
        return _take(self.rows, np.repeat(starts, counts) + rank_in_unit), position

    def blocks(self) -> Iterator[Int64Array]:
        """Yield all rows and then all offsets as arrays with a bounded number of entries, for hashing.

        >>> [block.tolist() for block in UnitIndex.one_row_per_unit(2).blocks()]
        [[0, 1], [0, 1, 2]]
        """
        for values in (self.rows, self.offsets):
            for at in range(0, len(values), _BLOCK):
                end = min(at + _BLOCK, len(values))
                yield _take(values, np.arange(at, end)) if isinstance(values, range) else values[at:end]


def _take(values: Int64Array | range, places: Int64Array) -> Int64Array:
    """Return the entries at these positions, none of them negative."""
    return values.start + values.step * places if isinstance(values, range) else values[places]


def _rises(values: Int64Array | range) -> bool:
    """Return whether each entry is larger than the previous one."""
    if isinstance(values, range):
        return values.step > 0
    return bool(np.all(values[1:] > values[:-1]))


def _offsets(counts: NDArray[np.integer[Any]]) -> Int64Array:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def normalized_id(text: str) -> str:
    """Return a normal form of a text id, in which different spellings of one id are equal.

    Compatible characters become equal (Unicode NFKC). Invisible characters and spaces at the ends are removed, and
    other runs of spaces become one space. Case is ignored, and a number has only one spelling.

    >>> [normalized_id(text) for text in ("00017", " 17", "1e2", "100.0", "Ann  Lee", "ann lee")]
    ['17', '17', '100', '100', 'ann lee', 'ann lee']
    """
    return _without_disguise(text).casefold()


def _without_disguise(text: str) -> str:
    """Return the same form, with case preserved."""
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFKC", text)
        text = "".join(letter for letter in text if letter.isspace() or unicodedata.category(letter) not in _INVISIBLE)
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.split())
    if not _NUMBER.fullmatch(text):
        return text
    number = Decimal(text)
    exact = Context(prec=max(1, len(number.as_tuple().digits)))
    return "0" if number == 0 else f"{number.normalize(exact):f}"


def _checked_texts(ids: Sequence[Any], normalize: bool) -> tuple[Sequence[Any], bool]:
    """Return the ids, normalized on request, and whether two of them differ only in case.

    Raises:
        ValueError: two texts look like one id; the message gives a row of each and never an id.
    """
    if isinstance(ids, np.ndarray):
        if np.issubdtype(ids.dtype, np.integer):
            return ids, False
        ids = ids.tolist()  # texts in an array are texts as well
    if not any(isinstance(value, str) for value in ids[:1]):
        return ids, False
    if normalize:
        return _normalized(ids), False
    first_row: dict[str, int] = {}
    for row, value in enumerate(ids):
        if isinstance(value, str) and value not in first_row:
            first_row[value] = row
    spelled: dict[str, str] = {}
    folded: set[str] = set()
    for value, row in first_row.items():
        plain = _without_disguise(value)
        other = spelled.setdefault(plain, value)
        if other != value:
            how = "the same number written differently" if _NUMBER.fullmatch(plain) else "equal but for spaces or form"
            raise ValueError(
                f"the unit ids of rows {first_row[other]} and {row} are {how} (leading zeros, 1e2 for 100, spaces, "
                "composed characters), so one user may count as two. Write each id in one form, or set "
                "privacy.normalize_ids: true, which treats such ids, and ids that differ only in case, as the same"
            )
        folded.add(plain.casefold())
    return ids, len(folded) < len(spelled)


def _normalized(ids: Sequence[Any]) -> list[Any]:
    return [normalized_id(value) if isinstance(value, str) and value.strip() else value for value in ids]


def _hashes(ids: Sequence[Any], normalize: bool) -> NDArray[np.uint64]:
    """Return one keyed hash for each id: SipHash of a text (Python's own), SplitMix64 of a whole number."""
    if isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer):
        x = ids.astype(np.uint64)
    else:
        own = _normalized(ids) if normalize else ids
        x = np.fromiter(map(_word, own), dtype=np.uint64, count=len(own))
    for at in range(0, len(x), _BLOCK):
        block = x[at : at + _BLOCK]
        block += np.uint64(_KEY)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            block ^= block >> np.uint64(shift)
            block *= np.uint64(factor)
        block ^= block >> np.uint64(31)
    return x


def _word(value: Any) -> int:
    """Return 64 bits for an id: the number itself; 0 for an id that `from_ids` refuses."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    kind = _kind(value)
    return 0 if kind is None else (hash(value) if kind is str else int(value)) & (1 << 64) - 1


def _unit_of_each_row(ids: Sequence[Any]) -> Int64Array:
    """Number the distinct ids in the order in which they appear."""
    if isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer):
        return _unit_of_each_number(ids)
    number_of: dict[Hashable, int] = {}
    units = np.empty(len(ids), dtype=np.int64)
    first_kind: type | None = None
    for row, value in enumerate(ids):
        kind = _kind(value)
        if kind is None:
            raise ValueError(
                f"row {row}, counted from 0, has no usable unit id (it is missing, empty, or neither text nor a whole "
                "number), so it cannot be protected as part of a user. Fill in the ids, or drop the rows without one "
                "(data.missing=drop)"
            )
        if first_kind is None:
            first_kind = kind
        elif kind is not first_kind:
            raise ValueError(
                f"unit ids mix text and numbers, so one user could count as two; the first row that differs is row "
                f"{row}. Write all ids in one form"
            )
        units[row] = number_of.setdefault(value, len(number_of))
    return units


def _unit_of_each_number(ids: NDArray[np.integer[Any]]) -> Int64Array:
    """Do the same for an array; rows in the order of their records, as after tokenization, need no sorting."""
    units = np.zeros(len(ids), dtype=np.int64)
    if np.all(ids[:-1] <= ids[1:]):
        np.cumsum(ids[1:] != ids[:-1], out=units[1:])
        return units
    _, first_row, sorted_place = np.unique(ids, return_index=True, return_inverse=True)
    number_of_place = np.empty(len(first_row), dtype=np.int64)
    number_of_place[np.argsort(first_row)] = np.arange(len(first_row))
    return number_of_place[sorted_place]


def _kind(value: Any) -> type | None:
    """Return str or int for a usable id, and None for any other."""
    if isinstance(value, str):
        return str if value.strip() else None
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, numbers.Integral):
        return int
    # A column of whole numbers with a missing value is often read as floats.
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) <= _EXACT:
        return int
    return None

"""Tests of dpllm.data.units."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpllm.config import ConfigError
from dpllm.data.units import UnitIndex
from tests.mutations import kills


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 5), st.booleans())
def test_index_keeps_units_whole_and_bounded(ids: list[int], bound: int, drawn: bool) -> None:
    """Every unit has exactly min(its rows, bound) of its rows, and no row belongs to two units."""
    index = UnitIndex.from_ids(ids, bound, np.random.default_rng(0) if drawn else None)
    order = list(dict.fromkeys(ids))
    assert index.num_units == len(order)
    for unit, name in enumerate(order):
        rows = list(index.rows[index.offsets[unit] : index.offsets[unit + 1]])
        assert all(ids[row] == name for row in rows)
        assert len(rows) == min(ids.count(name), bound)
        assert drawn or rows == [row for row, other in enumerate(ids) if other == name][:bound]
    assert index.num_rows + index.rows_dropped == len(ids)
    assert index.max_rows == max(min(ids.count(name), bound) for name in order)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.data())
def test_rows_of_agrees_with_a_loop(ids: list[int], data: st.DataObject) -> None:
    """The vectorised gather equals slicing unit by unit, for repeated and no units too."""
    index = UnitIndex.from_ids(ids)
    units = data.draw(st.lists(st.integers(0, index.num_units - 1), max_size=10))
    rows, position = index.rows_of(np.array(units, dtype=np.int64))
    expected = [(row, at) for at, u in enumerate(units) for row in index.rows[index.offsets[u] : index.offsets[u + 1]]]
    assert list(zip(rows.tolist(), position.tolist(), strict=True)) == expected


def test_one_row_per_unit() -> None:
    """Without ids each row is a unit."""
    index = UnitIndex.one_row_per_unit(4)
    assert (index.num_units, index.num_rows, index.max_rows, index.rows_dropped) == (4, 4, 1, 0)
    rows, position = index.rows_of(np.array([3, 1]))
    assert rows.tolist() == [3, 1] and position.tolist() == [0, 1]


def test_a_billion_rows_have_an_index_without_arrays() -> None:
    """N entries never exist in memory, neither when the index is made nor when its rows, bound or units are read."""
    tracemalloc.start()
    try:
        index = UnitIndex.one_row_per_unit(10**9).each_row()
        rows, position = index.rows_of(np.array([0, 10**9 - 1]))
        assert (index.num_units, index.num_rows, index.max_rows) == (10**9, 10**9, 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert rows.tolist() == [0, 10**9 - 1] and position.tolist() == [0, 1]


def as_before(ids: list[int]) -> UnitIndex:
    """Return the index as two arrays, from a loop over the units."""
    own = {name: [row for row, other in enumerate(ids) if other == name] for name in dict.fromkeys(ids)}
    counts = np.array([0, *map(len, own.values())])
    return UnitIndex(np.cumsum(counts), np.array([row for rows in own.values() for row in rows], dtype=np.int64))


@given(st.lists(st.integers(-3, 6), max_size=40), st.sampled_from([list, sorted, lambda ids: range(len(ids))]))
def test_ranges_and_arrays_of_ids_give_the_index_of_a_loop(ids: list[int], order: Any) -> None:
    """Ids in any order, rising, or all different, as a list or as an array of any width, give the same index."""
    ids = list(order(ids))
    expected = as_before(ids)
    for given_ids in (ids, np.array(ids, dtype=np.int64), np.array(ids, dtype=np.int8)):
        index = UnitIndex.from_ids(given_ids)
        assert list(index.rows) == expected.rows.tolist() and list(index.offsets) == expected.offsets.tolist()
        assert np.concatenate([*index.blocks()]).tolist() == [*expected.rows.tolist(), *expected.offsets.tolist()]
        assert index.max_rows == expected.max_rows
        every = np.arange(index.num_units)[::-1]
        for found, wanted in zip(index.rows_of(every), expected.rows_of(every), strict=True):
            assert found.dtype == np.int64 and found.tolist() == wanted.tolist()
        assert list(index.each_row().rows) == expected.each_row().rows.tolist()
        for bound in (1, 2):
            bounded, looped = UnitIndex.from_ids(given_ids, bound), UnitIndex.from_ids(list(ids), bound)
            assert list(bounded.rows) == list(looped.rows) and bounded.rows_dropped == looped.rows_dropped


def test_the_largest_unit_is_found_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are read in blocks; a unit at the boundary of two blocks counts like any other."""
    monkeypatch.setattr("dpllm.data.units._BLOCK", 2)
    for largest in range(5):
        counts = np.array([0, *(3 if unit == largest else 1 for unit in range(5))])
        index = UnitIndex(np.cumsum(counts), np.arange(7))
        assert index.max_rows == 3
        assert np.concatenate([*index.blocks()]).tolist() == [*range(7), *index.offsets]
    assert UnitIndex(range(0, 7, 3), range(6)).max_rows == 3


def test_no_rows_give_no_units() -> None:
    """An empty data set has an index without units (and the plan refuses it)."""
    assert UnitIndex.from_ids([]).num_units == UnitIndex.from_ids([], 2).num_units == 0
    assert UnitIndex.one_row_per_unit(0).max_rows == 0


def test_drawn_rows_are_uniform() -> None:
    """With a generator, each row of a unit with too many rows is kept equally often."""
    counts = np.zeros(5)
    for seed in range(2000):
        counts[UnitIndex.from_ids([0] * 5, 2, np.random.default_rng(seed)).rows] += 1
    # 2000 draws with probability 2/5: five standard deviations are 110.
    assert np.all(np.abs(counts - 800) < 110)


@pytest.mark.parametrize("missing", [None, float("nan"), "", "  ", 1.5, True, np.bool_(True), [1]])
def test_missing_id_is_refused_with_its_row(missing: Any) -> None:
    """A row without a usable id is an error that gives its number and shows no id."""
    with pytest.raises(ValueError, match="usable") as caught:
        UnitIndex.from_ids([7, 7, missing, missing])
    assert "7" not in str(caught.value)


def test_mixed_ids_are_refused() -> None:
    """The number 7 and the text "7" could be one user who is counted twice."""
    with pytest.raises(ValueError, match="mix text"):
        UnitIndex.from_ids([7, "7"])


def test_bound_below_one_is_refused() -> None:
    """A bound of no rows makes no sense."""
    with pytest.raises(ValueError, match="max_rows_per_unit"):
        UnitIndex.from_ids([1], 0)


@pytest.mark.parametrize("units", [[-1], [2]])
def test_unit_out_of_range_is_refused(units: list[int]) -> None:
    """A unit that does not exist is an error, not the last one."""
    with pytest.raises(ValueError, match=r"must be in 0\.\.1"):
        UnitIndex.one_row_per_unit(2).rows_of(np.array(units))


@pytest.mark.parametrize(
    ("offsets", "rows", "match"),
    [
        ([0, 2], [1, 1], "a row belongs to two units"),
        ([0, 3], [1, 0, 1], "a row belongs to two units"),
        (range(0, 3, 2), range(3), "must rise from 0"),
        ([[0, 1]], [0], "two one-dimensional arrays"),
        ([0, 1, 1], [0], "every unit has at least one row"),
        ([1, 2], [0, 1], "must rise from 0"),
        ([], [], "offsets with at least one entry"),
    ],
)
def test_bad_map_is_refused(offsets: Any, rows: Any, match: str) -> None:
    """An index whose units overlap or are empty cannot be made."""
    with pytest.raises(ValueError, match=match):
        UnitIndex(offsets=offsets, rows=rows)


def test_index_is_read_only() -> None:
    """Nobody can move a row to another unit afterwards."""
    with pytest.raises(ValueError, match="read-only"):
        UnitIndex.from_ids([1, 2, 1]).rows[0] = 1
    with pytest.raises(TypeError, match="assignment"):
        UnitIndex.one_row_per_unit(2).rows[0] = 1


def test_each_row_by_itself_keeps_the_bound_of_its_owner() -> None:
    """Each row that was kept is a unit, and the index gives the most rows that one owner has."""
    users = UnitIndex.from_ids(["a", "b", "a", "a", "b"], max_rows_per_unit=2)
    rows = users.each_row()
    assert list(rows.rows) == [0, 1, 2, 4] and rows.num_units == rows.num_rows == 4 and rows.max_rows == 1
    assert (rows.rows_per_owner, users.rows_per_owner) == (2, 1)
    assert rows.rows_dropped == users.rows_dropped == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("00017", "17"),
        ("1e2", "100"),
        ("100.0", "100"),
        ("+7", "7"),
        ("ann", " ann"),
        ("ann lee", "ann  lee"),
        ("jos\u00e9", "jose\u0301"),
        ("\uff11\uff17", "17"),
        ("ann", "ann\u200b"),
        ("ann", "ann\0"),
    ],
)
def test_ids_that_look_equal_are_refused(one: str, other: str) -> None:
    """One person's id in two spellings would be two units; the message has their rows, and no id."""
    with pytest.raises(ValueError, match=r"privacy\.normalize_ids"):
        UnitIndex.from_ids([one, "bob", other])
    merged = UnitIndex.from_ids([one, "bob", other], normalize=True)
    assert merged.num_units == 2 and merged.rows_of(np.array([0]))[0].tolist() == [0, 2]


@pytest.mark.parametrize("kind", [object, str], ids=["objects", "fixed width"])
def test_texts_in_an_array_are_compared_like_those_in_a_list(kind: type) -> None:
    """Such an array is a table's column: `frame["user"].to_numpy()`."""
    with pytest.raises(ValueError, match=r"privacy\.normalize_ids"):
        UnitIndex.from_ids(np.array(["ann", "bob", "ann "], dtype=kind))
    assert UnitIndex.from_ids(np.array(["ann", "bob", "Ann"], dtype=kind)).differ_in_case
    assert UnitIndex.from_ids(np.array(["ann", "bob", "ANN "], dtype=kind), normalize=True).num_units == 2


def test_ids_that_differ_are_left_as_they_are() -> None:
    """Long numbers, version-like ids and words keep their differences; those that differ in case only are noted."""
    ids = ["1" * 40, "1" * 39 + "2", "1.2.3", "0x10", "10", "a-1", "a_1"]
    index = UnitIndex.from_ids(ids)
    assert index.num_units == len(ids) and not index.differ_in_case
    cased = UnitIndex.from_ids(["Ann", "ann", "Ann"], max_rows_per_unit=1)
    assert cased.num_units == 2 and cased.differ_in_case and cased.each_row().differ_in_case
    assert UnitIndex.from_ids(["Ann", "ann"], normalize=True).num_units == 1


def test_a_number_that_a_float_cannot_hold_is_no_id() -> None:
    """Above 2^53 two ids would be one float, and one person two people's unit; smaller ones name the same units."""
    assert UnitIndex.from_ids([1.0, 2, np.int64(1)]).num_units == UnitIndex.from_ids([1.0, 2.0]).num_units == 2
    with pytest.raises(ValueError, match="usable"):
        UnitIndex.from_ids([1.0, 2.0**53 + 2])


@kills(
    "a row may change its unit",
    "dpllm/data/units.py",
    "        if len(moved):\n",
    "        if len(moved) > len(rows):\n",
)
@given(st.lists(st.integers(-3, 6), min_size=1, max_size=20), st.data())
def test_a_row_with_the_id_of_another_is_found_in_every_form_of_an_index(ids: list[int], data: st.DataObject) -> None:
    """Rows in their places are accepted, also those that no unit keeps; of moved rows the first is named."""
    text = data.draw(st.booleans())
    of_row = [f"u{number}" for number in ids] if text else ids
    later = data.draw(st.permutations(of_row))
    moved = [row for row, (one, other) in enumerate(zip(of_row, later, strict=True)) if one != other]
    bound = data.draw(st.sampled_from([None, 1, 2]))
    index = UnitIndex.from_ids(data.draw(st.sampled_from([list, np.array]))(of_row), bound, column="author")
    rows = np.arange(len(ids))
    for form in (index, index.each_row(), replace(index, many_copies=True)):
        form.refuse_moved(rows, of_row)
        form.refuse_moved(rows[::-1], [np.array(one) for one in of_row[::-1]])
        form.refuse_moved([], [])
        for again in (later, np.array(later), [np.array(one) for one in later]):
            if moved:
                with pytest.raises(ConfigError, match=rf"Row {moved[0]} has a different id in the column 'author'"):
                    form.refuse_moved(rows, again)
            else:
                form.refuse_moved(rows, again)


@pytest.mark.parametrize("later", [None, "", "17", 18, 1.5, 17 + 2**64 + 1])
def test_an_id_of_another_kind_or_without_a_value_is_a_moved_row(later: Any) -> None:
    """Whole fractions are the same id, as they are when the index is made; the message shows none."""
    index = UnitIndex.from_ids([4, 17])
    index.refuse_moved([1], [17.0])
    with pytest.raises(ConfigError, match="Row 1 has a different id than") as caught:
        index.refuse_moved([1], [later])
    assert "17" not in str(caught.value)


def test_normalized_ids_are_compared_as_one() -> None:
    """Another spelling of a person is no moved row if such ids are one unit."""
    UnitIndex.from_ids(["00017", "ann"], normalize=True).refuse_moved([0, 1], ["17", " Ann"])
    with pytest.raises(ConfigError, match="Row 1"):
        UnitIndex.from_ids(["00017", "ann"]).refuse_moved([0, 1], ["00017", "Ann"])


def test_hashes_of_ids_take_eight_bytes_and_leave_the_process_in_no_form() -> None:
    """An index without ids has none; a copy for another process accepts any id, since its key is unknown there."""
    assert UnitIndex.one_row_per_unit(3).ids is None
    UnitIndex.one_row_per_unit(3).refuse_moved([0], ["anything"])
    index = UnitIndex.from_ids(np.arange(1000) // 2)
    assert index.ids is not None and index.ids.hashes.nbytes == 8000 and len(set(index.ids.hashes.tolist())) == 500
    assert "hashes" not in repr(index) and "ids" not in repr(index).replace("same id", "")
    for made in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        assert made.ids is None and made.num_units == 500

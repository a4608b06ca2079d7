"""The cut of a logical batch: every row of every drawn unit once, no unit split, nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.microbatches import PADDING_UNIT, microbatches
from dpllm.units import UnitIndex


def collate(rows):
    return {"row": torch.tensor(rows)}


def cut(units, lengths, unit_ids, max_rows):
    return list(
        microbatches(
            lambda rows: rows.tolist(),
            collate,
            units,
            np.asarray(lengths),
            np.asarray(unit_ids, dtype=np.int64),
            max_rows,
        )
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_row_of_every_unit_exactly_once(data):
    """Any number of units, rows and any budget: the rows of a unit stay together, in one microbatch."""
    owner = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=30))
    units = UnitIndex.from_ids([str(o) for o in owner], None)
    chosen = data.draw(st.lists(st.integers(0, units.num_units - 1), unique=True, min_size=1))
    max_rows = data.draw(st.integers(1, 8))
    batches = cut(units, [data.draw(st.integers(1, 50)) for _ in owner], chosen, max_rows)
    seen = []
    for batch in batches:
        rows = batch.inputs["row"].tolist()
        assert len(rows) <= max_rows or batch.num_units == 1
        assert sorted(set(batch.unit_index.tolist())) == list(range(batch.num_units))
        for unit in range(batch.num_units):
            members = [row for row, u in zip(rows, batch.unit_index.tolist(), strict=True) if u == unit]
            (name,) = {owner[row] for row in members}
            assert sorted(members) == [row for row, o in enumerate(owner) if o == name]
        seen += rows
    expected, _ = units.rows_of(np.asarray(chosen))
    assert sorted(seen) == sorted(expected.tolist())


def test_rows_of_similar_length_go_together():
    """Little padding: sorted by length, longest first."""
    units = UnitIndex.one_row_per_unit(6)
    batches = cut(units, [1, 50, 2, 49, 3, 48], range(6), 3)
    assert [sorted(b.inputs["row"].tolist()) for b in batches] == [[1, 3, 5], [0, 2, 4]]


def test_an_empty_step_has_one_padding_row():
    """The step is taken all the same, on every rank, with a row of weight 0."""
    (batch,) = cut(UnitIndex.one_row_per_unit(4), [1, 1, 1, 1], [], 3)
    assert batch.num_units == 0 and batch.unit_index.tolist() == [PADDING_UNIT] and batch.inputs["row"].shape == (1,)


def test_a_collator_that_packs_rows_is_refused():
    """Several units in one row can't be clipped one by one."""
    with pytest.raises(ValueError, match=r"3 rows into 'row' of shape \(1, 3\)"):
        list(
            microbatches(
                lambda rows: rows.tolist(),
                lambda rows: {"row": torch.tensor([rows])},
                UnitIndex.one_row_per_unit(3),
                np.ones(3, dtype=np.int64),
                np.arange(3),
                8,
            )
        )


def test_a_budget_of_no_rows_is_refused():
    """Nothing would ever be trained."""
    with pytest.raises(ValueError, match="max_rows is 0"):
        cut(UnitIndex.one_row_per_unit(3), [1, 1, 1], [0], 0)

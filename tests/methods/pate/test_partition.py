"""Each unit has one teacher, drawn without a look at any record."""

import itertools

import numpy as np
import pytest

from dpllm.data.units import UnitIndex
from dpllm.methods.pate.votes import Partition
from tests.mutations import kills


@kills(
    "teachers share units",
    "dpllm/methods/pate/votes.py",
    "np.flatnonzero(self.teacher_of == teacher)",
    "np.flatnonzero(self.teacher_of >= teacher)",
)
@pytest.mark.parametrize(("num_units", "num_teachers"), [(10, 3), (7, 7), (1000, 50)])
def test_every_unit_has_one_teacher_and_teachers_share_none(num_units, num_teachers):
    """The whole guarantee rests on it: a unit changes one vote."""
    partition = Partition(num_units, num_teachers, np.random.default_rng(0))
    units = UnitIndex.one_row_per_unit(num_units)
    groups = [partition.rows_of(teacher, units).tolist() for teacher in range(num_teachers)]
    assert sorted(itertools.chain(*groups)) == list(range(num_units))
    assert partition.sizes.tolist() == [len(group) for group in groups]
    assert partition.sizes.max() - partition.sizes.min() <= 1


def test_all_rows_of_a_user_go_to_one_teacher():
    """Also where they are scattered; rows that were dropped go to none."""
    ids = ["ann", "bob", "ann", "cyd", "bob", "ann", "dan"]
    units = UnitIndex.from_ids(ids, max_rows_per_unit=2)
    for seed in range(20):
        partition = Partition(4, 2, np.random.default_rng(seed))
        owners = [{ids[row] for row in partition.rows_of(teacher, units)} for teacher in range(2)]
        assert not owners[0] & owners[1] and owners[0] | owners[1] == set(ids)
        assert sorted(np.concatenate([partition.rows_of(t, units) for t in range(2)])) == [0, 1, 2, 3, 4, 6]


def test_divisions_are_uniform():
    """Two units share a teacher with the probability of a uniform division: 1/5 for 6 units in pairs."""
    rng, together = np.random.default_rng(1), np.zeros((6, 6))
    for _ in range(3000):
        teacher_of = Partition(6, 3, rng).teacher_of
        together += teacher_of[:, None] == teacher_of[None, :]
    shares = together[~np.eye(6, dtype=bool)] / 3000
    assert np.abs(shares - 0.2).max() < 4.5 * (0.2 * 0.8 / 3000) ** 0.5


def test_more_teachers_than_units_are_refused():
    """A teacher without a unit learns nothing."""
    with pytest.raises(ValueError, match=r"teach\.teachers=4"):
        Partition(3, 4, np.random.default_rng(0))


def test_units_of_other_records_are_refused():
    """An index with another number of units would give rows to teachers that do not own them."""
    with pytest.raises(ValueError, match="3 units"):
        Partition(3, 2, np.random.default_rng(0)).rows_of(0, UnitIndex.one_row_per_unit(4))

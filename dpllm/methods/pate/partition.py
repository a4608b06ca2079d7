"""The division of units among teachers: each unit has one teacher, drawn without a look at any record.

Place in the flow: first. Everything that the vote's guarantee says about a unit rests on this: one unit is seen by one
teacher, so it changes one vote.
"""

from __future__ import annotations

import numpy as np

from dpllm.data.units import Int64Array, UnitIndex


class Partition:
    """The teacher of each unit.

    Guarantee: uniformly random among all divisions in which the numbers of units of two teachers differ by at most one,
    and independent of the records: it depends on their public number N only. The neighbouring data set, which lacks a
    unit or has another one in its place, is divided in the same way.

    Args:
        num_units: N.
        num_teachers: k.
        rng: secret generator (`dpllm.methods.queries.run.Randomness.generator`).

    Raises:
        ValueError: there are more teachers than units.

    >>> Partition(5, 2, np.random.default_rng(0)).sizes.tolist()
    [3, 2]
    """

    def __init__(self, num_units: int, num_teachers: int, rng: np.random.Generator) -> None:
        """Draw the division."""
        if not 1 <= num_teachers <= num_units:
            raise ValueError(
                f"teach.teachers={num_teachers} for {num_units} units: a teacher needs at least one unit. Take fewer "
                "teachers"
            )
        self.num_teachers = num_teachers
        self.teacher_of = np.empty(num_units, dtype=np.int64)
        self.teacher_of[rng.permutation(num_units)] = np.arange(num_units) % num_teachers
        self.teacher_of.setflags(write=False)

    @property
    def sizes(self) -> Int64Array:
        """Return (k,): the number of units of each teacher, which is public."""
        return np.bincount(self.teacher_of, minlength=self.num_teachers)

    def rows_of(self, teacher: int, units: UnitIndex) -> Int64Array:
        """Return the row numbers of a teacher's units, in the order of the data.

        Args:
            teacher: 0 to k - 1.
            units: the rows of each unit.

        Raises:
            ValueError: the index has another number of units.
        """
        if units.num_units != len(self.teacher_of):
            raise ValueError(f"{len(self.teacher_of)} units were divided, and the rows have {units.num_units}")
        rows, _ = units.rows_of(np.flatnonzero(self.teacher_of == teacher))
        return np.sort(np.asarray(rows, dtype=np.int64))

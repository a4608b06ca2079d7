"""Tests of dpllm.methods.predict.inputs: no unit is in two groups."""

from __future__ import annotations

import numpy as np
import pytest

from dpllm.methods.predict.inputs import checked_groups, secret_groups
from tests.mutations import kills


def test_groups_are_disjoint_and_secret():
    """They cover what they need, and two divisions differ."""
    one, other = (secret_groups(1000, 30, 33) for _ in range(2))
    units = np.concatenate(one)
    assert len(one) == 33 and all(len(group) == 30 for group in one)
    assert len(np.unique(units)) == 990 and units.min() >= 0 and units.max() < 1000
    assert any((first != second).any() for first, second in zip(one, other, strict=True))


def test_every_unit_is_as_likely_to_be_used():
    """A group of half of the units."""
    counts = sum(np.bincount(secret_groups(10, 5, 1)[0], minlength=10) for _ in range(2000))
    assert counts.min() > 800 and counts.max() < 1200


@pytest.mark.parametrize(("num_units", "size", "count"), [(10, 6, 2), (10, 0, 1), (10, 5, 0)])
def test_too_few_units(num_units, size, count):
    """A unit is never used twice to fill a group."""
    with pytest.raises(ValueError, match="cannot be in two groups"):
        secret_groups(num_units, size, count)


@kills(
    "a unit may be in two groups of a private prediction",
    "dpllm/methods/predict/inputs.py",
    "if len(np.unique(units)) < len(units):",
    "if False:",
)
@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0, 0], [1, 2]]])
def test_a_record_in_two_groups_is_refused(groups):
    """Planted: parallel composition would not hold."""
    with pytest.raises(ValueError, match="two groups"):
        checked_groups([np.array(group) for group in groups])

"""The sample of a grid leaves out no value, and no pair of values where pairs are asked for."""

from itertools import combinations, product

import pytest

from tests.tiers import sample

AXES = {"engine": range(5), "dtype": range(2), "checkpointing": range(3), "tied": range(2)}
GRID = [list(zip(AXES, values, strict=True)) for values in product(*AXES.values())]


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_appears(strength):
    """In far fewer cases than there are."""
    taken = sample(GRID, strength)
    wanted, found = (
        {combination for case in cases for combination in combinations(case, strength)}
        for cases in (GRID, [GRID[number] for number in taken])
    )
    assert found == wanted
    assert len(taken) <= {1: 5, 2: 18, 3: 40}[strength] < len(GRID)


def test_a_combination_that_no_case_has_is_not_waited_for():
    """Some options exclude each other."""
    cases = [case for case in GRID if ("engine", 0) not in case or ("dtype", 1) not in case]
    taken = [cases[number] for number in sample(cases, 2)]
    assert {value for case in taken for value in case} == {value for case in GRID for value in case}


def test_one_case_is_its_own_sample():
    """A case that is asked for by name is run, and an axis with one value asks for nothing."""
    assert sample(GRID[7:8], 2) == {0}
    assert len(sample([[("a", 0), ("b", 0)], [("a", 0), ("b", 1)]], 2)) == 2

"""A fixed order visits every unit once in each pass, and two visits are as far apart as the accounting assumes."""

import itertools

import numpy as np
import pytest

from dpllm.mechanism.fixed_order import FixedOrderSampler
from dpllm.mechanism.parts import FixedBatch
from dpllm.mechanism.sampling import TruncatedPoissonSampler, secret_rng, seeded_rng
from tests.mutations import kills


def visits(sampler, num_steps, seed=0):
    """The steps of each unit."""
    steps = list(itertools.islice(sampler.steps(seeded_rng(seed)), num_steps))
    assert all(len(set(units.tolist())) == len(units) == sampler.batch_size for units in steps)
    assert all((np.diff(units) > 0).all() and units.dtype == np.int64 for units in steps)
    return [[t for t, units in enumerate(steps) if unit in units] for unit in range(sampler.num_units)]


@kills(
    "a unit in a fixed order comes again in the next step",
    "dpllm/mechanism/fixed_order.py",
    "            first = (first + self.batch_size) % self.num_units\n",
    "            first = (first + 1) % self.num_units\n",
)
@pytest.mark.parametrize(("num_units", "batch_size"), [(12, 4), (12, 12), (13, 4), (10, 7), (7, 1), (11, 6), (25, 8)])
def test_visits_of_a_unit_are_apart_and_few(num_units, batch_size):
    """The two facts of the accounting; the distance and the number are attained, so neither is loose."""
    sampler = FixedOrderSampler(num_units, batch_size)
    for num_steps in (1, 2, 3, 5, 8, 30):
        of_units = visits(sampler, num_steps)
        gaps = [later - earlier for steps in of_units for earlier, later in itertools.pairwise(steps)]
        assert min(gaps, default=sampler.separation) >= sampler.separation
        assert max(map(len, of_units)) == sampler.participations(num_steps)
    assert min(gaps) == sampler.separation == num_units // batch_size


def test_a_pass_has_every_unit_once_also_where_a_batch_spans_two_passes():
    """No unit is left out, and the size of a batch does not depend on the data."""
    of_units = visits(FixedOrderSampler(13, 4), 13)
    assert {len(steps) for steps in of_units} == {4}


def test_the_order_is_another_in_every_start():
    """It comes from the generator; nothing depends on its secrecy."""
    sampler = FixedOrderSampler(1000, 100)
    first, second = (next(sampler.steps(secret_rng())).tolist() for _ in range(2))
    assert first != second
    assert next(sampler.steps(seeded_rng(1))).tolist() == next(sampler.steps(seeded_rng(1))).tolist()


def test_only_a_fixed_batch_is_called_one():
    """The plan gives its size as the largest batch."""
    assert isinstance(FixedOrderSampler(9, 3), FixedBatch)
    assert not isinstance(TruncatedPoissonSampler(9, 0.5, 9), FixedBatch)


@pytest.mark.parametrize("batch_size", [0, 10])
def test_a_batch_that_is_empty_or_has_a_unit_twice_is_refused(batch_size):
    """More than all units would visit one twice in a step."""
    with pytest.raises(ValueError, match="take a batch of at least 1 and at most 9 units"):
        FixedOrderSampler(9, batch_size)

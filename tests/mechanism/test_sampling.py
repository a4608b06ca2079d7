"""Tests of dpllm.mechanism.sampling."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from dpllm.mechanism.catalogue import noise_of
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.sampling import (
    FixedOrderSampler,
    TruncatedPoissonSampler,
    default_max_batch_size,
    secret_rng,
    seeded_rng,
)
from tests.mutations import kills


def _draws(sampler: TruncatedPoissonSampler, num_steps: int, seed: int = 0) -> np.ndarray:
    """Return (num_steps, num_units): 1 where the unit was drawn."""
    drawn = np.zeros((num_steps, sampler.num_units))
    for step, units in enumerate(itertools.islice(sampler.steps(seeded_rng(seed)), num_steps)):
        drawn[step, units] = 1
    return drawn


@kills(
    "the sampler ignores the sampling rate",
    "dpllm/mechanism/sampling.py",
    "rng.binomial(self.num_units, self.sampling_rate)",
    "rng.binomial(self.num_units, 0.5)",
)
def test_inclusion_frequency() -> None:
    """Each unit enters with probability q, by a chi-square test over units."""
    sampler = TruncatedPoissonSampler(num_units=50, sampling_rate=0.1, max_batch_size=50)
    counts = _draws(sampler, 20_000).sum(axis=0)
    z = (counts - 2000) / math.sqrt(20_000 * 0.1 * 0.9)
    assert stats.chi2.sf((z**2).sum(), 50) > 1e-4


def test_batch_size_is_binomial() -> None:
    """The number of units of a step is Binomial(N, q) while nothing is truncated."""
    sizes = _draws(TruncatedPoissonSampler(30, 0.2, 30), 20_000).sum(axis=1).astype(int)
    observed = np.bincount(np.clip(sizes, 1, 12), minlength=13)[1:]
    pmf = stats.binom.pmf(np.arange(31), 30, 0.2)
    expected = 20_000 * np.concatenate(([pmf[:2].sum()], pmf[2:12], [pmf[12:].sum()]))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_units_and_steps_are_independent() -> None:
    """Presence is uncorrelated between two units of a step and between two steps of a unit."""
    drawn = _draws(TruncatedPoissonSampler(20, 0.3, 20), 20_000)
    between_units = np.corrcoef(drawn.T) - np.eye(20)
    between_steps = np.corrcoef(drawn[:-1].T, drawn[1:].T)[:20, 20:]
    # A correlation of 20 000 independent pairs has standard deviation 0.007.
    assert np.abs(between_units).max() < 0.036 and np.abs(between_steps).max() < 0.036


def test_truncation_keeps_a_uniform_subset() -> None:
    """Never more than B_max units, exactly B_max when more enter, and no unit is favoured."""
    drawn = _draws(TruncatedPoissonSampler(20, 0.5, 6), 20_000)
    sizes = drawn.sum(axis=1)
    assert sizes.max() == 6
    assert abs((sizes == 6).mean() - stats.binom.sf(5, 20, 0.5)) < 0.01
    probability = np.minimum(np.arange(21), 6) @ stats.binom.pmf(np.arange(21), 20, 0.5) / 20
    assert np.abs(drawn.mean(axis=0) - probability).max() < 5 * math.sqrt(0.25 / 20_000)


def test_draw_is_sorted_distinct_and_may_be_empty() -> None:
    """A step has distinct units in rising order, and sometimes no unit."""
    rng = seeded_rng(1)
    sampler = TruncatedPoissonSampler(100, 0.01, 8)
    sizes = set()
    for units in itertools.islice(sampler.steps(rng), 500):
        assert units.dtype == np.int64 and np.all(np.diff(units) > 0)
        sizes.add(len(units))
    assert 0 in sizes and max(sizes) > 1


def test_everybody_takes_part_at_rate_one() -> None:
    """q = 1 is the full batch."""
    assert TruncatedPoissonSampler(7, 1.0, 7).draw(seeded_rng(0)).tolist() == list(range(7))


def test_large_data_set_costs_what_the_batch_costs() -> None:
    """A draw of about 1000 among ten billion units takes well under a megabyte."""
    sampler = TruncatedPoissonSampler(10**10, 1e-7, 1300)
    tracemalloc.start()
    units = sampler.draw(seeded_rng(0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 800 < len(units) < 1300 and peak < 1_000_000


def test_entropy_is_fresh_and_seeds_repeat() -> None:
    """Two secret generators differ, two with one seed agree, and seeds far apart in size are different."""
    assert secret_rng().integers(0, 2**63, 4).tolist() != secret_rng().integers(0, 2**63, 4).tolist()
    assert seeded_rng(5).integers(0, 2**63, 4).tolist() == seeded_rng(5).integers(0, 2**63, 4).tolist()
    assert seeded_rng(5).integers(0, 2**63) != seeded_rng(5 + 2**200).integers(0, 2**63)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ((0, 0.1, 1), "num_units must be at least 1"),
        ((10, 0.0, 1), "sampling_rate must be above 0"),
        ((10, 1.1, 1), "sampling_rate must be above 0 and at most 1"),
        ((10, float("nan"), 1), "sampling_rate must be above 0"),
        ((10, 0.1, 0), "max_batch_size must be at least 1"),
    ],
)
def test_bad_sampler_is_refused(fields: tuple[int, float, int], match: str) -> None:
    """An impossible sampler is an error."""
    with pytest.raises(ValueError, match=match):
        TruncatedPoissonSampler(*fields)


def test_default_max_batch_size() -> None:
    """The rule is ceil(b + 7 sqrt(b)), never above the number of units."""
    assert default_max_batch_size(1024) == 1248
    assert default_max_batch_size(10) == 33
    assert default_max_batch_size(1024, num_units=1100) == 1100


def visits(sampler, num_steps, seed=0):
    """The steps of each unit."""
    steps = list(itertools.islice(sampler.steps(seeded_rng(seed)), num_steps))
    assert all(len(set(units.tolist())) == len(units) == sampler.batch_size for units in steps)
    assert all((np.diff(units) > 0).all() and units.dtype == np.int64 for units in steps)
    return [[t for t, units in enumerate(steps) if unit in units] for unit in range(sampler.num_units)]


@kills(
    "a unit in a fixed order comes again in the next step",
    "dpllm/mechanism/sampling.py",
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


def test_only_a_fixed_batch_is_the_largest_batch():
    """The plan gives its size as the largest batch."""
    draw = Draw(num_units=9, population=9, expected_batch_size=3, max_batch_size=9)
    fixed, sampled = noise_of(Spec("blt")), noise_of(Spec("independent"))
    assert isinstance(fixed.sampler(draw), FixedOrderSampler)
    assert (fixed.is_sampled, fixed.max_batch_size(draw)) == (False, 3)
    assert isinstance(sampled.sampler(draw), TruncatedPoissonSampler)
    assert (sampled.is_sampled, sampled.max_batch_size(draw)) == (True, None)


@pytest.mark.parametrize("batch_size", [0, 10])
def test_a_batch_that_is_empty_or_has_a_unit_twice_is_refused(batch_size):
    """More than all units would visit one twice in a step."""
    with pytest.raises(ValueError, match="1 to 9 units"):
        FixedOrderSampler(9, batch_size)

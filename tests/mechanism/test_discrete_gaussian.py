"""Discrete Gaussian numbers have exactly their probabilities, also where the first 64 bits decide nothing."""

from __future__ import annotations

import decimal

import numpy as np
import pytest
from scipy import stats

from dpllm.mechanism import discrete_gaussian
from dpllm.mechanism.discrete_gaussian import DiscreteGaussians, leading_bits


@pytest.mark.parametrize("bits", [0, 1, 3])
def test_the_numbers_have_the_probabilities_of_the_discrete_gaussian(bits):
    """Chi-square against the exact probabilities for s = 1, 2, 8, with a fixed key so that the test cannot flicker."""
    scale, count = 2**bits, 300_000
    drawn = DiscreteGaussians(bytes([bits]) * 32, bits).draw(count)
    numbers = np.arange(-12 * scale, 12 * scale + 1)
    chances = np.exp(-(numbers**2) / (2 * scale**2))
    expected = count * chances / chances.sum()
    kept = expected > 10
    seen = np.array([np.count_nonzero(drawn == number) for number in numbers])
    rest = count - seen[kept].sum(), count - expected[kept].sum()
    assert stats.chisquare([*seen[kept], rest[0]], [*expected[kept], rest[1]]).pvalue > 1e-3
    wrong = np.exp(-(numbers**2) / (2 * (1.02 * scale) ** 2))
    wrong *= count / wrong.sum()
    assert stats.chisquare([*seen[kept], rest[0]], [*wrong[kept], count - wrong[kept].sum()]).pvalue < 1e-3


def test_at_the_real_scale_the_numbers_are_normal_and_independent():
    """Kolmogorov-Smirnov; no correlation with the next number, with another key, or of the last bits."""
    one, other = (DiscreteGaussians(bytes([key]) * 32).draw(100_000) for key in (1, 2))
    scaled = one / 2.0**40
    assert stats.kstest(scaled, "norm").pvalue > 1e-3 and stats.kstest(scaled / 1.04, "norm").pvalue < 1e-3
    pairs = [(one[1:], one[:-1]), (one, other), (one % 2, other % 2), (one[1:] % 2, one[:-1] % 2)]
    assert all(abs(np.corrcoef(*pair)[0, 1]) < 5 / 100_000**0.5 for pair in pairs)
    assert abs((one % 2).mean() - 0.5) < 5 / 2 / 100_000**0.5


def test_a_key_gives_the_same_numbers_and_another_key_others():
    """Whatever the pieces in which they are drawn are, none is given out twice."""
    numbers = DiscreteGaussians(bytes(32))
    first, second = numbers.draw(1000), numbers.draw(1000)
    assert np.array_equal(first, DiscreteGaussians(bytes(32)).draw(1000))
    assert not np.intersect1d(first, second).size
    assert not np.intersect1d(first, DiscreteGaussians(b"1" * 32).draw(1000)).size


def test_the_bits_of_powers_of_e_are_those_of_decimal_arithmetic():
    """To 192 bits, also for powers that begin with many zeros."""
    with decimal.localcontext(decimal.Context(prec=200)):
        for halves in (1, 2, 3, 7, 90, 200):
            exact = (decimal.Decimal(-halves) / 2).exp() * 2**192
            assert leading_bits(halves, 192) == int(exact)


class Words:
    """A stream of given words."""

    def __init__(self, *words):
        self.words = list(words)

    def take(self, count):
        taken, self.words = self.words[:count], self.words[count:]
        return np.array(taken, np.uint64)


@pytest.mark.parametrize("v", [1, 2, 40])
def test_the_next_bits_decide_where_the_first_64_are_those_of_the_limit(v):
    """A uniform number just below exp(-v) has V >= v, one just above it has not; the same for the coin of exp(-1/2)."""
    first, second = leading_bits(2 * v, 64), leading_bits(2 * v, 128) % 2**64
    assert discrete_gaussian._geometric(Words(first - 1), 1)[0] == v
    assert discrete_gaussian._geometric(Words(first + 1), 1)[0] == v - 1
    assert discrete_gaussian._geometric(Words(first, second - 1), 1)[0] == v
    assert discrete_gaussian._geometric(Words(first, second + 1), 1)[0] == v - 1
    third = leading_bits(2 * v, 192) % 2**64
    assert discrete_gaussian._geometric(Words(first, second, third - 1), 1)[0] == v
    half = [leading_bits(1, bits) % 2**64 for bits in (64, 128)]
    assert not discrete_gaussian._constant_coins(Words(half[0], half[1] + 1), 1, 1)[0]
    assert discrete_gaussian._constant_coins(Words(half[0], half[1] - 1), 1, 1)[0]


def test_a_uniform_number_that_begins_with_zeros_is_drawn_on():
    """V above 44 is as likely as it should be, and not cut off."""
    second = leading_bits(2 * 50, 128)
    assert discrete_gaussian._geometric(Words(0, second - 1), 1)[0] == 50
    assert discrete_gaussian._geometric(Words(0, second + 1), 1)[0] == 49


def test_a_grid_of_other_sizes_is_refused():
    """A second coin needs the low 24 bits of a word."""
    for bits in (-1, 41):
        with pytest.raises(ValueError, match=f"k is {bits}; k must be from 0 to 40"):
            DiscreteGaussians(bytes(32), bits)

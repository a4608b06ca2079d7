"""Tests of dpllm.methods.predict.sampler: a token is drawn with exactly its share."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpllm.methods.predict.sampler import draw_index


def shares(log_weights):
    """Return each entry's exact share of the draws: count the numbers that lead to it, by bisection."""
    seen = {}

    def total(bound):
        seen["bound"] = bound
        return 0

    draw_index(log_weights, total)
    bound = seen["bound"]
    ends, place = {}, 0
    while place < bound:
        token = draw_index(log_weights, lambda _, at=place: at)
        low, high = place, bound
        while high - low > 1:  # the numbers of a token are consecutive
            middle = (low + high) // 2
            low, high = (middle, high) if draw_index(log_weights, lambda _, at=middle: at) == token else (low, middle)
        ends[token] = Fraction(high - place, bound)
        place = high
    return ends


def test_each_share_is_exact():
    """Also of tokens whose share is far below the rounding error of a running sum of floats."""
    logs = np.array([0.0, -1.5, -np.inf, -60.0, -300.0, -60.0])
    weights = {n: Fraction(float(np.exp(one))) for n, one in enumerate(logs) if one > -np.inf}
    assert shares(logs) == {n: weight / sum(weights.values()) for n, weight in weights.items()}


def test_draws_follow_the_weights():
    """With the operating system's randomness."""
    logs = np.log(np.array([1.0, 0.5, 0.25, 0.25]))
    drawn = Counter(draw_index(logs) for _ in range(8000))
    assert stats.chisquare([drawn[n] for n in range(4)], [4000, 2000, 1000, 1000]).pvalue > 1e-6


@pytest.mark.parametrize("logs", [[], [-np.inf], [0.5], [np.nan, 0.0]])
def test_unusable_weights(logs):
    """An error, and not a token."""
    with pytest.raises(ValueError, match="token can"):
        draw_index(np.array(logs, dtype=np.float64))

"""The draw of a token from weights, exactly, with randomness from the operating system.

Place in the flow: after the scores. A float is a whole number times a power of two, so the weights have an exact sum
as a whole number, and a uniform whole number below it picks a token with exactly its share: no running sum of floats,
in which rare tokens would lose theirs, and no generator whose state could be guessed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_HALF = 27
"""Bits of the lower part of a mantissa: sums of either part are exact as floats."""


def draw_index(log_weights: NDArray[np.float64], below: Callable[[int], int] = secrets.randbelow) -> int:
    """Return the number of an entry, drawn with probability proportional to exp of it.

    Args:
        log_weights: (n,), at most 0; -inf is never drawn.
        below: returns a uniform whole number from 0 to one less than its argument.

    Raises:
        ValueError: no entry can be drawn, or one is positive or not a number.

    >>> draw_index(np.array([-np.inf, 0.0, -np.inf]))
    1
    """
    if not (log_weights.size and log_weights.max() > -np.inf and log_weights.max() <= 0):
        raise ValueError(
            f"no token can be drawn: the largest of {log_weights.size} log-weights is "
            f"{log_weights.max(initial=-np.inf)}, and it must be finite and at most 0"
        )
    places = np.flatnonzero(log_weights > -np.inf)
    fractions, exponents = np.frexp(np.exp(log_weights[places]))
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    lowest = int(exponents.min())
    shifts = exponents - lowest
    upper = np.bincount(shifts, weights=mantissas >> _HALF)
    lower = np.bincount(shifts, weights=mantissas & ((1 << _HALF) - 1))
    sums = [(int(high) << _HALF) + int(low) for high, low in zip(upper, lower, strict=True)]
    left = below(sum(mass << shift for shift, mass in enumerate(sums)))
    for shift, mass in enumerate(sums):
        if left < mass << shift:
            members = np.flatnonzero(shifts == shift)
            ends = list(accumulate(mantissas[members].tolist()))
            chosen = next(number for number, end in enumerate(ends) if left >> shift < end)
            return int(places[members[chosen]])
        left -= mass << shift
    raise AssertionError("the number drawn is below the sum of all weights")

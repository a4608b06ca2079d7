"""The random numbers of a query run: always from the operating system, and never from a seed.

Place in the flow: under `dpllm.methods.queries.run`. Every call takes fresh entropy, so no two draws share a state,
also in a process that was forked in between. The level "discrete" draws exact discrete Gaussian noise on whole numbers,
and no other noise: the report says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.chacha20 import KEY_BYTES
from dpllm.mechanism.discrete_gaussian import DEVIATION_BITS, DiscreteGaussians

_GRID = 1 << DEVIATION_BITS
Shape = int | tuple[int, ...]


class Randomness:
    """Random numbers from the operating system.

    Args:
        level: "os", or "discrete" for exact discrete noise.
    """

    def __init__(self, level: str = "os") -> None:
        """Note the level."""
        self._level = level

    def generator(self) -> np.random.Generator:
        """Return a new generator with 256 bits of the operating system's entropy, for draws that are no noise."""
        return np.random.Generator(np.random.PCG64DXSM(secrets.randbits(8 * KEY_BYTES)))

    def uniform(self, shape: Shape) -> NDArray[np.float64]:
        """Return independent numbers, uniform from 0 to below 1."""
        return self.generator().random(shape)

    def gaussian(self, shape: Shape, stddev: float) -> NDArray[np.float64]:
        """Return independent Gaussian noise.

        Args:
            shape: of the result.
            stddev: standard deviation, above 0.

        Raises:
            ValueError: the deviation is not positive and finite, or the plan has discrete noise.
        """
        if self._level == "discrete":
            raise ValueError(
                "the plan has randomness='discrete', and its report says that the noise is exact: add it with noisy(), "
                "or plan the run with randomness='os'"
            )
        if not 0 < stddev < np.inf:
            raise ValueError(f"stddev must be above 0 and finite, got {stddev}: without noise nothing is private")
        return self.generator().normal(0.0, stddev, shape)

    def noisy(self, counts: Sequence[int] | NDArray[Any], noise_multiplier: float, change: float) -> list[float]:
        """Return whole numbers with exact discrete Gaussian noise.

        The noise is a multiple of 1/m, with m the largest whole number for which its standard deviation 2^40/m is at
        least ``noise_multiplier * change``. The whole numbers are multiples of 1/m too, so nothing is rounded before
        the noise is added; the result is rounded once, to 64 bits, which depends on nothing else.

        Args:
            counts: whole numbers, (n,).
            noise_multiplier: σ/Δ of the event that is charged (`dpllm.mechanism.query.Query`, discrete).
            change: Δ, the largest change of the numbers by one unit, in l2 norm.

        Raises:
            ValueError: a number is not whole, a deviation is not positive, or the plan has other noise.
        """
        if self._level != "discrete":
            raise ValueError("the plan has no discrete noise: plan the run with randomness='discrete'")
        values = [int(count) for count in counts]
        if any(value != count for value, count in zip(values, counts, strict=True)):
            raise ValueError("discrete noise is added to whole numbers only: round them before their change is bounded")
        stddev = noise_multiplier * change
        if not 0 < stddev <= _GRID:
            raise ValueError(f"the noise has a standard deviation above 0 and at most 2^40, got {stddev}")
        per_one = int(_GRID // stddev)
        if per_one * stddev > _GRID:  # rounded up by the division
            per_one -= 1
        drawn = DiscreteGaussians(secrets.token_bytes(KEY_BYTES)).draw(len(values))
        return [(value * per_one + int(noise)) / per_one for value, noise in zip(values, drawn, strict=True)]

"""The choice of the units of a step without sampling: a fixed order, in which every pass visits each unit once.

Place in the flow: for runs whose units cannot be sampled at random in each step. No privacy is gained from this
choice: the accounting of `dpllm.mechanism.blt` would hold if everybody knew the order. It needs two facts: how far
apart two steps of one unit are at least, and how many steps a unit enters at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class FixedOrderSampler:
    """Puts the units in one random order, and takes B of them in each step, pass after pass.

    The passes follow each other without a gap: pass m has unit i of the order in the place i + mN, and step t takes the
    places from tB up to (t + 1)B. So every step has exactly B units.

    Guarantee: two steps that one unit enters are at least ⌊N/B⌋ apart, because ⌊(x + N)/B⌋ >= ⌊x/B⌋ + ⌊N/B⌋ for every
    place x. Of the first n steps, which have nB places, a unit enters at most ⌈nB/N⌉.

    Raises:
        ValueError: a batch is empty, or larger than the number of units.

    >>> sampler = FixedOrderSampler(num_units=10, batch_size=4)
    >>> sampler.separation, [sampler.participations(steps) for steps in (1, 2, 3, 5, 6)]
    (2, [1, 1, 2, 2, 3])
    """

    num_units: int
    """N."""
    batch_size: int
    """B, the number of units in every step."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not 1 <= self.batch_size <= self.num_units:
            raise ValueError(
                f"a fixed order of {self.num_units} units has no batches of expected_batch_size={self.batch_size}: "
                f"take a batch of at least 1 and at most {self.num_units} units"
            )

    @property
    def separation(self) -> int:
        """The least number of steps between two steps of one unit, ⌊N/B⌋."""
        return self.num_units // self.batch_size

    def participations(self, num_steps: int) -> int:
        """Return the largest number of steps that one unit enters, of the first ``num_steps`` of a start."""
        return -(-num_steps * self.batch_size // self.num_units)

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in rising order, without end.

        Args:
            rng: `dpllm.mechanism.sampling.secret_rng`.
        """
        order, first = rng.permutation(self.num_units), 0
        while True:
            yield np.sort(order[(first + np.arange(self.batch_size)) % self.num_units]).astype(np.int64)
            first = (first + self.batch_size) % self.num_units

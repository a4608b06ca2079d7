"""The choice of a step's units: truncated Poisson sampling, or a fixed order.

The sampler is built from the plan and draws once per step from all units. Under Poisson sampling each unit enters a
step independently with probability q; if more than `max_batch_size` enter, a uniform subset of that size is kept
(arXiv:2508.15089 has the accounting of the truncation). Which units were drawn, and how many, is secret. In a fixed
order every pass visits each unit once.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ENTROPY_BYTES = 32


@dataclass(frozen=True)
class TruncatedPoissonSampler:
    """Draws the units of a step.

    The fields are public; the draws and their generator are secret.

    Raises:
        ValueError: a field is out of range.

    >>> sampler = TruncatedPoissonSampler(num_units=1000, sampling_rate=0.01, max_batch_size=33)
    >>> len(sampler.draw(secret_rng())) <= 33
    True
    """

    num_units: int
    """N, the number of all units."""
    sampling_rate: float
    """q, the probability that a unit enters a step."""
    max_batch_size: int
    """B_max, the largest number of units in a step."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.num_units < 1:
            raise ValueError(f"num_units must be at least 1, got {self.num_units}")
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate}")
        if self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {self.max_batch_size}")

    def draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the units of one step, in ascending order; there may be none, and the step is still taken.

        A uniform subset of a uniform subset is a uniform subset, so one draw of min(Binomial(N, q), B_max) units
        without replacement is the truncated Poisson sample. Costs O(qN) time and memory.

        Args:
            rng: `secret_rng()`, the same on every rank that must see the same units.
        """
        size = min(int(rng.binomial(self.num_units, self.sampling_rate)), self.max_batch_size)
        return np.sort(rng.choice(self.num_units, size=size, replace=False, shuffle=False)).astype(np.int64)

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, drawn independently of the other steps, without end."""
        while True:
            yield self.draw(rng)


@dataclass(frozen=True)
class FixedOrderSampler:
    """Puts the units in one random order, and takes B of them in each step, pass after pass.

    For runs whose units cannot be sampled at random in each step. This choice adds no privacy: the accounting of
    `dpllm.mechanism.blt` would hold if everybody knew the order. It needs two facts: the minimal distance between two
    steps of one unit, and the maximal number of steps that a unit enters.

    The passes follow each other without a gap: pass m has unit i of the order at position i + mN, and step t takes the
    positions from tB up to (t + 1)B. So every step has exactly B units.

    Guarantee: two steps that one unit enters are at least ⌊N/B⌋ apart, because ⌊(x + N)/B⌋ >= ⌊x/B⌋ + ⌊N/B⌋ for every
    position x. In the first n steps, which have nB positions, a unit enters at most ⌈nB/N⌉.

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
                f"a fixed order of {self.num_units} units has no batches of expected_batch_size={self.batch_size}. Use "
                f"a batch of 1 to {self.num_units} units"
            )

    @property
    def separation(self) -> int:
        """The minimal number of steps between two steps of one unit, ⌊N/B⌋."""
        return self.num_units // self.batch_size

    def participations(self, num_steps: int) -> int:
        """Return the maximal number of steps that one unit enters in the first ``num_steps`` of a start."""
        return -(-num_steps * self.batch_size // self.num_units)

    def steps(self, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield the units of each step, in ascending order, without end.

        Args:
            rng: `secret_rng()`.
        """
        order, first = rng.permutation(self.num_units), 0
        while True:
            yield np.sort(order[(first + np.arange(self.batch_size)) % self.num_units]).astype(np.int64)
            first = (first + self.batch_size) % self.num_units


def secret_rng() -> np.random.Generator:
    """Return a generator seeded from 256 bits of the operating system's entropy, which are not stored."""
    return seeded_rng(int.from_bytes(secrets.token_bytes(_ENTROPY_BYTES), "little"))


def seeded_rng(seed: int) -> np.random.Generator:
    """Return a generator that always gives the same draws. Only for tests, since the seed reveals the sample."""
    # The default pool of a SeedSequence holds 128 bits; eight words hold all 256.
    return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(seed, pool_size=8)))


def default_max_batch_size(expected_batch_size: int, num_units: int | None = None) -> int:
    """Return ceil(b + 7 sqrt(b)), and at most the number of units.

    Seven standard deviations of the Poisson batch size: truncation is then so rare that it hardly changes ε.

    >>> default_max_batch_size(1024)
    1248
    """
    size = math.ceil(expected_batch_size + 7 * math.sqrt(expected_batch_size))
    return size if num_units is None else min(size, num_units)

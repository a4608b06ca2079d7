"""How each step's noise reaches the released weights: the linear map for which correlated noise is designed.

Training makes a workload of plain numbers from optimizer, schedule and averaging; the planner uses it to choose the
noise strategy (`dpllm.mechanism.strategies`). It cannot change ε: any strategy whose columns have norm at most 1 has
the same guarantee.

An optimizer with momentum adds to the weights θ in step t

    θ_t+1 = θ_t - r_t m_t,    m_t = β m_t-1 + (1 - β) g_t    (divided by 1 - β^(t+1) with bias correction),

with the learning rate r_t and the noisy gradient g_t. The released weights are the last θ, or an average Σ_t a_t θ_t+1.
Both are linear in the noise of the steps. The response w_t is the factor of the noise of step t in the released
weights. An optimizer that divides by a second moment scales the noise further; this factor is assumed to be equal in
all steps. Curvature of the loss and weight decay, which reduce early noise, are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Workload:
    """The response of the released weights, or the prefix sums of the noise.

    Raises:
        ValueError: there is no step, a number is not finite, or all are 0.
    """

    response: tuple[float, ...]
    """(T,) w: the factor of each step's noise in the released weights, in units of the largest learning rate."""
    over_time: bool = False
    """Whether all T prefix sums count, by their mean square, instead of the last sum; w is then 1 in every step."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.response or not all(math.isfinite(value) for value in self.response) or not any(self.response):
            raise ValueError("a workload needs the response of at least one step: finite numbers, not all 0")
        if self.over_time and set(self.response) != {1.0}:
            raise ValueError("over_time needs a response of 1 in every step: use Workload.prefix_sums")

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.response)

    @classmethod
    def prefix_sums(cls, num_steps: int) -> Workload:
        """Return the workload of a run of which only the number of steps is known: sums of equal steps."""
        return cls((1.0,) * num_steps, over_time=True)

    @classmethod
    def released(
        cls,
        rates: Sequence[float],
        momentum: float = 0.0,
        *,
        bias_correction: bool = False,
        averaging: Sequence[float] | None = None,
    ) -> Workload:
        """Return the workload of released weights.

        If the response is 0 in every step (no step has a learning rate), the prefix sums are returned.

        Args:
            rates: (T,) r, the learning rate of each step; only their ratios count.
            momentum: β of the first moment, 0 <= β < 1.
            bias_correction: whether the first moment is divided by 1 - β^(t+1), as Adam does.
            averaging: (T,) a, the share of the weights after each step in the average; None: the last weights are
                released.

        Raises:
            ValueError: there is no step, a number is out of range, or the shares have a different number of steps.

        >>> Workload.released([2, 2, 1]).response
        (1.0, 1.0, 0.5)
        >>> [round(value, 3) for value in Workload.released([1, 1, 1], momentum=0.5).response]
        [0.875, 0.75, 0.5]
        """
        rate = np.asarray(rates, dtype=np.float64)
        if rate.ndim != 1 or rate.size < 1 or not np.isfinite(rate).all() or (rate < 0).any():
            raise ValueError("rates must be finite and at least 0, with one for each step, and must not be empty")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")
        share = np.zeros(rate.size)
        share[-1] = 1.0
        if averaging is not None:
            share = np.asarray(averaging, dtype=np.float64)
            if share.shape != rate.shape or not np.isfinite(share).all() or (share < 0).any():
                raise ValueError(f"averaging needs a finite share of at least 0 for each of the {rate.size} steps")
        largest = rate.max()
        if largest == 0 or not share.any():
            return cls.prefix_sums(rate.size)
        # An update of step t is in all later weights. Its noise enters through the first moments of all later steps.
        update = rate / largest * np.cumsum(share[::-1])[::-1]
        if bias_correction:
            update /= 1 - momentum ** np.arange(1, rate.size + 1)
        response, later = np.empty(rate.size), 0.0
        for step in range(rate.size - 1, -1, -1):
            later = (1 - momentum) * float(update[step]) + momentum * later
            response[step] = later
        return cls(tuple(response.tolist())) if response.any() else cls.prefix_sums(rate.size)

    def error(self, column: Sequence[float]) -> float:
        """Return the standard deviation of the noise in the released weights, divided by σC and the learning rate.

        This is ‖wᵀ M⁻¹‖ for a lower triangular Toeplitz matrix M; for prefix sums, the root of their mean square.

        Args:
            column: the first column of M, from its diagonal downwards; all other entries are 0.

        >>> round(Workload.prefix_sums(410).error([1.0]), 3)
        14.335
        """
        from scipy import signal  # takes as long to load as the command line's whole help

        filtered = signal.lfilter([1.0], np.asarray(column, dtype=np.float64)[: self.num_steps], self.reversed)
        return math.sqrt(float(self.weights @ filtered**2))

    @property
    def reversed(self) -> NDArray[np.float64]:
        """(T,) the response, last step first: ‖wᵀ M⁻¹‖ is the norm of this sequence filtered by M⁻¹."""
        return np.asarray(self.response[::-1], dtype=np.float64)

    @property
    def weights(self) -> NDArray[np.float64]:
        """(T,) the weight of each square in the sum: 1, or the share of prefix sums that have the entry."""
        steps = np.arange(self.num_steps)
        return 1 - steps / self.num_steps if self.over_time else np.ones(self.num_steps)

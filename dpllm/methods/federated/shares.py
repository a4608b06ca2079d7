"""The update of one client as whole numbers with its share of the noise, and the sum of several as an update.

Place in the flow: at the client, between its training and secure aggregation; at the server, behind it. The mathematics
is in `dpllm.methods.federated.distributed`.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.chacha20 import KEY_BYTES
from dpllm.mechanism.discrete_gaussian import DiscreteGaussians
from dpllm.methods.federated.distributed import SHARE_BITS, DistributedStep
from dpllm.privacy.plan import PrivacyPlan

_MOST_ROUNDED = 0.5
"""The largest share of C that may be given up for the rounding of an update."""


@dataclass(frozen=True)
class Shares:
    """The numbers of the rounds of a plan with distributed noise.

    Raises:
        ValueError: the plan has other noise, or none.
    """

    clip_norm: float
    """C."""
    step: float
    """γ, the step of the grid."""

    @classmethod
    def of(cls, plan: PrivacyPlan) -> Self:
        """Return the numbers of a plan."""
        event = plan.event
        if not isinstance(event, DistributedStep) or plan.noise_multiplier == 0:
            raise ValueError(
                "secure aggregation needs the noise of each client, and the plan has none: set "
                "privacy.noise=distributed, and an epsilon or a noise_multiplier above 0"
            )
        return cls(plan.clip_norm, plan.noise_stddev / (2**SHARE_BITS * math.sqrt(event.min_batch_size)))

    def require_entries(self, num_entries: int) -> None:
        """Refuse a model that is too large for the grid, before anything is charged.

        Args:
            num_entries: d, the trained entries of a round.

        Raises:
            ValueError: rounding would take more than half of C.
        """
        lost = self._rounding(num_entries)
        if lost > _MOST_ROUNDED * self.clip_norm:
            raise ValueError(
                f"rounding an update of {num_entries:,} entries for secure aggregation takes {lost:.3g} of the clip "
                f"norm {self.clip_norm:g}: train fewer parameters, for instance with LoRA, or add less noise with a "
                "larger cohort"
            )

    def rounded(self, update: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the update on the grid, with a norm of at most C; zero where an entry is not finite.

        Args:
            update: (d,).

        Raises:
            ValueError: it is too large for the grid, or its norm would exceed C.
        """
        self.require_entries(update.size)
        if not np.isfinite(update).all():
            return np.zeros(update.size, np.int64)
        size, allowed = float(np.linalg.norm(update)), self.clip_norm - self._rounding(update.size)
        factor = min(1.0, (1 - 1e-12) * allowed / size) if size > 0 else 1.0
        whole = np.rint(update * (factor / self.step)).astype(np.int64)
        if float(np.linalg.norm(whole.astype(np.float64))) * self.step > self.clip_norm:
            raise ValueError("a rounded update exceeds the clip norm, which its margin should prevent")
        return whole

    def with_noise(self, update: NDArray[np.float64]) -> NDArray[np.uint64]:
        """Return the rounded update with this client's share of the noise, modulo 2^64.

        The noise is drawn from 256 bits of the operating system, which are not stored.

        Args:
            update: (d,).
        """
        noise = DiscreteGaussians(secrets.token_bytes(KEY_BYTES), SHARE_BITS).draw(update.size)
        return (self.rounded(update) + noise).view(np.uint64)

    def read(self, total: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the update that a sum modulo 2^64 stands for.

        Args:
            total: (d,).
        """
        return total.view(np.int64).astype(np.float64) * self.step

    def _rounding(self, num_entries: int) -> float:
        """Return the most that rounding adds to a norm."""
        return 0.5 * self.step * math.sqrt(num_entries)

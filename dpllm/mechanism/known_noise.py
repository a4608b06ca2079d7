"""The public part of the noise in a run's private gradients: its variance in each step, and in averages.

An optimizer can subtract it (`dpllm.training.corrected_adamw`). Only public constants enter, so this is
post-processing, and ε does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpllm.mechanism.parts import Mechanism
from dpllm.mechanism.strategies import inverse


@dataclass(frozen=True)
class KnownNoise:
    """The noise in an entry of the private gradients: of step t, stddev · Σ_s response[t - s] z_s with z_s ~ N(0, 1).

    Steps are counted from a start or a resume: both begin with fresh noise.

    Attributes:
        response: (T,) how the noise drawn in one step enters the gradients of this step and the following ones.
        stddev: σC/b, in units of the gradient that reaches the optimizer; 0 without noise.
    """

    response: tuple[float, ...]
    stddev: float

    @classmethod
    def of(cls, mechanism: Mechanism, num_steps: int) -> KnownNoise:
        """Return the noise of a run's gradients, which are divided by the expected batch size.

        Args:
            mechanism: of the plan.
            num_steps: T of the plan.
        """
        response = inverse(mechanism.noise.column(num_steps), num_steps)
        return cls(tuple(response.tolist()), mechanism.noise_stddev / mechanism.draw.expected_batch_size)

    def variances(self) -> NDArray[np.float64]:
        """Return the (T,) variance in each step's gradient.

        >>> KnownNoise((1.0, -0.5, 0.0), 2.0).variances().tolist()
        [4.0, 5.0, 5.0]
        """
        return np.asarray(self.stddev**2 * np.cumsum(np.square(self.response)))

    def averaged(self, decay: float) -> KnownNoise:
        """Return the noise in m_t = decay · m_t-1 + (1 - decay) · g_t, which begins at 0.

        >>> KnownNoise((1.0, 0.0, 0.0), 1.0).averaged(0.5).response
        (0.5, 0.25, 0.125)
        """
        from scipy import signal  # takes as long to load as the command line's whole help

        response = signal.lfilter([1 - decay], [1.0, -decay], self.response)
        return KnownNoise(tuple(response.tolist()), self.stddev)

    def averaged_share(self, decay: float) -> float:
        """Return the ratio of the noise in `averaged` to that in the gradients: root mean squares over the steps.

        >>> round(KnownNoise((1.0,) + (0.0,) * 9999, 3.0).averaged_share(0.9), 3)  # nearly sqrt(0.1 / 1.9)
        0.229
        """
        both = (KnownNoise(one.response, 1.0).variances() for one in (self.averaged(decay), self))
        averaged, own = (float(np.mean(variances)) for variances in both)
        return float(np.sqrt(averaged / own))

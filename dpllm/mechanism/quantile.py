"""Clipping to a quantile of the norms: the threshold follows it by a noisy count that is part of each step's event.

Step t has a threshold Q_t, which is fixed before the step. A unit contributes two things to it:

* its gradient, clipped to Q_t and scaled by C / Q_t. Its norm is at most C, whatever Q_t is. Andrew et al. add noise of
  standard deviation σ_g Q_t to the sum of gradients clipped to Q_t; here sum and noise are divided by Q_t and
  multiplied by the constant C. So a learning rate keeps its meaning while Q_t changes, and the noise has the same
  standard deviation in each step;
* its share of a count: ½ if its norm is at most Q_t, otherwise -½, including non-finite gradients.

The sum of gradients gets noise of standard deviation σ_g C, and the count noise of σ_b. Divided by these deviations,
one unit's contribution to both is a vector of squared norm at most 1/σ_g² + 1/(2σ_b)², and σ_g is chosen so that this
is 1/σ². So a step is one Gaussian release with noise multiplier σ, sampled and composed as without the count. This
holds under zero-out. If a unit is replaced by a different one, the gradients change by at most 2C and the count by at
most 1, which is twice as much in both. It also holds for noise that is correlated over steps: the count is an
additional coordinate of the release, and its noise comes from the same stream with the same strategy. Q_t depends only
on earlier noisy counts, so it is a function of earlier releases.

The count is divided by the public expected batch size b, never by the number of units in the step, which is private.

Source: Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871, with σ_g and σ_b from their Theorem 1.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from dpllm.mechanism.clipping import NormBound
from dpllm.mechanism.limits import MAX_CLIP_NORM, MIN_CLIP_NORM
from dpllm.mechanism.parts import OneGroup

if TYPE_CHECKING:
    from torch import Tensor

_BATCHES_PER_NOISE = 20  # b / σ_b by default, as in the source's experiments


@dataclass(frozen=True)
class QuantileClipping(NormBound, OneGroup):
    """Clip each unit's gradient to a threshold that follows a quantile of the norms, and scale it to at most C.

    The object belongs to one step; `updated` returns the next step's object.

    Attributes:
        quantile: γ, the share of units that should stay below the threshold; above 0 and below 1.
        rate: η > 0. The threshold changes by the factor exp(-η (b̃ - γ)), where b̃ is the noisy share below it.
        start: Q, the threshold; in a recipe that of the first step. None: C.
        count_noise: σ_b, at least 0.001, the standard deviation of the noise on the count of units, in units. None:
            b/20.

    Raises:
        ValueError: a number is out of range.
    """

    kind: ClassVar[str] = "quantile"
    quantile: float = 0.5
    rate: float = 0.2
    start: float | None = None
    count_noise: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        super().__post_init__()
        if self.start is None:
            object.__setattr__(self, "start", self.clip_norm)
        for name, least, most in (
            ("quantile", 1e-6, 1 - 1e-6),
            ("rate", 1e-6, 10.0),
            ("start", MIN_CLIP_NORM, MAX_CLIP_NORM),
            ("count_noise", 1e-3, 1e12),
        ):
            value = getattr(self, name)
            if name == "count_noise" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be between {least:g} and {most:g}")

    @property
    def threshold(self) -> float:
        """Q, the norm to which gradients are clipped in this step."""
        assert self.start is not None, "set when it is made"
        return float(self.start)

    def factors(self, norm_GU: Tensor) -> Tensor:
        """Return c_u = C / max(||g_u||, Q): clipped to Q, and scaled by C / Q.

        Args:
            norm_GU: (G, U) l2 norms, rounded up, above 0 and finite.

        Returns:
            (G, U) factors in [0, C / Q].

        >>> import torch
        >>> QuantileClipping(1.0, start=4.0).factors(torch.tensor([2.0, 8.0]))
        tensor([0.2500, 0.1250])
        """
        return self.clip_norm / norm_GU.clamp_min(self.threshold)

    def statistic(self, norm_U: Tensor) -> Tensor:
        """Return each unit's share of the count: ½ if its norm is at most Q, otherwise (also if not finite) -½.

        Args:
            norm_U: (U,) l2 norms; may be non-finite.

        >>> import torch
        >>> QuantileClipping(1.0).statistic(torch.tensor([0.5, 1.5, float("nan")]))
        tensor([ 0.5000, -0.5000, -0.5000])
        """
        return (norm_U <= self.threshold).to(norm_U.dtype) - 0.5

    def statistic_noise(self, expected_batch_size: int) -> float:
        """Return σ_b."""
        return expected_batch_size / _BATCHES_PER_NOISE if self.count_noise is None else float(self.count_noise)

    def at(self, threshold: float) -> Self:
        """Return the clipping with a different threshold."""
        return dataclasses.replace(self, start=threshold)

    def updated(self, noisy_statistic: float, expected_batch_size: int) -> Self:
        """Return the clipping of the next step: Q ← Q exp(-η (b̃ - γ)) with b̃ = ½ + noisy_statistic / b.

        Args:
            noisy_statistic: the sum of the units' shares in this step, with its noise.
            expected_batch_size: b, a public constant.

        >>> QuantileClipping(1.0).updated(10.0, expected_batch_size=20).threshold == math.exp(-0.2 * 0.5)
        True
        """
        share = 0.5 + noisy_statistic / expected_batch_size
        logarithm = math.log(self.threshold) - self.rate * (share - self.quantile)
        return self.at(math.exp(min(max(logarithm, math.log(MIN_CLIP_NORM)), math.log(MAX_CLIP_NORM))))

    def words(self) -> str:
        """Return how a gradient is bounded, for the report."""
        deviation = "b/20" if self.count_noise is None else f"{self.count_noise:g}"
        return (
            f"is clipped to a threshold, {self.threshold:g} in the first step, which moves towards the "
            f"{self.quantile:g}-quantile of the norms after each step, using a count of the gradients below it with "
            f"Gaussian noise of standard deviation {deviation}; it is then scaled by C over the threshold, to a norm "
            f"of at most C = {self.clip_norm:g}"
        )

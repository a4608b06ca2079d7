"""Adapt the clipping threshold: its statistic in each step, its update, and its record in the ledger.

The statistic of a step is summed over units and processes, gets its noise from the same stream as the gradients, and
sets the threshold of the next step. Other clippings have no statistic; for them nothing happens here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpllm.engines.processes import DisagreementError, Processes, told_by_rank
from dpllm.ghost import UnitClipper
from dpllm.mechanism.parts import AdaptiveClipping, NoiseStream
from dpllm.privacy.plan import PrivacyPlan

STATISTIC = "the statistic of the clipping"
"""The name of the statistic in a noise stream, next to the names of parameters."""

_DIGITS = 6
"""Decimal digits of a noisy statistic. A count is a multiple of ½; the last bits of its float64 noise, which is not
exactly Gaussian, could reveal which one (Mironov 2012)."""


class StepStatistic:
    """The statistic of one step, and the new threshold from it.

    Guarantee: the threshold is the same for all units of the step. One process adds noise to the sum once, before it
    is used, and only the update uses it, divided by the plan's expected batch size.

    Args:
        clipper: attached to the model; its clipping is replaced when the step is complete.
        plan: the constants.
        noise: noise stream of this process; the step has begun.
    """

    def __init__(self, clipper: UnitClipper, plan: PrivacyPlan, noise: NoiseStream) -> None:
        """Begin without units."""
        self._clipper, self._plan, self._noise = clipper, plan, noise
        self._clipping = clipper.clipping if isinstance(clipper.clipping, AdaptiveClipping) else None
        self._sum: Tensor | None = None

    def add(self, norm_U: Tensor | None) -> None:
        """Add the units that end in a microbatch.

        Args:
            norm_U: (U,) their norms; None if none ends in it.
        """
        if self._clipping is not None and norm_U is not None:
            share = self._clipping.statistic(norm_U).double().clamp(-0.5, 0.5).sum()
            self._sum = share if self._sum is None else self._sum + share

    def finish(self, processes: Processes) -> None:
        """Add the noise, sum over the processes, and set the clipper's threshold; all processes call it together.

        Args:
            processes: all processes.

        Raises:
            DisagreementError: the processes clipped to different thresholds.
        """
        if self._clipping is None:
            return
        total = torch.tensor([float(self._sum) if self._sum is not None else 0.0], dtype=torch.float64)
        deviation = self._plan.mechanism.statistic_stddev
        self._noise.add_share_(STATISTIC, total, deviation, processes.rank, processes.size)
        everywhere = processes.gather_numbers([float(total), self._clipping.threshold])
        thresholds = [threshold for _, threshold in everywhere]
        if len(set(thresholds)) > 1:
            raise DisagreementError(
                f"The processes clip to different thresholds ({told_by_rank(thresholds)}), so a unit's gradient would "
                "depend on the process that computes it. Use the same machines and package versions on all of "
                "them, do not write to the clipper's threshold, and resume from a checkpoint"
            )
        noisy = round(sum(one for one, _ in everywhere), _DIGITS)
        self._clipper.clipping = self._clipping.updated(noisy, self._plan.expected_batch_size)


class Threshold:
    """The threshold of a run's next step. The ledger reads it; only the run's steps change it.

    Guarantee: after the first value, it takes only values that a step's noisy statistic set in its clipper. Whoever
    has this object can copy a clipper's threshold into it, so a ledger hands it over once
    (`dpllm.training.shared_ledger.SharedLedger.hand_over_threshold`).

    Args:
        value: the threshold of the first step of this start. None: the clipping does not adapt.
    """

    def __init__(self, value: float | None) -> None:
        """Store the first value."""
        self._value = value

    @property
    def value(self) -> float | None:
        """The threshold of the next step; None: the clipping does not adapt."""
        return self._value

    def give_to(self, clipper: UnitClipper, plan: PrivacyPlan) -> None:
        """Set the clipper's threshold to the one with which the step is charged; a resume continues with the last."""
        if isinstance(plan.mechanism.clipping, AdaptiveClipping) and self._value is not None:
            clipper.clipping = plan.mechanism.clipping.at(self._value)

    def follow(self, clipper: UnitClipper) -> None:
        """Copy the threshold that the step's noisy statistic set in the clipper (`StepStatistic.finish`)."""
        if isinstance(clipper.clipping, AdaptiveClipping):
            self._value = clipper.clipping.threshold

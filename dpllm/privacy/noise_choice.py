"""Choose a plan's noise among a mechanism's candidates: the least predicted noise in the released weights.

`make_plan` calls it before it calibrates σ. All candidates are compared at the plan's ε. The choice depends only on
public constants: N, B, T, ε, δ and the workload, never on the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpllm.mechanism.limits import MAX_TARGET_EPSILON
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Noise
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.calibration import least_noise

if TYPE_CHECKING:
    from dpllm.privacy.plan import PrivacyPlan

NEARLY_LEAST = 1.05
"""A candidate that stores less noise is chosen if its predicted noise is at most this many times the least."""
_STEPS_LOOKED_AT = 1000


def choose_noise(
    noise: Noise,
    draw: Draw,
    workload: Workload,
    *,
    target_epsilon: float | None,
    noise_multiplier: float | None,
    num_steps: int,
    delta: float,
    adjacency: str,
) -> Noise:
    """Return the noise of a plan, with all its parameters.

    Among several candidates, it is the first one whose predicted noise is within 5 % of the least; earlier candidates
    store fewer tensors.

    Args:
        noise: the noise that the recipe names.
        draw: the parameters of the draw, without truncation.
        workload: the map from the noise of the steps to the released weights.
        target_epsilon: the ε of the run.
        noise_multiplier: σ, if it is given.
        num_steps: T.
        delta: δ.
        adjacency: "zero-out" or "replace-one".

    Raises:
        ValueError: there are several candidates and σ is given, or none of them reaches the target.
    """
    candidates = noise.candidates(draw, workload)
    if len(candidates) == 1:
        return candidates[0]
    if noise_multiplier is not None or target_epsilon is None:
        raise ValueError(
            "noise.bands=auto compares bands at the same ε, but noise_multiplier fixes σ instead, and more bands would "
            "then raise ε. Set target_epsilon without noise_multiplier, or a number of bands"
        )
    errors = [
        predicted_noise(candidate, draw, workload, target_epsilon, num_steps, delta, adjacency)
        for candidate in candidates
    ]
    return candidates[nearly_least(errors)]


def nearly_least(errors: Sequence[float], times: float = NEARLY_LEAST) -> int:
    """Return the number of the first entry that is at most ``times`` the least.

    >>> nearly_least([8.13, 6.68, 5.10, 5.02])
    2
    """
    least = min(errors)
    return next(number for number, error in enumerate(errors) if error <= times * least)


def predicted_noise(
    noise: Noise, draw: Draw, workload: Workload, target_epsilon: float, num_steps: int, delta: float, adjacency: str
) -> float:
    """Return σ‖wᵀM⁻¹‖, the noise standard deviation of the released weights, with σ calibrated within 0.2 %.

    Its unit is (largest learning rate) · C / b. It is inf if no σ reaches the target.

    Args:
        noise: the noise, with all its parameters.
        draw: the parameters of the draw, without truncation.
        workload: the map from the noise of the steps to the released weights.
        target_epsilon: the ε of the run.
        num_steps: T.
        delta: δ.
        adjacency: "zero-out" or "replace-one".
    """
    sigma = _calibrated(noise, draw, target_epsilon, num_steps, delta, adjacency)
    return math.inf if math.isinf(sigma) else sigma * noise.error(workload)


def _calibrated(noise: Noise, draw: Draw, target: float, num_steps: int, delta: float, adjacency: str) -> float:
    """Return σ within 0.2 %; inf if none reaches the target."""
    return least_noise(
        target, delta, lambda sigma: [(noise.event(draw, sigma, 1.0), num_steps)], adjacency, exact=False
    )


@dataclass(frozen=True)
class Prediction:
    """The predicted noise of a plan's released weights, and the noise of its steps."""

    noise: float
    """Standard deviation of the noise of the released weights, in units of (largest learning rate) · C / b."""
    independent: float
    """The same with independent noise at the same ε and δ."""
    step_ratio: float
    """r: the root mean square of the noise of a step, over that of independent noise at the same ε and δ."""

    def words(self) -> str:
        """Return the row of `dpllm plan`.

        >>> Prediction(5.0234, 8.1294, 9.4).words()
        '5.02 learning rates · C/b, 0.62 of that of independent noise at the same ε (8.13)'
        """
        return (
            f"{self.noise:.3g} learning rates · C/b, {self.noise / self.independent:.2f} of that of independent noise "
            f"at the same ε ({self.independent:.3g})"
        )

    def step_words(self, divides: bool) -> str:
        """Return the row of `dpllm plan` about single steps.

        Args:
            divides: whether the optimizer divides by the size of the noisy gradients, as Adam does.

        >>> Prediction(5.0234, 8.1294, 9.4).step_words(divides=True)
        '9.4 times that of independent noise; Adam divides by it, so its learning rate can be 9.4 times as large'
        """
        times = f"{self.step_ratio:.2g} times"
        rate = f"; Adam divides by it, so its learning rate can be {times} as large" if divides else ""
        return f"{times} that of independent noise{rate}"


def prediction(plan: PrivacyPlan, workload: Workload) -> Prediction | None:
    """Predict the noise of the released weights; None if the noise is independent, or ε is infinite."""
    mechanism, target = plan.mechanism, plan.epsilon_under(plan.adjacency)
    if plan.selection is not None:  # its ε is not the ε of one run
        return None
    if not mechanism.noise.tensors_kept or not 0 < target <= MAX_TARGET_EPSILON:
        return None
    alone, sigma = IndependentNoise(), mechanism.gradient_noise_multiplier
    independent = _calibrated(alone, mechanism.draw, target, plan.num_steps, plan.delta, plan.adjacency)
    return Prediction(
        noise=sigma * mechanism.noise.error(workload),
        independent=independent * alone.error(workload),
        step_ratio=sigma * step_noise(mechanism.noise, plan.num_steps) / independent,
    )


def step_noise(noise: Noise, num_steps: int) -> float:
    """Return the root mean square over the steps of the step noise divided by σC; many steps are sampled."""
    steps = np.unique(np.linspace(0, num_steps - 1, num=min(num_steps, _STEPS_LOOKED_AT), dtype=np.int64))
    return math.sqrt(sum(noise.variance(int(step), num_steps) for step in steps) / len(steps))

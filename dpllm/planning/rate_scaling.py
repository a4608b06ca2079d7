"""Derive the learning rate of a shorter run with the plan's noise from the learning rate of the run.

`dpllm.planning.rehearsal` trains with fewer steps and multiplies its learning rates by `rate_factor`.

Derivation, for the expected loss of a quadratic model. Direction i has curvature h_i, and the start is Δ_i away from
the optimum in it. With learning rate η the released weights follow a constant gradient by ηA, where A is the sum of the
workload's response w (`dpllm.mechanism.strategies`), and they contain noise of standard deviation ηN, where N = ‖wᵀM⁻¹‖
in units of σC/b. Then

    2 E L(η) = Σ_i h_i Δ_i² exp(-2 η A h_i) + η² N² Σ_i h_i,

and at the best rate A Σ_i h_i² Δ_i² exp(-2 η A h_i) = η N² Σ_i h_i. Let u be the mean of η A h_i with the terms of the
left sum as weights: the progress in the directions that still have a gradient. The derivative of the logarithms gives

    (1 + 2u) d ln η = (1 - 2u) d ln A - 2 d ln N.

- u near 0: the weights hardly move, and nearly all of the loss remains. The best rate is proportional to A / N².
- u = ½: it is proportional to 1 / N, for any A.
- u large: the noise does not matter. It is proportional to 1 / A.

Adam divides each update by about S, the root mean square of the noise of a step: η / S replaces η. Correlated
noise of a short run has smaller steps, because noise of earlier cycles is not yet in them, so S does not cancel.

The factor here is the one for u = ½: the rate is proportional to S / N (1 / N without the division), and noise moves
the released weights of both runs equally far. Reason: in quadratic models with curvatures h_i ∝ i^-a for a from 0.5 to
2, whose runs leave 1 to 40 % of the loss, the exact best rate of 48 steps over that of 160 (AdamW, constant rate,
average) was 0.9 to 1.6 with 16 bands, on average 1.08, and 1.4 to 2.1 with independent noise, on average 1.6. S / N
gives 1.14 and 1.71; A S / N² gives 0.49 and 0.88, and 1 / N, without the size of a step, 1.43 with bands.

Assumptions: the noise of a step is larger than its signal; each direction has the same noise; the noise in the weights
is not affected by the curvature (in the exact ratios above it is); the optimum is the same for both runs; and the
warm-up and the average are the same shares of both.
"""

from __future__ import annotations

from dpllm.mechanism.parts import Noise
from dpllm.privacy.noise_choice import step_noise
from dpllm.training.workload import UpdateRule


def rate_factor(noise: Noise, run: UpdateRule, shorter: UpdateRule) -> float:
    """Return the learning rate of a shorter run over that of the run; see the module.

    Args:
        noise: noise of both runs, with all its numbers.
        run: the update rule of the run.
        shorter: the update rule of the shorter run, with the same optimizer.
    """
    return _moved_by_noise(noise, run) / _moved_by_noise(noise, shorter)


def _moved_by_noise(noise: Noise, rule: UpdateRule) -> float:
    """Return the standard deviation of the noise in the released weights, in learning rates."""
    size = step_noise(noise, len(rule.rates)) if rule.divides else 1.0
    return noise.error(rule.workload()) / size

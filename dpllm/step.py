"""One private step: the one place where clip, sum and noise meet.

This is DP-SGD's gradient (Abadi et al. 2016, arXiv:1607.00133) over a truncated Poisson batch, as a sum divided by a
public constant. What the optimizer then does with it is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost import GhostClipper
from dpllm.ledger import Ledger
from dpllm.microbatches import Microbatch
from dpllm.plan import PrivacyPlan


class Engine(Protocol):
    """What a step needs of the way a model is spread over processes."""

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the clipped sums of all processes, in float32, so that each owns the total or its shard of it."""
        ...

    def add_noise(self, parameters: Mapping[str, nn.Parameter], noise_stddev: float) -> None:
        """Add N(0, noise_stddev^2) exactly once to every entry of the total."""
        ...


@dataclass(frozen=True)
class StepDiagnostics:
    """What happened in a step. Depends on the data: none of it is covered by the guarantee if it is written out.

    Attributes:
        mean_loss: mean of the rows' losses; NaN for an empty step.
        num_units: units that took part.
        num_nonfinite: units whose gradient wasn't finite and which therefore contributed zero.
        num_clipped: units whose gradient was longer than the clip norm.
    """

    mean_loss: float
    num_units: int
    num_nonfinite: int
    num_clipped: int


def private_step(
    clipper: GhostClipper,
    batch: Iterable[Microbatch],
    loss_of: Callable[[Mapping], Tensor],
    plan: PrivacyPlan,
    engine: Engine,
    ledger: Ledger,
) -> StepDiagnostics:
    """Leave one private gradient in ``.grad`` of every trainable parameter, charged to the ledger.

    Guarantee: with ``batch`` drawn by ``plan.sampler``, what stands in ``.grad`` afterwards is the output of the
    mechanism whose event is ``plan.step``, also when the batch is empty. The ledger holds the step durably before
    this returns.

    Args:
        clipper: attached to the model, with the plan's clip norm.
        batch: the microbatches of this step's units.
        loss_of: a microbatch's inputs to one loss per row (B,).
        plan: the constants.
        engine: how sums and noise are spread over processes.
        ledger: where the step is charged.

    Raises:
        ValueError: the clipper's norm isn't the plan's, gradients stand in ``.grad`` already, or the plan's steps are
            used up.
    """
    _check(clipper, plan, ledger)
    losses: list[Tensor] = []
    num_units = num_nonfinite = num_clipped = 0
    for microbatch in batch:
        loss_B = loss_of(microbatch.inputs)
        result = clipper.backward(loss_B, microbatch.unit_index)
        losses.append(loss_B.detach()[microbatch.unit_index.to(loss_B.device) >= 0])
        num_units += microbatch.num_units
        num_nonfinite += result.num_nonfinite
        num_clipped += int((result.norms > plan.clip_norm).sum())
    engine.reduce(clipper.parameters)
    engine.add_noise(clipper.parameters, plan.noise_stddev)
    ledger.append_step(ledger.num_steps, plan.step)
    _scale(clipper.parameters, 1 / plan.expected_batch_size)
    loss = torch.cat(losses).float()
    return StepDiagnostics(float(loss.mean()) if loss.numel() else float("nan"), num_units, num_nonfinite, num_clipped)


def _check(clipper: GhostClipper, plan: PrivacyPlan, ledger: Ledger) -> None:
    if clipper.clipping.clip_norm != plan.clip_norm:
        raise ValueError(
            f"The clipper bounds each unit to {clipper.clipping.clip_norm}, the plan accounts for {plan.clip_norm}. "
            f"Build the clipper with "
            "plan.clip_norm."
        )
    if ledger.num_steps >= plan.num_steps:
        raise ValueError(
            f"All {plan.num_steps} steps of the plan are taken and charged; another one would exceed its epsilon. "
            f"Make a plan with more steps."
        )
    stale = [name for name, p in clipper.parameters.items() if p.grad is not None]
    if stale:
        raise ValueError(
            f"{stale[0]} has a gradient from before the step; it would be released with it. Call zero_grad() after "
            f"each update."
        )


def _scale(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    """Divide the noisy sum by a public constant, never by the realised batch; then the parameter's dtype."""
    for parameter in parameters.values():
        grad = parameter.grad
        assert grad is not None
        grad.mul_(factor)
        if grad.dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = grad.to(parameter.dtype)

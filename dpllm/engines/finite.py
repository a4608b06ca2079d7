"""Checks that refuse to train, save or release weights that are not finite.

`DPTrainer` checks the weights before training, at every save and at the end, and each step's count of units without a
finite gradient. A unit whose gradient is not finite contributes zero (`dpllm.mechanism.clipping`), so a model without
any finite gradient would be trained only on noise, and the loss would be logged as 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.processes import Processes


class NonfiniteError(ValueError):
    """Weights, or all gradients of a step, are NaN or infinite."""


def require_finite(model: nn.Module, processes: Processes, when: str) -> None:
    """Check that every parameter is finite; called by all processes together.

    Costs one pass over the weights that this process holds, and one read from each device.

    Args:
        model: any module, including a sharded one: each process checks its own shards.
        processes: all processes; if one finds a non-finite value, all raise.
        when: the beginning of the error message, such as "the model to train has".

    Raises:
        NonfiniteError: a parameter is not finite; the message names the first one.
    """
    found = _first_nonfinite(model)
    if not processes.any(found is not None):
        return
    name = next(name for name in processes.gather(found) if name is not None)
    raise NonfiniteError(
        f"{when} weights that are NaN or infinite ({name}). Such a model learns only noise and cannot be released. "
        "Check the starting weights and the learning rate, use bf16 or float32 instead of float16, or resume from an "
        "earlier checkpoint with a lower train.learning_rate"
    )


def _first_nonfinite(model: nn.Module) -> str | None:
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        values = _local(parameter)
        if values.is_floating_point() and values.numel() and values.device.type != "meta":
            # A sum is as wide as its terms, so a float16 model could overflow it; the extremes cannot.
            low, high = torch.aminmax(values.detach().reshape(-1))
            finite = torch.isfinite(low) & torch.isfinite(high)
            by_device.setdefault(values.device, []).append((name, finite))
    for entries in by_device.values():
        flags = torch.stack([finite for _, finite in entries]).tolist()
        for (name, _), finite in zip(entries, flags, strict=True):
            if not finite:
                return name
    return None


def _local(parameter: Any) -> Tensor:
    """Return the entries of a parameter that this process holds."""
    shard = getattr(parameter, "ds_tensor", None)  # DeepSpeed's ZeRO-3
    if shard is not None:
        return shard
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class NonfiniteSteps:
    """Ends a run in which no unit has a finite gradient.

    Args:
        expected: the expected number of units in a step.
    """

    def __init__(self, expected: int) -> None:
        """Start without units."""
        self._enough = max(2, expected // 2)
        self._in_a_row = 0

    def look(self, num_units: int, num_nonfinite: int, step: int) -> None:
        """Check one step's counts, over all processes.

        A single unit may itself be the cause. The run ends only after half a batch of such units in a row, in one or
        more steps.

        Args:
            num_units: the units in the step.
            num_nonfinite: those without a finite gradient.
            step: the step's index, for the message.

        Raises:
            NonfiniteError: no unit has had a finite gradient for that long.
        """
        if num_nonfinite < num_units:
            self._in_a_row = 0
            return
        self._in_a_row += num_units
        if self._in_a_row >= self._enough:
            raise NonfiniteError(
                f"All {self._in_a_row} units up to step {step} have a gradient that is NaN or infinite, so this run "
                "trains only on noise. Check the starting weights, compute_loss_func and the learning rate, use bf16 "
                "or float32 instead of float16, and start in a new train.output_dir. The steps stay charged"
            )

"""One process, the whole model: sums are kept in float32 until the last microbatch and then stand in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.engines.errors import EngineError
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.guard import UpdateGuard
from dpllm.processes import Processes

AddTo = Callable[[nn.Parameter, Tensor], None]
"""Adds this process's share of one parameter's noisy clipped sum to a tensor of the parameter's full shape."""


class SingleProcess:
    """The engine of one process.

    Args:
        optimizer: the optimizer of the run, whose first update is checked.
    """

    def __init__(self, optimizer: Any) -> None:
        """Attach the guard."""
        self.processes = Processes()
        self.unfinished = False
        self.guard = UpdateGuard(optimizer, self.processes, replicas=self.processes.size)
        self._totals: dict[nn.Parameter, Tensor] = {}

    def collect(self, parameters: Mapping[str, nn.Parameter], add_to: AddTo, *, last: bool, scale: float) -> None:
        """Add one microbatch's sums; after the last, the total times ``scale`` stands in ``.grad``.

        Raises:
            EngineError: autograd left a gradient of its own, which would be released unclipped.
        """
        refuse_foreign_gradients(parameters)
        for parameter in parameters.values():
            if parameter not in self._totals:
                dtype = accumulation_dtype(parameter.dtype)
                self._totals[parameter] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            add_to(parameter, self._totals[parameter])
        if last:
            self._reduce(list(self._totals.values()))
            for parameter, total in self._totals.items():
                self.guard.leave(set_gradient(parameter, total.mul_(scale)))
            self._totals = {}

    def _reduce(self, totals: list[Tensor]) -> None:
        """The sum of one process is the total."""

    def finish(self) -> None:
        """The optimizer is stepped by whoever called the private step."""


def refuse_foreign_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make sure that ``.grad`` is empty while sums are collected elsewhere.

    Raises:
        EngineError: a parameter has a gradient that the private step didn't make.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise EngineError(
                f"{name} received a gradient that is not clipped, during a private step. Something called backward() "
                "on its own, or a hook of the engine computed weight gradients: run nothing but private_step() between "
                "zero_grad() and optimizer.step()"
            )


def set_gradient(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Put the finished value into ``.grad``, rounded to the parameter's dtype: after the noise, as post-processing.

    Returns:
        What stands in ``.grad`` now.
    """
    parameter.grad_dtype = parameter.dtype
    parameter.grad = rounded = value.to(parameter.dtype)
    return rounded

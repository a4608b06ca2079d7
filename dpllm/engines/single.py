"""One process, the whole model: sums are kept in float32 until the last microbatch and then stand in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.engines.errors import EngineError
from dpllm.engines.guard import UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.kernels import accumulation_dtype

AddTo = Callable[[nn.Parameter, Tensor], None]
"""Adds this process's share of one parameter's noisy clipped sum to a tensor of the parameter's full shape."""


_BUCKET_BYTES = 64 * 2**20


class SingleProcess:
    """The engine of one process.

    Args:
        optimizer: the optimizer of the run, whose first update is checked.
    """

    def __init__(self, optimizer: Any) -> None:
        """Attach the guard."""
        self.processes = Processes()
        self.unfinished, self.lockstep = False, False
        self.guard = UpdateGuard(optimizer, self.processes, replicas=self.processes.size)
        self._totals: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """Take no other step until this one is finished."""
        self.unfinished = True

    def collect(self, parameters: Mapping[str, nn.Parameter], add_to: AddTo, *, last: bool, scale: float) -> None:
        """Add one microbatch's sums; after the last, the total times ``scale`` stands in ``.grad``.

        Where the parameters are of 16 bits, float32 sums of all of them exist only between the microbatches of a step:
        with the last, each bucket's sums become gradients before the next bucket's are formed.

        Raises:
            EngineError: autograd left a gradient of its own, which would be released unclipped.
        """
        refuse_foreign_gradients(parameters)
        if not last:
            for parameter in parameters.values():
                if parameter not in self._totals:
                    self._totals[parameter] = _zeros_like(parameter)
                add_to(parameter, self._totals[parameter])
            return
        for bucket in _buckets(parameters.values()):
            totals = []
            for parameter in bucket:
                total = self._totals.pop(parameter, None)
                totals.append(_zeros_like(parameter) if total is None else total)
                add_to(parameter, totals[-1])
            self._reduce(totals)
            for parameter in bucket:
                self.guard.leave(set_gradient(parameter, totals.pop(0).mul_(scale)))

    def _reduce(self, totals: list[Tensor]) -> None:
        """Add up over the processes what one bucket's sums are; the sum of one process is the total."""

    def finish(self) -> None:
        """The optimizer is stepped by whoever called the private step."""
        self.unfinished = False


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.shape, dtype=accumulation_dtype(parameter.dtype), device=parameter.device)


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters whose sums have one dtype and device, together no larger than a bucket unless one alone is."""
    buckets: dict[tuple, list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        dtype = accumulation_dtype(parameter.dtype)
        kind = buckets.setdefault((dtype, parameter.device), [[]])
        filled = sum(p.numel() for p in kind[-1])
        if kind[-1] and (filled + parameter.numel()) * dtype.itemsize > _BUCKET_BYTES:
            kind.append([])
        kind[-1].append(parameter)
    return [bucket for kind in buckets.values() for bucket in kind]


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

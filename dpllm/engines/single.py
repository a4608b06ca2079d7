"""One process with the whole model: sums stay in float32 until the last microbatch and are then put into ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpllm.engines.base import EarlyGradients
from dpllm.engines.errors import EngineError
from dpllm.engines.guard import UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum

AddTo = Callable[[nn.Parameter, Sum], None]
"""Adds this process's share of one parameter's noisy clipped sum to a sum of the parameter's full shape."""

ToTotal = Callable[[nn.Parameter, Tensor], None]
"""Adds noise to the part of one parameter's complete sum that this process owns."""


class SingleProcess:
    """The engine of one process.

    Args:
        optimizer: the optimizer of the run, whose first update is checked.
    """

    def __init__(self, optimizer: Any) -> None:
        """Attach the guard."""
        self.processes = Processes()
        self.unfinished, self.lockstep, self.forms_total = False, False, True
        self.guard = UpdateGuard(optimizer, self.processes, replicas=self.processes.size)
        self.early: EarlyGradients | None = EarlyGradients(self._gradient, self.guard)
        self._sums: dict[nn.Parameter, Sum] = {}

    def begin(self) -> None:
        """Begin a step; no other step is accepted until this one is finished."""
        self.guard.withdraw()
        self.unfinished = True

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Add one microbatch's sums; after the last, the total times ``scale`` is in ``.grad``.

        If the parameters have 16 bits, float32 sums of all of them exist only between the microbatches of a step: with
        the last microbatch, each sum becomes a gradient before the next one is formed. Some gradients of a single
        microbatch are already finished (`EarlyGradients`).

        Raises:
            EngineError: autograd wrote a gradient, which would be released unclipped; or a gradient was finished before
                this microbatch, which is not the only one.
        """
        refuse_foreign_gradients(parameters)
        if self.early is not None and (self._sums or not last):
            self.early.refuse()
        if not last:
            for parameter in parameters.values():
                if parameter not in self._sums:
                    self._sums[parameter] = self._begun(parameter)
                add_to(parameter, self._sums[parameter])
            return
        for parameter in parameters.values():
            self._finish(parameter, add_to, scale, to_total)

    def _begun(self, parameter: nn.Parameter) -> Sum:
        """Begin the sum of the entries that this process holds."""
        return Sum.of(parameter)

    def _finish(self, parameter: nn.Parameter, add_to: AddTo, scale: float, to_total: ToTotal | None) -> None:
        """Write the gradient of a sum to which no other process adds."""
        gradient = self.early.take(parameter) if self.early is not None else None
        self._leave(parameter, self._gradient(parameter, add_to, scale, to_total) if gradient is None else gradient)

    def _gradient(
        self, parameter: nn.Parameter, add_to: AddTo, scale: float, to_total: ToTotal | None = None
    ) -> Tensor:
        """Complete a sum to which no other process adds; from the second step on, its last addend makes the gradient.

        In the first step the guard compares the gradient with the sum, which must therefore exist.
        """
        total = self._sums.pop(parameter, None) or self._begun(parameter)
        if self.guard.done and to_total is None:
            total.finish_in(parameter.dtype, scale)
        add_to(parameter, total)
        if to_total is not None:
            to_total(parameter, total.filled())
        total.finish_in(parameter.dtype, scale)
        return total.finished()

    def _leave(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Write a finished gradient for the optimizer."""
        self.guard.leave(set_gradient(parameter, gradient))

    def finish(self) -> None:
        """End the step; the caller of the private step steps the optimizer."""
        self.unfinished = False


def refuse_foreign_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that ``.grad`` is empty while the private sums are collected.

    Raises:
        EngineError: a parameter has a gradient that the private step did not make.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise EngineError(
                f"{name} received a gradient that is not clipped, during a private step. Something called backward() "
                "directly, or an engine hook computed weight gradients. Run nothing but private_step() between "
                "zero_grad() and optimizer.step()"
            )


def set_gradient(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Put the finished value into ``.grad``, rounded to the parameter's dtype: after the noise, as post-processing.

    Returns:
        The new value of ``.grad``.
    """
    parameter.grad_dtype = parameter.dtype
    parameter.grad = rounded = value.to(parameter.dtype)
    return rounded

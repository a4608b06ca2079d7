"""The protocol of all engines, and the engine of one process, whose sums go into ``.grad`` after the last microbatch.

An engine distributes a model over processes, as far as a step needs it. `EarlyGradients` are finished within the
backward pass of a step's only microbatch. Some clipped sums are complete before the backward pass ends: those of
separately clipped groups, and those of a second pass. Kept until its end, they would take 4 bytes per entry. Instead,
each receives its noise as soon as it is complete, and becomes a gradient in its parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from dpllm.engines.guard import EngineError, UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum

AddTo = Callable[[nn.Parameter, Sum], None]
"""Adds this process's share of one parameter's noisy clipped sum to a sum of the parameter's full shape."""

ToTotal = Callable[[nn.Parameter, Tensor], None]
"""Adds noise to the part of one parameter's complete sum that this process owns."""

MakeGradient = Callable[[nn.Parameter, AddTo, float], Tensor]
"""Makes a parameter's gradient from the function that adds to its sum, and a public scale."""


class EarlyGradients:
    """Keeps finished gradients until the pass has succeeded.

    Guarantee: nothing reaches ``.grad`` before the engine collects the microbatch. If its pass fails, sums and their
    noise are dropped together; nobody has seen them, so the noise of the next attempt is drawn independently.

    Args:
        make: forms a sum with its noise, and makes the gradient.
        guard: is notified of dropped gradients.
    """

    def __init__(self, make: MakeGradient, guard: UpdateGuard) -> None:
        """Begin without a gradient."""
        self._make, self._guard = make, guard
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._begun = False  # a gradient that may have passed on its sum before it failed

    def finish(self, parameter: nn.Parameter, add_to: AddTo, scale: float) -> None:
        """Make the gradient of one parameter.

        Args:
            parameter: the parameter.
            add_to: adds noise and clipped sum, as in `Engine.collect` with the last microbatch.
            scale: a public constant.

        Raises:
            EngineError: the parameter already has one; a second one would be a second release.
        """
        if parameter in self._gradients:
            raise EngineError(
                f"A gradient of shape {tuple(parameter.shape)} was finished twice in one step. Resume from a "
                "checkpoint, and report this error"
            )
        self._begun = True
        self._gradients[parameter] = self._make(parameter, add_to, scale)

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, once; None if it was not finished."""
        self._begun = False
        return self._gradients.pop(parameter, None)

    def forget(self) -> None:
        """Drop all gradients, because the pass that made them failed."""
        if self._begun:
            self._begun = False
            self._gradients.clear()
            self._guard.withdraw()

    def refuse(self) -> None:
        """Check that no gradient is kept while a step with several microbatches is collected.

        Raises:
            EngineError: one is; it would be released next to sums of the same units.
        """
        if self._gradients:
            raise EngineError(
                "Gradients of a microbatch were finished before another microbatch of the same step arrived. Resume "
                "from a checkpoint, and report this error"
            )


class Engine(Protocol):
    """How a model is distributed over processes, as far as a step needs it.

    Attributes:
        processes: all processes of the run.
        guard: checks the gradient at the optimizer in the first step.
        unfinished: whether a step was begun and has not ended.
        lockstep: whether forward passes, or `collect` before the last microbatch, communicate, so that every process
            must run the same number of microbatches.
        forms_total: whether this engine itself sums over processes, and so can provide complete sums.
    """

    processes: Processes
    guard: UpdateGuard
    lockstep: bool
    forms_total: bool

    @property
    def early(self) -> EarlyGradients | None:
        """Finishes gradients of a step's only microbatch; None: sums of other processes are added first."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether a step was begun and has not ended, so that parts of its sum are still held."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Collect one microbatch's sums from every process.

        Args:
            parameters: the trainable parameters by name, in the same order on every process.
            add_to: adds this process's share of one parameter's sum to a sum of the parameter's full shape, in the
                accumulation dtype; called once per parameter. With the last microbatch it adds the noise first, so that
                the last addend may make the gradient.
            last: whether this is the last microbatch of the step. After it, each owner holds the exact total over
                microbatches and processes times ``scale``: no mean, no clipping, no rounding before the sum is
                complete.
            scale: a public constant.
            to_total: used if noise is added to complete sums: called with the part of a parameter's total that this
                process owns, after the total over microbatches and processes is complete and before ``scale``; it
                changes it in place. The parts of all processes cover each entry once, and all replicas get the result.
                None: the noise is in the sums. Only with the last microbatch, and only if ``forms_total``.
        """
        ...

    def finish(self) -> None:
        """Update the parameters if the engine does so itself; otherwise the caller calls ``optimizer.step()``."""
        ...


# ------------------------------------------------------------------------------ one process with the whole model


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

"""The protocol of all engines: how a model is spread over processes, as far as a step needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from dpllm.engines.early import EarlyGradients
from dpllm.engines.guard import UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum


class Engine(Protocol):
    """How a model is spread over processes, as far as a step needs it.

    Attributes:
        processes: all processes of the run.
        guard: checks the gradient at the optimizer in the first step.
        unfinished: whether a step was begun and has not ended.
        lockstep: whether forward passes, or `collect` before the last microbatch, communicate, so that every process
            has to run the same number of microbatches.
        forms_total: whether this engine itself adds up over processes, and so can hand out complete sums.
    """

    processes: Processes
    guard: UpdateGuard
    lockstep: bool
    forms_total: bool

    @property
    def early(self) -> EarlyGradients | None:
        """Where gradients of a step's only microbatch are finished; None: sums of other processes are added first."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether a step was begun and has not ended: parts of its sum are still held."""
        ...

    def begin(self) -> None:
        """Begin a step."""
        ...

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: Callable[[nn.Parameter, Sum], None],
        *,
        last: bool,
        scale: float,
        to_total: Callable[[nn.Parameter, Tensor], None] | None = None,
    ) -> None:
        """Take one microbatch's sums from every process.

        Args:
            parameters: the trainable parameters by name, in the same order on every process.
            add_to: adds this process's share of one parameter's sum to a sum of the parameter's full shape, in the
                accumulation dtype; called once per parameter. With the last microbatch it adds the noise before the
                rest, so that the last addend may make the gradient.
            last: whether this is the last microbatch of the step. After it, each owner holds the total over
                microbatches and processes times ``scale``, exactly added up: no mean, no clipping, no rounding before
                the sum is complete.
            scale: a public constant.
            to_total: where noise is added to complete sums: called with the part of a parameter's total that this
                process owns, after the total over microbatches and processes is complete and before ``scale``; it
                changes it in place. The parts of all processes cover each entry once, and all replicas get the result.
                None: the noise is in the sums. With the last microbatch only, and only if ``forms_total``.
        """
        ...

    def finish(self) -> None:
        """Update the parameters if the engine does that itself; otherwise the caller calls ``optimizer.step()``."""
        ...

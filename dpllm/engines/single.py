"""One process, the whole model: sums are kept in float32 until the last microbatch and then put into ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dpllm.engines.division import Division
from dpllm.engines.errors import EngineError
from dpllm.engines.guard import UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum
from dpllm.mechanism.noise import slice_of

AddTo = Callable[[nn.Parameter, Sum], None]
"""Adds this process's share of one parameter's noisy clipped sum to a sum of the parameter's full shape."""

ToTotal = Callable[[nn.Parameter, Tensor], None]
"""Adds noise to the part of one parameter's complete sum that this process owns."""

_BUCKET_BYTES = 64 * 2**20


class SingleProcess:
    """The engine of one process.

    Args:
        optimizer: the optimizer of the run, whose first update is checked.
    """

    def __init__(self, optimizer: Any) -> None:
        """Attach the guard."""
        self.processes = Processes()
        self.unfinished, self.lockstep, self.forms_total = False, False, True
        self.division = Division.of_rows(self.processes)
        self.guard = UpdateGuard(optimizer, self.processes, replicas=self.processes.size)
        self._sums: dict[nn.Parameter, Sum] = {}

    def begin(self) -> None:
        """Begin a step; no other step is accepted until this one is finished."""
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
        the last microbatch, each bucket's sums become gradients before the next bucket's sums are formed; with one
        process, each parameter's.

        Raises:
            EngineError: autograd left a gradient, which would be released unclipped.
        """
        refuse_foreign_gradients(parameters)
        if not last:
            for parameter in parameters.values():
                if parameter not in self._sums:
                    self._sums[parameter] = self._begun(parameter)
                add_to(parameter, self._sums[parameter])
            return
        if self.processes.size == 1 and to_total is None:
            for parameter in parameters.values():
                self._finish(parameter, add_to, scale)
            return
        for bucket in _buckets(parameters.values()):
            totals = []
            for parameter in bucket:
                total = self._sums.pop(parameter, None) or self._begun(parameter)
                add_to(parameter, total)
                totals.append(total.filled())
            self._reduce(totals)
            if to_total is not None:
                self._complete(bucket, totals, to_total)
            for parameter in bucket:
                self._leave(parameter, Sum.onto(totals.pop(0)), scale)

    def _begun(self, parameter: nn.Parameter) -> Sum:
        """Begin the sum of the entries that this process holds."""
        return Sum.of(parameter)

    def _finish(self, parameter: nn.Parameter, add_to: AddTo, scale: float) -> None:
        """Complete a sum to which no other process adds; from the second step on, its last addend makes the gradient.

        In the first step the guard compares the gradient with the sum, which therefore has to exist.
        """
        total = self._sums.pop(parameter, None) or self._begun(parameter)
        if self.guard.done:
            total.finish_in(parameter.dtype, scale)
        add_to(parameter, total)
        self._leave(parameter, total, scale)

    def _leave(self, parameter: nn.Parameter, total: Sum, scale: float) -> None:
        """Leave the finished total for the optimizer."""
        total.finish_in(parameter.dtype, scale)
        self.guard.leave(set_gradient(parameter, total.finished()))

    def _reduce(self, totals: list[Tensor]) -> None:
        """Add up one bucket's sums over the processes; with one process there is nothing to do."""

    def _complete(self, bucket: list[nn.Parameter], totals: list[Tensor], to_total: ToTotal) -> None:
        """Let one bucket's totals be changed, each entry by one process."""
        for parameter, total in zip(bucket, totals, strict=True):
            keep_slice_(total, self.processes.rank, self.processes.size, lambda own, p=parameter: to_total(p, own))  # type: ignore[misc]
        if self.processes.size > 1:
            self._reduce(totals)

    def finish(self) -> None:
        """End the step; the caller of the private step steps the optimizer."""
        self.unfinished = False


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters whose sums have one dtype and device; each group fits in a bucket or has one parameter."""
    buckets: dict[tuple, list[list[nn.Parameter]]] = {}
    filled: dict[tuple, int] = {}  # bytes in the last bucket of each kind
    for parameter in parameters:
        dtype = accumulation_dtype(parameter.dtype)
        kind, size = (dtype, parameter.device), parameter.numel() * dtype.itemsize
        if kind in buckets and filled[kind] + size <= _BUCKET_BYTES:
            buckets[kind][-1].append(parameter)
            filled[kind] += size
        else:
            buckets.setdefault(kind, []).append([parameter])
            filled[kind] = size
    return [bucket for kind in buckets.values() for bucket in kind]


def keep_slice_(total: Tensor, rank: int, size: int, change: Callable[[Tensor], None]) -> None:
    """Change one process's slice of a total in place, and set the others to zero.

    The sum of the results of all processes then has every entry as its process changed it, exactly: a sum with zeros is
    not rounded.

    Args:
        total: contiguous.
        rank: this process.
        size: processes that hold the total.
        change: called with the slice (`dpllm.mechanism.noise.slice_of`).
    """
    own = slice_of(total, rank, size)
    change(own)
    if size > 1:
        changed = own.clone()
        total.zero_()
        own.copy_(changed)


def refuse_foreign_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make sure that ``.grad`` is empty while the private sums are collected.

    Raises:
        EngineError: a parameter has a gradient that the private step did not make.
    """
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise EngineError(
                f"{name} received a gradient that is not clipped, during a private step. Something called backward() "
                "directly, or a hook of the engine computed weight gradients: run nothing but private_step() between "
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

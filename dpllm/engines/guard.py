"""A run-time guard: check that the gradient at the optimizer in the first step is the private sum.

A new release of another library may change an engine: hooks no longer fire, a default rescales, a mean replaces a sum.
Such a run trains as well as before, but its ε is wrong. The guard therefore reads the gradients that the innermost
optimizer is about to use (a public hook of ``torch.optim.Optimizer``) and compares them with the sums that the private
step passed on:

* their sum of all entries, which every correct way of adding and sharding preserves, must equal that of the clipped
  sums and the noise that the processes passed on, up to rounding;
* their norm must be within the range that U clipped units and the noise allow: within C·U of σC·sqrt(P);
* their norm must equal the norm that the engine wrote for the optimizer: nothing may have changed the gradients since.

If the engine does not form the total itself (DeepSpeed), the guard reads its gradients parameter by parameter and
compares them with `Projections`. The compared values are printed only if a check fails.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum


class EngineError(ValueError):
    """An engine, or an option of one, under which the guarantee would not hold."""


def no_totals(engine: str) -> EngineError:
    """Return the error of an engine that never has a complete sum, for noise that is added to complete sums."""
    return EngineError(
        f"privacy.randomness='discrete' adds noise to complete sums, but {engine} never has one: its library sums the "
        "processes' shares within its own update. Use a single process, DDP or FSDP2 (dpllm train --config fsdp2)"
    )


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which store it in their attribute ``optimizer``.

    A wrapper may be a `torch.optim.Optimizer` itself (accelerate's is) or not (DeepSpeed's are not).

    >>> innermost(None) is None
    True
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_unsteppable(optimizer: Any) -> None:
    """Check that an optimizer can step from dense gradients without a closure, before a step is charged.

    Args:
        optimizer: with or without wrappers.

    Raises:
        EngineError: it needs a closure (LBFGS), or sparse gradients.

    >>> refuse_unsteppable(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    """
    inner = innermost(optimizer)
    step = getattr(type(inner), "step", None)
    if not inspect.isfunction(step):
        return  # its first step will show it
    name, asked = type(inner).__name__, list(inspect.signature(step).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(one.default is one.empty and one.kind in kinds for one in asked):
        raise EngineError(
            f"step() of {name} needs the argument {asked[0].name}, such as a closure that recomputes the loss, but a "
            "private step has one noisy gradient per draw. Use an optimizer whose step() needs no argument"
        )
    if isinstance(inner, torch.optim.SparseAdam):
        raise EngineError(f"{name} takes only sparse gradients, but private gradients are dense. Use torch.optim.Adam")


# ------------------------------------------------------------------------------------------------------------ the guard


# Rounding of sums in float32, over microbatches and processes; gradients in bfloat16 have a wider tolerance.
_TOLERANCE = 1e-4
_BLOCK = 1 << 24  # entries that are converted to float64 at a time
_TAIL = 8.0  # P(| ||z|| - sqrt(P) | > 8) < 1e-13 for standard normal z
_SAME = 1e-6  # two ways of summing the squares of the same numbers in float64


class UpdateError(RuntimeError):
    """The gradient at the optimizer is not the private sum. Nothing of this run may be released."""


def _refusal(what: str, seen: float, expected: str) -> UpdateError:
    return UpdateError(
        f"The gradient that reaches the optimizer is not the private sum: its {what} is {seen:.6g}, expected "
        f"{expected}. Between private_step() and the optimizer something changed it, such as gradient clipping, a loss "
        "scaler, a missing engine hook or a second backward pass. Nothing from this run may be released; remove the "
        "cause, or use another engine (dpllm train --config)"
    )


class UpdateGuard:
    """Checks the first update of a run.

    Args:
        optimizer: the engine's optimizer; its wrappers are removed.
        processes: the run's processes.
        replicas: the number of processes that hold the same gradient entries (1: every entry has one owner).
        at_once: whether the optimizer makes the whole update in one call, so that it can be stopped before. Otherwise
            the engine calls `verify` right after the update.
    """

    def __init__(
        self,
        optimizer: Any,
        processes: Processes,
        replicas: int,
        at_once: bool = True,
    ) -> None:
        """Attach to the innermost optimizer."""
        self._processes, self._replicas, self._at_once = processes, replicas, at_once
        self._handed_in = self._expected = 0.0
        self._left: float | None = None
        self._seen = [0.0] * 3  # sum of entries, sum of squares, rounding of the coarsest dtype
        self._limits: tuple[float, float] | None = None
        self._scale = 1.0
        self.done = False
        self._handle = innermost(optimizer).register_step_pre_hook(self._before_update)

    @contextlib.contextmanager
    def handing_in(self, total: Sum) -> Iterator[None]:
        """Record the amount that the block adds to a sum for the engine."""
        if self.done:
            yield
            return
        before = _amount(total)
        yield
        self._handed_in += _amount(total) - before

    def withdraw(self) -> None:
        """Forget the recorded amounts: a step begins, or the engine dropped all of them.

        A step whose update was skipped has spent its noise, but no part of it is in the next one.
        """
        self._handed_in, self._left = 0.0, None

    def leave(self, grad: Tensor) -> None:
        """Record this process's part of a finished gradient that the engine writes for the optimizer."""
        if not self.done:
            self._left = (self._left or 0.0) + _amounts(grad)[1]

    def expect(self, num_units: float, num_entries: int, clip_norm: float, noise_stddev: float, scale: float) -> None:
        """Set the expected properties of a private update.

        Args:
            num_units: U, over all processes, in this step.
            num_entries: P, the model's trainable entries.
            clip_norm: C.
            noise_stddev: σC.
            scale: the factor by which the engine multiplies the noisy sum.
        """
        if self.done:
            return
        noise, signal = math.sqrt(num_entries), clip_norm * num_units
        lowest = noise_stddev * max(noise - _TAIL, 0.0) - signal
        highest = noise_stddev * (noise + _TAIL) + signal
        self._limits, self._scale = (lowest, highest), scale
        (self._expected,) = self._processes.sum([self._handed_in])

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self.done:  # the hook stays, since PyTorch is iterating over its hooks
            return
        if self._at_once:
            self._seen = [0.0] * 3
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._see(parameter.grad)
        if self._at_once:
            self.verify()

    def _see(self, grad: Any) -> None:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        total, square, eps = self._seen
        own_sum, own_square = _amounts(local)
        self._seen = [total + own_sum, square + own_square, max(eps, float(torch.finfo(local.dtype).eps))]

    def verify(self) -> None:
        """Compare the optimizer's gradients with the recorded sums; if they match, the guard disables itself.

        Raises:
            UpdateError: they differ; raised on every process, and again at every further attempt.
        """
        if self.done:
            return
        if self._limits is None:
            raise UpdateError(
                "The optimizer was stepped before private_step() passed it a gradient. Call private_step() first, "
                "then optimizer.step()."
            )
        seen_sum, seen_square, left = self._processes.sum([*self._seen[:2], self._left or 0.0])
        total = seen_sum / (self._scale * self._replicas)
        norm = math.sqrt(seen_square / self._replicas) / self._scale
        tolerance = max(_TOLERANCE, 2.5 * max(self._processes.gather(self._seen[2])))
        lowest, highest = self._limits
        margin = tolerance * (norm + highest)
        if not lowest - margin <= norm <= highest + margin:
            raise _refusal("norm", norm, f"between {max(lowest, 0.0):.6g} and {highest:.6g}")
        if not abs(total - self._expected) <= tolerance * max(norm, abs(lowest), 1e-30):
            raise _refusal("sum of all entries", total, f"{self._expected:.6g}")
        if self._left is not None and not abs(seen_square - left) <= _SAME * left:
            raise _refusal("norm", norm, f"{math.sqrt(left / self._replicas) / self._scale:.9g}")
        self.done = True

    def remove(self) -> None:
        """Remove the hook from the optimizer."""
        self._handle.remove()


def _amount(total: Sum) -> float:
    return 0.0 if total.is_empty else float(total.total.sum(dtype=torch.float64))


def _amounts(tensor: Tensor) -> tuple[float, float]:
    """Return the sum of all entries and the sum of their squares, added in float64.

    Converts one block of entries at a time: a head of 128 256 × 4096 would take 8 GB in the first step.
    """
    total, square = 0.0, 0.0
    for block in tensor.detach().flatten().split(_BLOCK):
        wide = block.double()
        total, square = total + float(wide.sum()), square + float(wide.square().sum())
    return total, square


class Projections:
    """Compares gradients that an engine summed internally with the recorded sums, parameter by parameter.

    Each gradient is projected on a vector of random signs, the same on every process. A projection is linear, so the
    projections of the recorded sums add up to that of the total. A deviation of norm d in any direction shows as a
    number of size d.
    """

    def __init__(self, processes: Processes) -> None:
        """Start with no recorded sums."""
        self._processes = processes
        self._handed_in: dict[int, float] = {}

    def hand_in(self, number: int, total: Tensor) -> None:
        """Add this process's share of the sum of one parameter, identified by its index."""
        self._handed_in[number] = self._handed_in.get(number, 0.0) + _project(number, total)

    def verify(self, wholes: Iterator[tuple[int, Tensor]]) -> float:
        """Compare the sums with the totals that the engine holds.

        Args:
            wholes: every parameter's index and whole total, the same on all processes, without any scaling.

        Returns:
            The sum of their squares.

        Raises:
            UpdateError: one differs by more than rounding.
        """
        names = sorted(self._handed_in)
        expected = dict(zip(names, self._processes.sum([self._handed_in[n] for n in names]), strict=True))
        square, found = 0.0, {}
        for number, whole in wholes:
            found[number] = _project(number, whole)
            square += _amounts(whole)[1]
        for number, value in expected.items():
            seen = found.get(number, 0.0)
            if not abs(seen - value) <= _TOLERANCE * max(math.sqrt(square), abs(value)):
                raise _refusal(f"projection of parameter {number}", seen, f"{value:.6g}")
        return square


def _project(number: int, tensor: Tensor) -> float:
    generator, total = torch.Generator(tensor.device).manual_seed(number), 0.0
    for block in tensor.detach().flatten().split(_BLOCK):
        signs = torch.randint(0, 2, block.shape, generator=generator, device=block.device, dtype=torch.int8)
        total += float(((2 * signs - 1) * block).sum(dtype=torch.float64))
    return total

"""A guard at run time: what reaches the optimizer in the first step is the private sum, and nothing else.

An engine may change under a release of somebody else's library: hooks that no longer fire, a rescaling by default, a
mean where a sum was. Such a run trains as well as ever and its ε is untrue. The guard therefore looks at the gradients
that the innermost optimizer is about to use (a public hook of ``torch.optim.Optimizer``) and compares them with what
the private step handed in:

* the sum of all entries, which every correct way of adding and sharding preserves, must be that of the sums and noise
  that the processes handed in, up to rounding;
* the norm must lie between those that U clipped units and the noise allow: within C·U of σC·sqrt(P).

Both are public-knowledge checks of the program; nothing of them is written out unless they fail.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpllm.processes import Processes

# Rounding of sums in float32, over microbatches and processes; gradients in bfloat16 are allowed their own.
_TOLERANCE = 1e-4
_TAIL = 8.0  # P(| ||z|| - sqrt(P) | > 8) < 1e-13 for standard normal z


class UpdateError(RuntimeError):
    """What reached the optimizer is not the private sum. Nothing of this run may be released."""


class UpdateGuard:
    """Checks the first update of a run.

    Args:
        optimizer: the optimizer as the engine knows it; wrappers are looked through.
        processes: the processes of the run.
        replicas: how many processes hold the same gradient entries (1: every entry has one owner).
        at_once: the optimizer makes the whole update in one call, so it can be stopped before it. Otherwise the
            engine calls `verify` right after the update.
    """

    def __init__(self, optimizer: Any, processes: Processes, replicas: int, at_once: bool = True) -> None:
        """Attach to the innermost optimizer."""
        self._processes, self._replicas, self._at_once = processes, replicas, at_once
        self._handed_in = 0.0
        self._seen_sum = self._seen_square = 0.0
        self._seen_eps = 0.0
        self._limits: tuple[float, float] | None = None
        self._scale = 1.0
        self._expected = 0.0
        self.done = False
        base = optimizer
        while not isinstance(base, Optimizer) or hasattr(base, "optimizer"):
            base = base.optimizer
        self._handle = base.register_step_pre_hook(self._before_update)

    @contextlib.contextmanager
    def handing_in(self, total: Tensor) -> Iterator[None]:
        """Note what the block adds to a sum that is handed to the engine."""
        if self.done:
            yield
            return
        before = float(total.sum(dtype=torch.float64))
        yield
        self._handed_in += float(total.sum(dtype=torch.float64)) - before

    def expect(self, num_units: float, num_entries: int, clip_norm: float, noise_stddev: float, scale: float) -> None:
        """Say what a private update looks like.

        Args:
            num_units: U, of all processes, in this step.
            num_entries: P, trainable entries of the model.
            clip_norm: C.
            noise_stddev: σC.
            scale: what the engine multiplies the noisy sum by.
        """
        if self.done:
            return
        noise, signal = math.sqrt(num_entries), clip_norm * num_units
        lowest = noise_stddev * max(noise - _TAIL, 0.0) - signal
        highest = noise_stddev * (noise + _TAIL) + signal
        self._limits, self._scale = (lowest, highest), scale
        (self._expected,) = self._processes.sum([self._handed_in])

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self.done:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._see(parameter.grad)
        if self._at_once:
            self.verify()

    def _see(self, grad: Tensor) -> None:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        wide = local.detach().double()
        self._seen_sum += float(wide.sum())
        self._seen_square += float(wide.square().sum())
        self._seen_eps = max(self._seen_eps, torch.finfo(local.dtype).eps)

    def verify(self) -> None:
        """Compare what the optimizer saw with what was handed in; afterwards the guard rests.

        Raises:
            UpdateError: they differ, on every process.
        """
        if self.done:
            return
        self.done = True
        self._handle.remove()
        seen_sum, seen_square = self._processes.sum([self._seen_sum, self._seen_square])
        factor = self._scale * self._replicas
        total, norm = seen_sum / factor, math.sqrt(seen_square / self._replicas) / self._scale
        (eps,) = [max(self._processes.gather(self._seen_eps))]
        tolerance = max(_TOLERANCE, 2.5 * eps)
        if self._limits is None:
            raise UpdateError(
                "The optimizer was stepped before private_step() had handed anything to it. Call private_step() first, "
                "and optimizer.step() after it."
            )
        lowest, highest = self._limits
        margin = tolerance * (norm + highest)
        if not lowest - margin <= norm <= highest + margin:
            raise UpdateError(self._message("norm", norm, f"between {max(lowest, 0.0):.6g} and {highest:.6g}"))
        if not abs(total - self._expected) <= tolerance * max(norm, abs(lowest), 1e-30):
            raise UpdateError(self._message("sum of all entries", total, f"{self._expected:.6g}"))

    @staticmethod
    def _message(what: str, seen: float, expected: str) -> str:
        return (
            f"What reaches the optimizer is not the private sum: its {what} is {seen:.6g}, expected {expected}. "
            "Something between private_step() and the optimizer added to it, rescaled it, or left it out (gradient "
            "clipping, a loss scaler, hooks of the engine that no longer fire, a second backward pass). Nothing of "
            "this run may be released; remove what does it, or use another engine (accelerate_configs/)"
        )

"""Memory that runs out, and Ctrl-C: layers that raise what PyTorch raises, on the way forward or backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Refuse = Callable[[str, int], bool]
"""The direction, "forward" or "backward", and the number of tokens that pass through: whether memory runs out."""


def _shortage() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.gate.let_through("backward", grad)
        return grad, None


class Gate(nn.Module):
    """Lets through what fits.

    Attributes:
        passed: direction and tokens of everything that was let through, in order.
    """

    def __init__(self, refuse: Refuse, error: Callable[[], Exception] = _shortage) -> None:
        super().__init__()
        self.refuse, self.error = refuse, error
        self.passed: list[tuple[str, int]] = []

    def let_through(self, direction: str, x: Tensor) -> None:
        tokens = x.shape[:-1].numel()
        if self.refuse(direction, tokens):
            raise self.error()
        self.passed.append((direction, tokens))

    def forward(self, x: Tensor) -> Tensor:
        self.let_through("forward", x)
        return _Backward.apply(x, self)


def more_than(limit: int, direction: str = "forward") -> Refuse:
    """Memory for so many tokens, in one direction."""
    return lambda where, tokens: where == direction and tokens > limit


class Interrupted(nn.Linear):
    """Ctrl-C comes while it runs, if it is pressed."""

    pressed = False

    def forward(self, h: Tensor) -> Tensor:
        if self.pressed:
            raise KeyboardInterrupt
        return super().forward(h)


class BreaksOff(TorchDispatchMode):
    """Raises at one operation of PyTorch within its block.

    Args:
        number: of the operation, from 1.
        error: what is raised.
        within: the name of a function; only operations count that it calls, directly or not. None: all.

    Attributes:
        at: the operation at which it was raised; None: the block had fewer.
    """

    def __init__(self, number: int, error: BaseException, within: str | None = None) -> None:
        super().__init__()
        self.at: str | None = None
        self._left, self._error, self._within = number, error, within

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._left -= self._counts()
        if not self._left and self.at is None:
            self.at = str(func)
            raise self._error
        return func(*args, **(kwargs or {}))

    def _counts(self) -> bool:
        frame = sys._getframe(2)
        while self._within is not None and frame is not None and frame.f_code.co_name != self._within:
            frame = frame.f_back
        return frame is not None

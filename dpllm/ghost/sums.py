"""A parameter's clipped sum while it is formed, and the factors of the gradients in it.

Place in the flow: between the contributions of one microbatch and the engine, which begins a sum, has microbatches and
noise added to it, and takes the gradient from it.

A large float32 sum takes longer to read and write than to add to, so nothing passes over it without need: a new sum
holds no zeros, and its first addend is written, or taken. The fused kernel, as the last addend, reads the sum with its
noise, and writes the gradient in the parameter's dtype (`Sum.finish_in`).

Shape suffixes: B rows, U units.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dpllm.ghost.kernels import accumulation_dtype


class Sum:
    """The sum of one parameter's weighted gradients and noise, in float32 (float64 for a float64 parameter).

    Args:
        shape: of the parameter.
        dtype: of the sum.
        device: where it is formed.

    Attributes:
        is_empty: whether nothing was added yet. The entries of `total` have no meaning then.
        gradient: the finished gradient, if an addend made it; nothing can be added afterwards.

    >>> total = Sum(torch.Size([2]), torch.float32, torch.device("cpu"))
    >>> total.add_(torch.ones(2))
    >>> total.add_(torch.ones(2))
    >>> total.finish_in(torch.bfloat16, scale=0.5)
    >>> total.finished()
    tensor([1., 1.], dtype=torch.bfloat16)
    """

    __slots__ = ("_dtype", "_finish", "_like", "_total", "gradient", "is_empty")

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Begin without an entry."""
        self._like = shape, dtype, device
        self._total: Tensor | None = None
        self._finish: tuple[torch.dtype, float] | None = None
        self.is_empty = True
        self.gradient: Tensor | None = None

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Sum:
        """Begin the sum of a parameter that this process holds as a whole."""
        return cls(parameter.shape, accumulation_dtype(parameter.dtype), parameter.device)

    @classmethod
    def onto(cls, total: Tensor) -> Sum:
        """Return a sum that adds to a tensor, in place."""
        one = cls(total.shape, total.dtype, total.device)
        one._total, one.is_empty = total, False
        return one

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        return self._like[1]

    @property
    def total(self) -> Tensor:
        """The tensor of the sum, to which an addend writes; an addend that is the first sets ``is_empty`` to False."""
        if self._total is None:
            shape, dtype, device = self._like
            self._total = torch.empty(shape, dtype=dtype, device=device)
        return self._total

    def filled(self) -> Tensor:
        """Return the sum, zeros if nothing was added: for addends that reach only some entries."""
        total = self.total
        if self.is_empty:
            total.zero_()
            self.is_empty = False
        return total

    def add_(self, value: Tensor, alpha: float = 1.0) -> None:
        """Add alpha times a tensor, which stays as it is."""
        if self.is_empty:
            torch.mul(value, alpha, out=self.total)
            self.is_empty = False
        else:
            self.total.add_(value, alpha=alpha)

    def take_(self, value: Tensor) -> None:
        """Add a tensor that nothing else uses: an empty sum takes it, if it can, without a copy.

        The sum then changes it in place. A tensor of autograd may be the gradient of several parameters: `add_`.
        """
        if self.is_empty and value.is_contiguous() and (value.shape, value.dtype, value.device) == self._like:
            self._total, self.is_empty = value, False
        else:
            self.add_(value)

    # ----------------------------------------------------------------- the gradient

    def finish_in(self, dtype: torch.dtype, scale: float) -> None:
        """Say what is made of the complete sum, so that the last addend can do it.

        Guarantee: sum and noise are multiplied together, in the dtype of the sum, and rounded to ``dtype`` afterwards.

        Args:
            dtype: of the gradient.
            scale: a public constant.
        """
        self._finish = dtype, scale

    @property
    def takes_last(self) -> bool:
        """Whether the next addend is the last one, and may make the gradient."""
        return self._finish is not None

    def begin_gradient(self) -> tuple[Tensor, float]:
        """Return where the last addend writes the gradient, and the scale. The caller sets ``gradient``."""
        assert self._finish is not None, "finish_in was called"
        dtype, scale = self._finish
        shape, own, device = self._like
        return self.total if dtype == own else torch.empty(shape, dtype=dtype, device=device), scale

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Let no addend within the block be the last one."""
        finish, self._finish = self._finish, None
        try:
            yield
        finally:
            self._finish = finish

    def finished(self) -> Tensor:
        """Return the gradient: the one that the last addend made, or one made in a single pass over the sum."""
        if self.gradient is None:
            total, (gradient, scale) = self.filled(), self.begin_gradient()
            self.gradient = torch.mul(total, scale, out=gradient)
        self._total = None
        return self.gradient


AddSum = Callable[[Sum], None]
"""Adds one parameter's clipped sum, as the last addend, to a sum that may hold noise already. Called once."""

Finish = Callable[[nn.Parameter, AddSum], None]
"""Makes the gradient of one parameter and keeps it, as soon as its clipped sum can be formed."""


class Weights:
    """The factor of each row's or each unit's gradient in the sum.

    A gradient with factor 0 contributes exactly zero, also if it is not finite.

    Args:
        factor: their factors.
    """

    def __init__(self, factor: Tensor) -> None:
        """Remember the factors."""
        self.factor = factor
        self._scaled: tuple[tuple, Tensor, Tensor] | None = None

    @functools.cached_property
    def _keep(self) -> Tensor | slice | None:
        """The rows or units that contribute; None: all."""
        (keep,) = torch.nonzero(self.factor, as_tuple=True)
        count = keep.numel()
        if count == self.factor.numel():
            return None
        return slice(count) if count == 0 or int(keep[-1]) == count - 1 else keep  # padding is at the end: no copy

    def kept(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values of rows or units, and their factors, so that factor 0 contributes 0: 0 * inf would be NaN.

        On the CPU they are selected. On a device, where a selection would make the host wait, they are zeroed.
        """
        if self.factor.device.type != "cpu":
            zero = self.factor == 0
            return *(value.masked_fill(zero.view(-1, *[1] * (value.ndim - 1)), 0) for value in values), self.factor
        if self._keep is None:
            return *values, self.factor
        return *(value[self._keep] for value in values), self.factor[self._keep]

    def scaled(self, x_BTD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of a layer's input that `kept` returns, times their factors, with all tokens (N, D).

        The last one is kept until `release`: layers that read one input follow each other.

        Args:
            x_BTD: the input.
            dtype: of the sum. In 16 bits the product would be rounded away from the gradient whose norm was bounded.
        """
        key = x_BTD.data_ptr(), x_BTD.shape, x_BTD.stride(), x_BTD.dtype, dtype
        if self._scaled is None or self._scaled[0] != key:
            kept, factor = self.kept(x_BTD)
            # Holding the input prevents reuse of its address.
            self._scaled = key, x_BTD, (kept.to(dtype) * factor.to(dtype)[:, None, None]).flatten(0, 1)
        return self._scaled[2]

    def release(self) -> None:
        """Release the scaled input."""
        self._scaled = None

"""A tap: the identity on a module's output, through which the output's gradient and the saved input reach the book.

The input is kept with ``save_for_backward``, so activation checkpointing frees and recomputes it like any other
activation. Between forward and backward, no more is held than in ordinary training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost.contributions import Use
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.norm_method import NormMethod

Receive = Callable[[Tensor, "list[Tensor]"], None]


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, receive: Receive, saved: tuple[Tensor, ...]) -> Tensor:
        ctx.receive = receive
        ctx.save_for_backward(*saved)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        try:
            saved = list(ctx.saved_tensors)  # once: activation checkpointing recomputes at every access
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NoRuleError(
                f"The model changed the input of a trainable module in place after the module had read it ({error}). "
                "Replace the operation by one that returns a new tensor (x = x + y), or freeze the module."
            ) from error
        ctx.receive(grad_output, saved)
        return grad_output, None, None


# `Function.apply` looks for transforms of torch.func, which takes as long as the rest of a tap; here there are none.
_apply = super(torch.autograd.Function, _Tap).apply


def tap(output: Tensor, receive: Receive, *saved: Tensor) -> Tensor:
    """Return ``output`` such that its backward calls ``receive(gradient, saved tensors)``.

    Args:
        output: the output of the module. If no earlier tensor requires a gradient, it is set to require one, so that
            the backward pass reaches this module and stops there.
        receive: called once per backward pass through this use, with the gradient of ``output``.
        saved: tensors kept for that call.
    """
    if torch._C._are_functorch_transforms_active():
        raise NoRuleError(
            "The model calls a module with trainable parameters within a transform of torch.func (vmap, grad, jvp), "
            "where gradients of rows cannot be seen. Call the module outside the transform, or freeze its parameters."
        )
    if not output.requires_grad:
        output.requires_grad_()
    return _apply(output, receive, tuple([t.detach() for t in saved]))  # in a tuple they are no inputs of the function


class Recorder(Protocol):
    """The interface of the book that a rule needs.

    Attributes:
        norm_method: how norms are computed.
    """

    norm_method: NormMethod

    def tap(self, output: Tensor, receive: Receive, *saved: Tensor) -> Tensor:
        """Do the same as `tap`; modules that ``receive`` runs for itself are not uses of their parameters."""
        ...

    def share(self, name: str, value: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        """Return a value that all rows share such that each row's gradient of it, (B, ...), reaches ``receive``.

        Args:
            name: of the parameter from which the value was computed.
            value: any tensor without a graph.
            receive: may be called several times.
        """
        ...

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input in the dtype that autocast gave it, one tensor for all layers that read it."""
        ...

    def by_rows(self, x: Tensor) -> Tensor:
        """View a tensor of a module with the rows of the batch as first dimension."""
        ...

    def record(self, parameter: nn.Parameter, use: Use) -> None:
        """Record the contribution of one use of a parameter to its gradient."""
        ...

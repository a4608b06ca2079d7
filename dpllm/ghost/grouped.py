"""The product of sorted tokens with the matrix of their expert: y_s = x_s W[e_s].

Shape suffixes: S tokens sorted by expert, E experts, D inputs, P outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED = 16  # bytes to which the rows of matrices must be aligned for PyTorch's grouped product


class _Grouped(torch.autograd.Function):
    """Saves only the stack, not the tokens, unless the stack is in the graph.

    The stack itself is saved, not a view of it: a view would keep the whole stack of a layer that ZeRO-3 has released.
    """

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, stack: Tensor, outputs_first: bool, ends_E: Tensor, ends: list[int]) -> Tensor:
        ctx.ends, ctx.outputs_first = ends, outputs_first
        ctx.save_for_backward(stack, ends_E, x_SD if stack.requires_grad else x_SD.new_empty(0))
        return _product(x_SD, stack.mT if outputs_first else stack, ends_E, ends)

    @staticmethod
    def backward(ctx: Any, grad_SP: Tensor) -> tuple[Tensor | None, ...]:
        stack, ends_E, x_SD = ctx.saved_tensors
        grad_x = grad_stack = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_SP, stack if ctx.outputs_first else stack.mT, ends_E, ctx.ends)
        if ctx.needs_input_grad[1]:
            grad_stack = torch.zeros_like(stack)
            for expert, here in _parts(ctx.ends):
                left, right = (grad_SP, x_SD) if ctx.outputs_first else (x_SD, grad_SP)
                grad_stack[expert] = left[here].mT @ right[here]
        return grad_x, grad_stack, None, None, None


def grouped_product(x_SD: Tensor, stack: Tensor, counts_E: Tensor, outputs_first: bool = False) -> Tensor:
    """Return (S, P): each token times the matrix of its expert.

    Args:
        x_SD: the tokens, sorted by expert; those behind the last counted one get zeros.
        stack: the matrices, (E, D, P).
        counts_E: int64, the tokens of each expert.
        outputs_first: whether the stack is (E, P, D) instead.
    """
    ends_E = counts_E.cumsum(0)
    ends = [] if _has_kernel(x_SD, stack) else ends_E.tolist()
    return _Grouped.apply(x_SD, stack, outputs_first, ends_E.int(), ends)


def _has_kernel(x_SD: Tensor, stack: Tensor) -> bool:
    """Whether PyTorch has a kernel for these matrices, forward and backward."""
    if not (x_SD.is_cuda and x_SD.dtype == torch.bfloat16 == stack.dtype and hasattr(F, "grouped_mm")):
        return False
    if any(width * x_SD.element_size() % _ALIGNED for width in stack.shape[1:]):
        return False
    return torch.cuda.get_device_capability(x_SD.device) >= (8, 0)


def _product(x_SD: Tensor, weight_EDP: Tensor, ends_E: Tensor, ends: list[int]) -> Tensor:
    if not ends:
        return F.grouped_mm(x_SD.contiguous(), weight_EDP, offs=ends_E)
    out_SP = x_SD.new_zeros(x_SD.shape[0], weight_EDP.shape[2])
    for expert, here in _parts(ends):
        torch.mm(x_SD[here], weight_EDP[expert], out=out_SP[here])
    return out_SP


def _parts(ends: list[int]) -> list[tuple[int, slice]]:
    """Return each expert that has tokens, and which.

    >>> _parts([2, 2, 5])
    [(0, slice(0, 2, None)), (2, slice(2, 5, None))]
    """
    starts = [0, *ends[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]

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
    """Saves only the matrices, not the tokens, unless the matrices are in the graph."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_EDP: Tensor, ends_E: Tensor, ends: list[int]) -> Tensor:
        ctx.ends = ends
        ctx.save_for_backward(weight_EDP, ends_E, x_SD if weight_EDP.requires_grad else x_SD.new_empty(0))
        return _product(x_SD, weight_EDP, ends_E, ends)

    @staticmethod
    def backward(ctx: Any, grad_SP: Tensor) -> tuple[Tensor | None, ...]:
        weight_EDP, ends_E, x_SD = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad_SP, weight_EDP.mT, ends_E, ctx.ends)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_EDP)
            for expert, here in _parts(ctx.ends):
                grad_weight[expert] = x_SD[here].mT @ grad_SP[here]
        return grad_x, grad_weight, None, None


def grouped_product(x_SD: Tensor, weight_EDP: Tensor, counts_E: Tensor) -> Tensor:
    """Return (S, P): each token times the matrix of its expert.

    Args:
        x_SD: the tokens, sorted by expert; those behind the last counted one get zeros.
        weight_EDP: the matrices.
        counts_E: int64, the tokens of each expert.
    """
    ends_E = counts_E.cumsum(0)
    ends = [] if _has_kernel(x_SD, weight_EDP) else ends_E.tolist()
    return _Grouped.apply(x_SD, weight_EDP, ends_E.int(), ends)


def _has_kernel(x_SD: Tensor, weight_EDP: Tensor) -> bool:
    """Whether PyTorch has a kernel for these matrices, forward and backward."""
    if not (x_SD.is_cuda and x_SD.dtype == torch.bfloat16 == weight_EDP.dtype and hasattr(F, "grouped_mm")):
        return False
    if any(width * x_SD.element_size() % _ALIGNED for width in weight_EDP.shape[1:]):
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

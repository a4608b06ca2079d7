"""The normalisation n(x) of a norm layer, and the per-row gradients of its weight and bias from the layer's input.

Place in the flow: `dpllm.ghost.norm` recognises a normalisation at the first call of a layer. At each output gradient
the statistics are computed again from the saved input, so the module need not run again.

A class name says little: many models have an RMSNorm of their own. `recognised` compares what the module computes with
the two formulas below. Both are functions of one row only, so a wrong result could make a gradient wrong, but never
affect another row or its bound.

Shape suffixes: B rows, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpllm.ghost.call import Call
from dpllm.ghost.kernels import sum_tokens, widen

# Sizes of the inputs on which a module is tried: with the smallest, eps decides.
_SIZES = tuple(10.0**power for power in range(-6, 2))


@dataclass(frozen=True)
class Normalisation:
    """Division by the root of the mean square over the last dimension.

    Attributes:
        kind: "rms": x / sqrt(mean(x^2) + eps). "layer": the same of x - mean(x).
        eps: above 0, so that padding of zeros has the value 0.
    """

    kind: Literal["rms", "layer"]
    eps: float

    def of(self, x: Tensor) -> Tensor:
        """Return n(x), in the accumulation dtype."""
        x = widen(x)
        if self.kind == "layer":
            return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()

    def grads(self, x: Tensor, grad: Tensor, with_bias: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return each row's gradients of weight and bias, (B, D) in the accumulation dtype.

        Args:
            x: the layer's input, rows first.
            grad: the output gradient, of the same shape.
            with_bias: whether to return the bias gradient as well.
        """
        grad = widen(grad)
        return sum_tokens(self.of(x).mul_(grad)), sum_tokens(grad) if with_bias else None


def recognised(call: Call, name: str, weight: Tensor) -> Normalisation | None:
    """Return the normalisation n of a module that computes y_0 + weight * n(x), or None if it is neither of the two.

    The module is run with inputs of several sizes. Its constant eps is searched among the numbers that it holds.

    Args:
        call: of the module, with one tensor.
        name: of the weight.
        weight: the parameter.
    """
    if len(call.tensors) != 1 or not call.tensors[0].is_floating_point() or not call.tensors[0].numel():
        return None
    (like,) = call.tensors
    if like.shape[-1] != weight.numel():
        return None
    numbers = [value for value in vars(call.module).values() if isinstance(value, float) and 0 < value < 1]
    standards = [torch.finfo(like.dtype).eps, torch.finfo(torch.float32).eps]  # where the module holds None
    candidates = [Normalisation(kind, eps) for eps in dict.fromkeys(numbers + standards) for kind in ("rms", "layer")]
    generator = torch.Generator().manual_seed(0)
    tokens = like.shape[:-1].numel()
    for start in range(0, len(_SIZES), tokens):
        size = torch.tensor(_SIZES[start : start + tokens])
        size = size.repeat(-(-tokens // len(size)))[:tokens].reshape(*like.shape[:-1], 1)
        # The mean is not 0, which tells the two kinds from each other.
        x = (size * (1 + torch.randn(like.shape[-1], generator=generator))).to(like)
        with torch.no_grad():
            at_zero, at_one = (call.again({name: w}, [x]) for w in (torch.zeros_like(weight), torch.ones_like(weight)))
        if at_one.shape != x.shape:
            return None
        candidates = [one for one in candidates if _equals(at_one - at_zero, one.of(x))]
    return candidates[0] if candidates else None


def _equals(actual: Tensor, expected: Tensor) -> bool:
    """Whether two results differ only by the rounding of the first, relative to the largest entry of each token.

    A module that computes in float32 inside of a float64 model is not recognised: its own rounding is kept.
    """
    kind = torch.finfo(actual.dtype)
    tolerance = 8 * kind.eps * expected.abs().amax(-1, keepdim=True) + kind.tiny
    return bool(((actual - expected).abs() <= tolerance).all())

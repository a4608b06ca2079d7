"""Layers that scale their features: LayerNorm, RMSNorm of any name, DoRA's magnitude, layer scale.

The output of such a layer, of any class, is affine in a weight w of the size of the features, one entry at a time:
y = f_0(x) + w * n(x). Row b's gradient of w is then sum_t g_t * n(x_t), with n(x) = y|_{w=1} - y|_{w=0}. The first
batch checks, with a random weight, that the layer has this form. The functions of a layer that does not are served
one by one (`dpllm.ghost.functional`). Where n is one of the usual normalisations, it is computed from the input
(`dpllm.ghost.normalisation`); otherwise the module runs again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpllm.ghost.call import Call, tensors_of
from dpllm.ghost.contributions import RowGradients
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.kernels import sum_tokens, widen
from dpllm.ghost.normalisation import Normalisation
from dpllm.ghost.tap import Recorder


class LayerNormRule:
    """Taps ``nn.LayerNorm``: weight and bias, either or both trainable."""

    def __init__(self, path: str, module: nn.LayerNorm, trainable: dict[str, nn.Parameter], book: Recorder) -> None:
        """Remember which of weight and bias are trainable."""
        unknown = trainable.keys() - {"weight", "bias"}
        if unknown:
            raise NoRuleError(
                f"{path} ({type(module).__name__}) has parameters beside weight and bias: {sorted(unknown)}."
            )
        self.weight, self.bias, self.book = trainable.get("weight"), trainable.get("bias"), book
        self.shape, self.eps = module.normalized_shape, module.eps

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output; keep the input only where the weight needs it."""
        del module, rows
        x = args[0] if args else kwargs["input"]
        return (
            self.book.tap(output, self.receive, x) if self.weight is not None else self.book.tap(output, self.receive)
        )

    def receive(self, grad: Tensor, saved: list[Tensor]) -> None:
        """Record per-row gradients of weight and bias."""
        keep = len(self.shape)
        grad = self.book.by_rows(grad)
        weight_B = bias_B = None
        if self.weight is not None and keep == 1 and self.eps > 0:
            x = self.book.by_rows(saved[0])
            layer = Normalisation("layer", self.eps)
            weight_B, bias_B = layer.grads(x, grad, self.bias is not None)
        elif self.weight is not None:
            normed = F.layer_norm(self.book.by_rows(saved[0]), self.shape, eps=self.eps)
            weight_B = sum_tokens(widen(grad) * widen(normed), keep)
        if self.bias is not None:
            self.book.record(self.bias, RowGradients(sum_tokens(grad, keep) if bias_B is None else bias_B))
        if self.weight is not None and weight_B is not None:
            self.book.record(self.weight, RowGradients(weight_B))


def offset_of(call: Call, name: str, weight: Tensor, output: Tensor) -> str | None:
    """Classify the part of the module's output beside w * n, an elementwise product over the last dimension.

    Returns:
        "zero" for y = w * n, "some" for y = y_0 + w * n, None for a module that has neither form, or whose output does
        not depend on the parameter in this place.
    """
    if not isinstance(output, Tensor) or weight.ndim != 1 or output.shape[-1] != weight.numel():
        return None
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        other = (0.5 + torch.rand(weight.shape, generator=generator)).to(weight)
        at_zero, at_one, at_other = (
            call.again({name: w}, call.tensors) for w in (torch.zeros_like(weight), torch.ones_like(weight), other)
        )
        expected = at_zero + other * (at_one - at_zero)
        actual = at_zero + weight * (at_one - at_zero)
        scale = 1 + max(float(t.abs().max()) for t in (at_zero, at_one, at_other))
        # Norms compute in float32 inside, also in a float64 model.
        tolerance = 16 * max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps) * scale
        if (at_other - expected).abs().max() > tolerance or (output - actual).abs().max() > tolerance:
            return None
        if not bool((at_one - at_zero).any()):
            return None
        return "some" if at_zero.any() else "zero"


class ScaleRule:
    """Taps a module whose only own trainable parameter scales its features."""

    def __init__(
        self, name: str, weight: nn.Parameter, offset: str, normalisation: Normalisation | None, book: Recorder
    ) -> None:
        """Remember the parameter, its name within the module, and the results of `offset_of` and `recognised`."""
        self.name, self.weight, self.offset, self.book = name, weight, offset, book
        self.normalisation = normalisation

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output and keep the module's inputs."""
        del rows
        if self.normalisation is not None:
            x, *more = tensors_of(args, kwargs)
            if not more and x.shape == output.shape:
                return self.book.tap(output, self._receive_from_input, x)
        call = Call(module, args, kwargs)
        tensors = call.forget_tensors()
        live = module.get_parameter(self.name)  # of a sharded model: whole only while the module runs
        shape, dtype, device = live.shape, live.dtype, live.device

        def receive(grad: Tensor, saved: list[Tensor]) -> None:
            with torch.no_grad():
                normed = call.again({self.name: torch.ones(shape, dtype=dtype, device=device)}, saved)
                if self.offset != "zero":
                    at_zero = torch.zeros(shape, dtype=dtype, device=device)
                    normed = normed - call.again({self.name: at_zero}, saved)
            per_row = sum_tokens(widen(self.book.by_rows(grad)) * widen(self.book.by_rows(normed)))
            self.book.record(self.weight, RowGradients(per_row))

        return self.book.tap(output, receive, *tensors)

    def _receive_from_input(self, grad: Tensor, saved: list[Tensor]) -> None:
        """Record the gradient of a normalisation that was recognised; the module does not run again."""
        assert self.normalisation is not None
        x, grad = self.book.by_rows(saved[0]), self.book.by_rows(grad)
        weight_B, _ = self.normalisation.grads(x, grad)
        self.book.record(self.weight, RowGradients(weight_B))

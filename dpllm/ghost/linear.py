"""Linear layers: ``nn.Linear`` (including LoRA factors) and the transposed ``Conv1D`` of GPT-2, with or without bias.

A module of another class that computes the same (Falcon's) is recognised by its output at its first call.

For y = W x + b, row b's gradients are sum_t g_t (x) x_t for W and sum_t g_t for b.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpllm.ghost.call import Call, tensors_of
from dpllm.ghost.contributions import Outer, RowGradients
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.kernels import sum_tokens
from dpllm.ghost.tap import Recorder


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' ``Conv1D``, whose weight is (inputs, outputs)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether the forward pass is that of ``nn.Linear`` or ``Conv1D``, also in a subclass that does not override it."""
    return is_transposed(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def as_tokens(x: Tensor) -> Tensor:
    """View (B, D) or (B, ..., D) as (B, T, D)."""
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def product_side(call: Call, weight: str, bias: str | None, output: Tensor) -> str | None:
    """Recognise a module of any class that multiplies its input by a matrix.

    Its output has to be f_0(x) + x W^T + b, or f_0(x) + x W + b, for random values of ``W`` and ``b`` in float64, on
    the first row.

    Returns:
        "right" for x W^T, "left" for x W (the side of the weight that the input is on), None for any other module.
    """
    if len(call.tensors) != 1 or not isinstance(output, Tensor) or not call.tensors[0].is_floating_point():
        return None
    x = call.tensors[0][:1].detach().double()
    shape = call.module.get_parameter(weight).shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(x.device)

    with torch.no_grad():
        matrix = draw(*shape)
        values, zeros = {weight: matrix}, {weight: torch.zeros_like(matrix)}
        if bias is not None:
            values[bias] = draw(*call.module.get_parameter(bias).shape)
            zeros[bias] = torch.zeros_like(values[bias])
        try:
            difference = call.again(values, [x.clone()]) - call.again(zeros, [x.clone()])
        except RuntimeError:  # of dtypes that do not mix, or of shapes
            return None
        for side, factor in (("right", matrix.mT), ("left", matrix)):
            if x.ndim < 2 or x.shape[-1] != factor.shape[0] or (bias and values[bias].shape != factor.shape[1:]):
                continue
            expected = x @ factor + (values[bias] if bias else 0)
            scale = 1 + (x.abs() @ factor.abs()).max()
            if difference.shape == expected.shape and (difference - expected).abs().max() <= 1e-12 * scale:
                return side
    return None


class LinearRule:
    """Taps one linear layer.

    Args:
        weight: the matrix, where it is trainable.
        bias: where it is trainable.
        input_side: of the weight; "right" for ``nn.Linear``, whose weight is (outputs, inputs).
        book: receives the recorded uses.
    """

    def __init__(self, weight: nn.Parameter | None, bias: nn.Parameter | None, input_side: str, book: Recorder) -> None:
        """Remember which of weight and bias are trainable."""
        self.weight, self.bias, self.input_side, self.book = weight, bias, input_side, book

    @classmethod
    def of(cls, path: str, module: nn.Module, trainable: dict[str, nn.Parameter], book: Recorder) -> LinearRule:
        """Return the rule of a module whose class is linear.

        Raises:
            GhostError: a trainable parameter beside weight and bias.
        """
        unknown = trainable.keys() - {"weight", "bias"}
        if unknown:
            raise NoRuleError(
                f"{path} ({type(module).__name__}) has parameters beside weight and bias: {sorted(unknown)}."
            )
        side = "left" if is_transposed(module) else "right"
        return cls(trainable.get("weight"), trainable.get("bias"), side, book)

    @classmethod
    def recognise(
        cls, module: nn.Module, trainable: dict[str, nn.Parameter], call: Call, output: Tensor, book: Recorder
    ) -> LinearRule | None:
        """Return the rule of a module of any other class if it computes a linear function, otherwise None."""
        matrices = [name for name, p in trainable.items() if p.ndim == 2]
        vectors = [name for name, p in trainable.items() if p.ndim == 1]
        if len(matrices) != 1 or len(vectors) > 1 or len(trainable) != len(matrices) + len(vectors):
            return None
        side = product_side(call, matrices[0], vectors[0] if vectors else None, output)
        if side is None:
            return None
        return cls(trainable[matrices[0]], trainable[vectors[0]] if vectors else None, side, book)

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output; keep the input only where the weight needs it."""
        del rows
        if self.weight is None:
            return self.book.tap(output, self.receive)
        x, *more = tensors_of(args, kwargs)
        if more:
            raise NoRuleError(
                f"{type(module).__name__} read one tensor at its first call, and reads {1 + len(more)} now, so it "
                "is not a linear layer. Freeze its parameters."
            )
        if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            x = self.book.cast(x, output.dtype)  # the values that the product read
        return self.book.tap(output, self.receive, x)

    def receive(self, grad: Tensor, saved: list[Tensor]) -> None:
        """Record the contributions of this use to the weight and to the bias."""
        book = self.book
        grad = book.by_rows(grad)
        if self.bias is not None:
            book.record(self.bias, RowGradients(sum_tokens(grad)))
        if self.weight is not None:
            x_BTD, grad_BTP = as_tokens(book.by_rows(saved[0])), as_tokens(grad)
            left, right = (x_BTD, grad_BTP) if self.input_side == "left" else (grad_BTP, x_BTD)
            book.record(self.weight, Outer(left, right, self.input_side))

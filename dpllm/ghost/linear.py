"""Linear layers: ``nn.Linear`` (LoRA factors are such) and the transposed ``Conv1D`` of GPT-2, with or without bias.

For y = W x + b, row b's gradients are sum_t g_t (x) x_t for W and sum_t g_t for b.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpllm.ghost.contributions import Outer, RowGradients
from dpllm.ghost.errors import GhostError
from dpllm.ghost.kernels import sum_tokens
from dpllm.ghost.tap import Recorder


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' ``Conv1D``, whose weight is (inputs, outputs)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Whether the forward pass is that of ``nn.Linear`` or ``Conv1D``, also in a subclass that doesn't override it."""
    return is_transposed(module) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def as_tokens(x: Tensor) -> Tensor:
    """View (B, D) or (B, ..., D) as (B, T, D)."""
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


class LinearRule:
    """Taps one linear layer."""

    def __init__(self, path: str, module: nn.Module, trainable: dict[str, nn.Parameter], book: Recorder) -> None:
        """Remember which of ``weight`` and ``bias`` are trainable; any other parameter is an error."""
        unknown = trainable.keys() - {"weight", "bias"}
        if unknown:
            raise GhostError(
                f"{path} ({type(module).__name__}) has parameters beside weight and bias: {sorted(unknown)}."
            )
        self.weight, self.bias = trainable.get("weight"), trainable.get("bias")
        self.input_is_left = is_transposed(module)
        self.book = book

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output; keep the input only where the weight needs it."""
        del module, rows
        if self.weight is None:
            return self.book.tap(output, self.receive)
        x = args[0] if args else kwargs["input"]
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(output.dtype)  # what the product really read
        return self.book.tap(output, self.receive, x)

    def receive(self, grad: Tensor, saved: list[Tensor]) -> None:
        """Record what this use adds to the weight and to the bias."""
        grad = self.book.by_rows(grad)
        if self.bias is not None:
            self.book.record(self.bias, RowGradients(sum_tokens(grad)))
        if self.weight is not None:
            x_BTD, grad_BTP = as_tokens(self.book.by_rows(saved[0])), as_tokens(grad)
            left, right = (x_BTD, grad_BTP) if self.input_is_left else (grad_BTP, x_BTD)
            self.book.record(self.weight, Outer(left, right, input_side="left" if self.input_is_left else "right"))

"""The rule for any other parameter: run the module again for each single row and differentiate. Slower, still exact.

Used for parameters that no rule covers (LoRA factors of an embedding, learned scales of unusual shape, convolutions).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpllm.ghost.call import Call
from dpllm.ghost.contributions import RowGradients
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.kernels import widen
from dpllm.ghost.tap import Recorder


class PerRowRule:
    """Taps a module and differentiates it row by row with respect to its own trainable parameters."""

    def __init__(self, path: str, module: nn.Module, trainable: dict[str, nn.Parameter], book: Recorder) -> None:
        """Remember the parameters by their names within the module."""
        self.path, self.kind, self.trainable, self.book = path, type(module).__name__, trainable, book

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor, rows: int | None) -> Tensor:
        """Tap the output and keep the module's inputs, and the output to check the repetition against."""
        if not isinstance(output, Tensor):
            raise NoRuleError(
                f"{self.path} ({self.kind}) holds the trainable parameters {sorted(self.trainable)} and returns "
                f"{type(output).__name__}; per-row gradients need a module that returns one tensor. Freeze these "
                "parameters, or move them into a separate module."
            )
        if rows is None or output.shape[0] != rows:
            raise NoRuleError(
                f"{self.path} ({self.kind}) returns {tuple(output.shape)}; its first dimension has to be the {rows} "
                "rows of the batch for exact per-row gradients. Freeze its parameters, or keep rows first."
            )
        call = Call(module, args, kwargs)
        tensors = call.forget_tensors()

        def receive(grad: Tensor, saved: list[Tensor]) -> None:
            *tensors, expected = saved
            self._receive(call, grad, tensors, expected)

        # The copy kept for the comparison must survive a model that adds to the output in place.
        return self.book.tap(output.clone(), receive, *tensors, output)

    def _receive(self, call: Call, grad_B: Tensor, saved: list[Tensor], expected_B: Tensor) -> None:
        rows = grad_B.shape[0]
        # A tensor whose first dimension is the batch is cut into rows; any other is shared by all rows. If a
        # shared one happens to have that size, the repeated output differs from the first one; this is checked.
        row_dims = [0 if t.ndim > 0 and t.shape[0] == rows else None for t in saved]
        weights = {name: call.module.get_parameter(name).detach() for name in self.trainable}

        def one_row(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            alone = [t if dim is None else t.unsqueeze(0) for t, dim in zip(tensors, row_dims, strict=True)]
            output, pull_back = torch.func.vjp(  # type: ignore[misc]
                lambda w: call.again(w, alone), weights
            )
            return output.squeeze(0), pull_back(grad.unsqueeze(0))[0]

        try:
            output_B, grads = torch.func.vmap(one_row, in_dims=(0, *row_dims), randomness="error")(grad_B, *saved)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise NoRuleError(
                f"{self.path} ({self.kind}): the per-row gradients of {sorted(self.trainable)} cannot be computed "
                f"({error}). Freeze these parameters; dropout inside this module has to be 0."
            ) from error
        eps = max(torch.finfo(expected_B.dtype).eps, torch.finfo(torch.float32).eps)
        if float((output_B - expected_B).abs().max()) > 16 * eps * (1 + float(expected_B.abs().max())):
            raise NoRuleError(
                f"{self.path} ({self.kind}): for each single row it returns a different output than for the batch, so "
                f"its rows depend on each other. Freeze {sorted(self.trainable)}."
            )
        for name, parameter in self.trainable.items():
            self.book.record(parameter, RowGradients(widen(grads[name])))

"""Scale-then-privatise with factors of public gradients, as an experiment of `utility.py`; dpllm does not offer it.

Ganesh et al. (arXiv:2507.01129) multiply a gradient by s before it is clipped and gets noise, and the update by s
again: entries with large gradients then no longer take all of the clip norm, and noise is small where updates are. Here
s is the product of a factor for each row and one for each column, 1 / sqrt(R_i C_j / mean(R)) with the row and column
means R and C of squared gradients (Adafactor, arXiv:1804.04235). The gradients are of *public* text, so s is fixed
before the run, and the guarantee is that of the run itself: the model is only written in other coordinates.

A weight W = s V is computed as r_i V_ij c_j, from a layer with the weight V whose input is multiplied by c and whose
output by r. The gradient by V is s times that by W, and an update of V changes W by s times as much. Clipping, noise
and optimizer work on V and need no change. `merge` turns V into W again. Vectors, such as norms, are not scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Factors = tuple[Tensor, Tensor]
"""(rows,) r and (columns,) c of a matrix."""


class ScaledLinear(nn.Module):
    """A linear layer without bias whose weight is diag(rows) · inner.weight · diag(columns)."""

    def __init__(self, inner: nn.Linear, rows: Tensor, columns: Tensor) -> None:
        """Store the layer, whose weight is divided by the factors elsewhere (`scale`)."""
        super().__init__()
        self.inner = inner
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    @property
    def weight(self) -> nn.Parameter:
        """V."""
        return self.inner.weight

    def forward(self, features: Tensor) -> Tensor:
        """Return what the layer with the whole weight returns."""
        return self.inner(features * self.columns) * self.rows


class ScaledEmbedding(ScaledLinear):
    """An embedding whose table is diag(rows) · inner.weight · diag(columns)."""

    def forward(self, numbers: Tensor) -> Tensor:
        """Return what the embedding with the whole table returns."""
        return self.inner(numbers) * self.rows[numbers].unsqueeze(-1) * self.columns


def factors_of(squares: Tensor, least: float = 1e-2) -> Factors:
    """Return r and c with r_i c_j = 1 / sqrt(R_i C_j / mean(R)).

    Args:
        squares: (rows, columns) mean squares of gradients; R and C are its means over rows and columns.
        least: R and C are at least this share of their mean, or rows of which the public text says nothing (a token
            that does not occur) would be scaled without bound.

    >>> rows, columns = factors_of(torch.tensor([[1.0, 4.0], [4.0, 16.0]]))
    >>> torch.outer(rows, columns)
    tensor([[1.0000, 0.5000],
            [0.5000, 0.2500]])
    """
    mean = squares.mean()
    by_row, by_column = (squares.mean(dim=dim).clamp(min=least * float(mean)) for dim in (1, 0))
    return (by_row / mean).rsqrt(), by_column.rsqrt()


def public_squares(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], loss_of: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Return the mean squares of the gradients of public batches, by the name of each trained matrix.

    Args:
        model: its weights and gradients are as before afterwards.
        batches: inputs of the model.
        loss_of: the model's output -> a loss.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2}
    sums, count = {name: torch.zeros_like(p) for name, p in matrices.items()}, 0
    for batch in batches:
        gradients = torch.autograd.grad(loss_of(model(**batch)), list(matrices.values()))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.addcmul_(gradient, gradient)
        count += 1
    return {name: total / count for name, total in sums.items()}


@torch.no_grad()
def scale(model: nn.Module, squares: Mapping[str, Tensor]) -> None:
    """Write the linear layers and embeddings of a model in scaled coordinates; it computes the same as before.

    The factors of all matrices are divided by one number, so that the mean square of s over all their entries is 1, and
    a learning rate keeps its meaning.

    Args:
        model: changed in place.
        squares: of `public_squares`; a matrix without an entry stays as it is.

    Raises:
        ValueError: a matrix is a weight of something other than a linear layer without bias or an embedding.
    """
    factors = {name: factors_of(value) for name, value in squares.items()}
    entries = sum(value.numel() for value in squares.values())
    total = sum(float(rows.square().sum() * columns.square().sum()) for rows, columns in factors.values())
    common = (total / entries) ** 0.5
    by_weight = {id(model.get_parameter(name)): (r, c / common) for name, (r, c) in factors.items()}
    for name, (rows, columns) in factors.items():
        model.get_parameter(name).div_(torch.outer(rows, columns / common))
    found = set()
    for path, module in list(model.named_modules()):
        known = by_weight.get(id(getattr(module, "weight", None)))
        if known is None:
            continue
        kinds = {nn.Linear: ScaledLinear, nn.Embedding: ScaledEmbedding}
        if type(module) not in kinds or getattr(module, "bias", None) is not None:
            raise ValueError(f"{path} is of type {type(module).__name__}, with or without a bias: it cannot be scaled")
        found.add(id(module.weight))
        model.set_submodule(path, kinds[type(module)](module, *known))
    if len(found) < len(factors):
        raise ValueError(f"{len(factors) - len(found)} matrices are no weight of a module: they cannot be scaled")


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Write a scaled model in plain coordinates again, in place."""
    done = set()
    for path, module in list(model.named_modules()):
        if isinstance(module, ScaledLinear):
            if id(module.weight) not in done:  # a tied weight has several modules
                module.weight.mul_(torch.outer(module.rows, module.columns))
                done.add(id(module.weight))
            model.set_submodule(path, module.inner)

"""Compares the clipper with a float64 loop of single-row autograd, for any loss."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.ghost.norms import NormTally


def perturbed(model):
    """The model in float64 and training mode, without dropout, no parameter at a special initial value."""
    generator = torch.Generator().manual_seed(0)
    model = model.double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def flat(tensors, like):
    """Concatenate the gradients, with zeros for None."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if t is None else t).flatten().double() for t, p in pairs])


def row_gradients(model, losses, batch):
    """Return (B, P): autograd of each row's loss, computed from only that row on a copy without hooks."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for row in range(len(next(iter(batch.values())))):
        model.zero_grad(set_to_none=True)
        losses(model, {name: value[row : row + 1] for name, value in batch.items()}).sum().backward()
        rows.append(flat([p.grad for p in parameters], parameters))
    return torch.stack(rows)


def assert_is_the_loop(model, losses, batch, norm_method=None, unit_index=None, microbatches=1):
    """Norms and clipped sum are those of the loop, at a clip norm that clips some units and not others.

    Args:
        model: in float64.
        losses: of a model and a batch, one per row.
        batch: tensors with rows first.
        norm_method: how norms are computed.
        unit_index: the unit of each row; None: its own.
        microbatches: how often the batch is clipped, one after another.
    """
    rows = row_gradients(model, losses, batch)
    units = rows
    if unit_index is not None:
        units = rows.new_zeros(int(unit_index.max()) + 1, rows.shape[1]).index_add(0, unit_index, rows)
    norms = units.norm(dim=1)
    clip_norm = float(norms.median()) * (1 + 1e-9)
    clipper = GhostClipper(model, clip_norm, norm_method)
    try:
        for _ in range(microbatches):
            result = clipper.backward(losses(model, batch), unit_index)
    finally:
        clipper.remove()
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = flat([p.grad for p in parameters], parameters) / microbatches
    torch.testing.assert_close(result.norms.double(), norms, rtol=1e-6, atol=0)
    expected = result.factors.double() @ units
    assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())
    assert 0 < int((norms > clip_norm).sum()) < len(norms)
    torch.testing.assert_close(result.factors.double(), (clip_norm / norms).clamp(max=1), rtol=1e-5, atol=0)


class Net(nn.Module):
    """Rows of 3 features to one loss per row, with a module in the middle."""

    def __init__(self, middle=None):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = middle if middle is not None else nn.Identity()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))[:, 0] ** 2


class Kernel(torch.autograd.Function):
    """An operation that is no function of PyTorch's, such as one of a library."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


def squared_norms(contributions, rows, norm_method):
    """Return the squared norms (U,) of one parameter's gradients, and their slack (U,)."""
    tally = NormTally(rows, norm_method, torch.float64)
    tally.add(contributions)
    sq_norm_GU, slack_GU = tally.total()
    return sq_norm_GU[0], slack_GU[0]

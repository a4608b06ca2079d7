"""Measures that this machine's products round no more than the norms allow for.

Norms are accumulated in float32, and `kernels.rounding_slack` says how far they may be off. On a GPU that depends on
what its tensor cores do with the last bits of a sum (Fasi et al. 2021, PeerJ Computer Science 7:e330), which differs
between generations. It is measured once per device, dtype and form, on the worst case that needs no private data: long
sums of terms of one sign, where what is cut off adds up.
"""

from __future__ import annotations

import functools

import torch

from dpllm.ghost import kernels
from dpllm.ghost.errors import GhostError
from dpllm.ghost.forms import Forms

_SHAPES = ((256, 4096), (1, 300), (1, 512))  # tokens, width; with one token nothing averages out


@functools.cache
def require_within_slack(forms: Forms, device: torch.device, dtype: torch.dtype) -> None:
    """Make sure that norms computed here are within the slack that the clip factors allow for.

    Args:
        forms: how norms are computed.
        device: where.
        dtype: of activations and output gradients.

    Raises:
        GhostError: they are further off, and the clipped contribution of a unit could exceed the clip norm.
    """
    for tokens, width in _SHAPES:
        for name, excess in shortfalls(forms, device, dtype, tokens, width).items():
            if excess <= 1:
                continue
            raise GhostError(
                f"On {device}, {name} norms of {dtype} are off by {excess:.1f} times what the clip factors allow for, "
                "so that a unit could contribute more than the clip norm. Pass forms=Forms(fused=False), or train in "
                "float32 with torch.backends.cuda.matmul.allow_tf32 off"
            )


def shortfalls(forms: Forms, device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> dict[str, float]:
    """How far norms of one-signed terms are from those in float64, over the slack; by form, at most 1 is sound."""
    generator = torch.Generator().manual_seed(0)
    x_BTD, y_BTD = (torch.rand(1, tokens, width, generator=generator).to(device, dtype) for _ in range(2))
    excess = {}
    with kernels.exact_matmul(), torch.no_grad():
        exact_B, mass_B = kernels.gram_norms(x_BTD.double(), [y_BTD.double()])
        slack_B = kernels.rounding_slack(dtype) * mass_B
        for norm in ("gram", "tiled"):
            sq_norm_B, _ = Forms(norm, forms.fused).outer_norms(x_BTD, [y_BTD])
            excess[norm] = float(((exact_B - sq_norm_B).abs() / slack_B).max())
        index_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        unit_B = torch.zeros(1, dtype=torch.int64, device=device)
        lookup_B = forms.lookup_norms(index_BT, x_BTD, unit_B, 1, 1)
        exact_B = x_BTD.double().sum(1).square().sum(1)
        root = float(torch.linalg.vector_norm(x_BTD, dim=2, dtype=torch.float64).sum())
        excess["lookup"] = float((exact_B - lookup_B).abs().max()) / (kernels.rounding_slack(dtype) * root**2)
    return excess

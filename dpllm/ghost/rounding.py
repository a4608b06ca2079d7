"""Measures that norms and sums on this machine are correct and have no more rounding error than allowed.

Norms are accumulated in float32, and `kernels.rounding_slack` gives their allowed error. On a GPU the error depends on
how its tensor cores treat the last bits of a sum (Fasi et al. 2021, PeerJ Computer Science 7:e330), which differs
between generations. So the error is measured once per device, dtype and method, on the worst case that needs no private
data: long sums of terms of one sign, where the bits cut off add up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.errors import GhostError
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum, Weights

_NARROW = 128  # the widths for sums: a matrix of this size in both dimensions
_MOST = 32.0  # times the slack
_SHAPES = ((256, 4096), (1, 300), (1, 512))  # tokens, width; with one token, errors do not average out


def is_measured(x: Tensor) -> bool:
    """Whether the rounding of norms and sums of such a tensor depends on the device: below float64, on a GPU."""
    return x.is_cuda and x.is_floating_point() and x.dtype != torch.float64


@functools.cache
def slack_factor(norm_method: NormMethod, device: torch.device, dtype: torch.dtype) -> float:
    """Return the factor by which the slack of norms must exceed `kernels.rounding_slack` on this device.

    Guarantee: with it, the slack is twice the largest error measured here that rounding may take from a norm or add to
    a clipped sum. It makes clip factors smaller by some millionths.

    Args:
        norm_method: how norms are computed.
        device: the device of the tensors.
        dtype: of activations and output gradients.

    Raises:
        GhostError: the error is too large to be rounding.
    """
    measured = [found for shape in _SHAPES for found in shortfalls(norm_method, device, dtype, *shape).items()]
    what, worst = max(measured, key=lambda found: math.inf if math.isnan(found[1]) else found[1])
    if not worst <= _MOST:
        raise GhostError(
            f"On {device}, {what} of {dtype} are off by {worst:.1f} times the error that the clip factors allow. This "
            "is too large for rounding: a unit could contribute more than the clip norm. Pass "
            "norm_method=NormMethod(fused=False), or train in float32"
        )
    return 1.0 if worst <= 1 else 2 * worst


class Flows:
    """The kinds of tensors from which norms and sums were computed: devices and dtypes whose rounding is measured."""

    def __init__(self) -> None:
        """Start without tensors."""
        self._seen: set[tuple[torch.device, torch.dtype]] = set()

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note the kinds of these tensors."""
        for tensor in tensors:
            if is_measured(tensor):
                self._seen.add((tensor.device, tensor.dtype))

    def slack_factor(self, norm_method: NormMethod) -> float:
        """Return the largest `slack_factor` of all kinds noted."""
        return max((slack_factor(norm_method, *kind) for kind in self._seen), default=1.0)


def shortfalls(
    norm_method: NormMethod, device: torch.device, dtype: torch.dtype, tokens: int, width: int
) -> dict[str, float]:
    """Return the error of norms and sums of one-signed terms against float64, over the slack; at most 1 is sound.

    For sums the slack is that of a norm's square: 16 units in the last place of the terms' sum.
    """
    generator = torch.Generator().manual_seed(0)
    x_BTD, y_BTD = (torch.rand(1, tokens, width, generator=generator).to(device, dtype) for _ in range(2))
    excess = {}
    with kernels.exact_matmul(), torch.no_grad():
        exact_B, mass_B = kernels.gram_norms(x_BTD.double(), [y_BTD.double()])
        slack_B = kernels.rounding_slack(dtype) * mass_B
        for norm in ("gram", "tiled"):
            sq_norm_B, _ = NormMethod(norm, norm_method.fused).outer_norms(x_BTD, [y_BTD])
            excess[f"{norm} norms"] = float(((exact_B - sq_norm_B).abs() / slack_B).max())
        index_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        unit_B = torch.zeros(1, dtype=torch.int64, device=device)
        lookup_B = norm_method.lookup_norms(index_BT, x_BTD, unit_B, 1, 1)
        exact_B = x_BTD.double().sum(1).square().sum(1)
        root = float(torch.linalg.vector_norm(x_BTD, dim=2, dtype=torch.float64).sum())
        excess["lookup norms"] = float((exact_B - lookup_B).abs().max()) / (kernels.rounding_slack(dtype) * root**2)
        excess |= _of_sums(norm_method, x_BTD[:, :, :_NARROW], y_BTD[:, :, :_NARROW])
    return excess


def _of_sums(norm_method: NormMethod, x_BTD: Tensor, y_BTD: Tensor) -> dict[str, float]:
    slack = 2 * kernels.rounding_slack(x_BTD.dtype)
    total = torch.zeros(
        x_BTD.shape[2], y_BTD.shape[2], dtype=kernels.accumulation_dtype(x_BTD.dtype), device=x_BTD.device
    )
    norm_method.add_weighted_outer_(Sum.onto(total), x_BTD, y_BTD, Weights(total.new_full((1,), 0.3)))
    exact = 0.3 * x_BTD[0].double().mT @ y_BTD[0].double()
    # As the last addend of a step: the guard of the first step sees a sum that is finished separately.
    last = Sum.onto(total.clone())
    last.finish_in(total.dtype, 0.5)
    norm_method.add_weighted_outer_(last, x_BTD, y_BTD, Weights(total.new_full((1,), 0.3)))
    return {
        "clipped sums": float(((exact - total).abs() / (slack * exact)).max()),
        "finished sums": float(((exact - last.finished()).abs() / (slack * exact)).max()),
    }

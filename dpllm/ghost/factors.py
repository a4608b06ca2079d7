"""From squared norms to clip factors that keep the bound in floating point.

Place in the flow: between the norms of a microbatch and its clipped sum. The clipping (`dpllm.mechanism`) chooses the
factors; this module makes them hold after rounding and for gradients that are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpllm.ghost.errors import GhostError
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.parts import Clipping


def clip_factors(clipping: Clipping, sq_norm_GU: Tensor, slack_GU: Tensor | None = None) -> Tensor:
    """Return the factor by which each unit's gradient is multiplied, in each group of parameters.

    Guarantee: the norm of a unit's scaled gradient over all groups is at most the clipping's sensitivity under
    zero-out, also after rounding.

    Args:
        clipping: one of `dpllm.mechanism.catalogue`, or another one. The factors of another one are checked, which
            waits for the device.
        sq_norm_GU: (G, U) squared norms of each group; may be non-finite.
        slack_GU: (G, U) the rounding error that they may have lost. It is added before the root is taken, and the
            root is raised by the rounding error that later steps may add.

    Returns:
        (G, U) factors; exactly 0 in all groups of a unit where a norm is not finite.

    Raises:
        GhostError: a clipping from outside the catalogue gives a factor beyond its sensitivity.

    >>> from dpllm.mechanism.clipping import FlatClipping
    >>> clip_factors(FlatClipping(1.0), torch.tensor([[4.0, 0.25, float("inf")]]))
    tensor([[0.5000, 1.0000, 0.0000]])
    """
    upper_GU = sq_norm_GU if slack_GU is None else sq_norm_GU + slack_GU
    finite_U = torch.isfinite(upper_GU).all(dim=0)
    kind = torch.finfo(upper_GU.dtype)
    norm_GU = torch.where(finite_U, upper_GU, 1).clamp_min(kind.tiny).sqrt() * (1 + 8 * kind.eps)
    factor_GU = clipping.factors(norm_GU)
    if CLIPPINGS.get(clipping.kind) is not type(clipping):
        _check(clipping, norm_GU, factor_GU)
    return torch.where(finite_U, factor_GU, 0)


def _check(clipping: Clipping, norm_GU: Tensor, factor_GU: Tensor) -> None:
    bound = clipping.sensitivity("zero-out")
    if factor_GU.shape == norm_GU.shape:
        reach_U = (factor_GU * norm_GU).double().square().sum(dim=0).sqrt()
        if bool((factor_GU >= 0).all() & (reach_U <= bound * (1 + 1e-6)).all()):
            return
    raise GhostError(
        f"Clipping {clipping.kind!r} gives a factor whose product with the norm exceeds its sensitivity {bound:g}, or "
        "that is negative or not a number: the noise would be too small for it. Give factors (G, U), at least 0, under "
        "which the norm over all groups is at most the sensitivity."
    )

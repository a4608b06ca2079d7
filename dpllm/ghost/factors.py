"""From squared norms to clip factors that keep the bound in floating point.

Place in the flow: between the norms of a microbatch and its clipped sum. Which factors is the clipping's matter
(`dpllm.mechanism`); that they hold after rounding, and for gradients that are not finite, is seen to here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpllm.ghost.errors import GhostError
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.parts import Clipping


def clip_factors(clipping: Clipping, sq_norm_U: Tensor, slack_U: Tensor | None = None) -> Tensor:
    """Return what each unit's gradient is multiplied by.

    Guarantee: factor times norm is at most the clipping's sensitivity under zero-out, also after rounding.

    Args:
        clipping: one of `dpllm.mechanism.catalogue`, or another one, whose factors are then checked, which waits for
            the device.
        sq_norm_U: (U,) squared norms; may be non-finite.
        slack_U: (U,) what rounding may have taken from them. It is added before the root, and the root is raised by
            what rounding may add later.

    Returns:
        (U,) factors; exactly 0 where the norm is not finite.

    Raises:
        GhostError: a clipping of somebody else gives a factor beyond its sensitivity.

    >>> from dpllm.mechanism.clipping import FlatClipping
    >>> clip_factors(FlatClipping(1.0), torch.tensor([4.0, 0.25, float("inf")]))
    tensor([0.5000, 1.0000, 0.0000])
    """
    upper_U = sq_norm_U if slack_U is None else sq_norm_U + slack_U
    finite_U = torch.isfinite(upper_U)
    kind = torch.finfo(upper_U.dtype)
    norm_U = torch.where(finite_U, upper_U, 1).clamp_min(kind.tiny).sqrt() * (1 + 8 * kind.eps)
    factor_U = clipping.factors(norm_U)
    if CLIPPINGS.get(clipping.kind) is not type(clipping):
        _check(clipping, norm_U, factor_U)
    return torch.where(finite_U, factor_U, 0)


def _check(clipping: Clipping, norm_U: Tensor, factor_U: Tensor) -> None:
    bound = clipping.sensitivity("zero-out")
    if factor_U.shape == norm_U.shape:
        wrong_U = ~((factor_U >= 0) & (factor_U * norm_U <= bound * (1 + 1e-6)))
        if not bool(wrong_U.any()):
            return
    raise GhostError(
        f"Clipping {clipping.kind!r} gives a factor that times the norm exceeds its sensitivity {bound:g}, or that is "
        "negative or not a number: the noise would be too small for it. Give factors (U,) with 0 <= factor * norm <= "
        "sensitivity."
    )

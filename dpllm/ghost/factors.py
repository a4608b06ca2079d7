"""From squared norms to clip factors that keep the bound in floating point.

Place in the flow: between the norms of a microbatch and its clipped sum. The clipping (`dpllm.mechanism`) chooses the
factors; this module makes them hold after rounding and for gradients that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.errors import GhostError
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.parts import Clipping, SeparateGroups, SizedGroups

_ROUNDING = 1e-5  # largest relative difference between two computations of one factor


def clip_factors(clipping: Clipping, sq_norm_GU: Tensor, slack_GU: Tensor | None = None) -> Tensor:
    """Return the factor by which each unit's gradient is multiplied, in each group of parameters.

    Guarantee: the norm of a unit's scaled gradient over all groups is at most the clipping's sensitivity under
    zero-out, also after rounding.

    Args:
        clipping: one of `dpllm.mechanism.catalogue`, or another one. The factors of another one are computed for each
            unit by itself and checked, which waits for the device.
        sq_norm_GU: (G, U) squared norms of each group; may be non-finite.
        slack_GU: (G, U) the rounding error that they may have lost. It is added before the root is taken, and the
            root is raised by the rounding error that later steps may add.

    Returns:
        (G, U) factors; exactly 0 where a norm is not finite. If the factors of groups depend on each other, they are 0
        in all groups of that unit; otherwise only in that group, as `GroupFactors` gives them.

    Raises:
        GhostError: a clipping from outside the catalogue gives a factor beyond its sensitivity, or one that depends
            on other units.

    >>> from dpllm.mechanism.clipping import FlatClipping
    >>> clip_factors(FlatClipping(1.0), torch.tensor([[4.0, 0.25, float("inf")]]))
    tensor([[0.5000, 1.0000, 0.0000]])
    """
    upper_GU = sq_norm_GU if slack_GU is None else sq_norm_GU + slack_GU
    finite_GU = torch.isfinite(upper_GU)
    if not _is_separate(clipping):
        finite_GU = finite_GU.all(dim=0)[None]
    norm_GU = _upper_norm(upper_GU, finite_GU)
    catalogued = type(clipping) in CLIPPINGS.values()
    factor_GU = clipping.factors(norm_GU) if catalogued else _checked_factors(clipping, norm_GU)
    return torch.where(finite_GU, factor_GU, 0)


def _is_separate(clipping: Clipping) -> bool:
    """Whether a clipping is of the catalogue and its groups do not depend on each other."""
    return type(clipping) in CLIPPINGS.values() and isinstance(clipping, SeparateGroups)


def _upper_norm(upper: Tensor, finite: Tensor) -> Tensor:
    """Return norms above 0 from squares with their slack; 1 where they are not finite.

    Squares below `kernels.least_square` may have lost entries whose squares underflow, and count as it.
    """
    least, eps = kernels.least_square(upper.dtype), torch.finfo(upper.dtype).eps
    return torch.where(finite, upper, 1).clamp_min(least).sqrt() * (1 + 8 * eps)


def with_sizes(clipping: Clipping, shapes: Mapping[str, tuple[int, ...]]) -> Clipping:
    """Return the clipping whose factors a model gets: with the sizes of its groups, if they depend on them.

    Args:
        clipping: of one object for all models.
        shapes: name and shape of each trainable parameter.

    Raises:
        GhostError: with the sizes it has another C, sensitivity or class.
    """
    if not isinstance(clipping, SizedGroups):
        return clipping
    sized = clipping.sized([sum(math.prod(shapes[name]) for name in group) for group in clipping.groups(shapes)])
    if type(sized) is not type(clipping):
        raise GhostError(
            f"clipping {clipping.kind!r} with the sizes of its groups is a {type(sized).__name__}, whose bound may "
            f"be another one. Return a {type(clipping).__name__} from sized()"
        )
    (norm, bound), now = ((one.clip_norm, one.sensitivity("zero-out")) for one in (clipping, sized))
    if (norm, bound) != now:
        raise GhostError(
            f"clipping {clipping.kind!r} had clip_norm={norm:g} and sensitivity {bound:g}, and now has "
            f"clip_norm={now[0]:g} and sensitivity {now[1]:g}, with the sizes of its groups. Noise and ε are of the "
            "first: keep C and the sensitivity in sized()"
        )
    return sized


class GroupFactors:
    """The factors of one group after another, during a backward pass.

    Guarantee: as `clip_factors`, which gives the same factors from the norms of all groups.

    A unit whose norm is not finite gets the factor 0 in that group only. In the others its share is bounded as that of
    any unit. Were it 0 in the groups whose sums are formed later, the unit's contribution would depend on the memory
    that other units need, which decides when sums are formed.

    Args:
        clipping: one of the catalogue with `group_factors`.
        num_groups: G.
    """

    def __init__(self, clipping: SeparateGroups, num_groups: int) -> None:
        """Start without factors."""
        self._clipping, self._num_groups = clipping, num_groups
        self._used: dict[int, Tensor] = {}

    @classmethod
    def of(cls, clipping: Clipping, num_groups: int) -> GroupFactors | None:
        """Return the factors of a clipping of the catalogue with independent groups; None for another one."""
        return cls(clipping, num_groups) if _is_separate(clipping) else None  # type: ignore[arg-type]

    def one(self, group: int, sq_norm_U: Tensor, slack_U: Tensor) -> Tensor:
        """Return the factors (U,) of one group, once.

        Args:
            group: its index.
            sq_norm_U: (U,) squared norms; may be non-finite.
            slack_U: (U,) the rounding error that they may have lost.
        """
        upper_U = sq_norm_U + slack_U
        finite_U = torch.isfinite(upper_U)
        factor_U = self._clipping.group_factors(group, self._num_groups, _upper_norm(upper_U, finite_U))
        self._used[group] = torch.where(finite_U, factor_U, 0)
        return self._used[group]

    def joined(self, factor_GU: Tensor) -> Tensor:
        """Return the factors (G, U) of all groups: those used already, and those given for the other groups."""
        whole_GU = factor_GU.clone()
        for group, used_U in self._used.items():
            whole_GU[group] = used_U
        return whole_GU


def _checked_factors(clipping: Clipping, norm_GU: Tensor) -> Tensor:
    """Return the factors of a clipping from outside the catalogue: those of each unit by itself."""
    kind = getattr(clipping, "kind", None)
    if not isinstance(kind, str):
        raise GhostError(f"The kind of clipping {type(clipping).__name__} is {kind!r}. Give it a word: kind = 'mine'")
    columns = norm_GU.split(1, dim=1)  # clones below: a clipping that writes into the norms changes only its own
    factor_GU, of_one = clipping.factors(norm_GU.clone()), [clipping.factors(column.clone()) for column in columns]
    bound = clipping.sensitivity("zero-out")
    if factor_GU.shape == norm_GU.shape and all(one.shape == columns[0].shape for one in of_one):
        single_GU = torch.cat(of_one, dim=1)
        # Sums over groups may be rounded differently for one column, so the factors returned are those of one column.
        if not bool(torch.isclose(factor_GU, single_GU, rtol=_ROUNDING, atol=0, equal_nan=True).all()):
            raise GhostError(
                f"Clipping {kind!r} gives a unit another factor beside other units than by itself, so one unit could "
                "change the contributions of others, and the noise would be too small. Compute each column of factors "
                "(G, U) from the same column of norm_GU only"
            )
        reach_U = (single_GU * norm_GU).double().square().sum(dim=0).sqrt()
        if bool((single_GU >= 0).all() & (reach_U <= bound * (1 + 1e-6)).all()):
            return single_GU
    raise GhostError(
        f"Clipping {kind!r} gives a factor whose product with the norm exceeds its sensitivity {bound:g}, or "
        "that is negative or not a number: the noise would be too small for it. Give factors (G, U), at least 0, under "
        "which the norm over all groups is at most the sensitivity."
    )

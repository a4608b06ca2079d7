"""The factor of each unit's gradient, and a parameter's clipped sum while it is formed.

The clipping (`dpllm.mechanism`) computes factors from norms. `clip_factors` makes them robust to rounding and to
non-finite gradients.

An engine creates a sum, microbatches and noise are added to it, and the engine takes the gradient from it. Reading and
writing a large float32 sum takes longer than the additions, so unnecessary passes over it are avoided: a new sum holds
no zeros, and its first addend is written, or becomes the sum. The fused kernel, as the last addend, reads the sum with
its noise, and writes the gradient in the parameter's dtype (`Sum.finish_in`).

Shape suffixes: B rows, G groups of parameters, U units, T tokens, N tokens of all rows, D width.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dpllm.ghost.kernels import accumulation_dtype, least_square
from dpllm.ghost.refusals import GhostError
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.parts import Clipping, SeparateGroups, SizedGroups

_ROUNDING = 1e-5  # largest relative difference between two computations of the same factor


def clip_factors(clipping: Clipping, sq_norm_GU: Tensor, slack_GU: Tensor | None = None) -> Tensor:
    """Return the factor by which each unit's gradient is multiplied, in each group of parameters.

    Guarantee: the norm of a unit's scaled gradient over all groups is at most the clipping's sensitivity under
    zero-out, also after rounding.

    Args:
        clipping: one of `dpllm.mechanism.catalogue`, or a custom one. The factors of a custom clipping are computed for
            each unit by itself and checked, which waits for the device.
        sq_norm_GU: (G, U) squared norms of each group; may be non-finite.
        slack_GU: (G, U) the rounding error that may have reduced them. It is added before taking the root, and the root
            is increased by the rounding error of later steps.

    Returns:
        (G, U) factors; exactly 0 if a norm is not finite. If the groups' factors depend on each other, they are 0 in
        all groups of that unit; otherwise only in that group, as in `GroupFactors`.

    Raises:
        GhostError: a custom clipping returns a factor beyond its sensitivity, or one that depends on other units.

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
    """Return whether a clipping is in the catalogue and its groups are independent."""
    # The attribute that `SeparateGroups` adds to `Clipping`; a check of the whole protocol takes a tenth of a
    # millisecond.
    return type(clipping) in CLIPPINGS.values() and hasattr(clipping, "group_factors")


def _upper_norm(upper: Tensor, finite: Tensor) -> Tensor:
    """Return norms above 0 from squares with their slack; 1 if they are not finite.

    Squares below `least_square` may have lost entries whose squares underflow, and are raised to it.
    """
    least, eps = least_square(upper.dtype), torch.finfo(upper.dtype).eps
    return torch.where(finite, upper, 1).clamp_min(least).sqrt() * (1 + 8 * eps)


def with_sizes(clipping: Clipping, shapes: Mapping[str, tuple[int, ...]]) -> Clipping:
    """Return the clipping with a model's group sizes, if its factors depend on them.

    Args:
        clipping: one object for all models.
        shapes: name and shape of each trainable parameter.

    Raises:
        GhostError: with the sizes, its C, sensitivity or class is different.
    """
    if not isinstance(clipping, SizedGroups):
        return clipping
    sized = clipping.sized([sum(math.prod(shapes[name]) for name in group) for group in clipping.groups(shapes)])
    if type(sized) is not type(clipping):
        raise GhostError(
            f"clipping {clipping.kind!r}: sized() returned a {type(sized).__name__}, whose bound may be different. "
            f"Return a {type(clipping).__name__}"
        )
    (norm, bound), now = ((one.clip_norm, one.sensitivity("zero-out")) for one in (clipping, sized))
    if (norm, bound) != now:
        raise GhostError(
            f"clipping {clipping.kind!r} had clip_norm={norm:g} and sensitivity {bound:g}, but sized() changed them to "
            f"clip_norm={now[0]:g} and sensitivity {now[1]:g}. Noise and ε use the former: keep C and the sensitivity "
            "in sized()"
        )
    return sized


class GroupFactors:
    """The factors of one group after another, during a backward pass.

    Guarantee: as `clip_factors`, which computes the same factors from the norms of all groups.

    A unit whose norm is not finite gets the factor 0 in that group only. In the others its share is bounded like any
    other unit's. If it were 0 in the groups whose sums are formed later, the unit's contribution would depend on the
    memory that other units need, which decides when sums are formed.

    Args:
        clipping: one from the catalogue, with `group_factors`.
        num_groups: G.
    """

    def __init__(self, clipping: SeparateGroups, num_groups: int) -> None:
        """Start without factors."""
        self._clipping, self._num_groups = clipping, num_groups
        self._used: dict[int, Tensor] = {}

    @classmethod
    def of(cls, clipping: Clipping, num_groups: int) -> GroupFactors | None:
        """Return the factors of a catalogue clipping with independent groups; None for any other clipping."""
        return cls(clipping, num_groups) if _is_separate(clipping) else None  # type: ignore[arg-type]

    def one(self, group: int, sq_norm_U: Tensor, slack_U: Tensor) -> Tensor:
        """Return the factors (U,) of one group, once, from its squared norms and their slack, as `clip_factors`."""
        upper_U = sq_norm_U + slack_U
        finite_U = torch.isfinite(upper_U)
        factor_U = self._clipping.group_factors(group, self._num_groups, _upper_norm(upper_U, finite_U))
        self._used[group] = torch.where(finite_U, factor_U, 0)
        return self._used[group]

    def joined(self, factor_GU: Tensor) -> Tensor:
        """Return the factors (G, U) of all groups: those already used, and the given ones for the other groups."""
        whole_GU = factor_GU.clone()
        for group, used_U in self._used.items():
            whole_GU[group] = used_U
        return whole_GU


def _checked_factors(clipping: Clipping, norm_GU: Tensor) -> Tensor:
    """Return the factors of a custom clipping, computed for each unit by itself."""
    kind = getattr(clipping, "kind", None)
    if not isinstance(kind, str):
        raise GhostError(
            f"The kind of clipping {type(clipping).__name__} is {kind!r}. Set it to a string: kind = 'mine'"
        )
    columns = norm_GU.split(1, dim=1)  # clones below: a clipping that writes into the norms changes only its own
    factor_GU, of_one = clipping.factors(norm_GU.clone()), [clipping.factors(column.clone()) for column in columns]
    bound = clipping.sensitivity("zero-out")
    if factor_GU.shape == norm_GU.shape and all(one.shape == columns[0].shape for one in of_one):
        single_GU = torch.cat(of_one, dim=1)
        # Sums over groups may round differently for one column, so the returned factors are those of single columns.
        if not bool(torch.isclose(factor_GU, single_GU, rtol=_ROUNDING, atol=0, equal_nan=True).all()):
            raise GhostError(
                f"Clipping {kind!r} gives a unit a different factor in a batch than by itself, so one unit could "
                "change other units' contributions, and the noise would be too small. Compute each column of factors "
                "(G, U) only from the same column of norm_GU"
            )
        reach_U = (single_GU * norm_GU).double().square().sum(dim=0).sqrt()
        if bool((single_GU >= 0).all() & (reach_U <= bound * (1 + 1e-6)).all()):
            return single_GU
    raise GhostError(
        f"Clipping {kind!r} gives a factor whose product with the norm exceeds its sensitivity {bound:g}, or that is "
        "negative or not a number, so the noise would be too small. Return factors (G, U) >= 0 under which the norm "
        "over all groups is at most the sensitivity."
    )


class Sum:
    """The sum of one parameter's weighted gradients and noise, in float32 (float64 for a float64 parameter).

    Args:
        shape: the parameter's shape.
        dtype: the dtype of the sum.
        device: the device of the sum.

    Attributes:
        is_empty: whether nothing has been added. The entries of `total` are then undefined.
        gradient: the finished gradient, if an addend computed it; nothing can be added afterwards.

    >>> total = Sum(torch.Size([2]), torch.float32, torch.device("cpu"))
    >>> total.add_(torch.ones(2))
    >>> total.add_(torch.ones(2))
    >>> total.finish_in(torch.bfloat16, scale=0.5)
    >>> total.finished()
    tensor([1., 1.], dtype=torch.bfloat16)
    """

    __slots__ = ("_dtype", "_finish", "_like", "_total", "gradient", "is_empty")

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        """Create a sum without addends."""
        self._like = shape, dtype, device
        self._total: Tensor | None = None
        self._finish: tuple[torch.dtype, float] | None = None
        self.is_empty = True
        self.gradient: Tensor | None = None

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Sum:
        """Create the sum of a parameter that this process holds as a whole."""
        return cls(parameter.shape, accumulation_dtype(parameter.dtype), parameter.device)

    @classmethod
    def onto(cls, total: Tensor) -> Sum:
        """Return a sum that adds to a tensor in place."""
        one = cls(total.shape, total.dtype, total.device)
        one._total, one.is_empty = total, False
        return one

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum."""
        return self._like[1]

    @property
    def total(self) -> Tensor:
        """The tensor of the sum, to which an addend writes; the first addend sets ``is_empty`` to False."""
        if self._total is None:
            shape, dtype, device = self._like
            self._total = torch.empty(shape, dtype=dtype, device=device)
        return self._total

    def filled(self) -> Tensor:
        """Return the sum, or zeros if nothing was added, for addends that reach only some entries."""
        total = self.total
        if self.is_empty:
            total.zero_()
            self.is_empty = False
        return total

    def add_(self, value: Tensor, alpha: float = 1.0) -> None:
        """Add alpha times a tensor, which is not modified.

        Raises:
            GhostError: the tensor has a different shape, for which PyTorch would resize an empty sum, or broadcast.
        """
        if value.shape != self._like[0]:
            raise GhostError(
                f"A sum of shape {tuple(self._like[0])} cannot take a gradient of shape {tuple(value.shape)}"
            )
        if self.is_empty:
            torch.mul(value, alpha, out=self.total)
            self.is_empty = False
        else:
            self.total.add_(value, alpha=alpha)

    def take_(self, value: Tensor) -> None:
        """Add a tensor that nothing else uses; an empty sum takes it over without a copy, if possible.

        The sum then changes it in place. A tensor from autograd may be the gradient of several parameters: use `add_`.
        """
        if self.is_empty and value.is_contiguous() and (value.shape, value.dtype, value.device) == self._like:
            self._total, self.is_empty = value, False
        else:
            self.add_(value)

    def finish_in(self, dtype: torch.dtype, scale: float) -> None:
        """Specify the gradient to be made from the complete sum, so that the last addend can compute it.

        Guarantee: sum and noise are multiplied together, in the dtype of the sum, and rounded to ``dtype`` afterwards.

        Args:
            dtype: of the gradient.
            scale: a public constant.
        """
        self._finish = dtype, scale

    @property
    def takes_last(self) -> bool:
        """Return whether the next addend is the last one, and may compute the gradient."""
        return self._finish is not None

    def begin_gradient(self) -> tuple[Tensor, float]:
        """Return the tensor for the last addend's gradient, and the scale. The caller sets ``gradient``."""
        assert self._finish is not None, "finish_in was called"
        dtype, scale = self._finish
        shape, own, device = self._like
        return self.total if dtype == own else torch.empty(shape, dtype=dtype, device=device), scale

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Prevent addends within the block from finishing the sum."""
        finish, self._finish = self._finish, None
        try:
            yield
        finally:
            self._finish = finish

    def finished(self) -> Tensor:
        """Return the gradient that the last addend computed, or compute it in one pass over the sum."""
        if self.gradient is None:
            total, (gradient, scale) = self.filled(), self.begin_gradient()
            self.gradient = torch.mul(total, scale, out=gradient)
        self._total = None
        return self.gradient


Finish = Callable[[nn.Parameter], None]
"""Makes and keeps one parameter's gradient, whose clipped sum `UnitClipper.add_clipped_sum_` can now form."""


class Weights:
    """The factor of each row's or each unit's gradient in the sum.

    A gradient with factor 0 contributes exactly zero, even if it is not finite.

    Args:
        factor: their factors.
    """

    def __init__(self, factor: Tensor) -> None:
        """Store the factors."""
        self.factor = factor
        self._scaled: tuple[tuple, Tensor, Tensor] | None = None

    @functools.cached_property
    def _keep(self) -> Tensor | slice | None:
        """The rows or units that contribute; None: all."""
        (keep,) = torch.nonzero(self.factor, as_tuple=True)
        count = keep.numel()
        if count == self.factor.numel():
            return None
        return slice(count) if count == 0 or int(keep[-1]) == count - 1 else keep  # padding is at the end: no copy

    @property
    def all_count(self) -> bool:
        """Whether every row or unit is known to contribute; unknown on a device, since reading it would wait."""
        return self.factor.device.type == "cpu" and self._keep is None

    def kept(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values of rows or units, and their factors, such that factor 0 contributes 0: 0 * inf would be NaN.

        On the CPU they are selected. On a device, where a selection would make the host wait, they are zeroed.
        """
        if self.factor.device.type != "cpu":
            zero = self.factor == 0
            return *(value.masked_fill(zero.view(-1, *[1] * (value.ndim - 1)), 0) for value in values), self.factor
        if self._keep is None:
            return *values, self.factor
        return *(value[self._keep] for value in values), self.factor[self._keep]

    def scaled(self, x_BTD: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a layer's input rows selected by `kept`, times their factors, with all tokens (N, D).

        The last result is cached, since layers that read one input follow each other.

        Args:
            x_BTD: the input.
            dtype: of the sum. In 16 bits the product would be rounded away from the gradient whose norm was bounded.
        """
        key = x_BTD.data_ptr(), x_BTD.shape, x_BTD.stride(), x_BTD.dtype, dtype
        if self._scaled is None or self._scaled[0] != key:
            kept, factor = self.kept(x_BTD)
            # Holding the input prevents reuse of its address.
            self._scaled = key, x_BTD, (kept.to(dtype) * factor.to(dtype)[:, None, None]).flatten(0, 1)
        return self._scaled[2]

    def release(self) -> None:
        """Release the scaled input."""
        self._scaled = None

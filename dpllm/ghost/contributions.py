"""The contribution of one use of a parameter to the gradient of each unit, in the cheapest exact form.

A parameter's gradient is the sum over its *uses* in the forward pass: a tied embedding contributes once as a lookup and
once as a matrix product. A layer's rule describes a use as one of

* `Outer`:        sum_t left[b, t] (x) right[b, t]          matrices: linear layers;
* `Lookup`:       sum_t onehot(index[b, t]) (x) right[b, t] embeddings;
* `HeadUse`:      an outer product whose left factor is made again: the head of a language model
  (`dpllm.ghost.chunked_head`);
* `Routed`:       outer products of tokens that meet different matrices: experts (`dpllm.ghost.routed`);
* `RowGradients`: the gradient of each row                  biases, norms, and anything else.

A use is kept as its factors, or as an `Instance`, the gradient of each *unit*, where that takes no more memory (LoRA
factors, narrow layers, units with many rows). `squared_norms` adds up all pairs of contributions, and treats a unit's
rows as one long row: the cross terms are part of the norm. `add_weighted_` forms the clipped sum.

Shape suffixes: B rows, U units, T tokens, L and R the two dimensions of a weight, G units that have equally many rows,
N rows of each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpllm.data.transfer import send_array
from dpllm.ghost import kernels
from dpllm.ghost.chunked_head import HeadUse, head_norms
from dpllm.ghost.instances import Slot
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.routed import Routed
from dpllm.ghost.sums import Sum, Weights

_LAYOUTS = 256  # of microbatches that are remembered
_MAX_ENTRIES = 1 << 26  # of the row gradients formed at a time, where a unit has several rows


@dataclass(frozen=True)
class Group:
    """Units of a microbatch that have equally many rows.

    Attributes:
        unit_G: the numbers of the units.
        rows_GN: the rows of each.
        every: whether these are all rows of the microbatch, in order; they are then viewed, not copied.
    """

    unit_G: Tensor
    rows_GN: Tensor
    every: bool

    def fold(self, x: Tensor) -> Tensor:
        """Lay the rows of a unit end to end, (B, T, ...) to (G, N * T, ...): a sum over rows and tokens is one sum."""
        if not self.every:
            x = x[self.rows_GN.flatten()]
        return x if self.rows_GN.shape[1] == 1 else x.unflatten(0, self.rows_GN.shape).flatten(1, 2)


@dataclass(frozen=True)
class Rows:
    """The unit of each row of a microbatch.

    Attributes:
        unit_B: (B,) int64, the unit of each row; -1 marks a padding row, which belongs to no unit.
        num_units: U.
        groups: the units that have rows, by their number of rows.
        in_order: whether row b is unit b, for all rows.
        real: the numbers of the rows that belong to a unit, ascending; known to the host.
        real_R: the same on the device.
        unit_R: their units.
    """

    unit_B: Tensor
    num_units: int
    groups: tuple[Group, ...]
    in_order: bool
    real: np.ndarray
    real_R: Tensor
    unit_R: Tensor

    @classmethod
    def of(cls, unit_B: Tensor, num_units: int, device: torch.device | None = None) -> Rows:
        """Find the rows of each unit.

        Args:
            unit_B: best on the CPU: reading it from a GPU waits for the GPU.
            num_units: U.
            device: the device on which the rows are used; None: that of ``unit_B``.
        """
        device = unit_B.device if device is None else device
        unit = unit_B.cpu().numpy().astype(np.int64)
        (real,) = np.nonzero(unit >= 0)
        order = np.argsort(unit, kind="stable")[len(unit) - len(real) :]  # rows, those of a unit side by side
        counts = np.bincount(unit[order], minlength=num_units)
        starts = np.cumsum(counts) - counts
        parts, every = [unit, real, unit[real]], []
        for count in np.unique(counts[counts > 0]):
            (units,) = np.nonzero(counts == count)
            rows_GN = order[starts[units][:, None] + np.arange(count)]
            every.append(np.array_equal(rows_GN.ravel(), np.arange(len(unit))))
            parts += [units, rows_GN]
        sent = send_array(np.concatenate([part.ravel() for part in parts]), device)  # one copy for all
        own_B, real_R, unit_R, *of_groups = (
            part_.view(part.shape) for part, part_ in zip(parts, sent.split([part.size for part in parts]), strict=True)
        )
        groups = map(Group, of_groups[::2], of_groups[1::2], every)
        in_order = np.array_equal(unit, np.arange(num_units))
        return cls(own_B, num_units, tuple(groups), in_order, real, real_R, unit_R)

    @classmethod
    def one_unit(cls, device: torch.device) -> Rows:
        """Return a single row that is a unit."""
        return cls.of(torch.zeros(1, dtype=torch.int64), 1, device)

    def sum_rows(self, value_B: Tensor) -> Tensor:
        """Sum the values of each unit's rows, (B, ...) to (U, ...); padding rows are left out."""
        if self.in_order:
            return value_B
        total = value_B.new_zeros(self.num_units, *value_B.shape[1:])
        return self._add_rows_(total, value_B, 0)

    def _add_rows_(self, total_U: Tensor, value_N: Tensor, start: int) -> Tensor:
        """Add the values of N rows that follow each other, from row ``start`` on, to those of their units."""
        first, last = np.searchsorted(self.real, (start, start + len(value_N))).tolist()
        unit_R = self.unit_R[first:last]
        if last - first < len(value_N):  # some rows are padding, whose values may not be finite
            value_N = value_N.index_select(0, self.real_R[first:last] - start)
        return total_U.index_add_(0, unit_R, value_N)

    def sum_formed(self, form: Callable[[slice], Tensor], entries: int) -> Tensor:
        """Apply `sum_rows` to values that ``form`` computes for a few rows at a time, to limit memory.

        Args:
            form: maps some rows to their values.
            entries: the number of entries in one row's value.
        """
        num_rows = self.unit_B.numel()
        chunk = num_rows if self.in_order else max(1, _MAX_ENTRIES // max(1, entries))
        if chunk >= num_rows:
            return self.sum_rows(form(slice(None)))
        total: Tensor | None = None
        for start in range(0, num_rows, chunk):
            value = form(slice(start, start + chunk))
            if total is None:
                total = value.new_zeros(self.num_units, *value.shape[1:])
            self._add_rows_(total, value, start)
        assert total is not None, "there are rows"
        return total


class Layouts:
    """The `Rows` of recent microbatches: most microbatches have the units 0, 1, 2, …."""

    def __init__(self) -> None:
        """Start without any."""
        self._known: dict[tuple, Rows] = {}

    def of(self, unit_B: Tensor, num_units: int, device: torch.device) -> Rows:
        """Do the same as `Rows.of`; equal units get the same object."""
        key = (unit_B.cpu().numpy().tobytes(), num_units, device)
        if key not in self._known:
            if len(self._known) == _LAYOUTS:
                self._known.clear()
            self._known[key] = Rows.of(unit_B, num_units, device)
        return self._known[key]


@dataclass(frozen=True)
class RowGradients:
    """The gradient of each row, (B, *parameter shape), in the accumulation dtype."""

    value_B: Tensor

    @property
    def grad(self) -> Tensor:
        """The gradient from the loss, rows first."""
        return self.value_B

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units."""
        return rows.sum_rows(self.value_B)


@dataclass(frozen=True)
class Instance:
    """The gradient of each unit, held unchanged: (U, *parameter shape), in the accumulation dtype.

    Attributes:
        value_U: the gradients.
        slot: their place beside those of other parameters, if they have one; it forms the sum.
    """

    value_U: Tensor
    slot: Slot | None = None

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units."""
        del rows
        return self.value_U

    def fold(self) -> Instance:
        """Return itself: it belongs to one unit."""
        return self

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_u factor_u g_u``."""
        del norm_method
        if self.slot is not None:
            total.take_(self.slot.weighted(weights.factor))
            return
        if len(self.value_U) == 1:  # one unit, whose gradient may be as large as the parameter: no copy for its zeros
            factor = weights.factor.to(total.dtype)[0]
            total.take_((self.value_U[0].to(total.dtype) * factor).masked_fill_(factor == 0, 0))
            return
        value_U, factor_U = weights.kept(self.value_U)
        total.take_(torch.tensordot(factor_U.to(total.dtype), value_U.to(total.dtype), dims=1))


@dataclass(frozen=True)
class Outer:
    """Gradient of a matrix product: the output gradient and the input, in the order of the weight's dimensions.

    Attributes:
        left_BTL: factor along the weight's first dimension.
        right_BTR: factor along its second.
        input_side: "left" or "right", whichever holds the layer's input (shared by layers that read the same
            activation).
    """

    left_BTL: Tensor
    right_BTR: Tensor
    input_side: str

    @property
    def input(self) -> Tensor:
        """The layer's input (B, T, D)."""
        return self.left_BTL if self.input_side == "left" else self.right_BTR

    @property
    def grad(self) -> Tensor:
        """The layer's output gradient (B, T, P)."""
        return self.right_BTR if self.input_side == "left" else self.left_BTL

    def input_key(self) -> tuple:
        """Return a key that is equal for layers that read the same activation."""
        x = self.input
        return x.data_ptr(), x.shape, x.stride(), x.dtype

    def factor_bytes(self) -> int:
        """Return the bytes of the factors."""
        return self.left_BTL.nbytes + self.right_BTR.nbytes

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the gradients of the units would take."""
        entries = rows.num_units * self.left_BTL.shape[2] * self.right_BTR.shape[2]
        return entries * kernels.accumulation_dtype(self.left_BTL.dtype).itemsize

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units (U, L, R)."""

        def form(here: slice) -> Tensor:
            return kernels.wide_bmm(self.left_BTL[here].mT, self.right_BTR[here])

        return rows.sum_formed(form, self.left_BTL.shape[2] * self.right_BTR.shape[2])

    def fold(self) -> Outer:
        """Return the same use with all tokens in a single row."""
        return Outer(_one_row(self.left_BTL), _one_row(self.right_BTR), self.input_side)

    def of(self, group: Group) -> Outer:
        """Return the same use with the rows of each unit of a group laid end to end."""
        return Outer(group.fold(self.left_BTL), group.fold(self.right_BTR), self.input_side)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``."""
        norm_method.add_weighted_outer_(total, self.left_BTL, self.right_BTR, weights)

    def mass(self) -> Tensor:
        """Return (B,): sum_t |left_t| |right_t|, the scale of the rounding error of norms and sums.

        Lengths count as the root of `kernels.least_square` at least.
        """
        dtype = kernels.accumulation_dtype(self.left_BTL.dtype)
        left, right = (torch.linalg.vector_norm(x, dim=2, dtype=dtype) for x in (self.left_BTL, self.right_BTR))
        least = math.sqrt(kernels.least_square(dtype))
        return (left.clamp_min(least) * right.clamp_min(least)).sum(1)


@dataclass(frozen=True)
class Lookup:
    """Gradient of a table lookup: ``right_BTR`` goes to row ``index_BT`` of the table of ``num_entries`` rows."""

    index_BT: Tensor
    right_BTR: Tensor
    num_entries: int

    @property
    def grad(self) -> Tensor:
        """The gradient from the loss, rows first."""
        return self.right_BTR

    def factor_bytes(self) -> int:
        """Return the bytes of the factors."""
        return self.right_BTR.nbytes

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the gradients of the units would take."""
        entries = rows.num_units * self.num_entries * self.right_BTR.shape[2]
        return entries * kernels.accumulation_dtype(self.right_BTR.dtype).itemsize

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units (U, V, R)."""
        width = self.right_BTR.shape[2]
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)

        def form(here: slice) -> Tensor:
            right = self.right_BTR[here].to(dtype)
            total = right.new_zeros(right.shape[0], self.num_entries, width)
            return total.scatter_add_(1, self.index_BT[here][:, :, None].expand(-1, -1, width), right)

        return rows.sum_formed(form, self.num_entries * width)

    def fold(self) -> Lookup:
        """Return the same use with all tokens in a single row."""
        return Lookup(_one_row(self.index_BT), _one_row(self.right_BTR), self.num_entries)

    def of(self, group: Group) -> Lookup:
        """Return the same use with the rows of each unit of a group laid end to end."""
        return Lookup(group.fold(self.index_BT), group.fold(self.right_BTR), self.num_entries)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``."""
        del norm_method
        weighted = self.right_BTR.to(total.dtype) * weights.factor.to(total.dtype)[:, None, None]
        weighted.masked_fill_((weights.factor == 0)[:, None, None], 0)  # 0 * inf is NaN; a selection would wait
        total.filled().index_add_(0, self.index_BT.flatten(), weighted.flatten(0, 1))

    def mass(self) -> Tensor:
        """Return (B,): sum_t |right_t|, the scale of the rounding error of norms and sums."""
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)
        return torch.linalg.vector_norm(self.right_BTR, dim=2, dtype=dtype).sum(1)


Use = RowGradients | Outer | Lookup | HeadUse | Routed
Contribution = Instance | Outer | Lookup | HeadUse | Routed


def _one_row(x: Tensor) -> Tensor:
    """Reshape (B, T, ...) to (1, B * T, ...)."""
    return x.flatten(0, 1)[None]


Place = Callable[[torch.Size, torch.dtype, torch.device, float, float], Slot]
"""Returns the place of a parameter of some shape, dtype and device, from the bytes of its factors and its gradients."""


def held(use: Use, rows: Rows, norm_method: NormMethod, place: Place | None = None) -> Contribution:
    """Return the form in which a use is kept until the clipped sum: the one that takes less memory.

    Args:
        use: of a parameter.
        rows: the units of the rows.
        norm_method: decides which form that is.
        place: returns where an instance is kept; None: by itself.
    """
    sizes = (math.inf, 0.0) if isinstance(use, RowGradients) else (use.factor_bytes(), use.instance_bytes(rows))
    if not isinstance(use, RowGradients) and not norm_method.holds_instance(*sizes):
        return use
    if place is None:
        return Instance(use.instance(rows))
    if isinstance(use, Outer) and rows.in_order:  # the product is written to its place
        shape = torch.Size((use.left_BTL.shape[2], use.right_BTR.shape[2]))
        slot = place(shape, kernels.accumulation_dtype(use.left_BTL.dtype), use.left_BTL.device, *sizes)
        return Instance(kernels.wide_bmm(use.left_BTL.mT, use.right_BTR, slot.value_U), slot)
    value_U = use.instance(rows)
    slot = place(value_U.shape[1:], value_U.dtype, value_U.device, *sizes)
    return Instance(slot.value_U.copy_(value_U), slot)


def merge(contributions: Sequence[Contribution], rows: Rows) -> list[Contribution]:
    """Convert the contributions to one parameter to a common form.

    Instances simply add up; where one contribution is held as an instance, all of them become one. Uses of a stack of
    matrices become one use with the slots of all. An instance that has a place keeps it.
    """
    placed = next((c for c in contributions if isinstance(c, Instance) and c.slot is not None), None)
    if placed is not None:
        for other in contributions:
            if other is not placed:
                placed.value_U.add_(other.instance(rows))
        return [placed]
    routed = [c for c in contributions if isinstance(c, Routed)]
    if routed and len(routed) == len(contributions):
        return [Routed.cat(routed)]
    kinds = {type(c) for c in contributions}
    if len(contributions) == 1 or kinds <= {Outer, Lookup} or kinds <= {HeadUse, Lookup}:
        return list(contributions)
    return [Instance(sum_of(contribution.instance(rows) for contribution in contributions))]


def join(already: Sequence[Contribution], more: Sequence[Contribution], norm_method: NormMethod) -> list[Contribution]:
    """Combine the contributions of one unit's rows to one parameter over several passes, as those of a single row.

    A sum over rows of sums over tokens is one sum over tokens. It is kept as factors, or as the gradient itself as soon
    as that takes less memory, for any number of rows that follow.

    Args:
        already: the result of `join` for the previous passes; empty at first.
        more: every use of the parameter in one more pass.
        norm_method: decides which form takes less memory.
    """
    folded = [*already, *map(_folded, more)]
    outers = [c for c in folded if isinstance(c, Outer)]
    lookups = [c for c in folded if isinstance(c, Lookup)]
    routed = [c for c in folded if isinstance(c, Routed)]
    joined: list[Contribution] = [c for c in folded if isinstance(c, Instance)]
    if routed:
        joined.append(Routed.cat(routed))
    if outers:
        lefts, rights = [c.left_BTL for c in outers], [c.right_BTR for c in outers]
        joined.append(Outer(torch.cat(lefts, 1), torch.cat(rights, 1), outers[0].input_side))
    if lookups:
        indexes, rights = [c.index_BT for c in lookups], [c.right_BTR for c in lookups]
        joined.append(Lookup(torch.cat(indexes, 1), torch.cat(rights, 1), lookups[0].num_entries))
    one = Rows.one_unit(_device(joined[0]))
    return merge([c if isinstance(c, Instance) else held(c, one, norm_method) for c in joined], one)


def _folded(contribution: Contribution) -> Contribution:
    """Return the same contribution with all tokens in a single row; a head's gradient itself."""
    if not isinstance(contribution, HeadUse):
        return contribution.fold()
    lse_BT = contribution.lse_BT
    rows = Rows.of(torch.zeros(len(lse_BT), dtype=torch.int64), 1, lse_BT.device)
    return Instance(contribution.instance(rows))


def _device(contribution: Contribution) -> torch.device:
    assert not isinstance(contribution, HeadUse), "it is folded to an instance"
    return (contribution.value_U if isinstance(contribution, Instance) else contribution.right_BTR).device


def squared_norms(contributions: Sequence[Contribution], rows: Rows, norm_method: NormMethod) -> tuple[Tensor, Tensor]:
    """Return the squared norm of each unit's gradient of one parameter, cross terms included.

    Args:
        contributions: every use of the parameter, as returned by `merge`.
        rows: the units of the rows.
        norm_method: how norms are computed.

    Returns:
        ``(sq_norm_U, slack_U)``: the squared norms, and the rounding error that they may have lost or that the
        clipped sum may gain.
    """
    if isinstance(contributions[0], Instance):
        sq_norm_U = kernels.squared_norms(contributions[0].value_U)
        return sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype) * sq_norm_U
    if isinstance(contributions[0], Routed):
        return contributions[0].norms(rows, norm_method)
    factored = [c for c in contributions if isinstance(c, Outer | Lookup)]
    heads = [c for c in contributions if isinstance(c, HeadUse)]
    assert len(factored) + len(heads) == len(contributions), "merge() leaves no mixture of forms"
    of_heads = [head_norms(heads, [c for c in factored if isinstance(c, Lookup)], rows)] if heads else []
    sq_norm_U = sum_of([*of_heads, *(_square(c, rows, norm_method) for c in factored)])
    for i, x in enumerate(factored):
        for y in factored[:i]:
            sq_norm_U = sq_norm_U + 2 * _cross(x, y, rows, sq_norm_U)
    mass_U = rows.sum_rows(sum_of(c.mass() for c in (*heads, *factored)))
    return sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype) * mass_U.square()


def shared_norms(
    sharing: Sequence[Sequence[Outer]], rows: Rows, norm_method: NormMethod
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(sq_norm_U, mass_U)`` of parameters that are used once each, for every set of layers that read one input.

    Where units have one row each, no row is copied, and the norms of all sets may be computed in one launch; otherwise
    one set after the other, since their rows are copied.

    Args:
        sharing: the uses in layers that read one input, for one or more inputs.
        rows: the units of the rows.
        norm_method: how norms are computed.
    """
    if len(rows.groups) == 1 and rows.groups[0].every and len(rows.groups[0].unit_G) == rows.num_units:
        (units,) = rows.groups
        folded = [(units.fold(uses[0].input), [units.fold(one.grad) for one in uses]) for uses in sharing]
        yield from norm_method.grouped_outer_norms(folded)
        return
    for uses in sharing:
        first = uses[0].input
        like = torch.empty(0, 2, dtype=kernels.accumulation_dtype(first.dtype), device=first.device)
        both_U2 = _by_groups(rows, like, functools.partial(_norm_and_mass, uses, norm_method))
        yield both_U2[:, 0], both_U2[:, 1]


def _norm_and_mass(uses: Sequence[Outer], norm_method: NormMethod, units: Group) -> Tensor:
    """Return (G, 2): squared norms and masses of the layers that read one input, of some units."""
    both = norm_method.outer_norms(units.fold(uses[0].input), [units.fold(one.grad) for one in uses])
    return torch.stack(both, 1)


def _by_groups(rows: Rows, like: Tensor, of: Callable[[Group], Tensor]) -> Tensor:
    """Return (U, ...): the value of ``of`` for the units of each group, 0 for a unit without rows."""
    total_U = like.new_zeros(rows.num_units, *like.shape[1:])
    for group in rows.groups:
        total_U[group.unit_G] = of(group)
    return total_U


def _square(x: Outer | Lookup, rows: Rows, norm_method: NormMethod) -> Tensor:
    """Return (U,): the squared norm of one use."""
    if isinstance(x, Outer):
        ((sq_norm_U, _),) = shared_norms([[x]], rows, norm_method)
        return sq_norm_U
    return norm_method.lookup_norms(x.index_BT, x.right_BTR, rows.unit_B, rows.num_units, x.num_entries)


def _cross(x: Outer | Lookup, y: Outer | Lookup, rows: Rows, like: Tensor) -> Tensor:
    """Return (U,): <gradient of one use, gradient of another>, of each unit."""
    return _by_groups(rows, like, lambda group: _inner(x.of(group), y.of(group)))


def _inner(x: Outer | Lookup, y: Outer | Lookup) -> Tensor:
    """Return (G,): <gradient of x in a row, gradient of y in the same row>."""
    if isinstance(x, Outer) and isinstance(y, Outer):
        return kernels.outer_inner(x.left_BTL, x.right_BTR, y.left_BTL, y.right_BTR)
    if isinstance(x, Lookup) and isinstance(y, Outer):
        return kernels.lookup_outer_inner(x.index_BT, x.right_BTR, y.left_BTL, y.right_BTR)
    if isinstance(x, Outer):
        return _inner(y, x)
    assert isinstance(x, Lookup) and isinstance(y, Lookup)
    return kernels.lookup_inner(x.index_BT, x.right_BTR, y.index_BT, y.right_BTR)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    total, *rest = tensors
    for tensor in rest:
        total = total + tensor
    return total

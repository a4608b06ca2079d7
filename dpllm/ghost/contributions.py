"""The contribution of one use of a parameter to the gradient of each unit, in the cheapest exact form.

A parameter's gradient is the sum over its *uses* in the forward pass: a tied embedding contributes once as a lookup and
once as a matrix product. A layer's rule describes a use as one of

* `Outer`:        sum_t left[b, t] (x) right[b, t]          matrices: linear layers;
* `Lookup`:       sum_t onehot(index[b, t]) (x) right[b, t] embeddings;
* `HeadUse`:      an outer product whose left factor is made again: the head of a language model
  (`dpllm.ghost.head_use`);
* `Routed`:       outer products of tokens that meet different matrices: experts (`dpllm.ghost.routed`);
* `RowGradients`: the gradient of each row                  biases, norms, and anything else.

A use is kept as its factors, or as an `Instance`, the gradient of each *unit*, where that takes no more memory (LoRA
factors, narrow layers, units with many rows). Several matrix products with one parameter become one over the tokens of
all of them, and so do several lookups. `add_weighted_` forms the clipped sum.

Shape suffixes: B rows, U units, T tokens, L and R the two dimensions of a weight, G units that have equally many rows,
N rows of each of them, P entries of several parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpllm.data.transfer import send_array
from dpllm.ghost import kernels
from dpllm.ghost.head_use import HeadUse
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.routed import Routed
from dpllm.ghost.sums import Sum, Weights

_LAYOUTS = 256  # of microbatches that are remembered
# Small gradients are copied into one tensor: that costs less than the launches it saves, which are dearer on a GPU.
_SMALL_ON_CPU, _SMALL = 1 << 14, 1 << 20  # entries of a parameter
_FLAT_BYTES = 1 << 26  # of one such tensor, and so of the memory that the copies take for a moment


@dataclass(frozen=True)
class Group:
    """Units of a microbatch that have equally many rows.

    Attributes:
        unit_G: the numbers of the units.
        rows_GN: the rows of each.
        in_order: whether these are the first rows of the microbatch, in order; they are then viewed, not copied.
    """

    unit_G: Tensor
    rows_GN: Tensor
    in_order: bool

    def fold(self, x: Tensor) -> Tensor:
        """Lay the rows of a unit end to end, (B, T, ...) to (G, N * T, ...): a sum over rows and tokens is one sum."""
        num_units, rows_each = self.rows_GN.shape
        if not self.in_order:
            x = x[self.rows_GN.flatten()]
        elif len(x) > num_units * rows_each:
            x = x[: num_units * rows_each]
        return x if rows_each == 1 else x.unflatten(0, (num_units, rows_each)).flatten(1, 2)


@dataclass(frozen=True)
class Rows:
    """The unit of each row of a microbatch.

    Attributes:
        unit_B: (B,) int64, the unit of each row; -1 marks a padding row, which belongs to no unit.
        num_units: U.
        groups: the units that have rows, by their number of rows.
        in_order: whether row u is unit u, for all units, and the rows behind them are padding.
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
        parts, in_order = [unit, real, unit[real]], []
        for count in np.unique(counts[counts > 0]) if len(real) else (0,):
            (units,) = np.nonzero(counts == count)
            rows_GN = order[starts[units][:, None] + np.arange(count)]
            in_order.append(np.array_equal(rows_GN.ravel(), np.arange(rows_GN.size)))
            parts += [units, rows_GN]
        sent = send_array(np.concatenate([part.ravel() for part in parts]), device)  # one copy for all
        own_B, real_R, unit_R, *of_groups = (
            part_.view(part.shape) for part, part_ in zip(parts, sent.split([part.size for part in parts]), strict=True)
        )
        groups = tuple(map(Group, of_groups[::2], of_groups[1::2], in_order))
        one_each = np.array_equal(unit[real], np.arange(num_units)) and np.array_equal(real, np.arange(num_units))
        return cls(own_B, num_units, groups, one_each, real, real_R, unit_R)

    @classmethod
    def one_unit(cls, device: torch.device) -> Rows:
        """Return a single row that is a unit."""
        return cls.of(torch.zeros(1, dtype=torch.int64), 1, device)

    @functools.cached_property
    def whole(self) -> Group | None:
        """The group of all units, if all have equally many rows, and these can be viewed."""
        if len(self.groups) == 1 and self.groups[0].in_order and len(self.groups[0].unit_G) == self.num_units:
            return self.groups[0]
        return None

    def sum_rows(self, value_B: Tensor) -> Tensor:
        """Sum the values of each unit's rows, (B, ...) to (U, ...); padding rows are left out."""
        if self.in_order:
            return value_B if len(value_B) == self.num_units else value_B[: self.num_units]
        if len(self.real) < len(value_B):  # the values of padding rows may not be finite
            value_B = value_B.index_select(0, self.real_R)
        return value_B.new_zeros(self.num_units, *value_B.shape[1:]).index_add_(0, self.unit_R, value_B)

    def by_groups(self, of: Callable[[Group], Tensor]) -> Tensor:
        """Return (U, ...): the values (G, ...) of ``of`` for the units of each group, 0 for a unit without rows."""
        if self.whole is not None:
            return of(self.whole)
        parts = [(group.unit_G, of(group)) for group in self.groups]
        total_U = parts[0][1].new_zeros(self.num_units, *parts[0][1].shape[1:])
        for unit_G, value_G in parts:
            total_U[unit_G] = value_G
        return total_U


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
        return rows.sum_rows(kernels.widen(self.value_B))


class Instance:
    """The gradient of each unit, held unchanged.

    Args:
        value_U: (U, *parameter shape), in the accumulation dtype.
    """

    def __init__(self, value_U: Tensor) -> None:
        """Hold it."""
        self._value_U = value_U

    @property
    def value_U(self) -> Tensor:
        """The gradients of the units."""
        return self._value_U

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
        if len(self.value_U) == 1:  # one unit, whose gradient may be as large as the parameter: no copy for its zeros
            factor = weights.factor.to(total.dtype)[0]
            total.take_((self.value_U[0].to(total.dtype) * factor).masked_fill_(factor == 0, 0))
            return
        value_U, factor_U = weights.kept(self.value_U)
        total.take_(torch.tensordot(factor_U.to(total.dtype), value_U.to(total.dtype), dims=1))


class Part(Instance):
    """The gradient of each unit, next to those of other small parameters of one group: one norm and one sum for all.

    Args:
        value_UP: the gradients of all these parameters.
        start: of this one's entries.
        shape: of this one.
        sums: of all these parameters, (P,), once it is computed; a list that they share.
    """

    def __init__(self, value_UP: Tensor, start: int, shape: torch.Size, sums: list[Tensor]) -> None:
        """Remember where it lies."""
        self._value_UP, self._start, self._shape, self._sums = value_UP, start, shape, sums

    @property
    def value_U(self) -> Tensor:
        """The gradients of the units; a view."""
        value_UP = self._value_UP[:, self._start : self._start + self._shape.numel()]
        return value_UP.view(len(value_UP), *self._shape)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_u factor_u g_u``; the first call does so for all."""
        del norm_method
        if not self._sums:
            value_UP, factor_U = weights.kept(self._value_UP)
            self._sums.append(factor_U.to(value_UP.dtype) @ value_UP)
        total.take_(self._sums[0][self._start : self._start + self._shape.numel()].view(self._shape))


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
        if rows.in_order and len(self.left_BTL) == rows.num_units:  # the usual case, at once
            return kernels.wide_bmm(self.left_BTL.mT, self.right_BTR)
        return rows.by_groups(lambda units: kernels.wide_bmm(units.fold(self.left_BTL).mT, units.fold(self.right_BTR)))

    def fold(self) -> Outer:
        """Return the same use with all tokens in a single row."""
        return Outer(_one_row(self.left_BTL), _one_row(self.right_BTR), self.input_side)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``."""
        norm_method.add_weighted_outer_(total, self.left_BTL, self.right_BTR, weights, self.input_side)


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

        def of(units: Group) -> Tensor:
            index_GT, right_GTR = units.fold(self.index_BT), kernels.widen(units.fold(self.right_BTR))
            total = right_GTR.new_zeros(len(right_GTR), self.num_entries, right_GTR.shape[2])
            return total.scatter_add_(1, index_GT[:, :, None].expand_as(right_GTR), right_GTR)

        return rows.by_groups(of)

    def fold(self) -> Lookup:
        """Return the same use with all tokens in a single row."""
        return Lookup(_one_row(self.index_BT), _one_row(self.right_BTR), self.num_entries)

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


def held(use: Use, rows: Rows, norm_method: NormMethod) -> Contribution:
    """Return the form in which a use is kept until the clipped sum: the one that takes less memory.

    Args:
        use: of a parameter.
        rows: the units of the rows.
        norm_method: decides which form that is.
    """
    if isinstance(use, RowGradients) or norm_method.holds_instance(use.factor_bytes(), use.instance_bytes(rows)):
        return Instance(use.instance(rows))
    return use


def merge(contributions: Sequence[Contribution], rows: Rows, norm_method: NormMethod) -> list[Contribution]:
    """Convert the contributions to one parameter to a common form.

    The products with one weight, a sum over tokens each, become one over the tokens of all; so do lookups, and uses of
    a stack of matrices. Instances add up; where one contribution is held as an instance, all of them become one.

    Returns:
        A single contribution, or the two of a table that is both looked up and multiplied with (a tied head).
    """
    kinds = {type(one) for one in contributions}
    if len(contributions) == 1:
        return list(contributions)
    if HeadUse in kinds and kinds <= {HeadUse, Lookup}:
        lookups = [one for one in contributions if isinstance(one, Lookup)]
        heads = [one for one in contributions if isinstance(one, HeadUse)]
        return [*([_joined(lookups)] if lookups else []), *heads]
    if HeadUse in kinds:
        return [Instance(sum_of(one.instance(rows) for one in contributions))]
    joined: list[Contribution] = [one for one in contributions if isinstance(one, Instance)]
    for kind in (Lookup, Outer, Routed):
        of_kind = [one for one in contributions if isinstance(one, kind)]
        if of_kind:
            joined.append(held(_joined(of_kind), rows, norm_method))
    if len(joined) > 1 and any(isinstance(one, Instance | Routed) for one in joined):
        return [Instance(sum_of(one.instance(rows) for one in joined))]
    return joined


def _joined(uses: list) -> Lookup | Outer | Routed:
    """Return uses of one kind as one: a sum over the tokens of all of them."""
    first, *rest = uses
    if not rest:
        return first
    if isinstance(first, Routed):
        return Routed.cat(uses)
    right_BTR = torch.cat([use.right_BTR for use in uses], 1)
    if isinstance(first, Lookup):
        return Lookup(torch.cat([use.index_BT for use in uses], 1), right_BTR, first.num_entries)
    return Outer(torch.cat([use.left_BTL for use in uses], 1), right_BTR, first.input_side)


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
    first = folded[0]
    assert not isinstance(first, HeadUse), "it is folded to an instance"
    one = Rows.one_unit((first.value_U if isinstance(first, Instance) else first.right_BTR).device)
    joined = merge(folded, one, norm_method)
    return merge([c if isinstance(c, Instance) else held(c, one, norm_method) for c in joined], one, norm_method)


def _folded(contribution: Contribution) -> Contribution:
    """Return the same contribution with all tokens in a single row; a head's gradient itself."""
    if not isinstance(contribution, HeadUse):
        return contribution.fold()
    lse_BT = contribution.lse_BT
    rows = Rows.of(torch.zeros(len(lse_BT), dtype=torch.int64), 1, lse_BT.device)
    return Instance(contribution.instance(rows))


def put_side_by_side(contributions: dict[int, list[Contribution]], keys: Iterable[int]) -> list[Tensor]:
    """Copy the small gradients of units into tensors (U, P) of several parameters, of which they become a `Part`.

    Args:
        contributions: of each parameter, by its id, as returned by `merge`; those copied are replaced.
        keys: the parameters of one group.

    Returns:
        The tensors, each of one dtype and device; at most `_FLAT_BYTES` of copies exist at a time with their originals.
    """
    tensors: list[Tensor] = []
    waiting: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for key in keys:
        one = contributions[key][0]
        if isinstance(one, Instance):
            value_U = one.value_U
            most = _SMALL_ON_CPU if value_U.device.type == "cpu" else _SMALL
            if value_U.shape[1:].numel() < most:
                waiting.setdefault((value_U.dtype, value_U.device), []).append((key, value_U))
    for of_kind in waiting.values():
        while len(of_kind) > 1:
            taken = [of_kind.pop()]
            room = _FLAT_BYTES - taken[0][1].nbytes
            while of_kind and room >= of_kind[-1][1].nbytes:
                taken.append(of_kind.pop())
                room -= taken[-1][1].nbytes
            value_UP = torch.cat([kernels.entries(value_U) for _, value_U in taken], 1)
            start, sums = 0, list[Tensor]()
            for key, value_U in taken:
                shape = value_U.shape[1:]
                contributions[key] = [Part(value_UP, start, shape, sums)]
                start += shape.numel()
            tensors.append(value_UP)
    return tensors


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    total, *rest = tensors
    for tensor in rest:
        total = total + tensor
    return total

"""The contribution of one parameter use to each unit's gradient, in the cheapest exact form.

A parameter's gradient is the sum over its *uses* in the forward pass: a tied embedding contributes once as a lookup and
once as a matrix product. A layer's rule describes a use as one of

* `Outer`:        sum_t left[b, t] (x) right[b, t]          matrices: linear layers;
* `Lookup`:       sum_t onehot(index[b, t]) (x) right[b, t] embeddings;
* `HeadUse`:      an outer product whose left factor is recomputed: the head of a language model
  (`dpllm.ghost.chunked_head`);
* `Routed`:       outer products of tokens multiplied by different matrices: experts (`dpllm.ghost.experts`);
* `RowGradients`: the gradient of each row                  biases, norms, and anything else.

A use is kept as its factors, or as an `Instance`, the gradient of each *unit*, if that takes no more memory (LoRA
factors, narrow layers, units with many rows), or little more on a CPU (`NormMethod.holds_instance`). `add_weighted_`
forms the clipped sum; `dpllm.ghost.norms` computes norms.

Shape suffixes: B rows, U units, T tokens, L and R the two dimensions of a weight, G units with equally many rows, N
rows of each of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dpllm.data.transfer import send_array
from dpllm.ghost import kernels
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum, Weights

if TYPE_CHECKING:
    from dpllm.ghost.chunked_head import HeadUse
    from dpllm.ghost.experts import Routed

Use: TypeAlias = "RowGradients | Outer | Lookup | HeadUse | Routed"
"""One use of a parameter, as its tap passes it on."""

Contribution: TypeAlias = "Instance | Outer | Lookup | HeadUse | Routed"
"""One or more uses of a parameter, in the form that is kept until the clipped sum."""

_FLOAT32 = 4  # bytes; gradients are summed in float32 at least
_LAYOUTS = 256  # of microbatches that are remembered
# Small gradients are copied into one tensor: that costs less than the launches it saves, which cost more on a GPU.
_SMALL_ON_CPU, _SMALL = 1 << 14, 1 << 20  # entries of a parameter
_STACKED, _FACTORS = 1 << 16, 4  # entries of factors that are copied together; times the entries of gradients
_STACKED_OUTER, _STACKED_WEIGHTS = 1 << 18, 1 << 20  # entries of a `StackedOuter`'s factors, and of its weights
_GRAMS = 1 << 20  # entries of Gram matrices that exist at a time, and those of one stack
_FLAT_BYTES = 1 << 26  # of one such tensor, and so of the memory that the copies take for a moment


@dataclass(frozen=True)
class Group:
    """Units of a microbatch with equally many rows.

    Attributes:
        unit_G: the indices of the units.
        rows_GN: the rows of each unit.
        in_order: whether these are the first rows of the microbatch, in order; they are then viewed, not copied.
    """

    unit_G: Tensor
    rows_GN: Tensor
    in_order: bool

    def fold(self, x: Tensor, dim: int = 0) -> Tensor:
        """Lay the rows of a unit end to end, (B, T, ...) to (G, N * T, ...), so that a sum over both is one sum.

        Args:
            x: the rows.
            dim: the row dimension of ``x``, before the token dimension.
        """
        num_units, rows_each = self.rows_GN.shape
        if not self.in_order:
            x = x.index_select(dim, self.rows_GN.flatten())
        elif x.shape[dim] > num_units * rows_each:
            x = x.narrow(dim, 0, num_units * rows_each)
        return x if rows_each == 1 else x.unflatten(dim, (num_units, rows_each)).flatten(dim + 1, dim + 2)


@dataclass(frozen=True)
class Rows:
    """The unit of each row of a microbatch.

    Attributes:
        unit_B: (B,) int64, the unit of each row; -1 marks a padding row, which belongs to no unit.
        num_units: U.
        groups: the units that have rows, by their number of rows.
        in_order: whether row u is unit u, for all units, and the remaining rows are padding.
        real: the indices of the rows that belong to a unit, ascending; known to the host.
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
            unit_B: preferably on the CPU, since reading it from a GPU waits for the GPU.
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
        """Return a single row that forms a unit."""
        return cls.of(torch.zeros(1, dtype=torch.int64), 1, device)

    @functools.cached_property
    def whole(self) -> Group | None:
        """The group of all units, if all have equally many rows, and these can be viewed."""
        if len(self.groups) == 1 and self.groups[0].in_order and len(self.groups[0].unit_G) == self.num_units:
            return self.groups[0]
        return None

    def sum_rows(self, value_B: Tensor) -> Tensor:
        """Sum the values of each unit's rows, (B, ...) to (U, ...), without padding rows."""
        if self.in_order:
            return value_B if len(value_B) == self.num_units else value_B[: self.num_units]
        if len(self.real) < len(value_B):  # the values of padding rows may not be finite
            value_B = value_B.index_select(0, self.real_R)
        return value_B.new_zeros(self.num_units, *value_B.shape[1:]).index_add_(0, self.unit_R, value_B)

    def by_groups(self, of: Callable[[Group], Tensor]) -> Tensor:
        """Return (U, ...): ``of``'s values (G, ...) for the units of each group, 0 for a unit without rows."""
        if self.whole is not None:
            return of(self.whole)
        parts = [(group.unit_G, of(group)) for group in self.groups]
        total_U = parts[0][1].new_zeros(self.num_units, *parts[0][1].shape[1:])
        for unit_G, value_G in parts:
            total_U[unit_G] = value_G
        return total_U


class Layouts:
    """The `Rows` of recent microbatches, since most have the units 0, 1, 2, …."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._known: dict[tuple, Rows] = {}

    def of(self, unit_B: Tensor, num_units: int, device: torch.device) -> Rows:
        """Return `Rows.of`; equal units get the same object."""
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
        """Return the units' gradients."""
        return rows.sum_rows(kernels.widen(self.value_B))


@dataclass(frozen=True)
class Instance:
    """The gradient of each unit.

    Attributes:
        value_U: (U, *parameter shape), in the accumulation dtype.
    """

    value_U: Tensor

    @property
    def is_small(self) -> bool:
        """Whether it is copied next to those of other parameters."""
        return _is_small(self.value_U.shape[1:].numel(), self.value_U.device)

    def instance(self, rows: Rows) -> Tensor:
        """Return the units' gradients."""
        return self.value_U

    def fold(self) -> Instance:
        """Return itself, since it belongs to one unit."""
        return self

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_u factor_u g_u``."""
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
        right_BTR: factor along its second dimension.
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

    @functools.cached_property
    def like(self) -> tuple:
        """A key that is equal for uses of equal shapes and dtypes on one device."""
        left, right = self.left_BTL, self.right_BTR
        return left.shape, right.shape, left.dtype, right.dtype, left.device

    def is_small(self, rows: Rows) -> bool:
        """Return whether the units' gradients are formed later, together with other parameters', to save launches.

        Until then the factors are kept: they are small, and at most `_FACTORS` times as large as the gradients.
        """
        num_rows, _, width = self.left_BTL.shape
        entries = width * self.right_BTR.shape[2]
        factors = self.left_BTL.numel() + self.right_BTR.numel()
        return (
            rows.in_order
            and num_rows == rows.num_units
            and factors <= min(_STACKED, _FACTORS * num_rows * entries)
            and _is_small(entries, self.left_BTL.device)
        )

    def factor_bytes(self) -> int:
        """Return the bytes of the factors."""
        return self.left_BTL.nbytes + self.right_BTR.nbytes

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the units' gradients would take."""
        entries = rows.num_units * self.left_BTL.shape[2] * self.right_BTR.shape[2]
        return entries * max(_FLOAT32, self.left_BTL.element_size())

    def instance(self, rows: Rows) -> Tensor:
        """Return the units' gradients (U, L, R)."""
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
        """Return the bytes that the units' gradients would take."""
        entries = rows.num_units * self.num_entries * self.right_BTR.shape[2]
        return entries * max(_FLOAT32, self.right_BTR.element_size())

    def instance(self, rows: Rows) -> Tensor:
        """Return the units' gradients (U, V, R)."""

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
        weighted = self.right_BTR.to(total.dtype) * weights.factor.to(total.dtype)[:, None, None]
        weighted.masked_fill_((weights.factor == 0)[:, None, None], 0)  # 0 * inf is NaN; a selection would wait
        total.filled().index_add_(0, self.index_BT.flatten(), weighted.flatten(0, 1))

    def mass(self) -> Tensor:
        """Return (B,): sum_t |right_t|, the scale of the norms' and sums' rounding error."""
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)
        return torch.linalg.vector_norm(self.right_BTR, dim=2, dtype=dtype).sum(1)


@dataclass(frozen=True)
class Flat:
    """The units' gradients for several small parameters, next to each other: one norm and one sum for all.

    Attributes:
        value_UP: the gradients.
        shapes: the shape of each parameter, by its id, in the order of the entries.
        group: the parameters' group.
    """

    value_UP: Tensor
    shapes: dict[int, torch.Size]
    group: int = 0

    @property
    def parameters(self) -> Iterable[int]:
        """The ids of the parameters."""
        return self.shapes

    @classmethod
    def of_products(cls, uses: dict[int, Outer], group: int) -> Flat:
        """Form the gradients of parameters, by their ids, from uses of equal shapes and dtypes, one row per unit."""
        left_NTL, right_NTR = (
            torch.stack(factors, 1).flatten(0, 1)
            for factors in zip(*((use.left_BTL, use.right_BTR) for use in uses.values()), strict=True)
        )
        value_NLR = kernels.wide_bmm(left_NTL.mT, right_NTR)
        return cls(value_NLR.view(len(value_NLR) // len(uses), -1), dict.fromkeys(uses, value_NLR.shape[1:]), group)

    def sums(self, weights: Callable[[int], Weights]) -> dict[int, Tensor]:
        """Return the weighted sum of each parameter's gradients, by its id, as views of one tensor.

        Args:
            weights: of the units, by the number of a group.
        """
        value_UP, factor_U = weights(self.group).kept(self.value_UP)
        sums = (factor_U.to(value_UP.dtype) @ value_UP).split([shape.numel() for shape in self.shapes.values()])
        return {key: sum_P.view(shape) for (key, shape), sum_P in zip(self.shapes.items(), sums, strict=True)}


@dataclass(frozen=True)
class StackedOuter:
    """Matrix products of equal shapes, several next to each other: one norm and one sum for all.

    Layers that read one input form one product with adjacent output gradients: their gradients' squared norms add up,
    and its sum contains their sums.

    Attributes:
        input_SUTD: the inputs, with the rows of a unit end to end.
        grad_SUTP: the output gradients, with those of layers with one input next to each other.
        keys: the ids of the parameters of each product.
        widths: the widths of the layers with one input.
        groups: the groups of each product's parameters.
        input_side: see `Outer`.
    """

    input_SUTD: Tensor
    grad_SUTP: Tensor
    keys: list[tuple[int, ...]]
    widths: tuple[int, ...]
    groups: list[int]
    input_side: str

    @property
    def parameters(self) -> Iterable[int]:
        """The ids of the parameters."""
        return itertools.chain(*self.keys)

    def sums(self, weights: Callable[[int], Weights]) -> dict[int, Tensor]:
        """Return the weighted sum of each parameter's gradients, as `Flat.sums`."""
        dtype = kernels.accumulation_dtype(self.input_SUTD.dtype)
        x_SUTD, grad_SUTP = self.input_SUTD.to(dtype), self.grad_SUTP.to(dtype)
        of_groups = {group: weights(group) for group in self.groups}
        if len(of_groups) == 1:
            factor_SU = of_groups[self.groups[0]].factor.to(dtype)[None]
        else:
            factor_SU = torch.stack([of_groups[group].factor for group in self.groups]).to(dtype)
        factor_SU11 = factor_SU[..., None, None]
        if not all(of_group.all_count for of_group in of_groups.values()):  # 0 * inf would be NaN
            x_SUTD, grad_SUTP = (x.masked_fill(factor_SU11 == 0, 0) for x in (x_SUTD, grad_SUTP))
        x_SND, grad_SNP = (x_SUTD * factor_SU11).flatten(1, 2), grad_SUTP.flatten(1, 2)
        left, right, dim = (x_SND, grad_SNP, 1) if self.input_side == "left" else (grad_SNP, x_SND, 0)
        parts = itertools.chain(*(total.split(self.widths, dim) for total in torch.bmm(left.mT, right).unbind()))
        return dict(zip(self.parameters, parts, strict=True))


def stacked(
    uses: dict[int, Outer], groups: Mapping[int, int], rows: Rows, norm_method: NormMethod
) -> list[StackedOuter]:
    """Stack uses of equal shapes if copies cost less than the launches that they save; remove them from ``uses``.

    Args:
        uses: by the ids of the parameters, each the only use of its parameter.
        groups: the number of each parameter's group, by its id; 0 if it has no entry.
        rows: the units of the rows.
        norm_method: how norms are computed.
    """
    units = rows.whole
    if units is None:
        return []
    sharing: dict[tuple, list[int]] = {}  # parameters whose layers read one input
    for key, use in uses.items():
        x = use.input
        if kernels.is_small(x):
            kind = groups.get(key, 0), use.input_side, x.data_ptr(), x.shape, x.stride(), x.dtype, use.grad.dtype
            sharing.setdefault(kind, []).append(key)
    alike: dict[tuple, list[tuple[int, ...]]] = {}
    for keys in sharing.values():
        first, widths = uses[keys[0]], tuple([uses[key].grad.shape[2] for key in keys])
        alike.setdefault((*first.like, first.input_side, widths), []).append(tuple(keys))
    stacks = []
    for (*_, input_side, widths), products in alike.items():
        first = uses[products[0][0]]
        x_UTD, outputs = units.fold(first.input), sum(widths)
        most = min(
            _STACKED_OUTER // max(1, x_UTD[..., 0].numel() * max(*x_UTD.shape[1:], outputs)),
            _STACKED_WEIGHTS // max(1, x_UTD.shape[2] * outputs),
        )
        if most == 0 or not norm_method.stacks(x_UTD, first.grad, outputs):
            continue
        for start in range(0, len(products), most):
            some = products[start : start + most]
            inputs = [uses[keys[0]].input for keys in some]
            grads = [uses.pop(key).grad for keys in some for key in keys]
            if len(widths) == 1:
                both = _stack(inputs), _stack(grads)
            else:
                both = _stack(inputs), torch.cat(grads, 2).unflatten(2, (len(some), outputs)).movedim(2, 0).contiguous()
            x_SUTD, grad_SUTP = (units.fold(x_SBTk, 1) for x_SBTk in both)
            of_groups = [groups.get(keys[0], 0) for keys in some]
            stacks.append(StackedOuter(x_SUTD, grad_SUTP, some, widths, of_groups, input_side))
    return stacks


def joint_norms(stacks: Sequence[StackedOuter]) -> Iterator[tuple[int, Tensor, Tensor, float]]:
    """Yield norms (U,), masses (U,), the multiple that is their slack, and the group, jointly or per product.

    Args:
        stacks: of the same units.
    """
    lots: dict[tuple[float, int], list[list[StackedOuter]]] = {}  # encoder and decoder have different tokens
    for stack in stacks:
        slack, tokens = kernels.rounding_slack(stack.input_SUTD.dtype), stack.input_SUTD.shape[2]
        some = lots.setdefault((slack, tokens), [[]])
        if sum(one.input_SUTD.shape[:2].numel() for one in some[-1]) * tokens**2 > _GRAMS:
            some.append([])
        some[-1].append(stack)
    for (slack, _), some in lots.items():
        for lot in some:
            pairs = [(stack.input_SUTD.flatten(0, 1), stack.grad_SUTP.flatten(0, 1)) for stack in lot]
            num_units, groups = lot[0].input_SUTD.shape[1], [group for stack in lot for group in stack.groups]
            sq_norm_SU, mass_SU = (x.view(len(groups), num_units) for x in kernels.joint_gram_norms(pairs))
            if len(set(groups)) == 1:
                yield groups[0], sq_norm_SU.sum(0), mass_SU.sum(0), slack
            else:
                yield from zip(groups, sq_norm_SU, mass_SU, itertools.repeat(slack))


def formed_together(uses: dict[int, Outer], group: int) -> Iterator[Flat]:
    """Form the gradients of parameters, by their ids, with few launches; empties the dictionary.

    Args:
        uses: of equal shapes and dtypes, in which one row is one unit.
        group: of the parameters.
    """
    first = next(iter(uses.values()))
    most = max(1, _STACKED // (first.left_BTL.numel() + first.right_BTR.numel()))
    del first
    while uses:
        yield Flat.of_products(dict(uses.popitem() for _ in range(min(most, len(uses)))), group)


def side_by_side(flats: list[Flat]) -> Iterator[Flat]:
    """Yield the same gradients in few tensors, each of one dtype and device; empties the list.

    At most `_FLAT_BYTES` of copies exist at a time with their originals.
    """
    alike: dict[tuple, list[Flat]] = {}
    while flats:
        flat = flats.pop()
        alike.setdefault((flat.value_UP.dtype, flat.value_UP.device), []).append(flat)
    for waiting in alike.values():
        while waiting:
            taken = [waiting.pop()]
            room = _FLAT_BYTES - taken[0].value_UP.nbytes
            while waiting and room >= waiting[-1].value_UP.nbytes:
                taken.append(waiting.pop())
                room -= taken[-1].value_UP.nbytes
            value_UP = torch.cat([one.value_UP for one in taken], 1) if len(taken) > 1 else taken[0].value_UP
            yield Flat(value_UP, {key: shape for one in taken for key, shape in one.shapes.items()}, taken[0].group)


def _is_small(entries: int, device: torch.device) -> bool:
    return entries < (_SMALL_ON_CPU if device.type == "cpu" else _SMALL)


def _stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


def _one_row(x: Tensor) -> Tensor:
    """Reshape (B, T, ...) to (1, B * T, ...)."""
    return x.flatten(0, 1)[None]


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors."""
    return functools.reduce(operator.add, tensors)

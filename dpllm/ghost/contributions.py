"""What one use of a parameter adds to the gradient of each row, in the cheapest exact form.

A parameter's gradient for row b is the sum of what its *uses* in the forward pass contribute: a tied embedding
contributes once as a lookup and once as a matrix product. Three forms cover everything:

* `Outer`:    sum_t left[b, t] (x) right[b, t]          matrices: linear layers;
* `Lookup`:   sum_t onehot(index[b, t]) (x) right[b, t] embeddings;
* `Instance`: the per-row gradient itself               biases, norms, LoRA factors, and anything else.

`squared_norms` adds up all pairs of contributions and, for a unit with several rows, all pairs of rows: the cross terms
are part of the norm. `add_weighted` forms the clipped sum.

Shape suffixes: B rows, U units, T tokens, L and R the two dimensions of a weight, N pairs of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpllm.ghost import kernels


@dataclass(frozen=True)
class Rows:
    """Which unit each row of a microbatch belongs to.

    Attributes:
        unit_B: (B,) int64, the unit of each row; -1 marks a padding row, which belongs to no unit.
        num_units: U.
        pairs: None when no unit has several rows; else (first_N, second_N, weight_N): every pair of rows of one unit
            once, with weight 2 where the rows differ.
    """

    unit_B: Tensor
    num_units: int
    pairs: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, unit_B: Tensor, num_units: int) -> Rows:
        """Find the pairs of rows that share a unit."""
        same_BB = (unit_B[:, None] == unit_B[None, :]) & (unit_B >= 0)[:, None]
        first_N, second_N = torch.nonzero(torch.triu(same_BB), as_tuple=True)
        if first_N.numel() == int((unit_B >= 0).sum()):
            return cls(unit_B, num_units, None)
        return cls(unit_B, num_units, (first_N, second_N, 1 + (first_N != second_N).to(torch.float32)))

    def sum_rows(self, value_B: Tensor) -> Tensor:
        """Add what each row carries to its unit, (B, ...) to (U, ...); padding rows are left out."""
        keep_B = self.unit_B >= 0
        total = value_B.new_zeros(self.num_units, *value_B.shape[1:])
        return total.index_add_(0, self.unit_B[keep_B], value_B[keep_B])


@dataclass(frozen=True)
class Instance:
    """The gradient of each row, held as it is: (B, *parameter shape)."""

    value_B: Tensor

    @property
    def grad(self) -> Tensor:
        """What came back from the loss, rows first."""
        return self.value_B

    def instance(self) -> Tensor:
        """The per-row gradients (B, *parameter shape) in the accumulation dtype."""
        return self.value_B

    def fold(self) -> Instance:
        """The same, of a single row that stands for all of them."""
        return Instance(self.value_B.sum(0, keepdim=True, dtype=kernels.accumulation_dtype(self.value_B.dtype)))

    def select(self, rows: Tensor) -> Instance:
        """Keep the given rows."""
        return Instance(self.value_B[rows])

    def add_weighted_(self, total: Tensor, factor_B: Tensor) -> None:
        """``total += sum_b factor_b g_b``."""
        total += torch.tensordot(factor_B.to(total.dtype), self.value_B.to(total.dtype), dims=1)


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
        """Equal for layers that read the same activation."""
        x = self.input
        return x.data_ptr(), x.shape, x.stride(), x.dtype

    def prefers_instance(self) -> bool:
        """Whether the instance takes no more memory than the factors; it is then no dearer than their Gram norm."""
        tokens, left, right = self.left_BTL.shape[1], self.left_BTL.shape[2], self.right_BTR.shape[2]
        instance_bytes = left * right * kernels.accumulation_dtype(self.left_BTL.dtype).itemsize
        factor_bytes = tokens * (left * self.left_BTL.element_size() + right * self.right_BTR.element_size())
        return instance_bytes <= factor_bytes

    def instance(self) -> Tensor:
        """The per-row gradients (B, L, R)."""
        dtype = kernels.accumulation_dtype(self.left_BTL.dtype)
        return torch.bmm(self.left_BTL.to(dtype).mT, self.right_BTR.to(dtype))

    def fold(self) -> Outer:
        """The same, of a single row that has the tokens of all of them."""
        return Outer(_one_row(self.left_BTL), _one_row(self.right_BTR), self.input_side)

    def select(self, rows: Tensor) -> Outer:
        """Keep the given rows."""
        return Outer(self.left_BTL[rows], self.right_BTR[rows], self.input_side)

    def add_weighted_(self, total: Tensor, factor_B: Tensor) -> None:
        """``total += sum_b factor_b g_b``."""
        kernels.add_weighted_outer_(total, self.left_BTL, self.right_BTR, factor_B)

    def mass(self) -> Tensor:
        """(B,): sum_t |left_t| |right_t|, the scale of the rounding error of norms and sums."""
        dtype = kernels.accumulation_dtype(self.left_BTL.dtype)
        left, right = (torch.linalg.vector_norm(x, dim=2, dtype=dtype) for x in (self.left_BTL, self.right_BTR))
        return (left * right).sum(1)


@dataclass(frozen=True)
class Lookup:
    """Gradient of a table lookup: ``right_BTR`` goes to row ``index_BT`` of the table of ``num_entries`` rows."""

    index_BT: Tensor
    right_BTR: Tensor
    num_entries: int

    @property
    def grad(self) -> Tensor:
        """What came back from the loss, rows first."""
        return self.right_BTR

    def prefers_instance(self) -> bool:
        """Whether the table is no longer than the sequence."""
        return self.num_entries <= self.index_BT.shape[1]

    def instance(self) -> Tensor:
        """The per-row gradients (B, V, R)."""
        rows, _, width = self.right_BTR.shape
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)
        total = torch.zeros(rows, self.num_entries, width, dtype=dtype, device=self.right_BTR.device)
        return total.scatter_add_(1, self.index_BT[:, :, None].expand(-1, -1, width), self.right_BTR.to(dtype))

    def fold(self) -> Lookup:
        """The same, of a single row that has the tokens of all of them."""
        return Lookup(_one_row(self.index_BT), _one_row(self.right_BTR), self.num_entries)

    def select(self, rows: Tensor) -> Lookup:
        """Keep the given rows."""
        return Lookup(self.index_BT[rows], self.right_BTR[rows], self.num_entries)

    def add_weighted_(self, total: Tensor, factor_B: Tensor) -> None:
        """``total += sum_b factor_b g_b``."""
        weighted = self.right_BTR.to(total.dtype) * factor_B.to(total.dtype)[:, None, None]
        total.index_add_(0, self.index_BT.flatten(), weighted.flatten(0, 1))

    def mass(self) -> Tensor:
        """(B,): sum_t |right_t|, the scale of the rounding error of norms and sums."""
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)
        return torch.linalg.vector_norm(self.right_BTR, dim=2, dtype=dtype).sum(1)

    def unit_squared_norms(self, rows: Rows) -> Tensor:
        """(U,): equal tokens of one unit are added up first, by their sorted (unit, token) keys, then squared."""
        dtype = kernels.accumulation_dtype(self.right_BTR.dtype)
        keep_B = rows.unit_B >= 0
        unit_B = rows.unit_B[keep_B]
        key_BT = unit_B[:, None] * self.num_entries + self.index_BT[keep_B]
        keys, slot = torch.unique(key_BT.flatten(), return_inverse=True)
        slots = torch.zeros(keys.numel(), self.right_BTR.shape[2], dtype=dtype, device=self.right_BTR.device)
        slots.index_add_(0, slot, self.right_BTR[keep_B].to(dtype).flatten(0, 1))
        total_U = torch.zeros(rows.num_units, dtype=dtype, device=slots.device)
        return total_U.index_add_(0, keys // self.num_entries, slots.square().sum(1))


Contribution = Instance | Outer | Lookup


def _one_row(x: Tensor) -> Tensor:
    """(B, T, ...) to (1, B * T, ...)."""
    return x.flatten(0, 1)[None]


def _pair_inner(x: Outer | Lookup, y: Outer | Lookup, first_N: Tensor | slice, second_N: Tensor | slice) -> Tensor:
    """(N,): <gradient of x in row first_n, gradient of y in row second_n>."""
    if isinstance(x, Outer) and isinstance(y, Outer):
        return kernels.outer_inner(
            x.left_BTL[first_N], x.right_BTR[first_N], y.left_BTL[second_N], y.right_BTR[second_N]
        )
    if isinstance(x, Lookup) and isinstance(y, Outer):
        return kernels.lookup_outer_inner(
            x.index_BT[first_N], x.right_BTR[first_N], y.left_BTL[second_N], y.right_BTR[second_N]
        )
    if isinstance(x, Outer):
        return _pair_inner(y, x, second_N, first_N)
    assert isinstance(x, Lookup) and isinstance(y, Lookup)
    same_NTS = x.index_BT[first_N][:, :, None] == y.index_BT[second_N][:, None, :]
    dtype = kernels.accumulation_dtype(x.right_BTR.dtype)
    products = torch.bmm(x.right_BTR[first_N].to(dtype), y.right_BTR[second_N].to(dtype).mT)
    return (products * same_NTS).sum((1, 2))


def _unit_inner(x: Outer | Lookup, y: Outer | Lookup, rows: Rows) -> Tensor:
    """(U,): <gradient of x for the unit, gradient of y for the unit>, over all ordered pairs of its rows."""
    if x is y and isinstance(x, Lookup):
        return x.unit_squared_norms(rows)
    if rows.pairs is None:
        every = slice(None)  # a view: indexing with row numbers would copy the head's output gradient
        return rows.sum_rows(_pair_inner(x, y, every, every))
    first_N, second_N, weight_N = rows.pairs
    if x is not y:
        mirrored = first_N != second_N
        first_N, second_N = (
            torch.cat([first_N, second_N[mirrored]]),
            torch.cat([second_N, first_N[mirrored]]),
        )
        weight_N = torch.ones_like(first_N)
    total_U: Tensor | None = None
    step = max(
        1, rows.unit_B.numel()
    )  # no more pairs at a time than rows, so that copies stay as large as the microbatch
    for start in range(0, first_N.numel(), step):
        here = slice(start, start + step)
        inner_N = _pair_inner(x, y, first_N[here], second_N[here])
        if total_U is None:
            total_U = inner_N.new_zeros(rows.num_units)
        total_U.index_add_(0, rows.unit_B[first_N[here]], inner_N * weight_N[here].to(inner_N.dtype))
    assert total_U is not None, "there are pairs"
    return total_U


def merge(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Bring the contributions to one parameter into a common form.

    Instances simply add up; where one contribution is held as an instance, or all prefer it, all of them become one.
    """
    if len(contributions) == 1 and isinstance(contributions[0], Instance):
        return list(contributions)
    if any(isinstance(c, Instance) or c.prefers_instance() for c in contributions):
        total = contributions[0].instance()
        for contribution in contributions[1:]:
            total = total + contribution.instance()
        return [Instance(total)]
    return list(contributions)


def join(held: Sequence[Contribution], more: Sequence[Contribution]) -> list[Contribution]:
    """Bring together what the rows of one unit contribute to one parameter in several passes, as of a single row.

    A sum over rows of sums over tokens is one sum over tokens. It is held in factors, or as the gradient itself as soon
    as that takes less memory, however many rows follow.

    Args:
        held: what `join` returned for the passes before; empty at first.
        more: every use of the parameter in one more pass.
    """
    folded = [*held, *(contribution.fold() for contribution in more)]
    outers = [c for c in folded if isinstance(c, Outer)]
    lookups = [c for c in folded if isinstance(c, Lookup)]
    joined: list[Contribution] = [c for c in folded if isinstance(c, Instance)]
    if outers:
        lefts, rights = [c.left_BTL for c in outers], [c.right_BTR for c in outers]
        joined.append(Outer(torch.cat(lefts, 1), torch.cat(rights, 1), outers[0].input_side))
    if lookups:
        indexes, rights = [c.index_BT for c in lookups], [c.right_BTR for c in lookups]
        joined.append(Lookup(torch.cat(indexes, 1), torch.cat(rights, 1), lookups[0].num_entries))
    return merge(joined)


def squared_norms(contributions: Sequence[Contribution], rows: Rows) -> tuple[Tensor, Tensor]:
    """Squared norm of each unit's gradient of one parameter, cross terms included.

    Args:
        contributions: every use of the parameter, as returned by `merge`.
        rows: the units of the rows.

    Returns:
        ``(sq_norm_U, slack_U)``: the squared norms, and what rounding may have taken from them or add to the clipped
        sum.
    """
    if isinstance(contributions[0], Instance):
        value_B = contributions[0].value_B
        if rows.pairs is None:  # a row is a unit: nothing to add up before squaring
            sq_norm_U = rows.sum_rows(kernels.squared_norms(value_B))
            return sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype) * sq_norm_U
        # The sum is formed row by row, after scaling; where a unit's rows cancel, it rounds otherwise than the norm.
        mass_U = rows.sum_rows(kernels.squared_norms(value_B).sqrt())
        sq_norm_U = kernels.squared_norms(rows.sum_rows(value_B))
        return sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype) * mass_U.square()
    factored = [c for c in contributions if not isinstance(c, Instance)]
    assert len(factored) == len(contributions), "merge() leaves no mixture of instances and factors"
    sq_norm_U = sum_of(_unit_inner(c, c, rows) for c in factored)
    for i, x in enumerate(factored):
        for y in factored[:i]:
            sq_norm_U = sq_norm_U + 2 * _unit_inner(x, y, rows)
    mass_U = rows.sum_rows(sum_of(c.mass() for c in factored))
    return sq_norm_U, kernels.rounding_slack(sq_norm_U.dtype) * mass_U.square()


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of one or more tensors."""
    total, *rest = tensors
    for tensor in rest:
        total = total + tensor
    return total

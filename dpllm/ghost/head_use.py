"""The gradient per unit of a trained head that is computed in chunks (`dpllm.ghost.chunked_head`).

A row's gradient is ``sum_t u_t g_t (x) h_t``: u the gradient of the token's loss, g that of the loss with respect to
the head's products, h the hidden state. It is an outer product whose left factor, (T, V), is not kept. The forward pass
computes its Gram matrix g g^T, and `HeadUse` makes the factor again, chunk by chunk, for the clipped sum.

Norms and sums hold the same numbers: g is rounded to the dtype of h, u_t h_t / max_s |u_s| too, and both are made again
by the same products of the same shapes. Rounding therefore takes no unit above the clip norm.

Shape suffixes: B rows, U units, T tokens of a row, S tokens of a lookup, N rows of a unit, D width of a hidden state, V
vocabulary, C entries of a chunk of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.chunked_head import Head, places
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum, Weights

if TYPE_CHECKING:
    from dpllm.ghost.contributions import Lookup, Rows

_MAX_TERMS = 128  # of an inner product that are added in one go; see `dpllm.ghost.kernels`
_MAX_BLOCKS = 1 << 24  # entries of partial sums that exist at a time


def inner_products(x_TD: Tensor, y_SD: Tensor) -> Tensor:
    """Return all inner products (T, S), of which at most 128 terms are added in one go, and those sums pairwise."""
    step = _MAX_TERMS * max(1, _MAX_BLOCKS // max(1, len(x_TD) * len(y_SD)))
    total: Tensor | None = None
    for start in range(0, max(1, x_TD.shape[1]), step):
        blocks = []
        for one in (x_TD, y_SD):
            part = one[:, start : start + step]
            blocks.append(F.pad(part, (0, -part.shape[1] % _MAX_TERMS)).unflatten(1, (-1, _MAX_TERMS)).transpose(0, 1))
        part_TS = kernels.wide_bmm(blocks[0], blocks[1].mT).sum(0)
        total = part_TS if total is None else total.add_(part_TS)
    assert total is not None, "one step at least"
    return total


def picked(x_CN: Tensor, index_S: Tensor, start: int) -> Tensor:
    """Return (S, N): the rows of a chunk at these entries of the vocabulary; 0 for entries of other chunks."""
    at_S1, inside_S1 = places(index_S, start, len(x_CN))
    return x_CN[at_S1[:, 0]].where(inside_S1, 0)


@dataclass(frozen=True)
class HeadUse:
    """Gradient of a trained head: ``scale_b sum_t g_bt (x) right_bt``, where g is made again from the hidden states.

    The weight is read for this after the backward pass. An engine that shards the weight may have freed it by then; its
    heads take the ordinary path, with the gradient of all logits.

    Attributes:
        head: the weight's values and the formula.
        hidden_BTD: the hidden states.
        target_BT: the labels.
        upstream_BT: u, the gradient from the loss.
        lse_BT: the logarithm of the sum of all exponentials.
        size_BT: |g_t|.
        gram_BTT: g g^T of each row; None: norms are computed by tiles of the gradient.
        picks_BTS: ``g[t, index[s]]`` for the cross terms with a lookup; None: those are computed by tiles.
        index_BS: the entries of ``picks_BTS``.
    """

    head: Head
    hidden_BTD: Tensor
    target_BT: Tensor
    upstream_BT: Tensor
    lse_BT: Tensor
    size_BT: Tensor
    gram_BTT: Tensor | None
    picks_BTS: Tensor | None
    index_BS: Tensor | None

    @functools.cached_property
    def scale_B(self) -> Tensor:
        """The largest |u| of a row."""
        return self.upstream_BT.abs().amax(1)

    @functools.cached_property
    def right_BTD(self) -> Tensor:
        """Return u_t h_t / scale, in the dtype of h."""
        ratio_BT = self.upstream_BT / self.scale_B.where(self.scale_B != 0, 1)[:, None]
        return (self.hidden_BTD.to(ratio_BT.dtype) * ratio_BT[..., None]).to(self.hidden_BTD.dtype)

    @property
    def grad(self) -> Tensor:
        """The gradient from the loss, rows first."""
        return self.upstream_BT

    def factor_bytes(self) -> int:
        """Return the bytes of what is kept."""
        kept = (self.hidden_BTD, self.right_BTD, self.gram_BTT, self.picks_BTS)
        return sum(one.nbytes for one in kept if one is not None)

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the gradients of the units would take."""
        return rows.num_units * self.head.weight_VD.numel() * self.lse_BT.dtype.itemsize

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units (U, V, D)."""
        total_U = self.lse_BT.new_zeros(rows.num_units, *self.head.weight_VD.shape)
        for unit, members in _units(rows):
            for chunk, tile_CD in _tiles([self], members):
                total_U[:, chunk].index_copy_(0, unit, tile_CD[None])
        return total_U

    def mass(self) -> Tensor:
        """Return (B,): sum_t |u_t| |g_t| |h_t|, the scale of the rounding error of norms and sums."""
        least = math.sqrt(kernels.least_square(self.lse_BT.dtype))
        right_BT = torch.linalg.vector_norm(self.right_BTD, dim=2, dtype=self.lse_BT.dtype)
        return self.scale_B * (self.size_BT.clamp_min(least) * right_BT.clamp_min(least)).sum(1)

    def factors(self, row: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the chunks of the vocabulary, and g (T, C) of each, of one row."""
        hidden = self.hidden_BTD[row].clone()  # as in the forward pass
        for chunk in self.head.chunks(len(hidden)):
            yield chunk, self.head.gradient(hidden, self.lse_BT[row], self.target_BT[row], chunk)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``. The logits are made again."""
        del norm_method
        values = self.hidden_BTD, self.target_BT, self.upstream_BT, self.lse_BT
        hidden, target, upstream, lse, factor_B = weights.kept(*values)
        kept = dataclasses.replace(self, hidden_BTD=hidden, target_BT=target, upstream_BT=upstream, lse_BT=lse)
        factor_B = factor_B.to(total.dtype) * kept.scale_B.to(total.dtype)
        filled = total.filled()
        for b in range(len(factor_B)):
            for chunk, g_TC in kept.factors(b):
                kernels.add_weighted_outer_(filled[chunk], g_TC[None], kept.right_BTD[b : b + 1], factor_B[b : b + 1])

    def bias_gradients(self) -> Tensor:
        """Return (B, V): the gradient of the bias of each row, sum_t u_t g_t."""
        value_BV = self.lse_BT.new_empty(len(self.lse_BT), self.head.vocabulary)
        with kernels.exact_matmul():
            for b, upstream_T in enumerate(self.upstream_BT):
                for chunk, g_TC in self.factors(b):
                    value_BV[b, chunk] = (g_TC.to(value_BV.dtype) * upstream_T[:, None]).sum(0)
        return value_BV

    def gram_norms(self, lookups: Sequence[Lookup]) -> Tensor | None:
        """Return (B,): squared norms, with the cross terms with lookups; None: the pass did not prepare it."""
        if self.gram_BTT is None or not all(self._is_prepared_for(one) for one in lookups):
            return None
        total_B = []
        for b, right_TD in enumerate(self.right_BTD):
            value = (self.gram_BTT[b] * inner_products(right_TD, right_TD)).sum() * self.scale_B[b].square()
            for one in lookups:
                assert self.picks_BTS is not None
                cross_TS = self.picks_BTS[b].to(value.dtype) * inner_products(right_TD, one.right_BTR[b])
                value = value + 2 * self.scale_B[b] * cross_TS.sum()
            total_B.append(value)
        return torch.stack(total_B)

    def _is_prepared_for(self, lookup: Lookup) -> bool:
        own, other = self.index_BS, lookup.index_BT
        if self.picks_BTS is None or own is None or own.shape != other.shape:
            return False
        return own.data_ptr() == other.data_ptr() or (not own.is_cuda and torch.equal(own, other))


def head_norms(heads: Sequence[HeadUse], lookups: Sequence[Lookup], rows: Rows) -> Tensor:
    """Return (U,): the squared norm of each unit's head gradient, plus twice its inner product with lookups' gradients.

    Where each unit has one row, and the pass prepared them, from Gram matrices; otherwise from the gradient of one unit
    at a time, a chunk of the vocabulary at a time: exact for any number of rows and of uses.

    Args:
        heads: the uses of one table as a head.
        lookups: its uses as a table.
        rows: the units of the rows.
    """
    if len(heads) == 1 and all(group.rows_GN.shape[1] == 1 for group in rows.groups):
        value_B = heads[0].gram_norms(lookups)
        if value_B is not None:
            return rows.sum_rows(value_B)
    total_U = heads[0].lse_BT.new_zeros(rows.num_units)
    for unit, members in _units(rows):
        value = total_U.new_zeros(())
        for chunk, tile_CD in _tiles(heads, members):
            value += kernels.squared_norms(tile_CD[None])[0]
            for one in lookups:
                looked_SD = picked(tile_CD, one.index_BT[members].flatten(), chunk.start)
                value += 2 * (looked_SD * one.right_BTR[members].flatten(0, 1).to(tile_CD.dtype)).sum()
        total_U.index_copy_(0, unit, value[None])
    return total_U


def _units(rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each unit that has rows, (1,), and the numbers of its rows, (N,)."""
    for group in rows.groups:
        yield from zip(group.unit_G.split(1), group.rows_GN, strict=True)


def _tiles(heads: Sequence[HeadUse], members: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gradient (C, D) of one unit, chunk by chunk, summed over its rows and over several uses."""
    tokens = {one.hidden_BTD.shape[1] for one in heads}
    for chunk in heads[0].head.chunks(max(tokens)):
        tile: Tensor | None = None
        for one in heads:
            for row in members.split(1):
                hidden, target, lse, right, scale = (
                    x.index_select(0, row)
                    for x in (one.hidden_BTD, one.target_BT, one.lse_BT, one.right_BTD, one.scale_B)
                )
                g = one.head.gradient(hidden[0], lse[0], target[0], chunk)
                part = kernels.wide_bmm(g.mT[None], right)[0].mul_(scale)
                tile = part if tile is None else tile.add_(part)
        assert tile is not None, "a unit has rows"
        yield chunk, tile

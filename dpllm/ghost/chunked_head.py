"""The cross-entropy of a language model's head, without materialising all logits.

For 8 rows of 512 tokens and a vocabulary of 32 768, the logits, their softmax and its gradient take 1.5 GiB, often more
than the rest of the model. Here only the logits of a few tokens, or of one row and a vocabulary chunk, exist at a time.

*Frozen head* (LoRA). A few tokens at a time are multiplied by the whole vocabulary, at no extra cost.

*Trained head*. A row's gradient is ``sum_t u_t g_t (x) h_t``, where u is the gradient of the token's loss, g the loss
gradient with respect to the head's products, and h the hidden state. It is an outer product whose left factor, (T, V),
is not stored. The forward pass computes its Gram matrix g g^T, and `HeadUse` recomputes the factor, chunk by chunk, for
the clipped sum. Norms and sums use the same numbers: g and u_t h_t / max_s |u_s| are rounded to the dtype of h, and
both are recomputed by the same products of the same shapes. So rounding lifts no unit above the clip norm.

Shape suffixes: B rows, U units, T tokens of a row, S tokens of a lookup, M places (rows x tokens), D width of a hidden
state, V vocabulary, C entries of a chunk of it, K dimension of a product, N rows of a unit or columns of a product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpllm.data.labels import IGNORE
from dpllm.ghost import kernels
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.unit_gradients import Instance, Lookup, RowGradients, Rows, Use, sum_of

CHUNK_ENTRIES = 1 << 24
"""Logits in float32 that exist at a time: 64 MiB."""

_MAX_TERMS = 128  # of an inner product, added at once; see `dpllm.ghost.kernels`
_MAX_BLOCKS = 1 << 24  # entries of partial sums that exist at a time


@dataclass(frozen=True)
class LogitFormula:
    """The computation of a token's loss from the products of head and hidden state.

    Attributes:
        scale: multiplies the products (with the bias).
        cap: a product x then becomes ``cap * tanh(x / cap)``; None: unchanged.
        smoothing: share of the label that is spread evenly over the vocabulary, as in ``F.cross_entropy``.
    """

    scale: float = 1.0
    cap: float | None = None
    smoothing: float = 0.0


def places(index_T: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return, (T, 1) each, an entry's column in the chunk that begins at ``start``, and whether the chunk has it."""
    at = (index_T - start)[:, None]
    return at.clamp(0, width - 1), (at >= 0) & (at < width)


@dataclass(frozen=True)
class Head:
    """A head during one step.

    Attributes:
        weight_VD: detached.
        bias_V: detached, or None.
        formula: from products to logits.
        entries: the number of logits that may exist at a time.
        is_trained: whether its products are computed in float32, as those of norms and sums; otherwise they have the
            dtype of the hidden states, if that is faster.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    formula: LogitFormula
    entries: int
    is_trained: bool

    def chunks(self, tokens: int) -> list[slice]:
        """Return the vocabulary chunks for rows of T tokens; always the same ones, so that rounding is reproducible."""
        width, vocabulary = max(1, self.entries // max(1, tokens)), len(self.weight_VD)
        return [slice(a, min(a + width, vocabulary)) for a in range(0, vocabulary, width)]

    def pieces(self, tokens: int) -> tuple[int, list[slice]]:
        """Return how many tokens, and which vocabulary chunks, have logits at a time; one row if the head is trained.

        A frozen head computes all logits of a few tokens, once.
        """
        if self.is_trained:
            return max(1, tokens), self.chunks(tokens)
        return max(1, self.entries // len(self.weight_VD)), [slice(0, len(self.weight_VD))]

    def product(self, x_TK: Tensor, y_KN: Tensor) -> Tensor:
        """Return a matrix product (T, N) in the accumulation dtype."""
        if self.is_trained or kernels.on_tensor_cores(x_TK, y_KN):
            return kernels.wide_bmm(x_TK[None], y_KN[None])[0]
        return kernels.widen(x_TK @ y_KN)

    def logits(self, hidden_TD: Tensor, chunk: slice) -> Tensor:
        """Return the logits (T, C) of a chunk, in the accumulation dtype."""
        logits = self.product(hidden_TD, self.weight_VD[chunk].mT)
        if self.bias_V is not None:
            logits.add_(self.bias_V[chunk])
        if self.formula.scale != 1:
            logits.mul_(self.formula.scale)
        return logits if self.formula.cap is None else logits.div_(self.formula.cap).tanh_().mul_(self.formula.cap)

    def gradient(
        self, hidden_TD: Tensor, lse_T: Tensor, target_T: Tensor, chunk: slice, logits: Tensor | None = None
    ) -> Tensor:
        """Return g (T, C), the loss gradients with respect to the products, in the dtype of the hidden states.

        The chunk's logits, if given, are overwritten by the gradient; ``lse_T`` is the log-sum-exp of all logits.
        """
        grad, formula = self.logits(hidden_TD, chunk) if logits is None else logits, self.formula
        cap, smoothing = formula.cap, formula.smoothing
        slope = None if cap is None else (grad / cap).square_().neg_().add_(1)
        grad.sub_(lse_T[:, None]).exp_().sub_(smoothing / len(self.weight_VD))
        at_T1, inside_T1 = places(target_T, chunk.start, grad.shape[1])
        grad.scatter_add_(1, at_T1, (smoothing - 1) * inside_T1.to(grad.dtype))
        if slope is not None:
            grad.mul_(slope)
        if self.formula.scale != 1:
            grad.mul_(self.formula.scale)
        return grad.masked_fill_((target_T == IGNORE)[:, None], 0).to(hidden_TD.dtype)  # also where it is not finite

    def losses(
        self, hidden_TD: Tensor, target_T: Tensor, chunks: Sequence[slice]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the losses (T,), the log-sum-exp (T,), and the logits if there is only one chunk."""
        parts, labels, smoothing = [], [], self.formula.smoothing
        for chunk in chunks:
            logits = self.logits(hidden_TD, chunk)
            parts.append(logits.logsumexp(1))
            at_T1, inside_T1 = places(target_T, chunk.start, logits.shape[1])
            labels.append((1 - smoothing) * logits.gather(1, at_T1).where(inside_T1, 0)[:, 0])
            if smoothing:
                labels.append(smoothing / len(self.weight_VD) * logits.sum(1))
        lse_T = functools.reduce(torch.logaddexp, parts)
        return (lse_T - sum_of(labels)).masked_fill(target_T == IGNORE, 0), lse_T, logits if len(chunks) == 1 else None


def token_losses(
    hidden_BTD: Tensor,
    target_BT: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    formula: LogitFormula | None = None,
    receive: Callable[[nn.Parameter, Use], None] | None = None,
    index_BT: Tensor | None = None,
    entries: int = CHUNK_ENTRIES,
) -> Tensor:
    """Return the cross-entropy of each target, (B, T), as a head followed by ``F.cross_entropy`` computes it.

    The hidden states' gradient, if needed, is computed here in the forward pass, so the backward pass does not read the
    head. No gradient reaches ``weight`` and ``bias`` through autograd.

    Args:
        hidden_BTD: the head's input.
        target_BT: the label of each position; -100 where there is none, and the loss is 0.
        weight: (V, D).
        bias: (V,), or None.
        formula: from products to logits; None: the logits are the products.
        receive: called with ``(parameter, use)`` in the backward pass, for each of weight and bias that requires a
            gradient.
        index_BT: if the head is tied to the embedding, the table entries that the rows look up, so that the cross terms
            of head and lookup need no more logits.
        entries: the number of logits that may exist at a time.

    Raises:
        ValueError: weight or bias is trained, but ``receive`` is missing.
    """
    with_graph = torch.is_grad_enabled()
    trained = [p for p in (weight, bias) if p is not None and p.requires_grad and with_graph]
    if trained and receive is None:
        raise ValueError(
            f"The head {tuple(weight.shape)} is trained, but its gradient would be lost. Pass receive, or freeze the "
            "head."
        )
    dtype, kind = weight.dtype, hidden_BTD.device.type
    if torch.is_autocast_enabled(kind):  # as for a linear layer
        dtype = torch.get_autocast_dtype(kind)
        hidden_BTD = hidden_BTD.to(dtype)
    weight_VD, bias_V = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    head = Head(weight_VD, bias_V, formula or LogitFormula(), entries, is_trained=bool(trained))
    if trained and not hidden_BTD.requires_grad:
        hidden_BTD = hidden_BTD.detach().requires_grad_()
    with_grad = with_graph and hidden_BTD.requires_grad
    return _TokenLosses.apply(hidden_BTD, target_BT, head, with_grad, (weight, bias), receive, index_BT)


class _TokenLosses(torch.autograd.Function):
    """Losses (B, T); a trained head's gradient is passed on as a `HeadUse`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: Tensor,
        target_BT: Tensor,
        head: Head,
        with_grad: bool,
        parameters: tuple[Any, Any],
        receive: Callable[[Any, Any], None] | None,
        index_BT: Tensor | None,
    ) -> Tensor:
        rows, tokens, width = hidden_BTD.shape
        new = functools.partial(hidden_BTD.new_zeros, dtype=kernels.accumulation_dtype(hidden_BTD.dtype))
        loss, lse, size = new(3, rows, tokens)
        with_gram = head.is_trained and tokens <= 2 * width and parameters[0].requires_grad
        gram = new(rows, tokens, tokens) if with_gram else None  # where tiles do not take fewer operations
        picks = None if gram is None or index_BT is None else hidden_BTD.new_zeros(rows, tokens, index_BT.shape[1])
        hidden_MD, target_M = hidden_BTD.flatten(0, 1), target_BT.flatten()
        grad_MD = torch.empty_like(hidden_MD) if with_grad else None
        few, chunks = head.pieces(tokens)
        with kernels.exact_matmul() if head.is_trained else torch.autocast(hidden_BTD.device.type, enabled=False):
            for start in range(0, rows * tokens, few):
                here, b = slice(start, start + few), start // tokens  # row b, of a trained head
                hidden, target = hidden_MD[here].clone(), target_M[here]  # see `HeadUse.gradient`
                loss.view(-1)[here], lse_T, logits = head.losses(hidden, target, chunks)
                lse.view(-1)[here] = lse_T
                if grad_MD is None:
                    del logits  # otherwise they would exist together with the next ones
                    continue
                grad = new(hidden.shape)
                for chunk in chunks:
                    g = head.gradient(hidden, lse_T, target, chunk, logits)
                    grad += head.product(g, head.weight_VD[chunk])
                    if head.is_trained:
                        size[b] += torch.linalg.vector_norm(g, dim=1, dtype=size.dtype).square_()
                    if gram is not None:
                        gram[b] += inner_products(g, g)
                    if picks is not None and index_BT is not None:
                        picks[b] += picked(g.mT, index_BT[b], chunk.start).mT
                grad_MD[here] = grad
                del logits, g  # likewise
        grad_BTD = None if grad_MD is None else grad_MD.view_as(hidden_BTD)
        prepared = (hidden_BTD, target_BT, lse, size.sqrt_(), gram, picks, index_BT) if head.is_trained else ()
        ctx.save_for_backward(grad_BTD, *prepared)
        ctx.head, ctx.parameters, ctx.receive = head, parameters, receive
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BT: Tensor) -> tuple[Tensor | None, ...]:
        grad_BTD, *prepared = ctx.saved_tensors
        weight, bias = ctx.parameters
        if prepared:
            hidden, target, *more = prepared
            use = HeadUse(ctx.head, hidden.detach(), target, upstream_BT, *more)
            if weight.requires_grad:
                ctx.receive(weight, use)
            if bias is not None and bias.requires_grad:
                ctx.receive(bias, RowGradients(use.bias_gradients()))
        return grad_BTD * upstream_BT[..., None].to(grad_BTD.dtype), None, None, None, None, None, None


def inner_products(x_TD: Tensor, y_SD: Tensor) -> Tensor:
    """Return all inner products (T, S), adding at most 128 terms at once and those sums pairwise."""
    step = _MAX_TERMS * max(1, _MAX_BLOCKS // max(1, len(x_TD) * len(y_SD)))

    def part(start: int) -> Tensor:
        blocks = []
        for one in (x_TD, y_SD):
            cut = one[:, start : start + step]
            blocks.append(F.pad(cut, (0, -cut.shape[1] % _MAX_TERMS)).unflatten(1, (-1, _MAX_TERMS)).transpose(0, 1))
        return kernels.wide_bmm(blocks[0], blocks[1].mT).sum(0)

    return functools.reduce(Tensor.add_, map(part, range(0, max(1, x_TD.shape[1]), step)))


def picked(x_CN: Tensor, index_S: Tensor, start: int) -> Tensor:
    """Return (S, N): the rows of a chunk at these vocabulary entries; 0 for entries of other chunks."""
    at_S1, inside_S1 = places(index_S, start, len(x_CN))
    return x_CN[at_S1[:, 0]].where(inside_S1, 0)


@dataclass(frozen=True)
class HeadUse:
    """Gradient of a trained head: ``scale_b sum_t g_bt (x) right_bt``, where g is recomputed from the hidden states.

    The weight is read after the backward pass. If an engine shards it, and may have freed it by then, the head uses the
    ordinary path, with the gradient of all logits.

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
        """The largest |u| in each row."""
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

    def fold(self) -> Instance:
        """Return the gradient itself, with all rows as one unit."""
        unit_B = torch.zeros(len(self.lse_BT), dtype=torch.int64)
        return Instance(self.instance(Rows.of(unit_B, 1, self.lse_BT.device)))

    def mass(self) -> Tensor:
        """Return (B,): sum_t |u_t| |g_t| |h_t|, the scale of the norms' and sums' rounding error."""
        least = math.sqrt(kernels.least_square(self.lse_BT.dtype))
        right_BT = torch.linalg.vector_norm(self.right_BTD, dim=2, dtype=self.lse_BT.dtype)
        return self.scale_B * (self.size_BT.clamp_min(least) * right_BT.clamp_min(least)).sum(1)

    def gradient(self, row: Tensor, chunk: slice) -> Tensor:
        """Return g (T, C) of one row (1,) in a vocabulary chunk, by the products of the forward pass.

        The copies are aligned in memory as there, since a product's rounding may depend on the alignment.
        """
        hidden, lse, target = (x.index_select(0, row)[0] for x in (self.hidden_BTD, self.lse_BT, self.target_BT))
        return self.head.gradient(hidden, lse, target, chunk)

    def row_gradient(self, row: Tensor, chunk: slice) -> Tensor:
        """Return the gradient (C, D) of one row (1,) in a vocabulary chunk."""
        right_1TD, scale_1 = (x.index_select(0, row) for x in (self.right_BTD, self.scale_B))
        return kernels.wide_bmm(self.gradient(row, chunk).mT[None], right_1TD)[0].mul_(scale_1)

    def tiles(self) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield each row with each vocabulary chunk and g (T, C) there."""
        for b, row in enumerate(torch.arange(len(self.lse_BT), device=self.lse_BT.device).split(1)):
            for chunk in self.head.chunks(self.lse_BT.shape[1]):
                yield b, chunk, self.gradient(row, chunk)

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``. The logits are recomputed."""
        values = self.hidden_BTD, self.target_BT, self.upstream_BT, self.lse_BT
        hidden, target, upstream, lse, factor_B = weights.kept(*values)
        kept = dataclasses.replace(self, hidden_BTD=hidden, target_BT=target, upstream_BT=upstream, lse_BT=lse)
        factor_B = factor_B.to(total.dtype) * kept.scale_B.to(total.dtype)
        filled = total.filled()
        for b, chunk, g_TC in kept.tiles():
            kernels.add_weighted_outer_(filled[chunk], g_TC[None], kept.right_BTD[b : b + 1], factor_B[b : b + 1])

    def bias_gradients(self) -> Tensor:
        """Return (B, V): the bias gradient of each row, sum_t u_t g_t."""
        value_BV = self.lse_BT.new_empty(len(self.lse_BT), len(self.head.weight_VD))
        with kernels.exact_matmul():
            for b, chunk, g_TC in self.tiles():
                value_BV[b, chunk] = (g_TC.to(value_BV.dtype) * self.upstream_BT[b][:, None]).sum(0)
        return value_BV

    def gram_norms(self, lookups: Sequence[Lookup]) -> Tensor | None:
        """Return (B,): squared norms, with the cross terms of lookups; None if the pass did not prepare them."""
        own, others = self.index_BS, [one.index_BT for one in lookups]
        if self.gram_BTT is None or (others and self.picks_BTS is None):
            return None
        if any(own is None or (own.shape, own.data_ptr()) != (x.shape, x.data_ptr()) for x in others):
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


def head_norms(heads: Sequence[HeadUse], lookups: Sequence[Lookup], rows: Rows) -> Tensor:
    """Return (U,): the squared norm of each unit's head gradient, plus twice its inner product with lookups' gradients.

    If each unit has one row and the pass prepared them, uses Gram matrices; otherwise the gradient of one unit and one
    vocabulary chunk at a time, which is exact for any number of rows and of uses of one table.
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
    """Yield each unit that has rows, (1,), and the indices of its rows, (N,)."""
    for group in rows.groups:
        yield from zip(group.unit_G.split(1), group.rows_GN, strict=True)


def _tiles(heads: Sequence[HeadUse], members: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the gradient (C, D) of one unit, chunk by chunk, summed over its rows and over several uses."""
    for chunk in heads[0].head.chunks(max(one.hidden_BTD.shape[1] for one in heads)):
        parts = (one.row_gradient(row, chunk) for one in heads for row in members.split(1))
        yield chunk, functools.reduce(Tensor.add_, parts)

"""The cross-entropy of a language model's head, without a tensor of all logits.

For 8 rows of 512 tokens and a vocabulary of 32 768, logits, their softmax and its gradient take 1.5 GiB, often more
than the rest of the model. Here logits exist for a few tokens, or for one row and a chunk of the vocabulary, at a time.
`token_losses` computes the losses, and the gradient of the hidden states along with them.

*Frozen head* (LoRA). A few tokens at a time meet the whole vocabulary. It takes no more operations than usual.

*Trained head*. Its gradient per unit leaves as a `dpllm.ghost.head_use.HeadUse`, which computes the logits again.

Shape suffixes: B rows, T tokens of a row, S tokens of a lookup, M places (rows x tokens), D width of a hidden state,
V vocabulary, C entries of a chunk of it, K and N dimensions of a product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpllm.data.labels import IGNORE
from dpllm.ghost import kernels

if TYPE_CHECKING:
    from dpllm.ghost.contributions import Use

CHUNK_ENTRIES = 1 << 24
"""Logits in float32 that exist at a time: 64 MiB."""


@dataclass(frozen=True)
class LogitFormula:
    """The computation from the products of head and hidden state to the loss of a token.

    Attributes:
        scale: the products (with the bias) are multiplied by it.
        cap: then a product x becomes ``cap * tanh(x / cap)``; None: it stays.
        smoothing: share of the label that is spread evenly over the vocabulary, as in ``F.cross_entropy``.
    """

    scale: float = 1.0
    cap: float | None = None
    smoothing: float = 0.0

    def logits_(self, product: Tensor) -> Tensor:
        """Turn products into logits, in place."""
        if self.scale != 1:
            product.mul_(self.scale)
        return product if self.cap is None else product.div_(self.cap).tanh_().mul_(self.cap)

    def gradient_(self, logits_TC: Tensor, lse_T: Tensor, target_T: Tensor, start: int, vocabulary: int) -> Tensor:
        """Turn logits into the gradient of the token losses with respect to the products, in place.

        Args:
            logits_TC: of the vocabulary entries from ``start`` on.
            lse_T: the logarithm of the sum of all exponentials.
            target_T: the labels.
            start: the chunk's first entry.
            vocabulary: V.
        """
        slope = None if self.cap is None else (logits_TC / self.cap).square_().neg_().add_(1)
        grad = logits_TC.sub_(lse_T[:, None]).exp_()
        if self.smoothing:
            grad.sub_(self.smoothing / vocabulary)
        at_T1, inside_T1 = places(target_T, start, grad.shape[1])
        grad.scatter_add_(1, at_T1, (self.smoothing - 1) * inside_T1.to(grad.dtype))
        if slope is not None:
            grad.mul_(slope)
        if self.scale != 1:
            grad.mul_(self.scale)
        return grad.masked_fill_((target_T == IGNORE)[:, None], 0)  # also where a logit is not finite


def places(index_T: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (T, 1) each: the column of an entry in the chunk that begins at ``start``, and whether it has one."""
    at = (index_T - start)[:, None]
    return at.clamp(0, width - 1), (at >= 0) & (at < width)


@dataclass(frozen=True)
class Head:
    """A head's values during one step, and how it is read.

    Attributes:
        weight_VD: detached.
        bias_V: detached; None: there is none.
        formula: from products to losses.
        entries: logits that may exist at a time.
        is_trained: whether its products are those of norms and sums, in float32; otherwise they have the dtype of the
            hidden states, where that is faster.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    formula: LogitFormula
    entries: int
    is_trained: bool

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.weight_VD.shape[0]

    def chunks(self, tokens: int) -> list[slice]:
        """Return the chunks of the vocabulary for rows of T tokens: always the same, so that rounding is, too."""
        width = max(1, self.entries // max(1, tokens))
        return [slice(a, min(a + width, self.vocabulary)) for a in range(0, self.vocabulary, width)]

    def product(self, x_TK: Tensor, y_KN: Tensor) -> Tensor:
        """Return a matrix product (T, N) in the accumulation dtype."""
        if self.is_trained or kernels.on_tensor_cores(x_TK, y_KN):
            return kernels.wide_bmm(x_TK[None], y_KN[None])[0]
        return kernels.widen(x_TK @ y_KN)

    def logits(self, hidden_TD: Tensor, chunk: slice) -> Tensor:
        """Return the logits (T, C) of a chunk, in the accumulation dtype."""
        product = self.product(hidden_TD, self.weight_VD[chunk].mT)
        if self.bias_V is not None:
            product.add_(self.bias_V[chunk])
        return self.formula.logits_(product)

    def gradient(
        self, hidden_TD: Tensor, lse_T: Tensor, target_T: Tensor, chunk: slice, logits: Tensor | None = None
    ) -> Tensor:
        """Return g (T, C) of a chunk, in the dtype of the hidden states; ``logits`` become it where they are known."""
        logits = self.logits(hidden_TD, chunk) if logits is None else logits
        return self.formula.gradient_(logits, lse_T, target_T, chunk.start, self.vocabulary).to(hidden_TD.dtype)

    def losses(
        self, hidden_TD: Tensor, target_T: Tensor, chunks: Sequence[slice]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the losses (T,), the log-sum-exp (T,), and the logits if there is one chunk."""
        smoothing, lse_T = self.formula.smoothing, None
        chosen_T = hidden_TD.new_zeros(len(hidden_TD), dtype=kernels.accumulation_dtype(hidden_TD.dtype))
        total_T = torch.zeros_like(chosen_T)
        for chunk in chunks:
            logits = self.logits(hidden_TD, chunk)
            part = logits.logsumexp(1)
            lse_T = part if lse_T is None else torch.logaddexp(lse_T, part)
            at_T1, inside_T1 = places(target_T, chunk.start, logits.shape[1])
            chosen_T += logits.gather(1, at_T1).where(inside_T1, 0)[:, 0]
            if smoothing:
                total_T += logits.sum(1)
        assert lse_T is not None, "a vocabulary has entries"
        loss_T = lse_T - (1 - smoothing) * chosen_T - smoothing / self.vocabulary * total_T
        return loss_T.masked_fill(target_T == IGNORE, 0), lse_T, logits if len(chunks) == 1 else None


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

    The gradient of the hidden states is computed here, in the forward pass, where one is asked for; the backward pass
    does not read the head. No gradient reaches ``weight`` and ``bias`` through autograd.

    Args:
        hidden_BTD: what the head reads.
        target_BT: labels, those of the position itself; -100 where there is none, and where the loss is 0.
        weight: (V, D).
        bias: (V,), or None.
        formula: scale, cap and smoothing; None: none of them.
        receive: takes ``(parameter, use)`` in the backward pass, for each of weight and bias that requires a gradient.
        index_BT: the entries of the same table that the rows look up, if the head is tied to the embedding: the cross
            terms of head and lookup then take no more logits.
        entries: logits that may exist at a time.

    Raises:
        ValueError: weight or bias is trained, and nobody receives its gradient.
    """
    with_graph = torch.is_grad_enabled()
    trained = [p for p in (weight, bias) if p is not None and p.requires_grad and with_graph]
    if trained and receive is None:
        raise ValueError(
            f"The head {tuple(weight.shape)} is trained, and its gradient would be lost. Pass receive, or freeze it."
        )
    weight_VD, bias_V, kind = weight.detach(), None if bias is None else bias.detach(), hidden_BTD.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # as for a linear layer
        dtype = torch.get_autocast_dtype(kind)
        hidden_BTD, weight_VD = hidden_BTD.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    head = Head(weight_VD, bias_V, formula or LogitFormula(), entries, is_trained=bool(trained))
    if not trained:
        return _FrozenHead.apply(hidden_BTD, target_BT, head, with_graph and hidden_BTD.requires_grad)
    anchor = hidden_BTD if hidden_BTD.requires_grad else hidden_BTD.detach().requires_grad_()
    return _TrainedHead.apply(anchor, target_BT, head, (weight, bias), receive, index_BT)


class _FrozenHead(torch.autograd.Function):
    """Losses (B, T) of a head without a gradient of its own, a few tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden_BTD: Tensor, target_BT: Tensor, head: Head, with_grad: bool) -> Tensor:
        hidden_MD, target_M = hidden_BTD.flatten(0, 1), target_BT.flatten()
        every = slice(0, head.vocabulary)
        size = max(1, head.entries // head.vocabulary)
        loss_M = hidden_MD.new_empty(len(hidden_MD), dtype=kernels.accumulation_dtype(hidden_MD.dtype))
        grad_MD = torch.empty_like(hidden_MD) if with_grad else None
        with _no_autocast(hidden_MD.device.type):
            for start in range(0, len(hidden_MD), size):
                here = slice(start, start + size)
                loss_M[here], lse, logits = head.losses(hidden_MD[here], target_M[here], [every])
                if grad_MD is not None:
                    grad = head.gradient(hidden_MD[here], lse, target_M[here], every, logits)
                    grad_MD[here] = head.product(grad, head.weight_VD)
                    del grad
                del logits  # or it would exist beside the next one
        ctx.save_for_backward(None if grad_MD is None else grad_MD.view_as(hidden_BTD))
        return loss_M.view(target_BT.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BT: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_BTD,) = ctx.saved_tensors
        return grad_BTD * upstream_BT[..., None].to(grad_BTD.dtype), None, None, None


class _TrainedHead(torch.autograd.Function):
    """Losses (B, T) of a head whose gradient leaves as a `HeadUse`, one row and one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BTD: Tensor,
        target_BT: Tensor,
        head: Head,
        parameters: tuple[Any, Any],
        receive: Callable[[Any, Any], None],
        index_BT: Tensor | None,
    ) -> Tensor:
        from dpllm.ghost.head_use import inner_products, picked  # which imports this module

        rows, tokens, width = hidden_BTD.shape
        dtype = kernels.accumulation_dtype(hidden_BTD.dtype)
        loss, lse, size = hidden_BTD.new_zeros(3, rows, tokens, dtype=dtype)
        grad_BTD = torch.empty_like(hidden_BTD)
        with_gram = tokens <= 2 * width and parameters[0].requires_grad  # else tiles take fewer operations
        gram = hidden_BTD.new_zeros(rows, tokens, tokens, dtype=dtype) if with_gram else None
        with_picks = with_gram and index_BT is not None
        picks = hidden_BTD.new_zeros(rows, tokens, index_BT.shape[1]) if with_picks and index_BT is not None else None
        chunks = head.chunks(tokens)
        with kernels.exact_matmul():
            for b in range(rows):
                hidden, target = hidden_BTD[b].clone(), target_BT[b]  # at an address of the same alignment each time
                loss[b], lse[b], logits = head.losses(hidden, target, chunks)
                grad = torch.zeros_like(hidden, dtype=dtype)
                for chunk in chunks:
                    g = head.gradient(hidden, lse[b], target, chunk, logits)
                    size[b] += torch.linalg.vector_norm(g, dim=1, dtype=dtype).square_()
                    grad += head.product(g, head.weight_VD[chunk])
                    if gram is not None:
                        gram[b] += inner_products(g, g)
                    if picks is not None and index_BT is not None:
                        picks[b] += picked(g.mT, index_BT[b], chunk.start).mT
                grad_BTD[b] = grad
                del logits, g  # or they would exist beside the next ones
        ctx.save_for_backward(hidden_BTD, target_BT, grad_BTD, lse, size.sqrt_(), gram, picks, index_BT)
        ctx.head, ctx.parameters, ctx.receive = head, parameters, receive
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_BT: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        from dpllm.ghost.contributions import RowGradients  # which imports this module
        from dpllm.ghost.head_use import HeadUse

        hidden, target, grad_BTD, *prepared = ctx.saved_tensors
        weight, bias = ctx.parameters
        use = HeadUse(ctx.head, hidden.detach(), target, upstream_BT, *prepared)
        if weight.requires_grad:
            ctx.receive(weight, use)
        if bias is not None and bias.requires_grad:
            ctx.receive(bias, RowGradients(use.bias_gradients()))
        return grad_BTD * upstream_BT[..., None].to(grad_BTD.dtype), None, None, None, None, None


def _no_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products keep the dtypes that they are given."""
    known = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if known else contextlib.nullcontext()

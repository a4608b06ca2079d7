"""Compute one loss per row, normalised only within the row.

A loss divided by the number of tokens in the *batch* makes each row's gradient depend on the lengths of the others.
Clipping then no longer bounds the change by one unit. Every loss here returns (B,).

Shape suffixes: B rows, T tokens, V vocabulary, K classes, M places (rows x tokens), N tokens of packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpllm.config import ConfigError
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.transfer import host_values

CHUNK_ENTRIES = 1 << 24
"""Number of float32 logits that exist at a time: 64 MiB."""


def take_labels(inputs: dict[str, Any]) -> Tensor:
    """Remove the labels from a collator's batch and return them; the other entries are the model's inputs.

    Raises:
        ConfigError: there are no labels.
    """
    if not isinstance(inputs.get("labels"), Tensor):
        raise ConfigError(
            f"The collator returned {', '.join(inputs) or 'nothing'} but no labels, so no row loss can be computed. "
            'Return a tensor "labels", rows first (for a causal language model the input_ids, with '
            f"{IGNORE} where there is no target), or leave data_collator out"
        )
    labels: Tensor = inputs.pop("labels")
    return labels


def _token_losses(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Return (B, T): the cross-entropy of each target, 0 elsewhere."""
    return _CrossEntropy.apply(logits_BTV.flatten(0, 1), target_BT.flatten()).view(target_BT.shape)


def row_means(loss_BT: Tensor, target_BT: Tensor) -> Tensor:
    """Return (B,): token losses averaged over each row's own targets; 0 for a row without any."""
    return loss_BT.sum(1) / (target_BT != IGNORE).sum(1).clamp_min(1)


def next_tokens(labels: Tensor) -> Tensor:
    """Return (B, T): the target of each position, which is the label of the next position; -100 for the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def next_packed_tokens(labels: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Return (1, N): the target of each position of packed rows; -100 for the last of each row.

    Args:
        labels: (1, N) as for `packed_sequence_loss`.
        cu_seq_lens: (B + 1,) as for `packed_sequence_loss`.

    Raises:
        ValueError: the shapes do not fit.
    """
    if len(labels) != 1 or cu_seq_lens.ndim != 1 or int(host_values(cu_seq_lens)[-1]) != labels.shape[1]:
        raise ValueError(
            f"Packed labels must be one row whose length is the last entry of cu_seq_lens; got labels of shape "
            f"{tuple(labels.shape)} and {tuple(cu_seq_lens.shape)} boundaries ending in "
            f"{cu_seq_lens.flatten()[-1:].tolist()}."
        )
    return next_tokens(labels).index_fill(1, cu_seq_lens[1:].long() - 1, IGNORE)


def packed_row_means(loss_1N: Tensor, target_1N: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Return `row_means` of concatenated rows, (B,)."""
    boundaries = cu_seq_lens.long()
    rows = torch.arange(len(boundaries) - 1, device=loss_1N.device)
    row_N = torch.repeat_interleave(rows, boundaries.diff(), output_size=loss_1N.shape[1])
    total_B = loss_1N.new_zeros(len(rows)).index_add(0, row_N, loss_1N[0])
    count_B = torch.zeros_like(total_B).index_add(0, row_N, (target_1N[0] != IGNORE).to(total_B.dtype))
    return total_B / count_B.clamp_min(1)


def _token_mean(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    return row_means(_token_losses(logits_BTV, target_BT), target_BT)


class _CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] at each place, (M,), a few places at a time; 0 where there is no target.

    Logits in float32, their softmax and its gradient each take twice the memory of a bfloat16 model's logits, for the
    whole vocabulary. Here they exist for `CHUNK_ENTRIES` entries at a time. Places without a target are computed too:
    to leave them out, the host would have to wait until the device has counted the others, and shapes would depend on
    the rows.
    """

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, target_M: Tensor) -> Tensor:
        counts_M = target_M != IGNORE
        target_M1 = target_M.where(counts_M, 0)[:, None]
        scales, chosen = [_float(logits_MV.new_zeros(0))], [_float(logits_MV.new_zeros(0))]
        for here in _chunks(*logits_MV.shape):
            logits = _float(logits_MV[here])
            scales.append(logits.logsumexp(1))
            chosen.append(logits.gather(1, target_M1[here]).squeeze(1))
        scale_M = torch.cat(scales)
        ctx.save_for_backward(logits_MV, target_M1, counts_M, scale_M)
        return (scale_M - torch.cat(chosen)).where(counts_M, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:
        logits_MV, target_M1, counts_M, scale_M = ctx.saved_tensors
        grad_MV = torch.empty_like(logits_MV)
        for here in _chunks(*logits_MV.shape):
            softmax = (logits_MV[here] - scale_M[here, None]).exp_()  # in the dtype of the scale
            softmax.scatter_add_(1, target_M1[here], softmax.new_full((softmax.shape[0], 1), -1.0))
            grad_MV[here] = softmax.mul_(grad_M[here, None])
        return grad_MV.masked_fill_(~counts_M[:, None], 0), None  # also where a logit is not finite


def _chunks(places: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_ENTRIES // vocabulary)
    for start in range(0, places, size):
        yield slice(start, start + size)


def _float(logits: Tensor) -> Tensor:
    """Return the logits in at least float32: a bfloat16 softmax over a vocabulary is too inaccurate for the loss."""
    return logits if logits.dtype == torch.float64 else logits.float()


def per_sequence_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the next-token cross-entropy of each row, averaged over its own unmasked targets.

    Args:
        logits: (B, T, V); position t predicts token t + 1.
        labels: (B, T) token ids, the input itself with -100 where no loss is wanted; they are shifted here.

    Returns:
        (B,) float32 (float64 for float64 logits).

    Raises:
        ValueError: the shapes do not fit.

    >>> per_sequence_loss(torch.zeros(2, 4, 10), torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]]))
    tensor([2.3026, 2.3026])
    """
    _check(logits, labels)
    # The labels are shifted, not the logits: a slice of the logits would be copied, and its gradient scattered back.
    return _token_mean(logits, next_tokens(labels))


def token_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each next token that is a target.

    Args:
        logits: (B, T, V); position t predicts token t + 1.
        labels: (B, T) token ids with -100 where a token is not a target; they are shifted here.

    Returns:
        ``(log_prob, is_target)``, both (B, T): position t is about token t + 1, and 0 or false if it is not a target.

    Raises:
        ValueError: the shapes do not fit.

    >>> token_log_probs(torch.zeros(1, 3, 10), torch.tensor([[1, -100, 3]]))[0]
    tensor([[ 0.0000, -2.3026,  0.0000]])
    """
    _check(logits, labels)
    target_BT = next_tokens(labels)
    return 0 - _token_losses(logits, target_BT), target_BT != IGNORE


def packed_sequence_loss(logits: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> Tensor:
    """Return `per_sequence_loss` of concatenated rows.

    Args:
        logits: (1, N, V) for the N tokens of all rows.
        labels: (1, N) token ids with -100 where no loss is wanted. They are shifted here, within each row: its last
            token predicts nothing.
        cu_seq_lens: (B + 1,) start of each row, and finally N.

    Returns:
        (B,) float32 (float64 for float64 logits).

    Raises:
        ValueError: the shapes do not fit.

    >>> labels, boundaries = torch.tensor([[1, 2, 3, 4, 1, 2]]), torch.tensor([0, 4, 6])
    >>> packed_sequence_loss(torch.zeros(1, 6, 10), labels, boundaries)
    tensor([2.3026, 2.3026])
    """
    _check(logits, labels)
    target_1N = next_packed_tokens(labels, cu_seq_lens)
    return packed_row_means(_token_losses(logits, target_1N), target_1N, cu_seq_lens)


def seq2seq_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row of an encoder-decoder, with labels aligned to the logits, not shifted.

    Args:
        logits: (B, T, V).
        labels: (B, T) with -100 where no loss is wanted.

    Returns:
        (B,).
    """
    _check(logits, labels)
    return _token_mean(logits, labels)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row's class.

    Args:
        logits: (B, K).
        labels: (B,) classes.

    Returns:
        (B,).
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"Expected logits (B, K) and labels (B,), got {tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    return F.cross_entropy(_float(logits), labels, reduction="none")


def multi_label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of each row, averaged over the classes.

    Args:
        logits: (B, K).
        labels: (B, K) 1 for each class of the row, 0 for the others.

    Returns:
        (B,).
    """
    _check_outputs(logits, labels)
    logits = _float(logits)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(1)


def regression_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the squared error of each row, averaged over the predicted values.

    Args:
        logits: (B, K).
        labels: (B, K), or (B,) for one value.

    Returns:
        (B,).
    """
    labels = labels[:, None] if labels.ndim == 1 else labels
    _check_outputs(logits, labels)
    logits = _float(logits)
    return (logits - labels.to(logits.dtype)).square().mean(1)


def token_classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each row, averaged over its own labelled tokens.

    Args:
        logits: (B, T, K).
        labels: (B, T) classes, -100 where a token has none.

    Returns:
        (B,); 0 for a row without a labelled token.
    """
    _check(logits, labels)
    return _token_mean(logits, labels)


def span_loss(start_logits: Tensor, end_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of two cross-entropies of each row: of the first token of its answer, and of the last.

    A head for question answering scores every position of the batch, padding too. The loss in transformers' models
    includes padding in the softmax, so it depends on the longest row of the batch. Here only a row's own tokens count.

    Args:
        start_logits: (B, T) scores of the first token.
        end_logits: (B, T) scores of the last token.
        labels: (B, T) `START` at the answer's first token, `END` at its last (their sum if it is one token), 0 at the
            row's other tokens, and -100 at positions that do not take part: padding.

    Returns:
        (B,); 0 for a row without an answer.

    >>> labels = torch.tensor([[0, START, END, 0], [0, START + END, -100, -100]])
    >>> span_loss(torch.zeros(2, 4), torch.zeros(2, 4), labels)
    tensor([1.3863, 0.6931])
    """
    if start_logits.shape != labels.shape or end_logits.shape != labels.shape or labels.ndim != 2:
        raise ValueError(
            f"Expected start logits, end logits and labels (B, T), got {tuple(start_logits.shape)}, "
            f"{tuple(end_logits.shape)} and {tuple(labels.shape)}."
        )
    return (_position_loss(start_logits, labels, START) + _position_loss(end_logits, labels, END)) / 2


def _position_loss(logits_BT: Tensor, labels_BT: Tensor, mark: int) -> Tensor:
    """Return the cross-entropy of the marked position of each row among the row's own tokens, (B,)."""
    own_BT = labels_BT != IGNORE
    logits_BT = _float(logits_BT)
    score_BT = logits_BT.masked_fill(~own_BT, torch.finfo(logits_BT.dtype).min).log_softmax(1)
    target_BT = own_BT & (labels_BT & mark != 0)
    return -score_BT.masked_fill(~target_BT, 0).sum(1) / target_BT.sum(1).clamp_min(1)


def _check_outputs(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape:
        raise ValueError(f"Expected logits and labels (B, K), got {tuple(logits.shape)} and {tuple(labels.shape)}.")


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"Expected logits (B, T, V) and labels (B, T), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}. Labels must be as long as the input and the logits."
        )

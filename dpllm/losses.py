"""One loss per row, normalised within the row alone.

A loss divided by the number of tokens in the *batch* makes each row's gradient depend on the lengths of the others:
clipping then no longer bounds what one unit changes. Every loss here returns (B,).

Shape suffixes: B rows, T tokens, V vocabulary, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # labels with this value are no targets, as everywhere in the ecosystem


def _token_mean(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """(B,): cross-entropy averaged over each row's own targets; 0 for a row without any.

    Where most positions are masked (prompts, padding), they are left out before the softmax over the vocabulary.
    """
    is_target_BT = target_BT != IGNORE
    if 2 * int(is_target_BT.sum()) < is_target_BT.numel():
        loss_N = F.cross_entropy(_float(logits_BTV[is_target_BT]), target_BT[is_target_BT], reduction="none")
        tokens_BT = loss_N.new_zeros(target_BT.shape).masked_scatter(is_target_BT, loss_N)
    else:
        logits_NV = _float(logits_BTV.flatten(0, 1))
        tokens_BT = F.cross_entropy(logits_NV, target_BT.flatten(), ignore_index=IGNORE, reduction="none")
        tokens_BT = tokens_BT.view(target_BT.shape)
    return tokens_BT.sum(1) / is_target_BT.sum(1).clamp_min(1)


def _float(logits: Tensor) -> Tensor:
    """At least float32: a softmax over a vocabulary in bfloat16 would lose the loss."""
    return logits if logits.dtype == torch.float64 else logits.float()


def per_sequence_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross-entropy of each row, averaged over its own unmasked targets.

    Args:
        logits: (B, T, V); position t predicts token t + 1.
        labels: (B, T) token ids, the input itself with -100 where no loss is wanted; they are shifted here.

    Returns:
        (B,) float32 (float64 for float64 logits).

    Raises:
        ValueError: shapes that don't fit.

    >>> per_sequence_loss(torch.zeros(2, 4, 10), torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]]))
    tensor([2.3026, 2.3026])
    """
    _check(logits, labels)
    # The labels are shifted, not the logits: a slice of those would be copied, and its gradient scattered back.
    return _token_mean(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORE))


def seq2seq_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row of an encoder-decoder, whose labels are aligned with the logits (not shifted).

    Args:
        logits: (B, T, V).
        labels: (B, T) with -100 where no loss is wanted.

    Returns:
        (B,).
    """
    _check(logits, labels)
    return _token_mean(logits, labels)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row's class.

    Args:
        logits: (B, K).
        labels: (B,) classes.

    Returns:
        (B,).
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits (B, K) and labels (B,) are needed; they are {tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    return F.cross_entropy(_float(logits), labels, reduction="none")


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits (B, T, V) and labels (B, T) are needed; they are {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}. Labels are as long as "
            "the input and as the logits."
        )

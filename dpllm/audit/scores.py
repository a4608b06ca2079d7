"""Membership scores of records, from the probabilities that a model assigns to their tokens.

Every attack that only reads the released model uses them. `token_scores` runs the model once over rows; each score is a
cheap function of the result, higher = more likely a member:

* `loss_score`: the mean log-probability (Yeom et al., arXiv:1709.01604);
* `ratio_score`: the same minus that of a reference model, which removes the difficulty of the text itself
  (Mireshghallah et al., arXiv:2203.03929; Carlini et al., arXiv:2012.07805);
* `zlib_score`: the same, divided by the size of the text after zlib compression (Carlini et al., arXiv:2012.07805);
* `min_k_score`: the mean over only the least likely tokens (Shi et al., arXiv:2310.16789);
* `min_k_plus_plus_score`: likewise, each token's log-probability standardised by the model's own distribution at its
  position (Zhang et al., arXiv:2404.02936).

Shape suffixes: R rows, T target tokens of one row, N positions with a target in a batch, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.models.losses import CHUNK_ENTRIES

Floats = NDArray[np.float64]

_BATCH_ENTRIES = 1 << 28  # entries of the model's own logits in a forward pass


@dataclass(frozen=True)
class TokenScores:
    """A model's probabilities of the target tokens of R rows; each tuple has one (T,) array per row, in order."""

    log_probs: tuple[Floats, ...]
    """log p(token | preceding tokens), in nats."""
    means: tuple[Floats, ...]
    """Mean of log p over the model's own distribution at that position."""
    stddevs: tuple[Floats, ...]
    """Standard deviation of log p over the model's own distribution at that position."""

    def __len__(self) -> int:
        return len(self.log_probs)


@torch.no_grad()
def token_scores(model: nn.Module, rows: datasets.Dataset, collator: RowCollator, max_rows: int = 64) -> TokenScores:
    """Run a causal language model over rows.

    Rows of similar length are batched together; a batch has fewer than `max_rows` rows if their logits would be large.
    Probabilities are computed in float32 (float64 for a float64 model), a few positions at a time. The model's training
    mode is restored.

    Args:
        model: a transformers model, on its device.
        rows: tokenized rows of `dpllm.data.rows.tokenize_records`.
        collator: pads them.
        max_rows: largest number of rows per forward pass.

    Returns:
        The scores of all rows, in order.

    Raises:
        ConfigError: the collator is for a classifier or an encoder-decoder.
        DataError: there is no row, or a row has no target.
    """
    if collator.task != "causal_lm":
        raise ConfigError(
            f"tokens are scored under a causal language model, but a {collator.task} does not assign a probability to "
            "each token of a record. Attack it with a different method"
        )
    if len(rows) == 0:
        raise DataError("there is no row to score. Pass at least one")
    was_training = model.training
    model.eval()
    found: list[tuple[Floats, Floats, Floats] | None] = [None] * len(rows)
    for numbers in _batches(rows, _vocabulary(model), max_rows):
        for number, triple in zip(numbers, _score_batch(model, collator(list(rows.select(numbers)))), strict=True):
            if len(triple[0]) == 0:
                raise DataError(f"row {number} has no target token, so it has no score. Leave it out")
            found[number] = triple
    model.train(was_training)
    log_probs, means, stddevs = zip(*(triple for triple in found if triple is not None), strict=True)
    return TokenScores(log_probs, means, stddevs)


def _batches(rows: datasets.Dataset, vocabulary: int, max_rows: int) -> Iterator[list[int]]:
    """Yield indices of rows of similar length, the longest first, so that running out of memory shows at once."""
    lengths = np.array([len(ids) for ids in rows["input_ids"]])
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = min(max_rows, max(1, _BATCH_ENTRIES // max(1, int(lengths[order[start]]) * vocabulary)))
        yield order[start : start + size].tolist()
        start += size


def _vocabulary(model: nn.Module) -> int:
    return int(getattr(getattr(model, "config", None), "vocab_size", 1))


def _score_batch(model: nn.Module, batch: dict[str, Tensor]) -> Iterator[tuple[Floats, Floats, Floats]]:
    device = next(model.parameters()).device
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    labels = inputs.pop("labels")
    logits_MV = model(**inputs).logits.flatten(0, 1)
    target_M = F.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()  # position t predicts token t + 1
    (place_N,) = torch.nonzero(target_M != IGNORE, as_tuple=True)
    size = max(1, CHUNK_ENTRIES // logits_MV.shape[1])
    parts = [_moments(logits_MV[here], target_M[here]) for here in place_N.split(size)]
    log_prob_N, mean_N, stddev_N = (torch.cat(part).double().cpu().numpy() for part in zip(*parts, strict=True))
    ends = np.cumsum((labels[:, 1:] != IGNORE).sum(1).cpu().numpy())[:-1]
    yield from zip(*(np.split(values, ends) for values in (log_prob_N, mean_N, stddev_N)), strict=True)


def _moments(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p of the targets, and mean and standard deviation of log p under p, each (N,)."""
    wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    log_p_NV = wide.log_softmax(-1)
    log_prob_N = log_p_NV.gather(1, target_N[:, None]).squeeze(1)
    p_NV = log_p_NV.exp()
    log_p_NV = log_p_NV.masked_fill(p_NV == 0, 0.0)  # p log p -> 0 as p -> 0, even for a logit of -inf
    mean_N = (p_NV * log_p_NV).sum(-1)
    variance_N = (p_NV * (log_p_NV - mean_N[:, None]).square_()).sum(-1)
    return log_prob_N, mean_N, variance_N.sqrt()


def loss_score(tokens: TokenScores) -> Floats:
    """Return the mean log-probability of each row, minus its mean loss: (R,).

    >>> loss_score(TokenScores((np.array([-1.0, -3.0]),), (), ()))
    array([-2.])
    """
    return np.array([values.mean() for values in tokens.log_probs])


def ratio_score(tuned: TokenScores, reference: TokenScores) -> Floats:
    """Return the difference of each row's mean log-probability from that under a reference model: (R,).

    Args:
        tuned: scores of the model under attack.
        reference: scores of the same rows with the same tokenizer under a model that never saw them, such as the
            starting model of the fine-tuning.

    Raises:
        DataError: the two do not have the same rows.

    >>> tuned, base = (TokenScores((np.array(values),), (), ()) for values in ([-1.0, -2.0], [-2.0, -4.0]))
    >>> ratio_score(tuned, base)
    array([1.5])
    """
    if [len(values) for values in tuned.log_probs] != [len(values) for values in reference.log_probs]:
        raise DataError(
            "the two models scored different tokens, but the ratio needs the same rows and tokenizer for both"
        )
    return loss_score(tuned) - loss_score(reference)


def zlib_score(tokens: TokenScores, texts: Sequence[str]) -> Floats:
    """Return minus the mean loss divided by the number of bytes of the zlib-compressed text: (R,).

    Args:
        tokens: scores of the model under attack.
        texts: (R,) the texts of each row's target tokens.

    Raises:
        DataError: there is not one text per row.
    """
    if len(texts) != len(tokens):
        raise DataError(f"{len(texts)} texts for {len(tokens)} rows: pass one text per row")
    sizes = np.array([len(zlib.compress(text.encode("utf-8"))) for text in texts], dtype=np.float64)
    return loss_score(tokens) / sizes


def min_k_score(tokens: TokenScores, k: float = 0.2) -> Floats:
    """Return the mean log-probability of the share `k` of each row's least likely tokens: (R,).

    Raises:
        ConfigError: `k` is not above 0 and at most 1.

    >>> min_k_score(TokenScores((np.array([-1.0, -9.0, -2.0, -5.0]),), (), ()), k=0.5)
    array([-7.])
    """
    return _lowest(tokens.log_probs, k)


def min_k_plus_plus_score(tokens: TokenScores, k: float = 0.2) -> Floats:
    """Return the mean of the share `k` of each row's lowest standardised log-probabilities: (R,).

    A token's log-probability is standardised by the mean and standard deviation of log p under the model's own
    distribution at its position. If that distribution is uniform, every token is as likely as expected: 0.

    Raises:
        ConfigError: `k` is not above 0 and at most 1.
    """
    triples = zip(tokens.log_probs, tokens.means, tokens.stddevs, strict=True)
    return _lowest([_standardised(*triple) for triple in triples], k)


def _standardised(log_prob_T: Floats, mean_T: Floats, stddev_T: Floats) -> Floats:
    flat = stddev_T < 1e-6
    return np.where(flat, 0.0, (log_prob_T - mean_T) / np.where(flat, 1.0, stddev_T))


def _lowest(rows: Sequence[Floats], k: float) -> Floats:
    if not 0 < k <= 1:
        raise ConfigError(f"k, a share of the tokens, must be above 0 and at most 1, got {k}")
    return np.array([np.sort(values)[: max(1, int(k * len(values)))].mean() for values in rows])


def join_rows(tokens: TokenScores, record_numbers: Sequence[int]) -> TokenScores:
    """Join the rows of each record.

    Args:
        tokens: scores of R rows.
        record_numbers: (R,) the record of each row, from `tokenize_records`; rows of a record are consecutive.

    Returns:
        One entry per record, in the order of their first rows.

    >>> rows = (np.array([-1.0]), np.array([-2.0]), np.array([-3.0]))
    >>> [values.tolist() for values in join_rows(TokenScores(rows, rows, rows), [4, 4, 7]).log_probs]
    [[-1.0, -2.0], [-3.0]]
    """
    starts = np.flatnonzero(np.diff(np.asarray(record_numbers), prepend=np.nan) != 0)

    def joined(rows: tuple[Floats, ...]) -> tuple[Floats, ...]:
        ends = [*starts[1:].tolist(), len(rows)]
        return tuple(np.concatenate(rows[start:end]) for start, end in zip(starts.tolist(), ends, strict=True))

    return TokenScores(joined(tokens.log_probs), joined(tokens.means), joined(tokens.stddevs))

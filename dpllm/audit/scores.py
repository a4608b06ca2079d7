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

**Membership inference on real records** makes several attacks at once. Token scores of members and non-members become a
table. The result of an attack is an estimate. The bound next to it holds for any attack on this run
(`dpllm.privacy.risk.attack_risk`), for a record whose text entered the data once and a non-member from the same
distribution. `check_exchangeable` refuses non-members that a model trained on neither can already separate from the
members (Das, Zhang, Tramèr, arXiv:2406.16201, show how often published attacks measure this difference instead).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.result import Estimate, allowed_rates, auroc, shown_rates, tpr_at
from dpllm.config import ConfigError
from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.models.losses import CHUNK_ENTRIES
from dpllm.privacy.accounting import History
from dpllm.privacy.rounding import up

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


RATES = (0.01, 0.001)
"""False positive rates at which the share of members found is stated."""

_TOO_FAR = 4.0  # largest distance from 1/2, in standard deviations, of the AUROC of a model that saw no record


@dataclass(frozen=True, eq=False)
class MembershipResult:
    """How well one attack separates members from others."""

    name: str
    """Name of the attack."""
    scores: Floats = field(repr=False)
    """(m,) the higher, the likelier a member."""
    included: NDArray[np.bool_] = field(repr=False)
    """(m,) whether it is a member."""
    auroc: Estimate
    """Area under the ROC curve; 1/2 is blind guessing."""
    true_positive_rate: dict[float, Estimate]
    """False positive rate -> share of members found; a rate that needs more non-members is omitted."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without the scores of single records."""
        rates = {f"{rate:g}": found.to_dict() for rate, found in self.true_positive_rate.items()}
        return {"attack": self.name, "auroc": self.auroc.to_dict(), "true_positive_rate": rates}


def judge_attack(name: str, scores: Floats, included: NDArray[np.bool_]) -> MembershipResult:
    """Return the area under the ROC curve and the true positive rates of an attack, at false positive rates `RATES`.

    Rates below 1 / (number of non-members) are omitted: the true false positive rate of a threshold that no non-member
    exceeds may be many times higher.

    Args:
        name: name of the attack.
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is a member.

    Raises:
        AuditError: a score is NaN; there are no members, or no others.

    >>> result = judge_attack("loss", np.arange(200.0), np.arange(200) >= 100)
    >>> result.auroc.value, {rate: found.value for rate, found in result.true_positive_rate.items()}
    (1.0, {0.01: 1.0})
    """
    if np.isnan(scores).any():
        raise AuditError(
            f"the attack '{name}' has no score for {int(np.isnan(scores).sum())} records (NaN): the model assigns them "
            "no probability. Check that its training loss was not NaN"
        )
    others = int((~np.asarray(included, dtype=bool)).sum())
    found = {rate: tpr_at(scores, included, rate) for rate in shown_rates(RATES, others)}
    return MembershipResult(name, np.asarray(scores, dtype=np.float64), included, auroc(scores, included), found)


def membership_scores(
    tuned: TokenScores, texts: Sequence[str], reference: TokenScores | None = None
) -> dict[str, Floats]:
    """Return the scores of all attacks that need no training: attack -> (R,).

    Args:
        tuned: R records under the model that is attacked.
        texts: (R,) the texts of their target tokens.
        reference: the same records under a model that saw none of them; without it the ratio is omitted.
    """
    found = {
        "loss": loss_score(tuned),
        "zlib": zlib_score(tuned, texts),
        "Min-K%": min_k_score(tuned),
        "Min-K%++": min_k_plus_plus_score(tuned),
    }
    return found if reference is None else {**found, "reference ratio": ratio_score(tuned, reference)}


def check_exchangeable(reference: TokenScores, included: NDArray[np.bool_]) -> Estimate:
    """Check that a model that saw none of the records cannot separate members from others.

    Args:
        reference: the records under that model.
        included: (R,) whether a record is in the training data of the attacked model.

    Returns:
        The area under its ROC curve.

    Raises:
        AuditError: it separates them by more than four standard deviations.
    """
    found = auroc(loss_score(reference), included)
    num_in, num_out = int(included.sum()), int((~included).sum())
    deviation = math.sqrt((num_in + num_out + 1) / (12 * num_in * num_out))  # of the area, if scores do not differ
    if abs(found.value - 0.5) > _TOO_FAR * deviation:
        raise AuditError(
            "members and held-out records differ before any training: the reference model, trained on neither, "
            f"separates them with an AUROC of {found}. An attack would measure that difference instead of membership. "
            "Hold out a random share of the same records (data.eval) and train again"
        )
    return found


def bounds_of(history: History, num_others: int, rates: Sequence[float] = RATES) -> dict[float, float]:
    """Return the largest share of members that any attack finds: false positive rate -> bound.

    Each bound is stated at the highest false positive rate that a threshold chosen on this many non-members may have.

    Guarantee: an upper bound for a run with this history, under zero-out adjacency (did the record take part?).

    >>> from dpllm.mechanism.events import Step
    >>> history = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]
    >>> {rate: round(bound, 3) for rate, bound in bounds_of(history, 10**6).items()}
    {0.01: 0.097, 0.001: 0.021}
    """
    return allowed_rates(history, shown_rates(rates, num_others), num_others, CONFIDENCE)


def membership_rows(
    attacks: Sequence[MembershipResult], bounds: Mapping[float, float] | None
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table: attack, area, true positive rates, and the bounds of any attack below."""
    head = ["attack", "AUROC (95 %)", *(f"TPR at FPR {rate:.1%}" for rate in RATES)]
    rows = [
        [
            attack.name,
            interval(attack.auroc),
            *(
                interval(attack.true_positive_rate[rate]) if rate in attack.true_positive_rate else "too few records"
                for rate in RATES
            ),
        ]
        for attack in attacks
    ]
    if bounds is not None:
        limits = (up(bounds[rate], 3) if rate in bounds else "too few records" for rate in RATES)
        rows.append(["any attack, at most (95 %)", "", *limits])
    return head, rows


def interval(found: Estimate) -> str:
    """Return an estimate and its interval, short enough for a column.

    >>> interval(Estimate(0.5, 0.25, 0.75))
    '0.500 (0.250–0.750)'
    """
    return f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})"

"""Compute one loss per preference pair: a chosen and a rejected answer to one prompt.

A pair is one row of the training data. Its loss depends on two sequences, so the model is called twice for each
microbatch, once with the chosen and once with the rejected answers of the same pairs; a row of each call is the same
pair. Norms and sums add up over both calls.

The formulas are those of TRL 1.16 (``DPOTrainer._compute_loss``) before its mean over the batch;
`tests/models/test_preference.py` compares each with TRL's scalar for a batch of one pair. Losses that sort the batch or
average over its tokens are not included.

Shape suffixes: B pairs, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpllm.config import ConfigError, nearest
from dpllm.config.values import between
from dpllm.data.labels import IGNORE
from dpllm.models.losses import token_log_probs

SIDES = ("chosen", "rejected")
"""The two sequences of a pair."""
_LARGEST_EXPONENT = 80.0  # its exponential fits in float32

COUPLED: Mapping[str, str] = {
    "aot": "it sorts the log-ratios of all pairs in the batch",
    "aot_unpaired": "it sorts the log-ratios of all answers in the batch",
    "aot_pair": "it sorts the log-ratios of all pairs in the batch",
    "sft": "it averages over the tokens of all chosen answers in the batch; train on these with DPSFTTrainer",
}
"""TRL's losses in which pairs depend on each other, and why."""


@dataclass(frozen=True)
class PairScores:
    """The quantities from which a loss is computed; all (B,).

    Attributes:
        chosen: log-probability of the chosen answer under the model, minus that under the reference.
        rejected: the same for the rejected answer.
        chosen_score: ``chosen`` under the f-divergence.
        rejected_score: ``rejected`` under it.
        chosen_tokens: number of tokens of the chosen answer.
        rejected_tokens: number of tokens of the rejected answer.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def delta(self) -> Tensor:
        """The difference of the scores."""
        return self.chosen_score - self.rejected_score

    @property
    def delta_per_token(self) -> Tensor:
        """The difference of the scores per token."""
        return self.chosen_score / self.chosen_tokens.clamp_min(
            1
        ) - self.rejected_score / self.rejected_tokens.clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """A weighted sum of losses of a pair, from its log-probabilities.

    Attributes:
        kinds: names from `KINDS`.
        weights: one for each; None: each has the weight 1.
        beta: strength of the tie to the reference; for "ipo" the parameter τ.
        label_smoothing: ε of "exo_pair"; the probability of a flipped preference of "robust".
        discopop_tau: temperature of "discopop".
        f_divergence: one of `DIVERGENCES`.
        f_alpha: α of "alpha_divergence".
        tail_weight: weight of the tokens of an answer that is longer than the other one, beyond the other's length
            (LD-DPO's α, arXiv:2409.06411). None: 1.

    Raises:
        ConfigError: a value cannot be used, or a loss couples pairs.
    """

    kinds: tuple[str, ...] = ("sigmoid",)
    weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    tail_weight: float | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        for kind in self.kinds:
            if kind in COUPLED:
                raise ConfigError(
                    f"loss_type={kind!r} cannot be used in private training: {COUPLED[kind]}, so a pair's gradient "
                    f"depends on other pairs. Use one of {', '.join(KINDS)}"
                )
            if kind not in KINDS:
                raise ConfigError(f"loss_type={kind!r} is unknown{nearest(kind, KINDS)}; known: {', '.join(KINDS)}")
        if not self.kinds:
            raise ConfigError(f"loss_type names no loss; known: {', '.join(KINDS)}")
        if len(self.weights or self.kinds) != len(self.kinds):
            raise ConfigError(
                f"loss_weights has {len(self.weights or ())} numbers for {len(self.kinds)} losses: give one for each"
            )
        for weight in self.weights or ():
            between("loss_weights", weight)
        between("beta", self.beta, 0, above=True)
        between("discopop_tau", self.discopop_tau, 0, above=True)
        between("f_alpha_divergence_coef", self.f_alpha)
        between("label_smoothing", self.label_smoothing, 0, 1, below=True)
        if self.tail_weight is not None:
            between("ld_alpha", self.tail_weight, 0, 1)
        if "exo_pair" in self.kinds and self.label_smoothing == 0:
            raise ConfigError("loss_type='exo_pair' needs label_smoothing above 0; its paper uses 1e-3")
        if "robust" in self.kinds and self.label_smoothing >= 0.5:
            raise ConfigError(f"loss_type='robust' needs label_smoothing below 0.5, got {self.label_smoothing}")
        if self.f_divergence not in DIVERGENCES:
            raise ConfigError(
                f"f_divergence_type={self.f_divergence!r} is unknown{nearest(str(self.f_divergence), DIVERGENCES)}; "
                f"known: {', '.join(DIVERGENCES)}"
            )
        only = [kind for kind in self.kinds if kind not in _OF_DIFFERENCES]
        if only and self.f_divergence != "reverse_kl":
            raise ConfigError(
                f"f_divergence_type={self.f_divergence!r} applies only to losses of a difference of two scores, which "
                f"{only[0]!r} is not: leave it out"
            )

    def __call__(self, log_probs: Tensor, reference: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of each pair (B,), computed from that pair only.

        Args:
            log_probs: (B, 2) log-probabilities of the chosen and the rejected answer under the model.
            reference: (B, 2) log-probabilities under the reference.
            tokens: (B, 2) number of tokens of the two answers.
        """
        chosen, rejected = (log_probs - reference).unbind(1)
        scored = DIVERGENCES[self.f_divergence]
        scores = PairScores(chosen, rejected, scored(self, chosen), scored(self, rejected), *tokens.unbind(1))
        weights = self.weights or (1.0,) * len(self.kinds)
        parts = [weight * KINDS[kind](self, scores) for kind, weight in zip(self.kinds, weights, strict=True)]
        return torch.stack(parts).sum(0)

    def words(self) -> str:
        """Return the losses and their options in words, for the report."""
        named = [
            kind if weight == 1 else f"{weight:g} × {kind}"
            for kind, weight in zip(self.kinds, self.weights or (1.0,) * len(self.kinds), strict=True)
        ]
        return f"{' + '.join(named)}, β = {self.beta:g}"


def _exo_pair(loss: PairLoss, pair: PairScores) -> Tensor:
    """Equation 16 of arXiv:2402.00856 for two answers."""
    logits, smoothing = loss.beta * pair.delta, loss.label_smoothing
    won = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-smoothing))
    return won + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(smoothing))


def _nca_pair(loss: PairLoss, pair: PairScores) -> Tensor:
    """Noise contrastive alignment, arXiv:2402.05369."""
    chosen, rejected = loss.beta * pair.chosen, loss.beta * pair.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(loss: PairLoss, pair: PairScores) -> Tensor:
    """Robust DPO, arXiv:2403.00409."""
    logits, flipped = loss.beta * pair.delta, loss.label_smoothing
    return (flipped * F.logsigmoid(-logits) - (1 - flipped) * F.logsigmoid(logits)) / (1 - 2 * flipped)


def _bco_pair(loss: PairLoss, pair: PairScores) -> Tensor:
    """Binary classifier optimisation, arXiv:2404.04656, without its running mean of rewards, as in TRL 1.16."""
    return -F.logsigmoid(loss.beta * pair.chosen) - F.logsigmoid(-loss.beta * pair.rejected)


def _discopop(loss: PairLoss, pair: PairScores) -> Tensor:
    """Equation 5 of arXiv:2406.08414."""
    logits = loss.beta * pair.delta
    share = torch.sigmoid(logits / loss.discopop_tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _apo_down(loss: PairLoss, pair: PairScores) -> Tensor:
    """Equation 8 of arXiv:2408.06266."""
    return torch.sigmoid(loss.beta * pair.chosen) + 1 - torch.sigmoid(loss.beta * (pair.chosen - pair.rejected))


KINDS: Mapping[str, Callable[[PairLoss, PairScores], Tensor]] = {
    "sigmoid": lambda loss, pair: -F.logsigmoid(loss.beta * pair.delta),  # arXiv:2305.18290
    "hinge": lambda loss, pair: torch.relu(1 - loss.beta * pair.delta),  # arXiv:2309.06657
    "ipo": lambda loss, pair: (pair.delta_per_token - 1 / (2 * loss.beta)) ** 2,  # arXiv:2310.12036, equation 17
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": lambda loss, pair: (pair.chosen - 0.5 / loss.beta) ** 2 + (pair.rejected + 0.5 / loss.beta) ** 2,
    "apo_zero": lambda loss, pair: (
        1 - torch.sigmoid(loss.beta * pair.chosen) + torch.sigmoid(loss.beta * pair.rejected)
    ),
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": lambda loss, pair: -F.logsigmoid(loss.beta * pair.delta_per_token),
}
"""TRL's losses by name, as formulas. "sppo_hard" is arXiv:2405.00675, "apo_zero" equation 7 of
arXiv:2408.06266."""

_OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")


def _alpha_divergence(loss: PairLoss, ratio: Tensor) -> Tensor:
    """(t^(α-1) - 1) / (α-1) of t = exp(ratio)."""
    power = loss.f_alpha - 1
    if abs(power) < 1e-6:
        return ratio
    return (torch.exp((power * ratio).clamp_max(_LARGEST_EXPONENT)) - 1) / power


DIVERGENCES: Mapping[str, Callable[[PairLoss, Tensor], Tensor]] = {
    "reverse_kl": lambda loss, ratio: ratio,
    "forward_kl": lambda loss, ratio: 1 - torch.exp(-ratio),
    "js_divergence": lambda loss, ratio: math.log(2) + F.logsigmoid(ratio),
    "alpha_divergence": _alpha_divergence,
}
"""Derivatives of TRL's f-divergences (arXiv:2309.16240) at exp(log-ratio), by name."""


def pair_log_probs(model: Any, inputs: Mapping[str, Any], tail_weight: float | None = None) -> Tensor:
    """Return the log-probability of both answers of each pair, (B, 2), by two calls of the model.

    Args:
        model: a causal language model.
        inputs: ``input_ids``, ``attention_mask`` and ``labels`` (B, T) of each of `SIDES`, such as
            ``chosen_input_ids`` (`dpllm.data.examples.PairCollator`).
        tail_weight: as for `PairLoss`.
    """
    counts_B2 = torch.stack([(inputs[f"{side}_labels"][:, 1:] != IGNORE).sum(1) for side in SIDES], 1)
    found = []
    for side in SIDES:
        labels = inputs[f"{side}_labels"]
        named = {name: inputs[f"{side}_{name}"] for name in ("input_ids", "attention_mask")}
        logits = model(**named, use_cache=False).logits[:, -labels.shape[1] :]  # a soft prompt precedes a row
        log_prob_BT, is_target_BT = token_log_probs(logits, labels)
        if tail_weight is not None:
            is_tail_BT = is_target_BT.cumsum(1) > counts_B2.amin(1, keepdim=True)
            log_prob_BT = torch.where(is_tail_BT, tail_weight * log_prob_BT, log_prob_BT)
        found.append(log_prob_BT.sum(1))
    return torch.stack(found, 1)


def answer_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return the number of tokens of both answers of each pair, (B, 2)."""
    return torch.stack([(inputs[f"{side}_labels"] != IGNORE).sum(1) for side in SIDES], 1)

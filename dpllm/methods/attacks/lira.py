"""The likelihood ratio attack (LiRA; Carlini et al., arXiv:2112.03570) with shadow adapters.

K shadow models are fine-tuned without privacy from the
starting weights of the attacked model, each on a random half of the attacked records. A record's confidences under the
models that saw it form one Gaussian, and those under the other models a second one. The score is the log-likelihood
ratio of the attacked model's confidence under the two.

Shadows are LoRA adapters: they are cheap, and close enough to a fully fine-tuned target to rank records. The attack is
stronger the closer their training is to the target's.

Shape suffixes: K shadows, R records.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers.pytorch_utils import Conv1D

from dpllm.audit.bounds import AuditError
from dpllm.audit.scores import Floats, TokenScores, join_rows, loss_score, token_scores
from dpllm.config import ConfigError, ModelConfig
from dpllm.data.rows import RowCollator
from dpllm.data.tokenization import RECORD
from dpllm.models.load import prepare_model
from dpllm.models.losses import per_sequence_loss

OWN_VARIANCE = 32
"""Number of shadows from which each record has its own variances; with fewer, all records share one."""


@dataclass(frozen=True, kw_only=True)
class ShadowTraining:
    """Training settings of a shadow model."""

    num_epochs: float = 4.0
    """Passes over its half of the records."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW; it falls linearly to 0."""
    batch_size: int = 16
    """Rows of a step."""
    rank: int = 16
    """Rank of the LoRA factors on every linear layer, if the recipe has no adapter."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_epochs", "learning_rate", "batch_size", "rank"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the shadow training must be above 0, got {getattr(self, name)}")


def confidences(tokens: TokenScores) -> Floats:
    """Return log(p / (1 - p)) of the mean token probability p = exp(-mean loss) of each record: (R,).

    On this scale the values over models are close to a Gaussian (arXiv:2112.03570, section IV.C).

    >>> confidences(TokenScores((np.log([0.5, 0.5]),), (), ())).round(6).tolist()
    [0.0]
    """
    mean = np.minimum(loss_score(tokens), -1e-12)
    return np.asarray(mean - np.log(-np.expm1(mean)))


def draw_halves(num_shadows: int, num_records: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw the records of each shadow's training: (K, R), each record in half of the shadows, rounded at random.

    Raises:
        AuditError: fewer than two shadows.
    """
    if num_shadows < 2:
        raise AuditError(
            f"LiRA compares models that saw a record with models that did not, and {num_shadows} shadow cannot provide "
            "both: take at least 2, better 16 (--shadows)"
        )
    order_KR = rng.permuted(np.tile(np.arange(num_shadows)[:, None], (1, num_records)), axis=0)
    count_R = (num_shadows + (rng.random(num_records) < 0.5) * (num_shadows % 2)) // 2
    return np.asarray(order_KR < count_R)


def lira_score(target_R: Floats, shadows_KR: Floats, included_KR: NDArray[np.bool_]) -> Floats:
    """Return the log-likelihood ratio of each record: (R,), the higher, the likelier a member.

    Online, if every record has shadows of both kinds: log N(target; IN) - log N(target; OUT). Offline, if no shadow
    saw any of the records: the number of standard deviations by which the target is more confident than the OUT models.

    With at least `OWN_VARIANCE` shadows, each record has its own variances. With fewer, all records and both kinds
    share one variance.

    Args:
        target_R: confidences under the attacked model.
        shadows_KR: confidences under the shadow models.
        included_KR: whether the shadow was trained on the record.

    Raises:
        AuditError: fewer than two shadows; shapes that do not match; some records have only one kind of shadow,
            although some shadows were trained on records.

    >>> included = np.array([[True, False], [False, True]])
    >>> lira_score(np.array([3.0, 0.0]), np.array([[3.0, 0.0], [0.0, 3.0]]), included).tolist()
    [4.5, -4.5]
    """
    num_shadows = len(shadows_KR)
    if num_shadows < 2 or shadows_KR.shape != included_KR.shape or shadows_KR.shape[1:] != target_R.shape:
        raise AuditError(
            f"LiRA needs at least 2 shadows, and one value per record for each; got shapes {target_R.shape} of the "
            f"target, {shadows_KR.shape} of the shadows, {included_KR.shape} of their records"
        )
    out_mean_R, out_square_R, out_R = _spread(shadows_KR, ~included_KR)
    if not included_KR.any():
        variance_R = _variance(out_square_R, out_R - 1, num_shadows)
        return np.asarray((target_R - out_mean_R) / np.sqrt(variance_R))
    in_mean_R, in_square_R, in_R = _spread(shadows_KR, included_KR)
    if (in_R == 0).any() or (out_R == 0).any():
        lacking = int(((in_R == 0) | (out_R == 0)).sum())
        raise AuditError(
            f"{lacking} of {len(in_R)} records were in all shadows or in none: draw the halves with draw_halves, which "
            "gives each record shadows of both kinds"
        )
    if num_shadows >= OWN_VARIANCE:
        in_variance_R = _variance(in_square_R, in_R - 1, num_shadows)
        out_variance_R = _variance(out_square_R, out_R - 1, num_shadows)
    else:
        in_variance_R = out_variance_R = _variance(in_square_R + out_square_R, in_R + out_R - 2, num_shadows)
    log_in_R = -0.5 * ((target_R - in_mean_R) ** 2 / in_variance_R + np.log(in_variance_R))
    log_out_R = -0.5 * ((target_R - out_mean_R) ** 2 / out_variance_R + np.log(out_variance_R))
    return np.asarray(log_in_R - log_out_R)


def _spread(values_KR: Floats, chosen_KR: NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return the mean of each record's chosen values, the sum of their squared deviations, and their number."""
    count_R = chosen_KR.sum(0).astype(np.float64)
    mean_R = np.where(chosen_KR, values_KR, 0.0).sum(0) / np.maximum(count_R, 1)
    return mean_R, (np.where(chosen_KR, values_KR - mean_R, 0.0) ** 2).sum(0), count_R


def _variance(square_R: Floats, degrees_R: Floats, num_shadows: int) -> Floats:
    """Return each record's own variance, or one for all records; 1 if unknown, which does not change the ranking."""
    if num_shadows >= OWN_VARIANCE and degrees_R.min() > 0:
        return np.maximum(square_R / degrees_R, 1e-12)
    degrees, squares = float(degrees_R.sum()), float(square_R.sum())
    return np.full(len(square_R), squares / degrees if degrees > 0 and squares > 0 else 1.0)


def shadow_confidences(
    start: Callable[[], Any],
    model: ModelConfig,
    rows: datasets.Dataset,
    collator: RowCollator,
    included_KR: NDArray[np.bool_],
    training: ShadowTraining | None = None,
    seed: int = 0,
) -> Iterator[Floats]:
    """Train one shadow after another, and yield the confidences (R,) of all records under each.

    Args:
        start: returns a fresh copy of the attacked model's starting model each time.
        model: the recipe's section; if it has an adapter, the shadows use it.
        rows: the tokenized rows of R records.
        collator: pads them.
        included_KR: whether a shadow is trained on a record.
        training: settings of the training.
        seed: seed of the order of rows and of the adapters' weights.
    """
    training = training or ShadowTraining()
    numbers = np.asarray(rows[RECORD])
    _, record_of_row = np.unique(numbers, return_inverse=True)
    for number, included_R in enumerate(included_KR):
        torch.manual_seed(seed + number)
        shadow = _with_adapter(start(), model, training.rank)
        _train(shadow, rows.select(np.flatnonzero(included_R[record_of_row])), collator, training, seed + number)
        yield confidences(join_rows(token_scores(shadow, rows, collator), numbers.tolist()))


def _with_adapter(base: Any, model: ModelConfig, rank: int) -> Any:
    if model.adapter is not None:
        return prepare_model(base, model)
    transposed = any(isinstance(module, Conv1D) for module in base.modules())
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def _train(model: Any, rows: datasets.Dataset, collator: RowCollator, training: ShadowTraining, seed: int) -> None:
    """Fine-tune without privacy; the loss is the mean over rows, as in the private steps."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=0.0)
    num_steps = max(1, math.ceil(training.num_epochs * len(rows) / training.batch_size))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    rng, order = np.random.default_rng(seed), np.zeros(0, dtype=np.int64)
    device, held = parameters[0].device, list(rows)
    model.train()
    for _ in range(num_steps):
        if len(order) < training.batch_size:
            order = np.concatenate((order, rng.permutation(len(rows))))
        batch, order = order[: training.batch_size], order[training.batch_size :]
        inputs = {name: tensor.to(device) for name, tensor in collator([held[number] for number in batch]).items()}
        labels = inputs.pop("labels")
        per_sequence_loss(model(**inputs).logits, labels).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def copies_of(base: Any) -> Callable[[], Any]:
    """Return a function that copies a loaded model, for `shadow_confidences`."""
    return lambda: copy.deepcopy(base)

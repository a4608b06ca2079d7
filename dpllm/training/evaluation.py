"""The quality of a model on held-out records: perplexity per token, or accuracy.

Place in the flow: before and after the private steps. ε does not cover measurements on private records, even if the
model was never trained on them: note each with `DPTrainer.disclose`, and the report counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn

from dpllm.config.tasks import labels_of
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.engines.processes import Processes
from dpllm.models.losses import seq2seq_loss
from dpllm.models.tasks import row_loss_of


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure for a whole data set."""

    name: str
    """"perplexity" (exp of the mean loss per target token) or "accuracy"."""
    value: float
    """The figure."""
    loss: float
    """Mean loss in nats: per target token, or per record for a classifier."""
    row_loss: float
    """Mean over the rows of each row's own mean loss, which the private steps minimise."""


@torch.no_grad()
def measure(
    model: nn.Module,
    rows: datasets.Dataset,
    collator: RowCollator,
    max_rows: int = 64,
    processes: Processes | None = None,
    moved: Callable[[int], None] | None = None,
) -> Measurement:
    """Return the model's perplexity over all rows; for a head its accuracy, or the mean squared error of a regression.

    Every target token has the same weight, in any row. The accuracy is that of rows, of words ("token_classification"),
    of whole answers ("question_answering"), or of each class of each row ("multi_label_classification"). The model's
    training or evaluation mode is restored.

    Args:
        model: a transformers model, on the device on which to run it.
        rows: tokenized rows, as `dpllm.data.rows.tokenize_records` makes them.
        collator: collator of the rows; it determines the task.
        max_rows: number of rows of a forward pass.
        processes: divide the rows over these; all call this function together, with the same rows.
        moved: called with the number of rows of each forward pass, over all processes.

    Raises:
        DataError: there is no row, or no target in any.
    """
    order = np.argsort([-len(ids) for ids in rows["input_ids"]], kind="stable")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums = [0.0] * 4  # loss, loss per row, hits, targets
    starts = list(range(0, len(order), max_rows))
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    for turn in range(-(-len(starts) // size)):
        # A sharded model runs on all processes or on none: a process without rows runs some that are not counted.
        mine = turn * size + rank
        start = starts[mine] if mine < len(starts) else starts[0]
        batch = collator(list(rows.select(order[start : start + max_rows])))
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        weights, losses, hits = _score(model, inputs, inputs["labels"], collator.task)
        if mine < len(starts):
            wide = losses.double()
            found = (float((wide * weights).sum()), float(wide.sum()), hits, float(weights.sum()))
            sums = [total + value for total, value in zip(sums, found, strict=True)]
        if moved is not None:
            moved(min(max_rows * size, len(order) - turn * size * max_rows))
    loss, row_loss, correct, count = processes.sum(sums) if processes else sums
    model.train(was_training)
    if count == 0:
        raise DataError("no held-out row has a target, so nothing can be measured: give rows with labels")
    name, value = "perplexity", _exp(loss / count)
    if collator.task == "regression":
        name, value = "mean squared error", loss / count
    elif labels_of(collator.task) != "text":
        name, value = "accuracy", correct / count
    return Measurement(name=name, value=value, loss=loss / count, row_loss=row_loss / len(rows))


def _score(model: nn.Module, inputs: dict[str, Any], labels: Tensor, task: str) -> tuple[Tensor, Tensor, float]:
    """Return each row's number of targets and their mean loss, and the number of targets that are predicted."""
    if task == "seq2seq_lm":
        logits = model(**inputs).logits
        return (labels != IGNORE).sum(1), seq2seq_loss(logits, labels), 0.0
    outputs = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"})
    loss_B, one_B = row_loss_of(task)(outputs, labels), labels.new_ones(len(labels), dtype=torch.int64)
    if task == "causal_lm":
        return (labels[:, 1:] != IGNORE).sum(1), loss_B, 0.0
    if task == "sequence_classification":
        return one_B, loss_B, float((outputs.logits.argmax(-1) == labels).sum())
    if task == "token_classification":
        is_target = labels != IGNORE
        return is_target.sum(1), loss_B, float((is_target & (outputs.logits.argmax(-1) == labels)).sum())
    if task == "multi_label_classification":
        return one_B * labels.shape[1], loss_B, float(((outputs.logits > 0) == (labels > 0)).sum())
    if task == "question_answering":
        return one_B, loss_B, float(answered(outputs, labels).sum())
    return one_B, loss_B, 0.0


def answered(outputs: Any, labels: Tensor) -> Tensor:
    """Return (B,) bool: whether the likeliest first and last tokens of a row are those of its answer."""
    own_BT = labels != IGNORE
    right_B = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    for logits_BT, mark in ((outputs.start_logits, START), (outputs.end_logits, END)):
        place_B1 = logits_BT.masked_fill(~own_BT, -math.inf).argmax(1, keepdim=True)
        right_B &= (labels.gather(1, place_B1) & mark != 0).squeeze(1)
    return right_B


def _exp(loss: float) -> float:
    """Return exp(loss); infinity if it exceeds the largest float."""
    return math.exp(loss) if loss < 700 else math.inf

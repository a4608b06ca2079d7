"""The quality of a model on held-out records: perplexity per token, or accuracy.

Place in the flow: before and after the private steps. ε does not cover measurements on private records, even if the
model was never trained on them: note each with `DPTrainer.disclose`, and the report counts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.engines.processes import Processes
from dpllm.models.losses import classification_loss, per_sequence_loss, seq2seq_loss


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
) -> Measurement:
    """Return the model's perplexity, or its accuracy for a classifier, over all rows.

    Every target token has the same weight, in any row. The model's training or evaluation mode is restored.

    Args:
        model: a transformers model, on the device on which to run it.
        rows: tokenized rows, as `dpllm.data.rows.tokenize_records` makes them.
        collator: collator of the rows; it determines the task.
        max_rows: number of rows of a forward pass.
        processes: divide the rows over these; all call this function together, with the same rows.

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
    loss, row_loss, correct, count = processes.sum(sums) if processes else sums
    model.train(was_training)
    if count == 0:
        raise DataError("no held-out row has a target, so nothing can be measured: give rows with labels")
    name, value = "perplexity", _exp(loss / count)
    if collator.task == "sequence_classification":
        name, value = "accuracy", correct / count
    return Measurement(name=name, value=value, loss=loss / count, row_loss=row_loss / len(rows))


def _score(model: nn.Module, inputs: dict[str, Any], labels: Tensor, task: str) -> tuple[Tensor, Tensor, float]:
    """Return each row's number of targets and their mean loss, and the number of rows classified correctly."""
    if task == "seq2seq_lm":
        logits = model(**inputs).logits
        return (labels != IGNORE).sum(1), seq2seq_loss(logits, labels), 0.0
    logits = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"}).logits
    if task == "sequence_classification":
        hits = float((logits.argmax(-1) == labels).sum())
        return torch.ones_like(labels), classification_loss(logits, labels), hits
    return (labels[:, 1:] != IGNORE).sum(1), per_sequence_loss(logits, labels), 0.0


def _exp(loss: float) -> float:
    """Return exp(loss); infinity if it exceeds the largest float."""
    return math.exp(loss) if loss < 700 else math.inf

"""Measure a model's quality on held-out records: perplexity per token, or accuracy and the F1 of classes.

ε does not cover measurements on private records, even if the model was never trained on them: note each with
`DPTrainer.disclose`, and the report counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn

from dpllm.config.metrics import METRICS
from dpllm.config.tasks import PERPLEXITY, SQUARED_ERROR, TASKS, Score, labels_of
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.engines.processes import Processes
from dpllm.models.losses import seq2seq_loss
from dpllm.models.tasks import row_loss_of


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The scores of one data set."""

    score: Score
    """The score of the model's task."""
    value: float
    """Value of the score, not rounded."""
    loss: float
    """Mean loss in nats: per target token, or per record for a classifier."""
    row_loss: float
    """Mean over the rows of each row's own mean loss, which the private steps minimise."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Further scores that the recipe asked for, by name."""

    @property
    def name(self) -> str:
        """Name of the score."""
        return self.score.name

    @property
    def figures(self) -> dict[str, float]:
        """All scores by name."""
        return {self.name: self.value, **self.more}


def figure_words(before: Measurement | None, after: Measurement | None) -> dict[str, str]:
    """Return the scores before and after the private steps for people, by name, with four digits."""
    return {
        f"held-out {name} {when}": f"{value:.4g}"
        for when, measured in (("before", before), ("after", after))
        for name, value in (measured.figures.items() if measured else ())
    }


@torch.no_grad()
def measure(
    model: nn.Module,
    rows: datasets.Dataset,
    collator: RowCollator,
    max_rows: int = 64,
    processes: Processes | None = None,
    moved: Callable[[int], None] | None = None,
    macro_f1: bool = False,
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
        macro_f1: also compute the macro F1 of the classes, for a model that chooses classes.

    Raises:
        DataError: there are no rows, no row has a target, or the task has no score.
    """
    compared_by = TASKS[collator.task].score
    if compared_by is None:
        raise DataError(f"held-out rows of the task {collator.task!r} have no score: add a line for it in TASKS")
    order = np.argsort([-len(ids) for ids in rows["input_ids"]], kind="stable")

    def score(inputs: dict[str, Any]) -> Sequence[float]:
        """Return loss, loss per row, hits and targets, followed by the counts of classes."""
        outputs, losses = _forward(model, inputs, collator.task)
        weights, hits = _score(outputs, inputs["labels"], collator.task)
        counts = class_counts(outputs.logits, inputs["labels"], collator.task).flatten().tolist() if macro_f1 else []
        wide = losses.double()
        return float((wide * weights).sum()), float(wide.sum()), hits, float(weights.sum()), *counts

    found = sums_over(model, rows, order, collator, score, max_rows, processes, moved)
    loss, row_loss, correct, count, *counted = found
    if count == 0:
        raise DataError("no held-out row has a target, so nothing can be measured: add labels to the rows")
    value = correct / count
    if compared_by == PERPLEXITY:
        value = _exp(loss / count)
    elif compared_by == SQUARED_ERROR:
        value = loss / count
    more = {METRICS["macro_f1"].title: mean_f1(counted)} if macro_f1 else {}
    return Measurement(score=compared_by, value=value, loss=loss / count, row_loss=row_loss / len(rows), more=more)


def sums_over(
    model: nn.Module,
    rows: datasets.Dataset,
    order: np.ndarray,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    score: Callable[[dict[str, Any]], Sequence[float]],
    max_rows: int,
    processes: Processes | None,
    moved: Callable[[int], None] | None,
) -> Sequence[float]:
    """Return the sums of the scores of all batches, over all processes; the model is in evaluation mode meanwhile.

    Args:
        model: model on its device.
        rows: tokenized rows.
        order: their numbers, in the order in which they are processed, at least one.
        collate: makes inputs from rows.
        score: computes the scores of rows from inputs on the model's device, always the same number of them.
        max_rows: as for `measure`.
        processes: as for `measure`.
        moved: as for `measure`.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums: list[float] = []
    starts = list(range(0, len(order), max_rows))
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    for turn in range(-(-len(starts) // size)):
        # A sharded model runs on all processes or on none: a process without rows runs some that are not counted.
        mine = turn * size + rank
        start = starts[mine] if mine < len(starts) else starts[0]
        batch = collate(list(rows.select(order[start : start + max_rows])))
        found = score({name: tensor.to(device) for name, tensor in batch.items()})
        sums = sums or [0.0] * len(found)
        if mine < len(starts):
            sums = [total + value for total, value in zip(sums, found, strict=True)]
        if moved is not None:
            moved(min(max_rows * size, len(order) - turn * size * max_rows))
    model.train(was_training)
    return processes.sum(sums) if processes else sums


def _forward(model: nn.Module, inputs: dict[str, Any], task: str) -> tuple[Any, Tensor]:
    """Return the outputs of a batch, and the mean loss of each row's targets."""
    if task == "seq2seq_lm":
        outputs = model(**inputs)
        return outputs, seq2seq_loss(outputs.logits, inputs["labels"])
    outputs = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"})
    return outputs, row_loss_of(task)(outputs, inputs["labels"])


def _score(outputs: Any, labels: Tensor, task: str) -> tuple[Tensor, float]:
    """Return each row's number of targets, and the number of targets that are predicted."""
    one_B = labels.new_ones(len(labels), dtype=torch.int64)
    if task == "seq2seq_lm":
        return (labels != IGNORE).sum(1), 0.0
    if task == "causal_lm":
        return (labels[:, 1:] != IGNORE).sum(1), 0.0
    if task == "sequence_classification":
        return one_B, float((outputs.logits.argmax(-1) == labels).sum())
    if task == "token_classification":
        is_target = labels != IGNORE
        return is_target.sum(1), float((is_target & (outputs.logits.argmax(-1) == labels)).sum())
    if task == "multi_label_classification":
        return one_B * labels.shape[1], float(((outputs.logits > 0) == (labels > 0)).sum())
    if labels_of(task) == "span":
        return one_B, float(answered(outputs, labels).sum())
    return one_B, 0.0


def class_counts(logits: Tensor, labels: Tensor, task: str) -> Tensor:
    """Return (3, K) counts for each class: targets of it that are predicted, predictions of it, and its targets.

    Args:
        logits: (B, K), or (B, T, K) for "token_classification".
        labels: (B,), (B, T) with -100 where there is no target, or (B, K) of 0 and 1 for "multi_label_classification".
        task: one of the three tasks with classes.
    """
    if task == "multi_label_classification":
        guess, truth = logits > 0, labels > 0
    else:
        is_target = labels != IGNORE
        classes = torch.arange(logits.shape[-1], device=labels.device)
        guess = logits.argmax(-1)[is_target][:, None] == classes
        truth = labels[is_target][:, None] == classes
    return torch.stack([(guess & truth).sum(0), guess.sum(0), truth.sum(0)])


def mean_f1(counts: Sequence[float]) -> float:
    """Return the mean of the F1 of each class that has a target or a prediction.

    Args:
        counts: the flattened (3, K) of `class_counts`.

    >>> mean_f1([1, 1, 0, 2, 1, 0, 1, 2, 0])
    0.6666666666666666
    """
    num = len(counts) // 3
    columns = zip(counts[:num], counts[num : 2 * num], counts[2 * num :], strict=True)
    return fmean(2 * right / (guessed + true) for right, guessed, true in columns if guessed + true)


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

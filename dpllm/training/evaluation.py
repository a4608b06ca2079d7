"""Measure a model's quality on held-out records: perplexity per token, or accuracy and the F1 of classes.

ε does not cover measurements on private records, even if the model was never trained on them: note each with
`DPTrainer.disclose`, and the report counts it.

The program of a recipe measures the score of its task and `data.metrics` on its held-out records, before and after the
private steps. For text metrics, the model continues each distinct prompt greedily, and its text is compared with the
completions of all records that have this prompt. ε covers no figure of private records: the program counts each with
`DPTrainer.disclose`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from statistics import fmean
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dpllm.config import DataConfig
from dpllm.config.formats.record_format import Question
from dpllm.config.metrics import METRICS
from dpllm.config.tasks import PERPLEXITY, SQUARED_ERROR, TASKS, Score, labels_of
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.records import DataError
from dpllm.data.rows import RowCollator
from dpllm.data.tokenization import aligned
from dpllm.engines.processes import Processes
from dpllm.models.losses import seq2seq_loss
from dpllm.models.tasks import row_loss_of
from dpllm.models.writing import continuations


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
        value = math.exp(loss / count) if loss / count < 700 else math.inf  # beyond the largest float
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


# ---------------------------------------------------------------------------------------------- held-out records


Texts = Sequence[str]
References = Sequence[Sequence[str]]
"""One or more references for each text."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu(texts: Texts, references: References) -> float:
    """Return the corpus BLEU, 0 to 100, each text compared with all of its references.

    It is computed by sacreBLEU with its default settings (case-sensitive, tokenizer 13a, exponential smoothing; Post
    2018, arXiv:1804.08771). Texts may have different numbers of references.

    Raises:
        ModuleNotFoundError: the extra "metrics" is not installed.
    """
    streams = list(zip_longest(*references))  # the n-th reference of every text, None where there are fewer
    return float(import_module("sacrebleu").corpus_bleu(list(texts), streams, force=True).score)


def rouge(kind: str, texts: Texts, references: References) -> float:
    """Return the mean ROUGE F-measure, 0 to 100, of each text and the reference closest to it.

    It is computed by the package rouge-score, without stemming (Lin 2004: ROUGE, a package for automatic evaluation of
    summaries).

    Args:
        kind: "rouge1", "rouge2" or "rougeL".
        texts: texts to compare.
        references: references of each text.

    Raises:
        ModuleNotFoundError: the extra "metrics" is not installed.
    """
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer([kind], use_stemmer=False)
    pairs = zip(texts, references, strict=True)
    return 100 * fmean(float(scorer.score_multi(list(own), text)[kind].fmeasure) for text, own in pairs)


def exact_match(texts: Texts, references: References) -> float:
    """Return the share of texts that equal one of their references.

    >>> exact_match(["two", "four"], [["one", "two"], ["three"]])
    0.5
    """
    return fmean(text in own for text, own in zip(texts, references, strict=True))


def token_f1(texts: Texts, references: References) -> float:
    """Return the mean F1 of the words of a text and of the reference that shares most of them.

    >>> token_f1(["red fox"], [["fox", "dog"]])
    0.6666666666666666
    """
    pairs = zip(texts, references, strict=True)
    return fmean(max(_overlap(text.split(), other.split()) for other in own) for text, own in pairs)


def plain(answer: str) -> str:
    """Return an answer without case, punctuation, articles and repeated spaces, as SQuAD compares answers.

    Source: Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1.

    >>> plain("The  U.S. Army,")
    'us army'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def _overlap(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:  # "no answer" is right only where there is none
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


TEXT_METRICS: Mapping[str, Callable[[Texts, References], float]] = {
    "bleu": bleu,
    "rouge1": lambda texts, references: rouge("rouge1", texts, references),
    "rouge2": lambda texts, references: rouge("rouge2", texts, references),
    "rougeL": lambda texts, references: rouge("rougeL", texts, references),
    "exact_match": exact_match,
    "token_f1": token_f1,
}
"""Functions of texts and their references, by the names in `dpllm.config.metrics.METRICS`."""


Moved = Callable[[int], None] | None
_ROWS = 64  # rows of a forward pass
_LONGEST_ANSWER = 30  # tokens, as in the evaluations of SQuAD


@dataclass(frozen=True)
class HeldOutRows:
    """Held-out records and their rows.

    Attributes:
        records: the held-out records.
        rows: rows made from them by `dpllm.data.rows.tokenize_records`.
        collator: collator of the rows; it determines the task.
        config: the recipe's section; `metrics` names the metrics.
        tokenizer: tokenizer of the model.
    """

    records: datasets.Dataset
    rows: datasets.Dataset
    collator: RowCollator
    config: DataConfig
    tokenizer: PreTrainedTokenizerBase


class HeldOut:
    """The scores that are measured on held-out records.

    Attributes:
        rows: the tokenized records.
        collator: collator of the rows.

    Args:
        given: the records and their rows.

    Raises:
        DataError: a record has an empty prompt, which no model can continue.
    """

    def __init__(self, given: HeldOutRows) -> None:
        """Read prompts and references, if a metric needs them."""
        self.rows, self.collator = given.rows, given.collator
        self._macro_f1 = "macro_f1" in given.config.metrics
        self._names = [name for name in given.config.metrics if name in TEXT_METRICS]
        self._texts: Completions | Answers | None = None
        if self._names:
            self._texts = (Answers if given.config.form.holds is Question else Completions)(given)

    @property
    def size(self) -> int:
        """Number of rows that a measurement passes through the model; a prompt or a question counts as one."""
        return len(self.rows) + (0 if self._texts is None else len(self._texts.references))

    def measure(self, model: Any, processes: Processes | None = None, moved: Moved = None) -> Measurement:
        """Return the model's scores; all processes call this together.

        Args:
            model: a transformers model on its device.
            processes: processes over which the rows are divided.
            moved: called after each batch with its number of rows, over all processes; `size` in total.
        """
        found = measure(model, self.rows, self.collator, processes=processes, moved=moved, macro_f1=self._macro_f1)
        if self._texts is None:
            return found
        texts, references = self._texts.written(model, processes, moved), self._texts.references
        more = {METRICS[name].title: TEXT_METRICS[name](texts, references) for name in self._names}
        return dataclasses.replace(found, more={**found.more, **more})


class Completions:
    """The distinct prompts of records, and for each the completions of all records that have it.

    Attributes:
        references: the completions of each prompt.
    """

    def __init__(self, given: HeldOutRows) -> None:
        """Group the records by their prompts; a prompt is tokenized and truncated as in its row."""
        records, rows, config, task = given.records, given.rows, given.config, given.collator.task
        self._tokenizer = given.tokenizer
        places: dict[str, int] = {}
        self.references: list[list[str]] = []
        self._prompts: list[list[int]] = []
        self._limits: list[int] = []
        for number, (record, row) in enumerate(zip(records, rows, strict=True)):
            (prompt, completion), ids, labels = config.form.content(record), row["input_ids"], row["labels"]
            if prompt not in places:
                places[prompt] = len(places)
                head = ids if task == "seq2seq_lm" else ids[: _first_target(labels)]
                if not head:
                    raise DataError(
                        f"held-out record {number} has an empty prompt, so the model has nothing to continue: fill it "
                        "in, remove the record, or set data.metrics=[]"
                    )
                self.references.append([])
                self._prompts.append(list(head))
                self._limits.append(config.max_length - (0 if task == "seq2seq_lm" else len(head)))
            self.references[places[prompt]].append(completion.strip())

    def written(self, model: Any, processes: Processes | None = None, moved: Moved = None) -> list[str]:
        """Return the model's continuation of each prompt."""
        texts = continuations(model, self._tokenizer, self._prompts, self._limits, processes=processes, moved=moved)
        return [str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip() for ids in texts]


class Answers:
    """Questions about texts, and people's answers; compared without case, punctuation and articles.

    Attributes:
        references: the answers to each question; one empty string if there is none.
    """

    def __init__(self, given: HeldOutRows) -> None:
        """Read the answers."""
        self._given = given
        self._questions: list[Question] = [given.config.form.content(record) for record in given.records]
        self.references = [[plain(text) for text in one.answers["text"]] or [""] for one in self._questions]

    @torch.no_grad()
    def written(self, model: Any, processes: Processes | None = None, moved: Moved = None) -> list[str]:
        """Return the text of the likeliest answer to each question."""
        rank, size = (processes.rank, processes.size) if processes else (0, 1)
        num_rows = len(self._given.rows)
        starts = list(range(0, num_rows, _ROWS))
        was_training = model.training
        model.eval()
        found: dict[int, list[str]] = {}
        for turn in range(-(-len(starts) // size)):
            # A sharded model runs on all processes or on none: one without rows computes answers that are not used.
            mine = turn * size + rank
            start = starts[mine] if mine < len(starts) else starts[0]
            texts = self._answers(model, range(start, min(start + _ROWS, num_rows)))
            if mine < len(starts):
                found[start] = texts
            if moved is not None:
                moved(min(_ROWS * size, num_rows - turn * size * _ROWS))
        model.train(was_training)
        for others in processes.gather(found) if processes else []:
            found |= others
        return [text for start in starts for text in found[start]]

    def _answers(self, model: Any, numbers: range) -> list[str]:
        device, given = next(model.parameters()).device, self._given
        batch = given.collator(list(given.rows.select(numbers)))
        labels_BT = batch.pop("labels")
        outputs = model(**{name: tensor.to(device) for name, tensor in batch.items()})
        scores = (outputs.start_logits.float().cpu(), outputs.end_logits.float().cpu())
        own_questions = self._questions[numbers.start : numbers.stop]
        contexts = [one.context for one in own_questions]
        tokens = aligned(given.tokenizer, [one.question for one in own_questions], contexts)
        texts = []
        for row, (own, context) in enumerate(zip(tokens, contexts, strict=True)):
            own.cut(given.config.max_length)
            first, last = best_span(scores[0][row], scores[1][row], labels_BT[row] != IGNORE)
            texts.append(plain(context[own.places[first][0] : own.places[last][1]] if first else ""))
        return texts


def best_span(start_T: Tensor, end_T: Tensor, own_T: Tensor) -> tuple[int, int]:
    """Return first and last token of the likeliest answer of at most 30 tokens; (0, 0), the first token: no answer.

    Args:
        start_T: (T,) scores of each token as the first of the answer.
        end_T: (T,) scores of each token as the last of the answer.
        own_T: (T,) bool, the candidate tokens.
    """
    size = len(start_T)
    allowed_TT = (own_T[:, None] & own_T[None, :]).triu().tril(_LONGEST_ANSWER - 1)
    allowed_TT[0, 1:] = False  # "no answer" is the first token only
    scores_TT = (start_T[:, None] + end_T[None, :]).masked_fill(~allowed_TT, -torch.inf)
    best = int(scores_TT.argmax())
    return best // size, best % size


def _first_target(labels: Sequence[int]) -> int:
    return next((place for place, label in enumerate(labels) if label != IGNORE), len(labels))

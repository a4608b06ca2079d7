"""The tasks of a model (``model.task``), one line for each.

A new task needs a line here, a loss per row in `dpllm.models.losses`, and the labels of a record in
`dpllm.data.tokenization`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpllm.config.formats.catalogue import formats_for


@dataclass(frozen=True)
class Score:
    """The figure by which two models of a task are compared."""

    name: str
    """In words."""
    larger_is_better: bool

    def merit(self, value: float) -> float | None:
        """Return a value of this figure such that larger is better; None if it is not finite.

        >>> PERPLEXITY.merit(20.0)
        -20.0
        """
        if not math.isfinite(value):
            return None
        return value if self.larger_is_better else -value


PERPLEXITY = Score("perplexity", larger_is_better=False)
"""exp of the mean loss per target token."""
ACCURACY = Score("accuracy", larger_is_better=True)
SQUARED_ERROR = Score("mean squared error", larger_is_better=False)


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        auto_class: transformers' class that builds the models, such as "AutoModelForCausalLM".
        mapping: the part of the name of transformers' mapping of classes, such as "CAUSAL_LM".
        peft: the task's name in PEFT.
        pipeline_tag: the Hub's.
        labels: of a row: "text" (token ids), "tokens" (one number for each token), "span" (marks at the tokens of an
            answer), "class" (one number) or "numbers" (one for each output).
        problem_type: in the model's configuration, where it chooses the task of a class with a head; None: not needed.
        score: by which models are compared on held-out records; None: there is none, so `dpllm methods tune` refuses
        the task.
    """

    auto_class: str
    mapping: str
    peft: str
    pipeline_tag: str
    labels: str
    problem_type: str | None = None
    score: Score | None = None

    @property
    def needs_labels(self) -> bool:
        """Whether the size of the head is the number of labels."""
        return self.auto_class in (_SEQUENCE[0], "AutoModelForTokenClassification")

    @property
    def label_per_token(self) -> bool:
        """Whether each token of a row has a number that is no token id."""
        return self.labels in ("tokens", "span")

    @property
    def formats(self) -> tuple[str, ...]:
        """Values of ``data.format`` that give labels of this task."""
        return formats_for(next(name for name, task in TASKS.items() if task == self))


_SEQUENCE = ("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", "SEQ_CLS", "text-classification")

# The Hub counts encoder-decoders as text generation too: it gave up text2text-generation (huggingface.js, pull 1590).
TASKS: Mapping[str, Task] = {
    "causal_lm": Task(
        *("AutoModelForCausalLM", "CAUSAL_LM", "CAUSAL_LM", "text-generation"),
        labels="text",
        score=PERPLEXITY,
    ),
    "seq2seq_lm": Task(
        *("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQ_2_SEQ_LM", "text-generation"),
        labels="text",
        score=PERPLEXITY,
    ),
    "sequence_classification": Task(*_SEQUENCE, labels="class", score=ACCURACY),
    "multi_label_classification": Task(
        *_SEQUENCE, labels="numbers", problem_type="multi_label_classification", score=ACCURACY
    ),
    "regression": Task(*_SEQUENCE, labels="numbers", problem_type="regression", score=SQUARED_ERROR),
    "token_classification": Task(
        *("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", "TOKEN_CLS", "token-classification"),
        labels="tokens",
        score=ACCURACY,
    ),
    "question_answering": Task(
        *("AutoModelForQuestionAnswering", "QUESTION_ANSWERING", "QUESTION_ANS", "question-answering"),
        labels="span",
        score=ACCURACY,
    ),
}
"""Values of ``model.task``."""


def labels_of(task: str | None) -> str | None:
    """Return the kind of labels of a task; None for an unknown one.

    >>> labels_of("token_classification"), labels_of(None)
    ('tokens', None)
    """
    about = TASKS.get(task or "")
    return None if about is None else about.labels

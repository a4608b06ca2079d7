"""The values of ``data.metrics``, in addition to perplexity or accuracy, and the tasks that each fits.

`dpllm.training.evaluation` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpllm.config.formats.catalogue import formats_of
from dpllm.config.formats.record_format import Completion
from dpllm.config.values import ConfigError, nearest

if TYPE_CHECKING:
    from dpllm.config.data_section import DataConfig


@dataclass(frozen=True)
class Metric:
    """One metric of held-out records.

    Attributes:
        title: its name in reports.
        tasks: values of ``model.task`` that it fits.
        library: module of the extra "metrics" that computes it; None: none is needed.
    """

    title: str
    tasks: tuple[str, ...]
    library: str | None = None


_WRITERS = ("causal_lm", "seq2seq_lm")
_ANSWERS = ("question_answering",)
_CLASSIFIERS = ("sequence_classification", "token_classification", "multi_label_classification")

METRICS: Mapping[str, Metric] = {
    "bleu": Metric("BLEU", _WRITERS, "sacrebleu"),
    "rouge1": Metric("ROUGE-1", _WRITERS, "rouge_score"),
    "rouge2": Metric("ROUGE-2", _WRITERS, "rouge_score"),
    "rougeL": Metric("ROUGE-L", _WRITERS, "rouge_score"),
    "exact_match": Metric("exact match", _WRITERS + _ANSWERS),
    "token_f1": Metric("token F1", _ANSWERS),
    "macro_f1": Metric("macro F1", _CLASSIFIERS),
}
"""Values of ``data.metrics``."""


def check_names(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is a list of different names of `METRICS`."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{name} must be a list of {', '.join(METRICS)}, got {value!r}")
    for item in value:
        if item not in METRICS:
            raise ConfigError(f"{name} has no {item!r}{nearest(item, METRICS) or '.'} Known: {', '.join(METRICS)}")
    if len(set(value)) < len(value):
        raise ConfigError(f"{name} names a metric twice: {', '.join(value)}; name each once")


def check_fit(data: DataConfig, task: str) -> None:
    """Check the metrics of a recipe against the rest of it.

    Args:
        data: the section; its `metrics` are checked.
        task: `model.task`.

    Raises:
        ConfigError: a metric does not fit the task or the format, or there is no record to measure.
    """
    for name in data.metrics:
        if task not in METRICS[name].tasks:
            fitting = [other for other, about in METRICS.items() if task in about.tasks]
            raise ConfigError(
                f"data.metrics: {name} does not fit model.task={task!r}. Metrics of this task: "
                f"{', '.join(fitting) or 'none'}"
            )
        if task == "causal_lm" and data.form.holds is not Completion:
            raise ConfigError(
                f"data.metrics: {name} compares the text after a prompt, and data.format={data.format!r} has no prompt "
                f"column: set data.format={' or '.join(formats_of(Completion))}, or set data.metrics=[]"
            )
        if task == "causal_lm" and data.long_records == "split":
            raise ConfigError(
                f"data.metrics: {name} needs the prompt of a record in one row: set data.long_records=truncate, or "
                "leave data.metrics out"
            )
    if data.metrics and not data.eval.any:
        raise ConfigError(
            "data.metrics measures held-out records, and the recipe holds none out: set data.eval, or data.metrics=[]"
        )

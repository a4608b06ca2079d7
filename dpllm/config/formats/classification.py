"""The format "classification": a model learns the class of a text, several classes, or numbers."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.record_format import Cells, RecordFormat, TextLabel, column
from dpllm.config.formats.text import TEXT_NAMES

_USUAL = ("label", "labels", "class", "category", "target", "sentiment")


@dataclass(frozen=True, kw_only=True)
class ClassificationFormat(RecordFormat):
    """A text and its label."""

    text: str = column("text", "the text", usual=TEXT_NAMES, trl="text")
    label: str = column("label", "the class, a list of classes, or numbers", Cells.ANY, label=True, usual=_USUAL)

    name = "classification"
    about = "a text and its label"
    table = (
        "`text`, `label`: 0, 1, 2, …; a list of them (`model.task: multi_label_classification`); a "
        "number, or a list of `model.num_labels` numbers (`regression`)",
        "the class, the classes, the numbers",
    )
    holds = TextLabel
    tasks = ("sequence_classification", "multi_label_classification", "regression")
    aliases = ("text+label",)

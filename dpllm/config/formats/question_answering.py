"""The format "question_answering": a model learns the place of an answer in a text."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.record_format import Cells, Question, RecordFormat, column
from dpllm.config.topics import Topic


@dataclass(frozen=True, kw_only=True)
class QuestionColumns(Topic):
    """The columns of a question, the text that holds the answer, and the answers."""

    question_column: str = column("question", "the question")
    context_column: str = column("context", "the text that holds the answer")
    answers_column: str = column("answers", "the answers, as in SQuAD", Cells.ANY, label=True)


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringFormat(QuestionColumns, RecordFormat):
    """Question and context as a pair of texts; the labels mark the first answer, or the row's first token."""

    name = "question_answering"
    about = "a question and the place of its answer in a text"
    table = (
        "`question_column`, `context_column`, `answers_column`: `{text: [...], answer_start: [...]}` as in SQuAD, of "
        "which the first counts",
        "first and last token of the answer in the context; the row's first token if there is none, or if it was cut "
        "off",
    )
    holds = Question
    tasks = ("question_answering",)
    asked = False

"""The format "question_answering": a model learns the place of an answer in a text."""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.config.formats.record_format import Cells, Question, RecordFormat, column


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringFormat(RecordFormat):
    """Question and context as a pair of texts; the labels mark the first answer, or the row's first token."""

    question: str = column("question", "the question")
    context: str = column("context", "the text that holds the answer")
    answers: str = column("answers", "the answers, as in SQuAD", Cells.ANY, label=True)

    name = "question_answering"
    about = "a question and the place of its answer in a text"
    table = (
        "`question`, `context`, `answers`: `{text: [...], answer_start: [...]}` as in SQuAD, of which the first counts",
        "first and last token of the answer in the context; the row's first token if there is none, or if it was cut "
        "off",
    )
    holds = Question
    tasks = ("question_answering",)
    asked = False

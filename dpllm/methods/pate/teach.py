"""A PATE run: teachers in turn, the vote, the labels or completions, and the student.

Place in the flow: called by `dpllm methods pate` with what `dpllm.methods.pate.prepare` made. Before the vote nothing
leaves the process; the vote is charged before it is counted; everything after it looks at no private record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.rows import unit_index_of
from dpllm.methods.pate.classroom import Classroom
from dpllm.methods.pate.completing import completed_texts
from dpllm.methods.pate.labelling import labelled_texts
from dpllm.methods.pate.prepare import Prepared, prepare
from dpllm.methods.pate.trainings import train_without_privacy
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from
from dpllm.privacy.query_plan import QueryPlan
from dpllm.report.disclosures import HELD_OUT
from dpllm.training.evaluation import measure

LABELS_FILE, TEXTS_FILE = "labels.jsonl", "texts.jsonl"
STUDENT_FOLDER = "student"
Say = Callable[[str], None]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Taught:
    """The result of a run, all of it public.

    Attributes:
        num_texts: texts that got a label or a completion.
        figures: of the held-out records, by name; empty without them. ε covers them only if these records are public.
    """

    num_texts: int
    figures: Mapping[str, float]


def teach(prepared: Prepared, say: Say, done: Progress) -> Taught:
    """Carry out a PATE run: train the teachers, release noisy labels or completions, and train the student.

    Args:
        prepared: recipe, data and plan.
        say: prints a line at the begin of each phase.
        done: called with the number of teachers that have voted, or for tokens that were trained, after each.

    Raises:
        ValueError, ConfigError: the model or a record cannot be used; or the folder holds a run.
        BudgetError: the budget does not allow the run.
    """
    recipe, options = prepared.recipe, prepared.options
    say(f"reading the model {prepared.model.name or 'of model.config'}")
    classroom = Classroom(prepared)
    rows = classroom.private_rows()  # a record that cannot be used ends the run before anything is charged
    classroom.require_room()
    file = TEXTS_FILE if prepared.tokens else LABELS_FILE
    with begin_from(recipe, prepared.plan, results=[file, *([STUDENT_FOLDER] if options.student else [])]) as run:
        run.note_units(unit_index_of(rows, recipe.privacy))
        for point in classroom.points:
            run.open_point(point)
        say(f"training {options.teachers} teachers in turn, without privacy; nothing of them is shown")
        made = (completed_texts if prepared.tokens else labelled_texts)(classroom, rows, run, say, done)
        path = Path(recipe.output_dir) / file
        write_texts(made, path)
        figures: dict[str, float] = {}
        released = [path]
        try:
            if options.student and len(made):
                kind = "completed" if prepared.tokens else "labelled"
                say(f"training the student on {len(made):,} {kind} public texts")
                if prepared.tokens:
                    figures |= measured(classroom, run, classroom.base.begin(), "the public model")
                student = train_student(classroom, run, made)
                released += save_student(classroom, student)
                figures |= measured(classroom, run, student, "the student")
        finally:  # the vote is paid for, whatever becomes of the student
            run.release(*released)
    return Taught(len(made), figures)


def write_texts(made: datasets.Dataset, path: Path) -> None:
    """Write the labelled or completed texts, one JSON object a line, in the columns of the private records."""
    with open(path, "w", encoding="utf-8") as file:
        for row in made:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def train_student(classroom: Classroom, run: QueryRun, made: datasets.Dataset) -> Any:
    """Train the student on the labelled or completed texts, from the start of the teachers, and return it.

    It is computed from released labels or tokens, public texts and public weights, so it costs nothing.
    """
    options = classroom.prepared.options
    section = options.train if options.student_train is None else options.student_train
    rows = classroom.rows(made)
    return train_without_privacy(classroom.base.begin(), rows, classroom.collator, section, run.private_folder)


def save_student(classroom: Classroom, student: Any) -> list[Path]:
    """Write the student and its tokenizer, and return the files."""
    folder = Path(classroom.prepared.recipe.output_dir) / STUDENT_FOLDER
    student.save_pretrained(folder)
    classroom.tokenizer.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def measured(classroom: Classroom, run: QueryRun, model: Any, whose: str) -> dict[str, float]:
    """Return a model's accuracy or perplexity on the held-out records, if there are any, by name.

    ε does not cover a figure of private records: it is noted as a disclosure, and not written.
    """
    prepared = classroom.prepared
    if prepared.held_out is None:
        return {}
    found = measure(model, classroom.rows(prepared.held_out), classroom.collator)
    if prepared.recipe.data.eval.public:
        run.fact(f"{found.name} of {whose} on public held-out records", f"{found.value:.4g}")
    else:
        run.disclose(HELD_OUT)
    return {f"{found.name} of {whose} on the held-out records": found.value}


def _carry_out(recipe: QueryRecipe, prepared: Prepared, plan: QueryPlan, say: Say) -> dict[str, Any]:
    teachers, every = recipe.options.teachers, max(1, recipe.options.teachers // 10)

    def done(number: int) -> None:
        if number % every == 0 or number == teachers:
            say(f"  {number} of {teachers} teachers {'are trained' if prepared.tokens else 'have voted'}")

    taught = teach(prepared, say, done)
    figures = {name: float(f"{value:.4g}") for name, value in taught.figures.items()}
    return {"texts" if prepared.tokens else "labels": taught.num_texts, **figures}


QUERY = QueryCommand(
    "reading the records and the public texts", prepare, lambda recipe, prepared: prepared.plan, _carry_out
)

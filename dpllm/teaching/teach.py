"""A PATE run: teachers in turn, the vote, the labels, and the student.

Place in the flow: called by `dpllm teach` with what `dpllm.teaching.prepare` made. Before the vote nothing leaves the
process; the vote is charged before it is counted; everything after the labels looks at no private record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from dpllm.data.rows import RowCollator, tokenize_records, unit_index_of
from dpllm.data.units import Int64Array
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.models.starting_point import check_start
from dpllm.queries.planned import begin_from
from dpllm.queries.run import QueryRun
from dpllm.report.disclosures import HELD_OUT
from dpllm.teaching.partition import Partition
from dpllm.teaching.prepare import Prepared
from dpllm.teaching.release import ballots_of, released_labels
from dpllm.teaching.trainings import OneBase, classes_of, train_without_privacy
from dpllm.teaching.votes import NO_LABEL, Ballots
from dpllm.training.evaluation import measure

LABELS_FILE = "labels.jsonl"
STUDENT_FOLDER = "student"
Say = Callable[[str], None]
Voted = Callable[[int], None]


@dataclass(frozen=True)
class Taught:
    """The result of a run, all of it public.

    Attributes:
        num_labels: texts that got a label.
        accuracy: of the student on the held-out records; None without them. ε covers it only if they are public.
    """

    num_labels: int
    accuracy: float | None


class Classroom:
    """The public model in memory, with its tokenizer, and rows of texts for it.

    Args:
        prepared: of the run.
    """

    def __init__(self, prepared: Prepared) -> None:
        """Load the model with the recipe's adapters, and its tokenizer, which may be trained on the public texts.

        Raises:
            ConfigError: they cannot be loaded, or the start holds private records.
        """
        self.prepared = prepared
        self.tokenizer = load_tokenizer(prepared.model, prepared.prompts[prepared.prompts_data.text_column])
        base = load_base_model(prepared.model, self.tokenizer, prepared.num_classes)
        model = prepare_model(base, prepared.model)
        declared = check_start(model, None, prepared.model.start_is_independent)
        self.points = (*prepared.points, *declared)
        self.base = OneBase(model)
        self.collator = RowCollator(pad_token_id=self.tokenizer.pad_token_id, task=prepared.model.task)

    def rows(self, records: datasets.Dataset, keep: Sequence[str] = ()) -> datasets.Dataset:
        """Return the rows of records with classes."""
        prepared = self.prepared
        data, task = prepared.recipe.data, prepared.model.task
        return tokenize_records(records, self.tokenizer, data, keep, task, prepared.num_classes)

    def private_rows(self) -> datasets.Dataset:
        """Return the rows of the private records, with the ids of their users."""
        column = self.prepared.recipe.privacy.unit_column
        return self.rows(self.prepared.private, [column] if column else [])

    def prompts(self) -> datasets.Dataset:
        """Return the rows of the public texts, with class 0, which is not read."""
        return self.rows(self.labelled(np.zeros(len(self.prepared.prompts), dtype=np.int64)))

    def labelled(self, labels_N: Int64Array) -> datasets.Dataset:
        """Return the public texts that have a label, with it, in the columns of the private records."""
        prepared, data = self.prepared, self.prepared.recipe.data
        chosen = np.flatnonzero(labels_N != NO_LABEL)
        texts = prepared.prompts.select(chosen)[prepared.prompts_data.text_column]
        return datasets.Dataset.from_dict({data.text_column: texts, data.label_column: labels_N[chosen].tolist()})


def teach(prepared: Prepared, say: Say, voted: Voted) -> Taught:
    """Carry out a PATE run: train the teachers, release noisy labels of the public texts, and train the student.

    Args:
        prepared: recipe, data and plan.
        say: prints a line at the begin of each phase.
        voted: called with the number of teachers that have voted, after each.

    Raises:
        ValueError, ConfigError: the model or a record cannot be used; or the folder holds a run.
        BudgetError: the budget does not allow the run.
    """
    recipe, options = prepared.recipe, prepared.options
    say(f"reading the model {prepared.model.name or 'of model.config'}")
    classroom = Classroom(prepared)
    rows = classroom.private_rows()  # a record that cannot be used ends the run before anything is charged
    with begin_from(recipe, prepared.plan) as run:
        for point in classroom.points:
            run.open_point(point)
        say(f"training {options.teachers} teachers in turn, without privacy; nothing of them is shown")
        ballots = count_votes(classroom, rows, run, voted)
        say(f"labelling {prepared.vote.num_prompts:,} public texts by a noisy vote")
        labels_N = released_labels(prepared.vote, options.teachers, run, ballots)
        labelled = classroom.labelled(labels_N)
        path = Path(recipe.output_dir) / LABELS_FILE
        write_labels(labelled, path)
        run.fact("labelled public texts", len(labelled))
        accuracy, released = None, [path]
        try:
            if options.student and len(labelled):
                say(f"training the student on {len(labelled):,} labelled public texts")
                student = train_student(classroom, run, labelled)
                released += save_student(classroom, student)
                accuracy = measured(classroom, run, student)
        finally:  # the labels are paid for, whatever becomes of the student
            run.release(*released)
    return Taught(len(labelled), accuracy)


def count_votes(classroom: Classroom, rows: datasets.Dataset, run: QueryRun, voted: Voted) -> Ballots:
    """Train every teacher on the rows of its units, and return the counts of their votes, which are private.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run; its secret randomness divides the units.
        voted: called with the number of teachers that have voted, after each.
    """
    prepared = classroom.prepared
    options = prepared.options
    units = unit_index_of(rows, prepared.recipe.privacy, run.randomness.generator())
    partition = Partition(prepared.plan.num_units, options.teachers, run.randomness.generator())
    prompts = classroom.prompts()

    def vote_of(teacher: int, rows_of_teacher: Int64Array) -> Int64Array:
        model = classroom.base.begin()
        own = rows.select(rows_of_teacher)
        if len(own):
            model = train_without_privacy(model, own, classroom.collator, options.train, run.private_folder)
        classes_N = classes_of(model, prompts, classroom.collator)
        voted(teacher + 1)
        return classes_N

    return ballots_of(partition, units, Ballots(len(prompts), prepared.num_classes), vote_of)


def write_labels(labelled: datasets.Dataset, path: Path) -> None:
    """Write the labelled texts, one JSON object a line, in the columns of the private records."""
    with open(path, "w", encoding="utf-8") as file:
        for row in labelled:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def train_student(classroom: Classroom, run: QueryRun, labelled: datasets.Dataset) -> Any:
    """Train the student on the labelled texts, from the start of the teachers, and return it.

    It is computed from released labels, public texts and public weights, so it costs nothing.
    """
    options = classroom.prepared.options
    section = options.train if options.student_train is None else options.student_train
    rows = classroom.rows(labelled)
    return train_without_privacy(classroom.base.begin(), rows, classroom.collator, section, run.private_folder)


def save_student(classroom: Classroom, student: Any) -> list[Path]:
    """Write the student and its tokenizer, and return the files."""
    folder = Path(classroom.prepared.recipe.output_dir) / STUDENT_FOLDER
    student.save_pretrained(folder)
    classroom.tokenizer.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def measured(classroom: Classroom, run: QueryRun, student: Any) -> float | None:
    """Return the student's accuracy on the held-out records, if there are any.

    ε does not cover a figure of private records: it is noted as a disclosure, and not written.
    """
    prepared = classroom.prepared
    if prepared.held_out is None:
        return None
    accuracy = measure(student, classroom.rows(prepared.held_out), classroom.collator).value
    if prepared.recipe.data.eval_is_public:
        run.fact("accuracy of the student on public held-out records", f"{accuracy:.4g}")
    else:
        run.disclose(HELD_OUT)
    return accuracy

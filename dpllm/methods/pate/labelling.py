"""Public texts with labels: every teacher is trained and votes once, and the vote is released with noise.

Place in the flow: called by `dpllm.methods.pate.teach` for a model that is a classifier. A teacher is not kept: it
votes on all texts before the next one is trained.
"""

from __future__ import annotations

from collections.abc import Callable

import datasets

from dpllm.data.rows import unit_index_of
from dpllm.data.units import Int64Array
from dpllm.methods.pate.classroom import Classroom
from dpllm.methods.pate.partition import Partition
from dpllm.methods.pate.release import ballots_of, released_labels
from dpllm.methods.pate.trainings import classes_of, train_without_privacy
from dpllm.methods.pate.votes import Ballots
from dpllm.methods.queries.run import QueryRun

Voted = Callable[[int], None]


def labelled_texts(
    classroom: Classroom, rows: datasets.Dataset, run: QueryRun, say: Callable[[str], None], voted: Voted
) -> datasets.Dataset:
    """Return the public texts that got a label, in the columns of the private records.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run, which is charged for the labels.
        say: prints a line.
        voted: as for `count_votes`.
    """
    prepared = classroom.prepared
    ballots = count_votes(classroom, rows, run, voted)
    say(f"labelling {prepared.vote.num_prompts:,} public texts by a noisy vote")
    labels_N = released_labels(prepared.vote, prepared.options.teachers, run, ballots)
    labelled = classroom.labelled(labels_N)
    run.fact("labelled public texts", len(labelled))
    return labelled


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
    assert prepared.num_classes is not None, "teachers of tokens write in dpllm.methods.pate.completing"

    def vote_of(teacher: int, rows_of_teacher: Int64Array) -> Int64Array:
        model = classroom.base.begin()
        own = rows.select(rows_of_teacher)
        if len(own):
            model = train_without_privacy(model, own, classroom.collator, options.train, run.private_folder)
        classes_N = classes_of(model, prompts, classroom.collator)
        voted(teacher + 1)
        return classes_N

    return ballots_of(partition, units, Ballots(len(prompts), prepared.num_classes), vote_of)

"""Public texts with completions: all teachers are trained, and then write on together, token by token.

Place in the flow: called by `dpllm.methods.pate.teach` for a causal language model. The teachers are kept in memory
until the last text is written: of each only the trained parameters, which with adapters are small.
"""

from __future__ import annotations

from collections.abc import Callable

import datasets

from dpllm.data.rows import unit_index_of
from dpllm.methods.pate.classroom import Classroom
from dpllm.methods.pate.panel import Panel
from dpllm.methods.pate.partition import Partition
from dpllm.methods.pate.release import TokenVotes
from dpllm.methods.pate.tokens import written_tokens
from dpllm.methods.pate.trainings import State, train_without_privacy
from dpllm.methods.queries.run import QueryRun

Trained = Callable[[int], None]


def completed_texts(
    classroom: Classroom, rows: datasets.Dataset, run: QueryRun, say: Callable[[str], None], trained: Trained
) -> datasets.Dataset:
    """Return the public texts that were continued, in the columns of the private records.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run, which is charged for all tokens that the texts may have.
        say: prints a line.
        trained: called with the number of teachers that were trained, after each.
    """
    prepared = classroom.prepared
    options, vote = prepared.options, prepared.vote
    teachers = trained_teachers(classroom, rows, run, trained)
    prompts = classroom.encoded_prompts()
    say(f"continuing {len(prompts):,} public texts by at most {vote.most_labels:,} tokens, each by a noisy vote")
    votes = TokenVotes(vote, options.teachers, run, options.public_votes)
    ends, rng = classroom.ends(), run.randomness.generator()
    barred = {number for number in classroom.tokenizer.all_special_ids if number not in ends}
    texts: list[list[int]] = []
    for start in range(0, len(prompts), options.rows_per_pass):
        part = prompts[start : start + options.rows_per_pass]
        if not votes.left:
            texts += [[] for _ in part]
            continue
        panel = Panel(classroom.base, teachers, part, options, rng, barred, len(classroom.tokenizer))
        texts += written_tokens(panel, votes, prepared.new_tokens, ends)
    completed = classroom.completed(texts)
    run.fact("completed public texts", len(completed))
    run.fact("tokens of the completions", sum(map(len, texts)))
    run.fact("tokens by vote, with those that end a text", vote.most_labels - votes.left)
    return completed


def trained_teachers(classroom: Classroom, rows: datasets.Dataset, run: QueryRun, trained: Trained) -> list[State]:
    """Train every teacher on the rows of its units, and return their values, which are private.

    Args:
        classroom: with the model.
        rows: of the private records.
        run: the run; its secret randomness divides the units.
        trained: called with the number of teachers that were trained, after each.
    """
    prepared = classroom.prepared
    options = prepared.options
    units = unit_index_of(rows, prepared.recipe.privacy, run.randomness.generator())
    partition = Partition(prepared.plan.num_units, options.teachers, run.randomness.generator())
    teachers: list[State] = []
    for teacher in range(options.teachers):
        model = classroom.base.begin()
        own = rows.select(partition.rows_of(teacher, units))
        if len(own):
            train_without_privacy(model, own, classroom.collator, options.train, run.private_folder)
        teachers.append(classroom.base.state())
        trained(teacher + 1)
    return teachers

"""Sample and aggregate from a recipe: its plan, its groups, and one private answer to each question.

Place in the flow: above the asking and the combination; the command `dpllm methods aggregate` calls it. Every question
is charged before a record reaches the model. What can be refused is refused before that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scipy import stats

from dpllm.config import ConfigError
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.units import Int64Array
from dpllm.mechanism.events import Event
from dpllm.methods.aggregate.combined import Combined, combined
from dpllm.methods.aggregate.section import AggregateConfig, Question
from dpllm.methods.predict.asking import Asker, Limits
from dpllm.methods.predict.inputs import (
    PrivateRecords,
    load_public_model,
    model_section,
    read_records,
    require_independent_rows,
    require_memory,
    secret_groups,
)
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from, plan_from
from dpllm.privacy.query_plan import QueryPlan, Value

METHOD = "answers of groups"
GROUPS, GROUP_SIZE, KIND = "groups", "group size, units", ": kind"
"""Names of settings of the plan, and the end of the name of a question's."""
THRESHOLDS = 0.1
"""The share of δ for the thresholds of all open questions together."""


def charge_name(question: Question) -> str:
    """Return the name of a question's charge."""
    return f"answer to {question.name!r}"


def plan_aggregate(recipe: QueryRecipe, num_units: int) -> QueryPlan:
    """Return the plan of a recipe's run; it needs the number of units and no record.

    Raises:
        ConfigError: there is no question, the units do not suffice, or an open answer could never be released.
        ValueError: δ is out of range, or no noise reaches the target.
    """
    options = _options(recipe)
    if not options.questions:
        raise ConfigError("aggregate.questions is missing: list one question or more, each with name, ask and kind")
    if options.groups * options.group_size > num_units:
        raise ConfigError(
            f"aggregate.groups={options.groups:,} groups of {options.group_size:,} units need "
            f"{options.groups * options.group_size:,} units, and there are {num_units:,}: take fewer groups, or a "
            "smaller group_size. A unit cannot be in two groups"
        )
    ways = combinations(recipe, num_units)

    def charges_of(sigma: float) -> list[tuple[str, Event, int]]:
        return [(charge_name(question), way.event(sigma), 1) for question, way in ways]

    plan = plan_from(recipe, METHOD, num_units, charges_of, randomness="discrete")
    settings: list[tuple[str, Value]] = [(GROUPS, options.groups), (GROUP_SIZE, options.group_size)]
    for question, way in ways:
        try:
            numbers = way.settings(_noise(plan), options.groups)
        except ValueError as error:
            raise ConfigError(f"question {question.name!r}: {error}") from error
        settings += [
            (f"{question.name}{KIND}", question.kind),
            (f"{question.name}: asked", " ".join(question.ask.split())),
        ]
        settings += [(f"{question.name}: {name}", value) for name, value in numbers]
    return dataclasses.replace(plan, settings=tuple(settings))


def combinations(recipe: QueryRecipe, num_units: int) -> list[tuple[Question, Combined]]:
    """Return each question with how its answers are combined; open ones share a tenth of δ for their thresholds."""
    options = _options(recipe)
    num_open = sum(question.kind == "open" for question in options.questions)
    share = THRESHOLDS * recipe.privacy.delta_for(num_units) / max(num_open, 1)
    margin = float(stats.norm.isf(share))
    return [(question, combined(question, margin, options.max_words)) for question in options.questions]


def ask_groups(
    recipe: QueryRecipe, records: PrivateRecords, plan: QueryPlan, say: Callable[[str], None]
) -> dict[str, Any]:
    """Carry out the run of a recipe, and return the released answer to each question, by name.

    Args:
        recipe: with the sections ``model`` and ``aggregate``.
        records: as `read_records` returns them.
        plan: as `plan_aggregate` returns it.
        say: prints a line.

    Raises:
        ConfigError: the model does not load, has no room, couples rows or does not fit into memory.
        ValueError: the plan is another one, the budget does not allow the run, or the folder holds another.
    """
    options = _options(recipe)
    ways = combinations(recipe, records.num_units)
    sizes = ((GROUPS, options.groups), (GROUP_SIZE, options.group_size))
    wanted = [(charge_name(question), way.event(_noise(plan)), 1) for question, way in ways]
    planned = [(charge.name, charge.event, charge.count) for charge in plan.charges]
    if planned != wanted or plan.num_units != records.num_units or plan.settings[:2] != sizes:
        raise ValueError("the plan is not that of this recipe and these records: make it with plan_aggregate")
    say(f"loading {model_section(recipe).name}")
    asker, points = _asker(recipe)
    number = "1 question" if len(ways) == 1 else f"{len(ways)} questions"
    say(f"{number} to {options.groups:,} groups of {options.group_size:,} units; all are charged now")
    with begin_from(recipe, plan, results=[options.file]) as run:
        run.note_units(records.units)
        for point in points:
            run.open_point(point)
        found: dict[str, Any] = {}
        asked = _Asked(asker, records)
        for name, answer in charged_answers(run, ways, records.num_units, options.groups, options.group_size, asked):
            found[name] = answer
            say(f"{name} is answered")
        path = run.folder / options.file
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        run.release(path)
    return found


def _noise(plan: QueryPlan) -> float:
    """Return σ, which all questions have in common."""
    return plan.event.noise_multiplier


def charged_answers(
    run: QueryRun,
    ways: Sequence[tuple[Question, Combined]],
    num_units: int,
    num_groups: int,
    group_size: int,
    asked: Callable[[Question, Sequence[Int64Array]], Sequence[Any]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Charge all questions, divide the units, and yield the name and the private answer of each question.

    Args:
        run: with a charge for each question.
        ways: each question with how its answers are combined.
        num_units: N.
        num_groups: m.
        group_size: s.
        asked: from a question and the units of each group to one answer of each group.

    Raises:
        ValueError: there is not one answer of each group.
    """
    for question, _ in ways:
        run.charge(charge_name(question))
    groups = secret_groups(num_units, group_size, num_groups)
    sigma = _noise(run.plan)
    for question, way in ways:
        answers = asked(question, groups)
        if len(answers) != num_groups:
            raise ValueError(f"{len(answers)} of {num_groups} groups have answered")
        yield (
            question.name,
            way.released(answers, sigma, lambda numbers, change: run.randomness.noisy(numbers, sigma, change)),
        )


class _Asked:
    """The answers of a model for the records of each group."""

    def __init__(self, asker: Asker, records: PrivateRecords) -> None:
        self._asker, self._records = asker, records

    def __call__(self, question: Question, groups: Sequence[Int64Array]) -> Sequence[Any]:
        """Return one answer of each group, which are private."""
        texts = [[text for unit in self._records.contexts(group) for text in unit] for group in groups]
        if question.answers is not None:
            return self._asker.likeliest(texts, question.ask, question.answers)
        return self._asker.texts(texts, question.ask)


def _asker(recipe: QueryRecipe) -> tuple[Asker, list[str]]:
    """Return the loaded model, ready to be asked, and open points about it."""
    options = _options(recipe)
    model, tokenizer, points = load_public_model(recipe)
    limits = Limits(
        records=options.group_size * (recipe.privacy.max_rows_per_unit or 1),
        record_tokens=recipe.data.max_length,
        max_new_tokens=options.max_new_tokens,
        rows_per_pass=options.rows_per_pass,
        cached=options.cached,
    )
    asker = Asker(model, tokenizer, options.opening, limits)
    length, most = asker.require_room([(question.ask, question.answers or ()) for question in options.questions])
    require_independent_rows(model, length, options.rows_per_pass, most - length)
    if next(model.parameters()).device.type != "cpu":
        require_memory(model, most, options.rows_per_pass, options.rows_per_pass, options.cached)
    return asker, points


def _options(recipe: QueryRecipe) -> AggregateConfig:
    assert isinstance(recipe.options, AggregateConfig)  # `load_query_recipe` made it
    return recipe.options


QUERY = QueryCommand(
    "reading the records",
    read_records,
    lambda recipe, records: plan_aggregate(recipe, records.num_units),
    ask_groups,
)

"""Noisy counts of public classes: `dpllm methods count`.

A unit has at most k rows, which may all have one class, so removing it changes the counts by at most k in l2 norm.
Replacing it by a different unit moves k rows from one class to another, which changes the counts by at most k√2.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.config import ConfigError
from dpllm.config.formats.catalogue import formats_of
from dpllm.config.formats.record_format import TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.rows import DataError, load_records, unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import UnitIndex
from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from, plan_from
from dpllm.privacy.query_plan import QueryPlan

METHOD = CHARGE = "label counts"
REPLACED = math.sqrt(2)
"""The largest change of the counts when a unit is replaced, over that when one is removed."""


@dataclass(frozen=True)
class LabelledUnits:
    """The labels of all rows, and the units that the rows belong to."""

    classes: tuple[str, ...]
    """Public, from the recipe."""
    labels: Sequence[Any]
    """The label of each row: the name of a class, or its number."""
    index: UnitIndex
    """The rows of each unit, at most k."""

    def exact_counts(self) -> list[int]:
        """Count the rows of each class. The result is private: never print or save it.

        Raises:
            DataError: the label of a row is not one of the classes; the message gives the row, not the label.
        """
        numbers = {name: number for number, name in enumerate(self.classes)}
        numbers_of: Counter[int] = Counter()
        for row in self.index.rows:
            label = self.labels[int(row)]
            number = numbers.get(label) if isinstance(label, str) else label
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.classes):
                raise DataError(
                    f"row {int(row)} has a label that is none of the {len(self.classes)} classes in data.class_names: "
                    "list every class that may occur, or correct the row. Nothing was charged"
                )
            numbers_of[number] += 1
        return [numbers_of[number] for number in range(len(self.classes))]


def read_units(recipe: QueryRecipe) -> LabelledUnits:
    """Return the labels of a recipe's records.

    Raises:
        ConfigError: no classes are named.
        DataError: the records cannot be read, or lack a column.
    """
    data = recipe.data
    if data.class_names is None:
        raise ConfigError(
            "data.class_names is missing: list the names of all classes that may occur. They are public, and are never "
            "collected from the records"
        )
    form = data.form
    if form.holds is not TextLabel:
        fitting = " or ".join(formats_of(TextLabel))
        raise ConfigError(f"data.format={data.format!r} has no labels to count: set data.format={fitting}")
    records = load_records(data, recipe.privacy)
    refuse_private_parts(recipe, records)
    index = unit_index_of(records, recipe.privacy, secret_rng())
    return LabelledUnits(tuple(data.class_names), records[str(form.labels)], index)


def plan_count(recipe: QueryRecipe, units: LabelledUnits) -> QueryPlan:
    """Plan the counts; of the units only N is used.

    Raises:
        ValueError: δ or the target ε is out of range.
    """
    k = recipe.privacy.max_rows_per_unit or 1

    def charges_of(sigma: float) -> list[tuple[str, Event, int]]:
        return [(CHARGE, Query(noise_multiplier=sigma, replaced=REPLACED, discrete=True), 1)]

    return plan_from(
        recipe,
        METHOD,
        units.index.num_units,
        charges_of,
        settings=(
            ("classes", ", ".join(units.classes)),
            ("largest change by one unit (l2), zero-out", k),
            ("largest change by one unit (l2), replace-one", k * REPLACED),
        ),
        randomness="discrete",
    )


def charge_and_count(run: QueryRun, units: LabelledUnits, counts: Sequence[int]) -> dict[str, int]:
    """Charge the counts and return them with noise, for a run whose plan has the charge of `plan_count`.

    Returns:
        The noisy number of rows of each class, a whole number of at least 0.

    Raises:
        ValueError: the plan lacks the charge, or it is used up.
    """
    event = run.plan.charge(CHARGE).event
    run.charge(CHARGE)
    noisy = run.randomness.noisy(counts, event.noise_multiplier, run.plan.max_rows_per_unit or 1)
    return {name: max(0, round(value)) for name, value in zip(units.classes, noisy, strict=True)}


def count_labels(recipe: QueryRecipe, units: LabelledUnits, plan: QueryPlan) -> dict[str, int]:
    """Run a recipe and return the released counts.

    Raises:
        ValueError: the folder already holds a run, or the budget is too small. Nothing is charged then.
    """
    exact = units.exact_counts()  # an unknown label ends the run before anything is charged
    with begin_from(recipe, plan, results=[recipe.options.file]) as run:
        run.note_units(units.index)
        counts = charge_and_count(run, units, exact)
        event, k = plan.charge(CHARGE).event, recipe.privacy.max_rows_per_unit or 1
        path = run.folder / recipe.options.file
        body = {"counts": counts, "standard_deviation_of_the_noise": event.noise_multiplier * k}
        path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        run.release(path)
    return counts


QUERY = QueryCommand(
    "reading the labels",
    read_units,
    plan_count,
    lambda recipe, units, plan, say: {"counts": count_labels(recipe, units, plan)},
)

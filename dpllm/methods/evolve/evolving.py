"""`dpllm methods evolve`: the run of Private Evolution, from its recipe to its texts.

Place in the flow: above `evolution`: records, models and plan from a recipe. Everything that can be wrong with them is
found before anything is charged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpllm.config import ConfigError, DataConfig
from dpllm.config.formats.catalogue import formats_of
from dpllm.config.formats.record_format import Completion, Text, TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.records import check_column, load_records
from dpllm.data.rows import unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import UnitIndex
from dpllm.mechanism.events import Event
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.evolve.evolution import Evolution, PrivateRecords, evolve
from dpllm.methods.evolve.section import EvolveConfig
from dpllm.methods.evolve.votes import CHARGE, votes_charge
from dpllm.methods.queries.planned import QueryCommand, begin_from, plan_from
from dpllm.methods.synthesize.data_set import of_labels, shared_out
from dpllm.methods.synthesize.embeddings import load_embedder
from dpllm.methods.synthesize.labels import public_shares
from dpllm.methods.synthesize.making import Wanted, write_records
from dpllm.models.generation import Sampling, load_generator
from dpllm.models.starting_point import refuse_private_start
from dpllm.privacy.query_plan import QueryPlan

METHOD = "private evolution"
DECLARED = (
    "Declared independent of these records (model.start_is_independent), to be confirmed before release: the models "
    "that write and embed texts"
)


@dataclass(frozen=True)
class Voters:
    """The private records of an evolution."""

    texts: Sequence[str]
    """Of each row."""
    units: UnitIndex
    """The rows of each unit, at most k."""
    labels: Sequence[str] | None
    """Of each row; None: without classes."""


def read_voters(recipe: QueryRecipe) -> Voters:
    """Return the records of a recipe, after checking everything that can be wrong with it.

    Args:
        recipe: with the sections ``model`` and ``evolve``.

    Raises:
        ConfigError: there is no model or it is not public, the format has no text, or a record's label is no class.
        DataError: the records cannot be read, or lack a column.
    """
    options = _options(recipe)
    for name in _models(recipe):
        refuse_private_start(name, recipe.model is not None and recipe.model.start_is_independent)
    column = text_column(recipe.data)
    records = load_records(recipe.data, recipe.privacy)
    refuse_private_parts(recipe, records)
    units = unit_index_of(records, recipe.privacy, secret_rng())
    labels = None
    if options.classes is not None:
        check_column(records.column_names, str(options.label_column), recipe.data.path, records)
        labels = [str(label) for label in records[str(options.label_column)]]
        if set(labels) - set(options.classes):
            raise ConfigError(
                f"a record has a label that is not one of the {len(options.classes)} public classes: list all classes, "
                "with one for the rest, and write the records' labels in these names. Nothing was charged"
            )
    return Voters([str(text) for text in records[column]], units, labels)


def evolution_plan(recipe: QueryRecipe, voters: Voters) -> QueryPlan:
    """Return the plan of an evolution: T histograms of votes with sensitivity 1.

    Args:
        recipe: with the section ``evolve``.
        voters: of them only N is used.

    Raises:
        ValueError: δ is out of range, or no noise reaches the target.
    """
    options = _options(recipe)

    def charges_of(sigma: float) -> list[tuple[str, Event, int]]:
        charge = votes_charge(sigma, options.steps)
        return [(charge.name, charge.event, charge.count)]

    settings = (
        ("votes of a unit in a step", 1),
        ("steps", options.steps),
        ("texts kept in a step", options.number),
        ("candidates of a step, at most", options.number * (options.variations + 1)),
    )
    return plan_from(recipe, METHOD, voters.units.num_units, charges_of, settings=settings)


def run_evolution(
    recipe: QueryRecipe, voters: Voters, plan: QueryPlan, say: Callable[[str], None] = lambda _: None
) -> int:
    """Carry out an evolution, and return the number of its texts.

    Guarantee: that of its plan; private records are read by the votes only.

    Args:
        recipe: of the run.
        voters: as `read_voters` returns them.
        plan: as `evolution_plan` returns it.
        say: gets a line before each part.

    Raises:
        ValueError: a model cannot be loaded, the folder holds a run, or the budget is too small; nothing is charged
            then.
    """
    options = _options(recipe)
    writer, embedding = _models(recipe)
    declared = recipe.model is not None and recipe.model.start_is_independent
    traces = [point for name in (writer, embedding) for point in refuse_private_start(name, declared)]
    say(f"loading {writer}")
    model, embedder = load_generator(writer), load_embedder(embedding)
    say("embedding the records")
    rows, units = voters.units.rows_of(np.arange(voters.units.num_units))
    labels = None if voters.labels is None else tuple(voters.labels[row] for row in rows.tolist())
    # One by one: beside others, padding changes the rounding, and a vote between near-equal candidates with it.
    vectors = embedder.embed([voters.texts[row] for row in rows.tolist()], batch_size=1)
    private = PrivateRecords(vectors, units, labels)
    settings = Evolution(
        number=options.number,
        steps=options.steps,
        variations=options.variations,
        keep=(options.keep_from, options.keep_to),
        sampling=Sampling(max_new_tokens=options.max_new_tokens, temperature=options.temperature, top_p=options.top_p),
        batch_size=options.batch_size,
    )
    sigma = plan.charge(CHARGE).event.noise_multiplier
    name = f"texts.{options.file_format}"
    with begin_from(recipe, plan, results=[name]) as run:
        run.note_units(voters.units)
        if recipe.model is not None and recipe.model.start_is_independent:
            run.open_point(DECLARED)
        for point in traces:
            run.open_point(point)
        made = evolve(run, private, model, embedder.embed, wanted_of(options), settings, sigma, say)
        texts = run.folder / name
        write_records(texts, made)
        run.release(texts)
        run.fact("texts", len(made))
        run.fact("model that wrote the texts", Path(writer).name)
        run.fact("model of the embeddings", Path(embedding).name)
        run.fact("sampling", f"temperature {options.temperature:g}, top-p {options.top_p:g}")
    return len(made)


def wanted_of(options: EvolveConfig) -> list[Wanted]:
    """Return the prompts with their numbers of texts: even shares, which are public."""
    if options.classes is None:
        return shared_out(options.prompts, options.number)
    return of_labels(public_shares(dict.fromkeys(options.classes, 1)), options.prompts[0], options.number)


def text_column(config: DataConfig) -> str:
    """Return the column whose texts are imitated.

    Raises:
        ConfigError: the format has none.

    >>> text_column(DataConfig(path="x", max_length=8, format="prompt_completion", columns={"completion": "ref"}))
    'ref'
    """
    fitting = (Text, Completion, TextLabel)
    if config.form.holds in fitting:
        return config.form.texts[-1]
    raise ConfigError(
        f"data.format={config.format!r} has no column of texts to imitate: use {' or '.join(formats_of(*fitting))}"
    )


def _options(recipe: QueryRecipe) -> EvolveConfig:
    options = recipe.options
    if not isinstance(options, EvolveConfig):
        raise ConfigError(f"this recipe has the section {recipe.method}, and an evolution needs the section evolve")
    return options


def _models(recipe: QueryRecipe) -> tuple[str, str]:
    """Return the names of the model that writes and of the one whose embeddings are compared."""
    if recipe.model is None or not recipe.model.name:
        raise ConfigError("evolve needs a public model that writes the texts: set model.name to a folder or a Hub id")
    return recipe.model.name, _options(recipe).embedding or recipe.model.name


QUERY = QueryCommand(
    "reading the records",
    read_voters,
    evolution_plan,
    lambda recipe, voters, plan, say: {"texts": run_evolution(recipe, voters, plan, say)},
)

"""Private Evolution: synthetic text without training, from a public model and noisy votes of private records.

A public model writes texts. In each of T steps, every private record votes for the candidate whose embedding is
nearest, and the votes get Gaussian noise. The candidates with most noisy votes are kept, and the model writes
variations of them, which are candidates of the next step. The model that writes sees no private record: only the noisy
votes depend on the records, so ε is that of T Gaussian queries.

A unit has one vote in all, whatever the number of its records: its part of the histogram is not negative and adds up
to 1. So the histogram changes by at most 1 in l2 norm when a unit is left out, and by at most √2 when one is replaced.

Sources: Lin et al., arXiv:2305.15560 (algorithm 2); for text Xie et al., arXiv:2403.01749 (Aug-PE: kept by rank, with
their variations). A small local model cannot rephrase a text on demand, so a variation keeps the beginning of a text
and writes the rest again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpllm.config import ConfigError, DataConfig
from dpllm.config.formats.catalogue import formats_of
from dpllm.config.formats.record_format import Completion, Text, TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.records import check_column, load_records
from dpllm.data.rows import unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import UnitIndex
from dpllm.mechanism.events import Event
from dpllm.mechanism.query import Query
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.queries.run import QueryCommand, QueryRun, begin_from, plan_from
from dpllm.methods.sections import EvolveConfig
from dpllm.methods.synthesize.data_set import of_labels, shared_out
from dpllm.methods.synthesize.embeddings import load_embedder
from dpllm.methods.synthesize.texts import (
    LABEL,
    TEXT,
    FilterSettings,
    TextFilter,
    Wanted,
    Writer,
    make_texts,
    public_shares,
    write_records,
)
from dpllm.models.generation import Sampling, load_generator
from dpllm.models.starting_point import refuse_private_start
from dpllm.privacy.query_plan import Charge, QueryPlan

Floats = NDArray[np.float64]
Int64Array = NDArray[np.int64]
CHARGE = "votes"
SENSITIVITY = 1.0
"""The largest change of the votes when a unit is removed, in l2 norm."""
_ROWS = 1024  # records whose distances are computed together
_FARTHEST = 4.0  # limit of a record's entries, relative to the largest entry of a candidate


def votes_charge(noise_multiplier: float, steps: int) -> Charge:
    """Return the charge of all steps: each releases one histogram of votes with Gaussian noise.

    Args:
        noise_multiplier: σ, the standard deviation of the noise of each entry; the sensitivity is 1.
        steps: T.

    >>> votes_charge(8.0, 10).count
    10
    """
    event = Query(noise_multiplier=noise_multiplier / SENSITIVITY, replaced=math.sqrt(2))
    return Charge(name=CHARGE, event=event, count=steps)


def nearest(records: Floats, candidates: Floats) -> Int64Array:
    """Return, (N,), the number of the candidate nearest to each record; of equally near ones the first.

    Guarantee: the result for a record depends on this record and the candidates only, to the last bit: distances are
    whole numbers. The grid has about 2^19 steps up to the largest entry of a candidate, and entries
    of records are cut off at four times that entry.

    A record whose embedding is not finite counts as a vector of zeros, so that it has one vote as well.

    Args:
        records: (N, D) embeddings.
        candidates: (M, D) embeddings, M at least 1.

    >>> nearest(np.array([[0.0], [9.0], [np.nan]]), np.array([[1.0], [8.0]])).tolist()
    [0, 1, 0]
    """
    if len(candidates) == 0:
        raise ConfigError("there is no candidate to vote for")
    # Sums of floats depend on the number of rows of a product: without one record, near-equal candidates would win or
    # lose the votes of others. Whole numbers below 2^53 have exact sums.
    largest = float(np.abs(candidates).max(initial=0.0)) or 1.0
    steps = 2.0 ** ((49 - math.ceil(math.log2(max(1, candidates.shape[1])))) // 2)

    def on_grid(vectors: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.rint(np.clip(vectors / largest, -_FARTHEST, _FARTHEST) * steps)

    grid_MD = on_grid(candidates)
    sq_norm_M = (grid_MD**2).sum(1)
    found = np.zeros(len(records), dtype=np.int64)
    for start in range(0, len(records), _ROWS):
        block = records[start : start + _ROWS]
        block = np.where(np.isfinite(block).all(1, keepdims=True), block, 0.0)
        found[start : start + _ROWS] = (sq_norm_M - 2 * on_grid(block) @ grid_MD.T).argmin(1)
    return found


def exact_votes(
    records: Floats,
    units: Int64Array,
    candidates: Floats,
    labels: Sequence[str] | None = None,
    labels_of_candidates: Sequence[str] | None = None,
) -> Floats:
    """Return the exact histogram of votes, (M,). It is private: noise must be added before it is released.

    Guarantee: the share of each unit is not negative and adds up to 1. A unit with several records shares its vote
    evenly. With labels, a record votes among the candidates of its own label, and its share is lost if there are none.

    Args:
        records: (N, D) embeddings of private records.
        units: (N,) the unit of each record.
        candidates: (M, D) embeddings of candidates.
        labels: of each record; None: records have no labels.
        labels_of_candidates: of each candidate.

    >>> exact_votes(np.array([[0.0], [9.0], [8.0]]), np.array([0, 1, 0]), np.array([[1.0], [8.0]])).tolist()
    [0.5, 1.5]
    """
    rows_of_unit = np.bincount(units, minlength=int(units.max()) + 1 if len(units) else 0)
    share_N = 1.0 / rows_of_unit[units] if len(units) else np.zeros(0)
    votes = np.zeros(len(candidates))
    if labels is None or labels_of_candidates is None:
        np.add.at(votes, nearest(records, candidates), share_N)
        return votes
    own, theirs = np.asarray(labels, dtype=object), np.asarray(labels_of_candidates, dtype=object)
    for label in dict.fromkeys(labels_of_candidates):
        rows, places = np.flatnonzero(own == label), np.flatnonzero(theirs == label)
        np.add.at(votes, places[nearest(records[rows], candidates[places])], share_N[rows])
    return votes


def noisy_votes(run: QueryRun, noise_multiplier: float, exact: Floats) -> Floats:
    """Charge one histogram and return it with Gaussian noise, (M,).

    Guarantee: the charge is on the disk before the noise is drawn, and the noise is that of the charge.
    """
    run.charge(CHARGE)
    stddev = noise_multiplier * SENSITIVITY
    return exact + run.randomness.gaussian(len(exact), stddev)


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """Public settings of an evolution, which the section of the recipe has checked."""

    number: int
    """Texts of the result, over all labels."""
    steps: int
    """T."""
    variations: int
    """Variations of each kept text in a step; the first step has as many texts in all, from prompts."""
    keep: tuple[float, float]
    """A variation keeps a share of the words between these two, drawn at random."""
    sampling: Sampling
    """How texts are drawn."""
    batch_size: int = 32
    """The most texts that are made together."""


@dataclass(frozen=True)
class PrivateRecords:
    """The private records that vote."""

    vectors: Floats
    """(N, D) embeddings."""
    units: Int64Array
    """(N,) unit of each record."""
    labels: tuple[str, ...] | None = None
    """(N,) None: without labels."""


@dataclass(frozen=True)
class Candidate:
    """A text of the evolution, which begins with its prompt."""

    text: str
    label: str | None
    prompt: str


def evolve(
    run: QueryRun,
    records: PrivateRecords,
    model: Writer,
    embed: Callable[[Sequence[str]], Floats],
    wanted: Sequence[Wanted],
    settings: Evolution,
    noise_multiplier: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, str]]:
    """Evolve texts, and return those of the last step, each with its label if there are labels.

    Guarantee: only `exact_votes` reads private records, and its result gets the noise that was charged. Everything else
    is computed from the noisy votes and the public models.

    Args:
        run: of the evolution; its plan has T histograms of votes.
        records: private.
        model: writes texts.
        embed: from texts to (n, D) embeddings, as of the records.
        wanted: public prompts, with the numbers of kept texts after each, as `Evolution.number` shares them out.
        settings: of the evolution.
        noise_multiplier: σ of the plan.
        say: prints a line in each step.
    """
    rng = run.randomness.generator()
    first = [replace(one, count=one.count * (settings.variations + 1)) for one in wanted]
    candidates = _written(model, first, settings)
    kept: list[Candidate] = []
    for step in range(settings.steps):
        vectors = embed([one.text for one in candidates])
        labels = [str(one.label) for one in candidates] if records.labels is not None else None
        exact = exact_votes(records.vectors, records.units, vectors, records.labels, labels)
        noisy = noisy_votes(run, noise_multiplier, exact)
        kept = _best(candidates, noisy, wanted)
        say(f"step {step + 1} of {settings.steps}: {len(kept):,} of {len(candidates):,} candidates are kept")
        if step + 1 < settings.steps:
            candidates = [*kept, *_varied(model, kept, settings, rng)]
    return [{**({} if one.label is None else {LABEL: one.label}), TEXT: one.text} for one in kept]


def _written(model: Writer, wanted: Sequence[Wanted], settings: Evolution) -> list[Candidate]:
    """Let the model write texts after the prompts."""
    numbered = [replace(one, label=str(place)) for place, one in enumerate(wanted) if one.count]
    filters = TextFilter(FilterSettings(duplicates=True))
    made = make_texts(model, numbered, settings.sampling, filters, settings.batch_size)
    found = []
    for record in made.records:
        one = wanted[int(record[LABEL])]
        found.append(Candidate(_joined(str(one.prompt), record[TEXT]), one.label, str(one.prompt)))
    return found


def _varied(model: Writer, kept: Sequence[Candidate], settings: Evolution, rng: np.random.Generator) -> list[Candidate]:
    """Return variations of the kept texts: each keeps the beginning of a text, and the model writes the rest again."""
    begun: list[tuple[Candidate, str]] = []
    for one in kept:
        words, least = one.text.split(), len(one.prompt.split())
        for share in rng.uniform(*settings.keep, size=settings.variations):
            begun.append((one, " ".join(words[: max(least, int(len(words) * share))])))
    prompts = [beginning for _, beginning in begun]
    texts = (text for batch in model.sample(prompts, settings.sampling, settings.batch_size) for text in batch)
    found = []
    for (one, beginning), rest in zip(begun, texts, strict=True):
        text = _joined(beginning, rest)
        if text:
            found.append(replace(one, text=text))
    return found


def _joined(beginning: str, rest: str) -> str:
    """Join the beginning of a text and its continuation; add a space between words if the model did not write one.

    >>> _joined("The Eagle", "is cheap."), _joined("The Eagle", ", a pub")
    ('The Eagle is cheap.', 'The Eagle, a pub')
    """
    rest = rest.rstrip()
    apart = bool(beginning and rest) and rest[0].isalnum()
    return f"{beginning}{' ' if apart else ''}{rest}".strip()


def _best(candidates: Sequence[Candidate], noisy: Floats, wanted: Sequence[Wanted]) -> list[Candidate]:
    """Return, for each prompt, as many candidates as it asks for: those with the most noisy votes."""
    order = np.argsort(-noisy, kind="stable")
    left: dict[tuple[str | None, str], int] = {}
    for one in wanted:
        key = (one.label, str(one.prompt))
        left[key] = left.get(key, 0) + one.count
    kept = []
    for place in order.tolist():
        one = candidates[place]
        key = (one.label, one.prompt)
        if left.get(key, 0) > 0:
            left[key] -= 1
            kept.append(one)
    return kept


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
    """Check a recipe and read its records.

    Raises:
        ConfigError: the model is missing or not public, the format has no text, or a record's label is not a class.
        DataError: the records cannot be read, or lack a column.
    """
    options: EvolveConfig = recipe.options
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
    """Plan an evolution: T histograms of votes with sensitivity 1. Of the records only N is used.

    Raises:
        ValueError: δ is out of range, or no noise reaches the target.
    """
    options: EvolveConfig = recipe.options

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
    """Run an evolution and return the number of its texts.

    Guarantee: that of its plan. Only the votes read private records.

    Raises:
        ValueError: a model cannot be loaded, the folder holds a run, or the budget is too small; nothing is charged
            then.
    """
    options: EvolveConfig = recipe.options
    writer, embedding = _models(recipe)
    declared = recipe.model is not None and recipe.model.start_is_independent
    traces = [point for name in (writer, embedding) for point in refuse_private_start(name, declared)]
    say(f"loading {writer}")
    model, embedder = load_generator(writer), load_embedder(embedding)
    say("embedding the records")
    rows, units = voters.units.rows_of(np.arange(voters.units.num_units))
    labels = None if voters.labels is None else tuple(voters.labels[row] for row in rows.tolist())
    # One by one: padding in a batch changes the rounding, which could change a vote between near-equal candidates.
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
    """Return the prompts with their numbers of texts, which are public and equal."""
    if options.classes is None:
        return shared_out(options.prompts, options.number)
    return of_labels(public_shares(dict.fromkeys(options.classes, 1)), options.prompts[0], options.number)


def text_column(config: DataConfig) -> str:
    """Return the column of texts to imitate.

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


def _models(recipe: QueryRecipe) -> tuple[str, str]:
    """Return the names of the model that writes and of the embedding model."""
    if recipe.model is None or not recipe.model.name:
        raise ConfigError("evolve needs a public model that writes the texts: set model.name to a folder or a Hub id")
    return recipe.model.name, recipe.options.embedding or recipe.model.name


QUERY = QueryCommand(
    "reading the records",
    read_voters,
    evolution_plan,
    lambda recipe, voters, plan, say: {"texts": run_evolution(recipe, voters, plan, say)},
)

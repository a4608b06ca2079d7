"""A synthetic data set from a privately tuned model: its run, from the counts of labels to the card.

The data set is a query run (`dpllm.methods.queries`) that builds on the training run: ε is that of both together. Texts
cost nothing. Only counting the labels of the private records does. It is charged before it happens, and is the only
time that private records are read: those that the run was trained on, by its own recipe, with each unit's rows cut as
in the training. Counts get exact discrete Gaussian noise once, and everything after it reads the noisy counts only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpllm.config import RECIPE_FILE, ConfigError, load_recipe
from dpllm.config.values import between, integer
from dpllm.data.records import check_column, contents_of, load_train_and_eval
from dpllm.data.rows import unit_index_of
from dpllm.mechanism.limits import MAX_NOISE, MIN_NOISE
from dpllm.mechanism.query import Query
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.count.counting import CHARGE, REPLACED, LabelledUnits, charge_and_count
from dpllm.methods.queries.run import QueryRun, prior_release
from dpllm.methods.synthesize.texts import (
    FilterSettings,
    LabelShares,
    Made,
    TextFilter,
    Wanted,
    Writer,
    check_classes,
    make_texts,
    prompt_of,
    shares_of,
    texts_of_each,
    write_records,
)
from dpllm.models.generation import Prompt, Sampling
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.query_plan import Charge, QueryPlan, Value, training_plan
from dpllm.privacy.run_folder import compare_records

COUNTS_FILE = "label_counts.json"


@dataclass(frozen=True, kw_only=True)
class CountedLabels:
    """Labels whose shares are counted with noise.

    Raises:
        ConfigError: a value is out of range, or a class occurs twice.
    """

    classes: tuple[str, ...]
    """All public classes."""
    column: str
    """Column of the private records that holds the label."""
    noise_multiplier: float = 20.0
    """Standard deviation of the noise of a count, over the largest change of the counts by one unit."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_classes(self.classes)
        between("--count-noise", self.noise_multiplier, MIN_NOISE, MAX_NOISE)

    @property
    def charge(self) -> Charge:
        """The charge of the counts, the same as that of `dpllm methods count`."""
        event = Query(noise_multiplier=float(self.noise_multiplier), replaced=REPLACED, discrete=True)
        return Charge(name=CHARGE, event=event, count=1)

    def settings(self, rows_per_unit: int) -> tuple[tuple[str, Value], ...]:
        """Return the public settings that determine the sensitivity."""
        return (
            ("rows of a unit that are counted, at most", rows_per_unit),
            ("noise of a count (standard deviation)", float(self.noise_multiplier * rows_per_unit)),
            ("classes", len(self.classes)),
        )


def read_labels(folder: str | Path, plan: QueryPlan, counted: CountedLabels) -> tuple[LabelledUnits, str | None]:
    """Read the labels of the records that a run was trained on; also return a doubt if the records cannot be compared.

    Nothing is charged yet. The column of the labels may have been added after the training.

    Raises:
        ConfigError: the folder has no recipe; or the records cannot be read, lack the column or have different units.
        LedgerError: the contents of the records differ from those of the training.
    """
    path = Path(folder) / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} holds no {RECIPE_FILE}, so the records whose labels are counted are unknown: count in the "
            "folder of the run itself, or give the shares as public"
        )
    recipe = load_recipe(path)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    check_column(records.column_names, counted.column, recipe.data.path, records)
    units = unit_index_of(records, recipe.privacy, secret_rng())
    if units.num_units != plan.num_units or units.max_rows > (plan.max_rows_per_unit or 1):
        raise ConfigError(
            f"{recipe.data.path} does not have the {plan.num_units:,} units that the run in {folder} was trained on: "
            "restore the records of the training. The guarantee of both together needs the same people"
        )
    doubt = compare_records(Path(folder) / LEDGER_FILE, contents_of(records))
    return LabelledUnits(counted.classes, [str(label) for label in records[counted.column]], units), doubt


def count_noisily(run: QueryRun, units: LabelledUnits, exact: Sequence[int]) -> LabelShares:
    """Charge the counts, add their noise, write them, and return the resulting shares.

    Guarantee: only the noisy counts leave this function, and they were charged before the noise was drawn.

    Raises:
        ConfigError: no noisy count is above 0.
    """
    noisy = charge_and_count(run, units, exact)
    path = run.folder / COUNTS_FILE
    path.write_text(json.dumps(noisy, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return shares_of(list(noisy), np.array(list(noisy.values()), dtype=np.float64))


METHOD = "synthetic text"
FORMATS = ("jsonl", "parquet")
BLOCKED = (
    "Texts with words of a blocklist were left out. Is the list public? A list made from the private records, such as "
    "the names of patients, shows by the texts that are missing who is in them, and ε does not cover that. Say where "
    "the list is from"
)
"""The open point of a data set that a blocklist filtered."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The public request for a data set.

    Raises:
        ConfigError: a number is out of range, or the format is unknown.
    """

    number: int
    """Texts in all."""
    sampling: Sampling = field(default_factory=Sampling)
    """How texts are drawn."""
    filters: FilterSettings = field(default_factory=FilterSettings)
    """Which of them are dropped."""
    batch_size: int = 16
    """The most texts that are made together."""
    file_format: str = "jsonl"
    """Of the file of texts."""

    def __post_init__(self) -> None:
        """Check the values."""
        integer("--number", self.number, 1, 100_000_000)
        integer("--batch-size", self.batch_size, 1)
        if self.file_format not in FORMATS:
            raise ConfigError(f"the format of texts is one of {', '.join(FORMATS)}, got {self.file_format!r}")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Labels of a data set, with public shares or with shares to be counted.

    Raises:
        ConfigError: neither or both are given.
    """

    template: str
    """Prompt of a label, with `{label}` in its place."""
    shares: LabelShares | None = None
    """Public shares; None: they are counted."""
    counted: CountedLabels | None = None
    """How they are counted; None: they are public."""

    def __post_init__(self) -> None:
        """Check that the shares have one source, and that the prompt has a placeholder."""
        if (self.shares is None) == (self.counted is None):
            raise ConfigError("the shares of the labels are either given as public or counted: give one of them")
        prompt_of(self.template, "")


def run_of(folder: str | Path) -> Path:
    """Return the folder of the run that a model's folder belongs to: itself, or its parent for a copy.

    Checkpoints and merged models in the folder of a run have copies of its ledger, which may lack its last lines.
    """
    folder = Path(folder)
    above = Path(os.path.realpath(folder)).parent
    try:
        own, outer = (read_ledger(place / LEDGER_FILE).runs[0]["run"] for place in (folder, above))
    except LedgerError:
        return folder
    return above if own == outer else folder


def plan_of(source: str | Path, counted: CountedLabels | None = None) -> QueryPlan:
    """Plan a data set, with the unit, δ and adjacency of the training run.

    Raises:
        ValueError: the run is not private, has not ended, or is not a training run.
    """
    folder = run_of(source)
    trained, prior = training_plan(folder, "A synthetic data set"), prior_release(folder)
    if not trained.guarantee.of(prior.history).is_finite:
        raise ConfigError(f"the run in {folder} had no noise, so a data set of its model has no guarantee")
    return QueryPlan(
        method=METHOD,
        unit=trained.unit,
        unit_column=trained.unit_column,
        max_rows_per_unit=trained.max_rows_per_unit,
        rows_kept=trained.rows_kept,
        adjacency=trained.adjacency,
        dataset=trained.dataset,
        num_units=trained.num_units,
        delta=trained.delta,
        charges=() if counted is None else (counted.charge,),
        settings=() if counted is None else counted.settings(trained.max_rows_per_unit or 1),
        randomness="os" if counted is None else "discrete",
        after=prior,
    )


def make_data_set(
    source: str | Path,
    output: str | Path,
    model: Writer,
    wanted: Sequence[Prompt] | Labels,
    request: Request,
    *,
    budget: str | Path | None = None,
    to_model: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    say: Callable[[str], None] = lambda _: None,
    moved: Callable[[int], None] = lambda _: None,
) -> Made:
    """Make a synthetic data set: count the labels if requested, draw the texts, write them with report and card.

    Guarantee: the folder's ε is that of the training run and of the counts together. No other private value reaches a
    file of the folder.

    Args:
        source: folder of the training run, or of one of its models.
        output: the new folder.
        model: the model of `source`.
        wanted: prompts, which share the texts evenly, or labels.
        request: number of texts, sampling and filters.
        budget: the budget file of the data set; None: no budget is charged.
        to_model: converts a prompt to the format of the training, such as a chat.
        say: prints a line before each part.
        moved: called with the number of newly kept texts.

    Returns:
        The texts and the number of draws.

    Raises:
        ValueError: the source is not a finished private run, or the labels do not match the records. Nothing is charged
            then.
        LedgerError: the output folder holds a run.
    """
    output = Path(output)
    counted = wanted.counted if isinstance(wanted, Labels) else None
    plan = plan_of(source, counted)
    texts = output / f"texts.{request.file_format}"
    if texts.exists():
        raise ConfigError(f"{texts} exists already, and it is not replaced: give another folder")
    units, exact, doubt = None, None, None
    if counted is not None:
        say("reading the labels of the private records")
        units, doubt = read_labels(run_of(source), plan, counted)
        exact = units.exact_counts()  # an unknown label ends the run before anything is charged
    results = [texts.name, *([COUNTS_FILE] if counted is not None else [])]
    with QueryRun.begin(output, plan, dataset=plan.dataset, budget=budget, results=results) as run:
        shares = wanted.shares if isinstance(wanted, Labels) else None
        if doubt is not None:
            run.open_point(doubt)
        if request.filters.blocked:
            run.open_point(BLOCKED)
        if units is not None and exact is not None:
            shares = count_noisily(run, units, exact)
        asked = _wanted(wanted, shares, request.number, to_model)
        say("generating")
        filters = TextFilter(request.filters)
        made = make_texts(model, asked, request.sampling, filters, request.batch_size, moved)
        write_records(texts, made.records)
        run.release(*([output / COUNTS_FILE] if exact is not None else []), texts)  # in one call: all of them or none
        for fact, value in facts_of(request, made).items():
            run.fact(fact, value)
    return made


def facts_of(request: Request, made: Made) -> dict[str, str | int]:
    """Return the facts of a data set for report and card: all are public or computed from released texts."""
    sampling, filters = request.sampling, request.filters
    seed = "from the operating system" if sampling.seed is None else f"{sampling.seed}"
    rules = [f"at least {filters.min_words} words"]
    rules += [f"at most {filters.max_words} words"] if filters.max_words is not None else []
    rules += [] if filters.duplicates else ["no text twice"]
    rules += [f"none of {len(filters.blocked)} blocked words"] if filters.blocked else []
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in made.dropped.items())
    missing = {"texts that are missing, since the filters left out too many": made.missing} if made.missing else {}
    return {
        "texts": len(made.records),
        **missing,
        "texts drawn from the model": made.drawn,
        "texts left out": dropped or "none",
        "filters, which read generated texts only": "; ".join(rules),
        "sampling": f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, at most "
        f"{sampling.max_new_tokens:,} tokens",
        "seed of the texts, which is no secret and costs nothing": seed,
    }


def _wanted(
    wanted: Sequence[Prompt] | Labels, shares: LabelShares | None, number: int, to_model: Callable[[Prompt], Prompt]
) -> list[Wanted]:
    if isinstance(wanted, Labels) and shares is not None:
        return of_labels(shares, wanted.template, number, to_model)
    assert not isinstance(wanted, Labels)  # its shares are public or were counted
    return shared_out(wanted, number, to_model)


def of_labels(
    shares: LabelShares, template: str, number: int, to_model: Callable[[Prompt], Prompt] = lambda prompt: prompt
) -> list[Wanted]:
    """Return the prompt of each label with its number of texts."""
    counts: Mapping[str, int] = texts_of_each(shares, number)
    prompts = {label: prompt_of(template, label) for label in counts}
    return [Wanted(prompts[label], count, label, to_model(prompts[label])) for label, count in counts.items()]


def shared_out(
    prompts: Sequence[Prompt], number: int, to_model: Callable[[Prompt], Prompt] = lambda prompt: prompt
) -> list[Wanted]:
    """Return the prompts with their numbers of texts, which differ by at most 1."""
    each, more = divmod(number, len(prompts))
    return [Wanted(one, each + (place < more), None, to_model(one)) for place, one in enumerate(prompts)]

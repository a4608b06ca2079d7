"""The privacy statement of a query run: its numbers, and the words of its method.

Place in the flow: beside `dpllm.report.statement`, which computes what both kinds of runs have in common. ε is computed
from the ledger; the words come from the catalogue of methods (`dpllm.registry`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting, comparison
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.release_words import release_words
from dpllm.privacy.rounding import format_delta, format_epsilon, up
from dpllm.privacy.stated import stated_history
from dpllm.report.definition import ADJACENCY_WORDS, OTHER_PEOPLE
from dpllm.report.front import factor_words
from dpllm.report.models import (
    Answers,
    Assumption,
    CrossCheck,
    Definition,
    EpsilonByAdjacency,
    Fact,
    NeverCovered,
    Parameters,
    QueryParameters,
    Statement,
    Steps,
    WrittenOut,
)
from dpllm.report.release_notes import ReleaseNotes


@dataclass(frozen=True, kw_only=True)
class Told:
    """The parts of a report that depend on the kind of the run: a training run or a query run."""

    statement: Statement
    trusted: str
    """Who sees the data."""
    definition: Definition
    kind_of_accounting: str
    event: str
    composition: str
    cross_checks: tuple[CrossCheck, ...]
    steps: Steps
    parameters: Parameters | QueryParameters
    assumptions: tuple[Assumption, ...]
    open_points: tuple[str, ...]
    command: str | None
    """The command that computes ε from the numbers alone."""


_SEEN_BEFORE = NeverCovered(
    what="private records that a public model had seen already", advice="check the source of its weights"
)
_NEVER_COVERED = tuple(
    NeverCovered(what=what, advice=advice)
    for what, advice in (
        ("other runs on the same data", "each run has its own ε: add them up with `dpllm compose`, or keep a budget"),
        (
            "choosing the settings of this run by what earlier private answers showed",
            "choose them before, or on public data",
        ),
        ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
        ("running time and memory use, as seen by someone on the same machine", "run on a machine you control"),
    )
)
_ROUNDED_NOISE = NeverCovered(
    what="the exactness of floating-point noise",
    advice="the noise is a float64 Gaussian, as in all common DP libraries",
)


def check_answers(plan: QueryPlan, contents: LedgerContents) -> str | None:
    """Return what the ledger charges that the plan does not allow, in words; None if there is nothing.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
    """
    planned = {(charge.name, charge.event): charge.count for charge in plan.charges}
    for (name, event), count in contents.notes.answers.items():
        if (name, event) not in planned:
            return f"{name!r} is charged with an event that the plan does not have"
        if count > planned[name, event]:
            return f"{name!r} is charged {count:,} times, and the plan has {planned[name, event]:,}"
    counted = sum(contents.notes.answers.values()) + contents.torn_steps
    if counted != contents.num_steps:
        return f"{contents.num_steps - counted} lines are steps of a training run"
    return None


def told_of_queries(
    plan: QueryPlan, contents: LedgerContents, notes: ReleaseNotes, epsilons: EpsilonByAdjacency
) -> Told:
    """Return what a report says about a query run.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
        notes: what people noted.
        epsilons: under each adjacency.

    Raises:
        ValueError: the ledger charges what the plan does not allow, or people noted another name of the data set.
    """
    if wrong := check_answers(plan, contents):
        raise ValueError(f"{contents.path}: {wrong}. Restore ledger and plan from a copy")
    before = "" if plan.after is None else "the stated steps of the training run before it, and "
    return Told(
        statement=_statement(plan, contents, epsilons),
        trusted="whoever runs it",
        definition=_definition(plan, contents, notes),
        kind_of_accounting="privacy loss distributions (PLD), discretized pessimistically (connect the dots), composed "
        f"by FFT; computed by dpllm.mechanism.pld and {accounting.TOOL}",
        event=_events(plan),
        composition=f"{before}all answers of the plan, or after an independent stop those charged",
        cross_checks=_cross_checks(stated_history(plan, contents), plan.delta),
        steps=_steps(plan, contents),
        parameters=_parameters(plan, contents),
        assumptions=_assumptions(plan, contents),
        open_points=(),
        command=None,
    )


def _statement(plan: QueryPlan, contents: LedgerContents, epsilons: EpsilonByAdjacency) -> Statement:
    epsilon, unit = epsilons.of(plan.adjacency), "record" if plan.unit == "sequence" else "user"
    words = _guarantee(plan, epsilons, unit) + _about_the_stop(plan, contents)
    if contents.num_steps == 0 and plan.charges:
        words = "No answer has been charged: nothing has been learnt from the private data by this run."
    elif math.isinf(epsilon):
        words = f"NOT PRIVATE. ε is infinite, so nothing limits what the release reveals about any one {unit}."
    return Statement(
        private=math.isfinite(epsilon),
        words=words,
        epsilon=epsilon,
        delta=plan.delta,
        adjacency=plan.adjacency,
        epsilon_by_adjacency=epsilons,
        unit=plan.unit,
    )


def _guarantee(plan: QueryPlan, epsilons: EpsilonByAdjacency, unit: str) -> str:
    changes = {"zero-out": "contributed nothing", "replace-one": f"been another {unit}"}
    epsilon, other = epsilons.of(plan.adjacency), _other(plan.adjacency)
    value = f"ε = {up(epsilons.of(other))}" if math.isfinite(epsilons.of(other)) else "ε is infinite"
    what = "The release" if plan.after is None else f"The release, together with the model of “{plan.after.folder}”,"
    return (
        f"{what} satisfies (ε, δ)-differential privacy with ε = {up(epsilon)} and δ = {format_delta(plan.delta)} for "
        f"every single {unit}. Whatever is released would have come out almost as likely had any one {unit} "
        f"{changes[plan.adjacency]}: the chance of any outcome changes at most by the factor {factor_words(epsilon)}, "
        f"plus {format_delta(plan.delta)}. Had any one {unit} {changes[other]} ({other} adjacency), {value} at the "
        "same δ."
    )


def _other(adjacency: str) -> str:
    return next(name for name in ADJACENCIES if name != adjacency)


def _about_the_stop(plan: QueryPlan, contents: LedgerContents) -> str:
    if contents.num_steps >= plan.num_steps:
        return ""
    given = f" {contents.num_steps:,} of {plan.num_steps:,} planned answers were charged."
    if contents.notes.stopped_independently and not contents.torn_steps:
        return f"{given} The figures are theirs: the stop was declared independent of the data and of the answers."
    return (
        f"{given} The figures are those of all {plan.num_steps:,}: the stop may depend on the data or on the answers, "
        "and they hold in spite of that."
    )


def _definition(plan: QueryPlan, contents: LedgerContents, notes: ReleaseNotes) -> Definition:
    if plan.dataset and notes.dataset and notes.dataset != plan.dataset:
        raise ValueError(
            f"the note dataset is {notes.dataset!r}, and the plan of the run names the data set {plan.dataset!r}: "
            "leave the note out"
        )
    method = release_words()[plan.method]
    model: tuple[str, ...] = ()
    if plan.after is not None:
        model = (
            f"the {_counted(plan.after.history)} steps of the training run “{plan.after.folder}”, which it builds on",
        )
    return Definition(
        dataset=plan.dataset or notes.dataset,
        unit=_unit(plan),
        adjacency=f"{ADJACENCY_WORDS[plan.adjacency]}. {method.adjacency[0].upper()}{method.adjacency[1:]}",
        mechanism=method.mechanism,
        public=("the number of units N, and all settings in this report", *contents.public),
        data_accesses_covered=(
            *((_charged_answers(contents.num_steps),) if plan.charges else ()),
            *model,
        ),
        other_uses_of_the_data=notes.other_uses,
        released_under_the_guarantee=method.released,
        written_out_and_not_covered=tuple(
            WrittenOut(what=what, count=count) for what, count in sorted(contents.disclosures.items())
        ),
        never_covered=(
            *(NeverCovered(what=what, advice=advice) for what, advice in method.not_covered),
            *((_SEEN_BEFORE,) if method.has_model else ()),
            *_NEVER_COVERED,
            *(() if plan.randomness == "discrete" else (_ROUNDED_NOISE,)),
        ),
        facts=tuple(Fact(name=name, values=tuple(values)) for name, values in sorted(contents.notes.facts.items())),
    )


def _unit(plan: QueryPlan) -> str:
    if plan.unit == "sequence":
        return (
            "one record of the private data. A text that is in several records is that many units, and is protected "
            f"less. {OTHER_PEOPLE}"
        )
    which = {
        "first": ", the first ones in the order of the data,",
        "random": ", chosen by a secret draw before the run,",
        None: "",
    }[plan.rows_kept]
    bound = f", of which at most {plan.max_rows_per_unit} rows{which} were used" if plan.max_rows_per_unit else ""
    return (
        f"one user: all records with the same id in column '{plan.unit_column}'{bound}. A person with several ids is "
        f"several units. Ids are compared as they are written, unless the recipe normalised them. {OTHER_PEOPLE}"
    )


def _charged_answers(count: int) -> str:
    return "the one charged answer in the ledger" if count == 1 else f"the {count:,} charged answers in the ledger"


def _counted(history: accounting.History) -> str:
    return f"{sum(count for _, count in history):,}"


def _assumptions(plan: QueryPlan, contents: LedgerContents) -> tuple[Assumption, ...]:
    """Return what the numbers rest on, and for each how the run ensured it."""
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    torn = f"; answers torn by a crash are charged: {contents.torn_steps}" if contents.torn_steps else ""
    pairs = [
        *release_words()[plan.method].assumptions,
        ("Draws and noise can't be predicted", f"entropy: {entropy}"),
        (
            "Every answer is counted",
            "each answer is charged on the disk before it is computed, and no more than planned; the lines of the "
            f"ledger are chained by hashes{torn}",
        ),
    ]
    if plan.after is not None:
        pairs.append(
            (
                "The model that this run builds on costs no more than is counted here",
                f"its plan and its ledger were read before the run (run {plan.after.run}, last line "
                f"{plan.after.chain}), and its stated steps are in the plan",
            )
        )
    return tuple(Assumption(assumption=assumption, how_ensured=how) for assumption, how in pairs)


def _events(plan: QueryPlan) -> str:
    """Return which privacy events the answers are accounted as, with their sources."""
    listed = "; ".join(f"{charge.name}: {charge.event.words().accounted_as}" for charge in plan.charges)
    return (
        listed if plan.after is None else f"{listed}; and the steps of the training run before it, as its report says"
    )


def _steps(plan: QueryPlan, contents: LedgerContents) -> Steps:
    """Return how many answers, and why no more."""
    charged, planned = contents.num_steps, plan.num_steps
    declared = contents.notes.stopped_independently and not contents.torn_steps
    ended = f"the run ended: {contents.end}" if contents.end is not None else "the run has not ended, or crashed"
    stated = f"; ε is stated for all answers {'given' if declared else 'planned'}" if 0 < charged < planned else ""
    return Steps(
        wanted=planned,
        planned=planned,
        charged=charged,
        stated=charged if declared or not charged else planned,
        torn_by_a_crash=contents.torn_steps,
        words=f"{charged:,} of {planned:,} planned answers were charged; {ended}{stated}",
    )


def _parameters(plan: QueryPlan, contents: LedgerContents) -> QueryParameters:
    """Return every parameter of the run."""
    share, charged = plan.delta * plan.num_units, contents.notes.answers
    after = None
    if plan.after is not None:
        alone = accounting.epsilon(plan.after.history, plan.delta, plan.adjacency)
        after = f"{plan.after.folder}, ε = {format_epsilon(alone)} alone at the same δ ({plan.adjacency})"
    return QueryParameters(
        num_units=plan.num_units,
        num_steps_planned=plan.num_steps,
        num_steps_charged=contents.num_steps,
        answers=tuple(
            Answers(
                name=charge.name,
                planned=charge.count,
                charged=charged.get((charge.name, charge.event), 0),
                accounted_as=charge.event.words().accounted_as,
            )
            for charge in plan.charges
        ),
        settings=dict(plan.settings),
        after=after,
        target_epsilon=plan.target_epsilon,
        delta=plan.delta,
        why_this_delta=f"δ = {format_delta(share)}/N. At 1/N, publishing one unit outright would pass; the usual "
        "choice is at most 0.1/N",
        max_rows_per_unit=plan.max_rows_per_unit,
        rows_kept=plan.rows_kept,
    )


@lru_cache(maxsize=8)
def _cross_checks(history: tuple[tuple[Event, int], ...], delta: float) -> tuple[CrossCheck, ...]:
    """Return ε under zero-out by other ways: both are upper bounds."""
    ours = accounting.epsilon(history, delta)
    rho = comparison.zcdp_rho(history)
    of_zcdp = comparison.zcdp_epsilon(history, delta) if math.isfinite(rho) and history else None
    try:
        library: float | None = comparison.library_epsilon(history, delta)
    except ValueError:
        library = None
    return (
        CrossCheck(
            name="PLD of dp_accounting",
            epsilon=library,
            must_agree=False,
            pld_of_the_same_steps=None if library is None else ours,
            note="does not apply: it has no distribution of one of these events"
            if library is None
            else "an upper bound by that library's own accountant, under zero-out, on the coarser grid 0.001",
        ),
        CrossCheck(
            name="zCDP",
            epsilon=of_zcdp,
            must_agree=False,
            pld_of_the_same_steps=None if of_zcdp is None else ours,
            note="does not apply: one of these events has no finite ρ"
            if of_zcdp is None
            else "an upper bound, looser by nature, under zero-out, without a gain from sampling (arXiv:1605.02065)",
        ),
    )

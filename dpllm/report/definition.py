"""State in words how one run instantiates the definition of differential privacy.

The contents follow Ponomareva et al., "How to DP-fy ML" (JAIR 77, 2023), section 5.3: the unit, the neighbouring data
sets, what is public, which uses of the data are covered, what may be released, what is not covered, and what the
guarantee assumes.

Only `run_words` distinguishes a training run from a query run: every sentence that differs between their reports is a
field of `RunWords`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpllm.data.units import ONE_ROW
from dpllm.mechanism.selection import Selection
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.rounding import format_delta
from dpllm.privacy.stated import planned_steps
from dpllm.registry import release_words
from dpllm.report.models import (
    Answers,
    Assumption,
    Definition,
    Fact,
    NeverCovered,
    Parameters,
    QueryParameters,
    WrittenOut,
)
from dpllm.report.release_notes import ReleaseNotes

if TYPE_CHECKING:
    from dpllm.privacy.plan import Plan, PrivacyPlan

UNITS_MADE_OF = "a unit is made of"
"""Name of a fact in the ledger; its value is `dpllm.data.units.UnitIndex.made_of`."""
RECORDS_ARE = "a record is"
"""Name of a fact in the ledger; its value says what one record is in the files: "one line of a text file"."""
RELEASED_WEIGHTS = "released weights"
"""Name of a fact in the ledger: which average of the weights is released. Without it: the weights after the last step.
"""
SELECTED = "selected by a private tuning"
"""Name of a fact in the ledger; its value is the run's candidate, which a private tuning selected."""
FEDERATED = "federated training"
"""Name of a fact in the ledger; its value is `TRUSTED` or `SECURE`. Without it, one trainer saw all records."""
TRUSTED, SECURE = "trusted server", "secure aggregation"
WHO_SEES = "who sees what"
"""Name of a fact in a federated run's ledger."""
REFUTED = "FAIL"
"""First word of an audit's summary if the audit refutes the claim."""
PREPROCESSING = "could have been computed from the records before the run"
"""Name of a fact in the ledger; its values are settings whose source only people know. The report asks about them."""
CLASS_NAMES = "names of the classes"
"""Name of a fact in the ledger; its value is `DECLARED_NAMES` or `OTHER_NAMES`."""
DECLARED_NAMES = "declared in data.class_names"
OTHER_NAMES = "those of the model's configuration, which nobody declared"
TRAINED_MODEL = "trained model"
"""Name of a fact in the ledger; its value is the kind of model and which of its weights were trained."""
LEARNING_RATES = "learning rates of the updates"
"""Name of the fact that the report derives from the learning rates in the ledger."""
NOT_SELECTED = (
    "This run belongs to a private tuning that has not selected it. This ε covers only the run that `dpllm methods "
    "tune` selects, so release nothing from this run."
)
"""The open point of a run of a private tuning that was not selected. People cannot settle it."""

OTHER_PEOPLE = (
    "Other people who are mentioned in a unit's text are not themselves units. A person who is described in several "
    "units is protected less"
)

ADJACENCY_WORDS = {
    "zero-out": "two data sets of the same public size that differ in one unit: it contributes nothing in one of them",
    "replace-one": "two data sets of the same public size that differ in one unit: a different unit replaces it",
}

_NEVER_COVERED = tuple(
    NeverCovered(what=what, advice=advice)
    for what, advice in (
        ("hyper-parameter tuning (other runs on the same data)", "each run has its own ε: add them up"),
        (
            "choosing a run's noise, length or batch size based on the releases of earlier private runs",
            "plan runs independently of each other's results: composition is proved only for such runs",
        ),
        (
            "choosing the model, a checkpoint or a stopping point based on results on private data",
            "choose based on public data",
        ),
        ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
        ("a tokenizer, vocabulary or normalisation fitted to the private text", "fit them on public text"),
        (
            "names of classes, class weights, scales of targets and rewards, or thresholds computed from the records",
            "take them from a public source, and name it (release.preprocessing)",
        ),
        ("private records that the pretrained model had already seen", "check the source of the pretrained weights"),
        (
            "training loss, gradient norms before the noise, and realised batch sizes",
            "protect logs and plots of them like the data itself",
        ),
        ("running time and memory use, as seen by someone on the same machine", "train on a machine you control"),
    )
)
_NEVER_COVERED_BY_ANSWERS = tuple(
    NeverCovered(what=what, advice=advice)
    for what, advice in (
        ("other runs on the same data", "each run has its own ε: add them up with `dpllm epsilon`, or keep a budget"),
        (
            "choosing this run's settings based on earlier private answers",
            "choose them beforehand, or based on public data",
        ),
        ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
        ("running time and memory use, as seen by someone on the same machine", "run on a machine you control"),
    )
)
_SEEN_BEFORE = NeverCovered(
    what="private records that a public model had already seen", advice="check the source of its weights"
)
_PUBLIC = "the number of units N, and all settings in this report"
_OTHER_RUNS = NeverCovered(
    what="the number of runs in the tuning, and their models, scores, times and logs",
    advice="do not share the tuning's folder not_for_release, and delete it: only the selected run is covered. Also "
    "keep secret when the tuning began and ended: together with the times of this run, they bound the number of runs",
)
_RELEASED = (
    "the final weights",
    "the weights of every checkpoint, but not the other files in its folder",
    "the sequence of noisy gradients with their norms, and all values that are computed from it alone",
)
_RELEASED_BY_ROUNDS = (
    "the final weights",
    "the weights of every round, which the server sends to the clients of the next round",
    "the sequence of noisy sums, for anyone who does not know which clients were in a cohort",
)
_AVERAGES = "averages of the weights after the steps, which are computed from those weights alone"


_CLIENTS_BOUNDED = (
    "No client contributes more than the clip norm",
    "the norm of each client's change over all weights trained in the round is bounded: by the client with secure "
    "aggregation, otherwise by the server. A client whose change is not finite contributes zero",
)
_CLIENTS_APART = (
    "A client's change depends on its own records and on the server's weights alone",
    "each client trains separately, with a new optimizer and random numbers from the operating system. A simulation in "
    "one process refuses a model whose buffers or frozen weights change",
)


@dataclass(frozen=True, kw_only=True)
class RunWords:
    """The sentences of a report that differ between a training run and a query run."""

    step: str
    """What is charged: "step" or "answer"."""
    counted: str
    """The verb for it: "taken" or "charged"."""
    thing: str
    """What is released: "model" or "release"."""
    subject: str
    """What satisfies differential privacy, at the start of a sentence."""
    of_what: str
    """What follows "whatever is released"."""
    nothing_learnt: str
    """Why a run without a charge costs nothing."""
    trusted: str
    """Who sees the data."""
    definition: Definition
    of_selection: str = ""
    """How the cost of a selection is computed; precedes the rest of the kind of accounting."""
    event: str
    """The privacy events that are charged, with their sources."""
    composition: str
    """What was composed."""
    parameters: Parameters | QueryParameters
    assumptions: tuple[Assumption, ...]
    """The assumptions behind the numbers, and how the run ensured each."""
    open_points: tuple[str, ...] = ()
    """Reasons not to release that follow from the plan and the ledger."""


def run_words(plan: Plan, contents: LedgerContents, notes: ReleaseNotes) -> RunWords:
    """Return the sentences of a run's report that depend on its kind.

    Raises:
        ValueError: the noted name of the data set differs from the plan's.
    """
    if isinstance(plan, QueryPlan):
        return _of_answers(plan, contents, notes)
    return _of_training(plan, contents, notes)  # type: ignore[arg-type]


def _of_training(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes) -> RunWords:
    selected = plan.selection is not None
    return RunWords(
        step="step",
        counted="taken",
        thing="model",
        subject="The release of the best of a secret random number of training runs" if selected else "The training",
        of_what=" of the model",
        nothing_learnt="the model has learnt nothing from the private data so far",
        trusted="the trainer",
        definition=define(plan, contents, notes),
        of_selection="the cost of the selection follows from Rényi divergences; " if selected else "",
        event=event(plan),
        composition="all steps of all runs in the ledger, including those lost in a crash",
        parameters=Parameters(
            sampling=plan.sampling,
            num_units=plan.num_units,
            num_examples=plan.num_examples,
            sampling_rate=plan.sampling_rate,
            expected_batch_size=plan.expected_batch_size,
            max_batch_size=plan.max_batch_size,
            num_steps_planned=planned_steps(plan, contents),
            num_steps_charged=contents.num_steps,
            noise_multiplier=plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            noise_stddev=plan.noise_stddev,
            why_this_delta=_why_this_delta(plan),
            max_rows_per_unit=plan.max_rows_per_unit,
            rows_kept=plan.rows_kept,
        ),
        assumptions=assumptions(plan, contents),
        open_points=selection_points(plan, contents),
    )


def _of_answers(plan: QueryPlan, contents: LedgerContents, notes: ReleaseNotes) -> RunWords:
    method, after, charged = release_words()[plan.method], plan.after, contents.notes.answers
    events = "; ".join(f"{charge.name}: {charge.event.words().accounted_as}" for charge in plan.charges)
    before = "" if after is None else "the stated steps of the earlier training run, and "
    built_on: tuple[str, ...] = ()
    if after is not None:
        steps = sum(count for _, count in after.history)
        built_on = (f"the {steps:,} steps of the training run “{after.folder}”, on which this run builds",)
    return RunWords(
        step="answer",
        counted="charged",
        thing="release",
        subject="The release" if after is None else f"The release, together with the model of “{after.folder}”,",
        of_what="",
        nothing_learnt="this run has learnt nothing from the private data",
        trusted="the person who runs it",
        definition=Definition(
            dataset=_dataset(plan, notes),
            unit=_unit(plan, contents, "private data"),
            adjacency=f"{ADJACENCY_WORDS[plan.adjacency]}. {method.adjacency[0].upper()}{method.adjacency[1:]}",
            mechanism=method.mechanism,
            public=(_PUBLIC, *contents.public),
            data_accesses_covered=(*((_charged_answers(contents.num_steps),) if plan.charges else ()), *built_on),
            other_uses_of_the_data=notes.other_uses,
            released_under_the_guarantee=method.released,
            written_out_and_not_covered=_written_out(contents),
            never_covered=(
                *(NeverCovered(what=what, advice=advice) for what, advice in method.not_covered),
                *((_SEEN_BEFORE,) if method.has_model else ()),
                *_NEVER_COVERED_BY_ANSWERS,
                *(() if plan.randomness == "discrete" else (_rounded_noise("float64"),)),
            ),
            facts=_listed(contents.notes.facts),
        ),
        event=events if after is None else f"{events}; and the steps of the earlier training run, as its report states",
        composition=f"{before}all planned answers, or only the charged ones after an independent stop",
        parameters=QueryParameters(
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
            after=None if after is None else f"{after.folder}; alone {plan.guarantee.of(after.history)}",
            why_this_delta=_why_this_delta(plan),
            max_rows_per_unit=plan.max_rows_per_unit,
            rows_kept=plan.rows_kept,
        ),
        assumptions=_assumptions_of_answers(plan, contents),
    )


def _why_this_delta(plan: Plan) -> str:
    share = format_delta(plan.delta * plan.num_units)
    return f"δ = {share}/N. At δ = 1/N, publishing one unit outright would be allowed; δ is usually at most 0.1/N"


def _dataset(plan: Plan, notes: ReleaseNotes) -> str | None:
    if plan.dataset and notes.dataset and notes.dataset != plan.dataset:
        raise ValueError(
            f"the note dataset is {notes.dataset!r}, but the run's plan names the data set {plan.dataset!r}: omit the "
            "note"
        )
    return plan.dataset or notes.dataset


def _written_out(contents: LedgerContents) -> tuple[WrittenOut, ...]:
    return tuple(WrittenOut(what=what, count=count) for what, count in sorted(contents.disclosures.items()))


def _listed(facts: Mapping[str, Sequence[str | int | float]]) -> tuple[Fact, ...]:
    return tuple(Fact(name=name, values=tuple(values)) for name, values in sorted(facts.items()))


def define(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes) -> Definition:
    """Return the definition that a training run instantiates.

    Raises:
        ValueError: the noted name of the data set differs from the plan's.
    """
    public = [_PUBLIC]
    if plan.sampling == "example":
        public[0] = (
            "the number of users N, the exact number of rows to draw from (the sampling rate is computed from it and "
            "published, so this number must be public), and all settings in this report"
        )
    if contents.notes.facts.get(CLASS_NAMES, [None])[-1] == DECLARED_NAMES:
        public.append("the names and the number of classes, as declared for the run (data.class_names)")
    federated = FEDERATED in contents.notes.facts
    unit = _unit(plan, contents, "training data")
    return Definition(
        dataset=_dataset(plan, notes),
        unit=f"a client, which has the records of {unit}" if federated else unit,
        adjacency=ADJACENCY_WORDS[plan.adjacency],
        mechanism=mechanism(plan, federated),
        public=(*public, *contents.public),
        data_accesses_covered=(
            f"the {contents.num_steps} training steps in the ledger, from {_starts(len(contents.runs))}",
            *(() if plan.selection is None else ("the other runs of the tuning, none of which is released",)),
        ),
        other_uses_of_the_data=notes.other_uses,
        released_under_the_guarantee=_RELEASED_BY_ROUNDS
        if federated
        else (*_RELEASED, *([_AVERAGES] if RELEASED_WEIGHTS in contents.notes.facts else [])),
        written_out_and_not_covered=_written_out(contents),
        never_covered=_never_covered(plan),
        facts=_listed(_facts(contents)),
    )


def _charged_answers(count: int) -> str:
    return "the one charged answer in the ledger" if count == 1 else f"the {count:,} charged answers in the ledger"


def _starts(number: int) -> str:
    return "1 start of the run" if number == 1 else f"{number} starts of the run"


def _never_covered(plan: PrivacyPlan) -> tuple[NeverCovered, ...]:
    """Return what ε never covers; the rounding of the noise is listed only if the noise is not discrete."""
    kept = _NEVER_COVERED if plan.randomness == "discrete" else (*_NEVER_COVERED, _rounded_noise("float32"))
    return kept if plan.selection is None else (*kept, _OTHER_RUNS)


def _rounded_noise(dtype: str) -> NeverCovered:
    return NeverCovered(
        what="attacks on the rounding of floating-point noise",
        advice=f"the noise is a {dtype} Gaussian, as in all common DP libraries",
    )


def _facts(contents: LedgerContents) -> dict[str, list[str | int | float]]:
    """Return the facts that the run noted, the thresholds of adaptive clipping, and the learning rates."""
    facts, path = dict(contents.notes.facts), contents.notes.thresholds
    if path:
        ends = f"{path[0]:.6g}, {path[len(path) // 2]:.6g} and {path[-1]:.6g}"
        facts["clip threshold of the first, the middle and the last step"] = [
            f"{ends}; between {min(path):.6g} and {max(path):.6g}"
        ]
    if rates := [rate for _, rate in contents.notes.rates]:
        numbers = [[float(number) for number in rate.split(", ")] for rate in rates]
        first, last = (" and ".join(f"{number:.6g}" for number in numbers[at]) for at in (0, -1))
        least, most = min(map(min, numbers)), max(map(max, numbers))
        facts[LEARNING_RATES] = [
            f"{first} in all updates"
            if len(rates) == 1
            else f"first {first}, last {last}; least {least:.6g}, largest {most:.6g}"
        ]
    return facts


def _unit(plan: Plan, contents: LedgerContents, data: str) -> str:
    """Return what one unit is; ``data`` is the word for the records."""
    facts = contents.notes.facts
    if plan.unit == "sequence" and facts.get(UNITS_MADE_OF, [None])[-1] == ONE_ROW:
        return (
            f"one row of the {data}, as it was given to the run. The run does not know which record a row comes from: "
            "if a record was split into several rows, each row is a separate unit, and the record is protected less. A "
            f"text that occurs in several rows counts as that many units. {OTHER_PEOPLE}"
        )
    if plan.unit == "sequence":
        which = f", which is {facts[RECORDS_ARE][-1]}" if RECORDS_ARE in facts else ""
        cut = "A record that is longer than the model's context and was split into several rows is still one unit. "
        return (
            f"one record of the {data}{which}. {cut if plan.method is None else ''}A text that occurs in several "
            f"records counts as that many units, and is protected less. {OTHER_PEOPLE}"
        )
    kept = {
        "first": ": the first ones in the order of the data",
        "random": ", chosen by a secret draw before the run",
        None: "",
    }[plan.rows_kept]
    rows = f" At most {plan.max_rows_per_unit} rows of each user were used{kept}." if plan.max_rows_per_unit else ""
    return (
        f"one user: all records with the same id in column '{plan.unit_column}'.{rows} A person with several ids "
        f"counts as several units. Ids are compared exactly, unless the recipe normalises them. {OTHER_PEOPLE}"
    )


def mechanism(plan: PrivacyPlan, federated: bool = False) -> str:
    """Return a description of one step of the run, with all its parameters.

    Args:
        plan: the run's plan.
        federated: whether a step is a round over clients, each of which trains on its own records.
    """
    parts = plan.mechanism
    sigma = f"σC = {plan.noise_stddev:.6g} (σ = {plan.noise_multiplier:.6g})"
    if parts.first_threshold is not None:
        sigma = (
            f"σ_g C = {plan.noise_stddev:.6g} (σ_g = {parts.gradient_noise_multiplier:.6g}; together with the count, "
            f"whose noise has standard deviation {parts.statistic_stddev:.6g}, a step has "
            f"σ = {plan.noise_multiplier:.6g})"
        )
    noise = (
        f"{parts.noise.words()} of standard deviation {sigma} is added "
        f"to the sum, and the result is divided by {plan.expected_batch_size}{_noise_of_a_release(plan)}"
    )
    how = parts.clipping.words()
    if plan.sampling == "example":
        return (
            f"example-level sampling (ELS): {parts.noise.drawing(parts.draw, 'row')}; the gradient of each row {how} "
            f"separately; a user has at most {plan.max_rows_per_unit} rows, each of which may be drawn or not; {noise}"
        )
    if federated:
        return (
            f"federated rounds: {parts.noise.drawing(parts.draw, 'client')}; each of them starts from the server's "
            f"weights and trains on its own records, and the change in its weights {how}; {noise}"
        )
    drawn, name = ("record", "") if plan.unit == "sequence" else ("user", "user-level sampling (ULS): ")
    whole = "over all its rows" if plan.unit == "sequence" else "over all rows of that user"
    return (
        f"{name}{parts.noise.drawing(parts.draw, drawn)}; the gradient of each {drawn}, summed {whole}, {how}; {noise}"
    )


def _noise_of_a_release(plan: PrivacyPlan) -> str:
    """Return the standard deviation of a release if correlation makes it different from σC."""
    first, last = plan.mechanism.release_stddevs(plan.num_steps)
    if first == last == plan.noise_stddev:
        return ""
    # Two digits: the strategy is optimised numerically, and its last digits may differ between machines.
    return (
        f"; the noise in one release has a standard deviation of about {first:.2g} in the first step and about "
        f"{last:.2g} in step {plan.num_steps}"
    )


def event(plan: PrivacyPlan) -> str:
    """Return which privacy event a step is accounted as, with its source, and the event of a selection among runs."""
    step = plan.event.words().accounted_as
    if plan.selection is None:
        return step
    (selected, _), *_ = plan.history
    return f"{step}; all runs together as {selected.words().accounted_as}"


def selection_points(plan: PrivacyPlan, contents: LedgerContents) -> tuple[str, ...]:
    """Return the open point of a run that its tuning has not selected: ε holds only for the selected run."""
    if plan.selection is None or SELECTED in contents.notes.facts:
        return ()
    return (NOT_SELECTED,)


def assumptions(plan: PrivacyPlan, contents: LedgerContents) -> tuple[Assumption, ...]:
    """Return the assumptions behind the numbers, and how the run ensured each."""
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    torn = f"; steps that a crash cut off are charged: {contents.torn_steps}" if contents.torn_steps else ""
    parts, drawn = plan.mechanism, "row" if plan.sampling == "example" else "unit"
    sampling, *noise = parts.noise.ensured(parts.draw, drawn, plan.noise_stddev)
    federated = FEDERATED in contents.notes.facts
    pairs = (
        *_bounded(plan),
        sampling,
        _CLIENTS_BOUNDED
        if federated
        else (
            f"No {drawn} contributes more than the clip norm",
            f"the exact gradient norm of each {drawn} over all trained parameters is bounded before the sum; a {drawn} "
            "whose gradient is not finite contributes zero; a parameter without a norm rule is refused",
        ),
        *_adapts(plan),
        *_selects(plan),
        ("There is one draw per step", "each step is drawn once and only then divided into microbatches"),
        _CLIENTS_APART
        if federated
        else (
            "A unit's gradient depends on that unit alone",
            "losses are normalised within a row; modules that mix rows, such as batch norm, are refused",
        ),
        *noise,
        (
            "The noisy sum is scaled by a public constant",
            f"it is divided by the expected batch size {plan.expected_batch_size}, never by the realised one; a step "
            "that draws no units is still taken",
        ),
        ("Sampling and noise cannot be predicted", f"entropy: {entropy}"),
        (
            "Every step is counted",
            "each step is on disk before its gradient is used; hashes chain the lines of the ledger" + torn,
        ),
    )
    return tuple(Assumption(assumption=assumption, how_ensured=how) for assumption, how in pairs)


def _adapts(plan: PrivacyPlan) -> tuple[tuple[str, str], ...]:
    """Return how the threshold of adaptive clipping is accounted for."""
    parts = plan.mechanism
    if parts.first_threshold is None:
        return ()
    how = (
        "after each step, the number of gradients below the threshold adjusts it. This count gets Gaussian noise of "
        f"standard deviation σ_b = {parts.statistic_stddev:.6g} and is divided by the expected batch size "
        f"{plan.expected_batch_size}. The event of a step covers the count: 1/σ² = 1/σ_g² + 1/(2σ_b)² (Andrew et "
        "al., arXiv:1905.03871). The ledger holds the threshold of each step, which is fixed before the step"
    )
    return (("The clip threshold depends on earlier releases only", how),)


def _selects(plan: PrivacyPlan) -> tuple[tuple[str, str], ...]:
    """Return how the best of several runs is selected."""
    if plan.selection is None:
        return ()
    how = (
        f"{Selection.of(plan.selection).words()}; the operating system's generator draws K and the candidate of each "
        "run before the first run, and a restart reuses them. A failed run counts and gets the worst score. "
        "The score is measured on held-out rows that were declared public"
    )
    return (("Only the best of K runs is released, and the score uses no private record", how),)


def _bounded(plan: PrivacyPlan) -> tuple[tuple[str, str], ...]:
    """Return how the rows of a user are bounded, at user level."""
    rows = f"at most {plan.max_rows_per_unit} rows of each are kept when the data are read, before the "
    if plan.sampling == "example":
        how = f"{rows}sampling rate is fixed; the ledger holds the bound for each step"
        return (("No user has more rows than the bound", how),)
    if plan.unit == "user":
        how = f"{rows}plan is made; no later filter drops any of them"
        return (("A user's rows are bounded before the sampling rate is fixed", how),)
    return ()


def _assumptions_of_answers(plan: QueryPlan, contents: LedgerContents) -> tuple[Assumption, ...]:
    """Return the assumptions behind a query run's numbers, and how the run ensured each."""
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    torn = f"; answers that a crash cut off are charged: {contents.torn_steps}" if contents.torn_steps else ""
    pairs = [
        *release_words()[plan.method].assumptions,
        ("Draws and noise cannot be predicted", f"entropy: {entropy}"),
        (
            "Every answer is counted",
            "each answer is charged on disk before it is computed, and no more than planned; hashes chain the lines of "
            f"the ledger{torn}",
        ),
    ]
    if plan.after is not None:
        pairs.append(
            (
                "The model that this run builds on costs no more than is counted here",
                f"its plan and ledger were read before the run (run {plan.after.run}, last line "
                f"{plan.after.chain}), and its stated steps are part of this plan",
            )
        )
    return tuple(Assumption(assumption=assumption, how_ensured=how) for assumption, how in pairs)

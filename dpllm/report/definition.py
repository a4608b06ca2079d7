"""The definition of differential privacy as one run instantiates it, in words.

Place in the flow: below report, which adds the numbers. What must be said follows Ponomareva et al., "How to DP-fy ML"
(JAIR 77, 2023), section 5.3: the unit, the neighbouring data sets, what is public, which uses of the data are covered,
what may be released, what is not covered, and what the guarantee assumes.

`run_words` is the one place that tells a training from a run of a method: whatever a report says of the two in
different words is in its `RunWords`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpllm.data.units import ONE_ROW
from dpllm.mechanism.selection import Selection
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.release_words import release_words
from dpllm.privacy.rounding import format_delta
from dpllm.privacy.stated import planned_steps
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
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.privacy.plan_parts import Plan, PlannedDraw

UNITS_MADE_OF = "a unit is made of"
"""The ledger's fact of that name: `dpllm.data.units.UnitIndex.made_of`."""
RECORDS_ARE = "a record is"
"""The ledger's fact of that name: what one record is in the files, such as "one line of a text file"."""
RELEASED_WEIGHTS = "released weights"
"""The ledger's fact of that name: an average of the weights; without it, the weights after the last step."""
SELECTED = "selected by a private tuning"
"""The ledger's fact of that name: the candidate of the run that a private tuning released."""
FEDERATED = "federated training"
"""The ledger's fact of that name: `TRUSTED` or `SECURE`. Without it one trainer saw the records."""
TRUSTED, SECURE = "trusted server", "secure aggregation"
WHO_SEES = "who sees what"
"""The ledger's fact of that name, of a federated run."""
REFUTED = "FAIL"
"""What the summary of an audit begins with when the audit refutes the claim."""
PREPROCESSING = "could have been computed from the records before the run"
"""The ledger's fact of that name: each thing of the run that only people know the source of; the report asks."""
CLASS_NAMES = "names of the classes"
"""The ledger's fact of that name: `DECLARED_NAMES` or `OTHER_NAMES`."""
DECLARED_NAMES = "declared in data.class_names"
OTHER_NAMES = "those of the model's configuration, which nobody declared"
TRAINED_MODEL = "trained model"
"""The ledger's fact of that name: the kind of model, and which of its weights were trained."""
LEARNING_RATES = "learning rates of the updates"
"""Name of the fact that the report makes of the rates in the ledger."""
NOT_SELECTED = (
    "This run belongs to a private tuning, which has not selected it. Only the run that `dpllm methods tune` selects "
    "is covered by this ε; release nothing of this one."
)
"""The open point of a run of a private tuning that was not selected. People cannot settle it."""

OTHER_PEOPLE = (
    "Other people whom a unit's text names are not that unit. A person whom several units describe is protected less"
)

ADJACENCY_WORDS = {
    "zero-out": "two data sets of the same public size, equal but that one unit contributes nothing in one of them",
    "replace-one": "two data sets of the same public size, equal but that one unit is another in one of them",
}

_NEVER_COVERED = tuple(
    NeverCovered(what=what, advice=advice)
    for what, advice in (
        ("hyper-parameter tuning (other runs on the same data)", "each run has its own ε; add them up"),
        (
            "choosing a run's noise, length or batch by the releases of earlier private runs",
            "plan runs independently of each other's results; composition is proved for those",
        ),
        (
            "choosing the model, a checkpoint or a stopping point by its results on private data",
            "choose on public data",
        ),
        ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
        ("a tokenizer, vocabulary or normalisation fitted to the private text", "fit them on public text"),
        (
            "names of classes, class weights, scales of targets and rewards, or thresholds computed from the records",
            "take them from a public source, and say which (release.preprocessing)",
        ),
        ("private records that the pretrained model had seen already", "check the source of the pretrained weights"),
        (
            "training loss, gradient norms before the noise, and realised batch sizes",
            "treat logs and plots of them like the data itself",
        ),
        ("running time and memory use, as seen by someone on the same machine", "train on a machine you control"),
    )
)
_NEVER_COVERED_BY_ANSWERS = tuple(
    NeverCovered(what=what, advice=advice)
    for what, advice in (
        ("other runs on the same data", "each run has its own ε: add them up with `dpllm epsilon`, or keep a budget"),
        (
            "choosing the settings of this run by what earlier private answers showed",
            "choose them before, or on public data",
        ),
        ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
        ("running time and memory use, as seen by someone on the same machine", "run on a machine you control"),
    )
)
_SEEN_BEFORE = NeverCovered(
    what="private records that a public model had seen already", advice="check the source of its weights"
)
_PUBLIC = "the number of units N, and all settings in this report"
_OTHER_RUNS = NeverCovered(
    what="the number of runs of the tuning, their models, scores, times and logs",
    advice="keep the tuning's folder not_for_release to yourself, and delete it: only the selected run is covered. "
    "Keep secret when the tuning began and ended, too: beside the times of this run they bound the number of runs",
)
_RELEASED = (
    "the final weights",
    "the weights of every checkpoint, but not the other files in its folder",
    "the sequence of noisy gradients with their norms, and all values that are computed from it only",
)
_RELEASED_BY_ROUNDS = (
    "the final weights",
    "the weights of every round, which the server sends to the clients of the next one",
    "the sequence of noisy sums, as seen by those who do not know who was in a cohort",
)
_AVERAGES = "averages of the weights after the steps, which are computed from those weights only"


_CLIENTS_BOUNDED = (
    "No client contributes more than the clip norm",
    "the norm of each client's change over all weights trained in the round is bounded, by the client with secure "
    "aggregation, otherwise by the server; a client contributes zero where its change is not finite",
)
_CLIENTS_APART = (
    "A client's change depends on its own records and on the server's weights alone",
    "each client trains by itself, with a new optimizer and random numbers from the operating system; in a simulation "
    "in one process, a model whose buffers or frozen weights change is refused",
)


@dataclass(frozen=True, kw_only=True)
class RunWords:
    """What a report says of a training in other words than of a run of a method."""

    step: str
    """What is charged: "step" or "answer"."""
    counted: str
    """Its verb: "taken" or "charged"."""
    thing: str
    """What is released: "model" or "release"."""
    subject: str
    """What satisfies differential privacy, at the start of a sentence."""
    of_what: str
    """The end of "whatever is released"."""
    nothing_learnt: str
    """Why a run without a charge has no cost."""
    trusted: str
    """Who sees the data."""
    definition: Definition
    of_selection: str = ""
    """How the cost of a selection follows, before the rest of the kind of accounting."""
    event: str
    """The privacy events that are charged, with their sources."""
    composition: str
    """What was composed."""
    parameters: Parameters | QueryParameters
    assumptions: tuple[Assumption, ...]
    """What the numbers rest on, and for each how the run ensured it."""
    open_points: tuple[str, ...] = ()
    """Reasons not to release that follow from plan and ledger."""


def run_words(plan: Plan, contents: LedgerContents, notes: ReleaseNotes) -> RunWords:
    """Return the words of a run.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
        notes: what people noted.

    Raises:
        ValueError: people noted another name of the data set than the plan has.
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
        subject="The release of the best of a secret, random number of training runs" if selected else "The training",
        of_what=" of the model",
        nothing_learnt="nothing has been learnt from the private data so far",
        trusted="the trainer",
        definition=define(plan, contents, notes),
        of_selection="that of the selection follows from Rényi divergences; " if selected else "",
        event=event(plan),
        composition="all steps of all runs in the ledger, those lost in a crash included",
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
    before = "" if after is None else "the stated steps of the training run before it, and "
    built_on: tuple[str, ...] = ()
    if after is not None:
        steps = sum(count for _, count in after.history)
        built_on = (f"the {steps:,} steps of the training run “{after.folder}”, on which it builds",)
    return RunWords(
        step="answer",
        counted="charged",
        thing="release",
        subject="The release" if after is None else f"The release, together with the model of “{after.folder}”,",
        of_what="",
        nothing_learnt="nothing has been learnt from the private data by this run",
        trusted="whoever runs it",
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
        event=events if after is None else f"{events}; and the steps of the training run before it, as its report says",
        composition=f"{before}all answers of the plan, or after an independent stop those charged",
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
    return f"δ = {share}/N. At 1/N, publishing one unit outright would pass; the usual choice is at most 0.1/N"


def _dataset(plan: Plan, notes: ReleaseNotes) -> str | None:
    if plan.dataset and notes.dataset and notes.dataset != plan.dataset:
        raise ValueError(
            f"the note dataset is {notes.dataset!r}, and the plan of the run names the data set {plan.dataset!r}: "
            "leave the note out"
        )
    return plan.dataset or notes.dataset


def _written_out(contents: LedgerContents) -> tuple[WrittenOut, ...]:
    return tuple(WrittenOut(what=what, count=count) for what, count in sorted(contents.disclosures.items()))


def _listed(facts: Mapping[str, Sequence[str | int | float]]) -> tuple[Fact, ...]:
    return tuple(Fact(name=name, values=tuple(values)) for name, values in sorted(facts.items()))


def define(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes) -> Definition:
    """Return the definition of a training.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
        notes: what people noted.

    Raises:
        ValueError: people noted another name of the data set than the plan has.
    """
    public = [_PUBLIC]
    if plan.sampling == "example":
        public[0] = (
            "the number of users N, the exact number of rows to draw from (the sampling rate is computed from it, so "
            "this number is published and must be public), and all settings in this report"
        )
    if contents.notes.facts.get(CLASS_NAMES, [None])[-1] == DECLARED_NAMES:
        public.append("the names and the number of the classes, which the run declared (data.class_names)")
    federated = FEDERATED in contents.notes.facts
    unit = _unit(plan, contents, "training data")
    return Definition(
        dataset=_dataset(plan, notes),
        unit=f"a client, which has the records of {unit}" if federated else unit,
        adjacency=ADJACENCY_WORDS[plan.adjacency],
        mechanism=mechanism(plan, federated),
        public=(*public, *contents.public),
        data_accesses_covered=(
            f"the {contents.num_steps} training steps in the ledger, of {_starts(len(contents.runs))}",
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
    """Return what ε never covers: rounding of the noise only where it is not discrete."""
    kept = _NEVER_COVERED if plan.randomness == "discrete" else (*_NEVER_COVERED, _rounded_noise("float32"))
    return kept if plan.selection is None else (*kept, _OTHER_RUNS)


def _rounded_noise(dtype: str) -> NeverCovered:
    return NeverCovered(
        what="the exactness of floating-point noise",
        advice=f"the noise is a {dtype} Gaussian, as in all common DP libraries",
    )


def _facts(contents: LedgerContents) -> dict[str, list[str | int | float]]:
    """Return the facts that the run noted, the thresholds of a clipping that adapts, and the learning rates."""
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
            f"one row of the {data}, as it was given to the run. Nothing says which record a row is from: if a "
            "record was cut into several rows, each of them is a unit by itself, and the record is protected less. A "
            f"text that is in several rows is that many units. {OTHER_PEOPLE}"
        )
    if plan.unit == "sequence":
        which = f", which is {facts[RECORDS_ARE][-1]}" if RECORDS_ARE in facts else ""
        cut = "A record longer than the model's context that was cut into several rows is still one unit. "
        return (
            f"one record of the {data}{which}. {cut if plan.method is None else ''}A text that is in several records "
            f"is that many units, and is protected less. {OTHER_PEOPLE}"
        )
    kept = {
        "first": ", the first ones in the order of the data",
        "random": ", chosen by a secret draw before the run",
        None: "",
    }[plan.rows_kept]
    rows = f" At most {plan.max_rows_per_unit} rows of each user were used{kept}." if plan.max_rows_per_unit else ""
    return (
        f"one user: all records with the same id in column '{plan.unit_column}'.{rows} A person with several ids is "
        f"several units. Ids are compared as they are written, unless the recipe normalised them. {OTHER_PEOPLE}"
    )


def mechanism(plan: PrivacyPlan, federated: bool = False) -> str:
    """Return one step of the run in words, with all its parameters.

    Args:
        plan: the plan of the run.
        federated: whether a step is a round over clients, each of which trains on its own records.
    """
    parts = plan.mechanism
    sigma = f"σC = {plan.noise_stddev:.6g} (σ = {plan.noise_multiplier:.6g})"
    if parts.first_threshold is not None:
        sigma = (
            f"σ_g C = {plan.noise_stddev:.6g} (σ_g = {parts.gradient_noise_multiplier:.6g}; with the count, whose "
            f"noise has the standard deviation {parts.statistic_stddev:.6g}, a step has "
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
            f"by itself; a user has at most {plan.max_rows_per_unit} rows, each of which may be drawn or not; {noise}"
        )
    if federated:
        return (
            f"federated rounds: {parts.noise.drawing(parts.draw, 'client')}; each of them trains from the weights of "
            f"the server on its own records, and the change of its weights {how}; {noise}"
        )
    drawn, name = ("record", "") if plan.unit == "sequence" else ("user", "user-level sampling (ULS): ")
    whole = "over all its rows" if plan.unit == "sequence" else "over all rows of that user"
    return (
        f"{name}{parts.noise.drawing(parts.draw, drawn)}; the gradient of each {drawn}, summed {whole}, {how}; {noise}"
    )


def _noise_of_a_release(plan: PrivacyPlan) -> str:
    """Return the standard deviation of a release where correlation makes it another one than σC."""
    first, last = plan.mechanism.release_stddevs(plan.num_steps)
    if first == last == plan.noise_stddev:
        return ""
    # Two digits: the strategy is optimised numerically, and other machines may find it with other last digits.
    return (
        f"; the noise in one release has a standard deviation of about {first:.2g} in the first step and about "
        f"{last:.2g} in step {plan.num_steps}"
    )


def event(plan: PrivacyPlan) -> str:
    """Return which privacy event a step is accounted as, with its source; and that of a selection among runs."""
    step = plan.event.words().accounted_as
    if plan.selection is None:
        return step
    (selected, _), *_ = plan.history
    return f"{step}; all runs together as {selected.words().accounted_as}"


def selection_points(plan: PrivacyPlan, contents: LedgerContents) -> tuple[str, ...]:
    """Return the open point of a run that no tuning has selected: its ε holds for the selected run only."""
    if plan.selection is None or SELECTED in contents.notes.facts:
        return ()
    return (NOT_SELECTED,)


def assumptions(plan: PrivacyPlan, contents: LedgerContents) -> tuple[Assumption, ...]:
    """Return what the numbers rest on, and for each how the run ensured it."""
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    torn = f"; steps torn by a crash are charged: {contents.torn_steps}" if contents.torn_steps else ""
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
            "contributes zero where its gradient is not finite; a parameter without a norm rule is refused",
        ),
        *_adapts(plan),
        *_selects(plan),
        ("There is one draw per step", "the draw of a step is made once and only then divided into microbatches"),
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
            "without units is taken all the same",
        ),
        ("Sampling and noise cannot be predicted", f"entropy: {entropy}"),
        (
            "Every step is counted",
            "each step is on the disk before its gradient is used; the lines of the ledger are chained by hashes"
            + torn,
        ),
    )
    return tuple(Assumption(assumption=assumption, how_ensured=how) for assumption, how in pairs)


def _adapts(plan: PrivacyPlan) -> tuple[tuple[str, str], ...]:
    """Return how the threshold of a clipping that adapts is accounted for."""
    parts = plan.mechanism
    if parts.first_threshold is None:
        return ()
    how = (
        "a count of the gradients below the threshold moves it after each step. The count gets Gaussian noise of "
        f"standard deviation σ_b = {parts.statistic_stddev:.6g} and is divided by the expected batch size "
        f"{plan.expected_batch_size}. The event of a step covers the count: 1/σ² = 1/σ_g² + 1/(2σ_b)² (Andrew et "
        "al., arXiv:1905.03871). Each step in the ledger carries its threshold, which is fixed before the step"
    )
    return (("The clip threshold depends on earlier releases only", how),)


def _selects(plan: PrivacyPlan) -> tuple[tuple[str, str], ...]:
    """Return how a selection among several runs is done."""
    if plan.selection is None:
        return ()
    how = (
        f"{Selection.of(plan.selection).words()}; K and the candidate of each run are drawn by the operating system's "
        "generator before the first run, and a restart takes them again. A failed run counts, with the worst score. "
        "The score is measured on held-out rows that were declared public"
    )
    return (("Only the best of K runs is released, and the score looks at no private record", how),)


def _bounded(plan: PlannedDraw) -> tuple[tuple[str, str], ...]:
    """Return how the rows of a user are bounded, at user level."""
    rows = f"at most {plan.max_rows_per_unit} rows of each are kept when the data are read, before the "
    if plan.sampling == "example":
        how = f"{rows}sampling rate is fixed; the ledger carries the bound with each step"
        return (("No user has more rows than the bound", how),)
    if plan.unit == "user":
        how = f"{rows}plan is made; no later filter drops any"
        return (("A user's rows are bounded before the sampling rate is fixed", how),)
    return ()


def _assumptions_of_answers(plan: QueryPlan, contents: LedgerContents) -> tuple[Assumption, ...]:
    """Return what the numbers of a run of a method rest on, and for each how the run ensured it."""
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    torn = f"; answers torn by a crash are charged: {contents.torn_steps}" if contents.torn_steps else ""
    pairs = [
        *release_words()[plan.method].assumptions,
        ("Draws and noise cannot be predicted", f"entropy: {entropy}"),
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

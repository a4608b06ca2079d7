"""Write the first screen of a report: what was trained on what, by whom, when, who is protected, and how well.

The reader is responsible for the data and does not write programs. Each number is computed from the report's values,
and rounded to two figures in the direction in which the sentence stays true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from dpllm.privacy.rounding import format_percent, one_in, up_significant
from dpllm.privacy.run_folder import LOST_STEPS
from dpllm.registry import ReleaseWords, release_words
from dpllm.report.definition import REFUTED, TRAINED_MODEL
from dpllm.report.disclosures import in_plain_words
from dpllm.report.models import (
    NO_TRAINER,
    Findings,
    Front,
    Odds,
    PlanOfQueries,
    Strength,
    day_in_words,
    is_selection,
)

_ON_THE_FRONT = ("0.5", "0.01", "1e-06")  # of `bounds`: one of each kind of attack
_REFUTED = (
    "AN AUDIT REFUTES THIS REPORT. It learnt more about single units from the model than this report's numbers allow. "
    "Do not rely on any of these numbers until the cause is found."
)


def front(findings: Findings, num_open: int) -> Front:
    """Return the first screen."""
    method = method_of(findings)
    refuted = (findings.strength.audit or "").startswith(REFUTED)
    holds = findings.statement.private and findings.accounting.steps.charged > 0 and not refuted
    return Front(
        alert=_alert(num_open, findings.strength.tier, thing_of(findings)),
        what=_what(findings) if method is None else _what_was_asked(findings, method),
        who=_who(findings),
        when=_when(findings) if method is None else _when_it_was_asked(findings),
        protected=_protected(findings),
        odds=_odds(findings) if holds else _REFUTED if refuted else findings.statement.words,
        table=tuple(_on_the_front(findings)) if holds else (),
        numbers=_numbers(findings) if holds else "",
        not_covered=_not_covered(findings),
        to_do=_to_do(num_open, findings.strength.tier, thing_of(findings)),
    )


def _alert(num_open: int, tier: str, thing: str = "model") -> str:
    """Return the line above everything else; empty if no point is open."""
    if num_open:
        points = "One point is" if num_open == 1 else f"{num_open} points are"
        return f"{points} open: do not release {_it(thing)} yet."
    return "The guarantee is weak: read the odds before you release anything." if tier == "weak" else ""


def _it(thing: str) -> str:
    return "the model" if thing == "model" else "anything"


def _to_do(num_open: int, tier: str, thing: str = "model") -> str:
    it = _it(thing)
    if num_open == 1:
        return f"One point is open. Do not release {it} before it is cleared."
    if num_open > 1:
        return f"{num_open} points are open. Do not release {it} before all of them are cleared."
    if tier == "weak":
        return (
            f"No point of this report is open, but its guarantee is weak. Decide whether {it} may be released by "
            "the odds above, and not only by this report."
        )
    return "Nothing: no point of this report is open."


def bounds(strength: Strength, adjacency: str, unit: str) -> Iterator[tuple[str, Odds]]:
    """Yield every bound on an attack in a report, with its key in the report's JSON.

    Args:
        strength: the part of the report with the bounds.
        adjacency: adjacency of the headline ε.
        unit: "record" or "user".
    """
    one, those_used = _named(unit)
    asked = f"whether {one} was used" if adjacency == "zero-out" else f"which of two {unit}s was used"
    for name, at_most in strength.bayes_success.items():
        chance = float(name)
        before = "50% likely beforehand" if chance == 0.5 else f"{format_percent(chance)} likely beforehand"
        yield name, _row(f"Say {asked} ({before})", max(chance, 1 - chance), at_most)
    for name, at_most in strength.true_positive_rate.items():
        share = float(name)
        yield (
            name,
            _row(
                f"Find {those_used}, and wrongly accuse {format_percent(share)} of all others",
                share,
                at_most,
            ),
        )
    for name, at_most in strength.reconstruction.items():
        chance = float(name)
        yield name, _row(f"Pick {one} out of {_number(chance)} equally likely ones", chance, at_most)


def _named(unit: str) -> tuple[str, str]:
    """Return the words for one unit and for all units that were used."""
    if unit == "user":
        return "one user's data", "the users whose data was used"
    return "one record", "the records that were used"


def _row(attack: str, without: float, at_most: float) -> Odds:
    return Odds(
        attack=attack,
        without=_chance(without),
        with_the_model=_chance(at_most),
        share_without=without,
        at_most=min(1.0, at_most),
    )


def _chance(share: float) -> str:
    """Format a probability, rounded up: as a percentage, or as cases in a million if it is tiny.

    >>> _chance(0.505), _chance(1e-3), _chance(1.234e-6)
    ('51%', '0.1%', '1.3 in a million')
    """
    if not 0 < share < 1e-4:
        return format_percent(share)
    return f"{float(up_significant(share * 1e6, 2)):.4g} in a million"


def _number(one: float) -> str:
    return {1e-3: "a thousand", 1e-6: "a million"}.get(one, f"{1 / one:,.4g}")


def _on_the_front(findings: Findings) -> Iterator[Odds]:
    statement = findings.statement
    for name, row in bounds(findings.strength, statement.adjacency, unit_of(statement.unit)):
        kind = "Say" if name == "0.5" else "Find" if name == "0.01" else "Pick"
        if name in _ON_THE_FRONT and row.attack.startswith(kind):
            yield row


def unit_of(unit: str) -> str:
    """Return the word for a unit: "record" or "user"."""
    return "record" if unit == "sequence" else "user"


def _what(findings: Findings) -> str:
    definition, noted = findings.definition, findings.noted
    unit, number = unit_of(findings.statement.unit), findings.accounting.parameters.num_units
    model = next((str(fact.values[-1]) for fact in definition.facts if fact.name == TRAINED_MODEL), "a model")
    base = f", based on {noted.base_model}," if noted.base_model else ""
    data = f"the data set “{definition.dataset}”" if definition.dataset else "a data set without a public name"
    private = f"{number:,} private records" if unit == "record" else f"private texts of {number:,} users"
    model = re.sub(r"^an? ((?:\w+ )?)adapter for (.*)$", r"a small addition to \2, called \1adapter", model)
    words = [f"{model[0].upper()}{model[1:]}{base} was trained on {data}: {private}."]
    if is_selection(findings.checkable.plan):
        words.append("It is the best of a secret random number of training runs.")
    known = f"starting weights: {noted.base_model}"
    public = [line for line in definition.public[1:] if line != known]
    if public:
        words.append(f"Taken as public: {'; '.join(public)}.")
    return " ".join(words)


def _who(findings: Findings) -> str:
    thing = thing_of(findings)
    facts = (
        ("Raw data held by", findings.setting.data_holder),
        (f"{thing} intended for", findings.setting.audience),
        ("trained by" if thing == "model" else "made by", findings.noted.trained_by or NO_TRAINER),
    )
    words = "; ".join(f"{name}: {'not noted' if value is None else value}" for name, value in facts)
    return words if findings.noted.trained_by is None else f"{words}."


def _when(findings: Findings) -> str:
    runs, steps = findings.checkable.runs, findings.accounting.steps
    words = [f"Training started on {day_in_words(runs[0].started_at)}"]
    if len(runs) > 1:
        times = "once" if len(runs) == 2 else f"{len(runs) - 1} times"
        words.append(f", was resumed {times}, the last time on {day_in_words(runs[-1].started_at)},")
    plan = findings.checkable.plan
    left_out = 0 if isinstance(plan, PlanOfQueries) else plan.num_steps - steps.planned
    taken = (
        f"all {steps.planned:,} planned steps"
        if steps.charged == steps.planned and not left_out
        else f"{steps.charged:,} of {steps.planned + left_out:,} planned steps"
    )
    words.append(f" and took {taken}.")
    if lost := _lost(findings):
        words.append(
            f" A crash lost {lost:,} of them. They still count for ε, but the released weights contain only "
            f"{steps.charged - lost:,}."
        )
    if left_out:
        words.append(f" {left_out:,} were skipped after a resume, because they would have exceeded the planned ε.")
    if findings.checkable.ended is None:
        words.append(" It has not ended, or it crashed.")
    elif steps.charged != steps.planned:
        words.append(f" It ended early ({findings.checkable.ended}).")
    return "".join(words)


def _lost(findings: Findings) -> int:
    """Return the charged steps that the weights do not contain (`dpllm.privacy.run_folder.lost_steps`)."""
    found = [fact.values[-1] for fact in findings.definition.facts if fact.name == LOST_STEPS]
    return int(str(found[-1]).split(" ")[0]) if found else 0


def _protected(findings: Findings) -> str:
    plan = findings.checkable.plan
    if plan.unit == "user":
        which = f"Every single user: all records with the same id in the column “{plan.unit_column}”" + (
            "." if plan.max_rows_per_unit is None else f", of which at most {plan.max_rows_per_unit} were used."
        )
    elif findings.definition.unit.startswith("one row"):
        which = "Every single row of the training data, in the form in which the run received it."
    else:
        which = f"Every single record of the {'training' if method_of(findings) is None else 'private'} data."
    spread = "with several ids" if plan.unit == "user" else "with several records"
    return f"{which} A person {spread}, or whom other people write about, is protected less."


def _odds(findings: Findings) -> str:
    statement, success = findings.statement, findings.strength.bayes_success.get("0.5", 1.0)
    unit = unit_of(statement.unit)
    asked = (
        f"whether {_named(unit)[0]} was used" if statement.adjacency == "zero-out" else f"which of two {unit}s was used"
    )
    return (
        f"Someone who has the {thing_of(findings)} and knows all other data can guess {asked}, and will be right at "
        f"most {format_percent(success)} of the time. A coin toss is right 50% of the time."
    )


def _numbers(findings: Findings) -> str:
    statement, steps = findings.statement, findings.accounting.steps
    counted = "steps" if method_of(findings) is None else "answers"
    stated = "" if steps.stated == steps.charged else f" This is the ε of {steps.stated:,} {counted}, as planned."
    return (
        f"In numbers: ε = {two_figures(statement.epsilon)} and δ = {one_in(statement.delta)}. "
        f"{findings.strength.words}{stated}"
    )


def two_figures(epsilon: float) -> str:
    """Return ε with at least two figures, rounded up.

    >>> two_figures(7.9994), two_figures(0.0809), two_figures(math.inf)
    ('8.0', '0.081', 'infinite')
    """
    return up_significant(epsilon, 2) if math.isfinite(epsilon) else "infinite"


def factor_words(epsilon: float) -> str:
    """Return exp(ε) in words, rounded up to three digits; for a huge number, only how many digits it has.

    >>> factor_words(1.0), factor_words(40.0)
    ('exp(ε) = 2.72', 'exp(ε), a number of 18 digits')
    """
    if epsilon > 30:
        return f"exp(ε), a number of {math.floor(epsilon / math.log(10) + 1e-9) + 1} digits"
    value = math.exp(epsilon)
    digits = 2 - math.floor(math.log10(value))
    rounded = f"{math.ceil(value * 10**digits) / 10**digits:,g}" if value < 1e5 else f"{math.ceil(value):,}"
    return f"exp(ε) = {rounded}"


def _not_covered(findings: Findings) -> str:
    written = findings.definition.written_out_and_not_covered
    counted = "; ".join(f"{in_plain_words(item.what)} ({_times(item.count)})" for item in written)
    first = f"The run wrote results that ε does not cover: {counted}." if written else ""
    budgets = sorted({entry.file for entry in findings.accounting.budget})
    names = ", ".join(budgets)
    tuned = is_selection(findings.checkable.plan)
    about = (
        "this tuning with all its runs and the weights it released" if tuned else "this run and its released weights"
    )
    if isinstance(findings.checkable.plan, PlanOfQueries):
        about = _about_answers(findings.checkable.plan)
    shared = f" The budget file ({names}) adds up all runs that are charged to it." if budgets else ""
    seen = _not_even_seen(method_of(findings))
    covers = "covers neither" if seen else "does not cover"
    return f"{first} ε covers {about}. It {covers} other runs on the same data{seen}.{shared}".strip()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def method_of(report: Any) -> ReleaseWords | None:
    """Return the method of a query run's report; None for a training run."""
    plan = getattr(getattr(report, "checkable", None), "plan", None)
    return release_words()[plan.method] if isinstance(plan, PlanOfQueries) else None


def thing_of(report: Any) -> str:
    """Return the word for what is released: "model", or "release" for a query run, even if it includes a model."""
    return "model" if method_of(report) is None else "release"


def _what_was_asked(findings: Findings, method: ReleaseWords) -> str:
    """Return what was done on which data, in sentences."""
    plan, definition = findings.checkable.plan, findings.definition
    data = f"the data set “{definition.dataset}”" if definition.dataset else "a data set without a public name"
    private = f"{plan.num_units:,} private records" if plan.unit == "sequence" else f"texts of {plan.num_units:,} users"
    words = [f"{method.what}. The private data: {data}, {private}."]
    after = plan.after if isinstance(plan, PlanOfQueries) else None
    if after is not None:
        words.append(
            f"It builds on the model of “{after['folder']}”, which was trained on the same people; ε covers both."
        )
    if len(definition.public) > 1:
        words.append(f"Taken as public: {'; '.join(definition.public[1:])}.")
    return " ".join(words)


def _when_it_was_asked(findings: Findings) -> str:
    """Return when the run started, and how many of its answers were charged."""
    steps, ended = findings.accounting.steps, findings.checkable.ended
    charged = (
        f"all {steps.planned:,} planned private answers"
        if steps.charged == steps.planned
        else f"{steps.charged:,} of {steps.planned:,} planned private answers"
    )
    if steps.planned == 1 == steps.charged:
        charged = "its one private answer"
    words = f"The run started on {day_in_words(findings.checkable.runs[0].started_at)} and charged {charged}."
    if ended is None:
        return f"{words} It has not ended, or it crashed."
    return words if steps.charged == steps.planned else f"{words} It ended early ({ended})."


def _not_even_seen(method: ReleaseWords | None) -> str:
    """Return the words for records that a model had already seen, which ε does not cover; empty without a model."""
    if method is None:
        return " nor private records that the starting model had already seen"
    return " nor private records that a public model had already seen" if method.has_model else ""


def _about_answers(plan: PlanOfQueries) -> str:
    """Return what ε covers."""
    return "this run's answers" if plan.after is None else "this run's answers and the model that it builds on"

"""Values of reports of earlier formats that have another form today: for `dpllm verify`.

Place in the flow: under `dpllm.report.earlier_reports`. The pages of those reports are in their own templates
(`dpllm.report.pages`); here are the sentences and lists whose numbers today's reports state differently. Nothing new is
written with them: `dpllm report FOLDER` writes a report in today's form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpllm.privacy.rounding import format_delta, up
from dpllm.report.checklist import REFUTED, disagreements, is_sampled
from dpllm.report.disclosures import DESTINATIONS, FINAL_LOSS, LOGGED, RESOURCES, TRAINING_LOSS
from dpllm.report.front import factor_words
from dpllm.report.models import PrivacyReport

_LOCAL = frozenset({"the screen", "the Trainer's state"})
_KEPT = frozenset({TRAINING_LOSS, FINAL_LOSS, RESOURCES, LOGGED})

_Lines = list[tuple[str, str | None]]


def checklist(report: PrivacyReport, sentences: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of the checklist, as the JSON has them.

    Args:
        report: as it is computed today.
        sentences: about attacks (`attack_sentences`).
    """
    sections = {
        "setting": _setting(report.setting, report.definition),
        "definition": _definition(report.definition),
        "accounting": _accounting(report.statement, report.accounting, is_sampled(report.checkable)),
        "strength": _strength(report.strength, sentences),
        "checkable": _checkable(report.checkable, report.noted_open_points),
        "utility": _utility(report.utility),
    }
    return [
        {"section": section, "question": question, "answer": answer, "filled": answer is not None}
        for section, lines in sections.items()
        for question, answer in lines
    ]


def with_factor(words: str, epsilon: float) -> str:
    """Return a sentence of today with exp(ε) as reports up to format 4 print it, where it is large."""
    if not 30 < epsilon < math.inf:
        return words
    least = 10 ** int(min(epsilon, 700) / math.log(10))
    printed = "more than 1e300" if epsilon >= 700 else f"more than {least:.0e}"
    return words.replace(factor_words(epsilon), f"exp(ε) = {printed}")


def open_points(report: PrivacyReport, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reasons not to release yet.

    Args:
        report: as it is computed today.
        lines: its checklist.
    """
    points = []
    if not report.statement.private:
        points.append("This run is not private. Do not release it as such.")
    if report.checkable.ended is None:
        points.append("The run has not ended, or ended in a crash. Resume it, or release nothing of it.")
    steps = report.accounting.steps
    if steps.charged > steps.planned:
        points.append(f"{steps.charged} steps were charged, more than the {steps.planned} planned.")
    audit = report.strength.audit
    if audit is not None and audit.startswith(REFUTED):
        points.append("An audit of this model refutes the claim. Do not release it (see below).")
    points += report.noted_open_points
    points += disagreements(report.accounting.cross_checks)
    points += [f"Not filled in: {line['question']}" for line in lines if not line["filled"]]
    away = _not_kept(report.definition)
    if away:
        points.append(
            "Some results that depend on the private data were written out, are not covered by ε, and may be outside "
            f"this run's folder or in this report: {'; '.join(away)}. Keep them from whoever gets the model."
        )
    return points


def _not_kept(definition: Any) -> list[str]:
    """Return which of the results that were written out were not known to stay with the run."""
    values = [str(value) for fact in definition.facts if fact.name == DESTINATIONS for value in fact.values]
    places = {place for value in values for place in value.split(", ")}
    local = bool(places) and places <= _LOCAL
    return [item.what for item in definition.written_out_and_not_covered if not (local and item.what in _KEPT)]


def _setting(setting: Any, definition: Any) -> _Lines:
    return [
        ("Which setting of differential privacy, and who is trusted?", setting.model),
        ("Who holds the raw data?", setting.data_holder),
        ("Who will see the released model?", setting.audience),
        ("Which data set is it (its public name)?", definition.dataset),
    ]


def _definition(definition: Any) -> _Lines:
    written = definition.written_out_and_not_covered
    counts = "; ".join(f"{item.what}: {item.count} times" for item in written)
    never = "; ".join(item.what for item in definition.never_covered)
    facts = "; ".join(f"{fact.name}: {fact.in_words}" for fact in definition.facts)
    lines: _Lines = [
        ("Which uses of the data does the guarantee cover?", "; ".join(definition.data_accesses_covered)),
        (
            "Which other uses had the same data (tuning runs, earlier models, model selection)? Their ε adds up.",
            definition.other_uses_of_the_data,
        ),
        ("What may be released under the guarantee?", "; ".join(definition.released_under_the_guarantee)),
        ("What was written out that the guarantee does not cover?", counts or "nothing that the ledger knows of"),
        ("What does the guarantee never cover?", never),
        ("What is one unit of privacy?", definition.unit),
        ("Which data sets are neighbours?", definition.adjacency),
        ("What is taken as public?", "; ".join(definition.public)),
        ("What did the run find out about itself?", facts or "no facts noted"),
    ]
    return lines


def _accounting(statement: Any, accounting: Any, sampled: bool) -> _Lines:
    by_adjacency = accounting.epsilon
    values = ", ".join(f"{name}: ε = {up(value)}" for name, value in by_adjacency.items())
    checks = [
        f"{check.name}: ε = {up(check.epsilon)}" for check in accounting.cross_checks if check.epsilon is not None
    ]
    charged = {f"entry {entry.entry} of {entry.file}" for entry in accounting.budget}
    budget = f"; charged to the budget of the data set: {', '.join(sorted(charged))}" if charged else ""
    rho = accounting.zcdp_rho
    parameters = accounting.parameters
    share = f"{parameters.sampling_rate:.6g}"
    drawn = f"q = {share}, expected batch " if sampled else f"a share of {share} of the units in each step, batch "
    return [
        ("What is the guarantee?", f"ε = {up(statement.epsilon)}, δ = {format_delta(statement.delta)}"),
        ("What is ε under each adjacency that the sampler supports?", values),
        (
            "How was it accounted for, with which tool, version and discretization?",
            f"{accounting.kind}; {accounting.tool} {accounting.tool_version}, discretization "
            f"{accounting.discretization:g}; each step as {accounting.event}",
        ),
        ("What do other accountants say?", "; ".join(checks) or None),
        ("How were steps, phases and runs composed?", accounting.composition + budget),
        ("How many steps were asked for, planned and taken, and why did it stop?", accounting.steps.words),
        (
            "What is ε at other δ?",
            "; ".join(f"δ = {format_delta(row.delta)}: ε = {up(row.zero_out)}" for row in accounting.curve)
            + " (zero-out)",
        ),
        (
            "What is ρ of zero-concentrated privacy?",
            "infinite" if math.isinf(rho) else f"{rho:.6g}, without the gain from sampling",
        ),
        (
            "With which parameters did the mechanism run?",
            f"N = {parameters.num_units}, {drawn}{parameters.expected_batch_size}, "
            + (f"at most {parameters.max_batch_size}, " if sampled else "nothing is sampled, ")
            + f"T = {parameters.num_steps_charged}, σ = {parameters.noise_multiplier:.6g}, "
            f"C = {parameters.clip_norm:g}",
        ),
        ("Why this δ?", parameters.why_this_delta),
        (
            "What does the number rest on, and how did the run ensure it?",
            "; ".join(f"{item.assumption}: {item.how_ensured}" for item in accounting.assumptions),
        ),
    ]


def _strength(strength: Any, sentences: Sequence[str]) -> _Lines:
    audit = strength.audit
    if audit is None and strength.tier != "weak":
        audit = "none noted; it is asked for above ε = 10"
    return [
        ("How strong is the guarantee?", f"{strength.tier}: {strength.words}"),
        ("What can an attacker achieve at most?", " ".join(sentences)),
        ("What did an empirical audit find?", audit),
    ]


def _checkable(checkable: Any, open_points: Sequence[str]) -> _Lines:
    noted = " ".join(open_points) or "nothing"
    return [
        ("With which code did it run?", checkable.versions.in_words),
        ("What identifies the configuration?", f"the plan, SHA-256 {checkable.plan_hash}"),
        ("What identifies the record of the run?", f"the ledger, SHA-256 {checkable.ledger_sha256}"),
        ("Which command checks everything again?", checkable.verify),
        ("What did the run itself note as a reason not to release yet?", noted),
    ]


def _utility(utility: Mapping[str, object] | None) -> _Lines:
    named = "; ".join(f"{name}: {value}" for name, value in utility.items()) if utility else None
    return [("How useful is it: held-out metric, the same without privacy, hardware and cost?", named)]


def attack_sentences(strength: Any, adjacency: str, unit: str, seeded: bool) -> list[str]:
    """Return the sentences about attacks.

    Args:
        strength: the part of the report with the bounds.
        adjacency: of the headline.
        unit: "record" or "user".
        seeded: whether the run had a fixed seed.
    """
    question = (
        f"whether one {unit} was in the training data"
        if adjacency == "zero-out"
        else f"which of two {unit}s was in the training data"
    )
    lines = []
    for prior, success in _by_number(strength.bayes_success):
        guess = max(prior, 1 - prior)
        if prior == 0.5:
            lines.append(
                f"Even someone who knows all other data and every setting, and must say {question}, is right at most "
                f"{_percent(success, 1)}% of the time when both answers are equally likely beforehand; 50.0% is blind "
                "guessing."
            )
        else:
            lines.append(
                f"When the chance beforehand is {prior * 100:g}%, such a person is right at most "
                f"{_percent(success, 2)}% of the time; always giving the likelier answer is right {guess * 100:g}% of "
                "the time."
            )
    for fpr, tpr in _by_number(strength.true_positive_rate):
        lines.append(
            f"Accusing {fpr * 100:g}% of the {unit}s that were not in the data, such a person finds at most "
            f"{_percent(tpr, 2)}% of those that were; blind guessing finds {fpr * 100:g}%."
        )
    for prior, success in _by_number(strength.reconstruction):
        lines.append(
            f"Someone who knows all other data and must pick the right {unit} out of {_number_of(prior)} equally "
            f"likely ones is right in at most {_cases(success, prior)} of {_number_of(prior)} such cases; blind "
            "picking is right in 1."
        )
    before = "Not with the fixed seed of this run, but with secret randomness: " if seeded else ""
    return [before + line for line in lines]


def _by_number(chances: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(float(name), value) for name, value in chances.items()]


def _number_of(prior: float) -> str:
    """Format a chance as a number of equally likely possibilities."""
    return {1e-3: "a thousand", 1e-6: "a million"}.get(prior, f"{1 / prior:,.4g}")


def _cases(success: float, prior: float) -> str:
    """Format the number of successes in 1/prior cases, rounded up."""
    cases = success / prior
    return f"{math.ceil(cases * 10 - 1e-7) / 10:g}" if cases < 10 else f"{math.ceil(cases - 1e-7):,}"


def _percent(value: float, digits: int) -> str:
    """Format a percentage, rounded up so that the printed number is an upper bound."""
    scale = 10**digits
    return f"{min(100.0, math.ceil(value * 100 * scale - 1e-7) / scale):.{digits}f}"

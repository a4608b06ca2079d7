"""What a privacy report must answer, line by line, and which lines are still open.

Place in the flow: below report; reads the report's values and computes nothing. The questions follow Ponomareva et al.,
"How to DP-fy ML" (JAIR 77, 2023), section 5.3. A line that nothing answers is a reason not to release yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dpllm.mechanism.catalogue import from_fields
from dpllm.privacy.rounding import format_delta, up
from dpllm.report.disclosures import DESTINATIONS, not_kept
from dpllm.report.models import (
    Accounting,
    Checkable,
    CrossCheck,
    Definition,
    Findings,
    Line,
    PrivacyReport,
    Setting,
    Statement,
    Strength,
)

MOST_DIFFERENCE = 0.01
"""Two accountants that differ by more than this share of ε disagree."""
REFUTED = "FAIL"
"""What the summary of an audit begins with when the audit refutes the claim."""
_LEAST_DIFFERENCE = 0.002  # the PRV estimate is itself no more accurate than that

_Lines = list[tuple[str, str | None]]


def completed(findings: Findings) -> PrivacyReport:
    """Return a report with its checklist and its open points.

    Args:
        findings: everything else of the report; a checklist and open points that it has already are made again.
    """
    lines = checklist(findings)
    parts = {name: getattr(findings, name) for name in Findings.model_fields}
    return PrivacyReport(**parts, checklist=lines, open_points=open_points(findings, lines))


def checklist(findings: Findings) -> tuple[Line, ...]:
    """Return every line, with its answer.

    Args:
        findings: a report, all but its checklist and its open points.
    """
    sections = {
        "setting": _setting(findings.setting, findings.definition),
        "definition": _definition(findings.definition),
        "accounting": _accounting(findings.statement, findings.accounting, is_sampled(findings.checkable)),
        "strength": _strength(findings.strength),
        "checkable": _checkable(findings.checkable, findings.noted_open_points),
        "utility": _utility(findings.utility),
    }
    return tuple(
        Line(section=section, question=question, answer=answer, filled=answer is not None)
        for section, lines in sections.items()
        for question, answer in lines
    )


def is_sampled(checkable: Checkable) -> bool:
    """Return whether the units of the run's steps were sampled; otherwise b/N is no sampling rate."""
    return from_fields(checkable.runs[-1].planned_step).words().is_sampled


def open_points(findings: Findings, lines: Sequence[Line]) -> tuple[str, ...]:
    """Return the reasons not to release yet.

    Args:
        findings: a report, all but its checklist and its open points.
        lines: its checklist.
    """
    points = []
    if not findings.statement.private:
        points.append("This run is not private. Do not release it as such.")
    if findings.checkable.ended is None:
        points.append("The run has not ended, or ended in a crash. Resume it, or release nothing of it.")
    steps = findings.accounting.steps
    if steps.charged > steps.planned:
        points.append(f"{steps.charged} steps were charged, more than the {steps.planned} planned.")
    audit = findings.strength.audit
    if audit is not None and audit.startswith(REFUTED):
        points.append("An audit of this model refutes the claim. Do not release it (see below).")
    points += findings.noted_open_points
    points += disagreements(findings.accounting.cross_checks)
    points += [f"Not filled in: {line.question}" for line in lines if not line.filled]
    away = _not_kept(findings.definition)
    if away:
        points.append(
            "Some results that depend on the private data were written out, are not covered by ε, and may be outside "
            f"this run's folder or in this report: {'; '.join(away)}. Keep them from whoever gets the model."
        )
    return tuple(points)


def _not_kept(definition: Definition) -> list[str]:
    """Return which of the results that were written out are not known to stay with the run."""
    destinations = [value for fact in definition.facts if fact.name == DESTINATIONS for value in fact.values]
    return not_kept([item.what for item in definition.written_out_and_not_covered], map(str, destinations))


def disagreements(checks: Sequence[CrossCheck]) -> list[str]:
    """Return a line for each estimate by another accountant that differs from ours by more than 1 %.

    Both numbers are of the same steps under zero-out. Differences below 0.002 are within the other accountant's own
    error, and don't count. Upper bounds that are looser by nature are not held against ours, unless ours lies above.
    """
    lines = []
    for check in checks:
        other, ours = check.epsilon, check.pld_of_the_same_steps
        if other is None or ours is None or other == ours:
            continue
        if math.isinf(other) or math.isinf(ours):
            apart = math.inf
        else:
            apart = abs(other - ours) if check.bounds is not None else ours - other
        if apart > _LEAST_DIFFERENCE and (math.isinf(apart) or apart > MOST_DIFFERENCE * ours):
            lines.append(
                f"The two accountants disagree: {check.name} says ε = {up(other)}, and the PLD of the same "
                f"steps says {up(ours)}. Find out which is wrong before relying on either."
            )
    return lines


def _setting(setting: Setting, definition: Definition) -> _Lines:
    return [
        ("Which setting of differential privacy, and who is trusted?", setting.model),
        ("Who holds the raw data?", setting.data_holder),
        ("Who will see the released model?", setting.audience),
        ("Which data set is it (its public name)?", definition.dataset),
    ]


def _definition(definition: Definition) -> _Lines:
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


def _accounting(statement: Statement, accounting: Accounting, sampled: bool) -> _Lines:
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


def _strength(strength: Strength) -> _Lines:
    audit = strength.audit
    if audit is None and strength.tier != "weak":
        audit = "none noted; it is asked for above ε = 10"
    return [
        ("How strong is the guarantee?", f"{strength.tier}: {strength.words}"),
        ("What can an attacker achieve at most?", " ".join(strength.in_plain_words)),
        ("What did an empirical audit find?", audit),
    ]


def _checkable(checkable: Checkable, open_points: Sequence[str]) -> _Lines:
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

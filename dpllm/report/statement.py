"""Build the privacy statement of a run: what ran, what it guarantees, and what it does not guarantee.

ε is computed from the ledger, and therefore from what actually ran; the plan only supplies the parameters. The same
values (`dpllm.report.models`) are written three times: as JSON for programs, and as Markdown and HTML for people. The
contents follow Ponomareva et al., "How to DP-fy ML" (JAIR 77, 2023). A point that only people can fill in is listed as
open, and an open point is a reason not to release yet.

The same functions build the reports of training runs and of query runs; `dpllm.report.definition` holds the sentences
that differ.
"""

from __future__ import annotations

import json
import math
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpllm.config.versions import code_version, installed_version
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting, comparison
from dpllm.privacy.accounting import Guarantee, merge
from dpllm.privacy.ledger import REPORT_FILE as JSON_FILE
from dpllm.privacy.ledger import Ledger, LedgerContents, read_ledger
from dpllm.privacy.plan import Plan
from dpllm.privacy.risk import attack_risk
from dpllm.privacy.rounding import format_delta, up
from dpllm.privacy.run_folder import COMPLETED, STOPPED_EARLY, lost_steps
from dpllm.privacy.stated import planned_steps, stated_guarantee
from dpllm.report.checklist import REFUTED, completed
from dpllm.report.definition import FEDERATED, SECURE, TRUSTED, RunWords, run_words
from dpllm.report.disclosures import DIAGNOSTICS
from dpllm.report.figures import curves
from dpllm.report.front import factor_words
from dpllm.report.models import (
    FORMAT,
    Accounting,
    BudgetEntry,
    Checkable,
    CrossCheck,
    CurveRow,
    EpsilonByAdjacency,
    Findings,
    PrivacyReport,
    Setting,
    Settled,
    Statement,
    Steps,
    Strength,
    Versions,
)
from dpllm.report.pages import CHECK_FILE, check_text, draw_figures, render_html, write_pages
from dpllm.report.pages import render_markdown as render_markdown
from dpllm.report.release_notes import ReleaseNotes as ReleaseNotes
from dpllm.report.release_notes import notes_in as notes_in
from dpllm.report.release_notes import notes_of as notes_of

MARKDOWN_FILE = "privacy_report.md"
HTML_FILE = "privacy_report.html"

_SETTINGS = {
    TRUSTED: "central differential privacy: a simulation of federated learning with a trusted server. One trusted "
    "process reads the records of all clients, and the release is protected",
    SECURE: "central differential privacy: a simulation of federated learning with secure aggregation. One trusted "
    "process reads the records of all clients, and the release is protected",
}
"""The setting for each value of the fact `FEDERATED`."""
_CURVE_FACTORS = (0.1, 0.01)


def privacy_report(plan: Plan, ledger_contents: LedgerContents, notes: ReleaseNotes | None = None) -> PrivacyReport:
    """Return the privacy report of the steps or answers charged so far.

    Args:
        plan: the run's plan.
        ledger_contents: the contents of its ledger.
        notes: facts that only people know. None: those points stay open.

    Raises:
        ValueError: the ledger belongs to a different plan or charges events that are not planned, or the noted name of
            the data set differs from the plan's.
    """
    contents, notes = ledger_contents, notes or ReleaseNotes()
    if any(run["plan_hash"] != plan.hash for run in contents.runs):
        raise ValueError(f"{contents.path} was written under a different plan: use the plan from the ledger's folder")
    if (wrong := plan.unplanned(contents)) is not None:
        raise ValueError(
            f"{contents.path} charges steps that are not in the plan: {wrong}. Restore both files from a backup"
        )
    guarantee, words = stated_guarantee(plan, contents), run_words(plan, contents, notes)
    findings = Findings(
        format=FORMAT,
        statement=_statement(plan, contents, guarantee, words),
        setting=Setting(
            model=_SETTINGS.get(str(contents.notes.facts.get(FEDERATED, [""])[-1]))
            or f"central differential privacy: {words.trusted} sees the data and is trusted; the release is protected",
            data_holder=notes.data_holder,
            audience=notes.audience,
        ),
        definition=words.definition,
        accounting=_accounting(plan, contents, guarantee, words),
        strength=_strength(contents, guarantee, _is_seeded(plan, contents), notes.audit),
        curves=curves(guarantee),
        checkable=_checkable(plan, contents, guarantee),
        noted_open_points=(*contents.notes.open_points, *words.open_points),
        settlements=tuple(
            Settled(point=line["point"], answer=line["statement"], by=line["by"], at=line["at"])
            for line in contents.notes.settled
        ),
        utility=json.loads(json.dumps(dict(notes.utility), allow_nan=False)) or None,
        utility_elsewhere=tuple(notes.utility_elsewhere),
        noted=notes.noted(),
    )
    return completed(findings)


def write_report(
    output_dir: str | Path,
    plan: Plan,
    ledger: Ledger | LedgerContents,
    notes: ReleaseNotes | None = None,
    *,
    opened: Any = None,
) -> PrivacyReport:
    """Write ``privacy_report.json``, ``.md``, ``.html`` and `CHECK_FILE` into a folder, and return the report.

    Also records the hashes of these files in the folder's ledger (`dpllm.report.pages.write_pages`).

    Args:
        output_dir: an existing folder.
        plan: the run's plan.
        ledger: the open ledger, or its contents.
        notes: facts that only people know.
        opened: the folder's ledger, if a run has it open (`SharedLedger`). None: uses `ledger` if it is open, and
            otherwise opens the ledger in the folder.

    Raises:
        ValueError: the ledger is damaged or belongs to a different plan, or a run is writing it.
    """
    contents = read_ledger(ledger.path) if isinstance(ledger, Ledger) else ledger
    report = privacy_report(plan, contents, notes)
    files = {
        JSON_FILE: json_text(report),
        MARKDOWN_FILE: render_markdown(report),
        HTML_FILE: render_html(report, draw_figures(report)),
        CHECK_FILE: check_text(),
    }
    own = ledger if isinstance(ledger, Ledger) and ledger.is_open else None
    write_pages(output_dir, files, own if opened is None else opened)
    return report


def json_text(report: PrivacyReport) -> str:
    """Return the text of the JSON file."""
    return json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _is_seeded(plan: Plan, contents: LedgerContents) -> bool:
    return plan.seeded or contents.seeded


def _statement(plan: Plan, contents: LedgerContents, guarantee: Guarantee, words: RunWords) -> Statement:
    seeded, finite = _is_seeded(plan, contents), guarantee.is_finite
    if seeded:
        text = (
            "NOT PRIVATE. Sampling and noise came from a fixed seed, which is meant for tests. Anyone who knows the "
            "seed can remove the noise. The figures below would hold only with secret randomness."
        )
    elif contents.num_steps == 0 and plan.num_steps > 0:
        text = f"No {words.step} has been charged: {words.nothing_learnt}."
    elif not finite:
        text = (
            "NOT PRIVATE. ε is infinite: no noise was added, so nothing limits how much the "
            f"{words.thing} reveals about any one {guarantee.one_unit}."
        )
    else:
        text = _guarantee(guarantee, words) + _about_the_stop(plan, contents, words)
    return Statement(
        private=not seeded and finite,
        words=text,
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        adjacency=guarantee.adjacency,
        epsilon_by_adjacency=EpsilonByAdjacency.model_validate(guarantee.by_adjacency),
        unit=guarantee.unit,
    )


def _guarantee(guarantee: Guarantee, words: RunWords) -> str:
    unit, delta, other = guarantee.one_unit, format_delta(guarantee.delta), guarantee.other
    changes = {"zero-out": "contributed nothing", "replace-one": f"been replaced by a different {unit}"}
    under_other = guarantee.under(other)
    value = f"ε = {up(under_other)}" if math.isfinite(under_other) else "ε is infinite"
    return (
        f"{words.subject} satisfies (ε, δ)-differential privacy with ε = {up(guarantee.epsilon)} and δ = {delta} "
        f"for every single {unit}. Whatever is released{words.of_what} would have been almost as likely had any "
        f"one {unit} {changes[guarantee.adjacency]}. The probability of any outcome changes at most by the factor "
        f"{factor_words(guarantee.epsilon)}, plus {delta}. Had any one {unit} {changes[other]} ({other} adjacency), "
        f"{value} at the same δ."
    )


def _about_the_stop(plan: Plan, contents: LedgerContents, words: RunWords) -> str:
    planned, step = planned_steps(plan, contents), words.step
    if contents.num_steps >= planned:
        return ""
    given = f" {contents.num_steps:,} of {planned:,} planned {step}s were {words.counted}."
    if plan.stops_independently(contents):
        return f"{given} The figures are for these: the stop was declared independent of the data and of the {step}s."
    return (
        f"{given} The figures are for all {planned:,}, so they hold even if the stop, or the choice of what is "
        f"released, depended on the data or on the run's {step}s."
    )


def _accounting(plan: Plan, contents: LedgerContents, guarantee: Guarantee, words: RunWords) -> Accounting:
    budgets = (run.get("budget") for run in contents.runs)
    return Accounting(
        kind="privacy loss distributions (PLD), discretized pessimistically (connect the dots), composed by FFT; "
        f"{words.of_selection}computed by dpllm.mechanism.pld and {accounting.TOOL}; tests compare the two",
        event=words.event,
        tool=accounting.TOOL,
        tool_version=accounting.tool_version(),
        discretization=accounting.discretization_used(guarantee.history, guarantee.adjacency, delta=guarantee.delta),
        composition=words.composition,
        budget=tuple(dict.fromkeys(BudgetEntry.model_validate(entry) for entry in budgets if entry)),
        cross_checks=_cross_checks(guarantee),
        zcdp_rho=comparison.zcdp_rho(guarantee.history),
        curve=_curve(guarantee),
        steps=_steps(plan, contents, guarantee, words),
        parameters=words.parameters,
        assumptions=words.assumptions,
    )


def _curve(guarantee: Guarantee) -> tuple[CurveRow, ...]:
    """Return ε at a few smaller δ; leave out a δ that the accountant cannot resolve for this many steps."""
    rows = []
    for factor in _CURVE_FACTORS:
        delta = guarantee.delta * factor
        try:
            row = {name: accounting.epsilon(guarantee.history, delta, name) for name in ADJACENCIES}
        except ValueError:
            continue
        rows.append(CurveRow.model_validate({"delta": delta, **row}))
    return tuple(rows)


def _reason(plan: Plan, contents: LedgerContents) -> str | None:
    """Return why the run ended; a run with fewer steps than planned stopped early, whatever its ledger says."""
    early = contents.num_steps < planned_steps(plan, contents)
    if contents.end is not None and early and contents.end.startswith(COMPLETED):
        return STOPPED_EARLY
    return contents.end


def _steps(plan: Plan, contents: LedgerContents, guarantee: Guarantee, words: RunWords) -> Steps:
    """Return the numbers of steps or answers, and why there were no more."""
    wanted, taken, planned = plan.num_steps_wanted or plan.num_steps, contents.num_steps, planned_steps(plan, contents)
    step = words.step
    budget = (
        f"{wanted:,} {step}s were requested, and the target ε = {plan.target_epsilon:g} allows {plan.num_steps:,}; "
        if plan.num_steps_wanted is not None and plan.target_epsilon is not None
        else ""
    )
    resumed = f"{plan.num_steps - planned} were skipped after a resume, which started a new noise cycle; "
    resumed = resumed if planned < plan.num_steps else ""
    ended = (
        f"the run ended: {_reason(plan, contents)}" if contents.end is not None else "the run has not ended, or crashed"
    )
    how = f"{words.counted}: the stop was declared independent" if plan.stops_independently(contents) else "planned"
    stated = f"; ε is stated for all {step}s {how}" if 0 < taken < planned else ""
    lost = lost_steps(contents)
    held = f"; the weights contain {taken - lost} of them, since {lost} were lost before a resume" if lost else ""
    own = sum(count for _, count in plan.stated_steps(contents))
    total = planned if plan.selection is not None else own
    if total > max(planned, taken):
        stated = f"; ε is stated for the plan's {total} {step}s without a resume, which cost more"
    return Steps(
        wanted=wanted,
        planned=planned,
        charged=taken,
        stated=total,
        torn_by_a_crash=contents.torn_steps,
        words=f"{budget}{taken:,} of {plan.num_steps:,} planned {step}s were {words.counted}{held}; "
        f"{resumed}{ended}{stated}",
    )


@lru_cache(maxsize=8)
def _cross_checks(guarantee: Guarantee) -> tuple[CrossCheck, ...]:
    """Return ε under zero-out by other accountants, including those that do not apply to these events."""
    history, delta = guarantee.history, guarantee.delta
    merged = merge(history)
    ours, whole = accounting.epsilon(history, delta), accounting.untruncated(history)
    library, library_note = None, ""
    try:
        library, grid = comparison.fine_library_epsilon(history, delta)
        library_note = f"by that library's own accountant, under zero-out, on a grid of {grid:g}; must agree within 1 %"
    except ValueError as error:
        library_note = f"does not apply: {error}"
    renyi = comparison.renyi_epsilon(history, delta)
    rounds = [one for one, _ in merged if (one.renyi_event is None) == (renyi is None)]
    checks = [
        ("PLD of dp_accounting", library, True, ours, library_note),
        (
            "Rényi",
            renyi,
            False,
            accounting.epsilon(whole, delta),
            "; ".join(dict.fromkeys(one.words().renyi for one in rounds)),
        ),
    ]
    whole_only = merged and all(one.sampling_rate == 1 for one, _ in merged)
    if (whole_only or library is renyi is None) and math.isfinite(comparison.zcdp_rho(history)) and merged:
        note = "an upper bound under zero-out, always looser, without a gain from sampling (arXiv:1605.02065)"
        checks.append(("zCDP", comparison.zcdp_epsilon(history, delta), False, ours, note))
    return tuple(
        CrossCheck(
            name=name,
            epsilon=found,
            must_agree=must_agree,
            pld_of_the_same_steps=None if found is None else same,
            note=note,
        )
        for name, found, must_agree, same, note in checks
    )


def _strength(contents: LedgerContents, guarantee: Guarantee, seeded: bool, audit: str | None) -> Strength:
    risk = attack_risk(guarantee.history, guarantee.adjacency)
    tier, words = _tier(guarantee.epsilon, seeded)
    return Strength(
        tier=tier,
        words=words,
        advantage=risk.advantage,
        bayes_success={f"{prior:g}": value for prior, value in risk.bayes_success.items()},
        true_positive_rate={f"{rate:g}": value for rate, value in risk.true_positive_rate.items()},
        reconstruction={f"{prior:g}": value for prior, value in risk.reconstruction.items()},
        audit=_audits(contents, audit),
        audit_noted=audit,
    )


def _audits(contents: LedgerContents, noted: str | None) -> str | None:
    """Return the verdicts of the ledger's audits and of the noted audit; refutations come first."""
    lines = [*(audit["summary"] for audit in contents.notes.audits), *([noted] if noted else [])]
    return "; ".join(sorted(dict.fromkeys(lines), key=lambda line: not line.startswith(REFUTED))) or None


def _tier(epsilon: float, seeded: bool) -> tuple[str, str]:
    if seeded or math.isinf(epsilon):
        return "none", "There is no guarantee."
    if epsilon <= 1:
        return "strong", "An ε of at most 1 is a strong formal guarantee."
    if epsilon <= 10:
        return (
            "reasonable",
            "An ε between 1 and 10 is a reasonable guarantee. The bounds on attacks show what it means.",
        )
    return (
        "weak",
        "An ε above 10 is a weak guarantee. The number alone is no evidence of anonymity, and should come with an "
        "empirical audit of the model.",
    )


def _command(guarantee: Guarantee, plan: Plan) -> str | None:
    """Return the command that computes ε from the parameters alone; None if ``dpllm epsilon`` cannot express them."""
    if plan.method is not None:  # a single command has no options for several kinds of answers
        return None
    rounds = accounting.together(guarantee.history) if plan.event.restarts else merge(guarantee.history)
    (one, _), *_ = rounds or merge(plan.history)
    words = one.words()
    if words.options is None:
        return None
    steps = words.command_steps * sum(count for _, count in rounds)
    return (
        f"dpllm epsilon --noise-multiplier {one.noise_multiplier!r} --sampling-rate {one.sampling_rate!r} "
        f"--steps {steps} --delta {guarantee.delta!r} {words.options} --adjacency {guarantee.adjacency}"
    )


def _checkable(plan: Plan, contents: LedgerContents, guarantee: Guarantee) -> Checkable:
    code = code_version()
    return Checkable.model_validate(
        {
            "verify": "dpllm verify .",
            "recompute_from_the_ledger": "dpllm report .",
            "recompute_from_the_numbers": _command(guarantee, plan),
            "plan": plan.to_dict(),
            "plan_hash": plan.hash,
            "ledger_sha256": contents.sha256,
            "runs": contents.runs,
            "ended": _reason(plan, contents),
            "torn_lines": contents.torn_lines,
            "diagnostics_not_covered": DIAGNOSTICS,
            "commit": code.commit,
            "changed": code.changed,
            "machine": platform.machine(),
            "versions": {
                **{package: installed_version(package) for package in Versions.model_fields},
                "dpllm": code.version,
                "python": platform.python_version(),
            },
        }
    )

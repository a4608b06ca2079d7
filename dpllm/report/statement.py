"""The privacy statement of a run: what ran, what it guarantees, and what it doesn't.

Place in the flow: last. ε is computed from the ledger, so from what ran; the plan only names the numbers. The same
values (`dpllm.report.models`) are written three times: as JSON for programs, and as Markdown and HTML for people. What
a statement must say follows Ponomareva et al., "How to DP-fy ML" (JAIR 77, 2023). A point that only people can fill in
is listed as open, and an open point is a reason not to release yet.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.config.versions import code_version, installed_version
from dpllm.mechanism.discrete import DiscreteStep
from dpllm.mechanism.events import Event, Round
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.mechanism.parts import FixedBatch
from dpllm.mechanism.selection import SelectedRun
from dpllm.privacy import accounting, comparison
from dpllm.privacy.accounting import merge
from dpllm.privacy.identity import COMPLETED, STOPPED_EARLY, lost_steps
from dpllm.privacy.ledger import REPORT_FILE as JSON_FILE
from dpllm.privacy.ledger import Ledger, LedgerContents, read_ledger
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.risk import attack_risk
from dpllm.privacy.rounding import format_delta, up
from dpllm.privacy.stated import planned_steps, stated_history
from dpllm.report.checklist import REFUTED, completed
from dpllm.report.curves import curves
from dpllm.report.definition import (
    FEDERATED,
    SECURE,
    TRUSTED,
    assumptions,
    define,
    event,
    selection_points,
)
from dpllm.report.disclosures import DIAGNOSTICS
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
    Parameters,
    PrivacyReport,
    Setting,
    Statement,
    Steps,
    Strength,
    Versions,
)
from dpllm.report.models_front import Settled
from dpllm.report.pages import CHECK_FILE, check_text, write_pages
from dpllm.report.query_statement import Told, told_of_queries
from dpllm.report.release_notes import ReleaseNotes as ReleaseNotes
from dpllm.report.release_notes import notes_in as notes_in
from dpllm.report.release_notes import notes_of as notes_of
from dpllm.report.render import draw_figures, render_html
from dpllm.report.render import render_markdown as render_markdown

if TYPE_CHECKING:
    from dpllm.privacy.plan import PrivacyPlan

MARKDOWN_FILE = "privacy_report.md"
HTML_FILE = "privacy_report.html"

_SETTINGS = {
    TRUSTED: "central differential privacy: a simulation of federated learning with a trusted server, in one process "
    "that reads the records of all clients and is trusted; the release is protected",
    SECURE: "central differential privacy: a simulation of federated learning with secure aggregation, in one process "
    "that reads the records of all clients and is trusted; the release is protected",
}
"""The value of the fact `FEDERATED`, if there is one, to the setting."""
_CURVE_FACTORS = (1.0, 0.1, 0.01)


def privacy_report(
    plan: PrivacyPlan | QueryPlan,
    ledger_contents: LedgerContents,
    notes: ReleaseNotes | None = None,
) -> PrivacyReport:
    """Return the privacy statement of what ran so far.

    Args:
        plan: the plan of the run.
        ledger_contents: what the ledger says.
        notes: what only people know. None: those points stay open.

    Raises:
        ValueError: the ledger belongs to another plan, or charges steps that are not the plan's.
    """
    contents, notes = ledger_contents, notes or ReleaseNotes()
    if any(run["plan_hash"] != plan.hash for run in contents.runs):
        raise ValueError(f"{contents.path} was written under another plan; report with the plan that lies beside it")
    seeded = plan.seeded or contents.seeded
    history = stated_history(plan, contents)
    epsilons = EpsilonByAdjacency.model_validate(
        {name: accounting.epsilon(history, plan.delta, name) for name in ADJACENCIES}
    )
    headline = epsilons.of(plan.adjacency)
    told = (
        told_of_queries(plan, contents, notes, epsilons)
        if isinstance(plan, QueryPlan)
        else _told(plan, contents, notes, epsilons)
    )
    findings = Findings(
        format=FORMAT,
        statement=told.statement,
        setting=Setting(
            model=_SETTINGS.get(str(contents.notes.facts.get(FEDERATED, [""])[-1]))
            or f"central differential privacy: {told.trusted} sees the data and is trusted; the release is protected",
            data_holder=notes.data_holder,
            audience=notes.audience,
        ),
        definition=told.definition,
        accounting=_accounting(plan, contents, epsilons, told),
        strength=_strength(plan, contents, headline, seeded, notes.audit),
        curves=curves(history, plan.delta, plan.adjacency, headline, plan.target_epsilon),
        checkable=_checkable(plan, contents, told.command),
        noted_open_points=(*contents.notes.open_points, *told.open_points),
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
    plan: PrivacyPlan | QueryPlan,
    ledger: Ledger | LedgerContents,
    notes: ReleaseNotes | None = None,
    *,
    opened: Any = None,
) -> PrivacyReport:
    """Write ``privacy_report.json``, ``.md``, ``.html`` and `CHECK_FILE` into a folder, and return the report.

    Their hashes are written into the ledger of the folder (`dpllm.report.pages.write_pages`).

    Args:
        output_dir: an existing folder.
        plan: the plan of the run.
        ledger: the ledger, open or read.
        notes: what only people know.
        opened: the folder's ledger, if a run has it open (`SharedLedger`). None: `ledger`, or the folder's is opened.

    Raises:
        ValueError: the ledger is damaged, or of another plan, or a run is writing it.
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


def _told(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes, epsilons: EpsilonByAdjacency) -> Told:
    """Return what a report says about a training run."""
    if any(step != plan.event for step, _ in contents.history):
        raise ValueError(f"{contents.path} charges steps that are not those of its plan; restore both from a copy")
    of_selection = "that of the selection follows from Rényi divergences; " if plan.selection is not None else ""
    return Told(
        statement=_statement(plan, contents, epsilons, plan.seeded or contents.seeded),
        trusted="the trainer",
        definition=define(plan, contents, notes),
        kind_of_accounting="privacy loss distributions (PLD), discretized pessimistically (connect the dots), composed "
        f"by FFT; {of_selection}computed by dpllm.mechanism.pld and {accounting.TOOL}; tests compare both",
        event=event(plan),
        composition="all steps of all runs in the ledger, those lost in a crash included",
        cross_checks=_cross_checks(stated_history(plan, contents), plan.delta),
        steps=_steps(plan, contents),
        parameters=_parameters(plan, contents),
        assumptions=assumptions(plan, contents),
        open_points=selection_points(plan, contents),
        command=_command(plan, contents),
    )


def _statement(plan: PrivacyPlan, contents: LedgerContents, epsilons: EpsilonByAdjacency, seeded: bool) -> Statement:
    epsilon = epsilons.of(plan.adjacency)
    unit = "record" if plan.unit == "sequence" else "user"
    if seeded:
        words = (
            "NOT PRIVATE. Sampling and noise came from a fixed seed, which is for tests. Who knows the seed can remove "
            "the noise; the figures below would hold only with secret randomness."
        )
    elif math.isinf(epsilon):
        words = (
            "NOT PRIVATE. ε is infinite: no noise was added, so nothing limits how much the model reveals about any "
            f"one {unit}."
        )
    elif contents.num_steps == 0:
        words = "No step has been charged: nothing has been learnt from the private data so far."
    else:
        words = _guarantee(plan, epsilons, unit) + _about_the_stop(plan, contents)
    return Statement(
        private=not seeded and math.isfinite(epsilon),
        words=words,
        epsilon=epsilon,
        delta=plan.delta,
        adjacency=plan.adjacency,
        epsilon_by_adjacency=epsilons,
        unit=plan.unit,
    )


def _guarantee(plan: PrivacyPlan, epsilons: EpsilonByAdjacency, unit: str) -> str:
    changes = {"zero-out": "contributed nothing", "replace-one": f"been another {unit}"}
    epsilon = epsilons.of(plan.adjacency)
    other = "replace-one" if plan.adjacency == "zero-out" else "zero-out"
    what = "The training"
    if plan.selection is not None:
        what = "The release of the best of a secret, random number of training runs"
    value = f"ε = {up(epsilons.of(other))}" if math.isfinite(epsilons.of(other)) else "ε is infinite"
    return (
        f"{what} satisfies (ε, δ)-differential privacy with ε = {up(epsilon)} and δ = {format_delta(plan.delta)} "
        f"for every single {unit}. Whatever is released of the model would have come out almost as likely had any one "
        f"{unit} {changes[plan.adjacency]}. The chance of any outcome changes at most by the factor "
        f"{factor_words(epsilon)}, plus {format_delta(plan.delta)}. Had any one {unit} {changes[other]} "
        f"({other} adjacency), {value} at the same δ."
    )


def _about_the_stop(plan: PrivacyPlan, contents: LedgerContents) -> str:
    planned = planned_steps(plan, contents)
    if contents.num_steps >= planned:
        return ""
    taken = f" {contents.num_steps} of {planned} planned steps were taken."
    if contents.notes.stopped_independently and plan.selection is None:
        return f"{taken} The figures are theirs: the stop was declared independent of the data and of the releases."
    return (
        f"{taken} The figures are those of all {planned}. They hold even if the stop, or the choice of this "
        "checkpoint, depends on the data or on the releases of the run."
    )


def _accounting(
    plan: PrivacyPlan | QueryPlan, contents: LedgerContents, epsilons: EpsilonByAdjacency, told: Told
) -> Accounting:
    history = stated_history(plan, contents)
    budgets = (run.get("budget") for run in contents.runs)
    return Accounting(
        kind=told.kind_of_accounting,
        event=told.event,
        tool=accounting.TOOL,
        tool_version=accounting.tool_version(),
        discretization=accounting.discretization_used(history, plan.adjacency),
        composition=told.composition,
        budget=tuple(dict.fromkeys(BudgetEntry.model_validate(entry) for entry in budgets if entry)),
        cross_checks=told.cross_checks,
        zcdp_rho=comparison.zcdp_rho(history),
        epsilon=epsilons,
        curve=_curve(history, plan.delta),
        steps=told.steps,
        parameters=told.parameters,
        assumptions=told.assumptions,
    )


def _curve(history: tuple[tuple[Event, int], ...], delta: float) -> tuple[CurveRow, ...]:
    """Return ε at a few δ; one too small for so many steps is left out, unless it is that of the run."""
    rows = []
    for factor in _CURVE_FACTORS:
        try:
            row = {name: accounting.epsilon(history, delta * factor, name) for name in ADJACENCIES}
        except ValueError:
            if factor == 1:
                raise
            continue
        rows.append(CurveRow.model_validate({"delta": delta * factor, **row}))
    return tuple(rows)


def _reason(plan: PrivacyPlan | QueryPlan, contents: LedgerContents) -> str | None:
    """Return why the run ended; one with fewer steps than planned was not completed, whatever was written down."""
    early = contents.num_steps < planned_steps(plan, contents)
    if contents.end is not None and early and contents.end.startswith(COMPLETED):
        return STOPPED_EARLY
    return contents.end


def _steps(plan: PrivacyPlan, contents: LedgerContents) -> Steps:
    wanted, taken, planned = plan.num_steps_wanted or plan.num_steps, contents.num_steps, planned_steps(plan, contents)
    budget = (
        f"{wanted} steps were asked for, and the target ε = {plan.target_epsilon:g} allows {plan.num_steps}; "
        if plan.num_steps_wanted is not None and plan.target_epsilon is not None
        else ""
    )
    resumed = f"{plan.num_steps - planned} were left out after a resume, which began a new cycle of the noise; "
    resumed = resumed if planned < plan.num_steps else ""
    ended = (
        f"the run ended: {_reason(plan, contents)}" if contents.end is not None else "the run has not ended, or crashed"
    )
    early = 0 < taken < planned
    declared = contents.notes.stopped_independently and plan.selection is None
    how = "taken: the stop was declared independent" if declared else "planned"
    stated = f"; ε is stated for all steps {how}" if early else ""
    lost = lost_steps(contents)
    held = f"; the weights hold {taken - lost} of them, since {lost} were lost before a resume" if lost else ""
    total = planned if plan.selection is not None else sum(count for _, count in stated_history(plan, contents))
    if total > max(planned, taken):
        stated = f"; ε is stated for the {total} steps of the plan without a resume, which cost more"
    return Steps(
        wanted=wanted,
        planned=planned,
        charged=taken,
        stated=total,
        torn_by_a_crash=contents.torn_steps,
        words=f"{budget}{taken} of {plan.num_steps} planned steps were taken{held}; {resumed}{ended}{stated}",
    )


@lru_cache(maxsize=8)
def _cross_checks(history: tuple[tuple[Event, int], ...], delta: float) -> tuple[CrossCheck, ...]:
    """Return ε under zero-out by other ways."""
    plain = accounting.untruncated(history)
    renyi = comparison.renyi_epsilon(history, delta)
    discrete = any(isinstance(one, DiscreteStep) for one, _ in history)
    no_renyi = "does not apply: it has no event for the rows of a user drawn each by itself"
    if discrete:
        no_renyi = "does not apply: ε itself is by Rényi divergences, at whole orders"
    selected = any(isinstance(one, SelectedRun) for one, _ in history)
    return (
        _by_dp_accounting(history, delta, "a selection" if selected else "discrete noise" if discrete else None),
        CrossCheck(
            name="Rényi",
            epsilon=renyi,
            must_agree=False,
            pld_of_the_same_steps=None if renyi is None else accounting.epsilon(plain, delta),
            note=no_renyi
            if renyi is None
            else "an upper bound by dp_accounting's RepeatAndSelectDpEvent, under zero-out (arXiv:2110.03620)"
            if selected
            else "an upper bound, looser by nature, under zero-out, without the effect of truncation",
        ),
    )


def _by_dp_accounting(history: tuple[tuple[Event, int], ...], delta: float, without: str | None) -> CrossCheck:
    """Return ε by dp_accounting's own accountant; ``without`` is that of which it has no distribution."""
    found, note = None, f"does not apply: it has no distribution of {without}"
    if without is None:
        try:
            found, grid = comparison.fine_library_epsilon(history, delta)
            note = f"by that library's own accountant, under zero-out, on the grid {grid:g}; it must agree within 1 %"
        except ValueError as error:
            note = f"does not apply: {error}"
    return CrossCheck(
        name="PLD of dp_accounting",
        epsilon=found,
        must_agree=True,
        pld_of_the_same_steps=None if found is None else accounting.epsilon(history, delta),
        note=note,
    )


def _parameters(plan: PrivacyPlan, contents: LedgerContents) -> Parameters:
    share = plan.delta * plan.num_units
    return Parameters(
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
        target_epsilon=plan.target_epsilon,
        delta=plan.delta,
        why_this_delta=f"δ = {format_delta(share)}/N. At 1/N, publishing one unit outright would pass; the usual "
        "choice is at most 0.1/N",
        max_rows_per_unit=plan.max_rows_per_unit,
        rows_kept=plan.rows_kept,
    )


def _strength(
    plan: PrivacyPlan | QueryPlan, contents: LedgerContents, epsilon: float, seeded: bool, audit: str | None
) -> Strength:
    risk = attack_risk(stated_history(plan, contents), plan.adjacency)
    tier, words = _tier(epsilon, seeded)
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
    """Return the verdicts of all audits in the ledger and the one that people noted; those that refute come first."""
    lines = [*(audit["summary"] for audit in contents.notes.audits), *([noted] if noted else [])]
    return "; ".join(sorted(dict.fromkeys(lines), key=lambda line: not line.startswith(REFUTED))) or None


def _tier(epsilon: float, seeded: bool) -> tuple[str, str]:
    if seeded or math.isinf(epsilon):
        return "none", "There is no guarantee."
    if epsilon <= 1:
        return "strong", "ε of at most 1 is a strong formal guarantee."
    if epsilon <= 10:
        return (
            "reasonable",
            "ε between 1 and 10 is a reasonable guarantee. The bounds on attacks show its meaning.",
        )
    return (
        "weak",
        "ε above 10 is a weak guarantee. The number by itself is no evidence of anonymity, and an empirical audit of "
        "the model belongs with it.",
    )


def _of_one_release(rounds: Sequence[tuple[Round, int]]) -> float:
    """Return the noise multiplier of the Gaussian sum over all units that costs as much as these together."""
    if not rounds or any(one.noise_multiplier == 0 for one, _ in rounds):
        return 0.0
    return 1 / math.sqrt(math.fsum(count / one.noise_multiplier**2 for one, count in rounds))


def _command(plan: PrivacyPlan, contents: LedgerContents) -> str | None:
    """Return the command that computes ε from the numbers alone; None where ``dpllm epsilon`` lacks the event."""
    (one, _), *_ = merge(plan.history)
    sample = one.words().options
    if sample is None:
        return None
    rounds = sum(count for _, count in merge(stated_history(plan, contents)))
    sigma = plan.noise_multiplier
    if isinstance(one, SelectedRun):
        rounds, sigma = one.num_rounds, one.noise_multiplier
    elif isinstance(plan.mechanism.sampler, FixedBatch):
        rounds, sigma = min(1, rounds), _of_one_release(merge(stated_history(plan, contents)))
    return (
        f"dpllm epsilon --noise-multiplier {sigma!r} --sampling-rate {one.sampling_rate!r} "
        f"--steps {rounds} --delta {plan.delta!r} {sample} --adjacency {plan.adjacency}"
    )


def _checkable(plan: PrivacyPlan | QueryPlan, contents: LedgerContents, command: str | None) -> Checkable:
    code = code_version()
    return Checkable.model_validate(
        {
            "verify": "dpllm verify .",
            "recompute_from_the_ledger": "dpllm report .",
            "recompute_from_the_numbers": command,
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

"""List the questions that a privacy report must answer, its open points, and what clears each point.

This module reads the report's values and computes none. The questions follow Ponomareva et al.,
"How to DP-fy ML" (JAIR 77, 2023), section 5.3. An open point is a reason not to release yet, and each can be cleared:
by a note, by a statement of people who checked it (`dpllm report note`), or by another run. What is never for
release, however carefully people look, is no open point but in the list of files that are not to be published
(`dpllm.report.disclosures.kept_files`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dpllm.mechanism.catalogue import from_fields
from dpllm.privacy.ledger_reader import ENTROPY_SEEDED
from dpllm.privacy.rounding import up
from dpllm.report.definition import NOT_SELECTED, PREPROCESSING
from dpllm.report.definition import REFUTED as REFUTED
from dpllm.report.disclosures import DESTINATIONS, kept_files, kept_of_queries, not_kept
from dpllm.report.front import front, method_of, thing_of
from dpllm.report.models import Checkable, CrossCheck, Findings, KeptFiles, Line, PrivacyReport
from dpllm.report.release_notes import SETTLED_BY

MOST_DIFFERENCE = 0.01
"""Two accountants that differ by more than this share of ε disagree."""
SIGNED = ' by="'
"""The command of a point that people settle has their name, and no other."""
_LEAST_DIFFERENCE = 0.002  # accountants on different grids differ by so much at a small ε

_REPORT_IT = "nothing clears this point for this model: report the problem (SECURITY.md)"


class Point(NamedTuple):
    """A reason not to release yet."""

    text: str
    """What is open."""
    how: str | None
    """The command or setting that clears it; None: people settle it with a statement."""


class _Asked(NamedTuple):
    section: str
    question: str
    answer: object
    how: str | None = None


def completed(findings: Findings) -> PrivacyReport:
    """Return a report with its first screen, its checklist and its open points."""
    kept = (
        kept_files(_destinations(findings), _is_audited(findings))
        if method_of(findings) is None
        else kept_of_queries(_is_audited(findings))
    )
    asked = list(_asked(findings))
    settled = {item.point: item for item in findings.settlements}
    points = list(_points(findings, asked))
    by_people = [point for point in points if point.how is None and point.text in settled]
    left = [point for point in points if point not in by_people]
    parts = {name: getattr(findings, name) for name in Findings.model_fields}
    return PrivacyReport(
        **parts,
        front=front(findings, len(left)),
        checklist=tuple(
            Line(section=line.section, question=line.question, filled=line.answer is not None) for line in asked
        ),
        open_points=tuple(point.text for point in left),
        how_to_clear=tuple(
            _settle(number) if point.how is None else point.how for number, point in enumerate(left, start=1)
        ),
        settled_points=tuple(settled[point.text] for point in by_people),
        do_not_publish=tuple(KeptFiles(files=files, why=why) for files, why in kept),
    )


def settled_by(report: PrivacyReport, answers: Sequence[str]) -> dict[str, str]:
    """Return the points that people settle, with their statements, for `dpllm.report.model_card.settle`.

    Guarantee: only a point that asks people to check something can be settled. Points that a different command clears,
    such as an unanswered question, and points that nothing clears are refused.

    Args:
        report: the report whose open points are settled.
        answers: a list of ``NUMBER=STATEMENT``, with the numbers that the report prints, counted from 1.

    Raises:
        ValueError: an answer has a different form or no statement, the point does not exist, or a statement cannot
            settle it.
    """
    settled = {}
    for answer in answers:
        number, equals, words = answer.partition("=")
        if not equals or not number.strip().isdecimal() or not words.strip():
            raise ValueError(
                f'{answer!r} must be the number of an open point, =, and what was checked: 1="each person has one row"'
            )
        place = int(number)
        if not 1 <= place <= len(report.open_points):
            raise ValueError(
                f"{answer!r} names point {place}, and the report has {len(report.open_points)} open points"
            )
        point, how = report.open_points[place - 1], report.how_to_clear[place - 1]
        if SIGNED not in how:
            raise ValueError(f"point {place} is not settled by a statement ({point} Cleared by: {how})")
        settled[point] = " ".join(words.split())
    return settled


def is_sampled(checkable: Checkable) -> bool:
    """Return whether the run's steps sampled their units; otherwise b/N is not a sampling rate."""
    return from_fields(checkable.runs[-1].planned_step).words().is_sampled


def is_seeded(checkable: Checkable) -> bool:
    """Return whether the sampling or noise of any start came from a fixed seed."""
    return checkable.plan.seeded or any(run.entropy == ENTROPY_SEEDED for run in checkable.runs)


def _points(findings: Findings, asked: Iterable[_Asked]) -> Iterator[Point]:
    """Yield the reasons not to release yet."""
    if not findings.statement.private:
        again = "without `privacy.seed`" if is_seeded(findings.checkable) else "with noise: set `privacy.epsilon`"
        yield Point("This run is not private. Do not release it as a private one.", f"run it again {again}")
    if findings.checkable.ended is None:
        yield (
            Point(
                "The run has not ended, or it crashed. Resume it, or release nothing from it.",
                "the command that started the run, with `train.resume_from_checkpoint=true`",
            )
            if method_of(findings) is None
            else Point(
                "The run has not ended, or it crashed. Release nothing from it.",
                "a new run in a different folder; the charges of this run remain",
            )
        )
    steps = findings.accounting.steps
    if steps.charged > steps.planned:
        yield Point(
            f"{steps.charged} steps were charged, more than the {steps.planned} planned.",
            "restore the run's plan and ledger from a backup, then run `dpllm report .`",
        )
    audit = findings.strength.audit
    if audit is not None and audit.startswith(REFUTED):
        yield Point("An audit of this model refutes the guarantee. Do not release it (see below).", _REPORT_IT)
    for text in findings.noted_open_points:
        yield Point(text, "release the run that `dpllm methods tune` selected" if text == NOT_SELECTED else None)
    could_be = [str(v) for fact in findings.definition.facts if fact.name == PREPROCESSING for v in fact.values]
    if could_be and findings.noted.preprocessing is None:
        yield Point(
            "Nobody stated which numbers, names or settings were computed from these records before the run. In this "
            f"run, these could have been: {'; '.join(could_be)}. ε covers none of them. State which ones were, and "
            "where the others come from.",
            f'{_release("preprocessing")}. Write "none" if there were none',
        )
    for text in disagreements(findings.accounting.cross_checks):
        yield Point(text, _REPORT_IT)
    for line in asked:
        if line.answer is None:
            yield Point(f"Not filled in: {line.question}", line.how)
    away = not_kept([item.what for item in findings.definition.written_out_and_not_covered], _destinations(findings))
    if away:
        yield Point(
            "The run wrote results that depend on the private data and that ε does not cover. They may be outside this "
            f"run's folder: {'; '.join(away)}. Make sure that only people who may see the private data can see them.",
            None,
        )


def _destinations(findings: Findings) -> list[str]:
    """Return where logged figures went, according to the run's ledger."""
    facts = findings.definition.facts
    return [str(value) for fact in facts if fact.name == DESTINATIONS for value in fact.values]


def _is_audited(findings: Findings) -> bool:
    return findings.strength.audit != findings.strength.audit_noted  # an audit wrote its results into the folder


def disagreements(checks: Sequence[CrossCheck]) -> list[str]:
    """Return a line for each accountant whose ε differs from ours by more than 1 %.

    Both numbers are for the same steps under zero-out. Differences below 0.002 are ignored, since they are within the
    other accountant's own error. A looser upper bound counts only if our ε is above it.
    """
    lines = []
    for check in checks:
        other, ours = check.epsilon, check.pld_of_the_same_steps
        if other is None or ours is None or other == ours:
            continue
        if math.isinf(other) or math.isinf(ours):
            apart = math.inf
        else:
            apart = abs(other - ours) if check.must_agree else ours - other
        if apart > _LEAST_DIFFERENCE and (math.isinf(apart) or apart > MOST_DIFFERENCE * ours):
            lines.append(
                f"The two accountants disagree: {check.name} computes ε = {up(other)}, and the PLD of the same "
                f"steps {up(ours)}. Find out which one is wrong before you rely on either."
            )
    return lines


def _asked(findings: Findings) -> Iterator[_Asked]:
    """Yield every question, the section of the page that answers it, the answer, and how people provide it."""
    setting, definition, strength = findings.setting, findings.definition, findings.strength
    yield _Asked("setting", "Which setting of differential privacy, and who is trusted?", setting.model)
    yield _Asked("setting", "Who holds the raw data?", setting.data_holder, _release("data_holder"))
    seen = "the released model" if thing_of(findings) == "model" else "the release"
    yield _Asked("setting", f"Who will see {seen}?", setting.audience, _release("audience"))
    yield _Asked(
        "setting",
        "What is the public name of the data set?",
        definition.dataset,
        f"{_note('dataset')} (or `privacy.dataset` in the recipe before a run)",
    )
    yield _Asked("definition", "Which uses of the data does the guarantee cover?", definition.data_accesses_covered)
    yield _Asked(
        "definition",
        "For what else was the same data used (tuning runs, earlier models, model selection)? Their ε adds up.",
        definition.other_uses_of_the_data,
        f'{_release("other_uses")}. Write "none" if there were none',
    )
    yield _Asked("definition", "What may be released under the guarantee?", definition.released_under_the_guarantee)
    yield _Asked("not-covered", "What was written out that the guarantee does not cover?", True)
    yield _Asked("not-covered", "What does the guarantee never cover?", definition.never_covered)
    yield _Asked("definition", "What is one unit of privacy?", definition.unit)
    yield _Asked("definition", "Which data sets are neighbours?", definition.adjacency)
    yield _Asked("definition", "What is taken as public?", definition.public)
    yield _Asked("definition", "Which facts did the run record about itself?", True)
    trained = method_of(findings) is None
    for question in (
        "What is the guarantee?",
        f"What is ε under each adjacency that the {'sampler' if trained else 'mechanism'} supports?",
        "How was ε computed, with which tool, version and discretization?",
        f"How were {'steps, phases' if trained else 'answers'} and runs composed?",
        f"How many {'steps were requested, planned and taken' if trained else 'answers were planned and charged'}, "
        "and why did it stop?",
        "What is ε at different values of δ?",
        "What is ρ of zero-concentrated privacy?",
        "With which parameters did the mechanism run?",
        "Why was this δ chosen?",
        "Which assumptions does ε depend on, and how did the run ensure them?",
    ):
        yield _Asked("accounting", question, True)
    checks = [check for check in findings.accounting.cross_checks if check.epsilon is not None]
    yield _Asked("accounting", "What do other accountants compute?", checks or None, None)
    yield _Asked("strength", "How strong is the guarantee, and what can an attacker achieve at most?", True)
    yield _Asked(
        "strength",
        "What did an empirical audit find?",
        strength.audit if strength.tier == "weak" else True,  # required above ε = 10
        f"`dpllm audit --help` lists the audits; {_note('audit')} notes a different one",
    )
    for question in (
        "Which version of the code ran?",
        "What identifies the configuration?",
        "What identifies the record of the run?",
        "Which command checks everything again?",
    ):
        yield _Asked("checkable", question, True)
    yield _Asked(
        "utility",
        "How useful is it: metric on held-out data, the same metric without privacy, hardware and cost?",
        findings.utility or findings.utility_elsewhere or None,
        _note("utility.NAME"),
    )


def _release(key: str) -> str:
    return f"{_note(key)} (or `release.{key}` in the recipe before a run)"


def _note(key: str) -> str:
    return f'`dpllm report note . {key}="…"`'


def _settle(number: int) -> str:
    what, who = SETTLED_BY
    return f'`dpllm report note . {number}="{what}"{SIGNED}{who}"`'

"""The first screen of a query run's report: what was asked, and when; in the words of its method.

Place in the flow: under `dpllm.report.front`, which has the rest of the first screen.
"""

from __future__ import annotations

from typing import Any

from dpllm.privacy.release_words import ReleaseWords, release_words
from dpllm.report.models import Findings, PlanOfQueries, day_in_words


def method_of(report: Any) -> ReleaseWords | None:
    """Return the method of a query run's report; None for a training run.

    Args:
        report: or its findings, of any format.
    """
    plan = getattr(getattr(report, "checkable", None), "plan", None)
    return release_words()[plan.method] if isinstance(plan, PlanOfQueries) else None


def thing_of(report: Any) -> str:
    """Return the word for what is released: "model", or "release" of a query run, also if a model is part of it."""
    return "model" if method_of(report) is None else "release"


def what_was_asked(findings: Findings, method: ReleaseWords) -> str:
    """Return what was done on which data, in sentences."""
    plan, definition = findings.checkable.plan, findings.definition
    data = f"the data set “{definition.dataset}”" if definition.dataset else "a data set without a public name"
    private = f"{plan.num_units:,} private records" if plan.unit == "sequence" else f"texts of {plan.num_units:,} users"
    words = [f"{method.what}. The private data: {data}, {private}."]
    after = plan.after if isinstance(plan, PlanOfQueries) else None
    if after is not None:
        words.append(
            f"It builds on the model of “{after['folder']}”, which was trained on the same people; ε is that of both."
        )
    if len(definition.public) > 1:
        words.append(f"Taken as public: {'; '.join(definition.public[1:])}.")
    return " ".join(words)


def when_it_was_asked(findings: Findings) -> str:
    """Return when the run began, and how many of its answers were charged."""
    steps, ended = findings.accounting.steps, findings.checkable.ended
    charged = (
        f"all {steps.planned:,} planned private answers"
        if steps.charged == steps.planned
        else f"{steps.charged:,} of {steps.planned:,} planned private answers"
    )
    if steps.planned == 1 == steps.charged:
        charged = "its one private answer"
    words = f"The run began on {day_in_words(findings.checkable.runs[0].started_at)}, and charged {charged}."
    if ended is None:
        return f"{words} It has not ended, or it crashed."
    return words if steps.charged == steps.planned else f"{words} It ended early ({ended})."


def not_even_seen(method: ReleaseWords | None) -> str:
    """Return the records that ε does not cover since a model had seen them, as the end of a sentence; may be empty."""
    if method is None:
        return " nor private records that the starting model had already seen"
    return " nor private records that a public model had already seen" if method.has_model else ""


def about_answers(plan: PlanOfQueries) -> str:
    """Return what ε is about, in the words of the sentence about what it does not cover."""
    return "this run's answers" if plan.after is None else "this run's answers and the model that it builds on"

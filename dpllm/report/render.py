"""Render the privacy report as a Markdown page, and as an HTML page with pictures.

Everything on the pages comes from the report's JSON and nothing is computed here, so the JSON alone reproduces them.
The HTML page is self-contained: it has no script and loads nothing. All values are escaped, since notes may contain any
characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dpllm.report.figures import plot_epsilon_curve, plot_epsilon_over_steps, plot_tradeoff
from dpllm.report.front import method_of
from dpllm.report.glossary import glossary, linked
from dpllm.report.models import Curves
from dpllm.report.pages import shown_beside, template


def render_markdown(report: Any) -> str:
    """Return the Markdown page of a report.

    Args:
        report: the report that `privacy_report` returns.
    """
    page = template("privacy_report.md")
    return page.render(report=report, title=title_of(report), **shown_beside(report))


def title_of(report: Any) -> str:
    """Return the page's title, which says whether there is a guarantee."""
    if report.statement.private:
        return "Privacy report"
    return "NOT PRIVATE: report of a run without a privacy guarantee"


_PICTURES = ("tradeoff", "epsilon_over_delta", "epsilon_over_steps")
FIGURES = (*_PICTURES, *(f"{name}_narrow" for name in _PICTURES))
"""Names of the pictures; each also has a version for narrow screens."""


def draw_figures(report: Any) -> dict[str, str]:
    """Return a report's pictures as SVG texts, by name; a picture without a curve is an empty text.

    Args:
        report: the report that `privacy_report` returns.
    """
    return dict(
        _drawn(report.curves, report.statement.delta, report.statement.epsilon, report.checkable.plan.target_epsilon)
    )


@lru_cache(maxsize=4)
def _drawn(curves: Curves, delta: float, epsilon: float, target_epsilon: float | None) -> dict[str, str]:
    """Draw the curves, with a cache, since a report is written several times."""
    tradeoff, steps, deltas = curves.tradeoff, curves.epsilon_over_steps, curves.epsilon_over_delta
    if not deltas.epsilon:
        return dict.fromkeys(FIGURES, "")
    found = {}
    for end, narrow in (("", False), ("_narrow", True)):
        found[f"tradeoff{end}"] = plot_tradeoff(
            tradeoff.false_positive_rate, tradeoff.true_positive_rate, tradeoff.from_epsilon_and_delta_alone, narrow
        )
        found[f"epsilon_over_delta{end}"] = plot_epsilon_curve(
            deltas.epsilon, dict(deltas.delta.items()), delta, epsilon, narrow
        )
        found[f"epsilon_over_steps{end}"] = (
            plot_epsilon_over_steps(steps.steps, steps.epsilon, target_epsilon, narrow) if steps.steps else ""
        )  # empty for a selection, whose ε covers all its runs
    return found


def render_html(report: Any, figures: Mapping[str, str]) -> str:
    """Return the HTML page of a report.

    Args:
        report: the report that `privacy_report` returns.
        figures: the pictures that `draw_figures` returns.

    Raises:
        ValueError: a picture is missing.
    """
    if set(figures) != set(FIGURES):
        raise ValueError(f"the page needs pictures {', '.join(FIGURES)}, got {', '.join(sorted(figures)) or 'none'}")
    page = template("privacy_report.html").render(
        report=report, figures=figures, title=title_of(report), **shown_beside(report)
    )
    return linked(page.rstrip() + "\n", glossary(queries=method_of(report) is not None))

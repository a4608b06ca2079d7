"""The privacy report as a page of Markdown, and as one page of HTML with its pictures.

Place in the flow: after `report`; everything on the pages stands in the report's JSON, and nothing is computed, so that
they can be made again from the JSON alone. The HTML page is self-contained: no script, and nothing that is loaded from
elsewhere. All values are escaped: what people noted may hold any characters.
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
    """Return the page of a report.

    Args:
        report: made by `privacy_report`.
    """
    page = template("privacy_report.md")
    return page.render(report=report, title=title_of(report), **shown_beside(report))


def title_of(report: Any) -> str:
    """Return the title of the page: whether there is a guarantee at all."""
    if report.statement.private:
        return "Privacy report"
    return "NOT PRIVATE: report of a run without a privacy guarantee"


_PICTURES = ("tradeoff", "epsilon_over_delta", "epsilon_over_steps")
FIGURES = (*_PICTURES, *(f"{name}_narrow" for name in _PICTURES))
"""Names of the pictures; each is drawn a second time for narrow screens."""


def draw_figures(report: Any) -> dict[str, str]:
    """Return the pictures of a report as SVG texts, by name; an empty text where there is no curve to draw.

    Args:
        report: made by `privacy_report`.
    """
    return dict(
        _drawn(report.curves, report.statement.delta, report.statement.epsilon, report.checkable.plan.target_epsilon)
    )


@lru_cache(maxsize=4)
def _drawn(curves: Curves, delta: float, epsilon: float, target_epsilon: float | None) -> dict[str, str]:
    """Draw the curves; the same ones are drawn once, since a report is written several times."""
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
        )  # none of a selection, whose ε is that of all its runs
    return found


def render_html(report: Any, figures: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        report: made by `privacy_report`.
        figures: made by `draw_figures`.

    Raises:
        ValueError: a picture is missing.
    """
    if set(figures) != set(FIGURES):
        raise ValueError(f"the page has the pictures {', '.join(FIGURES)}; got {', '.join(sorted(figures)) or 'none'}")
    page = template("privacy_report.html").render(
        report=report, figures=figures, title=title_of(report), **shown_beside(report)
    )
    return linked(page.rstrip() + "\n", glossary(queries=method_of(report) is not None))

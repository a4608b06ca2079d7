"""The privacy report as one HTML page, with its pictures.

Place in the flow: after `report`, beside `markdown`; everything on the page stands in the report's JSON, so that the
page can be made again from the JSON alone. The page is self-contained: no script, and nothing that is loaded from
elsewhere. All values are escaped: what people noted may hold any characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from dpllm.privacy.rounding import format_delta, format_epsilon, up
from dpllm.report.figures import plot_epsilon_curve, plot_epsilon_over_steps, plot_tradeoff
from dpllm.report.glossary import linked
from dpllm.report.markdown import title_of
from dpllm.report.models import Curves, PrivacyReport
from dpllm.report.pages import shown_beside, template

_PICTURES = ("tradeoff", "epsilon_over_delta", "epsilon_over_steps")
FIGURES = (*_PICTURES, *(f"{name}_narrow" for name in _PICTURES))
"""Names of the pictures; each is drawn a second time for narrow screens."""


def draw_figures(report: Any) -> dict[str, str]:
    """Return the pictures of a report as SVG texts, by name; an empty text where there is no curve to draw.

    Args:
        report: made by `privacy_report`, or one of an earlier format.
    """
    return dict(_drawn(report.curves))


@lru_cache(maxsize=4)
def _drawn(curves: Curves) -> dict[str, str]:
    """Draw the curves; the same ones are drawn once, since a report is written several times."""
    tradeoff, steps, deltas = curves.tradeoff, curves.epsilon_over_steps, curves.epsilon_over_delta
    if deltas.epsilon_of_the_headline is None:
        return dict.fromkeys(FIGURES, "")
    found = {}
    for end, narrow in (("", False), ("_narrow", True)):
        found[f"tradeoff{end}"] = plot_tradeoff(
            tradeoff.false_positive_rate, tradeoff.true_positive_rate, tradeoff.from_epsilon_and_delta_alone, narrow
        )
        stated = deltas.delta_of_the_headline, deltas.epsilon_of_the_headline
        found[f"epsilon_over_delta{end}"] = plot_epsilon_curve(
            deltas.epsilon, dict(deltas.delta.items()), *stated, narrow
        )
        found[f"epsilon_over_steps{end}"] = (
            plot_epsilon_over_steps(steps.steps, steps.epsilon, steps.target_epsilon, narrow) if steps.steps else ""
        )  # none of a selection, whose ε is that of all its runs
    return found


def render_html(report: PrivacyReport, figures: Mapping[str, str]) -> str:
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
        report=report,
        figures=figures,
        title=title_of(report),
        alts=_alternatives(report),
        captions=_captions(report),
        **shown_beside(report),
    )
    return linked(page.rstrip() + "\n")


def _captions(report: PrivacyReport) -> dict[str, str]:
    statement = report.statement
    adjacency, delta = statement.adjacency, format_delta(statement.delta)
    drawn = statement.private or not report.curves.epsilon_over_steps.steps
    seeded = "" if drawn else " It would hold only with noise from secret randomness."
    return {
        "tradeoff": "The best that any attack can do that decides whether one unit took part: the share of those in "
        "the data that it finds, when it may wrongly accuse a given share of all others. No attack lies above the "
        f"solid line, which is computed from all steps together ({adjacency}). The dotted line is what ε and δ alone "
        f"would allow.{seeded}",
        "epsilon_over_delta": "The whole guarantee: for each δ the ε that holds together with it. The point is what "
        f"this report states.{seeded}",
        "epsilon_over_steps": f"ε spent after so many steps, at δ = {delta} ({adjacency}).{seeded}",
    }


def _alternatives(report: PrivacyReport) -> dict[str, str]:
    """Return what each picture shows, for people who can't see it."""
    statement, strength = report.statement, report.strength
    rates = ", ".join(
        f"{float(at) * 100:g}% false: at most {100 * float(up(value)):g}% found"
        for at, value in strength.true_positive_rate.items()
    )
    epsilon = format_epsilon(statement.epsilon)
    points = "; ".join(
        f"δ {format_delta(row.delta)}: ε {format_epsilon(row.zero_out)}" for row in report.accounting.curve
    )
    return {
        "tradeoff": f"Curve of the largest true positive rate over the false positive rate. {rates}.",
        "epsilon_over_delta": f"Curves of ε over δ, falling as δ rises; zero-out: {points}.",
        "epsilon_over_steps": f"Curve of ε over the number of steps, rising to {epsilon} after "
        f"{report.accounting.steps.charged} steps.",
    }

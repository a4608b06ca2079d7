"""The privacy report as one HTML page, with its pictures.

Place in the flow: after `report`, beside `markdown`; everything on the page stands in the report's JSON, so that the
page can be made again from the JSON alone. The page is self-contained: no script, and nothing that is loaded from
elsewhere. All values are escaped: what people noted may hold any characters.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import jinja2

from dpllm.report.figures import plot_epsilon_curve, plot_epsilon_over_steps, plot_tradeoff
from dpllm.report.markdown import print_epsilon, title_of, values_in_words

FIGURES = ("tradeoff", "epsilon_over_delta", "epsilon_over_steps")


def draw_figures(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the pictures of a report as SVG texts, by name; an empty text where there is no curve to draw.

    Args:
        report: made by `privacy_report`.
    """
    return dict(_drawn(json.dumps(report["curves"])))


@lru_cache(maxsize=4)
def _drawn(curves_as_json: str) -> dict[str, str]:
    """Draw the curves; the same ones are drawn once, since a report is written several times."""
    curves = json.loads(curves_as_json)
    tradeoff, steps, deltas = (curves[name] for name in ("tradeoff", "epsilon_over_steps", "epsilon_over_delta"))
    if not steps["steps"]:
        return dict.fromkeys(FIGURES, "")
    return {
        "tradeoff": plot_tradeoff(
            tradeoff["false_positive_rate"], tradeoff["true_positive_rate"], tradeoff["from_epsilon_and_delta_alone"]
        ),
        "epsilon_over_delta": plot_epsilon_curve(
            deltas["epsilon"], deltas["delta"], deltas["delta_of_the_headline"], deltas["epsilon_of_the_headline"]
        ),
        "epsilon_over_steps": plot_epsilon_over_steps(steps["steps"], steps["epsilon"], steps["target_epsilon"]),
    }


def render_html(report: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        report: made by `privacy_report`.
        figures: made by `draw_figures`.

    Raises:
        ValueError: a picture is missing.
    """
    if set(figures) != set(FIGURES):
        raise ValueError(f"the page has the pictures {', '.join(FIGURES)}; got {', '.join(sorted(figures)) or 'none'}")
    page = _template().render(
        report=report, figures=figures, title=title_of(report), alts=_alternatives(report), captions=_captions(report)
    )
    return page.rstrip() + "\n"


@cache
def _template() -> jinja2.Template:
    """Return the page's template; a key that a report lacks is an error, not an empty place."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(epsilon=print_epsilon, up=_up, rho=_rho, values=values_in_words)
    text = (
        importlib.resources.files("dpllm").joinpath("report/templates/privacy_report.html").read_text(encoding="utf-8")
    )
    return environment.from_string(text)


def _up(value: float) -> str:
    """Print a probability, rounded up."""
    return f"{min(1.0, math.ceil(value * 1e4 - 1e-9) / 1e4):.4f}"


def _rho(value: float | str) -> str:
    return "infinite" if isinstance(value, str) else f"{value:.6g}"


def _captions(report: Mapping[str, Any]) -> dict[str, str]:
    statement = report["statement"]
    adjacency, delta = statement["adjacency"], f"{statement['delta']:.3g}"
    drawn = statement["private"] or not report["curves"]["epsilon_over_steps"]["steps"]
    seeded = "" if drawn else " It would hold only with noise from secret randomness."
    return {
        "tradeoff": "The best that any attack can do that decides whether one unit took part: the share of those in "
        "the data that it finds, when it may accuse a given share of those that were not in the data. No attack lies "
        f"above the solid line, which is computed from all steps together ({adjacency}); the dotted line is what ε and "
        f"δ alone would allow.{seeded}",
        "epsilon_over_delta": "The whole guarantee: for each δ the ε that holds together with it. The point is what "
        f"this report states.{seeded}",
        "epsilon_over_steps": f"ε spent after so many steps, at δ = {delta} ({adjacency}).{seeded}",
    }


def _alternatives(report: Mapping[str, Any]) -> dict[str, str]:
    """Return what each picture shows, for people who can't see it."""
    statement, strength = report["statement"], report["strength"]
    rates = ", ".join(
        f"{float(at) * 100:g}% false: at most {math.ceil(value * 1e4 - 1e-9) / 100:g}% found"
        for at, value in strength["true_positive_rate"].items()
    )
    epsilon = print_epsilon(statement["epsilon"])
    points = "; ".join(
        f"δ {row['delta']:.3g}: ε {print_epsilon(row['zero-out'])}" for row in report["accounting"]["curve"]
    )
    return {
        "tradeoff": f"Curve of the largest true positive rate over the false positive rate. {rates}.",
        "epsilon_over_delta": f"Curves of ε over δ, falling as δ rises; zero-out: {points}.",
        "epsilon_over_steps": f"Curve of ε over the number of steps, rising to {epsilon} after "
        f"{report['accounting']['steps']['charged']} steps.",
    }

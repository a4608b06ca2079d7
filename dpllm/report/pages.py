"""The templates of the report's pages, and the filters by which they print numbers and texts.

Place in the flow: below `dpllm.report.markdown` and `dpllm.report.html`.
"""

from __future__ import annotations

import importlib.resources
import math
import re
from functools import cache
from typing import Any

import jinja2
import markupsafe

from dpllm.privacy.rounding import format_delta, format_epsilon, one_in, up, up_significant
from dpllm.report.disclosures import UTILITY_FILE
from dpllm.report.front import bounds, unit_of
from dpllm.report.glossary import GLOSSARY
from dpllm.report.models import Parameters, PrivacyReport
from dpllm.report.models_front import SECTIONS

NOT_FILLED = "**not filled in**"


class _Verbatim(str):
    """A text that is printed with its spaces."""


@cache
def template(name: str) -> jinja2.Template:
    """Return a template; a key that a report lacks is an error, not an empty place.

    HTML is escaped. In Markdown each value is printed in one line, whatever people noted, and None as "-".

    Args:
        name: of the file in ``dpllm/report/templates``.
    """
    is_html = name.endswith(".html")
    environment = jinja2.Environment(
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=None if is_html else _in_one_line,
    )
    environment.filters.update(
        **{"epsilon": _epsilon, "delta": format_delta, "one_in": one_in, "chance": _chance, "share": _share},
        **{"rho": _rho, "cell": _cell, "verbatim": _Verbatim, "width": _width, "code": _code},
    )
    environment.globals.update(not_filled=NOT_FILLED, sections=SECTIONS, glossary=GLOSSARY, utility_file=UTILITY_FILE)
    text = importlib.resources.files("dpllm").joinpath(f"report/templates/{name}").read_text(encoding="utf-8")
    return environment.from_string(text)


def part(name: str, block: str, **context: Any) -> str:
    """Return one block of a page, without the empty lines around it.

    Args:
        name: of the template.
        block: of the block in it.
        context: the values that the block prints.
    """
    page = template(name)
    return "".join(page.blocks[block](page.new_context(context))).strip()


def shown_beside(report: PrivacyReport) -> dict[str, Any]:
    """Return what the pages show beside the report's own values, made from these: all bounds, named parameters."""
    statement = report.statement
    return {
        "bounds": [row for _, row in bounds(report.strength, statement.adjacency, unit_of(statement.unit))],
        "parameters": [
            ((Parameters.model_fields[name].description or name).removesuffix(".").partition(";")[0], value)
            for name, value in report.accounting.parameters
        ],
    }


def _share(value: float) -> str:
    """Print a probability with four figures, rounded up."""
    return f"{float(up_significant(min(1.0, value))):.12g}"


def _width(value: float) -> str:
    """Print a probability as the width of a bar."""
    return f"{100 * value:.3g}%"


def _code(value: str) -> markupsafe.Markup:
    """Escape a text, and show what is between backticks as code."""
    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(value))))


def _in_one_line(value: Any) -> str:
    if isinstance(value, _Verbatim):
        return value
    return "-" if value is None else " ".join(str(value).split())


def _cell(value: Any) -> str:
    return _in_one_line(value).replace("|", "\\|")


def _epsilon(value: float | None) -> str | None:
    return None if value is None else format_epsilon(value)


def _chance(value: float) -> str:
    """Print a probability, rounded up."""
    return up(min(1.0, value))


def _rho(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "infinite"

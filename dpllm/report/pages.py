"""The templates of the report's pages, and the filters by which they print numbers and texts.

Place in the flow: below `dpllm.report.markdown` and `dpllm.report.html`.
"""

from __future__ import annotations

import importlib.resources
import math
from functools import cache
from typing import Any

import jinja2

from dpllm.privacy.rounding import format_delta, format_epsilon, up

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
        epsilon=_epsilon, delta=format_delta, chance=_chance, rho=_rho, cell=_cell, verbatim=_Verbatim
    )
    environment.globals["not_filled"] = NOT_FILLED
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

"""The privacy report as a page of Markdown.

Place in the flow: after `report`; everything printed here is in the report's JSON, and nothing is computed.
"""

from __future__ import annotations

from typing import Any

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

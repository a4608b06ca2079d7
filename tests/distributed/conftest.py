"""A table of the distributed tests' measurements, below pytest's own summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def table(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Adds a row to the table that is printed at the end."""
    return lambda *cells: record_property("table", [request.node.originalname, *cells])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the rows, test by test."""
    rows: dict[str, list[list[str]]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "table":
                rows.setdefault(value[0], []).append(value[1:])
    for test, cells in rows.items():
        terminalreporter.section(test)
        for row in cells:
            terminalreporter.line("  ".join(f"{cell:<12}" for cell in row))

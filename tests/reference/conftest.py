"""Every parametrised test of this folder is a grid: `make test` runs a sample of its cases, see `tests.tiers`."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark it."""
    item.add_marker(pytest.mark.grid)

"""Each parametrised test here is a grid: `make test` runs cases in which every value appears, see `tests.tiers`."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark it."""
    item.add_marker(pytest.mark.grid(1))

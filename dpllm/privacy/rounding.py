"""Numbers of a guarantee for people: rounded to the side on which the printed number still holds.

Place in the flow: below everything that prints ε, σ or what is left of a budget.
"""

from __future__ import annotations

import math

_SAME = 1e-9
"""Share of the last printed digit: a number that exceeds a printable one by less is that one, but for rounding."""


def up(value: float, digits: int = 4) -> str:
    """Return a finite number with `digits` decimals, rounded up, as for ε spent and for σ.

    >>> up(7.99991), up(8.0), up(1.2341, 3)
    ('8.0000', '8.0000', '1.235')
    """
    return f"{math.ceil(value * 10**digits - _SAME) / 10**digits:.{digits}f}"


def down(value: float, digits: int = 4) -> str:
    """Return a finite number with `digits` decimals, rounded down, as for ε that may be spent.

    >>> down(7.99999), down(8.0)
    ('7.9999', '8.0000')
    """
    return f"{math.floor(value * 10**digits + _SAME) / 10**digits:.{digits}f}"

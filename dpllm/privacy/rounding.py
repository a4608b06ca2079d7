"""Numbers of a guarantee for people: rounded to the side on which the printed number still holds.

Place in the flow: below everything that prints ε, σ or the remainder of a budget. No other module formats an ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_SAME = 1e-9
"""Share of the last printed digit: a number that exceeds a printable one by less is that one, but for rounding."""


def up(value: float, digits: int = 4) -> str:
    """Return a number with `digits` decimals, rounded up, as for ε spent and for σ; infinity in words.

    >>> up(7.99991), up(8.0), up(1.2341, 3), up(math.inf)
    ('8.0000', '8.0000', '1.235', 'infinite')
    """
    return _rounded(math.ceil, value, digits, -_SAME)


def down(value: float, digits: int = 4) -> str:
    """Return a number with `digits` decimals, rounded down, as for ε that may be spent and for a lower bound on ε.

    >>> down(7.99999), down(8.0), down(math.inf)
    ('7.9999', '8.0000', 'infinite')
    """
    return _rounded(math.floor, value, digits, _SAME)


def up_significant(value: float, digits: int = 4) -> str:
    """Return a number above 0 with at least `digits` significant digits, rounded up; 0 and infinity as `up` does.

    >>> up_significant(12.3412), up_significant(0.0012341), up_significant(123456.0)
    ('12.35', '0.001235', '123456')
    """
    if not 0 < value < math.inf:
        return up(value, digits)
    return up(value, max(0, digits - 1 - math.floor(math.log10(value))))


def format_epsilon(value: float) -> str:
    """Return ε for people, rounded up so that the printed number holds; without noise, the text says so.

    >>> format_epsilon(7.99991), format_epsilon(math.inf)
    ('8.0000', 'infinite: no privacy')
    """
    return up(value) if math.isfinite(value) else "infinite: no privacy"


def epsilon_to_log(value: float) -> float:
    """Return ε as a number for a training log, rounded up to four significant digits.

    Loggers print floats with ``.4g``, rounded to nearest; of this number they print every digit.

    >>> f"{2.94121:.4g}", f"{epsilon_to_log(2.94121):.4g}", epsilon_to_log(math.inf)
    ('2.941', '2.942', inf)
    """
    return float(up_significant(value)) if math.isfinite(value) else value


def _rounded(to_integer: Callable[[float], int], value: float, digits: int, same: float) -> str:
    if math.isinf(value):
        return "infinite"
    return f"{to_integer(value * 10**digits + same) / 10**digits:.{digits}f}"

"""Format the numbers of a guarantee for people, rounded in the direction in which the printed number still holds.

No other module formats an ε or a δ. A guarantee also holds for every larger ε and every larger δ, so both are rounded
up and the printed pair holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

_SAME = 1e-9
"""Share of the last printed digit: a number that exceeds a printable one by less is treated as that number."""


def up(value: float, digits: int = 4) -> str:
    """Return a number with `digits` decimals, rounded up, for ε spent and for σ; infinity in words.

    >>> up(7.99991), up(8.0), up(1.2341, 3), up(math.inf)
    ('8.0000', '8.0000', '1.235', 'infinite')
    """
    return _rounded(math.ceil, value, digits, -_SAME)


def down(value: float, digits: int = 4) -> str:
    """Return a number with `digits` decimals, rounded down, for ε that may be spent and for a lower bound on ε.

    >>> down(7.99999), down(8.0), down(math.inf)
    ('7.9999', '8.0000', 'infinite')
    """
    return _rounded(math.floor, value, digits, _SAME)


def up_significant(value: float, digits: int = 4) -> str:
    """Return a number above 0 with at least `digits` significant digits, rounded up; 0 and infinity as in `up`.

    >>> up_significant(12.3412), up_significant(0.0012341), up_significant(123456.0)
    ('12.35', '0.001235', '123456')
    """
    if not 0 < value < math.inf:
        return up(value, digits)
    return up(value, max(0, digits - 1 - math.floor(math.log10(value))))


def format_epsilon(value: float) -> str:
    """Return ε for people, rounded up so that the printed number holds; an infinite ε is printed in words.

    >>> format_epsilon(7.99991), format_epsilon(math.inf)
    ('8.0000', 'infinite: no privacy')
    """
    return up(value) if math.isfinite(value) else "infinite: no privacy"


def one_in(delta: float) -> str:
    """Return δ as "1 in N" for people: two significant figures, N rounded down, so that the printed δ holds.

    >>> one_in(3e-7), one_in(1e-4), one_in(9.99e-6), one_in(2.5e-10), one_in(0.3)
    ('1 in 3.3 million', '1 in 10,000', '1 in 100,000', '1 in 4 billion', '1 in 3.3')
    """
    if not 0 < delta <= 1:
        return "0" if delta == 0 else str(delta)
    number = _two_figures_down(1 / delta)
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if size <= number < 1000 * size:
            return f"1 in {number / size:.4g} {name}"
    if number >= 1e6:
        return f"1 in {number:.1e}"
    return f"1 in {number:,.0f}" if number >= 100 else f"1 in {number:g}"


def _two_figures_down(value: float) -> float:
    exact = Decimal(value)
    last = Decimal(1).scaleb(exact.adjusted() - 1)  # a unit of the second figure
    return float((exact / last + Decimal(_SAME)).to_integral_value(ROUND_FLOOR) * last)


def format_percent(share: float) -> str:
    """Return a probability in percent for people, rounded up: two significant figures, or more above 99%.

    Above 99%, the distance from 100% keeps one digit, so that a bound below 1 is not printed as 100%.

    >>> format_percent(0.50571), format_percent(0.0109), format_percent(0.99012), format_percent(0.99994)
    ('51%', '1.1%', '99.1%', '99.994%')
    >>> format_percent(0.5), format_percent(1.0), format_percent(0.0)
    ('50%', '100%', '0%')
    """
    percent = 100 * min(1.0, max(0.0, share))
    if percent == 0 or percent > 100 - 1e-9:
        return f"{percent:.0f}%"
    digits = max(0, 1 - math.floor(math.log10(percent)))
    if percent > 99:
        digits = max(1, -math.floor(math.log10(100 - percent) + _SAME))
        digits += up(percent, digits) == up(100.0, digits)
    return f"{float(up(percent, digits)):.12g}%"


def format_delta(value: float) -> str:
    """Return δ for people with three significant digits, rounded up, so that a printed pair of ε and δ holds.

    A number with at most three significant digits is printed unchanged.

    >>> format_delta(3.912914e-7), format_delta(3e-7), format_delta(0.0001004016)
    ('3.92e-07', '3e-07', '0.000101')
    """
    return _three_digits(value, ROUND_CEILING, -_SAME)


def format_delta_limit(value: float) -> str:
    """Return an upper limit for δ, or the δ of a lower bound on ε, rounded down.

    A lower bound on ε at one δ holds at every smaller δ.

    >>> format_delta_limit(3.912914e-7), format_delta_limit(1 / 1302), format_delta_limit(0.001)
    ('3.91e-07', '0.000768', '0.001')
    """
    return _three_digits(value, ROUND_FLOOR, _SAME)


def epsilon_to_log(value: float) -> float:
    """Return ε as a number for a training log, rounded up to four significant digits.

    Loggers print floats with ``.4g``, rounded to nearest, which prints every digit of this number.

    >>> f"{2.94121:.4g}", f"{epsilon_to_log(2.94121):.4g}", epsilon_to_log(math.inf)
    ('2.941', '2.942', inf)
    """
    return float(up_significant(value)) if math.isfinite(value) else value


def _rounded(to_integer: Callable[[float], int], value: float, digits: int, same: float) -> str:
    if math.isinf(value):
        return "infinite"
    return f"{to_integer(value * 10**digits + same) / 10**digits:.{digits}f}"


def _three_digits(value: float, side: str, same: float) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exact = Decimal(float(value))
    last = Decimal(1).scaleb(exact.adjusted() - 2)  # a unit of the third digit
    rounded = (exact / last + Decimal(same)).to_integral_value(side) * last
    return f"{float(rounded):.3g}"

"""A printed ε is never below the true one, and a printed lower bound is never above the one that was shown."""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpllm.privacy.rounding import down, epsilon_to_log, format_epsilon, up, up_significant

ROOT = Path(__file__).parents[2]
NUMBERS = st.floats(min_value=1e-6, max_value=1e5)
SAME = Fraction(1, 10**9)  # of the last digit: the error of a computation whose result can be printed exactly


def test_printed_epsilon_is_rounded_up() -> None:
    """The printed number holds: ε is never rounded down, and never shown as 0 after a step."""
    assert format_epsilon(2.00001) == "2.0001"
    assert format_epsilon(2.0) == "2.0000"
    assert format_epsilon(1e-7) == "0.0001"
    assert format_epsilon(math.inf) == "infinite: no privacy"


@given(value=NUMBERS, digits=st.integers(0, 6))
def test_the_printed_decimal_is_on_the_side_that_holds(value: float, digits: int) -> None:
    """Compared as fractions, so that no rounding of the test hides one of the function."""
    last = Fraction(1, 10**digits)
    slack = last * SAME + Fraction(value) * Fraction(1, 2**50)
    assert -slack <= Fraction(up(value, digits)) - Fraction(value) < last + slack
    assert -slack <= Fraction(value) - Fraction(down(value, digits)) < last + slack


@given(value=NUMBERS)
def test_a_logger_prints_no_epsilon_below_the_true_one(value: float) -> None:
    """The Trainer's screens round to four significant digits, of which a logged ε has no more."""
    logged = epsilon_to_log(value)
    slack = 1e-9 * value
    assert value - slack <= logged <= 1.0011 * value
    if value < 9_999:
        assert float(f"{logged:.4g}") == logged == float(up_significant(value))


def test_infinity_has_words_and_a_logged_number() -> None:
    """A run without noise: text says infinite, a log keeps the number."""
    assert up(math.inf) == down(math.inf) == up_significant(math.inf) == "infinite"
    assert epsilon_to_log(math.inf) == math.inf
    assert up_significant(0.0) == "0.0000"


def formatted_by_itself(source: str) -> list[str]:
    """Return the expressions with an ε, or a bound on it, that a format or ``round`` rounds to nearest.

    Targets are left out: they are the numbers that were asked for, printed as they were given.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        rounded = isinstance(node, ast.FormattedValue) and node.format_spec is not None
        rounded |= (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("round", "format")
        )
        words = ast.unparse(node) if rounded else ""
        if re.search(r"(?<!target_)(epsilon|ceiling)", words.replace("MAX_TARGET_EPSILON", "")):
            found.append(words)
    return found


@pytest.mark.parametrize("folder", ["dpllm", "recipes", "benchmarks"])
def test_every_epsilon_goes_through_the_one_rounding(folder: str) -> None:
    """No f-string formats an ε by a number of digits, and nothing rounds one to nearest."""
    found = {str(path): formatted_by_itself(path.read_text()) for path in (ROOT / folder).rglob("*.py")}
    assert len(found) > 1 and {path: words for path, words in found.items() if words} == {}


def test_the_search_finds_an_epsilon_that_is_rounded_to_nearest() -> None:
    """Both spellings, and no target."""
    found = formatted_by_itself('f"{report.epsilon:.2f} of {target_epsilon:g}"; round(self.epsilon, 4)')
    assert len(found) == 2 and "round(self.epsilon, 4)" in found and "report.epsilon:.2f" in "".join(found)

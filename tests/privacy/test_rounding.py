"""A printed ε or δ is never below the true one, and a printed lower bound is never above the one that was shown."""

from __future__ import annotations

import ast
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.calibration import calibrate_noise_multiplier
from dpllm.privacy.rounding import (
    down,
    epsilon_to_log,
    format_delta,
    format_delta_limit,
    format_epsilon,
    up,
    up_significant,
)

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


@given(value=st.floats(min_value=1e-300, max_value=1.0))
def test_a_printed_delta_is_on_the_side_that_holds(value: float) -> None:
    """Compared as fractions: a δ of a guarantee is not below the true one, a limit is not above it, by three digits."""
    above, below = Fraction(format_delta(value)), Fraction(format_delta_limit(value))
    slack = Fraction(value) * SAME
    assert -slack <= above - Fraction(value) < Fraction(value) / 100 + slack
    assert -slack <= Fraction(value) - below < Fraction(value) / 100 + slack


@given(digits=st.integers(1, 999), power=st.integers(-300, -4))
def test_a_delta_of_three_digits_is_printed_as_it_is(digits: int, power: int) -> None:
    """As the nearest such number, in both directions; a product such as 0.1 · 1e-5 counts as the number it means."""
    value = float(f"{digits}e{power}")
    assert format_delta(value) == format_delta_limit(value) == f"{value:.3g}"
    assert format_delta(0.1 * value) == format_delta_limit(0.1 * value) == f"{0.1 * value:.3g}"


def test_what_is_no_delta_is_printed_too() -> None:
    """The errors about a δ print what was given."""
    assert [format_delta(value) for value in (0.0, math.inf, -0.12345, 2.0)] == ["0", "inf", "-0.123", "2"]


@pytest.mark.parametrize("num_units", [996, 255_564])
def test_the_printed_pair_holds(num_units: int) -> None:
    """ε at the printed δ is at most the printed ε, for the default δ of 1/(10 N); at the nearest δ it is not."""
    delta, numbers = 1 / (10 * num_units), {"sampling_rate": 0.05, "num_steps": 200}
    sigma = calibrate_noise_multiplier(8.0, delta, **numbers)
    history = [(Step(sampling_rate=0.05, noise_multiplier=sigma), 200)]
    printed = float(format_epsilon(epsilon(history, delta)))
    assert epsilon(history, float(format_delta(delta))) <= printed
    assert epsilon(history, float(f"{delta:.3g}")) > printed


def formatted_by_itself(source: str, searched: str = r"(?<!target_)(epsilon|ceiling)") -> list[str]:
    """Return the expressions with an ε, or a bound on it, that a format or ``round`` rounds to nearest.

    Targets are left out: they are the numbers that were asked for, printed as they were given.

    Args:
        source: a module.
        searched: a regular expression of the names.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        rounded = isinstance(node, ast.FormattedValue) and node.format_spec is not None
        rounded |= (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("round", "format")
        )
        words = ast.unparse(node) if rounded else ""
        if re.search(searched, words.replace("MAX_TARGET_EPSILON", "")):
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


DELTAS = r"delta(?!_steps)|\b1 / (\w+\.)?num_units|1 / \(10 \*|1 / max\(num_units"


@pytest.mark.parametrize("folder", ["dpllm", "recipes", "benchmarks"])
def test_every_delta_goes_through_the_one_rounding(folder: str) -> None:
    """No f-string, ``%`` or template formats a δ, or a limit of one, by a number of digits."""
    found = {str(path): formatted_by_itself(path.read_text(), DELTAS) for path in (ROOT / folder).rglob("*.py")}
    assert len(found) > 1 and {path: words for path, words in found.items() if words} == {}
    for path in filter(Path.is_file, (ROOT / folder).rglob("templates/**/*")):
        printed = re.findall(r"\{\{[^}]*delta[^}]*\}\}", path.read_text())
        assert not [words for words in printed if "%" in words or "round" in words]
        used = [words for words in printed if re.search(r"\.delta\b", words)]
        assert all("| delta" in words or "| one_in" in words for words in used), printed


def test_the_search_finds_a_delta_that_is_rounded_to_nearest() -> None:
    """All spellings; one that is printed with all its digits is not found."""
    source = (
        'f"{plan.delta:.3g}, below {1 / num_units:.3g}: {1 / (10 * num_units):g}"; round(delta, 9); f"{plan.delta}"'
    )
    assert len(formatted_by_itself(source, DELTAS)) == 4

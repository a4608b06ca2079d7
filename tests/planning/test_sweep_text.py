"""The printed text of a sweep: complete, rounded safely, and readable."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dpllm.planning.sweep import Cost, sweep
from dpllm.planning.sweep_text import MARK, format_duration, format_tokens, recommendation_text, sweep_rows


@pytest.fixture(scope="module")
def result():
    return sweep(
        target_epsilon=8.0,
        delta=1e-6,
        num_units=42_000,
        expected_batch_sizes=[1024, 2048],
        step_counts=[100, 200],
        compute=204_800,
        gradient_rms=1e-4,
        cost=Cost(tokens_per_unit=100, tokens_per_second=1000),
    )


def test_the_table_has_a_row_for_every_point_and_marks_one(result):
    """Header and rows fit, one row is recommended, the other of its compute is dotted."""
    header, rows = sweep_rows(result)
    assert len(rows) == 4 and all(len(row) == len(header) for row in rows)
    assert [row[0] for row in rows] == ["", "·", MARK, ""]
    assert header == [
        "",
        "b",
        "steps T",
        "σ",
        "σ/b",
        "of full batch",
        "effective steps",
        "ε",
        "epochs",
        "tokens",
        "time",
    ]
    assert rows[2][1:3] == ["2,048", "100"]
    assert rows[2][-3:] == ["4.88", "20 M", "5 h 41 min"]


def test_columns_without_numbers_are_left_out(result):
    """No cost given, no tokens and time; no size of the gradient, no effective steps."""
    points = [
        dataclasses.replace(
            point,
            noise=dataclasses.replace(point.noise, effective_steps=None),
            compute=dataclasses.replace(point.compute, tokens=None, seconds=None),
        )
        for point in result.points
    ]
    header, rows = sweep_rows(dataclasses.replace(result, points=tuple(points), gradient_rms=0.0))
    assert header == ["", "b", "steps T", "σ", "σ/b", "of full batch", "ε", "epochs"]
    assert all(len(row) == 8 for row in rows)


def test_sigma_and_epsilon_are_rounded_up(result):
    """Whoever types the printed σ gets no more than the printed ε."""
    _, rows = sweep_rows(result)
    for row, point in zip(rows, result.points, strict=True):
        assert 0 <= float(row[3]) - point.noise.noise_multiplier < 1.001e-3
        assert 0 <= float(row[7]) - point.noise.epsilon < 1.001e-4


def test_a_point_out_of_reach_is_shown_without_numbers(result):
    """It stays in the table, and the text says how many there are and why the first is."""
    lost = dataclasses.replace(result.points[0], noise=None, reason="too many steps")
    changed = dataclasses.replace(result, points=(lost, *result.points[1:]))
    assert sweep_rows(changed)[1][0] == ["", "1,024", "100", "none", "", "", "", "", "2.44", "10 M", "2 h 51 min"]
    assert "1 of 4 points cannot reach the target; b = 1,024, T = 100: too many steps." in recommendation_text(changed)


def test_the_text_says_what_why_what_else_and_what_is_assumed(result):
    """The parts that a reader needs to judge the recommendation."""
    text = recommendation_text(result)
    assert "Recommended: 100 steps of 2,048 units each (4.88 epochs, 20 M tokens, about 5 h 41 min)" in text
    assert f"δ = {result.delta:.3g}, zero-out adjacency" in text
    assert result.reason in text and all(assumption in text for assumption in result.assumptions)
    for change in result.what_if:
        assert f"{change.change}: times {change.factor:.2f}" in text
    assert "cannot reach" not in text


def test_an_impossible_change_is_called_so(result):
    """A batch cannot be doubled beyond the data."""
    impossible = dataclasses.replace(result.what_if[0], factor=None, noise_to_batch_ratio=None)
    text = recommendation_text(dataclasses.replace(result, what_if=(impossible,)))
    assert "(twice the compute): impossible." in text


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (9949, "9.9 k"), (9951, "10 k"), (999_400, "999 k"), (999_600, "1.0 M")],
)
def test_tokens_have_two_or_three_digits(tokens, text):
    """Units change where a number would be rounded up to the next one."""
    assert format_tokens(tokens) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3569, "59 min"),
        (3571, "1 h 0 min"),
        (47.4 * 3600, "47 h 24 min"),
        (47.6 * 3600, "2 d 0 h"),
    ],
)
def test_times_have_two_units(seconds, text):
    """Units change where a number would be rounded up to the next one."""
    assert format_duration(seconds) == text


def test_sigma_keeps_four_digits_whatever_its_size(result):
    """Also above 1000 and far below 1."""
    for sigma, text in [(0.012341, "0.01235"), (999.95, "1000.0"), (12.0, "12.00"), (1234.5, "1235")]:
        noise = dataclasses.replace(result.points[0].noise, noise_multiplier=sigma)
        point = dataclasses.replace(result.points[0], noise=noise)
        shown = sweep_rows(dataclasses.replace(result, points=(point,)))[1][0][3]
        assert shown == text
        assert math.isclose(float(shown), sigma, rel_tol=1e-3) and float(shown) >= sigma

"""The printed text of a sweep: complete, rounded safely, and readable."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dpllm.planning.sweep import Cost, sweep
from dpllm.planning.sweep_text import MARK, recommendation_text, sweep_rows


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
    assert rows[2][1:3] == ["2,048", "100"]
    assert rows[2][-3:] == ["4.88", "20 M", "5 h 41 min"]


def test_sigma_and_epsilon_are_rounded_up(result):
    """Whoever types the printed σ gets no more than the printed ε."""
    _, rows = sweep_rows(result)
    for row, point in zip(rows, result.points, strict=True):
        assert 0 <= float(row[3]) - point.noise_multiplier < 1.001e-3
        assert 0 <= float(row[7]) - point.epsilon < 1.001e-4


def test_a_point_out_of_reach_is_shown_without_numbers(result):
    """It stays in the table, and the text says how many there are and why the first is."""
    none = dict.fromkeys(["noise_multiplier", "epsilon", "share_of_full_batch", "effective_steps"])
    lost = dataclasses.replace(result.points[0], **none, reason="too many steps")
    changed = dataclasses.replace(result, points=(lost, *result.points[1:]))
    assert sweep_rows(changed)[1][0] == ["", "1,024", "100", "none", "", "", "", "", "2.44", "10 M", "2 h 51 min"]
    assert "1 of 4" in recommendation_text(changed) and "too many steps" in recommendation_text(changed)


def test_sigma_keeps_four_digits_whatever_its_size(result):
    """Also above 1000 and far below 1."""
    for sigma, text in [(0.012341, "0.01235"), (999.95, "1000.0"), (12.0, "12.00"), (1234.5, "1235")]:
        point = dataclasses.replace(result.points[0], noise_multiplier=sigma)
        shown = sweep_rows(dataclasses.replace(result, points=(point,)))[1][0][3]
        assert shown == text
        assert math.isclose(float(shown), sigma, rel_tol=1e-3) and float(shown) >= sigma

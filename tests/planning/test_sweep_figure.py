"""The picture of a sweep shows the points of the sweep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpllm.planning.sweep import sweep
from dpllm.planning.sweep_text import draw_sweep, plot_sweep

GRID = {"expected_batch_sizes": [512, 1024, 2048], "step_counts": [50, 100, 200]}


@pytest.fixture(scope="module")
def result():
    return sweep(target_epsilon=2.0, delta=1e-6, num_units=42_000, **GRID)


def lines_of(panel, style=None, points=2):
    return [
        line
        for line in panel.get_lines()
        if len(line.get_xdata()) >= points and (style is None or line.get_linestyle() == style)
    ]


def test_the_left_panel_has_a_line_for_each_number_of_steps(result):
    """Noise-to-batch ratio of every point."""
    panel = draw_sweep(result).axes[0]
    for line, steps in zip(lines_of(panel, "-"), [50, 100, 200], strict=True):
        row = [point for point in result.points if point.num_steps == steps]
        assert list(line.get_xdata()) == [512, 1024, 2048]
        assert list(line.get_ydata()) == [point.noise_to_batch_ratio for point in row]


def test_the_right_panel_has_a_line_for_each_compute(result):
    """Shares of the full batch along equal compute; bold where the recommendation comes from."""
    panel = draw_sweep(result).axes[1]
    bold = max(lines_of(panel), key=lambda line: line.get_linewidth())
    assert list(bold.get_ydata()) == [point.share_of_full_batch for point in result.line]


def test_the_recommended_point_is_marked_in_both_panels(result):
    """One star each, at its batch size and its number."""
    left, right = draw_sweep(result).axes
    chosen = result.recommended
    for panel, value in ((left, chosen.noise_to_batch_ratio), (right, chosen.share_of_full_batch)):
        (star,) = [line for line in panel.get_lines() if line.get_marker() == "*"]
        assert np.allclose([star.get_xdata()[0], star.get_ydata()[0]], [chosen.expected_batch_size, value])


def test_points_without_noise_are_left_out(result, tmp_path):
    """A point out of reach has no place on a logarithmic axis; the others are drawn."""
    lost = dataclasses.replace(result.points[0], noise_multiplier=None)
    changed = dataclasses.replace(result, points=(lost, *result.points[1:]))
    solid = lines_of(draw_sweep(changed).axes[0], "-")
    assert list(solid[0].get_xdata()) == [1024, 2048]
    assert plot_sweep(changed, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

"""The sweep over noises ranks by the predicted noise, and bands turn "bigger batches" around."""

import dataclasses
import json
import math

import pytest

from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.catalogue import noise_of
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.strategies import Workload
from dpllm.planning.sweep import Sweep, recommend, sweep
from dpllm.planning.sweep_text import recommendation_text, sweep_rows
from dpllm.privacy.calibration import predicted_noise

E2E = {"delta": 1e-6, "num_units": 42_061, "expected_batch_size": 1024, "compute": 1024 * 410}
DRAW = Draw(num_units=42_061, population=42_061, expected_batch_size=1024, max_batch_size=42_061)


def linear(num_steps: int) -> Workload:
    return Workload.released([(num_steps - step) / num_steps for step in range(num_steps)], 0.9)


def swept(**change) -> Sweep:
    settings = {"noise": BandedNoise(), "workload_of": linear, "expected_batch_sizes": [256, 1024, 4096], **E2E}
    return sweep(**{**settings, "target_epsilon": 3.0, **change})


@pytest.fixture(scope="module")
def made() -> Sweep:
    return swept()


def test_bands_turn_the_recommended_batch_around(made):
    """At ε = 3 independent noise asks for the largest batches, and many bands for the smallest, at one compute."""
    assert made.recommended_independent.expected_batch_size == 4096
    chosen = made.recommended
    assert chosen.expected_batch_size == 256 and chosen.options["bands"] >= 8
    assert chosen.num_steps == 1640 and chosen.predicted_noise < made.recommended_independent.predicted_noise * 1.01
    assert all(point.expected_batch_size * point.num_steps <= made.compute for point in made.points)


def test_points_are_those_of_the_prediction_of_a_plan(made):
    """By σ‖w M⁻¹‖ over the signal b Σw; the least comes first."""
    values = [point.predicted_noise for point in made.points]
    assert values == sorted(values) and len(made.points) == 3 + 7 + 7 + 5 + 3
    signal = 1024 * sum(linear(410).response)
    for bands in (1, 8):
        points = [point for point in made.points if point.expected_batch_size == 1024]
        (point,) = (p for p in points if bands == (1 if p.options == "independent" else p.options.get("bands")))
        noise = noise_of(Spec.of(point.options))
        expected = predicted_noise(noise, DRAW, linear(410), 3.0, 410, 1e-6, "zero-out")
        assert point.predicted_noise == pytest.approx(expected / signal)
    plain = next(p for p in made.independent if p.expected_batch_size == 1024)
    assert plain.relative == 1.0 and plain.tensors_kept == 0


def test_the_rule_takes_the_smallest_batch_and_then_the_least_memory(made):
    """Of the points within 10 % of the least noise."""
    (point, *_) = made.points
    points = [
        dataclasses.replace(point, noise_multiplier=noise * size, gain=1.0, expected_batch_size=size, tensors_kept=kept)
        for noise, size, kept in ((1.0, 400, 2), (1.05, 200, 8), (1.1, 200, 4), (1.2, 100, 0))
    ]
    assert recommend(points) is points[2]


def test_a_noise_of_given_bands_is_compared_with_independent_noise():
    """Where its groups have a batch; batches with too few steps are left out."""
    made = swept(noise=BandedNoise(12), min_steps=200)
    sizes = {(point.expected_batch_size, point.tensors_kept) for point in made.points if point.sampled}
    assert sizes == {(256, 0), (256, 12), (1024, 0), (1024, 12)}
    plain = swept(noise=IndependentNoise(), expected_batch_sizes=[1024])
    assert {point.noise for point in plain.points if point.sampled} == {"independent"}


def test_text_and_values_have_the_recommendation(made):
    """As an override of a recipe; every point is in the JSON."""
    text, (head, rows) = recommendation_text(made), sweep_rows(made)
    bands = made.recommended.options["bands"]
    assert f"privacy.noise={{kind: banded, bands: {bands}, strategy: geometric}}" in text
    assert [row[0] for row in rows].count("→") == 1 and len(rows[0]) == len(head)
    values = json.loads(json.dumps(made.to_dict()))
    assert len(values["points"]) == 25 and values["recommended"]["expected_batch_size"] == 256


def test_a_compute_that_is_too_small_is_refused():
    """The recipe's own batch must take a step."""
    with pytest.raises(ValueError, match="b=1024"):
        swept(min_steps=411)


@pytest.mark.parametrize(
    "change",
    [
        {"min_steps": 0},
        {"min_steps": -1},
        {"expected_batch_sizes": [1024, -5]},
        {"expected_batch_sizes": [0]},
        {"expected_batch_sizes": [10**6]},
    ],
)
def test_numbers_that_make_no_grid_are_refused_by_name(change):
    """They are not left out silently."""
    with pytest.raises(ValueError, match=next(iter(change)).rstrip("s")):
        swept(**change)


def test_noise_of_a_fixed_order_is_named_by_its_buffers():
    """In the table, and in the override of the recipe."""
    made = swept(noise=BltNoise(2), expected_batch_sizes=[1024], target_epsilon=8.0)
    assert [point.noise for point in made.points] == ["blt, 2 buffers", "independent"]
    assert "privacy.noise={kind: blt, buffers: 2}" in recommendation_text(made)


def test_a_fixed_order_is_shown_and_recommended_only_where_the_recipe_has_it():
    """One pass at ε = 8: its predicted noise is the least of all, and it needs no sampling."""
    one_pass = {"compute": 1024 * 41, "target_epsilon": 8.0, "expected_batch_sizes": [1024]}
    made = swept(**one_pass)
    fixed = made.recommended_without_sampling
    assert fixed == made.points[0] and fixed.predicted_noise < 0.75 * made.recommended.predicted_noise
    assert made.recommended.sampled and made.recommended.options["kind"] == "banded"
    (noise,) = BltNoise().candidates(DRAW, linear(41))
    assert noise_of(Spec.of(fixed.options)) == noise
    expected = predicted_noise(noise, DRAW, linear(41), 8.0, 41, 1e-6, "zero-out")
    assert fixed.predicted_noise == pytest.approx(expected / (1024 * sum(linear(41).response)))
    assert [row[-1] for row in sweep_rows(made)[1]].count("fixed order") == 1
    text = recommendation_text(made)
    assert "Without sampling: 41 steps of 1,024 units in a fixed order with privacy.noise={kind: blt" in text
    assert "points with sampled units" in text and made.to_dict()["recommended_without_sampling"]["sampled"] is False
    asked = swept(noise=BltNoise(), **one_pass)
    assert asked.recommended == asked.recommended_without_sampling and asked.recommended.options == fixed.options
    assert "Without sampling:" not in recommendation_text(asked) and "points in a fixed order" in recommendation_text(
        asked
    )


def test_a_fixed_order_that_reaches_no_target_is_no_point(monkeypatch):
    """It is left out of the table; a recipe that asks for it gets an error."""
    monkeypatch.setattr(
        "dpllm.planning.sweep.least_noise",
        lambda target, delta, history, adjacency, exact: math.inf if history(1.0)[0][0].kind == "blt" else 1.0,
    )
    made = swept(noise=BandedNoise(4), expected_batch_sizes=[1024])
    assert made.recommended_without_sampling is None and "Without sampling" not in recommendation_text(made)
    assert made.to_dict()["recommended_without_sampling"] is None
    with pytest.raises(ValueError, match="cannot be reached"):
        swept(noise=BltNoise(2), expected_batch_sizes=[1024])


def test_a_point_with_independent_noise_alone_is_compared_with_the_recipe_s():
    """By the σ that it has in the end, which is exact at the recommended point."""
    made = swept(noise=IndependentNoise(), workload_of=None)
    assert [point.expected_batch_size for point in made.points] == [256, 1024, 4096] and not made.correlated
    reference = next(point.predicted_noise for point in made.points if point.expected_batch_size == 1024)
    assert all(point.relative == point.predicted_noise / reference for point in made.points)
    assert all(0.99 * 3 <= point.epsilon <= 3 for point in made.points)


@pytest.mark.parametrize("change", [{"workload_of": None}, {"gradient_rms": 1e-3}, {"compute": "max"}])
def test_correlated_noise_is_compared_by_its_workload_at_one_compute(change):
    """The size of the gradient is not looked at, and there is no grid whose centre or end could be meant."""
    with pytest.raises(ValueError, match=next(iter(change))):
        swept(**change)

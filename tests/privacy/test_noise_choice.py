"""Bands that a recipe leaves open are chosen at the plan's ε, and the plan carries every number of the strategy."""

import math

import numpy as np
import pytest

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.parts import Draw
from dpllm.mechanism.strategies import Workload, best_ratio, coefficients
from dpllm.privacy import calibration
from dpllm.privacy.calibration import NEARLY_LEAST, calibrate, least_noise, nearly_least, predicted_noise, prediction
from dpllm.privacy.plan import PrivacyPlan, format_plan, make_plan

N, B, T, DELTA = 600, 50, 40, 1e-4
LINEAR = Workload.released([(T - step) / T for step in range(T)], 0.9)
DRAW = Draw(num_units=N, population=N, expected_batch_size=B, max_batch_size=N)


def approximate_noise(epsilon, delta, event_of, num_steps):
    """The quick search of `least_noise`."""
    return least_noise(epsilon, delta, lambda sigma: [(event_of(sigma), num_steps)], exact=False)


def plan_of(noise, workload=LINEAR, **change):
    settings = {"epsilon": 3.0, "clip_norm": 0.5, "expected_batch_size": B, "delta": DELTA, "noise": noise}
    settings["max_batch_size"] = 200  # choosing it takes most of the time
    return make_plan(PrivacyConfig(**{**settings, **change}), N, T, workload=workload)


@pytest.mark.parametrize("epsilon", [0.4, 8.0])
def test_the_approximate_noise_is_near_the_calibrated_one(epsilon):
    """Within half a percent, for a target on the coarse grid and for one that is too small for it."""
    for bands in (1, 6):

        def event_of(sigma, bands=bands):
            return BandedNoise(bands).event(DRAW, sigma, 1.0)

        exact = calibrate(epsilon, DELTA, event_of, T)
        assert approximate_noise(epsilon, DELTA, event_of, T) == pytest.approx(exact, rel=5e-3)


def test_a_target_without_any_noise_and_one_that_none_reaches():
    """The smallest multiplier, and infinity."""

    def event_of(sigma):
        return BandedNoise(2).event(DRAW, sigma, 1.0)

    assert approximate_noise(1e-6, 1e-9, event_of, T) == math.inf
    assert approximate_noise(3.0, DELTA, event_of, T) < approximate_noise(1.0, DELTA, event_of, T) < math.inf


def test_auto_takes_the_fewest_bands_that_are_nearly_the_best():
    """Of all that fit into the groups; compared at the plan's ε by the noise of the released weights."""
    plan = plan_of({"kind": "banded"})
    predicted = {
        noise.bands: predicted_noise(noise, DRAW, LINEAR, 3.0, T, DELTA, "zero-out")
        for noise in BandedNoise().candidates(DRAW, LINEAR)
    }
    assert list(predicted) == [1, 2, 3, 4, 6, 8, 12]
    options = plan.to_dict()["noise"]
    enough = NEARLY_LEAST * min(predicted.values())
    assert options["bands"] == min(bands for bands, value in predicted.items() if value <= enough) > 1
    assert options == {
        "kind": "banded",
        "bands": options["bands"],
        "strategy": "geometric",
        "ratio": best_ratio(options["bands"], LINEAR),
    }
    assert plan.epsilon <= 3.0
    assert nearly_least([1.0, 0.9, 0.8]) == 2 and nearly_least([1.0, 0.99, 0.96]) == 0


def test_less_epsilon_takes_fewer_bands():
    """With more noise the rounds of larger samples cost more than the correlation saves."""
    bands = [plan_of("banded", epsilon=epsilon).to_dict()["noise"]["bands"] for epsilon in (0.3, 8.0)]
    assert bands[0] < bands[1]


@pytest.mark.parametrize("change", [{"epsilon": None}, {}])
def test_auto_with_a_given_sigma_is_refused(change):
    """At one σ more bands cost more ε: there is nothing to compare."""
    with pytest.raises(ValueError, match="Set target_epsilon") as found:
        plan_of("banded", noise_multiplier=1.0, **change)
    assert "\n" not in str(found.value)
    given = plan_of({"kind": "banded", "bands": 2}, noise_multiplier=1.0, **change)
    assert given.to_dict()["noise"]["ratio"] == best_ratio(2, LINEAR)


def test_auto_over_single_rows_is_refused():
    """As any other number of bands."""
    user = {"unit": "id", "max_rows_per_unit": 2, "sampling": "example"}
    with pytest.raises(ValueError, match="accounting where"):
        make_plan(
            PrivacyConfig(epsilon=3.0, clip_norm=1.0, expected_batch_size=20, noise="banded", **user),
            N,
            T,
            num_examples=900,
        )


def test_a_run_of_one_step_and_one_of_full_batches_have_one_band():
    """No later step could cancel noise, or no group would have a batch."""
    settings = {"epsilon": 3.0, "clip_norm": 0.5, "noise": "banded", "delta": DELTA, "max_batch_size": N}
    for size, steps in ((B, 1), (N, 5)):
        plan = make_plan(PrivacyConfig(expected_batch_size=size, **settings), N, steps)
        assert plan.to_dict()["noise"] == {"kind": "banded", "bands": 1}


def test_a_workload_that_is_unknown_has_the_strategy_of_earlier_versions():
    """Free coefficients for prefix sums, to the eight decimals of a plan."""
    options = plan_of({"kind": "banded", "bands": 4}, workload=None).to_dict()["noise"]
    assert options["strategy"] == "free"
    assert options["coefficients"] == pytest.approx(coefficients(4, T), abs=1.01e-8)
    named = plan_of({"kind": "banded", "bands": 4, "strategy": "geometric"}, workload=None).to_dict()["noise"]
    assert named["ratio"] == best_ratio(4, Workload.prefix_sums(T))


@pytest.mark.parametrize("strategy", ["free", "geometric"])
def test_a_loaded_plan_has_its_strategy_and_optimises_nothing(strategy, tmp_path, monkeypatch):
    """Also where another version of SciPy would find other digits."""
    plan = plan_of({"kind": "banded", "bands": 3, "strategy": strategy})
    plan.save(tmp_path / "plan.json")
    column = plan.mechanism.noise.column(T)

    def never(*args, **kwargs):
        raise AssertionError("optimised again")

    for name in ("best_ratio", "free_column", "coefficients"):
        monkeypatch.setattr(f"dpllm.mechanism.banded.{name}", never)
    loaded = PrivacyPlan.load(tmp_path / "plan.json")
    assert loaded == plan and loaded.mechanism.noise.column(T) == column
    assert loaded.mechanism.release_stddevs(T) == plan.mechanism.release_stddevs(T)


def test_options_of_a_recipe_are_checked_when_it_is_read():
    """Before data are read."""
    settings = {"epsilon": 3.0, "clip_norm": 0.5, "expected_batch_size": B}
    for noise, text in (
        ({"kind": "banded", "bands": 3, "stratgy": "free"}, "noise.stratgy is not an option of 'banded'"),
        ({"kind": "banded", "bands": 2, "strategy": "free", "coefficients": [1.0, 0.5]}, "at most 1 is allowed"),
        ({"kind": "banded", "bands": "some"}, "or auto, got 'some'"),
    ):
        with pytest.raises(ConfigError, match=text):
            PrivacyConfig(noise=noise, **settings)
    own = {"kind": "banded", "bands": 2, "strategy": "free", "coefficients": [0.8, 0.5]}
    assert plan_of(own, epsilon=None, noise_multiplier=1.0).to_dict()["noise"] == own


def test_the_prediction_compares_with_independent_noise_at_the_same_epsilon():
    """And a plan of independent noise, or without noise, has none."""
    plan = plan_of({"kind": "banded", "bands": 4})
    found = prediction(plan, LINEAR)
    assert found.noise == pytest.approx(plan.noise_multiplier * plan.mechanism.noise.error(LINEAR))
    plain = plan_of("independent")
    assert found.independent == pytest.approx(plain.noise_multiplier * LINEAR.error([1.0]), rel=5e-3)
    assert found.noise < 0.9 * found.independent
    matrix = np.zeros((T, T))
    for band, value in enumerate(plan.mechanism.noise.column(T)):
        matrix += value * np.eye(T, k=-band)
    per_step = plan.noise_multiplier * np.linalg.norm(np.linalg.inv(matrix)) / math.sqrt(T)  # of all T rows
    assert found.step_ratio == pytest.approx(per_step / plain.noise_multiplier, rel=5e-3) and found.step_ratio > 2
    assert "learning rate" in found.step_words(divides=True) and "learning rate" not in found.step_words(divides=False)
    assert prediction(plain, LINEAR) is None
    silent = plan_of({"kind": "banded", "bands": 4}, noise_multiplier=0.0, epsilon=None)
    assert prediction(silent, LINEAR) is None
    assert any("geometric with ratio" in value for _, value in format_plan(plan))


def test_no_candidate_that_reaches_the_target(monkeypatch):
    """The calibration then says which ε is reachable."""
    monkeypatch.setattr(calibration, "least_noise", lambda *args, **options: math.inf)
    monkeypatch.setattr("dpllm.privacy.plan.calibrate", lambda *args: (_ for _ in ()).throw(ValueError("unreachable")))
    with pytest.raises(ValueError, match="unreachable"):
        plan_of("banded")


@pytest.mark.parametrize("strategy", ["free", "geometric"])
def test_the_noise_of_a_plan_is_a_noise_of_a_recipe(strategy):
    """For a resume on software that would find other digits: the numbers are used as they are, for any workload."""
    given = {"noise_multiplier": 1.0, "epsilon": None}
    plan = plan_of({"kind": "banded", "bands": 3, "strategy": strategy}, **given)
    other = Workload.released([1.0] * T, 0.5)
    assert plan_of(plan.to_dict()["noise"], other, **given) == plan
    assert plan_of({"kind": "banded", "bands": 3, "strategy": strategy}, other, **given) != plan

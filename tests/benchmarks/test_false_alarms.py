"""benchmarks/false_alarms.py: it simulates the mechanism that it names, and its counts are correct."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.result import auroc
from tests.benchmarks.material import program

benchmark = program("false_alarms")


def test_the_simulated_mechanism_is_the_one_claimed():
    """A full batch with σ = 1 gives the area Φ(1/√2); the score of a sampled run has E[e^score] = 1 without canary."""
    full, sampled = benchmark.SETTINGS[0], benchmark.SETTINGS[1]
    scores, coins = benchmark.simulate(full._replace(num_canaries=40_000), np.random.default_rng(0))
    assert auroc(scores, coins).value == pytest.approx(stats.norm.cdf(np.sqrt(0.5)), abs=0.01)
    small = sampled._replace(num_canaries=200_000, num_steps=2)
    scores, coins = benchmark.simulate(small, np.random.default_rng(0))
    assert np.exp(scores[~coins]).mean() == pytest.approx(1, abs=0.02)
    assert np.exp(scores[coins]).mean() > 1.02


@pytest.mark.deep
def test_sound_runs_are_not_accused(tmp_path):
    """Of 12 sound runs of each setting hardly one fails; the table and the JSON say the same."""
    path = tmp_path / "alarms.json"
    benchmark.main(["--runs", "12", "--json", str(path)])
    found = json.loads(path.read_text())
    assert set(found) == {setting.name for setting in benchmark.SETTINGS}
    for row in found.values():
        assert row["runs"] == 12 and row["alarms"] <= 3 and row["share"] == row["alarms"] / 12 < row["at_most"]
        assert row["highest_bound_over_claim"] > 0

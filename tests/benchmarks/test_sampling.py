"""benchmarks/sampling.py: its tables match the draws and their division."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.benchmarks.material import program
from tests.tiers import deep_case

benchmark = program("sampling")

SMALL = ["--units", "1e4", "1e5", "--rates", "1e-4", "--rounds", "2", "--ranks", "3", "--rows", "4"]


@pytest.mark.deep
@pytest.mark.parametrize("clock", ["wall", deep_case("cpu")])
def test_command_line_prints_tables_and_writes_json(clock, tmp_path, capsys):
    """Both N are measured, on the index of all their units, the mask up to its limit; figures agree."""
    path = tmp_path / "sampling.json"
    limits = ["--mask-up-to", "1e4", "--clock", clock]
    benchmark.main([*SMALL, *limits, "--json", str(path)])
    report = json.loads(path.read_text())
    small, large = report["steps"]
    assert small["mask"]["peak_bytes"] >= 5 * small["units"] and large["mask"] is None
    assert [setup["units"] for setup in report["setup"]] == [10**4, 10**5]
    for setup in report["setup"]:
        assert setup["lengths_bytes"] == 4 * setup["units"] and setup["index_peak_bytes"] < 10_000
    for step in report["steps"]:
        assert 0 < step["step_ms_range"][0] <= step["step_ms"] <= step["step_ms_range"][1]
        assert set(step["ms"]) == set(benchmark.PARTS)
        assert step["median_drawn"] <= step["max_batch_size"]
    assert capsys.readouterr().out.count("| 1e+05 |") == 2


@pytest.mark.deep
def test_memory_does_not_grow_with_the_units():
    """A hundred times the units at the same batch size: the peak of a step stays, as it would not with a mask."""
    settings = benchmark.Settings(rounds=1)
    peaks = []
    for units in (10**4, 10**6):
        setup, made = benchmark.measure_setup(units, "wall")
        peaks.append(benchmark.measure_step(*made, 1000 / units, settings)["peak_bytes"])
        assert setup["facts_peak_bytes"] < 30 * 2**20
    assert 1000 * 8 < peaks[1] < 2 * peaks[0] < 10**6


def test_rate_of_the_mask():
    """float32 random numbers are multiples of 2^-24: a mask at q = 1e-6 draws 17 of 2^24 units, 1.3 % too many."""
    torch.manual_seed(0)
    values = torch.rand(10_000) * 2**24
    assert torch.equal(values, values.round())
    assert benchmark.mask_rate(1e-6) == 17 / 2**24
    assert benchmark.mask_rate(0.25) == 0.25
    assert benchmark.mask_rate(1.0) == 1.0


def test_peak_bytes_counts_what_is_alive_at_once():
    """Arrays of numpy count while they live, and none after the call."""

    def two_in_turn():
        first = np.zeros(10**5)
        del first
        np.zeros(10**5)

    assert 8 * 10**5 <= benchmark.peak_bytes(two_in_turn) < 12 * 10**5

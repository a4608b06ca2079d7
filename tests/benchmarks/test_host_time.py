"""benchmarks/host_time.py: an interval of the median decides whether a bar is missed."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.material import program

benchmark = program("host_time")


def row(ratio, way="eager"):
    return benchmark.Row("64", "full", way, [10.0] * 15, [10 * ratio * (1 + 0.01 * (i % 3 - 1)) for i in range(15)])


def test_the_interval_holds_the_median_and_is_narrower_than_the_samples():
    """Of equal samples it is a point."""
    ratios = row(1.3).ratios
    low, high = benchmark.interval(ratios)
    assert min(ratios) <= low <= sorted(ratios)[7] <= high <= max(ratios)
    assert benchmark.interval([1.5] * 15) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("ratio", "way", "verdict"), [(1.6, "eager", "met"), (1.7, "eager", "missed"), (1.5, "compiled", "missed")]
)
def test_a_bar_is_missed_only_by_the_lower_end(ratio, way, verdict):
    """A median above the bar with an interval around it is not a miss."""
    assert benchmark.line_of(row(ratio, way)).endswith(f"| {verdict} |")


@pytest.mark.deep
def test_the_command_prints_the_table_and_writes_the_figures(tmp_path, capsys, monkeypatch):
    """A tiny model: times of every pair, or the reason of a refusal."""
    tiny = benchmark.Size(16, 32, 2, 4, {"full": (1.6, 1.45)})
    monkeypatch.setattr(benchmark, "SIZES", {"64": tiny})
    monkeypatch.setattr(benchmark, "SAMPLE_S", 0.001)
    path = tmp_path / "host_time.json"
    benchmark.main(["--sizes=64", "--modes=full", "--ways=eager", "--pairs=15", f"--json={path}"])
    (found,) = json.loads(path.read_text())["rows"]
    assert len(found["plain_ms"]) == len(found["private_ms"]) == 15 and not found["refused"]
    assert "| 16, 2×4 | full | eager |" in capsys.readouterr().out

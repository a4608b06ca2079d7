"""benchmarks/randomness.py: its table has every generator, and stored beside regenerated noise."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.material import program

benchmark = program("randomness")


@pytest.mark.deep
def test_the_command_line_prints_a_table_and_writes_json(tmp_path):
    """Each row has a positive time; regenerated noise is drawn from its first step on."""
    path = tmp_path / "randomness.json"
    benchmark.main(["--entries", "40000", "--bands", "3", "--steps", "9", "--rounds", "2", "--json", str(path)])
    numbers = json.loads(path.read_text(encoding="utf-8"))
    assert (numbers.pop("entries"), numbers.pop("bands"), numbers.pop("steps")) == (40_000, 3, 9)
    assert {
        "os",
        "chacha20",
        "discrete",
        "chacha20: key stream by NumPy",
        "chacha20: bits to normal numbers",
    } <= numbers.keys()
    kinds = [
        f"3 bands, {strategy}, {memory}, step 9"
        for strategy in ("general", "geometric")
        for memory in ("stored", "regenerated")
    ]
    assert set(kinds) <= numbers.keys() and all(value > 0 for value in numbers.values())

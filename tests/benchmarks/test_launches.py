"""benchmarks/launches.py: a private step launches no more than it did, and the benchmark counts what it says."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from tests.benchmarks.material import program

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the paths of a GPU need Triton")

benchmark = program("launches")

PLAIN, OURS = benchmark.PLAIN, benchmark.OURS

# Launches of a layer of plain training and of a private one. Lower the private figures when the library launches less.
STORED = {
    "full": (109, 113),
    "full, checkpointing": (147, 151),
    "LoRA": (203, 217),
    "LoRA, checkpointing": (283, 297),
}
STORED_BYTES = {1: 6.0, 16: 7.625}


@pytest.mark.parametrize("mode", STORED)
def test_a_private_layer_launches_no_more_than_before(mode):
    """More launches than stored, by 5 %, is an error; so are much fewer, since the stored figure would hide a rise."""
    row = benchmark.launches(mode)
    plain, private = STORED[mode]
    assert row.layer[PLAIN] == pytest.approx(plain, rel=0.05), "another release of transformers? Store its figure"
    ratio = private / plain
    assert 0.95 * ratio < row.ratio < 1.05 * ratio, f"{mode}: {row.layer}"
    assert sum(row.operations.values()) == row.layer[OURS] - row.layer[PLAIN]
    assert row.whole[OURS] - row.whole[PLAIN] > 14 * (row.layer[OURS] - row.layer[PLAIN])


@pytest.mark.parametrize("microbatches", STORED_BYTES)
def test_the_sums_move_no_more_bytes_than_before(microbatches):
    """The same for the memory traffic of the clipped sums, for each entry of a matrix."""
    stored = STORED_BYTES[microbatches]
    assert 0.95 * stored < benchmark.sum_bytes(microbatches) < 1.05 * stored


def test_views_and_allocations_are_no_launches():
    """A known piece of work: a product, two elementwise operations in place, a sum, and reading it."""
    x = torch.ones(4, 4)
    with benchmark.Counting(frozenset({16})) as counting:
        y = torch.empty(4, 4).T
        y[:2].zero_()
        (x @ x).mul_(2).sum().item()
    found = counting.found
    assert dict(found.operations) == {"zero_": 1, "mm": 1, "mul_": 1, "sum": 1, "_local_scalar_dense": 1}
    assert found.total == 5
    # mm reads two matrices and writes one, mul_ reads and writes one, sum reads one; half of a matrix is not counted.
    assert found.bytes == 6 * x.nbytes


@pytest.mark.deep
def test_the_command_prints_the_table_and_writes_the_figures(tmp_path, capsys):
    """One mode."""
    path = tmp_path / "launches.json"
    benchmark.main(["--modes", "LoRA", "--operations", "--json", str(path)])
    report = json.loads(path.read_text())
    assert set(report["launches"]) == {"LoRA"}
    assert "| LoRA | 203 |" in capsys.readouterr().out


def test_a_norm_of_garbage_is_an_error():
    """Rows whose norm is not finite are left out of the sums, and the count would be too small."""
    step = benchmark.Step(torch.nn.Linear(2, 2))
    step.norms = torch.tensor([1.0, float("nan")])
    with pytest.raises(RuntimeError, match="partial"):
        benchmark._require_finite(step)

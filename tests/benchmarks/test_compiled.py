"""benchmarks/compiled.py: a cell holds the errors of what ran, and one that is refused says why."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import compiled as benchmark
from tests.tiers import deep

LLAMA = benchmark.Training("llama", "full")


def cell(**changes):
    return benchmark.Cell(LLAMA, "eager", "none", "ddp", **changes)


@deep
@pytest.mark.parametrize("engine", benchmark.ENGINES)
def test_a_sum_is_that_of_the_loop(tmp_path, engine):
    """Eager, on each engine: the table's figures are errors of rounding."""
    path = tmp_path / "compiled.json"
    ways = ["--models=llama", "--trained", "LoRA", "--modes=eager", "--checkpointing=none", "--graphs=no"]
    benchmark.main([*ways, f"--engines={engine}", f"--json={path}"])
    (found,) = json.loads(path.read_text())["cells"]
    assert 0 < found["norm_error"] < 2e-6 and 0 < found["sum_error"] < 2e-6, found


def test_processes_are_joined_by_the_worst_of_them():
    """An error of one process is not hidden by another process."""
    joined = benchmark._joined((cell(norm_error=1e-7, sum_error=3e-7), cell(norm_error=2e-7, sum_error=1e-7)))
    assert (joined.norm_error, joined.sum_error) == (2e-7, 3e-7)
    joined = benchmark._joined((cell(norm_error=1e-7, sum_error=3e-7), cell(refused="a reason")))
    assert joined.refused == "a reason" and joined.norm_error == 1e-7
    broken = benchmark._joined((cell(norm_error=1e-7, sum_error=3e-7), cell(norm_error=float("nan"), sum_error=1e-7)))
    assert "nan" in benchmark.errors_table([broken])


def test_reasons_are_below_the_table_once():
    """Of refused cells, and of blocks that stay eager."""
    graphs = [benchmark.Graphs(LLAMA, (3, 0), (4, 0), {"layers.0": "a hook"})]
    cells = [cell(refused="no such engine"), cell(norm_error=1e-7, sum_error=2e-7, eager={"layers.0": "a hook"})]
    text = f"{benchmark.errors_table(cells)}\n{benchmark.graphs_table(graphs)}"
    assert "| - [1] | 2.0e-07 [2] |" in text and text.count("no such engine") == 1
    assert "| 3 | 0 | 4 | 0 | layers.0: a hook |" in text


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_quantised_base_of_the_loop_has_the_rounded_values(name):
    """The loop's model computes what the quantised one computes, apart from rounding in float32."""
    pytest.importorskip("bitsandbytes")
    model, wide = benchmark.Training(name, "QLoRA").build()
    ids = torch.randint(4, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits.double(), wide(input_ids=ids).logits, rtol=0, atol=1e-5)

"""benchmarks/compiled.py: the compiled model runs the same step, and the private one says why it does not take it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

from tests.benchmarks.material import program

benchmark = program("compiled")

TINY = ["--hidden=32", "--layers=1", "--vocab=97", "--heads=2", "--batch=2", "--tokens=8", "--rounds=1", "--warmup=1"]


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_command_line_prints_table_and_refusal(tmp_path, capsys):
    """Three steps with their times, and the clipper's own words."""
    path = tmp_path / "compiled.json"
    try:
        benchmark.main([*TINY, "--device=cpu", "--json", str(path)])
    except RuntimeError as error:
        if "at::vec" not in str(error):
            raise
        pytest.skip("PyTorch writes code that no compiler takes under this ATEN_CPU_CAPABILITY")
    report = json.loads(path.read_text())
    assert list(report["methods"]) == [benchmark.PLAIN, benchmark.COMPILED, benchmark.OURS]
    assert report["methods"][benchmark.PLAIN]["time_ratio"] == 1
    assert "was compiled with torch.compile" in report["refusal"]
    assert report["refusal"] in capsys.readouterr().out


def test_a_model_that_is_taken_is_to_be_measured():
    """If the clipper takes compiled models one day, the page must not say that it refuses them."""
    with pytest.raises(RuntimeError, match="compiled model"):
        benchmark.refusal(nn.Sequential(nn.Linear(2, 2)))
    assert "before compilation" in benchmark.refusal(torch.compile(nn.Sequential(nn.Linear(2, 2))))

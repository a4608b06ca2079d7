"""benchmarks/kernel_times.py: its counts and errors are correct, and it measures no time where time is meaningless."""

from __future__ import annotations

import json

import pytest
import torch

from dpllm.ghost import kernels, triton_launch
from tests.benchmarks.material import program

benchmark = program("kernel_times")

needs_triton = pytest.mark.skipif(not triton_launch.available(), reason="Triton is not installed, or not interpreted")
CPU = torch.device("cpu")


@pytest.mark.deep
@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures times, which the tests do not")
def test_every_kernel_is_reported_with_its_error_and_without_a_time(tmp_path, capsys):
    """Table and JSON hold each kernel; both forms agree with float64; the roofline is that of the rates given."""
    out = tmp_path / "kernels.json"
    benchmark.main(["--dtype=float32", "--peak-tflops=1", "--bandwidth=0.001", f"--json={out}"])
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert "no time was measured" in printed and not report["timed"]
    assert {case["kernel"] for case in report["cases"]} == set(benchmark.KERNELS)
    for case in report["cases"]:
        assert case["roofline_ms"] == pytest.approx(1e3 * max(case["flops"] / 1e12, case["bytes"] / 1e9))
        for form in ("fused", "plain"):
            assert case[form]["error"] < 1e-5 and "median_ms" not in case[form]
            assert (case[form]["slack_used"] is not None) == (case["kernel"] == "gram")


@needs_triton
def test_an_error_shows():
    """A form that is off by a percent is reported as such, and a norm that is too small as slack used."""
    case = benchmark.gram_case((2, 5, 4, (3,)), torch.float32, CPU)
    sq_norm, mass = case.plain()
    off = benchmark.Case(**vars(case) | {"plain": lambda: (sq_norm * 0.99, mass)})
    figures = benchmark.errors(off, "plain")
    assert figures["error"] == pytest.approx(0.01, rel=1e-3)
    ratio = float((sq_norm / mass).max())
    assert figures["slack_used"] == pytest.approx(0.01 * ratio / kernels.rounding_slack(torch.float32), rel=1e-2)


@needs_triton
def test_operations_and_bytes_are_counted_from_the_shapes():
    """One triangle of the Gram matrices with its diagonal; each input read once."""
    gram = benchmark.gram_case((2, 5, 4, (3, 7)), torch.bfloat16, CPU)
    pairs = sum(1 for s in range(5) for t in range(s + 1))
    assert gram.flops == 2 * pairs * 2 * (4 + 3 + 7)
    assert gram.bytes == 2 * 2 * 5 * (4 + 3 + 7) + 2 * 2 * 4
    assert benchmark.instance_case((2, 5, 4, 3), torch.float32, CPU).flops == 2 * 2 * 5 * 4 * 3
    assert benchmark.lookup_case((2, 5, 4, 9), torch.float32, CPU).flops == 2 * 5 * 4


def test_a_known_gpu_has_its_rates_and_another_asks_for_them(monkeypatch):
    """The rates follow the dtype; without them no ratio is made up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert benchmark.device_rates(benchmark.parse_arguments([])) == (989.0, 4.8)
    assert benchmark.device_rates(benchmark.parse_arguments(["--dtype=float32"])) == (67.0, 4.8)
    assert benchmark.device_rates(benchmark.parse_arguments(["--peak-tflops=700"])) == (700.0, 4.8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    with pytest.raises(SystemExit, match="--peak-tflops"):
        benchmark.device_rates(benchmark.parse_arguments([]))
    assert benchmark.device_rates(benchmark.parse_arguments(["--peak-tflops=9", "--bandwidth=1"])) == (9.0, 1.0)

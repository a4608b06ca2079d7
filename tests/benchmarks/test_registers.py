"""benchmarks/registers.py: few programs are compiled for rows of any length, and none of them spills registers."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import children

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "registers.py"


def figures(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark in a process of its own: this one may use Triton's interpreter."""
    out = tmp_path / "registers.json"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    children.run([sys.executable, str(PROGRAM), f"--json={out}", *options], env=environment)
    return json.loads(out.read_text())


@pytest.mark.deep
def test_lengths_do_not_lead_to_compilations(tmp_path):
    """At most eight in full and eight with LoRA, for rows of 1 token, of multiples of 16 and of anything else."""
    found = figures(tmp_path, "--count", "--microbatches=30")["compilations"]
    assert found["full"].keys() >= {f"{name}_program" for name in ("gram", "run", "segment")}
    for mode in ("full", "LoRA"):
        assert sum(found[mode].values()) <= 8, found[mode]
    assert found["both"]["gram_program"] == 2
    assert found["both"]["run_program"] == 1


@pytest.mark.deep
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_no_program_spills_registers(tmp_path, capability):
    """On each generation of GPUs, with its tiles; and the products run on tensor cores."""
    programs = figures(tmp_path, "--microbatches=30", f"--capability={capability}")["programs"]
    assert {row["sm"] for row in programs} == {capability}
    for row in programs:
        assert row["spills"] == 0 and row["registers"] <= 255, row
        assert row["shared"] <= (227 if capability >= 90 else 99) * 1024, row
        assert bool(row["instructions"]) == (row["program"] in ("gram_program", "outer_program")), row

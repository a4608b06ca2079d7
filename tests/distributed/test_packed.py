"""Packed rows on every engine: one clipped sum."""

from __future__ import annotations

import pytest

from tests.distributed.setups import ENGINES
from tests.distributed.world import run
from tests.tiers import deep_case


@pytest.mark.parametrize("engine", [e if e == "fsdp2" else deep_case(e) for e in ENGINES])
def test_packed_rows_release_what_padded_ones_do_in_one_process(engine, tmp_path):
    """Full and LoRA, units of two rows, checkpointing, and a process with fewer microbatches than the other."""
    results = run(tmp_path, "tests.distributed.packed:errors", engine=engine)
    for result in results:
        assert max(result) < 2e-5, result

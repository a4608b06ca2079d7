"""Quantised bases on two processes: DDP gives the sum of one process, replicas that differ are refused."""

import numpy as np
import pytest

from tests.distributed.world import run
from tests.models.quantized import save_model
from tests.tiers import deep

pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
pytestmark = deep
OUTCOME = "tests.distributed.quantized:outcome"


def test_two_processes_give_the_sum_of_one_and_their_scales_are_compared(tmp_path):
    """Scales are neither parameters nor buffers; with others a process computes another function."""
    base = save_model(tmp_path / "base")
    (alone,) = run(tmp_path, OUTCOME, size=1, base=base, engine="single", other_scales=False)
    first, second = run(tmp_path, OUTCOME, base=base, engine="ddp", other_scales=False)
    assert first == second and not isinstance(first, str), first
    np.testing.assert_allclose(first, alone, rtol=0, atol=2e-6 * np.abs(alone).max())
    for found in run(tmp_path, OUTCOME, base=base, engine="ddp", other_scales=True):
        assert "DisagreementError" in found and "The processes hold different parameters" in found

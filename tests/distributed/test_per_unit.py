"""One unit at a time on replicas: the sums of ghost norms, one decision for all processes, one refusal."""

import pytest
import torch

from tests.distributed.world import run


@pytest.mark.deep
def test_replicas_that_run_one_unit_at_a_time_release_one_sum(tmp_path):
    """Also in a step without a unit, and in one in which a process has none."""
    results = run(tmp_path / "world", "tests.distributed.per_unit:everything", root=tmp_path)
    for one in results:
        for ghost, alone in zip(one["ghost"]["gradients"], one["per_unit"]["gradients"], strict=True):
            torch.testing.assert_close(alone, ghost, rtol=1e-5, atol=1e-7)
        assert one["per_unit"]["gradients"][0].norm() > 0 and one["per_unit"]["gradients"][1].norm() == 0
        assert (one["ghost"]["one unit"], one["per_unit"]["one unit"]) == (False, True)
        assert one["auto"]["one unit"] and len(one["auto"]["gradients"]) == 3
        assert one["freeze"]["frozen"] == ["pooler.weight", "pooler.bias"] and not one["freeze"]["one unit"]
        assert "No gradient reached 2 trainable parameter(s)" in one["unused"]["error"]
        assert "state" in one["state"]["error"] or "keeps" in one["state"]["error"]
    for name in ("per_unit", "auto"):
        for first, other in zip(results[0][name]["gradients"], results[1][name]["gradients"], strict=True):
            assert torch.equal(first, other)

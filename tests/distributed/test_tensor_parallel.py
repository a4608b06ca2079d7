"""A model that tensor parallelism divides over processes is refused by name, in every entry."""

from __future__ import annotations

from tests.distributed.world import run

BY_ACCELERATE = ("the Trainer", "wrapped")  # may be refused by accelerate or PyTorch before


def test_a_divided_model_is_refused(tmp_path):
    """A process sees a part of a unit's gradient only. Refused by the engine and by both clippers, in own loops too."""
    results = run(tmp_path, "tests.distributed.tensor:refusals", root=tmp_path)
    for result in results:
        assert len(result) == 9
        for name, error in result.items():
            assert error is not None, name
            if name not in BY_ACCELERATE:
                assert "The model is tensor-parallel" in error[1] and "--config fsdp2" in error[1], (name, error)

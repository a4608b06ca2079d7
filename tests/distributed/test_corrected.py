"""AdamW without the known noise in its second moment makes the same update on every engine, also from a checkpoint."""

from __future__ import annotations

import pytest

from tests.distributed.corrected import NUM_STEPS, outcome
from tests.distributed.world import run

pytestmark = pytest.mark.deep

ENGINES = [
    *(
        (engine, "float32", "low_passed")
        for engine in ("ddp", "fsdp2", "fsdp2-hybrid", "zero1", "zero2", "zero3", "zero3-offload")
    ),
    ("zero2", "bfloat16", "low_passed"),
    ("fsdp2", "float32", "corrected"),
    ("zero3", "float32", "corrected"),
]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids="-".join)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What both ranks found, by engine."""
    folder = tmp_path_factory.mktemp("corrected")
    ranks = run(folder, "tests.distributed.corrected:every_engine", fresh=True, engines=ENGINES)
    return lambda engine: [rank["-".join(engine)] for rank in ranks]


@pytest.fixture(scope="module")
def alone():
    """One process, whose formula `tests.training.test_corrected_adamw` compares with explicit sums."""
    return {kind: outcome("single", "float32", kind) for kind in ("low_passed", "corrected")}


@every_engine
def test_the_weights_are_those_of_one_process(engine, outcomes, alone):
    """Entry by entry, in whatever parts an engine holds the parameters; some entries are divided by the known noise."""
    alone = alone[engine[2]]
    assert 0.05 < alone["at Φ"] < 0.95
    for found in outcomes(engine):
        assert found["after"].keys() == alone["after"].keys() and found["dtypes"] == {"torch.float32"}
        assert found["progress"] == alone["progress"] and found["progress"]["taken"] == NUM_STEPS
        furthest = max(float((found["after"][name] - want).abs().max()) for name, want in alone["after"].items())
        moved = max(float((alone["before"][name] - want).abs().max()) for name, want in alone["after"].items())
        assert moved > 0.01 and furthest < (0.05 if engine[1] == "bfloat16" else 1e-5)


@pytest.mark.parametrize("engine", [one for one in ENGINES if one[0].startswith("fsdp2")], ids="-".join)
def test_shards_of_its_state_are_loaded_by_a_new_optimizer(engine, outcomes):
    """With the progress of the known noise; the weights stay as they are."""
    assert all(found["loaded"] for found in outcomes(engine))

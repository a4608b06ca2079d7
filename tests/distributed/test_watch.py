"""The watch on every engine: sound runs pass, and every way around the mechanism ends the run on every process."""

from __future__ import annotations

import pytest

from tests.distributed.setups import ENGINES
from tests.distributed.watching import WAYS
from tests.distributed.world import run

EXPECTED = {
    "statistic": "mlp.statistic.total changed during a private step",
    "unfrozen": "was unfrozen after the run was attached",
    "written": "changed between two private steps",
}
FOREIGN = {
    "ddp": "has a gradient from before the step",
    "fsdp2": "has a gradient from before the step",
    "zero1": "received a gradient from a backward pass that is not part of a private step",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One pair of processes for all engines: a start costs more than the steps."""
    folder = tmp_path_factory.mktemp("watch")
    return run(folder, "tests.distributed.watching:every_engine", engines=list(ENGINES))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sound_run_passes(engine, outcomes):
    """LoRA over frozen weights, which sharded engines gather and free in every pass."""
    assert [rank[engine]["sound"] for rank in outcomes] == [None, None]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "sound"])
def test_a_way_around_the_mechanism_is_refused_on_every_process(engine, way, outcomes):
    """A statistic in a buffer, frozen weights unfrozen or written, a backward pass of one's own."""
    expected = EXPECTED.get(way) or FOREIGN.get(engine, FOREIGN["zero1"])
    for rank in outcomes:
        assert rank[engine][way] is not None and expected in rank[engine][way]

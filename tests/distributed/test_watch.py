"""The watch on every engine: sound runs pass, and a way around the mechanism on one process ends the run on all."""

from __future__ import annotations

import pytest

from tests.distributed.world import run

WAYS = {
    "ddp": ["sound", "statistic", "unfrozen", "written", "touched", "foreign backward"],
    "fsdp2": ["sound", "statistic", "unfrozen", "written", "touched", "foreign backward"],
    "zero1": ["sound", "foreign backward"],
    "zero2": ["sound", "foreign backward"],
    "zero3": ["sound", "statistic", "unfrozen", "written", "foreign backward"],
}
EXPECTED = {
    "statistic": "layers.0.mlp.statistic.total changed during a private step",
    "unfrozen": "was unfrozen after the run was attached",
    "written": "changed between two private steps",
    "touched": "is not the one that the private step left",
}
FOREIGN = {"ddp": "has a gradient from before the step", "fsdp2": "has a gradient from before the step"}
FOREIGN_TO_DEEPSPEED = "received a gradient from a backward pass that is not part of a private step"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One pair of processes for all engines: a start costs more than the steps."""
    return run(tmp_path_factory.mktemp("watch"), "tests.distributed.watching:every_engine", ways=WAYS)


@pytest.mark.parametrize("engine", WAYS)
def test_a_sound_run_passes(engine, outcomes):
    """LoRA over frozen weights, which sharded engines gather and free in every pass."""
    assert [rank[engine]["sound"] for rank in outcomes] == [None, None]


@pytest.mark.parametrize(("engine", "way"), [(e, way) for e, ways in WAYS.items() for way in ways if way != "sound"])
def test_a_way_around_the_mechanism_on_one_process_is_refused_on_all(engine, way, outcomes):
    """A statistic in a buffer, frozen weights unfrozen or written, a touched gradient; nobody waits for the others."""
    expected = EXPECTED.get(way) or FOREIGN.get(engine, FOREIGN_TO_DEEPSPEED)
    first, second = (rank[engine][way] for rank in outcomes)
    assert first is not None and expected in first
    assert second == first

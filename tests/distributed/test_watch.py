"""The watch on every engine: sound runs pass, and a way around the mechanism on one process ends the run on all."""

from __future__ import annotations

import pytest

from tests.distributed.world import run
from tests.tiers import deep_case

QUICK = {
    "ddp": ["sound", "statistic", "unfrozen", "written", "touched", "foreign backward"],
    "fsdp2": ["sound", "foreign backward"],
    "zero2": ["foreign backward"],
    "zero3": ["sound", "written"],
}
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
    "touched": "changed after the private step",
}
FOREIGN = {"ddp": "has a gradient from before the step", "fsdp2": "has a gradient from before the step"}
FOREIGN_TO_DEEPSPEED = "received a gradient from a backward pass that is not part of a private step"


REST = {engine: [way for way in ways if way not in QUICK.get(engine, [])] for engine, ways in WAYS.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank found, by engine and way; one pair of processes for many of them."""
    known: dict[bool, list] = {}

    def of(engine, way):
        rest = way in REST[engine]
        if rest not in known:
            folder, ways = tmp_path_factory.mktemp("watch"), REST if rest else QUICK
            known[rest] = run(folder, "tests.distributed.watching:every_engine", fresh=rest, ways=ways)
        return [rank[engine][way] for rank in known[rest]]

    return of


@pytest.mark.parametrize("engine", [deep_case(e) if "sound" in REST[e] else e for e in WAYS])
def test_a_sound_run_passes(engine, outcomes):
    """LoRA over frozen weights, which sharded engines gather and free in every pass."""
    assert outcomes(engine, "sound") == [None, None]


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        deep_case(engine, way) if way in REST[engine] else (engine, way)
        for engine, ways in WAYS.items()
        for way in ways
        if way != "sound"
    ],
)
def test_a_way_around_the_mechanism_on_one_process_is_refused_on_all(engine, way, outcomes):
    """A statistic in a buffer, frozen weights unfrozen or written, a touched gradient; nobody waits for the others."""
    expected = EXPECTED.get(way) or FOREIGN.get(engine, FOREIGN_TO_DEEPSPEED)
    first, second = outcomes(engine, way)
    assert first is not None and expected in first
    if second != first:  # found on one process; the other one names it
        assert second is not None and expected in second
        assert [one.startswith("OtherProcessError: rank ") for one in (first, second)].count(True) == 1

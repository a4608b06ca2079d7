"""A run goes on with every other engine, and with another number of processes, as if it had never stopped."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from dpllm.engines.saved_state import CONFIGS
from tests.distributed.resuming import MOMENTS, Job, Part
from tests.distributed.world import run
from tests.tiers import deep_case

PARTS = "tests.distributed.resuming:parts"
# Each pair of neighbours is a change of engine, and most also of the number of processes.
WAY = (("single", 1), ("zero2", 2), ("fsdp2", 2), ("zero3", 1), ("ddp", 2), ("zero1", 2))


def apart(left, right):
    """Distance over length."""
    return float((left - right).norm() / right.norm())


def check_loaded(loaded, saved):
    """What is loaded is what was saved: weights entry by entry, moments, counts, rates, and what is not trained."""
    assert torch.equal(loaded["parameters"], saved["parameters"])
    for name in MOMENTS:
        assert apart(loaded[name], saved[name]) < 1e-7 and saved[name] > 0
    assert loaded["steps"] == saved["steps"] and len(saved["steps"]) == 1
    assert loaded["rates"] == saved["rates"] and loaded["decays"] == saved["decays"]
    assert ("frozen" in loaded) == ("frozen" in saved)
    assert "frozen" not in saved or torch.equal(loaded["frozen"], saved["frozen"])


@pytest.mark.parametrize(
    "job",
    [
        functools.partial(Job, mode="partly", average=True),
        deep_case(functools.partial(Job, mode="lora", optim_args="second_moment=low_passed")),
        deep_case(functools.partial(Job, average=True)),
    ],
    ids=["partly", "lora", "full"],
)
def test_a_run_goes_from_engine_to_engine_and_ends_as_one_that_did_not_stop(tmp_path, job):
    """Each engine takes one step, from the checkpoint of the one before it. `verify` finds nothing wrong."""
    (whole,) = run(tmp_path / "processes", PARTS, size=1, parts=[Part(job("single"), tmp_path / "whole", len(WAY))])[0]
    before = None
    for step, (engine, size) in enumerate(WAY, 1):
        source = tmp_path / f"run-{step - 1}" if before else None
        part = Part(job(engine), tmp_path / f"run-{step}", step, source, step - 1)
        (found,) = run(tmp_path / f"processes-{step}", PARTS, size=size, parts=[part])[0]
        if before:
            check_loaded(found["loaded"], before[step - 1])
            moved = apart(before[step - 1]["parameters"], whole[step]["parameters"])
            assert moved > 1e-4
        assert apart(found[step]["parameters"], whole[step]["parameters"]) < 1e-6
        assert found[step]["rates"] == whole[step]["rates"]
        assert found[step].get("average") == whole[step].get("average")
        assert found["wrong"] == [] and set(found["counted"]) == {float(step)} and found["charged"] == step
        before = found


def test_float32_masters_are_not_rounded_to_bfloat16_in_silence(tmp_path):
    """FSDP2 and DeepSpeed train float32 weights under bfloat16; one process would round what they have learned."""
    job = functools.partial(Job, mode="lora", dtype="bfloat16")
    folders = {engine: tmp_path / engine for engine in ("zero2", "fsdp2", "single")}
    (saved,) = run(tmp_path / "processes", PARTS, parts=[Part(job("zero2"), folders["zero2"], 1)])[0]
    part = Part(job("fsdp2"), folders["fsdp2"], 2, folders["zero2"], 1)
    (loaded,) = run(tmp_path / "processes-fsdp2", PARTS, parts=[part])[0]
    assert isinstance(loaded, dict), loaded
    check_loaded(loaded["loaded"], saved[1])
    part = Part(job("single"), folders["single"], 2, folders["fsdp2"], 2)
    (refused,) = run(tmp_path / "processes-single", PARTS, size=1, parts=[part])[0]
    assert "CheckpointError" in refused and "--config fsdp2" in refused and "bfloat16" in refused


def test_a_run_that_is_killed_before_its_first_checkpoint_goes_on_from_its_start(tmp_path):
    """On another engine: an adapter's random weights exist nowhere else. Nothing but lost steps is charged twice."""
    job = functools.partial(Job, mode="lora", dtype="bfloat16")
    part = Part(job("zero3"), tmp_path / "zero3", 1, save_steps=2)
    (before,) = run(tmp_path / "processes", PARTS, parts=[part])[0]
    part = Part(job("fsdp2"), tmp_path / "fsdp2", 2, tmp_path / "zero3", 0, save_steps=2)
    (found,) = run(tmp_path / "processes-fsdp2", PARTS, parts=[part])[0]
    assert torch.equal(found["start"]["parameters"], before["start"]["parameters"])
    assert found["charged"] == 3 and set(found["counted"]) == {2.0} and found["wrong"] == []
    assert sorted(path.name for path in (tmp_path / "fsdp2").glob("checkpoint-*")) == ["checkpoint-2"]


# ------------------------------------------------------------------------------------------------ every pair, deep


def sizes(source, target, same):
    """The numbers of processes of a cell: the same if both engines allow it, or others."""
    if same:
        number = 1 if "single" in (source, target) else 2
        return tuple(2 if engine == "ddp" else number for engine in (source, target))
    first = 1 if source == "single" else 2
    return first, {"single": 1, "ddp": 3}.get(target, 3 - first)


CELLS = [
    (source, target, same)
    for source, target, same in itertools.product(CONFIGS, CONFIGS, (True, False))
    if same or sizes(source, target, False) != sizes(source, target, True)
]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The uninterrupted runs, and the result of every cell: what each engine loads is loaded in one start."""
    folder = tmp_path_factory.mktemp("grid")
    whole, found = {}, {}
    for source, size in sorted({(source, sizes(source, target, same)[0]) for source, target, same in CELLS}):
        part = Part(Job(source), folder / f"{source}-{size}", 3)
        (whole[source, size],) = run(folder / f"from-{source}-{size}", PARTS, size=size, parts=[part])[0]
    for target, size in sorted({(target, sizes(source, target, same)[1]) for source, target, same in CELLS}):
        cells = [cell for cell in CELLS if cell[1] == target and sizes(*cell)[1] == size]
        parts = []
        for source, _, same in cells:
            name = f"{source}-{sizes(source, target, same)[0]}"
            parts.append(Part(Job(target), folder / f"{name}-to-{target}-{size}", 2, folder / name, 1))
        results = run(folder / f"to-{target}-{size}", PARTS, size=size, parts=parts)[0]
        found |= dict(zip(cells, results, strict=True))
    return whole, found


@pytest.mark.deep
@pytest.mark.parametrize(("source", "target", "same"), CELLS)
def test_every_pair_of_engines(grid, source, target, same):
    """Six engines by six, on as many processes and on others."""
    whole, found = grid[0][source, sizes(source, target, same)[0]], grid[1][source, target, same]
    check_loaded(found["loaded"], whole[1])
    assert apart(found[2]["parameters"], whole[2]["parameters"]) < 1e-6 and found[2]["rates"] == whole[2]["rates"]
    assert found["wrong"] == [] and set(found["counted"]) == {2.0} and found["charged"] == 4

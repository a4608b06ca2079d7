"""A DeepSpeed run goes on with another number of processes as if it had never stopped."""

from __future__ import annotations

import pytest
import torch

from dpllm.engines import EngineError
from dpllm.engines.deepspeed_checkpoint import UNIVERSAL_FOLDER, layout_of, prepare_to_load
from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import MANIFEST_FILE, STAGING_FOLDER, verify
from tests.distributed.resuming import MOMENTS, Job
from tests.distributed.world import run

# Every optimizer class of DeepSpeed's stages, both precisions, full and LoRA, and parameters that are not trained.
JOBS = [
    Job("zero1", dtype="bfloat16"),
    Job("zero2", mode="lora"),
    Job("zero2", mode="partly", dtype="bfloat16"),
    Job("zero3", mode="partly"),
    Job("zero3", mode="lora", dtype="bfloat16"),
    Job("zero2", optim_args="second_moment=low_passed"),
    Job("zero3", mode="lora", optim_args="second_moment=corrected"),
]
# Train on two processes to step 3; a copy from step 1 to 2 on one; a copy of that from step 2 to 3 on two.
PARTS = (("whole", None, 0, 3, 2), ("one", "whole", 1, 2, 1), ("two", "one", 2, 3, 2))
each_job = pytest.mark.parametrize("number", range(len(JOBS)), ids=[str(job) for job in JOBS])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of all jobs, each in its own interpreters."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, resumed(folder, JOBS, PARTS, fresh=True)


def resumed(folder, jobs, parts, fresh=False):
    """Return the results of each part, of its first process."""
    results = {}
    for part, source, begin, stop, size in parts:
        results[part] = run(
            folder / f"processes-{part}",
            "tests.distributed.resuming:parts",
            size=size,
            fresh=fresh,
            jobs=jobs,
            runs=folder,
            source=source,
            begin=begin,
            part=part,
            stop=stop,
        )[0]
    return results


def apart(left, right):
    """Distance over length."""
    return float((left - right).norm() / right.norm())


def check(job, whole, one, *two):
    """What is loaded, the training after each change, and the charges, of which lost steps stay.

    Master parameters entry by entry, and the moments' norms, are those of the moment of saving. With every unit in
    every step and no noise, the parameters become those of the run that was not stopped.
    """
    for loaded, saved in ((one["loaded"], whole[1]), *((part["loaded"], one[2]) for part in two)):
        assert torch.equal(loaded["parameters"], saved["parameters"])
        for name in MOMENTS:
            assert apart(loaded[name], saved[name]) < 1e-7 and saved[name] > 0
    moved = apart(whole[1]["parameters"], whole[3]["parameters"])
    after = enumerate((one, *two), 2)
    differences = [apart(part[step]["parameters"], whole[step]["parameters"]) for step, part in after]
    rounding = 1e-6 if job.dtype == "float32" else 1e-3  # whose course in bfloat16 depends on the processes
    assert moved > 1e-2 and max(differences) < rounding
    assert all(set(part["counted"]) == {float(step)} for step, part in enumerate((one, *two), 2))
    assert [part["charged"] for part in (whole, one, *two)] == [3, 4, 5][: 2 + len(two)]


def test_a_run_of_two_processes_goes_on_with_one(tmp_path):
    """One job and change of those below."""
    job = Job("zero3", mode="partly")
    check(job, *(results[0] for results in resumed(tmp_path, [job], PARTS[:2]).values()))


@pytest.mark.deep
@each_job
def test_a_run_goes_on_with_one_process_and_with_two_again(runs, number):
    """See `check`."""
    check(JOBS[number], *(runs[1][part][number] for part in ("whole", "one", "two")))


@pytest.mark.deep
def test_a_conversion_is_used_again_and_made_anew_where_it_is_torn(runs):
    """An incomplete file in the checkpoint's folder is not used; the checkpoint itself stays complete."""
    checkpoint = runs[0] / "one" / str(JOBS[0]) / "checkpoint-1"
    manifest, config = checkpoint / UNIVERSAL_FOLDER / MANIFEST_FILE, {"zero_optimization": {"stage": 1}}
    made = manifest.stat().st_mtime_ns
    prepare_to_load(checkpoint, config, Processes())
    assert config["checkpoint"] == {"load_universal": True} and manifest.stat().st_mtime_ns == made
    torn = checkpoint / UNIVERSAL_FOLDER / "zero" / "optimizer_state.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    left_behind = checkpoint / STAGING_FOLDER / f"{UNIVERSAL_FOLDER}-0"
    left_behind.mkdir(parents=True)
    prepare_to_load(checkpoint, config, Processes())
    verify(checkpoint / UNIVERSAL_FOLDER)
    verify(checkpoint)
    assert manifest.stat().st_mtime_ns > made and not left_behind.parent.exists()


@pytest.mark.deep
def test_the_same_number_of_processes_loads_what_deepspeed_saved(runs):
    """No conversion where none is needed, also when one is there or the configuration asks for it."""
    checkpoint = runs[0] / "one" / str(JOBS[0]) / "checkpoint-2"
    assert layout_of(checkpoint).num_processes == 1
    config = {"zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": True}}
    prepare_to_load(checkpoint, config, Processes())
    assert config["checkpoint"] == {"load_universal": False} and not (checkpoint / UNIVERSAL_FOLDER).exists()


def made_by_two(folder, model="mp_rank_00_model_states.pt"):
    """Files named like those of a checkpoint of two processes, of which none can be read."""
    shards = folder / "global_step2"
    shards.mkdir(parents=True)
    (folder / "latest").write_text(shards.name)
    for name in (model, *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))):
        (shards / name).write_bytes(b"torn")
    return folder


def test_a_conversion_that_fails_names_the_number_of_processes_to_resume_with(tmp_path):
    """The message has DeepSpeed's error, the room on the disk, and a remedy; no incomplete file is left."""
    checkpoint = made_by_two(tmp_path / "checkpoint-2")
    with pytest.raises(EngineError, match="ds_to_universal"):
        prepare_to_load(checkpoint, {"zero_optimization": {"stage": 2}}, Processes())
    assert sorted(path.name for path in checkpoint.iterdir()) == ["global_step2", "latest"]


@pytest.mark.parametrize(
    ("model", "stage", "message"),
    [
        ("mp_rank_00_model_states.pt", 3, "made with ZeRO-1 or -2, and this run uses ZeRO-3"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", 2, "made with ZeRO-3, and this run uses ZeRO-2"),
    ],
)
def test_another_way_of_sharding_is_refused(tmp_path, model, stage, message):
    """Whole and divided parameters are saved differently."""
    with pytest.raises(EngineError, match=message):
        prepare_to_load(made_by_two(tmp_path, model), {"zero_optimization": {"stage": stage}}, Processes())


def test_a_checkpoint_of_another_engine_is_refused(tmp_path):
    """Named, before anything is started."""
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(EngineError, match="DeepSpeed optimizer"):
        prepare_to_load(tmp_path, {"zero_optimization": {"stage": 2}}, Processes())

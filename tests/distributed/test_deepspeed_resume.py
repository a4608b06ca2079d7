"""A DeepSpeed run goes on with another number of processes as if it had never stopped."""

from __future__ import annotations

import pytest
import torch

from dpllm.engines import EngineError
from dpllm.engines.saved_state import ZeroState, divides_parameters, is_zero_checkpoint
from tests.distributed.resuming import Job, Part
from tests.distributed.test_resume_matrix import PARTS, apart, check_loaded
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
STEPS = (("whole", None, 0, 3, 2), ("one", "whole", 1, 2, 1), ("two", "one", 2, 3, 2))
each_job = pytest.mark.parametrize("number", range(len(JOBS)), ids=[str(job) for job in JOBS])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs of all jobs, each in its own interpreters."""
    return resumed(tmp_path_factory.mktemp("runs"), JOBS, STEPS, fresh=True)


def resumed(folder, jobs, steps, fresh=False):
    """Return the results of each part, of its first process."""
    results = {}
    for part, source, begin, stop, size in steps:
        parts = [
            Part(job, folder / part / str(job), stop, folder / source / str(job) if source else None, begin)
            for job in jobs
        ]
        results[part] = run(folder / f"processes-{part}", PARTS, size=size, fresh=fresh, parts=parts)[0]
    return results


def check(job, whole, one, *two):
    """What is loaded, the training after each change, and the charges, of which lost steps stay.

    Master parameters entry by entry, and the moments' norms, are those of the moment of saving. With every unit in
    every step and no noise, the parameters become those of the run that was not stopped.
    """
    for loaded, saved in ((one["loaded"], whole[1]), *((part["loaded"], one[2]) for part in two)):
        check_loaded(loaded, saved)
    moved = apart(whole[1]["parameters"], whole[3]["parameters"])
    after = enumerate((one, *two), 2)
    differences = [apart(part[step]["parameters"], whole[step]["parameters"]) for step, part in after]
    rounding = 1e-6 if job.dtype == "float32" else 1e-3  # whose course in bfloat16 depends on the processes
    assert moved > 1e-2 and max(differences) < rounding
    assert all(set(part["counted"]) == {float(step)} for step, part in enumerate((one, *two), 2))
    assert [part["charged"] for part in (whole, one, *two)] == [3, 4, 5][: 2 + len(two)]
    assert [part["wrong"] for part in (whole, one, *two)] == [[]] * (2 + len(two))


def test_a_run_of_two_processes_goes_on_with_one(tmp_path):
    """One job and change of those below."""
    job = Job("zero3", mode="partly")
    check(job, *(results[0] for results in resumed(tmp_path, [job], STEPS[:2]).values()))


@pytest.mark.deep
@each_job
def test_a_run_goes_on_with_one_process_and_with_two_again(runs, number):
    """See `check`."""
    check(JOBS[number], *(runs[part][number] for part in ("whole", "one", "two")))


def of_two(folder, stage, entries=5):
    """A checkpoint of two processes with one parameter, as DeepSpeed lays it out; the last part is padded."""
    from deepspeed.utils.tensor_fragment import fragment_address

    shards = folder / "global_step2"
    shards.mkdir(parents=True)
    (folder / "latest").write_text(shards.name)
    values = torch.arange(6.0)
    for rank in range(2):
        part = values[3 * rank : 3 * rank + 3].clone()
        states = {"state": {0: {"exp_avg": -part, "step": torch.tensor(2.0)}}}
        states["param_groups"] = [{"params": [0], "lr": 0.5}]
        held = min(3, entries - 3 * rank)
        optimizer = {"optimizer_state_dict": states, "fp32_flat_groups": [part]}
        if stage < 3:
            mapping = [{"w": fragment_address(numel=held, start=0)}]
            optimizer = {"base_optimizer_state": states, "param_slice_mappings": mapping}
            optimizer["single_partition_of_fp32_groups"] = [part]
        path = shards / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
        model = {"module": {"b": torch.ones(1)}, "param_shapes": [{"w": torch.Size([entries])}]}
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(model, shards / f"{name}_model_states.pt")
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_are_put_together_without_padding(tmp_path, stage):
    """Weights, moments, counts, options and buffers."""
    state = ZeroState(of_two(tmp_path, stage))
    assert is_zero_checkpoint(tmp_path) and divides_parameters(tmp_path) == (stage == 3)
    assert state.groups == [(["w"], {"lr": 0.5})]
    assert torch.equal(state.weight("w"), torch.arange(5.0)) and state.dtype("w") == torch.float32
    assert torch.equal(state.state("w")["exp_avg"], -torch.arange(5.0)) and float(state.state("w")["step"]) == 2
    assert torch.equal(state.weight("b"), torch.ones(1)) and state.weight("other") is None


@pytest.mark.parametrize("stage", [2, 3])
def test_files_that_lack_entries_are_refused(tmp_path, stage):
    """A parameter is never put together of fewer entries than it has; an unknown layout is named."""
    of_two(tmp_path, stage)
    (tmp_path / "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(EngineError, match="number of processes"):
        ZeroState(tmp_path).weight("w")


def test_an_unknown_layout_is_refused(tmp_path):
    """Of another version of DeepSpeed."""
    of_two(tmp_path, 2)
    torch.save({"optimizer_state_dict": {}}, tmp_path / "global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(EngineError, match="KeyError"):
        ZeroState(tmp_path)

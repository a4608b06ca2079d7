"""A crash loses steps and not the run: it goes on from its start, says what was lost, and releases what it states."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from dpllm.privacy.checkpoints import CheckpointError, latest_whole, verify
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.run_folder import lost_steps
from dpllm.report.verify import verify as verify_report
from dpllm.training.resume import run_so_far
from dpllm.training.trainer import WhenAttached
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_trainer import At, arguments, privacy, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")


class Crash(RuntimeError):
    """As if the process had died."""


def crash():
    raise Crash


def adapted(seed):
    """A model with an adapter, whose first weights are random."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config())
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def adapter_of(run):
    return torch.cat([p.detach().flatten() for name, p in run.model.named_parameters() if "lora_A" in name])


def saving(folder, every, **changes):
    return arguments(folder, save_strategy="steps", save_steps=every, **changes)


def contents(folder):
    return read_ledger(folder / LEDGER_FILE)


def html(folder):
    return (folder / "privacy_report.html").read_text(encoding="utf-8")


def failed(folder, after, every, **more):
    """A run of 4 steps that ended after a step."""
    run = trainer(folder, args=saving(folder, every), callbacks=[At(after, crash)], **more)
    with pytest.raises(Crash):
        run.train(resume_from_checkpoint="auto")
    return run


def test_a_run_that_crashed_before_its_first_checkpoint_goes_on_from_its_start(tmp_path):
    """With its own random adapter, the rest of its charged steps, and a report that states what was lost."""
    first = failed(tmp_path, 2, 3, model=adapted(seed=1))
    found, passed_over = latest_whole(tmp_path)
    assert found.name == "checkpoint-0" and not passed_over
    other, start = adapted(seed=2), []
    again = trainer(tmp_path, other, args=saving(tmp_path, 3))
    again.add_callback(At(1, lambda: start.append(adapter_of(again).clone()), end=False))
    again.train(resume_from_checkpoint="auto")
    again.save_model()
    assert contents(tmp_path).num_steps == 4 and lost_steps(contents(tmp_path)) == 2 and again.state.global_step == 2
    begun = trainer(tmp_path / "other", adapted(seed=1))
    assert torch.equal(start[0], adapter_of(begun)) and not torch.equal(start[0], adapter_of(first))
    assert verify_report(tmp_path).ok and "the released weights contain only 2" in html(tmp_path)


def test_the_start_is_kept_until_something_replaces_it(tmp_path):
    """A checkpoint does, or the model at the end; without checkpoints only a run that may be restarted has it."""
    seen = []
    run = trainer(tmp_path / "a", args=saving(tmp_path / "a", 2, save_total_limit=1))
    run.add_callback(At(2, lambda: seen.append(sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")))))
    run.add_callback(At(3, lambda: seen.append(sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")))))
    run.train()
    assert seen == [["checkpoint-0"], ["checkpoint-2"]]
    run = trainer(tmp_path / "b")
    run.train(resume_from_checkpoint="auto")
    verify(tmp_path / "b/checkpoint-0")
    run.save_model()
    assert not list((tmp_path / "b").glob("*checkpoint-*")) and verify_report(tmp_path / "b").ok
    trainer(tmp_path / "c").train()
    assert not list((tmp_path / "c").glob("checkpoint-*"))


def test_a_resume_without_a_step_left_releases_the_checkpoint_and_states_it(tmp_path):
    """The last save failed: all 4 steps are charged, and the weights of step 2 are what is left."""
    failed(tmp_path, 4, 2)
    shutil.rmtree(tmp_path / "checkpoint-4", ignore_errors=True)
    again = trainer(tmp_path, args=saving(tmp_path, 2))
    again.train(resume_from_checkpoint="auto")
    again.save_model()
    assert contents(tmp_path).num_steps == 4 and lost_steps(contents(tmp_path)) == 2 and again.state.global_step == 2
    assert verify_report(tmp_path).ok and "the released weights contain only 2" in html(tmp_path)


def test_the_plan_says_how_far_the_run_of_its_folder_has_come(tmp_path):
    """While it runs, after a crash that lost a step, and at its end; it reads, and changes nothing."""
    seen = []
    run = trainer(
        tmp_path, args=saving(tmp_path, 2), callbacks=[At(3, lambda: seen.append(run_so_far(tmp_path, run.plan)))]
    )
    run.add_callback(At(3, crash))
    assert run_so_far(tmp_path, run.plan) is None
    with pytest.raises(Crash):
        run.train(resume_from_checkpoint="auto")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    found = run_so_far(tmp_path, run.plan)
    assert (found.charged, found.lost, found.left) == (3, 1, 1) and "checkpoint-2" in found.words
    assert (seen[0].charged, seen[0].lost, seen[0].left) == (3, None, None)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    again = trainer(tmp_path, args=saving(tmp_path, 2))
    again.train(resume_from_checkpoint="auto")
    again.save_model()
    found = run_so_far(tmp_path, run.plan)
    assert (found.charged, found.lost, found.left) == (4, None, None) and "completed" in found.words
    (tmp_path / LEDGER_FILE).write_text("not a ledger", encoding="utf-8")
    assert run_so_far(tmp_path, run.plan).charged is None


def another_plan(folder):
    return trainer(folder.parent / "other", config=privacy(noise_multiplier=2.0)).plan


def copied(folder):
    shutil.copytree(folder, folder.parent / "copy")
    return folder.parent / "copy"


def cut(folder):
    """As restored from a copy of two steps ago."""
    path = folder / LEDGER_FILE
    lines = path.read_text().splitlines(keepends=True)
    steps = [number for number, line in enumerate(lines) if '"kind": "step"' in line]
    path.write_text("".join(lines[: steps[-2]]))
    return folder


@pytest.mark.parametrize("change", [copied, cut, None])
def test_the_plan_promises_no_resume_that_is_refused(change, tmp_path):
    """A copied folder, a ledger that lost steps, and the folder of a run with other settings."""
    run, folder, settings = failed(tmp_path / "run", 3, 2), tmp_path / "run", {}
    plan = run.plan
    if change is None:
        plan, settings = another_plan(folder), {"noise_multiplier": 2.0}
    else:
        folder = change(folder)
    found = run_so_far(folder, plan)
    assert found.lost is None and found.left is None and found.charged and "remain" not in found.words
    again = trainer(folder, args=saving(folder, 2), config=privacy(**settings))
    with pytest.raises(ValueError, match="privacy_ledger"):
        again.train(resume_from_checkpoint="auto")


@kills(
    "a run whose steps are all lost releases an untrained model",
    "dpllm/training/resume.py",
    "        refuse_empty_model(folder, checkpoint)\n",
    "",
)
def test_a_resume_that_could_only_release_the_start_is_refused(tmp_path):
    """All steps are charged, and no checkpoint holds one of them."""
    failed(tmp_path, 4, 9)
    before = (tmp_path / LEDGER_FILE).read_bytes()
    with pytest.raises(CheckpointError, match="untrained"):
        trainer(tmp_path, args=saving(tmp_path, 9)).train(resume_from_checkpoint="auto")
    assert (tmp_path / LEDGER_FILE).read_bytes() == before


def test_a_run_whose_settings_change_before_its_first_step_begins_again(tmp_path):
    """The start of the first attempt goes, since it belongs to another ledger."""
    run = trainer(tmp_path, args=saving(tmp_path, 2))
    run.add_callback(WhenAttached(crash))
    with pytest.raises(Crash):
        run.train()
    verify(tmp_path / "checkpoint-0")
    again = trainer(tmp_path, args=arguments(tmp_path, max_steps=2))
    again.train(resume_from_checkpoint=None)
    again.save_model()
    assert not (tmp_path / "checkpoint-0").exists() and verify_report(tmp_path).ok


@kills(
    "a checkpoint without an optimizer is continued as if it had one",
    "dpllm/engines/saved_state.py",
    "    if weights_only:\n        return Way.WEIGHTS\n",
    "    return Way.WEIGHTS\n",
)
def test_optimizer_and_schedule_are_never_begun_again_in_silence(tmp_path):
    """A checkpoint of weights only is refused, unless the run says that it continues weights only."""
    only = saving(tmp_path, 2, save_only_model=True)
    run = trainer(tmp_path, args=only, callbacks=[At(3, crash)])
    with pytest.raises(Crash):
        run.train()
    with pytest.raises(CheckpointError, match="save_only_model"):
        trainer(tmp_path, args=saving(tmp_path, 2)).train(resume_from_checkpoint=True)
    again = trainer(tmp_path, args=only)
    again.train(resume_from_checkpoint=True)
    assert contents(tmp_path).num_steps == 4 and again.state.global_step == 3

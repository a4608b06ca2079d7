"""One command starts and resumes a run, and does nothing for a completed one."""

import pytest

from dpllm.config import PrivacyConfig
from dpllm.privacy.checkpoints import CheckpointError, publish
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.training.resume import Restart, RunCompletedError, restart_of, to_go_on
from tests.training.test_run import plan_of
from tests.training.test_trainer import arguments, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")


def ledger(folder, steps=0, end=None, plan=None):
    """A ledger with some steps, as a run that crashed or ended leaves it."""
    folder.mkdir(exist_ok=True)
    plan = plan or plan_of()
    with Ledger.create(folder / LEDGER_FILE, plan) as made:
        for number in range(steps):
            made.append_step(number, plan.event)
        if end:
            made.append_end(end)


def checkpoint(folder, step):
    staging = folder / "_staging" / f"checkpoint-{step}"
    staging.mkdir(parents=True)
    (staging / "weights").write_bytes(b"w")
    publish(staging, folder / f"checkpoint-{step}")


def banded_plan(num_steps):
    """A plan of noise that is correlated over cycles of 4 steps."""
    noise = {"kind": "banded", "bands": 4}
    privacy = PrivacyConfig(epsilon=8.0, delta=1e-3, clip_norm=1.0, expected_batch_size=10, noise=noise)
    return make_plan(privacy, 200, num_steps)


def test_what_is_asked_for_by_name_is_taken_as_it_is(tmp_path):
    """Only "auto" looks at the folder."""
    assert restart_of(tmp_path, None) == restart_of(tmp_path, False) == Restart(False, False)
    assert restart_of(tmp_path, True) == restart_of(tmp_path, "true") == Restart(True, True)
    assert restart_of(tmp_path, "false") == Restart(False, False)
    assert restart_of(tmp_path, "runs/a/checkpoint-3") == Restart("runs/a/checkpoint-3", True)


def test_auto_starts_resumes_and_begins_again_where_no_step_was_charged(tmp_path):
    """A killed start, a stopped run, a folder that is not there yet."""
    assert restart_of(tmp_path / "new", "auto") == Restart(False, False)
    ledger(tmp_path / "a")
    assert restart_of(tmp_path / "a", "auto") == Restart(False, False)
    ledger(tmp_path / "b", 3, "interrupted")
    checkpoint(tmp_path / "b", 2)
    assert restart_of(tmp_path / "b", "auto") == Restart(True, True)


def test_auto_says_what_is_missing(tmp_path):
    """Steps without a checkpoint, a torn checkpoint, a checkpoint without a ledger."""
    ledger(tmp_path / "a", 3)
    with pytest.raises(CheckpointError, match=r"train\.save"):
        restart_of(tmp_path / "a", "auto")
    checkpoint(tmp_path / "a", 2)
    (tmp_path / "a/checkpoint-2/weights").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        restart_of(tmp_path / "a", "auto")
    (tmp_path / "b").mkdir()
    checkpoint(tmp_path / "b", 2)
    with pytest.raises(CheckpointError, match=f"holds checkpoint-2 but no {LEDGER_FILE}"):
        restart_of(tmp_path / "b", "auto")


def test_a_completed_run_is_left_alone(tmp_path):
    """Started again by a scheduler, it trains nothing, charges nothing, and its end stays its end."""
    first = trainer(tmp_path, args=arguments(tmp_path, max_steps=2))
    first.train(resume_from_checkpoint="auto")
    first.save_model()
    before = (tmp_path / LEDGER_FILE).read_bytes()
    with pytest.raises(RunCompletedError, match="2 steps"):
        trainer(tmp_path, args=arguments(tmp_path, max_steps=2)).train(resume_from_checkpoint="auto")
    assert (tmp_path / LEDGER_FILE).read_bytes() == before and read_ledger(tmp_path / LEDGER_FILE).end == "completed"


@pytest.mark.parametrize("end", ["completed", "stopped at the budget, after 3 of 9 steps"])
def test_a_run_that_ended_without_its_model_is_resumed_to_save_one(end, tmp_path):
    """A kill came between the end of the steps and the save; with a model, an older checkpoint would replace it."""
    ledger(tmp_path, 3, end)
    with pytest.raises(CheckpointError, match="charges 3 steps"):
        restart_of(tmp_path, "auto")
    checkpoint(tmp_path, 2)
    assert restart_of(tmp_path, "auto") == Restart(True, True)


def test_a_stopped_run_says_how_many_steps_a_resume_leaves_out(tmp_path):
    """Correlated noise begins again at a resume. With noise that is independent, or whose cycles of 4 steps the stop
    does not cut, all steps that are left follow."""
    banded, said = banded_plan(16), {}
    for name, plan, steps in (("cut", banded, 5), ("whole", banded, 8), ("independent", plan_of(), 2)):
        ledger(tmp_path / name, steps, plan=plan)
        said[name] = to_go_on(plan, read_ledger(tmp_path / name / LEDGER_FILE))
    command = ("to go on", "the same command with train.resume_from_checkpoint=auto")
    assert said["whole"] == said["independent"] == [command]
    assert said["cut"] == [
        command,
        (
            "it then takes",
            "8 private steps, not all 11 that were left: a resume begins new noise, and more steps would exceed ε",
        ),
    ]


def test_a_stopped_run_that_cannot_go_on_says_why(tmp_path):
    """A resume would cost more than the target ε: no further step of this plan fits."""
    plan = banded_plan(4)
    ledger(tmp_path, 1, plan=plan)
    ((name, words),) = to_go_on(plan, read_ledger(tmp_path / LEDGER_FILE))
    assert name == "to go on" and words.startswith("not possible: ") and "no further step stays within ε = 8" in words

"""Ways to an untrue ε that go through whole runs: `DPTrainer` trains, somebody changes the folder, and it is found.

The parts that find them have tests of their own; these use public names only, so they hold for any parts.
"""

import os
import shutil

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.privacy.budget import create_budget
from dpllm.privacy.ledger import read_ledger
from dpllm.report.verify import verify
from tests.training.test_trainer import arguments, privacy
from tests.training.test_trainer import small_trainer as trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

LEDGER, PLAN = "privacy_ledger.jsonl", "privacy_plan.json"
SAVING = {"save_strategy": "steps", "save_steps": 2}


def saving(folder, **changes):
    return arguments(folder, **{**SAVING, "max_steps": 6, **changes})


class Stop(TrainerCallback):
    """Ends a run after two steps, so that it can be resumed."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_save = state.global_step == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps with its model and the checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = trainer(folder, args=saving(folder))
    run.train()
    run.save_model()
    assert verify(folder).ok
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it to be changed."""
    return shutil.copytree(whole, tmp_path / "run")


def interrupted(folder, **more):
    """A run that ended after two of six steps, with a checkpoint."""
    trainer(folder, args=saving(folder), callbacks=[Stop()], **more).train()
    assert (folder / "checkpoint-2").is_dir()


def test_a_resume_from_another_runs_checkpoint_is_refused(whole, tmp_path):
    """Its weights have taken steps that this folder's ledger does not charge."""
    mine = tmp_path / "mine"
    interrupted(mine)
    with pytest.raises(ValueError, match=r"checkpoint-4 holds 4 steps, .*charges only 2|does not belong to"):
        trainer(mine, args=saving(mine)).train(resume_from_checkpoint=str(whole / "checkpoint-4"))
    assert read_ledger(mine / LEDGER).num_steps == 2


def test_a_ledger_that_was_restored_from_an_older_copy_is_refused(tmp_path):
    """In the same file: the checkpoint holds more steps than are charged then."""
    run = tmp_path / "run"
    trainer(run, args=saving(run, max_steps=6), callbacks=[Stop()]).train()
    older = (run / LEDGER).read_bytes()
    trainer(run, args=saving(run)).train(resume_from_checkpoint=True)
    (run / LEDGER).write_bytes(older)
    with pytest.raises(ValueError, match="older copy"):
        trainer(run, args=saving(run)).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("budgeted", "match"),
    [(False, "is a copy of the file that the run wrote"), (True, "the folder in which the run continued")],
    ids=["alone", "with a budget"],
)
def test_two_copies_of_a_folder_are_not_both_resumed(budgeted, match, tmp_path):
    """One plan of six steps would become ten that ran, and each report would state six."""
    config = privacy()
    if budgeted:
        file = tmp_path / "notes.json"
        create_budget(file, dataset="notes", epsilon=500, delta=1e-3, unit="sequence", num_units=64)
        config = privacy(dataset="notes", budget_file=str(file))
    one, other = tmp_path / "one", tmp_path / "other"
    interrupted(one, config=config)
    shutil.copytree(one, other)
    trainer(one, args=saving(one), config=config).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=match):
        trainer(other, args=saving(other), config=config).train(resume_from_checkpoint=True)
    assert read_ledger(other / LEDGER).num_steps == 2


def test_a_ledger_replaced_in_mid_run_stops_the_run(tmp_path):
    """As rsync and editors do it: under the same name, in another file."""

    class Replaces(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                shutil.copy(tmp_path / LEDGER, tmp_path / "new")
                os.replace(tmp_path / "new", tmp_path / LEDGER)

    with pytest.raises(ValueError, match="file during"):
        trainer(tmp_path, args=arguments(tmp_path), callbacks=[Replaces()]).train()


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_plan_that_was_changed_is_found_by_the_resume(change, tmp_path):
    """It is evidence for the model beside it."""
    run = tmp_path / "run"
    interrupted(run)
    if change == "edited":
        text = (run / PLAN).read_text()
        (run / PLAN).write_text(text.replace('"noise_multiplier": 1.0', '"noise_multiplier": 3.0'))
        assert (run / PLAN).read_text() != text
    else:
        (run / PLAN).unlink()
    with pytest.raises(ValueError, match=PLAN):
        trainer(run, args=saving(run)).train(resume_from_checkpoint=True)


def other_weights(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def more_weights(folder):
    torch.save({}, folder / "pytorch_model.bin")


def another_claim(folder):
    path = folder / "README.md"
    path.write_text(path.read_text() + "\nThis model satisfies ε = 0.01.\n")


def cut_checkpoint(folder):
    path = folder / "checkpoint-4" / LEDGER
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))


@pytest.mark.parametrize(
    "change", [other_weights, more_weights, another_claim, cut_checkpoint], ids=lambda f: f.__name__
)
def test_verify_finds_what_was_changed_in_a_released_folder(change, folder):
    """And passes before."""
    assert verify(folder).ok
    change(folder)
    assert not verify(folder).ok


def test_verify_finds_a_checkpoint_whose_ledger_was_cut_and_whose_report_was_made_again(folder):
    """Plan, ledger and report then agree with each other, and the weights with none of them; it has no card."""
    cut_checkpoint(folder)
    (folder / "checkpoint-4" / "README.md").unlink()
    CliRunner().invoke(app, ["report", "note", str(folder / "checkpoint-4"), "audience=all"])
    assert not verify(folder / "checkpoint-4").ok


def test_rows_of_one_length_without_their_record_are_an_open_point(tmp_path):
    """Blocks cut from joined documents are not records, and the report does not say that they are."""
    ids = [[5 + number % 50] * 32 for number in range(64)]
    run = trainer(tmp_path / "run", dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
    run.train()
    report = run.privacy_report()
    assert any("the same number of tokens" in str(point) for point in report["open_points"])
    assert "A record" not in report["definition"]["unit"]

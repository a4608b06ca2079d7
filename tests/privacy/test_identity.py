"""Tests of dpllm.privacy.run_folder: files that belong to a ledger, and files that do not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import PRETRAINED_FOLDER
from dpllm.engines.processes import Processes
from dpllm.privacy.budget import BudgetError, create_budget, read_budget
from dpllm.privacy.checkpoints import checkpoint_folder, prepare_staging, publish
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.run_folder import ADOPTED, check_checkpoint, is_finished, note_release, snapshot
from dpllm.report.verify import verify
from dpllm.training.shared_ledger import SharedLedger
from tests.engines.test_guard import plan_of
from tests.mutations import kills

PLAN = dataclasses.replace(plan_of(0.8), num_steps=10, dataset="mail")


def begin(folder: Path, steps: int, budget: Path | None = None, save: bool = True) -> None:
    """Leave behind a run of some steps that broke off, with a checkpoint of the last one."""
    ledger = SharedLedger.create(folder / LEDGER_FILE, PLAN, Processes(), budget_file=str(budget) if budget else None)
    go_on(ledger, folder, steps, save)


def go_on(ledger: SharedLedger, folder: Path, steps: int, save: bool = True) -> None:
    for _ in range(steps):
        ledger.append_step(ledger.num_steps, PLAN.event)
    if save:
        staging = prepare_staging(folder, ledger.num_steps)
        (staging / "trainer_state.json").write_text(json.dumps({"global_step": ledger.num_steps}))
        publish(staging, checkpoint_folder(folder, ledger.num_steps), ledger=ledger.mark().to_dict())
    ledger.close()


def resume(folder: Path, budget: Path | None = None) -> SharedLedger:
    return SharedLedger.open(folder / LEDGER_FILE, PLAN, Processes(), str(budget) if budget else None)


@kills(
    "a checkpoint's place in the ledger is not compared",
    "dpllm/privacy/ledger_reader.py",
    "    if steps_at(ledger, head.chain) == head.num_steps:\n",
    "    if True:\n",
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Its steps are not charged here, whether there are more of them or fewer."""
    begin(tmp_path / "a", 3)
    begin(tmp_path / "b", 5)
    check_checkpoint(tmp_path / "a" / LEDGER_FILE, tmp_path / "a" / "checkpoint-3")
    with pytest.raises(LedgerError, match="checkpoint-5"):
        check_checkpoint(tmp_path / "a" / LEDGER_FILE, tmp_path / "b" / "checkpoint-5")
    with pytest.raises(LedgerError, match="does not belong to"):
        check_checkpoint(tmp_path / "b" / LEDGER_FILE, tmp_path / "a" / "checkpoint-3")


def test_a_rewound_ledger_is_refused(tmp_path: Path) -> None:
    """Restored from an older copy into the same file, and then resumed: the checkpoint has more steps."""
    begin(tmp_path, 2)
    old = (tmp_path / LEDGER_FILE).read_bytes()
    go_on(resume(tmp_path), tmp_path, 4)
    (tmp_path / LEDGER_FILE).write_bytes(old)
    with pytest.raises(LedgerError, match="older copy"):
        check_checkpoint(tmp_path / LEDGER_FILE, tmp_path / "checkpoint-6")
    check_checkpoint(tmp_path / LEDGER_FILE, tmp_path / "checkpoint-2")


def test_weights_of_more_steps_than_their_ledger_charged_are_refused(tmp_path: Path) -> None:
    """Also under a manifest that fits."""
    begin(tmp_path, 2)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 4}')
    with pytest.raises(LedgerError, match="taken 4"):
        check_checkpoint(tmp_path / LEDGER_FILE, tmp_path / "checkpoint-2")


def test_a_checkpoint_that_names_no_ledger_is_refused(tmp_path: Path) -> None:
    """It may be of any run."""
    begin(tmp_path, 2)
    manifest = tmp_path / "checkpoint-2" / "checkpoint_manifest.json"
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != "ledger"}))
    with pytest.raises(LedgerError, match="ledger"):
        check_checkpoint(tmp_path / LEDGER_FILE, tmp_path / "checkpoint-2")


def test_two_forks_on_one_budget_count_once(tmp_path: Path) -> None:
    """Both copies are resumed: the second is refused, also when adopted, and the budget holds the steps that ran."""
    budget = create_budget(
        tmp_path / "mail.json", dataset="mail", epsilon=50.0, delta=PLAN.delta, unit=PLAN.unit, num_units=PLAN.num_units
    ).path
    begin(tmp_path / "a", 3, budget)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(LedgerError, match="is a copy of the file that the run wrote"):
        resume(tmp_path / "b", budget)
    go_on(resume(tmp_path / "a", budget), tmp_path / "a", 3)
    assert CliRunner().invoke(app, ["verify", "--adopt", str(tmp_path / "b")]).exit_code == 0
    assert read_ledger(tmp_path / "b" / LEDGER_FILE).notes.open_points == [ADOPTED]
    with pytest.raises(BudgetError, match="holds 6"):
        resume(tmp_path / "b", budget)
    ended = resume(tmp_path / "a", budget)
    for _ in range(4):
        ended.append_step(ended.num_steps, PLAN.event)
    ended.append_end("completed")
    assert [entry.num_steps for entry in read_budget(budget).entries] == [10]


def test_a_plan_that_was_edited_or_deleted_is_refused_at_resume(tmp_path: Path) -> None:
    """It is evidence for the model beside it."""
    begin(tmp_path, 1)
    dataclasses.replace(PLAN, num_steps=11).save(tmp_path / PLAN_FILE)
    with pytest.raises(LedgerError, match="is not the plan of this run"):
        resume(tmp_path)
    (tmp_path / PLAN_FILE).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        resume(tmp_path)
    assert len(read_ledger(tmp_path / LEDGER_FILE).runs) == 1


def test_a_run_goes_on_with_the_public_weights_that_it_began_with(tmp_path: Path) -> None:
    """They are named by hash when the run starts; others, or weights beside them, are refused and found by verify."""
    public = tmp_path / PRETRAINED_FOLDER
    (public / "checkpoint-1").mkdir(parents=True)
    (public / "model.safetensors").write_text("public")
    (public / "config.json").write_text("{}")
    (public / "checkpoint-1" / "model.safetensors").write_text("half way")
    begin(tmp_path, 1)
    resume(tmp_path).close()

    def compared() -> tuple[bool, str]:
        what = "the public weights are those that the run began with"
        return next((check.ok, check.detail) for check in verify(tmp_path).checks if check.what == what)

    assert compared() == (True, "2 files")
    (public / "model.safetensors").write_text("PUBLIC")
    with pytest.raises(LedgerError, match=r"public_pretrain/model\.safetensors"):
        resume(tmp_path)
    assert not compared()[0] and "public_pretrain/model.safetensors is not what was saved" in compared()[1]
    (public / "model.safetensors").write_text("public")
    (public / "adapter_model.bin").write_text("more")
    with pytest.raises(LedgerError, match=r"public_pretrain/adapter_model\.bin"):
        resume(tmp_path)
    assert not compared()[0]
    shutil.rmtree(public)
    assert compared() == (True, "public_pretrain/ is not in this folder")
    assert len(read_ledger(tmp_path / LEDGER_FILE).runs) == 2


def test_a_run_is_finished_when_it_ended_and_its_model_is_there(tmp_path: Path) -> None:
    """A restart of it has nothing to do; one whose last save failed has."""
    begin(tmp_path, 9)
    ledger = resume(tmp_path)
    ledger.append_step(9, PLAN.event)
    ledger.append_end("completed")
    assert not is_finished(tmp_path)
    before = snapshot(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    note_release(ledger, tmp_path, before)
    assert is_finished(tmp_path)
    (tmp_path / "model.safetensors").write_text("other")
    assert not is_finished(tmp_path)

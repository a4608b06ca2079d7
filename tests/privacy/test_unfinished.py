"""A run that failed before its first step leaves nothing that counts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, TrainerCallback

from dpllm.config import PrivacyConfig
from dpllm.engines.processes import Processes
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy import run_folder
from dpllm.privacy.budget import BudgetError, create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.plan import PrivacyPlan, make_plan
from dpllm.privacy.run_folder import is_used, settle_crashed
from dpllm.report.statement import write_report
from dpllm.training.shared_ledger import SharedLedger
from tests.conftest import tiny_llama_config
from tests.methods.queries.making import budget_in, query_plan
from tests.mutations import kills
from tests.tiers import deep_case
from tests.training.test_trainer import arguments, privacy, trainer

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("rows_not_compared")


def plan() -> PrivacyPlan:
    privacy = PrivacyConfig(noise_multiplier=2, clip_norm=1, expected_batch_size=10, delta=1e-5, dataset="mail")
    return make_plan(privacy, num_units=1000, num_steps=5)


def budget_of(tmp_path: Path) -> str:
    path = tmp_path / "mail.budget.json"
    create_budget(path, dataset="mail", epsilon=8, delta=1e-5, unit="sequence", num_units=1000)
    return str(path)


def test_a_failure_before_the_first_step_gives_back_what_was_reserved(tmp_path: Path) -> None:
    """The budget counts no step, and the folder can be used again."""
    budget = budget_of(tmp_path)
    path = tmp_path / "run" / LEDGER_FILE
    ledger = SharedLedger.create(path, plan(), Processes(), budget_file=budget)
    assert read_budget(budget).entries[0].num_steps == 5
    with pytest.raises(ValueError, match="refused"), ledger.ended_on_failure():
        raise ValueError("this model is refused")
    write_report(path.parent, plan(), read_ledger(path))
    assert read_budget(budget).entries[0].num_steps == 0
    assert not is_used(path)
    again = SharedLedger.create(path, plan(), Processes(), budget_file=budget)
    again.append_step(0, plan().event)
    assert [entry.num_steps for entry in read_budget(budget).entries] == [0, 5]
    assert is_used(path)
    again.close()
    SharedLedger.open(path, plan(), Processes(), budget_file=budget).close()  # the first run's report is gone


@kills(
    "of two new runs in a folder, one removes the ledger of the other",
    "dpllm/privacy/run_folder.py",
    "    with _locked(path) as held:",
    "    path.unlink(missing_ok=True)\n    with _locked(path) as held:",
)
def test_of_two_new_runs_one_removes_the_unused_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other found it unused, too, and must not remove the ledger that the first one made in its place."""
    path = tmp_path / "run" / LEDGER_FILE
    SharedLedger.create(path, plan(), Processes()).close()
    found = run_folder._unused(path)
    assert run_folder.make_way(path, None) == {} and not path.exists()
    first = SharedLedger.create(path, plan(), Processes())
    first.append_step(0, plan().event)
    monkeypatch.setattr(run_folder, "_unused", lambda _: found)  # as the other one saw it before
    for closed in (False, True):
        if closed:
            first.close()
        assert run_folder.make_way(path, None) == {} and read_ledger(path).num_steps == 1
    path.unlink()
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda one: one == path or real(one))  # removed after it was looked at
    assert run_folder.make_way(path, None) == {}


def test_a_crash_before_the_first_step_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    """The process died, so nothing was settled: the new run settles it, and notes its disclosures again."""
    budget = budget_of(tmp_path)
    path = tmp_path / "run" / LEDGER_FILE
    ledger = SharedLedger.create(path, plan(), Processes(), budget_file=budget)
    ledger.append_disclosure("evaluation during training", 2)
    ledger.close()  # the system releases the lock of a process that died
    assert not is_used(path)
    SharedLedger.create(path, plan(), Processes(), budget_file=budget).close()
    assert [entry.num_steps for entry in read_budget(budget).entries] == [0, 5]
    assert read_ledger(path).disclosures == {"evaluation during training": 2}


KILLED = """
import os, signal, sys
from pathlib import Path
from dpllm.engines.processes import Processes
from dpllm.methods.queries import run
from dpllm.training import shared_ledger
from tests.privacy.test_unfinished import plan
from tests.methods.queries.making import query_plan

folder, kind, moment = Path(sys.argv[1]), *sys.argv[2:]
module, name = (run if kind == "answers" else shared_ledger, "charge")
whole = getattr(module, name)

def killed(*args):
    if moment == "after":
        whole(*args)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(module, name, killed)
if kind == "answers":
    run.QueryRun.begin(folder / "run", query_plan(), dataset="chats", budget=folder / "chats.budget.json")
path, budget = folder / "run" / "privacy_ledger.jsonl", str(folder / "mail.budget.json")
shared_ledger.SharedLedger.create(path, plan(), Processes(), budget_file=budget)
"""


@pytest.mark.parametrize(
    ("kind", "moment", "settled"),
    [deep_case("answers", "after", False), ("training", "after", True), deep_case("training", "before", False)],
)
def test_a_kill_while_a_run_charges_leaves_no_entry_that_nobody_can_settle(
    tmp_path: Path, kind: str, moment: str, settled: bool
) -> None:
    """The ledger is there before the entry, and names it: `dpllm budget settle`, or the next run, gives it back."""
    budget = budget_in(tmp_path) if kind == "answers" else Path(budget_of(tmp_path))
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), kind, moment], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    reserved = 1 if moment == "after" else 0
    assert len(read_budget(budget).entries) == reserved and (read_budget(budget).spent > 0) == bool(reserved)
    if settled:
        assert settle_crashed(budget, tmp_path / "run") == 0
        assert read_budget(budget).spent == 0
    if kind == "answers":
        asked = query_plan()
        with QueryRun.begin(tmp_path / "run", asked, dataset="chats", budget=budget) as run:
            run.charge("votes")
        assert read_budget(budget).spent == asked.epsilon
    else:
        SharedLedger.create(tmp_path / "run" / LEDGER_FILE, plan(), Processes(), budget_file=str(budget)).close()
    assert [entry.num_steps > 0 for entry in read_budget(budget).entries] == [False] * reserved + [True]


def test_a_budget_that_refuses_leaves_no_ledger(tmp_path: Path) -> None:
    """Nor an entry: the folder is as it was."""
    budget = budget_in(tmp_path, epsilon=0.01)
    with pytest.raises(BudgetError, match="allows"):
        QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats", budget=budget)
    assert not (tmp_path / "run" / LEDGER_FILE).exists() and not read_budget(budget).entries


def test_a_ledger_that_is_being_written_has_a_step_or_cannot_be_read_is_kept(tmp_path: Path) -> None:
    """Only a ledger that is known to charge nothing makes way."""
    path = tmp_path / LEDGER_FILE
    ledger = SharedLedger.create(path, plan(), Processes())
    assert is_used(path)  # its run is going on
    with pytest.raises(LedgerError, match="earlier run"):
        SharedLedger.create(path, plan(), Processes())
    ledger.append_step(0, plan().event)
    ledger.append_end("failed")
    ledger.close()
    assert is_used(path)
    kept = path.read_bytes()
    with pytest.raises(LedgerError, match="earlier run"):
        SharedLedger.create(path, plan(), Processes())
    path.write_bytes(kept[:-30])
    assert is_used(path)
    path.write_bytes(b"")
    assert is_used(path)
    assert not is_used(tmp_path / "nothing" / LEDGER_FILE)


def test_a_ledger_with_half_a_note_is_kept(tmp_path: Path) -> None:
    """The line counted something that was written out, which a new ledger would not list."""
    path = tmp_path / LEDGER_FILE
    ledger = SharedLedger.create(path, plan(), Processes())
    ledger.append_disclosure("evaluation during training", 2)
    ledger.close()
    path.write_bytes(path.read_bytes()[:-30])
    assert read_ledger(path).num_steps == 0 and not read_ledger(path).disclosures
    assert is_used(path)


class StopsAtTheBeginning(TrainerCallback):
    """Fails after the model was spread, and before a step is drawn."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise RuntimeError("an engine refuses")


@pytest.mark.parametrize("fails", ["the model", "the beginning", "an option"])
def test_training_that_fails_before_its_first_step_can_be_started_again(tmp_path: Path, fails: str) -> None:
    """In the same folder and on the same budget, which counts only the run that took steps."""
    budget = tmp_path / "mail.budget.json"
    create_budget(budget, dataset="mail", epsilon=900, delta=1e-3, unit="sequence", num_units=64)
    config = privacy(dataset="mail", budget_file=str(budget))
    folder = tmp_path / "run"
    args = arguments(folder, max_steps=2)
    more: dict[str, Any] = {}
    kind: type[Exception] = RuntimeError
    if fails == "the beginning":
        more["callbacks"] = [StopsAtTheBeginning()]
    elif fails == "the model":
        model = LlamaForCausalLM(tiny_llama_config())
        model.model.norm = nn.Sequential(nn.BatchNorm1d(16))
        more["model"], kind = model, ValueError
    else:
        args.adam_epsilon, kind = -1.0, ValueError
    with pytest.raises(kind):
        trainer(folder, config=config, args=args, **more).train()
    assert sum(entry.num_steps for entry in read_budget(budget).entries) == 0
    again = trainer(folder, config=config, args=arguments(folder, max_steps=2))
    again.train()
    assert sum(entry.num_steps for entry in read_budget(budget).entries) == 2
    assert read_ledger(folder / LEDGER_FILE).num_steps == 2


def test_a_row_longer_than_the_models_positions_is_refused_before_the_run(tmp_path: Path) -> None:
    """It would end in an index error within a step that was charged."""
    config = GPT2Config(vocab_size=64, n_positions=6, n_embd=16, n_head=2, n_layer=1)
    with pytest.raises(ValueError, match="8 tokens"):
        trainer(tmp_path / "run", model=GPT2LMHeadModel(config))
    assert not (tmp_path / "run" / LEDGER_FILE).exists()

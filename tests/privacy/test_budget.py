"""Tests of dpllm.privacy.budget."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import PrivacyConfig
from dpllm.engines.processes import Processes
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import (
    Budget,
    BudgetError,
    budget_rows,
    charge,
    check_entry,
    create_budget,
    locked,
    mark,
    read_budget,
    require_room,
    settle,
)
from dpllm.privacy.ledger import Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.privacy.run_folder import is_used, settle_crashed
from dpllm.privacy.stated import stated_history
from dpllm.report.model_card import CARD_FILE, metadata_in, write_model_card
from dpllm.report.statement import JSON_FILE, ReleaseNotes, write_report
from dpllm.report.verify import verify
from dpllm.training.shared_ledger import SharedLedger
from tests import children
from tests.mutations import kills

# Full batches are the quickest to account for.
FULL: dict[str, Any] = {"expected_batch_size": 1000, "noise_multiplier": 22.0}


def make(num_steps: int = 50, num_units: int = 1000, **change: Any) -> PrivacyPlan:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 20, "delta": 1e-5}
    return make_plan(PrivacyConfig(**{**settings, "dataset": "chats", **change}), num_units, num_steps)


HEAD: dict[str, Any] = {"dataset": "chats", "epsilon": 3.0, "delta": 1e-5, "unit": "sequence", "num_units": 1000}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "chats.budget.json"
    create_budget(file, **HEAD)
    return file


def test_new_budget_reads_back(path: Path) -> None:
    """The given values are read back, with nothing spent."""
    budget = read_budget(path)
    assert {name: getattr(budget, name) for name in HEAD} == HEAD
    assert (budget.unit_column, budget.adjacency, budget.entries, budget.spent) == (None, "zero-out", (), 0.0)
    assert dict(budget_rows(budget))["left"].startswith("ε = 3.0000 by subtraction")


@kills(
    "the budget of the data set is not asked",
    "dpllm/privacy/budget.py",
    "        _check_fits(budget, prior, entry)\n        put(",
    "        put(",
)
def test_runs_are_charged_until_the_budget_is_exhausted(path: Path) -> None:
    """Two runs fit, composed; the third is refused and leaves the file as it was; one as short as was said fits."""
    plan, other = make(**FULL), make(noise_multiplier=1.2)
    charge(path, plan, "chats")
    charge(path, other, "chats")
    budget = read_budget(path)
    assert budget.spent == epsilon([(plan.event, 50), (other.event, 50)], 1e-5) <= 3.0
    assert budget.spent < plan.epsilon + other.epsilon, "runs compose; they do not just add up"
    before = path.read_bytes()
    long = make(600, **FULL)
    with pytest.raises(BudgetError, match=r"3\.0000") as refusal:
        charge(path, long, "chats")
    assert path.read_bytes() == before
    text = str(refusal.value)
    for number in (epsilon([(long.event, 600)], 1e-5), budget.spent, budget.cost([*budget.history, (long.event, 600)])):
        assert f"ε = {math.ceil(number * 1e4) / 1e4:.4f}" in text
    found = re.search(r"(\d+) of its steps still fit", text)
    assert found is not None
    fitting = int(found.group(1))
    assert budget.cost([*budget.history, (long.event, fitting)]) <= 3.0
    assert budget.cost([*budget.history, (long.event, fitting + 1)]) > 3.0
    charge(path, make(fitting, **FULL), "chats")
    with pytest.raises(BudgetError, match="steps fits"):
        charge(path, make(5, **{**FULL, "noise_multiplier": 4.0}), "chats")
    assert len(read_budget(path).entries) == 3


def test_entry_says_what_was_charged(path: Path) -> None:
    """An entry carries the plan's hash, its step with all fields, the reservation and the time."""
    plan = make()
    entry_id = charge(path, plan, "chats")
    (entry,) = read_budget(path).entries
    assert (entry.id, entry.plan_hash, entry.step) == (entry_id, plan.hash, plan.event)
    assert (entry.steps_reserved, entry.steps_charged, entry.steps_before, entry.num_steps) == (50, None, 0, 50)
    assert len(entry_id) == 16 and entry.charged_at.endswith("+00:00")


def test_budget_counts_at_its_own_delta_and_adjacency(tmp_path: Path) -> None:
    """Runs planned at another δ and adjacency are composed at those of the file."""
    path = tmp_path / "b.json"
    create_budget(path, **{**HEAD, "delta": 1e-6, "epsilon": 9.0}, adjacency="replace-one")
    plan = make(delta=1e-4, dataset=None)
    charge(path, plan, "chats")
    assert read_budget(path).spent == epsilon([(plan.event, 50)], 1e-6, "replace-one")


def test_users_drawn_whole_and_row_by_row_share_a_budget(tmp_path: Path) -> None:
    """Both ways of sampling users are about the same unit, and compose."""
    path = tmp_path / "b.json"
    create_budget(path, **{**HEAD, "unit": "user", "epsilon": 20.0}, unit_column="author")
    users = {"unit": "author", "max_rows_per_unit": 2}
    whole = make(**users)
    settings = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, "delta": 1e-5, **users}
    single = make_plan(PrivacyConfig(**settings, sampling="example"), 1000, 30, num_examples=1800)
    charge(path, whole, "chats")
    charge(path, single, "chats")
    budget = read_budget(path)
    assert [entry.step.moves for entry in budget.entries] == [1, 2]
    assert budget.spent == epsilon([(whole.event, 50), (single.event, 30)], 1e-5)
    assert dict(budget_rows(budget))["unit of privacy"] == "user (column author)"


@pytest.mark.parametrize(
    ("change", "dataset", "match"),
    [
        ({}, "letters", "dataset is 'chats' there and 'letters' here"),
        ({"dataset": "letters"}, "chats", "dataset of the plan is 'chats' there and 'letters' here"),
        ({"num_units": 999}, "chats", "num_units is 1000 there and 999 here"),
        ({"unit": "id", "max_rows_per_unit": 2}, "chats", "unit is 'sequence' there and 'user'"),
        ({"unit": "id", "max_rows_per_unit": 2}, "chats", "unit_column is None there and 'id'"),
        ({"seed": 0}, "chats", "a run with a fixed seed is not private"),
        ({"noise_multiplier": 0}, "chats", "a run without noise is not private"),
    ],
)
def test_wrong_run_is_refused(path: Path, change: dict[str, Any], dataset: str, match: str) -> None:
    """Other data, another unit, or no privacy: nothing is charged, and the difference is named."""
    before = path.read_bytes()
    with pytest.raises(BudgetError, match=match):
        charge(path, make(**change), dataset)
    assert path.read_bytes() == before


def test_room_is_asked_for_without_charging(path: Path) -> None:
    """A run that would be refused is refused in advance, in the same words; one that fits changes no file."""
    before = path.read_bytes()
    require_room(path, make(), "chats")
    for plan, dataset in ((make(100_000), "chats"), (make(), "letters"), (make(seed=0), "chats")):
        with pytest.raises(BudgetError) as asked:
            require_room(path, plan, dataset)
        with pytest.raises(BudgetError) as charged:
            charge(path, plan, dataset)
        assert str(asked.value) == str(charged.value)
    assert path.read_bytes() == before


def test_settling_gives_back_what_did_not_run(path: Path) -> None:
    """The steps of the ledger replace the reservation, and never fall or exceed it."""
    plan = make(200)
    entry = charge(path, plan, "chats")
    reserved = read_budget(path).spent
    settle(path, entry, 60)
    assert read_budget(path).spent == epsilon([(plan.event, 60)], 1e-5) < reserved
    settle(path, entry, 60)
    settle(path, entry, 200)
    assert read_budget(path).spent == reserved
    for number in (199, 201, -1):
        with pytest.raises(BudgetError, match=rf"cannot be settled with {number} steps: it reserved 200, of which 200"):
            settle(path, entry, number)
    with pytest.raises(BudgetError, match="entry 0123"):
        settle(path, "0123", 5)


def test_run_that_charged_nothing_settles_at_zero(path: Path) -> None:
    """A run that ended before its first step costs nothing, and leaves the budget whole."""
    settle(path, charge(path, make(), "chats"), 0)
    assert read_budget(path).spent == 0.0
    charge(path, make(), "chats")


def test_settling_writes_down_what_ran_even_beyond_the_budget(path: Path) -> None:
    """Steps that ran are never hidden: the budget then shows more spent than allowed, and nothing more fits."""
    first = charge(path, make(500), "chats")
    settle(path, first, 100)
    charge(path, make(250), "chats")
    settle(path, first, 500)
    budget = read_budget(path)
    assert budget.spent > budget.epsilon
    assert dict(budget_rows(budget))["left"] == "nothing: the budget is exhausted"
    with pytest.raises(BudgetError, match="steps fits"):
        charge(path, make(1), "chats")


def test_resumed_run_reserves_its_steps_again(path: Path) -> None:
    """A resumed run needs its own entry and all its steps again: refused when others took the ε that it left."""
    plan = make(500)
    entry = charge(path, plan, "chats")
    check_entry(path, entry, plan)
    settle(path, entry, 100)
    check_entry(path, entry, plan)
    assert read_budget(path).entries[0].num_steps == 500
    with pytest.raises(BudgetError, match="already charged"):
        settle(path, entry, 99)
    settle(path, entry, 100)
    charge(path, make(250), "chats")
    with pytest.raises(BudgetError, match="Spent"):
        check_entry(path, entry, plan)
    assert read_budget(path).entries[0].num_steps == 100
    with pytest.raises(BudgetError, match=r"was charged for the plan .* Resume with the configuration"):
        check_entry(path, entry, make(499))
    with pytest.raises(BudgetError, match="old copy"):
        check_entry(path, "0123", plan)


_CHARGING = """
import sys
from dpllm.privacy.budget import charge
from dpllm.privacy.plan import PrivacyPlan
print("ready", flush=True)
sys.stdin.readline()
print(charge(sys.argv[1], PrivacyPlan.load(sys.argv[2]), "chats"))
"""


def test_processes_charge_one_after_the_other(path: Path, tmp_path: Path) -> None:
    """Of three processes that charge in the same moment two fit and are recorded, and one is refused."""
    plan = make(100, **FULL)
    plan.save(tmp_path / "plan.json")
    budget = read_budget(path)
    assert budget.cost([(plan.event, 200)]) <= 3.0 < budget.cost([(plan.event, 300)])
    command = [sys.executable, "-c", _CHARGING, str(path), str(tmp_path / "plan.json")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [children.Child(command, text=True, **pipes) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    results = [worker.communicate(timeout=children.LIMIT) for worker in workers]
    printed = {out.strip() for out, _ in results if out.strip()}
    assert printed == {entry.id for entry in read_budget(path).entries} and len(printed) == 2
    assert sum("BudgetError" in error for _, error in results) == 1


def test_charging_reads_only_once_it_has_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A charge that waits while another one writes sees the result of the other."""
    plan, empty = make(**FULL), path.read_bytes()
    first = charge(path, plan, "chats")
    charged = path.read_bytes()
    path.write_bytes(empty)
    asked, real = threading.Event(), fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        asked.set()
        real(descriptor, operation)

    with open(f"{path}.lock") as holder:
        real(holder, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        second: list[str] = []
        waiting = threading.Thread(target=lambda: second.append(charge(path, plan, "chats")))
        waiting.start()
        assert asked.wait(timeout=children.LIMIT)
        path.write_bytes(charged)
    waiting.join()
    assert [entry.id for entry in read_budget(path).entries] == [first, *second] and len(second) == 1


def test_crash_while_writing_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves nothing; a half-written file that a kill left beside the budget does no harm."""
    first = charge(path, make(), "chats")
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(BudgetError, match="space left"):
            charge(path, make(), "chats")
    assert path.read_bytes() == before and not list(path.parent.glob(".*.tmp"))
    path.with_name(f".{path.name}.12345678.tmp").write_text('{"format": 1, "entr')
    second = charge(path, make(), "chats")
    assert [entry.id for entry in read_budget(path).entries] == [first, second]


def test_file_and_folder_are_flushed_before_the_charge_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new contents reach the disk before they get the name, and the name before the call returns."""
    events: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def put(source: Path, target: Path) -> None:
        real_replace(source, target)
        events.append("replace")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", put)
    charge(path, make(), "chats")
    assert events == ["file", "replace", "folder"]


def test_an_older_copy_of_the_file_is_refused(path: Path) -> None:
    """As git or a backup restores it: the runs that were charged since would be forgotten. A later one is taken."""
    older = path.read_bytes()
    first = charge(path, make(), "chats")
    latest = path.read_bytes()
    path.write_bytes(older)
    for use in (lambda: charge(path, make(), "chats"), lambda: settle(path, first, 1)):
        with pytest.raises(BudgetError, match="here last"):
            use()
    path.write_bytes(latest)
    settle(path, first, 20)
    later = json.loads(path.read_text()) | {"written": 9}  # written on another machine meanwhile
    path.write_text(json.dumps({**later, "sha256": _reseal(later)}))
    charge(path, make(), "chats")
    assert read_budget(path).written == 10


def test_a_lock_file_that_is_removed_lets_nobody_write_over_another(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people do with locks that seem left over: whoever held the old one finds out before it writes."""
    lock = path.with_name(f"{path.name}.lock")
    with locked(path) as held:
        lock.unlink()
        second = charge(path, make(), "chats")  # with a new lock file
        with pytest.raises(BudgetError, match="removed while"):
            held.require_held()
    assert [entry.id for entry in read_budget(path).entries] == [second]
    asked, real = threading.Event(), fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        asked.set()
        real(descriptor, operation)

    with open(lock) as other:
        real(other, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        waiting = threading.Thread(target=lambda: charge(path, make(), "chats"))
        waiting.start()
        assert asked.wait(timeout=children.LIMIT)
        lock.rename(lock.with_name("aside"))
    waiting.join()
    assert len(read_budget(path).entries) == 2 and lock.is_file()


def test_a_budget_that_cannot_be_locked_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre and NFS answer without the option: two runs could each charge what is left."""
    before = path.read_bytes()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BudgetError, match="available"):
        charge(path, make(), "chats")
    assert path.read_bytes() == before


def test_those_who_may_read_a_budget_still_may_after_a_charge(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team shares it, with any umask; a lock file of another user is locked without being written."""
    path.chmod(0o664)
    before, real = os.umask(0o077), os.open

    def refusing(name: Any, flags: int, *mode: int) -> int:
        if str(name).endswith(".lock") and flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refusing)
    try:
        entry = charge(path, make(), "chats")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664 and [e.id for e in read_budget(path).entries] == [entry]


def test_all_names_of_a_file_share_its_lock(path: Path, tmp_path: Path) -> None:
    """Through a link the file itself is charged, and stays where it is."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.json"
    link.symlink_to(path)
    entry = charge(link, make(), "chats")
    assert link.is_symlink() and [item.id for item in read_budget(path).entries] == [entry]
    assert os.listdir(tmp_path / "elsewhere") == ["link.json"]


def _reseal(raw: dict[str, Any]) -> str:
    body = {name: value for name, value in raw.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def test_edited_file_is_refused(path: Path) -> None:
    """A changed number, a lost entry or broken JSON is found, and points to a copy."""
    entry = charge(path, make(), "chats")
    raw = json.loads(path.read_text())
    edits: list[dict[str, Any]] = [{**raw, "epsilon": 80.0}, {**raw, "entries": []}, {**raw, "extra": 1}]
    edits.append({name: value for name, value in raw.items() if name != "sha256"})
    for edit in edits:
        path.write_text(json.dumps(edit))
        for use in (read_budget, lambda file: charge(file, make(), "chats"), lambda file: settle(file, entry, 1)):
            with pytest.raises(BudgetError, match="contents do"):
                use(path)
    path.write_text(json.dumps(raw)[:-5])
    with pytest.raises(BudgetError, match="is not JSON"):
        read_budget(path)
    for other in ({}, []):
        path.write_text(json.dumps(other))
        with pytest.raises(BudgetError, match="is not a budget file"):
            read_budget(path)
    path.write_text(json.dumps({**raw, "format": 2, "sha256": "a"}))
    with pytest.raises(BudgetError, match="dpllm reads"):
        read_budget(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """No budget file is ever made by charging, and no lock left beside none."""
    with pytest.raises(BudgetError, match="directory"):
        charge(tmp_path / "none.json", make(), "chats")
    with pytest.raises(BudgetError, match="cannot be read"):
        read_budget(tmp_path / "none.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epsilon": 0.0}, "0 < epsilon <= 1000"),
        ({"epsilon": math.nan}, "0 < epsilon <= 1000"),
        ({"delta": 1e-3}, r"0 < delta < 1/num_units = 0.001"),
        ({"num_units": 0}, "num_units >= 1"),
        ({"dataset": " "}, "a dataset name"),
        ({"unit": "user"}, "unit_column with unit"),
    ],
)
def test_impossible_budget_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    """A budget whose numbers protect nobody cannot be made."""
    with pytest.raises(BudgetError, match=f"a budget needs .*{match}"):
        create_budget(tmp_path / "b.json", **{**HEAD, **change})
    assert os.listdir(tmp_path) == []


def test_budget_is_never_overwritten(path: Path, tmp_path: Path) -> None:
    """Making a budget where there is one, or where there is no folder, is an error."""
    with pytest.raises(BudgetError, match="records the ε"):
        create_budget(path, **HEAD)
    with pytest.raises(BudgetError, match="directory"):
        create_budget(tmp_path / "nowhere" / "b.json", **HEAD)


def test_rows_and_dictionary_say_everything(path: Path) -> None:
    """Spent ε is rounded up, allowed ε down; each run is listed with its steps and its own ε."""
    first = charge(path, make(), "chats")
    settle(path, first, 20)
    charge(path, make(40), "chats")
    budget = read_budget(path)
    rows = dict(budget_rows(budget))
    assert rows["budget"] == "ε = 3.0000 at δ = 1e-05" and rows["runs"] == "2"
    spent = float(rows["spent"].removeprefix("ε = ").split(",")[0])
    assert budget.spent <= spent < budget.spent + 1e-4
    assert rows["run 1"].startswith("20 of 50 steps charged, ε = ") and first in rows["run 1"]
    assert rows["run 2"].startswith("40 of 40 steps reserved, ε = ")
    values = json.loads(json.dumps(budget.to_dict(), allow_nan=False))
    assert values["spent"] == budget.spent and [entry["steps_charged"] for entry in values["entries"]] == [20, None]
    thirds = dataclasses.replace(budget, epsilon=2.99999)
    assert isinstance(thirds, Budget) and dict(budget_rows(thirds))["budget"].startswith("ε = 2.9999 ")


def test_a_crashed_run_is_settled_with_the_steps_that_its_report_states(tmp_path: Path, path: Path) -> None:
    """The plan's, unless its stop is declared independent; a run that goes on is refused, and another file's too."""
    plan, folder = make(), tmp_path / "run"
    folder.mkdir()
    entry = charge(path, plan, "chats")
    ledger = Ledger.create(folder / "privacy_ledger.jsonl", plan, budget={"file": path.name, "entry": entry})
    for number in range(3):
        ledger.append_step(number, plan.event)
    with pytest.raises(BudgetError, match="still in progress"):
        settle_crashed(path, folder)
    assert read_budget(path).entries[0].num_steps == 50
    ledger.close()  # as the system does when a process dies

    def stated() -> int:
        contents = read_ledger(folder / "privacy_ledger.jsonl")
        return sum(count for _, count in stated_history(plan, contents))

    assert settle_crashed(path, folder) == 3
    assert read_budget(path).entries[0].num_steps == stated() == 50
    for _ in range(2):  # a second time changes nothing
        assert settle_crashed(path, folder, independent=True) == 3
        assert read_budget(path).entries[0].num_steps == stated() == 3
    assert settle_crashed(path, folder) == 3
    assert read_budget(path).entries[0].num_steps == stated() == 3
    other = tmp_path / "other.budget.json"
    create_budget(other, **HEAD)
    with pytest.raises(BudgetError, match=r"chats\.budget\.json"):
        settle_crashed(other, folder)
    unnamed = tmp_path / "unnamed"
    unnamed.mkdir()
    Ledger.create(unnamed / "privacy_ledger.jsonl", plan).close()
    with pytest.raises(BudgetError, match="is charged to no budget file"):
        settle_crashed(path, unnamed)


def failed_run(folder: Path, path: Path) -> PrivacyPlan:
    """Three of 50 steps, then an error; report and card exist, and so do the notes of people."""
    plan = make()
    folder.mkdir()
    plan.save(folder / PLAN_FILE)
    named = {"file": path.name, "entry": charge(path, plan, "chats")}
    with Ledger.create(folder / "privacy_ledger.jsonl", plan, budget=named) as ledger:
        for number in range(3):
            ledger.append_step(number, plan.event)
        ledger.append_end("failed")
    settle(path, named["entry"], 3, keep_reserved=True)
    report = write_report(folder, plan, ledger, ReleaseNotes(data_holder="the clinic"))
    write_model_card(folder, report, base_model="org/base", task="causal_lm", adapter=False)
    return plan


def test_report_and_card_follow_a_stop_that_is_declared_independent_afterwards(tmp_path: Path, path: Path) -> None:
    """Budget, report and card state the same steps; notes of people and other parts of the card are kept."""
    folder = tmp_path / "run"
    plan = failed_run(folder, path)
    card = folder / CARD_FILE
    card.write_text(card.read_text(encoding="utf-8") + "\nWritten by people.\n", encoding="utf-8")
    before = metadata_in(card)["differential_privacy"]
    result = CliRunner().invoke(app, ["budget", "settle", str(path), str(folder), "--independent"])
    assert result.exit_code == 0, result.output
    assert verify(folder).ok, [check for check in verify(folder).checks if not check.ok]
    report = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    assert report["accounting"]["steps"]["stated"] == read_budget(path).entries[0].num_steps == 3
    assert report["statement"]["epsilon"] == pytest.approx(read_budget(path).spent)
    assert report["setting"]["data_holder"] == "the clinic"
    found = metadata_in(card)
    assert found["base_model"] == "org/base" and card.read_text(encoding="utf-8").endswith("\nWritten by people.\n")
    assert found["differential_privacy"]["epsilon"] == float(format_epsilon(report["statement"]["epsilon"]))
    assert found["differential_privacy"]["epsilon"] < before["epsilon"] and before["num_steps"] == plan.num_steps


def test_verify_sees_a_report_from_before_the_stop_was_declared_independent(tmp_path: Path, path: Path) -> None:
    """Where the ledger was changed and the report was not."""
    folder = tmp_path / "run"
    failed_run(folder, path)
    assert verify(folder).ok
    settle_crashed(path, folder, independent=True)
    failed = [check.detail for check in verify(folder).checks if not check.ok and check.what.startswith(JSON_FILE)]
    assert any("statement.epsilon is" in detail for detail in failed)


def test_a_damaged_report_is_told_before_anything_is_settled(tmp_path: Path, path: Path) -> None:
    """The declaration is not half made."""
    folder = tmp_path / "run"
    failed_run(folder, path)
    (folder / JSON_FILE).write_text("{")
    ledger = (folder / "privacy_ledger.jsonl").read_bytes()
    result = CliRunner().invoke(app, ["budget", "settle", str(path), str(folder), "--independent"])
    assert result.exit_code == 2 and "is not a complete privacy report" in result.output
    assert (folder / "privacy_ledger.jsonl").read_bytes() == ledger
    assert read_budget(path).entries[0].num_steps == 50


def test_a_copy_of_a_ledger_from_before_the_crash_gives_nothing_back(tmp_path: Path, path: Path) -> None:
    """It holds fewer steps than were taken: neither settling nor a new run over it returns the cost of the others."""
    plan, folder, copied = make(), tmp_path / "run", tmp_path / "copied"
    folder.mkdir()
    entry = charge(path, plan, "chats")
    ledger = Ledger.create(folder / "privacy_ledger.jsonl", plan, budget={"file": path.name, "entry": entry})
    mark(path, entry, ledger.head)
    shutil.copytree(folder, copied)
    for number in range(3):
        ledger.append_step(number, plan.event)
    ledger.close()
    for independent in (False, True):
        with pytest.raises(LedgerError, match="is a copy of the file that the run wrote"):
            settle_crashed(path, copied, independent)
    assert is_used(copied / "privacy_ledger.jsonl")
    with pytest.raises(LedgerError, match="earlier run"):
        SharedLedger.create(copied / "privacy_ledger.jsonl", plan, Processes(), budget_file=str(path))
    assert [entry.num_steps for entry in read_budget(path).entries] == [50]


def test_a_new_run_over_a_ledger_that_was_cut_gives_nothing_back(tmp_path: Path, path: Path) -> None:
    """The budget records how far the run had come when it saved."""
    plan, place = make(), tmp_path / "privacy_ledger.jsonl"
    entry = charge(path, plan, "chats")
    ledger = Ledger.create(place, plan, budget={"file": path.name, "entry": entry})
    ledger.append_step(0, plan.event)
    mark(path, entry, ledger.head)  # as a checkpoint does
    ledger.close()
    with open(place, "r+") as file:  # in place, so that it stays the file that the run wrote
        file.truncate(len(file.readline()))
    with pytest.raises(BudgetError, match="1 steps"):
        SharedLedger.create(place, plan, Processes(), budget_file=str(path))
    assert [entry.num_steps for entry in read_budget(path).entries] == [50]


def test_a_run_that_crashed_before_its_first_step_gives_everything_back(tmp_path: Path, path: Path) -> None:
    """Nothing was released, for any reason of the stop."""
    entry = charge(path, make(), "chats")
    Ledger.create(tmp_path / "privacy_ledger.jsonl", make(), budget={"file": path.name, "entry": entry}).close()
    assert settle_crashed(path, tmp_path) == 0
    assert read_budget(path).entries[0].num_steps == 0


def test_a_data_set_that_grows_has_one_budget(tmp_path: Path) -> None:
    """Runs with another N are charged where the file says that they share people, each step with its own N."""
    file = tmp_path / "growing.budget.json"
    create_budget(file, **HEAD, shared_people=True)
    first, second = make(), make(num_units=1500)
    charge(file, first, "chats")
    charge(file, second, "chats")
    budget = read_budget(file)
    assert budget.shared_people and budget.spent == epsilon([(first.event, 50), (second.event, 50)], 1e-5)
    with pytest.raises(BudgetError, match="below 1/N"):
        charge(file, make(num_units=200_000, delta=1e-6), "chats")
    create_budget(tmp_path / "fixed.budget.json", **HEAD)
    with pytest.raises(BudgetError, match="--shared-people"):
        charge(tmp_path / "fixed.budget.json", second, "chats")

"""The ledger as one process sees it; that all processes see the same is in `tests.distributed.test_agreement`."""

import dataclasses

import pytest

from dpllm.engines.processes import Processes
from dpllm.privacy.budget import BudgetError, create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.private_folder import read_diagnostics
from dpllm.training.shared_ledger import SharedLedger
from tests.engines.test_guard import plan_of

pytestmark = pytest.mark.usefixtures("rows_not_compared")

PLAN = plan_of(0.8)
MAIL = dataclasses.replace(PLAN, dataset="mail")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / LEDGER_FILE


def test_a_new_ledger_has_its_plan_beside_it_and_counts_what_is_charged(path):
    """Everything that is appended is in the file, which is an ordinary ledger."""
    ledger = SharedLedger.create(path, PLAN, Processes(), public=["a public corpus"])
    assert PrivacyPlan.load(path.parent / PLAN_FILE) == PLAN and ledger.num_steps == 0
    for number in range(3):
        ledger.append_step(number, PLAN.event)
    ledger.append_disclosure("training loss", 2)
    ledger.append_diagnostic("units with a non-finite gradient", 4)
    ledger.append_fact("rows compared", 12)
    ledger.append_open_point("the folder was copied")
    ledger.append_end("completed")
    ledger.close()
    contents = read_ledger(path)
    assert ledger.num_steps == contents.num_steps == 3 and contents.history == [(PLAN.event, 3)]
    assert contents.disclosures == {"training loss": 2} and contents.public == ["a public corpus"]
    assert read_diagnostics(path.parent) == {"units with a non-finite gradient": 4} and contents.end == "stopped early"
    assert contents.notes.facts == {"rows compared": [12]} and contents.notes.open_points == ["the folder was copied"]


def budget_of(folder, epsilon=50.0):
    """A budget file for the data of `PLAN`."""
    return create_budget(
        folder / "mail.budget.json",
        dataset="mail",
        epsilon=epsilon,
        delta=PLAN.delta,
        unit=PLAN.unit,
        unit_column=PLAN.unit_column,
        num_units=PLAN.num_units,
    )


def test_a_run_is_charged_to_its_budget_before_and_settled_after(path, tmp_path):
    """The ledger names its entry; all planned steps are reserved at first, and at the end those taken count."""
    file = budget_of(tmp_path).path
    ledger = SharedLedger.create(path, MAIL, Processes(), budget_file=str(file))
    (entry,) = read_budget(file).entries
    assert entry.num_steps == MAIL.num_steps and entry.plan_hash == MAIL.hash
    assert read_ledger(path).runs[0]["budget"] == {"file": "mail.budget.json", "entry": entry.id}
    ledger.append_step(0, MAIL.event)
    ledger.append_end("interrupted")
    ledger.close()
    assert [e.num_steps for e in read_budget(file).entries] == [MAIL.num_steps]  # the stop may depend on the data
    resumed = SharedLedger.open(path, MAIL, Processes(), str(file))
    assert [e.num_steps for e in read_budget(file).entries] == [MAIL.num_steps]
    resumed.append_end("completed")
    resumed.close()
    assert len(read_ledger(path).runs) == 2 and read_ledger(path).runs[1]["budget"]["entry"] == entry.id


def test_what_the_budget_does_not_allow_leaves_no_ledger(path, tmp_path):
    """A run that is refused has no folder of a run, and one whose folder is taken is not charged."""
    small = budget_of(tmp_path, epsilon=1e-3).path
    with pytest.raises(BudgetError, match=r"0\.0010"):
        SharedLedger.create(path, MAIL, Processes(), budget_file=str(small))
    assert not path.exists()
    taken = SharedLedger.create(path, MAIL, Processes())
    taken.append_step(0, MAIL.event)
    taken.close()
    with pytest.raises(LedgerError, match="earlier run"):
        SharedLedger.create(path, MAIL, Processes(), budget_file=str(small))
    assert read_budget(small).entries == ()


def test_a_budget_that_cannot_be_settled_does_not_take_the_model_along(path, tmp_path):
    """The run has ended; its planned steps stay reserved, and the report states the remedy."""
    file = budget_of(tmp_path).path
    ledger = SharedLedger.create(path, MAIL, Processes(), budget_file=str(file))
    ledger.append_step(0, MAIL.event)
    file.rename(tmp_path / "moved.json")
    ledger.append_end("completed")
    ledger.close()
    (point,) = read_ledger(path).notes.open_points
    assert f"its budget {file} could not be settled" in point and "dpllm budget settle" in point
    (tmp_path / "moved.json").rename(file)
    assert [entry.num_steps for entry in read_budget(file).entries] == [MAIL.num_steps]


def test_a_ledger_that_cannot_be_made_costs_no_budget(path, tmp_path, monkeypatch):
    """No run would ever settle its entry: two jobs that start in one folder at once, or a full disk."""
    file = budget_of(tmp_path).path

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Ledger, "create", full)
    with pytest.raises(OSError, match="space left"):
        SharedLedger.create(path, MAIL, Processes(), budget_file=str(file))
    assert not read_budget(file).entries


def test_a_resumed_run_says_what_it_takes_for_public(path):
    """Such as other starting weights; lines that are there already are not repeated."""
    SharedLedger.create(path, PLAN, Processes(), public=["starting weights: a"]).close()
    for name in ("a", "b"):
        SharedLedger.open(path, PLAN, Processes(), public=[f"starting weights: {name}"]).close()
    assert read_ledger(path).public == ["starting weights: a", "starting weights: b"]


@pytest.mark.parametrize("first", [True, False])
def test_a_run_is_resumed_with_the_budget_it_began_with(path, tmp_path, first):
    """Otherwise its steps would be counted twice, or not at all."""
    file = str(budget_of(tmp_path).path)
    SharedLedger.create(path, MAIL, Processes(), budget_file=file if first else None).close()
    with pytest.raises(LedgerError, match=r"privacy\.budget_file"):
        SharedLedger.open(path, MAIL, Processes(), None if first else file)

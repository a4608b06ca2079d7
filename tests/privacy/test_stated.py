"""The steps whose ε is stated, and the steps that a resumed run may take if its mechanism restarts."""

from __future__ import annotations

import dataclasses
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.engines.processes import Processes
from dpllm.mechanism.banded import BandedStep
from dpllm.mechanism.strategies import coefficients
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import BudgetError, charge, create_budget, read_budget
from dpllm.privacy.compose import compose
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.stated import planned_steps, stated_history, steps_allowed
from dpllm.report.statement import privacy_report, write_report
from dpllm.report.verify import verify
from dpllm.training.shared_ledger import SharedLedger
from tests.mutations import kills
from tests.tiers import deep_case

pytestmark = pytest.mark.usefixtures("rows_not_compared")

T, BANDS = 40, 4


def plan_of(**change: Any) -> PrivacyPlan:
    settings: dict[str, Any] = {
        "epsilon": 3.0,
        "clip_norm": 0.5,
        "expected_batch_size": 20,
        "delta": 1e-5,
        "dataset": "chats",
        "noise": {"kind": "banded", "bands": BANDS},
    }
    return make_plan(PrivacyConfig(**{**settings, **change}), 1000, T)


@cache
def banded_plan() -> PrivacyPlan:
    return plan_of()


BLT = PrivacyConfig(epsilon=8.0, clip_norm=1.0, expected_batch_size=5, delta=1e-3, noise={"kind": "blt", "buffers": 1})


def run_for(folder: Path, plan: PrivacyPlan, num_steps: int, budget: str | None = None) -> SharedLedger:
    """Start or resume, and take this many steps; the run is then interrupted."""
    path = folder / LEDGER_FILE
    start = SharedLedger.open if path.exists() else SharedLedger.create
    ledger = start(path, plan, Processes(), budget_file=budget)
    for number in range(ledger.num_steps, ledger.num_steps + num_steps):
        ledger.append_step(number, plan.event)
    ledger.close()
    return ledger


def test_a_plan_of_banded_noise_is_saved_and_read_back(tmp_path: Path) -> None:
    """With its parts; that of DP-SGD has them too."""
    banded_plan().save(tmp_path / PLAN_FILE)
    again = PrivacyPlan.load(tmp_path / PLAN_FILE)
    assert again == banded_plan() and again.hash == banded_plan().hash and again.event == banded_plan().event
    noise = banded_plan().to_dict()["noise"]
    assert (noise["kind"], noise["bands"]) == ("banded", BANDS)
    assert noise["coefficients"] == pytest.approx(coefficients(BANDS, T), abs=1e-7)
    plain = plan_of(noise="independent")
    assert (plain.to_dict()["noise"], plain.to_dict()["clipping"]) == ("independent", "flat")
    assert len({banded_plan().hash, plain.hash, plan_of(clipping="automatic").hash}) == 3


@kills(
    "a resumed run goes on with the cycle before",
    "dpllm/privacy/ledger_reader.py",
    "not (begins and step.restarts)",
    "True",
)
@kills(
    "a run that is resumed exceeds its target",
    "dpllm/privacy/stated.py",
    "    return None if fits == left else taken + fits\n",
    "    return None\n",
)
def test_a_resume_begins_a_new_cycle(tmp_path: Path) -> None:
    """Its steps are counted by themselves: 5 and 3 steps are 2 and 1 rounds, and 8 in one go are 2."""
    run_for(tmp_path, banded_plan(), 5)
    ledger = run_for(tmp_path, banded_plan(), 3)
    contents = read_ledger(ledger.path)
    assert contents.history == [(banded_plan().event, 5), (banded_plan().event, 3)]
    assert epsilon(contents.history, 1e-5) == epsilon([(banded_plan().event, 4 * 3)], 1e-5)
    assert stated_history(banded_plan(), contents) == ((banded_plan().event, 5), (banded_plan().event, 32))


@pytest.mark.parametrize(("first", "allowed"), [(4, None), (5, 37), (6, 38), (7, 39), (8, None)])
def test_a_resumed_run_ends_where_the_target_would_be_exceeded(tmp_path: Path, first: int, allowed: int | None) -> None:
    """40 steps are 10 rounds; after 6, which are 2 rounds, 8 are left: 32 steps of the 34."""
    ledger = run_for(tmp_path, banded_plan(), first)
    assert steps_allowed(banded_plan(), read_ledger(ledger.path)) == allowed
    resumed = SharedLedger.open(ledger.path, banded_plan(), Processes())
    assert resumed.steps_planned == (allowed or T)
    for number in range(first, allowed or T):
        resumed.append_step(number, banded_plan().event)
    resumed.append_end("completed")
    resumed.close()
    contents = read_ledger(ledger.path)
    assert planned_steps(banded_plan(), contents) == (allowed or T)
    assert epsilon(stated_history(banded_plan(), contents), banded_plan().delta) <= 3.0


@pytest.mark.parametrize("starts", [(5, 0), deep_case((5, 0, 0)), (5, 3, 0), deep_case((8, 0))])
def test_a_resume_without_a_step_begins_a_new_cycle_too(tmp_path: Path, starts: tuple[int, ...]) -> None:
    """It was planned to go on from there: report, `dpllm verify`, composition and budget count its planned steps so."""
    plan, file = plan_of(noise_multiplier=1.0, epsilon=50.0), tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=60.0, delta=1e-5, unit="sequence", num_units=1000)
    folder = tmp_path / "run"
    for num_steps in starts[:-1]:
        ledger = run_for(folder, plan, num_steps, str(file))
    resumed = SharedLedger.open(ledger.path, plan, Processes(), str(file))
    resumed.append_end("completed")
    resumed.close()
    taken = [(plan.event, count) for count in starts if count]
    planned = (*taken, (plan.event, T - sum(starts)))
    contents = read_ledger(ledger.path)
    assert contents.history == taken and contents.begins
    assert stated_history(plan, contents) == resumed.history == planned
    report = write_report(folder, plan, contents)
    assert report.statement.epsilon == epsilon(planned, plan.delta) == read_budget(file).spent
    assert compose([folder]).epsilon == report.statement.epsilon
    assert all(check.ok for check in verify(folder).checks)


def test_a_resume_of_dp_sgd_without_a_step_costs_nothing(tmp_path: Path) -> None:
    """Its steps are counted together."""
    plan = plan_of(noise="independent")
    for num_steps in (5, 0):
        ledger = run_for(tmp_path, plan, num_steps)
    contents = read_ledger(ledger.path)
    assert contents.begins and stated_history(plan, contents) == ((plan.event, T),)


class Elsewhere(Processes):
    """Another process than the first: it has only the values that the first one sends."""

    def __init__(self, sent: list[Any]) -> None:
        super().__init__()
        self._sent = sent

    def from_main(self, function: Any) -> Any:
        return pickle.loads(self._sent.pop(0))


class Sending(Processes):
    """The first process, which keeps what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def from_main(self, function: Any) -> Any:
        value = function()
        self.sent.append(pickle.dumps(value))
        return value


@pytest.mark.parametrize("independent", [False, True])
def test_every_process_of_a_resumed_run_counts_its_starts(tmp_path: Path, independent: bool) -> None:
    """Those that hold no file too: while the run goes on the charged steps, after its end the stated ones."""
    path, first = run_for(tmp_path, banded_plan(), 5).path, Sending()
    ledger = SharedLedger.open(path, banded_plan(), first)
    other = SharedLedger.open(path, banded_plan(), Elsewhere(first.sent))
    assert ledger.history == other.history == ((banded_plan().event, 5),)
    for number in (5, 6):
        for one in (ledger, other):
            one.append_step(number, banded_plan().event)
        assert ledger.history == other.history == ((banded_plan().event, 5), (banded_plan().event, number - 4))
    for one in (ledger, other):
        one.append_end("interrupted", independent=independent)
    contents = read_ledger(path)
    assert ledger.history == other.history == stated_history(banded_plan(), contents)
    assert ledger.history == ((banded_plan().event, 5), (banded_plan().event, 2 if independent else 32))


def test_dp_sgd_is_never_cut(tmp_path: Path) -> None:
    """Its steps cost the same, whenever they are taken."""
    plan = plan_of(noise="independent")
    ledger = run_for(tmp_path, plan, 6)
    assert steps_allowed(plan, read_ledger(ledger.path)) is None
    assert run_for(tmp_path, plan, 3).steps_planned == T
    assert read_ledger(ledger.path).history == [(plan.event, 9)]


def test_without_a_target_a_resumed_run_keeps_to_the_epsilon_of_its_plan(tmp_path: Path) -> None:
    """σ was given; the plan's printed ε still holds."""
    plan = plan_of(epsilon=None, noise_multiplier=1.5)
    for first, allowed in ((8, None), (6, 38)):
        ledger = run_for(tmp_path / str(first), plan, first)
        assert steps_allowed(plan, read_ledger(ledger.path)) == allowed
        resumed = [(plan.event, first), (plan.event, (allowed or T) - first)]
        assert epsilon(resumed, plan.delta) <= plan.epsilon


def test_a_run_of_which_no_round_is_left_is_not_resumed(tmp_path: Path) -> None:
    """Many broken starts use the rounds up."""
    for _ in range(10):
        ledger = run_for(tmp_path, banded_plan(), 1)
    with pytest.raises(ValueError, match="Release"):
        SharedLedger.open(ledger.path, banded_plan(), Processes())


def test_a_budget_counts_the_rounds_of_every_start(tmp_path: Path) -> None:
    """It is never charged less than the cost of its ledger, and other runs have the remaining ε."""
    file = tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=3.0, delta=1e-5, unit="sequence", num_units=1000)
    ledger = run_for(tmp_path / "run", banded_plan(), 6, str(file))
    run_for(tmp_path / "run", banded_plan(), 2, str(file))
    (entry,) = read_budget(file).entries
    assert entry.history == [(banded_plan().event, 6), (banded_plan().event, 32)] and entry.steps_charged is None
    resumed = SharedLedger.open(ledger.path, banded_plan(), Processes(), str(file))
    (entry,) = read_budget(file).entries
    assert entry.segments == (6, 2) and read_budget(file).spent <= 3.0
    resumed.append_end("interrupted", independent=True)
    resumed.close()
    (entry,) = read_budget(file).entries
    assert entry.history == [(banded_plan().event, 6), (banded_plan().event, 2), (banded_plan().event, 0)]
    assert read_budget(file).spent == epsilon([(banded_plan().event, 12)], 1e-5)


def test_a_budget_that_was_spent_meanwhile_refuses_the_resume(tmp_path: Path) -> None:
    """The round more that a resume costs must fit as well."""
    file = tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=banded_plan().epsilon, delta=1e-5, unit="sequence", num_units=1000)
    longer = dataclasses.replace(banded_plan(), target_epsilon=9.0)
    ledger = run_for(tmp_path / "run", longer, 6, str(file))
    with pytest.raises(BudgetError, match="If it is resumed"):
        SharedLedger.open(ledger.path, longer, Processes(), str(file))


def test_the_report_says_what_a_resume_left_out_and_verifies(tmp_path: Path) -> None:
    """Cycles, rounds, the steps left out, and the ε of the ledger."""
    for steps in (6, 32):
        ledger = run_for(tmp_path, banded_plan(), steps)
    contents = read_ledger(ledger.path)
    report = write_report(tmp_path, banded_plan(), contents)
    assert contents.num_steps == planned_steps(banded_plan(), contents) == 38
    assert report.statement.epsilon <= 3.0
    assert "cyclic truncated Poisson sampling" in report.definition.mechanism
    assert "noise has 4 bands" in report.accounting.event
    failed = [check for check in verify(tmp_path).checks if not check.ok]
    assert not failed, failed
    assert isinstance(banded_plan().event, BandedStep)


def test_a_resume_that_makes_blt_noise_cheaper_states_the_epsilon_of_the_plan(tmp_path: Path) -> None:
    """In two passes a unit's steps add up, unless the second begins afresh; but who resumes may have seen the first."""
    plan = make_plan(dataclasses.replace(BLT, dataset="chats"), 20, 8)  # two passes of four steps
    starts = [(plan.event, 4), (plan.event, 4)]
    assert epsilon(starts, plan.delta) < 0.98 * plan.epsilon
    file = tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=8.0, delta=1e-3, unit="sequence", num_units=20)
    ledger = run_for(tmp_path / "run", plan, 4, str(file))
    resumed = SharedLedger.open(ledger.path, plan, Processes(), str(file))
    for number in range(4, 8):
        resumed.append_step(number, plan.event)
        assert stated_history(plan, read_ledger(ledger.path)) == ((plan.event, 8),)
    resumed.append_end("completed")
    resumed.close()
    assert resumed.history == ((plan.event, 8),)
    contents = read_ledger(ledger.path)
    report = privacy_report(plan, contents)
    assert epsilon(contents.history, plan.delta) < plan.epsilon == report.statement.epsilon
    assert read_budget(file).spent == plan.epsilon
    contents.notes.stopped_independently = True
    assert stated_history(plan, contents) == ((plan.event, 8),)


def test_a_budget_without_room_for_the_plan_refuses_a_resume_that_would_be_cheaper(tmp_path: Path) -> None:
    """The ε that a settled run left may be taken; then the plan without a resume has to fit again, not the starts."""
    plan = make_plan(dataclasses.replace(BLT, dataset="chats"), 20, 8)
    file = tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=8.0, delta=1e-3, unit="sequence", num_units=20)
    ledger = run_for(tmp_path / "run", plan, 4, str(file))
    resumed = SharedLedger.open(ledger.path, plan, Processes(), str(file))
    resumed.append_end("a power cut", independent=True)
    resumed.close()
    small = make_plan(dataclasses.replace(BLT, dataset="chats", epsilon=1.0), 20, 1)
    charge(file, small, "chats")
    left = [(plan.event, 4), (plan.event, 4), (small.event, 1)]
    assert epsilon(left, plan.delta) < 8.0 < epsilon([(plan.event, 8), (small.event, 1)], plan.delta)
    with pytest.raises(BudgetError, match="allows ε"):
        SharedLedger.open(ledger.path, plan, Processes(), str(file))


@kills(
    "the budget of a run that a resume cuts short counts the steps that it may take",
    "dpllm/privacy/budget.py",
    "taken, self.steps_planned or self.steps_reserved)",
    "taken)",
)
@pytest.mark.parametrize("starts", [(2,), (2, 2)])
def test_the_budget_of_a_blt_run_that_resumes_cut_short_counts_its_report(tmp_path: Path, starts: tuple) -> None:
    """The report states at least the ε of all planned steps without a resume. After 2 and 2 steps more fit than after
    the first 2, since a third start adds up with nothing: the budget reserves them, and settles all that were taken."""
    plan, file = make_plan(dataclasses.replace(BLT, dataset="chats"), 20, 13), tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=8.0, delta=1e-3, unit="sequence", num_units=20)
    allowed: list[int | None] = []
    for num_steps in starts:
        ledger = run_for(tmp_path / "run", plan, num_steps, str(file))
        allowed.append(steps_allowed(plan, read_ledger(ledger.path)))
    resumed = SharedLedger.open(ledger.path, plan, Processes(), str(file))
    last = resumed.steps_planned or 0
    assert allowed[0] is not None and allowed[0] < 13 and last == (allowed[-1] or 13)
    assert (last > allowed[0]) == (starts == (2, 2))
    (entry,) = read_budget(file).entries
    assert entry.num_steps == last and read_budget(file).spent == plan.epsilon
    for number in range(sum(starts), last):
        resumed.append_step(number, plan.event)
    resumed.append_end("completed")
    resumed.close()
    contents = read_ledger(ledger.path)
    assert not contents.notes.open_points  # such as a budget that cannot be settled
    report = privacy_report(plan, contents)
    assert report.statement.epsilon == read_budget(file).spent == plan.epsilon
    assert epsilon(contents.history, plan.delta) < plan.epsilon
    assert read_budget(file).entries[0].history == [(plan.event, 13)]


def test_a_stop_that_is_declared_independent_says_nothing_about_the_resumes_before(tmp_path: Path) -> None:
    """BLT noise: 4 and 3 steps of two passes cost less than 7 in one go; the resume may have followed from the 4."""
    plan, file = make_plan(dataclasses.replace(BLT, dataset="chats"), 20, 8), tmp_path / "chats.budget.json"
    create_budget(file, dataset="chats", epsilon=8.0, delta=1e-3, unit="sequence", num_units=20)
    ledger = run_for(tmp_path / "run", plan, 4, str(file))
    resumed = SharedLedger.open(ledger.path, plan, Processes(), str(file))
    for number in range(4, 7):
        resumed.append_step(number, plan.event)
    resumed.append_end("a power cut", independent=True)
    resumed.close()
    contents = read_ledger(ledger.path)
    whole = ((plan.event, 7),)
    assert contents.notes.stopped_independently and resumed.history == stated_history(plan, contents) == whole
    assert epsilon(contents.history, plan.delta) < epsilon(whole, plan.delta) < plan.epsilon
    assert privacy_report(plan, contents).statement.epsilon == read_budget(file).spent == epsilon(whole, plan.delta)

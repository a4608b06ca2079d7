"""Plans, ledgers and budgets of runs of which only the best is released."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dpllm.audit.bounds import plan_family
from dpllm.audit.result import allowed_rates
from dpllm.config import ConfigError, PrivacyConfig
from dpllm.mechanism.parts import Spec
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import BudgetError, charge, create_budget, read_budget, require_room, settle
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.privacy.plan import PrivacyPlan, format_plan, make_plan
from dpllm.privacy.stated import claimed_history, stated_history, steps_allowed
from dpllm.report.statement import privacy_report
from tests.mutations import kills

TEN = {"kind": "logarithmic", "mean": 10}


def plan_of(**change: Any) -> PrivacyPlan:
    values = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 20, "selection": TEN, **change}
    return make_plan(PrivacyConfig(**values), num_units=1000, num_steps=20)


def ledger_of(path: Path, plan: PrivacyPlan, steps: int, resumed: int = 0, end: str | None = "completed") -> Any:
    with Ledger.create(path, plan) as ledger:
        for number in range(steps):
            ledger.append_step(number, plan.event)
        if end and not resumed:
            ledger.append_end(end)
    if resumed:
        with Ledger.open(path, plan) as ledger:
            for number in range(steps, steps + resumed):
                ledger.append_step(number, plan.event)
            ledger.append_end(end or "")
    return read_ledger(path)


def test_the_target_is_met_by_the_selection():
    """σ is larger than for one run, and ε of the plan is at most the target; no draw is truncated."""
    plan, single = plan_of(epsilon=2, noise_multiplier=None), plan_of(noise_multiplier=1.0, selection=None)
    alone = make_plan(PrivacyConfig(epsilon=2, clip_norm=1, expected_batch_size=20), 1000, 20)
    assert 1.99 < plan.epsilon <= 2 and plan.noise_multiplier > alone.noise_multiplier
    assert plan.max_batch_size == 1000 and single.max_batch_size < 1000
    assert epsilon(plan.history_of_run, plan.delta) < plan.epsilon
    rows = dict(format_plan(plan))
    assert "K is logarithmic with mean 10" in rows["released"] and "ε of one run by itself" in rows


def test_it_is_saved_and_read_with_its_hash(tmp_path):
    """The distribution is covered by the hash; a plan without one has none."""
    plan, path = plan_of(), tmp_path / "plan.json"
    plan.save(path)
    assert PrivacyPlan.load(path) == plan and json.loads(path.read_text())["format"] == 1
    assert plan.hash != dataclasses.replace(plan, selection=Spec.of({"kind": "logarithmic", "mean": 9})).hash
    assert dataclasses.replace(plan, selection=None).to_dict()["selection"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"max_batch_size": 100},
        {"stop": "independent"},
        {"epsilon": 8},
        {"budget_file": "b", "dataset": "d"},
        {"unit": "u", "max_rows_per_unit": 3, "sampling": "example"},
        {"selection": "best"},
        {"selection": {"kind": "logarithmic", "mean": 0}},
        {"selection": 10},
    ],
)
def test_what_no_selection_covers_is_refused(change):
    """Each is an error of the configuration."""
    with pytest.raises(ConfigError, match="selection"):
        plan_of(**change)


def test_a_truncated_plan_is_refused():
    """Also one that was not made by make_plan."""
    with pytest.raises(ValueError, match="truncated samples"):
        dataclasses.replace(plan_of(), max_batch_size=60)


@kills(
    "a run of a selection states its own cost",
    "dpllm/privacy/plan.py",
    "if self.selection is not None and contents.num_steps:",
    "if self.selection is None and contents.num_steps < 0:",
)
@kills(
    "a run that no tuning selected has no open point",
    "dpllm/report/definition.py",
    "if plan.selection is None or SELECTED in contents.notes.facts:",
    "if plan.selection is None or SELECTED:",
)
@pytest.mark.parametrize(("steps", "resumed"), [(20, 0), (7, 0), (7, 13)])
def test_the_stated_steps_are_those_of_the_selection(tmp_path, steps, resumed):
    """Whether the run was complete, stopped early, or was resumed; a declaration of independence changes nothing."""
    plan = plan_of()
    contents = ledger_of(tmp_path / "privacy_ledger.jsonl", plan, steps, resumed)
    assert stated_history(plan, contents) == tuple(plan.history)
    contents.notes.stopped_independently = True
    assert stated_history(plan, contents) == tuple(plan.history)
    report = privacy_report(plan, contents)
    assert report.statement.epsilon == plan.epsilon
    assert any("has not selected it" in point for point in report.open_points)
    assert report.accounting.steps.stated == 20


@pytest.mark.parametrize("noise", [{"kind": "banded", "bands": 4}, {"kind": "blt", "buffers": 1}])
def test_a_run_with_correlated_noise_that_stops_early_is_covered(tmp_path, noise):
    """It is the beginning of a run of the plan, also where n steps cost one round of their own; two starts are not."""
    plan = plan_of(noise=noise)
    stopped = ledger_of(tmp_path / "stopped.jsonl", plan, 3, end="stopped early")
    assert stated_history(plan, stopped) == tuple(plan.history)
    with pytest.raises(ValueError, match="complete run"):
        stated_history(plan, ledger_of(tmp_path / "twice.jsonl", plan, 17, resumed=3))


def test_a_run_with_more_rounds_than_planned_is_not_covered(tmp_path):
    """The theorem is about runs of the plan."""
    plan = plan_of()
    contents = ledger_of(tmp_path / "privacy_ledger.jsonl", plan, 21)
    with pytest.raises(ValueError, match="complete run"):
        stated_history(plan, contents)


def test_correlated_noise_is_not_resumed(tmp_path):
    """A resume begins a new cycle, and costs more than the other runs of the selection."""
    plan = plan_of(noise={"kind": "banded", "bands": 4})
    contents = ledger_of(tmp_path / "privacy_ledger.jsonl", plan, 6)
    with pytest.raises(ValueError, match="failed run"):
        steps_allowed(plan, contents)
    assert stated_history(plan, contents) == tuple(plan.history)


def test_a_budget_is_charged_for_the_selection(tmp_path):
    """Once, with its own ε; a single run of it is not charged as one."""
    plan, path = plan_of(dataset="d"), tmp_path / "budget.json"
    create_budget(path, dataset="d", epsilon=8.0, delta=1e-4, unit="sequence", num_units=1000)
    for refused in (charge, require_room):
        with pytest.raises(BudgetError, match="dpllm methods tune"):
            refused(path, plan, "d")
    entry = charge(path, plan, "d", of_all_runs=True)
    assert read_budget(path).spent == pytest.approx(plan.epsilon, rel=1e-9)
    settle(path, entry, 1)
    assert read_budget(path).spent == pytest.approx(plan.epsilon, rel=1e-9)
    with pytest.raises(BudgetError, match="other data"):
        charge(path, plan, "other", of_all_runs=True)
    with pytest.raises(BudgetError, match="budget covers"):
        charge(path, dataclasses.replace(plan, noise_multiplier=0.0), "d", of_all_runs=True)


def test_an_audit_holds_the_model_to_the_claim_of_the_selection(tmp_path):
    """A selected model may show more than one run may, and every bound of an audit takes its curve."""
    plan = plan_of()
    contents = ledger_of(tmp_path / "privacy_ledger.jsonl", plan, 20)
    assert claimed_history(plan, contents) == plan.history
    single = dataclasses.replace(plan, selection=None)
    assert claimed_history(single, contents) == contents.history
    claimed = allowed_rates(plan.history, [0.1], 100, 0.95)[0.1]
    assert claimed > allowed_rates(contents.history, [0.1], 100, 0.95)[0.1]
    assert plan_family(plan.history, plan.delta) is not None

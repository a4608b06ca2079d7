"""Tests of dpllm.report.checklist."""

from __future__ import annotations

from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Step
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.plan import make_plan
from dpllm.report.checklist import checklist, completed, disagreements
from dpllm.report.models import CrossCheck, PrivacyReport
from dpllm.report.statement import ReleaseNotes, privacy_report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PrivacyReport:
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=20), 1000, 5)
    planned = {"num_units": 1000, "sampling_rate": 0.02, "max_batch_size": 52, "noise_multiplier": 2.0}
    run = {"run": "a", "plan_hash": plan.hash, "version": "0", "started_at": "now", "entropy": "operating system"}
    contents = LedgerContents(
        path=tmp_path_factory.mktemp("run"),
        runs=[{**run, "public": [], "planned_step": planned, "budget": None}],
        history=[(plan.event, 5)],
        end="completed",
        sha256="0" * 64,
    )
    return privacy_report(plan, contents, ReleaseNotes(data_holder="the clinic"))


def check(epsilon: Any, ours: Any, bounds: Any = (0.0, 9.0)) -> list[CrossCheck]:
    values = {"name": "PRV", "epsilon": epsilon, "bounds": bounds, "pld_of_the_same_steps": ours, "note": ""}
    return [CrossCheck.model_validate(values)]


def test_each_line_is_answered_or_open(report: PrivacyReport) -> None:
    """A line is filled exactly if it has an answer, and each open line is a reason not to release."""
    lines = checklist(report)
    assert lines == report.checklist
    assert {line.section for line in lines} == {
        "setting",
        "definition",
        "accounting",
        "strength",
        "checkable",
        "utility",
    }
    for line in lines:
        assert line.filled == (line.answer is not None) and line.question.rstrip(".").strip()
        assert line.filled != (f"Not filled in: {line.question}" in report.open_points)
    assert next(line for line in lines if "raw data" in line.question).answer == "the clinic"


def test_more_steps_than_planned_is_an_open_point(report: PrivacyReport) -> None:
    """Steps beyond the plan cost more than was planned for, and the report says so."""
    steps = report.accounting.steps.model_copy(update={"charged": 9})
    edited = completed(report.with_part("accounting", steps=steps))
    assert "9 steps were charged, more than the 5 planned." in edited.open_points
    assert completed(report) == report
    assert not [point for point in report.open_points if "more than the" in point]


@pytest.mark.parametrize(("other", "ours"), [(5.06, 5.0), (4.94, 5.0), ("inf", 5.0), (5.0, "inf"), (0.055, 0.05)])
def test_accountants_that_disagree_are_named(other: Any, ours: Any) -> None:
    """More than 1 % between an estimate and ours, in either direction, is never passed over."""
    [line] = disagreements(check(other, ours))
    assert line.startswith("The two accountants disagree: PRV says")


@pytest.mark.parametrize(("other", "ours"), [(5.04, 5.0), ("inf", "inf"), (None, None), (0.0807, 0.0795)])
def test_accountants_that_agree_are_not(other: Any, ours: Any) -> None:
    """Within 1 %, or within the estimate's own error at a tiny ε, nothing is said."""
    assert disagreements(check(other, ours)) == []


def test_a_looser_bound_is_no_disagreement() -> None:
    """An upper bound may lie far above ours, but not below it."""
    assert disagreements(check(9.0, 5.0, bounds=None)) == []
    assert len(disagreements(check(4.9, 5.0, bounds=None))) == 1


def test_disagreement_reaches_the_open_points(report: PrivacyReport) -> None:
    """The line stands among the reasons not to release."""
    edited = completed(report.with_part("accounting", cross_checks=tuple(check(1.0, 5.0))))
    assert any("accountants disagree" in point for point in edited.open_points)


def test_step_is_what_the_fixture_says(report: PrivacyReport) -> None:
    """The parameters' line repeats the plan's numbers."""
    step = Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=2.0)
    line = next(line for line in report.checklist if line.question.startswith("With which parameters"))
    assert f"q = {step.sampling_rate:g}, expected batch 20, at most {step.max_batch_size}, T = 5" in line.answer

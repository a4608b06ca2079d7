"""Tests of dpllm.report.checklist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.mechanism.catalogue import to_fields
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.plan import make_plan
from dpllm.report.checklist import completed, disagreements, settled_by
from dpllm.report.definition import NOT_SELECTED
from dpllm.report.disclosures import DESTINATIONS, EVALUATION_DURING, TRAINING_LOSS
from dpllm.report.models import SECTIONS, CrossCheck, Fact, PrivacyReport, Settled, WrittenOut
from dpllm.report.statement import ReleaseNotes, privacy_report
from tests.mutations import kills


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PrivacyReport:
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=20), 1000, 5)
    run = {"run": "a", "plan_hash": plan.hash, "version": "0", "commit": None, "changed": False, "file": "a"}
    run |= {"started_at": "now", "entropy": "operating system", "planned_step": to_fields(plan.event)}
    contents = LedgerContents(
        path=tmp_path_factory.mktemp("run"),
        runs=[{**run, "public": [], "budget": None}],
        history=[(plan.event, 5)],
        end="completed",
        sha256="0" * 64,
    )
    return privacy_report(plan, contents, ReleaseNotes(data_holder="the clinic"))


def check(epsilon: Any, ours: Any, must_agree: bool = True) -> list[CrossCheck]:
    values = {"name": "PLD", "epsilon": epsilon, "must_agree": must_agree, "pld_of_the_same_steps": ours, "note": ""}
    return [CrossCheck.model_validate(values)]


def test_each_line_is_answered_or_open(report: PrivacyReport) -> None:
    """Each line names the section that answers it, and each open line is a reason not to release."""
    lines = report.checklist
    assert {line.section for line in lines} < set(SECTIONS)
    for line in lines:
        assert line.question.rstrip(".").strip()
        assert line.filled != (f"Not filled in: {line.question}" in report.open_points)
    assert next(line for line in lines if "raw data" in line.question).filled
    assert len(report.how_to_clear) == len(report.open_points) == 4


def test_each_open_point_says_what_clears_it(report: PrivacyReport) -> None:
    """A note, another run, or a statement of people; what the command says clears exactly that point."""
    for point, how in zip(report.open_points, report.how_to_clear, strict=True):
        noted = "dpllm report note . " in how and ' by="' not in how
        assert how and noted == point.startswith("Not filled in"), (point, how)
    place = next(at for at, point in enumerate(report.open_points) if "Who will see" in point)
    assert 'audience="…"' in report.how_to_clear[place] and "`release.audience`" in report.how_to_clear[place]


def by_people(points: Iterable[str], answer: str = "Each is a record") -> tuple[Settled, ...]:
    """Return statements of a person about some points."""
    return tuple(Settled(point=point, answer=answer, by="A. Meyer", at="2026-11-23T10:00:00+00:00") for point in points)


def test_people_settle_only_what_they_are_asked_to_check(report: PrivacyReport) -> None:
    """Their statement takes the place of the point; nothing else can be settled, and a statement cannot be empty."""
    asked = completed(report.model_copy(update={"noted_open_points": ("Rows have one length: confirm it.",)}))
    place = asked.open_points.index("Rows have one length: confirm it.") + 1
    assert asked.how_to_clear[place - 1] == f'`dpllm report note . {place}="what was checked" by="name and role"`'
    settled = settled_by(asked, [f"{place}= Each is  a record\n"])
    assert settled == {"Rows have one length: confirm it.": "Each is a record"}
    after = completed(asked.model_copy(update={"settlements": by_people(settled, "Perhaps") + by_people(settled)}))
    assert after.open_points == tuple(one for one in asked.open_points if "one length" not in one)
    assert after.settled_points == by_people(settled), "the last statement counts"
    assert after.settled_points[0].in_words == "Each is a record (settled on 23 November 2026 by A. Meyer)"
    other = next(at for at, point in enumerate(asked.open_points, 1) if point.startswith("Not filled in"))
    for answer, words in (
        (f"{other}=fine", "not settled by a statement"),
        ("99=fine", "names point 99"),
        ("0=fine", "names point 0"),
        (f"{place}= ", "must be the number of an open point"),
        ("fine", "must be the number of an open point"),
    ):
        with pytest.raises(ValueError, match=words):
            settled_by(asked, [answer])


@kills(
    "people settle a point that says that an audit refutes the claim",
    "dpllm/report/checklist.py",
    'Do not release it (see below).", _REPORT_IT)',
    'Do not release it (see below).", None)',
)
def test_a_refuted_or_unselected_run_is_never_settled(report: PrivacyReport) -> None:
    """A statement about a point that nothing clears changes nothing."""
    refuted = completed(
        report.with_part("strength", audit="FAIL: ε is at least 9", audit_noted="FAIL: ε is at least 9")
    )
    unselected = completed(report.model_copy(update={"noted_open_points": (NOT_SELECTED,)}))
    for found in (refuted, unselected):
        forged = completed(found.model_copy(update={"settlements": by_people(found.open_points)}))
        assert forged.open_points == found.open_points and forged.settled_points == ()


def test_files_that_are_not_for_release_follow_the_run(report: PrivacyReport) -> None:
    """TensorBoard's files and an audit's are listed where there are any; they are no open point."""
    files = " ".join(item.files for item in report.do_not_publish)
    assert "not_for_release/" in files and "TensorBoard" not in files and "audit.json" not in files
    fact = Fact(name=DESTINATIONS, values=("TensorBoard, the Trainer's state",))
    written = (WrittenOut(what=TRAINING_LOSS, count=3), WrittenOut(what=EVALUATION_DURING, count=1))
    logged = report.with_part("definition", facts=(fact,), written_out_and_not_covered=written)
    logged = completed(logged.with_part("strength", audit="consistent: ε is at least 0.1"))
    files = " ".join(item.files for item in logged.do_not_publish)
    assert "TensorBoard" in files and "audit.json" in files
    assert logged.open_points == report.open_points


def test_more_steps_than_planned_is_an_open_point(report: PrivacyReport) -> None:
    """Steps beyond the plan cost more than was planned for, and the report says so."""
    steps = report.accounting.steps.model_copy(update={"charged": 9})
    edited = completed(report.with_part("accounting", steps=steps))
    assert "9 steps were charged, more than the 5 planned." in edited.open_points
    assert completed(report) == report
    assert not [point for point in report.open_points if "more than the" in point]


@pytest.mark.parametrize(("other", "ours"), [(5.06, 5.0), (4.94, 5.0), ("inf", 5.0), (5.0, "inf"), (0.055, 0.05)])
def test_accountants_that_disagree_are_named(other: Any, ours: Any) -> None:
    """More than 1 % between another accountant and ours, in either direction, is never passed over."""
    [line] = disagreements(check(other, ours))
    assert line.startswith("The two accountants disagree: PLD computes")


@pytest.mark.parametrize(("other", "ours"), [(5.04, 5.0), ("inf", "inf"), (None, None), (0.0807, 0.0795)])
def test_accountants_that_agree_are_not(other: Any, ours: Any) -> None:
    """Within 1 %, or within the other accountant's own error at a tiny ε, nothing is said."""
    assert disagreements(check(other, ours)) == []


def test_a_looser_bound_is_no_disagreement() -> None:
    """An upper bound may lie far above ours, but not below it."""
    assert disagreements(check(9.0, 5.0, must_agree=False)) == []
    assert len(disagreements(check(4.9, 5.0, must_agree=False))) == 1


def test_disagreement_reaches_the_open_points(report: PrivacyReport) -> None:
    """The line stands among the reasons not to release."""
    edited = completed(report.with_part("accounting", cross_checks=tuple(check(1.0, 5.0))))
    assert any("accountants disagree" in point for point in edited.open_points)

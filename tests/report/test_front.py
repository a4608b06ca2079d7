"""Tests of dpllm.report.front: every kind of run on the first screen."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.data.units import ONE_ROW
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.privacy.stated import steps_allowed
from dpllm.report.definition import SELECTED, TRAINED_MODEL, UNITS_MADE_OF
from dpllm.report.disclosures import (
    DESTINATIONS,
    EVALUATION_DURING,
    EVALUATION_OUTSIDE,
    FINAL_LOSS,
    HELD_OUT,
    PREDICTION,
    TRAINING_LOSS,
    in_plain_words,
)
from dpllm.report.front import _alert, _to_do, bounds
from dpllm.report.models import PrivacyReport, day_in_words
from dpllm.report.pages import draw_figures, render_html, render_markdown
from dpllm.report.statement import ReleaseNotes, privacy_report
from tests.tiers import deep_case

NUM_STEPS = 12
NOTES = ReleaseNotes(
    data_holder="the clinic", audience="its staff", trained_by="research IT", base_model="org/base", dataset="notes"
)


def report_of(
    tmp_path: Path,
    notes: ReleaseNotes = NOTES,
    starts: tuple[int, ...] = (NUM_STEPS,),
    end: str | None = "completed",
    facts: tuple[tuple[str, str], ...] = (),
    budget: dict[str, str] | None = None,
    written: tuple[str, ...] = (),
    settled: str | None = None,
    **change: Any,
) -> PrivacyReport:
    """Return the report of a run that took steps up to each of some numbers, in a start each, with a settled point."""
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, "delta": 3e-7, **change}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS)
    path, first = tmp_path / "privacy_ledger.jsonl", 0
    for start in starts:
        public = ["starting weights: org/base", "pretraining text: old speeches"]
        opened = Ledger.open(path, plan) if first else Ledger.create(path, plan, public=public, budget=budget)
        with opened as ledger:
            for number in range(first, start):
                ledger.append_step(number, plan.event)
            for name, value in facts:
                ledger.append_fact(name, value)
            for what in written:
                ledger.append_disclosure(what, 2)
            if end is not None:
                ledger.append_end(end)
        first = start
    if settled is not None:
        with Ledger.annotate(path) as ledger:
            ledger.append_open_point(settled)
            ledger.append_settled(settled, "Each row is a record.", "A. Meyer")
    return privacy_report(plan, read_ledger(path), notes)


def test_the_first_screen_of_a_finished_run(tmp_path: Path) -> None:
    """What, who, when, for whom and how safe, in sentences; the base model is not named twice."""
    report = report_of(tmp_path, facts=((TRAINED_MODEL, "a LoRA adapter for a language model (gpt2)"),))
    front = report.front
    assert "based on org/base" in front.what and "1,000 private records" in front.what and "the clinic" in front.who
    assert "δ = 1 in 3.3 million" in front.numbers and "strong" in front.numbers
    assert front.not_covered.startswith("ε covers this run") and str(len(report.open_points)) in front.to_do
    assert front.alert == f"{len(report.open_points)} points are open: do not release the model yet."
    for page in (render_markdown(report), render_html(report, draw_figures(report))):
        assert page.index(front.alert) < page.index("Model and data"), "nobody has to scroll for it"


def test_numbers_on_the_front_hold(tmp_path: Path) -> None:
    """Two figures each, never below the bound, and without the model exactly the success of blind guessing."""
    report = report_of(tmp_path)
    success = report.strength.bayes_success["0.5"]
    (printed,) = re.findall(r"at most ([\d.]+)% of the time", report.front.odds)
    assert success <= float(printed) / 100 < success + 0.01
    assert [row.share_without for row in report.front.table] == [0.5, 0.01, 1e-6]
    known = {*report.strength.bayes_success.values(), *report.strength.true_positive_rate.values()}
    assert {row.at_most for row in report.front.table} <= known | {*report.strength.reconstruction.values()}
    for _, row in bounds(report.strength, "zero-out", "record"):
        number, _, unit = row.with_the_model.partition("%")
        share = float(number) / 100 if not unit and "%" in row.with_the_model else None
        share = float(number.split()[0]) / 1e6 if share is None else share
        assert row.at_most <= share * (1 + 1e-9) and share < row.at_most * 1.11 + 1e-9
    (epsilon,) = re.findall(r"ε = ([\d.]+) ", report.front.numbers)
    assert report.statement.epsilon <= float(epsilon) < report.statement.epsilon * 1.11


def test_users_and_rows(tmp_path: Path) -> None:
    """The column and the bound of users; rows where nothing says which record they are from."""
    for name in ("users", "rows"):
        (tmp_path / name).mkdir()
    users = report_of(tmp_path / "users", unit="patient", max_rows_per_unit=4)
    assert "same id in the column “patient”, of which at most 4 were used" in users.front.protected
    assert "1,000 users" in users.front.what and "whether one user's data was used" in users.front.odds
    rows = report_of(tmp_path / "rows", facts=((UNITS_MADE_OF, ONE_ROW),), adjacency="replace-one")
    assert rows.front.protected.startswith("Every single row of the training data")
    assert "which of two records was used" in rows.front.odds


def test_a_run_that_was_resumed_and_stopped(tmp_path: Path) -> None:
    """The number of starts, the steps that were taken, and why it ended."""
    when = report_of(tmp_path, starts=(3, 5, 7), end="interrupted").front.when
    assert "was resumed 2 times, the last time on " in when
    assert "and took 7 of 12 planned steps. It ended early (interrupted)." in when
    (tmp_path / "privacy_ledger.jsonl").unlink()
    assert report_of(tmp_path, starts=(7,)).front.numbers.endswith(" This is the ε of 12 steps, as planned.")
    assert report_of_unended(tmp_path / "running").front.when.endswith("It has not ended, or it crashed.")


def test_a_run_that_a_resume_cut_short_did_not_take_all_planned_steps(tmp_path: Path) -> None:
    """A resume of correlated noise may leave steps of the plan out: the page names the plan's own number of steps."""
    noise = {"kind": "banded", "bands": 4}
    plan = make_plan(
        PrivacyConfig(epsilon=8.0, delta=1e-3, clip_norm=1.0, expected_batch_size=10, noise=noise), 200, 16
    )
    path = tmp_path / LEDGER_FILE
    with Ledger.create(path, plan) as ledger:
        for number in range(5):
            ledger.append_step(number, plan.event)
    allowed = steps_allowed(plan, read_ledger(path))
    assert allowed is not None and 5 < allowed < 16
    with Ledger.open(path, plan, (), allowed) as ledger:
        for number in range(5, allowed):
            ledger.append_step(number, plan.event)
        ledger.append_end("completed")
    report = privacy_report(plan, read_ledger(path))
    resumed = day_in_words(report.checkable.runs[1].started_at)
    assert f"was resumed once, the last time on {resumed}, and took {allowed} of 16 " in report.front.when
    assert f" {16 - allowed} were skipped after a resume" in report.front.when
    assert "It ended early" not in report.front.when
    words = report.accounting.steps.words
    assert words.startswith(f"{allowed} of 16 planned steps were taken; {16 - allowed} were skipped after a resume")
    assert words.endswith("the run ended: completed")


def report_of_unended(folder: Path) -> PrivacyReport:
    folder.mkdir()
    return report_of(folder, starts=(4,), end=None)


def test_results_that_were_written_out_and_the_budget(tmp_path: Path) -> None:
    """Each with its number; the budget adds up other runs."""
    report = report_of(tmp_path, budget={"file": "letters.json", "entry": "a1b2"})
    with Ledger.annotate(tmp_path / "privacy_ledger.jsonl") as ledger:
        ledger.append_disclosure(TRAINING_LOSS, 1)
        ledger.append_disclosure("a table", 3)
    plan = make_plan(
        PrivacyConfig(noise_multiplier=2.0, clip_norm=0.5, expected_batch_size=20, delta=3e-7), 1000, NUM_STEPS
    )
    report = privacy_report(plan, read_ledger(tmp_path / "privacy_ledger.jsonl"), NOTES)
    assert f"ε does not cover: a table (3 times); {in_plain_words(TRAINING_LOSS)} (once)." in report.front.not_covered
    assert "(letters.json) adds up all runs" in report.front.not_covered


def test_the_best_of_several_runs(tmp_path: Path) -> None:
    """ε is that of the tuning, so its runs are no other runs; the number of runs is not printed."""
    selection = {"kind": "logarithmic", "mean": 10}
    front = report_of(tmp_path, facts=((SELECTED, "train.learning_rate=0.001"),), selection=selection).front
    assert "the best of a secret random number of training runs" in front.what
    assert "ε covers this tuning with all its runs" in front.not_covered and front.table


def test_a_report_that_an_audit_refutes_says_so_first(tmp_path: Path) -> None:
    """No odds beside it, and no tier: they are the claim that was refuted."""
    audited = dataclasses.replace(NOTES, audit="FAIL: 1,000 canaries: ε is at least 9")
    report = report_of(tmp_path, audited)
    assert report.front.odds.startswith("AN AUDIT REFUTES THIS REPORT.")
    assert report.front.table == () and report.front.numbers == ""
    page = render_html(report, draw_figures(report))
    assert '<header class="none">' in page and 'class="tier"' not in page


@pytest.mark.parametrize("change", [{"seed": 1}, {"noise_multiplier": 0}, {"starts": (0,)}])
def test_without_a_guarantee_no_odds_are_printed(tmp_path: Path, change: dict[str, Any]) -> None:
    """The front says why, as the statement does, and no page has a table of odds on it."""
    report = report_of(tmp_path, **change)
    assert report.front.odds == report.statement.words and report.front.table == ()
    assert "with it, at most</th>" not in render_html(report, draw_figures(report)).partition("<main>")[0]


def test_a_weak_guarantee_without_open_points_is_not_said_to_be_done() -> None:
    """Else a reader takes an empty list for a permission."""
    assert "weak" in _alert(0, "weak") and _alert(0, "reasonable") == "" and _alert(1, "weak").startswith("One point")
    assert _to_do(0, "weak").startswith("No point of this report is open, but its guarantee is weak")
    assert _to_do(0, "reasonable").startswith("Nothing") and _to_do(1, "weak").startswith("One point")


USERS = {"unit": "patient", "max_rows_per_unit": 4}
WRITTEN = (TRAINING_LOSS, FINAL_LOSS, EVALUATION_DURING, EVALUATION_OUTSIDE, HELD_OUT, PREDICTION)
KINDS = [
    pytest.param({}, id="records"),
    pytest.param({**USERS, "notes": ReleaseNotes(), "rows_kept": "random"}, id="users, nothing noted"),
    pytest.param({"seed": 1, "notes": ReleaseNotes()}, id="not private"),
    deep_case({"noise_multiplier": 0}, id="without noise"),
    deep_case({"noise_multiplier": 0.2}, id="weak"),
    deep_case({"adjacency": "replace-one", "starts": (3, 5), "end": "interrupted"}, id="replaced, stopped"),
    deep_case({"noise": {"kind": "blt", "buffers": 2}, "noise_multiplier": 4.0}, id="correlated noise"),
    deep_case({"selection": {"kind": "logarithmic", "mean": 10}}, id="the best of several runs"),
    deep_case({"starts": (0,), "end": None}, id="begun"),
]


def written_out(folder: Path, change: dict[str, Any]) -> PrivacyReport:
    """Return the report of a run that wrote out every kind of result, with a point that a person settled."""
    facts = ((TRAINED_MODEL, "a LoRA adapter for a language model (gpt2)"), (DESTINATIONS, "TensorBoard, WandB"))
    return report_of(folder, facts=facts, written=WRITTEN, settled="Rows have one length: confirm it.", **change)


@pytest.mark.parametrize("change", KINDS)
def test_a_space_follows_each_sentence_of_a_report(tmp_path: Path, change: dict[str, Any]) -> None:
    """Sentences are put together from parts."""
    page = render_markdown(written_out(tmp_path, change))
    assert not re.findall(r"[^`|]*[a-z]\.[A-Zε]\w* \w+ [^|\n]*", re.sub(r"`[^`]*`", "", page))

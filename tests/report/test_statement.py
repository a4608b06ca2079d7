"""Tests of dpllm.report.statement, dpllm.report.definition and dpllm.report.pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import dpllm.report.statement
from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import Ledger, LedgerContents, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.private_folder import read_diagnostics
from dpllm.report.disclosures import DESTINATIONS, TRAINING_LOSS, receivers
from dpllm.report.models import SECTIONS, BudgetEntry, PrivacyReport, WrittenOut, complaints, report_schema
from dpllm.report.pages import shown_beside
from dpllm.report.statement import ReleaseNotes, notes_in, privacy_report, render_markdown, write_report
from dpllm.report.verify import verify
from tests.mutations import kills

NUM_STEPS = 20
NOTES = ReleaseNotes(
    data_holder="the clinic",
    audience="the staff",
    other_uses="one tuning run at ε = 2",
    utility={"perplexity": 12.5},
)


@pytest.fixture(autouse=True)
def every_report_fits_the_schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hold each report that a test makes to the published schema."""
    schema = jsonschema.Draft202012Validator(report_schema())
    made = []

    def checked(*args: Any, **kwargs: Any) -> PrivacyReport:
        report = privacy_report(*args, **kwargs)
        made.append(json.loads(json.dumps(report.to_dict(), allow_nan=False)))
        assert PrivacyReport.read(made[-1]) == report
        return report

    monkeypatch.setattr("dpllm.report.statement.privacy_report", checked)
    yield
    for report in made:
        schema.validate(report)


def make(
    tmp_path: Path, taken: int = NUM_STEPS, end: str | None = "completed", **change: Any
) -> tuple[PrivacyPlan, Ledger]:
    """Return the plan and the open ledger of a run that took some of its steps."""
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, **change}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS)
    ledger = Ledger.create(tmp_path / "privacy_ledger.jsonl", plan, public=["pretrained on old speeches"])
    for number in range(taken):
        ledger.append_step(number, plan.event)
    if end is not None:
        ledger.append_end(end)
    return plan, ledger


def make_report(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes | None = None) -> PrivacyReport:
    """Return the report as the package makes it at this moment, so that the schema is held against it."""
    return dpllm.report.statement.privacy_report(plan, contents, notes)


def report_of(tmp_path: Path, notes: ReleaseNotes | None = None, **change: Any) -> PrivacyReport:
    plan, ledger = make(tmp_path, **change)
    ledger.close()
    return make_report(plan, read_ledger(ledger.path), notes)


def run_of(tmp_path: Path, plan: PrivacyPlan, **ledger_entries: Any) -> PrivacyReport:
    """Return the report of a run of all steps of a plan."""
    with Ledger.create(tmp_path / "privacy_ledger.jsonl", plan, **ledger_entries) as ledger:
        for number in range(plan.num_steps):
            ledger.append_step(number, plan.event)
        ledger.append_end("completed")
    return make_report(plan, read_ledger(ledger.path))


USERS = {"unit": "author", "max_rows_per_unit": 4, "rows_kept": "random", "dataset": "letters"}


def rows_drawn() -> PrivacyPlan:
    """Return a plan in which rows of users are drawn each by itself."""
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, "sampling": "example", **USERS}
    return make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS, num_examples=3000)


@kills(
    "a run that stops early states the steps it took",
    "dpllm/privacy/stated.py",
    "    return (*before, (event, taken + left))\n",
    "    return tuple(history)\n",
)
@pytest.mark.parametrize("end", ["interrupted", "completed", "stopped early", None])
def test_a_run_that_stops_early_states_the_epsilon_of_its_plan(tmp_path: Path, end: str | None) -> None:
    """Who stops because of what the run showed has used a mechanism of all planned steps; it is never "completed"."""
    plan, ledger = make(tmp_path, taken=7, end=end)
    report = write_report(tmp_path, plan, ledger)
    assert report.statement.epsilon == report.statement.epsilon_by_adjacency.zero_out == plan.epsilon
    assert report.statement.epsilon_by_adjacency.replace_one == plan.epsilon_under("replace-one")
    assert "7 of 20 planned steps were taken" in report.statement.words
    assert f"--steps {NUM_STEPS} " in report.checkable.recompute_from_the_numbers
    steps = report.accounting.steps
    assert (steps.charged, steps.stated) == (7, 20) and "ε is stated for all steps planned" in steps.words
    assert report.accounting.parameters.num_steps_planned == 20
    assert report.accounting.parameters.num_steps_charged == 7
    assert report.checkable.ended == ("stopped early" if end == "completed" else end)
    assert "completed" not in render_markdown(report)
    ledger.close()


def test_a_stop_that_was_declared_independent_states_the_epsilon_of_the_steps_taken(tmp_path: Path) -> None:
    """The declaration is in the ledger, and counts until the run goes on."""
    plan, ledger = make(tmp_path, taken=7, end=None)
    ledger.append_end("the allocation ended", independent=True)
    ledger.close()
    report = make_report(plan, read_ledger(ledger.path))
    assert report.statement.epsilon == epsilon([(plan.event, 7)], plan.delta) < plan.epsilon
    assert "declared independent" in report.statement.words
    assert "declared independent" in report.accounting.steps.words
    Ledger.open(ledger.path, plan).close()
    assert make_report(plan, read_ledger(ledger.path)).statement.epsilon == plan.epsilon


def test_a_run_without_a_step_states_nothing(tmp_path: Path) -> None:
    """Nothing was learnt from the data, so nothing can have depended on it."""
    plan, ledger = make(tmp_path, taken=0, end="failed")
    ledger.close()
    assert make_report(plan, read_ledger(ledger.path)).statement.epsilon == 0


def test_both_files_are_written_and_agree(tmp_path: Path) -> None:
    """The JSON is strict, holds the report, and the page is the page of that report."""
    plan, ledger = make(tmp_path)
    report = write_report(tmp_path, plan, ledger)
    ledger.close()
    stored = json.loads((tmp_path / "privacy_report.json").read_text(), parse_constant=pytest.fail)
    assert stored == report.to_dict() and PrivacyReport.read(stored) == report
    assert (tmp_path / "privacy_report.md").read_text() == render_markdown(report)
    assert not list(tmp_path.glob("*.tmp"))
    assert report.checkable.ledger_sha256 == read_ledger(ledger.path).sha256
    assert report.checkable.plan_hash == plan.hash


def test_headline_follows_the_adjacency(tmp_path: Path) -> None:
    """With replace-one in the plan, the headline is the replace-one ε and says so."""
    report = report_of(tmp_path, adjacency="replace-one")
    assert report.statement.epsilon == report.statement.epsilon_by_adjacency.replace_one
    assert report.statement.epsilon > report.statement.epsilon_by_adjacency.zero_out
    assert "been replaced by a different record" in report.statement.words
    assert "which of two records" in report.front.odds and "which of two records" in report.front.table[0].attack


def test_curve_falls_as_delta_rises(tmp_path: Path) -> None:
    """The curve starts at the run's δ, and a smaller δ costs a larger ε."""
    report = report_of(tmp_path)
    curve = [report.statement.epsilon_by_adjacency, *report.accounting.curve]
    assert report.statement.delta == 1e-4 and [row.delta for row in report.accounting.curve] == pytest.approx(
        [1e-5, 1e-6]
    )
    for values in ([row.zero_out for row in curve], [row.replace_one for row in curve]):
        assert values == sorted(values) and values[0] > 0


def test_what_the_reporting_guide_asks_for(tmp_path: Path) -> None:
    """Every line of the guide has its field, and every field reaches the page."""
    report = report_of(tmp_path, NOTES, dataset="letters to the clinic")
    assert report.open_points == ()
    page = render_markdown(report)
    for words in (
        "the staff",
        "letters to the clinic",
        "one tuning run at ε = 2",
        "perplexity",
        "pretrained on old speeches",
        "0.0001",
        "1 in 10,000",
        "| PLD of dp_accounting | 0.14",
        "dpllm epsilon --noise-multiplier 2.0 --sampling-rate 0.02 --steps 20 --delta 0.0001 --num-units 1000",
        report.checkable.ledger_sha256,
        report.checkable.plan_hash,
    ):
        assert words in page, words
    for line in report.checklist:
        assert line.filled and f"| {line.question} | {SECTIONS[line.section]} |" in page
    for name, value in shown_beside(report)["parameters"]:
        assert f"| {name} | {'-' if value is None else value} |" in page


def test_what_is_missing_is_a_reason_not_to_release(tmp_path: Path) -> None:
    """A point that nobody filled in is named before anything else."""
    report = report_of(tmp_path)
    assert "Not filled in: Who holds the raw data?" in report.open_points
    assert len(report.open_points) == 5
    assert sum(not line.filled for line in report.checklist) == 5
    page = render_markdown(report)
    assert "5 points are open. Do not release" in page and page.count("| **not filled in** |") == 5
    assert page.count("Cleared by: ") == 5


def test_disclosures_are_listed_with_counts_and_diagnostics_leave_no_trace(tmp_path: Path) -> None:
    """What was written out and isn't covered stands in the report, and is an open point; no count of units does."""
    plan, ledger = make(tmp_path)
    ledger.append_disclosure("training loss", 3)
    ledger.append_disclosure("training loss", 2)
    ledger.append_diagnostic("units with a non-finite gradient", 4)
    report = write_report(tmp_path, plan, ledger)
    ledger.close()
    assert report.definition.written_out_and_not_covered == (WrittenOut(what="training loss", count=5),)
    assert read_diagnostics(tmp_path) == {"units with a non-finite gradient": 4}
    assert any("not cover" in point for point in report.open_points)
    page = render_markdown(report)
    assert "| training loss | 5 |" in page and "non-finite" not in page + json.dumps(report.to_dict())


def test_training_losses_that_stay_with_the_run_are_listed_and_no_open_point(tmp_path: Path) -> None:
    """They are open once an integration received them, in any of the runs that the ledger counts."""
    plan, ledger = make(tmp_path)
    ledger.append_fact(DESTINATIONS, receivers([]))
    ledger.append_disclosure(TRAINING_LOSS, 3)
    report = write_report(tmp_path, plan, ledger)
    assert report.definition.written_out_and_not_covered == (WrittenOut(what=TRAINING_LOSS, count=3),)
    assert not any("not cover" in point for point in report.open_points)
    ledger.append_fact(DESTINATIONS, "TensorBoard, the Trainer's state")
    report = write_report(tmp_path, plan, ledger)
    assert not any("not cover" in point for point in report.open_points)
    assert any("TensorBoard" in item.files for item in report.do_not_publish)
    ledger.append_fact(DESTINATIONS, "WandB, the Trainer's state")
    report = write_report(tmp_path, plan, ledger)
    ledger.close()
    assert any(TRAINING_LOSS in point for point in report.open_points)


def test_no_noise_is_infinite_in_words(tmp_path: Path) -> None:
    """σ = 0: ε is "inf" in the JSON and "infinite: no privacy" on the page; nothing claims privacy."""
    report = report_of(tmp_path, noise_multiplier=0)
    plain = report.to_dict()
    assert plain["statement"]["epsilon"] == "inf" and not report.statement.private
    assert plain["statement"]["epsilon_by_adjacency"] == {"zero-out": "inf", "replace-one": "inf"}
    assert [check["epsilon"] for check in plain["accounting"]["cross_checks"]] == ["inf"] * 2
    assert plain["accounting"]["zcdp_rho"] == "inf" and plain["curves"]["tradeoff"]["true_positive_rate"] == []
    assert report.strength.tier == "none" and report.strength.advantage == 1.0
    page = render_markdown(report)
    assert page.startswith("# NOT PRIVATE") and "infinite: no privacy" in page and "satisfies" not in page
    json.dumps(plain, allow_nan=False)


def test_seeded_run_is_not_private_first_thing(tmp_path: Path) -> None:
    """A fixed seed is the first thing the page and the statement say."""
    report = report_of(tmp_path, seed=1)
    assert not report.statement.private and report.statement.words.startswith("NOT PRIVATE")
    assert report.strength.tier == "none"
    assert report.front.odds == report.statement.words and report.front.table == ()
    page = render_markdown(report)
    assert page.startswith("# NOT PRIVATE") and "fixed seed (NOT PRIVATE)" in page and "satisfies" not in page


def test_cross_checks(tmp_path: Path) -> None:
    """The other accountants lie above the stated ε, dp_accounting's by very little: nothing disagrees."""
    report = report_of(tmp_path)
    epsilon = report.statement.epsilon_by_adjacency.zero_out
    library, renyi = report.accounting.cross_checks
    assert library.must_agree and library.epsilon == pytest.approx(epsilon, abs=2e-3)
    assert epsilon < library.epsilon < epsilon + 5e-3 and epsilon < renyi.epsilon
    assert not [point for point in report.open_points if "disagree" in point]
    assert f"| {library.name} | {library.epsilon:.3f}"[:-1] in render_markdown(report)


def test_truncation_is_not_taken_for_a_disagreement(tmp_path: Path) -> None:
    """dp_accounting knows a maximal batch that costs a lot of ε; Rényi accounting is compared without it."""
    report = report_of(tmp_path, max_batch_size=22)
    library, renyi = report.accounting.cross_checks
    assert library.epsilon == pytest.approx(report.statement.epsilon_by_adjacency.zero_out, abs=2e-3)
    assert report.statement.epsilon_by_adjacency.zero_out > 2 * renyi.pld_of_the_same_steps
    assert not [point for point in report.open_points if "disagree" in point]


@pytest.mark.parametrize(("size", "sigma", "tier"), [(20, 2.0, "strong"), (500, 3.0, "reasonable"), (500, 1.2, "weak")])
def test_tiers(tmp_path: Path, size: int, sigma: float, tier: str) -> None:
    """ε up to 1 is strong, up to 10 reasonable, above weak with an audit asked for."""
    strength = report_of(tmp_path, expected_batch_size=size, noise_multiplier=sigma).strength
    assert strength.tier == tier
    assert ("audit" in strength.words) == (tier == "weak")


def test_before_the_first_step(tmp_path: Path) -> None:
    """A run without a step has learnt nothing, and its report says that it has not ended."""
    report = report_of(tmp_path, taken=0, end=None)
    assert report.statement.epsilon == 0.0 and "No step has been charged" in report.statement.words
    assert any("has not ended" in point for point in report.open_points)
    render_markdown(report)


def test_crash_and_resume_are_charged(tmp_path: Path) -> None:
    """A step torn by a crash and the steps of a resumed run are all in ε."""
    plan, ledger = make(tmp_path, taken=5, end=None)
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes()[:-30])
    with Ledger.open(ledger.path, plan) as resumed:
        assert resumed.num_steps == 5  # four are whole, and what was torn was a step
        for number in range(resumed.num_steps, NUM_STEPS):
            resumed.append_step(number, plan.event)
        resumed.append_end("completed")
        report = write_report(tmp_path, plan, resumed)
    assert report.statement.epsilon == plan.epsilon and report.checkable.ended == "completed"
    assert report.checkable.torn_lines == (6,)
    assert "from 2 starts of the run" in render_markdown(report) and "was resumed once" in report.front.when
    assert "steps that a crash cut off are charged: 1" in render_markdown(report)


def test_the_unit_is_not_everybody_its_text_names(tmp_path: Path) -> None:
    """Other people whom a record names have no guarantee of their own, and drawn rows publish their exact number."""
    for change in ({}, {"unit": "sender", "max_rows_per_unit": 4}):
        folder = tmp_path / str(len(change))
        folder.mkdir()
        assert "Other people who are mentioned in a unit's text are not" in report_of(folder, **change).definition.unit
    report = run_of(tmp_path, rows_drawn())
    assert "the exact number of rows to draw from" in report.definition.public[0]


def test_rows_drawn_each_by_itself(tmp_path: Path) -> None:
    """Example-level sampling: what is drawn, the bound k, the event it is accounted as, and no truncation anywhere."""
    plan = rows_drawn()
    report = run_of(tmp_path, plan)
    mechanism, event = report.definition.mechanism, report.accounting.event
    assert "example-level sampling (ELS)" in mechanism and "every one of 3000 rows is drawn" in mechanism
    assert "mixture of Gaussians" in event and "k = 4" in event and "arXiv:2407.07737" in event
    assert report.statement.epsilon == epsilon([(plan.event, NUM_STEPS)], plan.delta)
    assert report.statement.epsilon > epsilon(
        [(Step(num_units=1000, sampling_rate=plan.sampling_rate, noise_multiplier=2.0, clip_norm=0.5), NUM_STEPS)],
        plan.delta,
    )
    library, renyi = report.accounting.cross_checks
    assert renyi.epsilon is None and "does not apply" in renyi.note
    assert library.epsilon == pytest.approx(report.statement.epsilon, abs=5e-3)
    command = report.checkable.recompute_from_the_numbers
    assert "--rows-per-unit 4" in command and "--max-batch-size" not in command


def test_data_set_budget_and_steps(tmp_path: Path) -> None:
    """The data set's name, the entry of its budget file, and why a run took fewer steps than were asked for."""
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, "max_batch_size": 60, **USERS}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS)
    plan = dataclasses.replace(plan, target_epsilon=0.5, num_steps_wanted=50)
    report = run_of(tmp_path, plan, budget={"file": "letters.json", "entry": "a1b2"})
    assert report.definition.dataset == "letters"
    assert report.accounting.budget == (BudgetEntry(file="letters.json", entry="a1b2"),)
    assert report.accounting.steps.model_dump() == {
        "wanted": 50,
        "planned": 20,
        "charged": 20,
        "stated": 20,
        "torn_by_a_crash": 0,
        "words": "50 steps were requested, and the target ε = 0.5 allows 20; 20 of 20 planned steps were taken; the "
        "run ended: completed",
    }
    page = render_markdown(report)
    assert "entry a1b2 of letters.json" in page and "50 steps were requested" in page


def test_both_adjacencies_stand_in_the_statement(tmp_path: Path) -> None:
    """The headline names ε under the other adjacency too, rounded up."""
    report = report_of(tmp_path)
    assert report.statement.epsilon_by_adjacency == report.statement.epsilon_by_adjacency
    other = report.statement.epsilon_by_adjacency.replace_one
    assert f"(replace-one adjacency), ε = {other + 5e-5:.4f}" in report.statement.words


def test_zcdp(tmp_path: Path) -> None:
    """ρ = T / (2σ²), k² times that where k rows of a user are clipped each by itself."""
    assert report_of(tmp_path).accounting.zcdp_rho == pytest.approx(20 / 8)
    (tmp_path / "privacy_ledger.jsonl").unlink()
    assert run_of(tmp_path, rows_drawn()).accounting.zcdp_rho == pytest.approx(16 * 20 / 8)


def test_an_audit_that_refutes_the_claim_is_a_reason_not_to_release(tmp_path: Path) -> None:
    """The report says so first among its open points; an audit that is consistent leaves none."""
    refuted = report_of(tmp_path, ReleaseNotes(audit="FAIL: 1,000 canaries: ε is at least 9"))
    assert "An audit of this model refutes the guarantee. Do not release it (see below)." in refuted.open_points
    (tmp_path / "privacy_ledger.jsonl").unlink()
    fine = report_of(tmp_path, ReleaseNotes(audit="consistent, not proof: ε is at least 0.3"))
    assert not [point for point in fine.open_points if "audit" in point.lower()]


def test_weak_guarantee_asks_for_an_audit(tmp_path: Path) -> None:
    """Above ε = 10 a missing audit is an open point, and one that was noted answers it."""
    change: dict[str, Any] = {"expected_batch_size": 500, "noise_multiplier": 1.2}
    assert "Not filled in: What did an empirical audit find?" in report_of(tmp_path, **change).open_points
    (tmp_path / "privacy_ledger.jsonl").unlink()
    report = report_of(tmp_path, ReleaseNotes(audit="ε of at least 1.3 at 95 %"), **change)
    assert not [point for point in report.open_points if "audit" in point]
    assert "Empirical audit: ε of at least 1.3 at 95 %." in render_markdown(report)


def test_schema_refuses_missing_and_additional_keys(tmp_path: Path) -> None:
    """Every fixed key is required, and no other is allowed, at every depth."""
    schema = jsonschema.Draft202012Validator(report_schema())
    report = report_of(tmp_path, NOTES).to_dict()
    for path in ((), ("statement",), ("accounting", "parameters"), ("checkable", "plan"), ("curves", "tradeoff")):
        for change in ("missing", "additional"):
            edited = json.loads(json.dumps(report))
            part = edited
            for name in path:
                part = part[name]
            if change == "missing":
                part.pop(next(iter(part)))
            else:
                part["something"] = 1
            assert not schema.is_valid(edited) and len(complaints(PrivacyReport, edited)) == 1, (path, change)


def test_foreign_ledger_is_refused(tmp_path: Path) -> None:
    """A ledger of another plan, or with steps that are not the plan's, makes no report."""
    plan, ledger = make(tmp_path)
    ledger.close()
    contents = read_ledger(ledger.path)
    with pytest.raises(ValueError, match="written under"):
        privacy_report(dataclasses.replace(plan, clip_norm=9.0), contents)
    contents.history.append(
        (Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=9.0, clip_norm=0.5), 1)
    )
    with pytest.raises(ValueError, match="charges steps"):
        privacy_report(plan, contents)


def test_damaged_ledger_makes_no_report(tmp_path: Path) -> None:
    """An edited ledger is an error, not a report of what is left of it."""
    plan, ledger = make(tmp_path)
    ledger.path.write_text(ledger.path.read_text().replace('"step": 3,', '"step": 2,'))
    with pytest.raises(LedgerError, match="line 5"):
        write_report(tmp_path, plan, ledger)
    ledger.close()
    assert not (tmp_path / "privacy_report.md").exists()


def test_what_people_noted_survives_a_recomputation(tmp_path: Path) -> None:
    """`dpllm report` computes everything else anew; a folder without a report has no notes."""
    notes = dataclasses.replace(NOTES, audit="none found anything")
    plan, ledger = make(tmp_path)
    assert notes_in(tmp_path) == ReleaseNotes()
    write_report(tmp_path, plan, ledger, notes)
    assert notes_in(tmp_path) == notes


def test_facts_and_open_points_of_the_ledger_are_in_every_form(tmp_path: Path) -> None:
    """The report shows facts with their values; an open point of the ledger is a reason not to release yet."""
    plan, ledger = make(tmp_path, end=None)
    ledger.append_fact("largest difference of a row's loss", 2.5e-6)
    ledger.append_fact("largest difference of a row's loss", 3e-6)
    ledger.append_open_point("All rows have 128 tokens: add a column record.")
    ledger.append_end("completed")
    ledger.close()
    plan.save(tmp_path / PLAN_FILE)
    write_report(tmp_path, plan, read_ledger(ledger.path))
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    assert report["definition"]["facts"] == [{"name": "largest difference of a row's loss", "values": [2.5e-6, 3e-6]}]
    assert "All rows have 128 tokens: add a column record." in report["open_points"]
    (point,) = report["noted_open_points"]
    assert ' by="' in report["how_to_clear"][report["open_points"].index(point)]
    for name in ("privacy_report.md", "privacy_report.html"):
        text = (tmp_path / name).read_text()
        assert "Facts about the run" in text and "2.5e-06, then 3e-06" in text and point in text
    assert verify(tmp_path).ok
    edited = (tmp_path / "privacy_report.json").read_text().replace("3e-06", "3e-07")
    (tmp_path / "privacy_report.json").write_text(edited)
    assert not verify(tmp_path).ok


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ({"audience": 5}, r"the note audience must be a text, got 5 \(int\)"),
        ({"data_holder": "…"}, "the note data_holder is '…'"),
        ({"trained_by": "name and role"}, "the note trained_by is 'name and role'"),
        ({"utility": {"perplexity": float("nan")}}, "utility must contain only"),
        ({"utility": {"perplexity": {1}}}, "utility must contain only"),
    ],
)
def test_a_note_that_no_report_can_hold_is_refused_when_it_is_made(notes: dict[str, Any], words: str) -> None:
    """It would otherwise be found when the trained model is saved."""
    with pytest.raises(ValueError, match=words):
        ReleaseNotes(**notes)

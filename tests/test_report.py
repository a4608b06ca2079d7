"""Tests of dpllm.report and dpllm.markdown."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dpllm.accounting import Step, epsilon
from dpllm.config import PrivacyConfig
from dpllm.ledger import Ledger, LedgerError, read_ledger
from dpllm.plan import PrivacyPlan, make_plan
from dpllm.report import ReleaseNotes, notes_in, privacy_report, render_markdown, write_report

NUM_STEPS = 20


def make(
    tmp_path: Path, taken: int = NUM_STEPS, end: str | None = "completed", **change: Any
) -> tuple[PrivacyPlan, Ledger]:
    """Return the plan and the open ledger of a run that took some of its steps."""
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, **change}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS)
    ledger = Ledger.create(tmp_path / "privacy_ledger.jsonl", plan, public=["pretrained on old speeches"])
    for number in range(taken):
        ledger.append_step(number, plan.step)
    if end is not None:
        ledger.append_end(end)
    return plan, ledger


def report_of(tmp_path: Path, notes: ReleaseNotes | None = None, **change: Any) -> dict[str, Any]:
    plan, ledger = make(tmp_path, **change)
    ledger.close()
    return privacy_report(plan, read_ledger(ledger.path), notes)


def test_epsilon_is_that_of_the_ledger(tmp_path: Path) -> None:
    """A run that ended early costs what it took, not what was planned."""
    plan, ledger = make(tmp_path, taken=7, end="interrupted")
    report = write_report(tmp_path, plan, ledger)
    spent = epsilon([(plan.step, 7)], plan.delta)
    assert report["statement"]["epsilon"] == report["accounting"]["epsilon"]["zero-out"] == spent < plan.epsilon
    assert report["accounting"]["epsilon"]["replace-one"] == epsilon([(plan.step, 7)], plan.delta, "replace-one")
    assert report["accounting"]["parameters"]["num_steps_planned"] == 20
    assert report["accounting"]["parameters"]["num_steps_charged"] == 7
    assert report["checkable"]["ended"] == "interrupted"
    ledger.close()


def test_both_files_are_written_and_agree(tmp_path: Path) -> None:
    """The JSON is strict, holds the report, and the page is the page of that report."""
    plan, ledger = make(tmp_path)
    report = write_report(tmp_path, plan, ledger)
    ledger.close()
    stored = json.loads((tmp_path / "privacy_report.json").read_text(), parse_constant=pytest.fail)
    assert stored == report
    assert (tmp_path / "privacy_report.md").read_text() == render_markdown(report)
    assert not list(tmp_path.glob("*.tmp"))
    assert report["checkable"]["ledger_sha256"] == read_ledger(ledger.path).sha256
    assert report["checkable"]["plan_hash"] == plan.hash


def test_headline_follows_the_adjacency(tmp_path: Path) -> None:
    """With replace-one in the plan, the headline is the replace-one ε and says so."""
    report = report_of(tmp_path, adjacency="replace-one")
    assert report["statement"]["epsilon"] == report["accounting"]["epsilon"]["replace-one"]
    assert report["statement"]["epsilon"] > report["accounting"]["epsilon"]["zero-out"]
    assert "been another record" in report["statement"]["words"]
    assert "which of two records" in report["strength"]["in_plain_words"][0]


def test_curve_falls_as_delta_rises(tmp_path: Path) -> None:
    """The curve starts at the run's δ, and a smaller δ costs a larger ε."""
    curve = report_of(tmp_path)["accounting"]["curve"]
    assert curve[0]["delta"] == 1e-4 and len(curve) == 4
    for name in ("zero-out", "replace-one"):
        values = [row[name] for row in curve]
        assert values == sorted(values) and values[0] > 0


def test_what_the_reporting_guide_asks_for(tmp_path: Path) -> None:
    """Every line of the guide has its field, and every field reaches the page."""
    notes = ReleaseNotes(
        data_holder="the clinic",
        audience="the staff",
        other_uses="one tuning run at ε = 2",
        utility={"perplexity": 12.5},
    )
    report = report_of(tmp_path, notes)
    assert report["open_points"] == []
    page = render_markdown(report)
    for words in (
        "central differential privacy",
        "the clinic",
        "the staff",
        "one tuning run at ε = 2",
        "perplexity",
        "one record of the training data",
        "several rows",
        "contributes nothing in one of them",
        "pretrained on old speeches",
        "every checkpoint",
        "noisy gradients",
        "hyper-parameter tuning",
        "tokenizer",
        "running time",
        "dp_accounting 0.",
        "discretization 0.0001",
        "Rényi",
        "ρ-zCDP",
        "Poisson",
        "public constant",
        "operating system",
        "chained by hashes",
        "blind guessing",
        "dpllm report OUTPUT_DIR",
        "dpllm epsilon --noise-multiplier 2.0 --sampling-rate 0.02 --steps 20 --delta 0.0001 --num-units 1000",
        report["checkable"]["ledger_sha256"],
        report["checkable"]["plan_hash"],
    ):
        assert words in page, words
    for name, value in report["accounting"]["parameters"].items():
        assert f"| {name} | {'-' if value is None else value} |" in page


def test_what_is_missing_is_a_reason_not_to_release(tmp_path: Path) -> None:
    """A point that nobody filled in is named before anything else."""
    report = report_of(tmp_path)
    assert [point for point in report["open_points"] if point.startswith("Not filled in: who holds the raw data")]
    assert len(report["open_points"]) == 4
    assert "a reason not to release" in render_markdown(report)


def test_disclosures_and_diagnostics_are_listed_with_counts(tmp_path: Path) -> None:
    """What was written out and isn't covered stands in the report, and is an open point."""
    plan, ledger = make(tmp_path)
    ledger.append_disclosure("training loss", 3)
    ledger.append_disclosure("training loss", 2)
    ledger.append_diagnostic("units with a non-finite gradient", 4)
    report = write_report(tmp_path, plan, ledger)
    ledger.close()
    assert report["definition"]["written_out_and_not_covered"] == [{"what": "training loss", "count": 5}]
    assert report["checkable"]["diagnostics_not_covered"] == {"units with a non-finite gradient": 4}
    assert any("written out" in point for point in report["open_points"])
    page = render_markdown(report)
    assert "| training loss | 5 |" in page and "| units with a non-finite gradient | 4 |" in page


def test_no_noise_is_infinite_in_words(tmp_path: Path) -> None:
    """σ = 0: ε is "inf" in the JSON and "infinite: no privacy" on the page; nothing claims privacy."""
    report = report_of(tmp_path, noise_multiplier=0)
    assert report["statement"]["epsilon"] == "inf" and not report["statement"]["private"]
    assert report["accounting"]["epsilon"] == {"zero-out": "inf", "replace-one": "inf"}
    assert [check["epsilon"] for check in report["accounting"]["cross_checks"]] == ["inf", "inf"]
    assert report["strength"]["tier"] == "none" and report["strength"]["advantage"] == 1.0
    page = render_markdown(report)
    assert page.startswith("# NOT PRIVATE") and "infinite: no privacy" in page and "satisfies" not in page
    json.dumps(report, allow_nan=False)


def test_seeded_run_is_not_private_first_thing(tmp_path: Path) -> None:
    """A fixed seed is the first thing the page and the statement say."""
    report = report_of(tmp_path, seed=1)
    assert not report["statement"]["private"] and report["statement"]["words"].startswith("NOT PRIVATE")
    assert report["strength"]["tier"] == "none"
    assert all(line.startswith("Not with the fixed seed") for line in report["strength"]["in_plain_words"])
    page = render_markdown(report)
    assert page.startswith("# NOT PRIVATE") and "fixed seed (NOT PRIVATE)" in page and "satisfies" not in page


def test_cross_checks_are_looser(tmp_path: Path) -> None:
    """Both checks lie above the stated ε: one below it would show a fault."""
    report = report_of(tmp_path)
    for check in report["accounting"]["cross_checks"]:
        assert report["accounting"]["epsilon"]["zero-out"] < check["epsilon"]


@pytest.mark.parametrize(("size", "sigma", "tier"), [(20, 2.0, "strong"), (500, 3.0, "reasonable"), (500, 1.2, "weak")])
def test_tiers(tmp_path: Path, size: int, sigma: float, tier: str) -> None:
    """ε up to 1 is strong, up to 10 reasonable, above weak with an audit asked for."""
    strength = report_of(tmp_path, expected_batch_size=size, noise_multiplier=sigma)["strength"]
    assert strength["tier"] == tier
    assert ("audit" in strength["words"]) == (tier == "weak")


def test_never_zero_after_a_step(tmp_path: Path) -> None:
    """One step with a lot of noise still costs something, in the JSON and on the page."""
    report = report_of(tmp_path, taken=1, noise_multiplier=500.0)
    assert report["statement"]["epsilon"] > 0
    assert "ε = 0.0000" not in render_markdown(report) and "| 0.0000 |" not in render_markdown(report)


def test_before_the_first_step(tmp_path: Path) -> None:
    """A run without a step has learnt nothing, and its report says that it has not ended."""
    report = report_of(tmp_path, taken=0, end=None)
    assert report["statement"]["epsilon"] == 0.0 and "No step has been charged" in report["statement"]["words"]
    assert any("has not ended" in point for point in report["open_points"])
    render_markdown(report)


def test_crash_and_resume_are_charged(tmp_path: Path) -> None:
    """A step torn by a crash and the steps of a resumed run are all in ε."""
    plan, ledger = make(tmp_path, taken=5, end=None)
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes()[:-30])
    with Ledger.open(ledger.path, plan) as resumed:
        resumed.append_step(5, plan.step)
        resumed.append_end("completed")
        report = write_report(tmp_path, plan, resumed)
    assert report["statement"]["epsilon"] == epsilon([(plan.step, 6)], plan.delta)
    assert report["checkable"]["torn_lines"] == [6]
    assert "of 2 run(s)" in render_markdown(report)
    assert "1 step(s) torn by a crash are charged" in render_markdown(report)


def test_user_level_words(tmp_path: Path) -> None:
    """At user level the unit, its column and its bound are named."""
    report = report_of(tmp_path, unit="user", unit_column="sender", max_rows_per_unit=4)
    assert "'sender'" in report["definition"]["unit"] and "at most 4 rows" in report["definition"]["unit"]
    assert "every single user" in report["statement"]["words"]


def test_zcdp_where_it_exists(tmp_path: Path) -> None:
    """With every unit in every step, ρ = T / (2σ²); with sampling there is none."""
    assert report_of(tmp_path)["accounting"]["zcdp_rho"] is None
    (tmp_path / "privacy_ledger.jsonl").unlink()
    full = report_of(tmp_path, expected_batch_size=1000, noise_multiplier=10.0)
    assert full["accounting"]["zcdp_rho"] == pytest.approx(20 / 200)


def test_foreign_ledger_is_refused(tmp_path: Path) -> None:
    """A ledger of another plan, or with steps that are not the plan's, makes no report."""
    plan, ledger = make(tmp_path)
    ledger.close()
    contents = read_ledger(ledger.path)
    with pytest.raises(ValueError, match="written under another plan"):
        privacy_report(dataclasses.replace(plan, clip_norm=9.0), contents)
    contents.history.append((Step(1000, 0.02, 52, 9.0, 0.5), 1))
    with pytest.raises(ValueError, match="charges steps that are not those of its plan"):
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
    notes = ReleaseNotes(data_holder="the clinic", audience="everyone", other_uses="none", utility={"perplexity": 4.2})
    plan, ledger = make(tmp_path)
    assert notes_in(tmp_path) == ReleaseNotes()
    write_report(tmp_path, plan, ledger, notes)
    assert notes_in(tmp_path) == notes

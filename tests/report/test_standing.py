"""Tests of dpllm.report.verify: the guarantee of a folder is that of its ledger, or there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpllm.config import PrivacyConfig
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.plan import PLAN_FILE, make_plan
from dpllm.report.statement import JSON_FILE, write_report
from dpllm.report.verify import standing_of, verify
from tests.mutations import kills


def folder_of(folder: Path, steps: int = 3, **privacy: object) -> Path:
    """The folder of a run of three planned steps, without weights."""
    config = {"noise_multiplier": 2.0, "clip_norm": 1.0, "expected_batch_size": 10, **privacy}
    plan = make_plan(PrivacyConfig(**config), 500, 3)
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for number in range(steps):
            ledger.append_step(number, plan.event)
        ledger.append_end("completed")
    write_report(folder, plan, read_ledger(folder / LEDGER_FILE))
    return folder


@pytest.mark.parametrize("steps", [3, 1])
def test_the_words_state_the_epsilon_of_the_report(tmp_path, steps):
    """Also of a run that stopped early, whose ε is that of all planned steps."""
    standing = standing_of(folder_of(tmp_path, steps))
    report = json.loads((tmp_path / JSON_FILE).read_text())
    assert standing.private and standing.failed is None and len(standing.checks) >= 6
    assert f"ε = {report['statement']['epsilon'] + 5e-5:.3f}"[:-1] in standing.words
    assert "for each record of 500" in standing.words and "zero-out" in standing.words


def test_every_check_is_one_of_verify(tmp_path):
    """But for the ε, which `verify` compares with all other numbers."""
    folder_of(tmp_path)
    known = {check.what for check in verify(tmp_path).checks}
    assert {check.what for check in standing_of(tmp_path).checks} - known == {"the report states the ε of the ledger"}


@kills(
    "a run without privacy has a guarantee beside its texts",
    "dpllm/report/verify.py",
    "if plan.seeded or contents.seeded or not stated.is_finite:",
    "if False:",
)
@pytest.mark.parametrize("kind", ["infinite", "seeded"])
def test_a_run_without_privacy_has_no_guarantee(tmp_path, kind):
    """Its ledger is right, and says so."""
    given = {"noise_multiplier": 0.0} if kind == "infinite" else {"seed": 1}
    standing = standing_of(folder_of(tmp_path, **given))
    assert not standing.private and standing.words.startswith("NOT PRIVATE")


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (
            lambda f: edit(f / LEDGER_FILE, '"noise_multiplier": 2.0', '"noise_multiplier": 9.0'),
            "its lines are chained",
        ),
        (lambda f: (f / PLAN_FILE).unlink(), "the plan is there"),
        (lambda f: lower_epsilon(f / JSON_FILE), "the report states the ε of the ledger"),
        (lambda f: (f / "model.safetensors").write_bytes(b"other"), "the model's files are those that were saved"),
        (lambda f: other_plan(f), "the ledger is of this plan"),
    ],
)
def test_a_folder_that_was_changed_is_found(tmp_path, change, failed):
    """The check is named, with the place."""
    change(folder_of(tmp_path))
    found = standing_of(tmp_path).failed
    assert found is not None and failed in found.what and found.detail


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def lower_epsilon(path: Path) -> None:
    report = json.loads(path.read_text())
    report["statement"]["epsilon"] *= 0.999
    path.write_text(json.dumps(report))


def other_plan(folder: Path) -> None:
    config = PrivacyConfig(noise_multiplier=3.0, clip_norm=1.0, expected_batch_size=10)
    make_plan(config, 500, 3).save(folder / PLAN_FILE)


def test_a_folder_without_a_ledger_has_nothing_to_check(tmp_path):
    """Neither has a path that is no folder."""
    with pytest.raises(ValueError, match=r"privacy_ledger\.jsonl"):
        standing_of(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        standing_of(tmp_path / "nowhere")

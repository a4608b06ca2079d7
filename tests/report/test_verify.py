"""Tests of dpllm.report.verify."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import PRETRAINED_FOLDER, PrivacyConfig
from dpllm.config.versions import CodeVersion, code_version, version_words
from dpllm.methods.queries.run import prior_release
from dpllm.privacy.checkpoints import checkpoint_folder, latest_whole, prepare_staging, publish
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.rounding import up
from dpllm.privacy.run_folder import ADOPTED, adopt, note_release, snapshot
from dpllm.report.checklist import completed
from dpllm.report.model_card import CARD_FILE, add_audit, add_notes, adopt_run, write_model_card
from dpllm.report.models import PrivacyReport
from dpllm.report.pages import CHECK_FILE, write_pages
from dpllm.report.statement import (
    HTML_FILE,
    JSON_FILE,
    MARKDOWN_FILE,
    ReleaseNotes,
    json_text,
    notes_in,
    write_report,
)
from dpllm.report.verify import Verification, verification_rows, verify
from tests.mutations import kills

NUM_STEPS = 6
CARD = f"{CARD_FILE} has the guarantee and the open points of the report"
PAGES = {name: f"{name} is as dpllm wrote it" for name in (JSON_FILE, MARKDOWN_FILE, HTML_FILE, CHECK_FILE)}
VERSION = "report and ledger were written by this version of dpllm"
NO_MODEL = (
    "the model's files are those that were saved",
    "the weights have taken no step that the ledger does not charge",
)
NOTES = ReleaseNotes(data_holder="the clinic", utility={"perplexity": 12.5})


def charge(folder: Path, plan: PrivacyPlan, steps: int, of: PrivacyPlan | None = None) -> Ledger:
    """Write the ledger of a run of so many steps."""
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for number in range(steps):
            ledger.append_step(number, (of or plan).event)
        ledger.append_disclosure("training loss", 2)
        ledger.append_end("completed")
    return ledger


def plan_of(**change: Any) -> PrivacyPlan:
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, **change}
    return make_plan(PrivacyConfig(**config), num_units=1000, num_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    plan = plan_of()
    plan.save(folder / PLAN_FILE)
    report = write_report(folder, plan, charge(folder, plan, NUM_STEPS), NOTES)
    write_model_card(folder, report, base_model="org/base", task="causal_lm", adapter=False)
    return folder


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    """A copy of a good run, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "run"))


def edit(path: Path, pattern: str, by: str) -> None:
    """Replace the first match, which must be there."""
    text, count = re.subn(pattern, by, path.read_text(encoding="utf-8"), count=1)
    assert count == 1
    path.write_text(text, encoding="utf-8")


def failed(verification: Verification) -> dict[str, str]:
    assert verification.ok == all(check.ok for check in verification.checks)
    return {check.what: check.detail for check in verification.checks if not check.ok}


def test_good_run(good: Path) -> None:
    """Nothing was touched, so everything holds, the model card included; the result prints and is plain values."""
    result = verify(good)
    assert result.ok and failed(result) == {}
    assert any(check.what == CARD and check.passed for check in result.checks)
    assert {check.what for check in result.checks if check.passed is None} <= {VERSION, *NO_MODEL}
    assert all(text.startswith(("ok: ", "not checked: ")) for _, text in verification_rows(result))
    assert json.loads(json.dumps(result.to_dict()))["ok"] is True


def test_what_was_not_checked_is_no_ok(good: Path) -> None:
    """A folder without a model holds no weights to compare: each line says so, and the last one counts them."""
    result = verify(good)
    found = {check.what: check.result for check in result.checks}
    assert [found[what] for what in NO_MODEL] == ["not checked"] * 2
    assert {line["what"]: line["result"] for line in result.to_dict()["checks"]} == found
    printed = " ".join(CliRunner().invoke(app, ["verify", str(good)]).stdout.split())
    assert f"{NO_MODEL[0]}: not checked: there are none" in printed
    unchecked = list(found.values()).count("not checked")
    assert f"{len(found) - unchecked} ok · 0 failed · {unchecked} not checked" in printed


@pytest.mark.parametrize("lines", [1, 4, 1 + NUM_STEPS])
def test_no_epsilon_is_stated_from_an_older_copy_of_the_ledger(run: Path, lines: int) -> None:
    """Written into the same file, it lacks steps or a disclosure that the report has; no run goes on with it either."""
    ledger, before = run / LEDGER_FILE, (run / JSON_FILE).read_bytes()
    ledger.write_text("".join(ledger.read_text(encoding="utf-8").splitlines(True)[:lines]), encoding="utf-8")
    for words in (["report", run], ["report", "note", run, "trained_by=me"], ["epsilon", run, "--dataset", "notes"]):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 2 and "Restore the ledger" in result.output and "ε =" not in result.output
    for go_on in (lambda: prior_release(run), lambda: Ledger.open(ledger, PrivacyPlan.load(run / PLAN_FILE))):
        with pytest.raises(LedgerError, match="Restore the ledger"):
            go_on()
    assert (run / JSON_FILE).read_bytes() == before and not verify(run).ok


def test_nothing_is_drawn(good: Path) -> None:
    """The pages are compared by their hashes, so that verifying needs no matplotlib."""
    code = (
        "import sys; sys.modules['matplotlib'] = None; from dpllm.report.verify import verify; "
        "assert verify(sys.argv[1]).ok"
    )
    subprocess.run([sys.executable, "-c", code, str(good)], check=True)


def test_checking_changes_nothing(good: Path) -> None:
    """Verifying writes no file."""
    before = {path.name: path.read_bytes() for path in good.iterdir()}
    verify(good)
    assert {path.name: path.read_bytes() for path in good.iterdir()} == before


def test_edited_ledger_line(run: Path) -> None:
    """A changed number in the ledger breaks its chain, and without a ledger nothing is confirmed."""
    edit(run / LEDGER_FILE, '"noise_multiplier": 2.0', '"noise_multiplier": 3.0')
    found = failed(verify(run))
    assert "edited, or lines before it are missing" in found["the ledger is there and its lines are chained"]
    assert all("it cannot be compared" in found[page] for page in PAGES.values())


def test_steps_cut_off_at_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lines cut off at the end break no hash; the report still counts the steps."""
    lines = (run / LEDGER_FILE).read_text().splitlines(keepends=True)
    (run / LEDGER_FILE).write_text("".join(lines[:-6]))
    monkeypatch.setattr("dpllm.report.models._MOST_LISTED", 10_000)
    found = failed(verify(run))
    assert "the ledger is there and its lines are chained" not in found
    counted = found["the ledger holds the steps that the report counts"]
    assert f"the report counts {NUM_STEPS} steps, the ledger 4: lines were cut off at its end" in counted
    differing = found[f"{JSON_FILE} says what plan and ledger say"]
    assert "accounting.parameters.num_steps_charged is 6 and should be 4" in differing
    assert all("the ledger does not name it" in found[page] for page in PAGES.values())


def test_ledger_that_went_on(run: Path) -> None:
    """A ledger with more steps than the report counts, and than were planned, is said to be that."""
    plan = PrivacyPlan.load(run / PLAN_FILE)
    adopt(run)  # the folder is a copy
    with Ledger.open(run / LEDGER_FILE, plan) as ledger:
        ledger.append_step(NUM_STEPS, plan.event)
    found = failed(verify(run))
    assert "the run continued after the report" in found["the ledger holds the steps that the report counts"]
    assert found["no more steps than planned"] == "7 of 6 planned steps: too many"


@pytest.mark.parametrize(
    ("pattern", "by", "where"),
    [
        (r'"epsilon": 0\.\d+', '"epsilon": 0.01', "statement.epsilon is 0.01 and should be 0."),
        (r'"filled": false', '"filled": true', ".filled is true and should be false"),
        (r'"format": 1,', '"format": 1, "note": "x",', "note does not belong there"),
        (r'"adjacency": "zero-out",\s*"epsilon_by', '"epsilon_by', "statement.adjacency is missing"),
    ],
)
def test_edited_json(run: Path, pattern: str, by: str, where: str) -> None:
    """Each key that was changed, added or removed is named; the other forms of the report are still right."""
    edit(run / JSON_FILE, pattern, by)
    found = failed(verify(run))
    assert where in found[f"{JSON_FILE} says what plan and ledger say"]
    assert PAGES[JSON_FILE] in found and PAGES[MARKDOWN_FILE] not in found and PAGES[HTML_FILE] not in found


def test_schema_is_checked(run: Path) -> None:
    """An unknown key, and a missing one, fail the schema with their place."""
    edit(run / JSON_FILE, r'"private": true,', '"privat": true,')
    found = failed(verify(run))[f"{JSON_FILE} fits the published schema"]
    assert "statement.privat is not a key of the report" in found and "statement.private is missing" in found


def test_a_report_of_a_later_version_is_refused_in_one_line(run: Path) -> None:
    """Its format and its commit are named, and the other checks go on; whatever the format is, it is no fault."""
    commit = "c0ffee" * 6 + "c0ff"
    edit(
        run / JSON_FILE,
        r'"commit": [^\n]*,\n(\s*)"changed": \w+,\n(\s*)"machine"',
        rf'"commit": "{commit}", "changed": true, "machine"',
    )
    for text in ("6", "[3]", "true", '"3"', "3.5", "null"):
        edit(run / JSON_FILE, r'"format": [^\n]*,\n', f'"format": {text},\n')
        found = failed(verify(run))[f"{JSON_FILE} fits the published schema"]
        assert found.startswith(f"it is a privacy report of format {text}, and this version of dpllm reads format 1")
        assert f"(commit {commit}, with changes that are in no commit)" in found and "\n" not in found
        with pytest.raises(ValueError, match=f"commit {commit}.*or delete the file"):
            notes_in(run)


@kills(
    "a page of the report is not compared with its hash",
    "dpllm/report/verify.py",
    "    if digest != written:\n",
    "    if False:\n",
)
@pytest.mark.parametrize("name", [JSON_FILE, MARKDOWN_FILE, HTML_FILE])
def test_edited_page(run: Path, name: str) -> None:
    """One character changed in a page, also in one of its pictures, and a page cut short are found by the hash."""
    text = (run / name).read_text(encoding="utf-8")
    for edited in (text.replace("1", "2", 1), text[: len(text) // 2]):
        (run / name).write_text(edited, encoding="utf-8")
        found = failed(verify(run))
        assert "it was edited, or ledger lines were cut off" in found[PAGES[name]]
        assert not (found.keys() & {page for other, page in PAGES.items() if other != name})


def test_another_plan(run: Path) -> None:
    """A plan that is whole, but not that of the ledger, is found: its hash and its steps differ."""
    plan_of(noise_multiplier=9.0).save(run / PLAN_FILE)
    found = failed(verify(run))
    assert "it was written under" in found["the ledger is of this plan"]
    assert found["each step in the ledger is the plan's"] == "6 steps have different numbers from the plan"
    assert "written under a different plan" in found["the report can be computed again"]


def test_edited_plan(run: Path) -> None:
    """A number changed in the plan doesn't fit its hash."""
    edit(run / PLAN_FILE, '"noise_multiplier": 2.0', '"noise_multiplier": 3.0')
    assert "was edited" in failed(verify(run))["the plan is there and fits its hash"]


@pytest.mark.parametrize(
    ("pattern", "by", "where"),
    [
        (r"  epsilon: 0\.\d+", "  epsilon: 0.0001", "differential_privacy.epsilon is 0.0001 and should be"),
        (r"\Z", "\nIt satisfies ε = 0.01.\n", "a different claim: ε = 0.01"),
        (r"---\n", "---\nepsilon: 0.01\n", "a different claim: epsilon: 0.01"),
        (r"with ε = 0\.\d+", "with ε = 0.0001", "its text lacks"),
        (r"(?s)## Not covered by .*?(?=\n## )", "", "Not covered"),
        (r"(?s)(## Not covered by .*?)(?=\n## )", r"<!-- \1 -->", "Not covered"),
    ],
)
def test_edited_card(run: Path, pattern: str, by: str, where: str) -> None:
    """A number changed in the model card's metadata or in its text is found."""
    edit(run / "README.md", pattern, by)
    found = failed(verify(run))
    assert list(found) == [CARD] and where in found[CARD]


@pytest.mark.parametrize("same", [True, False])
def test_a_card_that_people_went_on_writing(run: Path, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their words are theirs; they may repeat the ε of the report. Another version compares no sentences."""
    epsilon = json.loads((run / JSON_FILE).read_text(encoding="utf-8"))["statement"]["epsilon"]
    card = run / CARD_FILE
    card.write_text(card.read_text() + f"\n## Data\n\n2,000 letters of 2023. We chose ε = {up(epsilon)}.\n")
    if not same:
        monkeypatch.setattr("dpllm.report.verify.code_version", lambda: CodeVersion(**OTHER))
    assert failed(verify(run)) == {}
    (check,) = [check for check in verify(run).checks if check.what == CARD]
    assert check.passed is (True if same else None) and "people edited" in check.detail


@pytest.mark.parametrize("how", ["all", "one", "hidden", "weaker"])
def test_a_card_that_does_not_list_the_open_points(run: Path, how: str) -> None:
    """Whoever meets the model reads the card only; each missing point is named, also one in a comment."""
    points = json.loads((run / JSON_FILE).read_text(encoding="utf-8"))["open_points"]
    card = run / CARD_FILE
    text = card.read_text(encoding="utf-8")
    listed = "\n".join(f"- {point}" for point in points)
    assert len(points) > 1 and listed in text
    by = {
        "all": "",
        "one": "\n".join(f"- {point}" for point in points[1:]),
        "hidden": f"<!--\n{listed}\n-->",
        "weaker": listed.replace(points[0], f"~~{points[0]}~~ settled"),
    }[how]
    card.write_text(text.replace(listed, by), encoding="utf-8")
    found = failed(verify(run))
    missing = points if how in ("all", "hidden") else points[:1]
    assert list(found) == [CARD]
    assert found[CARD].count("its open points lack") == len(missing)
    assert all(json.dumps(point, ensure_ascii=False)[:60] in found[CARD] for point in missing)


def test_card_of_somebody_else(run: Path) -> None:
    """In the place of dpllm's, it lacks the open points. No card is nothing to check."""
    (run / "README.md").write_text("# A model\n")
    assert failed(verify(run)) == {CARD: "its block differential_privacy is missing"}
    (run / "README.md").unlink()
    assert verify(run).ok
    (run / "README.md").write_text("---\ntags: [a\n---\nε\n")
    assert "cannot be read" in failed(verify(run))[CARD]


def test_a_card_where_dpllm_wrote_none(tmp_path: Path) -> None:
    """It is named as not checked."""
    plan = plan_of()
    plan.save(tmp_path / PLAN_FILE)
    write_report(tmp_path, plan, charge(tmp_path, plan, NUM_STEPS), NOTES)
    (tmp_path / "README.md").write_text("# A model\n")
    (check,) = [check for check in verify(tmp_path).checks if check.what == CARD]
    assert verify(tmp_path).ok and check.passed is None
    (tmp_path / "README.md").write_text("# A model\n\nIt has ε = 0.01.\n")
    assert "a different claim: ε = 0.01" in failed(verify(tmp_path))[CARD]
    (tmp_path / "README.md").write_text("---\ndifferential_privacy: {epsilon: 0.01}\n---\n# A model\n")
    assert "differential_privacy.epsilon is 0.01" in failed(verify(tmp_path))[CARD]


@pytest.mark.parametrize("name", [PLAN_FILE, LEDGER_FILE, JSON_FILE, MARKDOWN_FILE, HTML_FILE])
def test_missing_file(run: Path, name: str) -> None:
    """A file that isn't there is a failed check, and so is one that is no text."""
    (run / name).unlink()
    details = failed(verify(run)).values()
    assert any(name in detail and re.search(r"(can't|cannot) be read", detail) for detail in details)
    if name != LEDGER_FILE:
        (run / name).write_bytes(b"\xff\xfe\x00")
        assert not verify(run).ok


def test_empty_folder(tmp_path: Path) -> None:
    """A folder without a run fails all over, and says why."""
    result = verify(tmp_path)
    assert not result.ok and not any(check.ok for check in result.checks)
    assert all(text.startswith("FAILED: ") for _, text in verification_rows(result))


def rewrite(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON, and note its hash as a version that computed it would."""
    plain = json.loads((run / JSON_FILE).read_text(encoding="utf-8"))
    change(plain)
    write_pages(run, {JSON_FILE: json_text(completed(PrivacyReport.read(plain)))})
    (run / "README.md").unlink()


def test_other_versions_may_differ_in_the_last_digits(run: Path) -> None:
    """Numbers that another version of the accounting computed agree to five digits; text still agrees to the letter."""

    def other_version(report: dict[str, Any]) -> None:
        report["checkable"]["versions"]["dp_accounting"] = report["accounting"]["tool_version"] = "0.5.9"
        report["strength"]["advantage"] *= 1 + 1e-9

    rewrite(run, other_version)
    result = verify(run)
    assert result.ok
    [check] = [check for check in result.checks if check.what == f"{JSON_FILE} says what plan and ledger say"]
    assert "within 1e-05, since different versions computed it (dp_accounting 0.5.9)" in check.detail
    edit(run / JSON_FILE, r'"advantage": 0\.0', '"advantage": 0.1')
    assert "strength.advantage is 0.1" in failed(verify(run))[f"{JSON_FILE} says what plan and ledger say"]


@pytest.mark.parametrize(("factor", "passes"), [(1 + 1e-4, False), (1 + 1e-6, True)])
def test_the_same_versions_agree_but_for_the_processor(run: Path, factor: float, passes: bool) -> None:
    """With the installed versions the fourth digit counts; later ones depend on the processor and its threads."""

    def nudge(report: dict[str, Any]) -> None:
        report["strength"]["advantage"] *= factor

    rewrite(run, nudge)
    result = verify(run)
    assert result.ok is passes
    if not passes:
        assert "strength.advantage is" in failed(result)[f"{JSON_FILE} says what plan and ledger say"]


OTHER = {"version": "0.2.dev7+gabc", "commit": "ab" * 20, "changed": False}


def by_another_version(report: dict[str, Any]) -> None:
    """Make the report that of another commit, which words a sentence otherwise and has one more open point."""
    report["checkable"] |= {"commit": OTHER["commit"], "changed": False}
    report["checkable"]["versions"]["dpllm"] = OTHER["version"]
    report["strength"]["words"] = "Words of another commit."
    report["noted_open_points"].append("A point of another commit.")


def test_a_report_of_another_version_is_named_and_its_numbers_are_computed_again(run: Path) -> None:
    """Its commit and this one; that is no failure. Its sentences are held to the hash only, its numbers are not."""
    rewrite(run, by_another_version)
    result = verify(run)
    assert failed(result) == {}
    (check,) = [check for check in result.checks if check.what == VERSION]
    assert check.result == "not checked"
    assert f"written by a different version: report 0.2.dev7+gabc (commit {OTHER['commit']})" in check.detail
    assert f"you run {version_words(*code_version())}" in check.detail
    rewrite_epsilon = {"statement": {"epsilon": 0.01}}
    report = json.loads((run / JSON_FILE).read_text(encoding="utf-8"))
    report["statement"] |= rewrite_epsilon["statement"]
    write_pages(run, {JSON_FILE: json.dumps(report)})
    assert "statement.epsilon is 0.01" in failed(verify(run))[f"{JSON_FILE} says what plan and ledger say"]


def test_keys_of_another_version_are_not_checked_and_its_numbers_are(run: Path) -> None:
    """A layout of another commit is no failure: `dpllm report --write` writes the report as this one does."""
    rewrite(run, by_another_version)
    report = json.loads((run / JSON_FILE).read_text(encoding="utf-8"))
    report["accounting"]["epsilon"] = report["statement"]["epsilon_by_adjacency"]
    del report["accounting"]["zcdp_rho"]
    write_pages(run, {JSON_FILE: json.dumps(report)})
    result = verify(run)
    assert failed(result) == {}
    (check,) = [check for check in result.checks if "schema" in check.what]
    assert check.passed is None and "accounting.epsilon" in check.detail and "--write" in check.detail
    report["accounting"]["parameters"]["noise_multiplier"] = 3.0
    write_pages(run, {JSON_FILE: json.dumps(report)})
    assert "noise_multiplier is 3.0" in str(failed(verify(run)))
    add_notes(run, {}, write=True)
    written = [check for check in verify(run).checks if "schema" in check.what or "plan and ledger say" in check.what]
    assert [check.passed for check in written] == [True, True]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *(("letter.txt", "letter.txt"), ("extra/model.safetensors", "extra/model.safetensors")),
        *((".cache/x/y.bin", ".cache/"), ("public_pretrain/people.txt", "public_pretrain/people.txt")),
    ],
)
def test_a_file_that_nobody_knows_is_not_checked(run: Path, name: str, shown: str) -> None:
    """Whatever its name and place; dpllm's own files, and those that are never for release, are none."""
    what = "no other file lies in the folder"
    (run / "not_for_release").mkdir(exist_ok=True)
    (run / "not_for_release" / "x.txt").write_text("x")
    assert [check.passed for check in verify(run).checks if check.what == what] == [True]
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("x")
    (check,) = [check for check in verify(run).checks if check.what == what]
    assert check.passed is None and shown in check.detail


def test_what_is_gone_is_said(run: Path) -> None:
    """A card that dpllm wrote is not checked, a verifier that is gone fails; each is named."""
    (run / CARD_FILE).unlink()
    assert any(check.passed is None and CARD_FILE in check.what for check in verify(run).checks)
    (run / "check_epsilon.py").unlink()
    assert "--write" in failed(verify(run))["check_epsilon.py is as dpllm wrote it"]


def test_a_run_that_two_versions_wrote_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume by another commit is seen in the ledger, in the report and by verify."""
    plan = plan_of()
    plan.save(tmp_path / PLAN_FILE)
    monkeypatch.setattr("dpllm.privacy.ledger.code_version", lambda: CodeVersion(**OTHER))
    charge(tmp_path, plan, 2)
    monkeypatch.undo()
    with Ledger.open(tmp_path / LEDGER_FILE, plan) as ledger:
        for number in range(2, NUM_STEPS):
            ledger.append_step(number, plan.event)
        ledger.append_end("completed")
    report = write_report(tmp_path, plan, ledger, NOTES)
    here = version_words(*code_version())
    assert report.checkable.code_of_runs == [f"0.2.dev7+gabc (commit {OTHER['commit']})", here]
    line = f"Ledger written by dpllm 0.2.dev7+gabc (commit {OTHER['commit']}); {here}"
    assert line in (tmp_path / MARKDOWN_FILE).read_text(encoding="utf-8")
    (check,) = [check for check in verify(tmp_path).checks if check.what == VERSION]
    assert check.passed is None and OTHER["commit"] in check.detail and verify(tmp_path).ok


def test_a_report_of_a_changed_tree_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No commit holds its code, in whichever form the report is read."""
    dirty = CodeVersion("0.2.dev7+gabc.dirty", OTHER["commit"], True)
    for module in ("privacy.ledger", "report.statement", "report.verify"):
        monkeypatch.setattr(f"dpllm.{module}.code_version", lambda: dirty)
    plan = plan_of()
    plan.save(tmp_path / PLAN_FILE)
    write_report(tmp_path, plan, charge(tmp_path, plan, NUM_STEPS), NOTES)
    for name in (MARKDOWN_FILE, HTML_FILE):
        assert "with changes that are in no commit" in (tmp_path / name).read_text(encoding="utf-8")
    (check,) = [check for check in verify(tmp_path).checks if check.what == VERSION]
    assert check.passed is None and "no commit holds the code" in check.detail


def test_notes_are_taken_from_the_json(run: Path) -> None:
    """What people noted is no number, and `dpllm report` notes its hash; by hand it is an edit."""
    add_notes(run, {"audience": "the staff"})
    assert failed(verify(run)) == {}
    edit(run / JSON_FILE, "the staff", "everybody")
    assert PAGES[JSON_FILE] in failed(verify(run))


WEIGHTS = "model.safetensors"


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """The folder of a run that saved a model, was audited, and has a checkpoint."""
    folder, plan = tmp_path / "released", plan_of()
    folder.mkdir()
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for number in range(NUM_STEPS):
            ledger.append_step(number, plan.event)
            if number == 3:
                staging = prepare_staging(folder, 4)
                state = '{"global_step": 4}'
                for name, text in ((WEIGHTS, "four"), ("trainer_state.json", state), (CARD_FILE, "a card")):
                    (staging / name).write_text(text)
                (staging / LEDGER_FILE).write_bytes(ledger.path.read_bytes())
                publish(staging, checkpoint_folder(folder, 4), ledger=ledger.head.to_dict())
        ledger.append_end("completed")
        before = snapshot(folder)
        (folder / WEIGHTS).write_text("weights")
        (folder / "config.json").write_text("{}")
        (folder / CARD_FILE).write_text("the card that PEFT writes, before dpllm's takes its place")
        note_release(ledger, folder, before)
    report = write_report(folder, plan, read_ledger(folder / LEDGER_FILE), NOTES)
    write_model_card(folder, report, base_model="org/base", task="causal_lm", adapter=False)
    (folder / "audit.json").write_text('{"verdict": "FAIL"}')
    add_audit(folder, "audit.json", "FAIL: ε is at least 9 (95 %)")
    return folder


def test_a_released_folder_is_what_its_ledger_says(released: Path) -> None:
    """Model, checkpoint, audit, report and card name each other; a file beside them is listed."""
    assert [check.what for check in verify(released).checks if check.passed is None and "letter" in check.detail] == []
    (released / "letter.txt").write_text("x")
    result = verify(released)
    assert result.ok, failed(result)
    assert any("letter.txt" in check.detail for check in result.checks if check.passed is None)
    report = json.loads((released / JSON_FILE).read_text())
    assert any("An audit of this model refutes" in point for point in report["open_points"])


@kills(
    "released weights are not compared",
    "dpllm/report/verify.py",
    "for name, difference in checkpoints.differing(folder, named).items()",
    "for name, difference in {}.items()",
)
def test_other_weights_in_the_folder(released: Path) -> None:
    """Edited, missing and added weights are named."""
    what = "the model's files are those that were saved"
    (released / WEIGHTS).write_text("WEIGHTS")
    assert f"{WEIGHTS} is not what was saved" in failed(verify(released))[what]
    (released / WEIGHTS).unlink()
    assert f"{WEIGHTS} is missing" in failed(verify(released))[what]
    (released / WEIGHTS).write_text("weights")
    (released / "pytorch_model.bin").write_text("more")
    assert "pytorch_model.bin may hold weights" in failed(verify(released))[what]


@pytest.mark.parametrize(
    "name",
    [
        *("model.SAFETENSORS", "model.safetensors.bak", "weights.tar.gz", "model.pt2", "rust_model.ot", "weights"),
        *("runs/model.safetensors", "checkpoint-9/model.safetensors", "checkpoint-best/model.safetensors"),
        *("adapter_config.json", "model.safetensors.index.json"),  # which lead to other weights
    ],
)
def test_weights_under_any_name_are_found(released: Path, name: str) -> None:
    """A file that is not of a kind that people read may hold weights: no list of endings is complete."""
    path = released / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("other")
    what = "the model's files are those that were saved"
    assert f"{name} may hold weights, and the ledger does not name it" in failed(verify(released))[what]


def test_a_model_in_the_cache_of_the_hub_is_verified(released: Path, tmp_path: Path) -> None:
    """There every file is a link to a blob. Weights that were added there are found all the same."""
    snapshot, blobs = tmp_path / "models--org--notes" / "snapshots" / "a1b2", tmp_path / "models--org--notes" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (released / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    for number, path in enumerate(sorted(path for path in released.iterdir() if path.is_file())):
        shutil.copy(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number}"))
    assert failed(verify(snapshot)) == {}
    (blobs / "more").write_text("other weights")
    (snapshot / "pytorch_model.bin").symlink_to(Path("..", "..", "blobs", "more"))
    found = failed(verify(snapshot))["the model's files are those that were saved"]
    assert "pytorch_model.bin may hold weights" in found


def test_notes_that_a_download_or_a_desktop_leaves_are_no_weights(released: Path) -> None:
    """`hf download --local-dir` keeps a commit and a time for each file; Finder keeps the places of icons."""
    notes = released / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in (f"{WEIGHTS}.metadata", "additional_chat_templates/tool.jinja.metadata"):
        (notes / name).parent.mkdir(exist_ok=True)
        (notes / name).write_text("3f2a\n9c1e\n1732250000.0\n")
        (notes / name).with_suffix(".lock").write_text("")
    (notes.parent / ".gitignore").write_text("*")
    (notes.parent / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    for folder in (released, released / "checkpoint-4"):
        (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1" + bytes(6140))
    assert failed(verify(released)) == {}


def test_files_that_people_add_are_no_weights(released: Path) -> None:
    """A license, a picture, notes, the log of a tracker: a release has such files."""
    for name in ("LICENSE", "notes.md", "samples.JSON", "runs/now/events.out.tfevents.1", ".gitattributes"):
        (released / name).parent.mkdir(parents=True, exist_ok=True)
        (released / name).write_text("text")
    assert failed(verify(released)) == {}


def test_a_checkpoint_stays_whole_when_people_note_something(released: Path) -> None:
    """`dpllm report` writes report and card again: the checkpoint can be resumed all the same."""
    checkpoint = next(released.glob("checkpoint-*"))
    (checkpoint / CARD_FILE).write_text("a card with what people noted")
    assert failed(verify(released)) == {}
    assert latest_whole(released) == (checkpoint, [])


def test_a_folder_that_is_adopted_agrees_with_its_ledger(released: Path) -> None:
    """Report and card are written again and have the open point, also a card that had none."""
    for notes in (NOTES, dataclasses.replace(NOTES, audience="all", other_uses="none", audit="none")):
        plan, contents = PrivacyPlan.load(released / PLAN_FILE), read_ledger(released / LEDGER_FILE)
        write_model_card(
            released, write_report(released, plan, contents, notes), base_model="org/base", task=None, adapter=False
        )
        assert CliRunner().invoke(app, ["verify", "--adopt", str(released)]).exit_code == 0
        assert failed(verify(released)) == {}
        for name in (MARKDOWN_FILE, CARD_FILE):
            assert ADOPTED in (released / name).read_text(encoding="utf-8")


def test_a_folder_without_a_report_gets_none_when_it_is_adopted(run: Path) -> None:
    """A run that crashed before it wrote one is only adopted."""
    for name in (JSON_FILE, MARKDOWN_FILE, HTML_FILE, CHECK_FILE, CARD_FILE):
        (run / name).unlink()
    assert adopt_run(run) == NUM_STEPS
    assert sorted(path.name for path in run.iterdir()) == sorted([LEDGER_FILE, PLAN_FILE])


def test_a_checkpoint_stays_whole_when_it_is_adopted_or_audited(released: Path) -> None:
    """Its copy of the ledger is in its manifest: adopting names the run's folder, and a verdict stays in its file."""
    checkpoint = next(released.glob("checkpoint-*"))
    result = CliRunner().invoke(app, ["verify", "--adopt", str(checkpoint)])
    assert result.exit_code == 2 and "is a checkpoint" in result.stderr
    assert f"dpllm verify {released} --adopt" in " ".join(result.stderr.split())
    (checkpoint / "audit.json").write_text("{}")
    add_audit(checkpoint, "audit.json", "consistent")
    assert latest_whole(released) == (checkpoint, [])


def test_a_checkpoint_that_was_changed_is_found_from_its_run(released: Path) -> None:
    """Its files are compared with its manifest, and none may be added."""
    what = "the checkpoints in the folder are of this ledger"
    checkpoint = next(released.glob("checkpoint-*"))
    (checkpoint / "extra.bin").write_text("more")
    assert "extra.bin may hold weights" in failed(verify(released))[what]
    assert "extra.bin may hold weights" in str(failed(verify(checkpoint)))
    (checkpoint / "extra.bin").unlink()
    (checkpoint / WEIGHTS).write_text("FOUR")
    assert "is not what was saved" in failed(verify(released))[what]


def test_the_weights_of_the_public_training_are_no_weights_of_the_release(released: Path) -> None:
    """A recipe keeps them beside the model; no private step has touched them."""
    (released / PRETRAINED_FOLDER).mkdir()
    (released / PRETRAINED_FOLDER / WEIGHTS).write_text("public")
    assert failed(verify(released)) == {}


def test_weights_beside_a_ledger_that_names_none(released: Path) -> None:
    """Lines cut off the end of a ledger break no hash; without them nothing says that these are the run's weights."""
    lines = (released / LEDGER_FILE).read_bytes().splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if line.startswith(b'{"kind": "end"'))
    (released / LEDGER_FILE).write_bytes(b"".join(lines[:end]))
    shutil.rmtree(released / "checkpoint-4")
    plan = PrivacyPlan.load(released / PLAN_FILE)
    write_report(released, plan, read_ledger(released / LEDGER_FILE), NOTES)
    (released / CARD_FILE).unlink()
    what = "the model's files are those that were saved"
    assert f"{WEIGHTS} may hold weights, and the ledger does not name it" in failed(verify(released))[what]
    (released / WEIGHTS).unlink()
    assert what not in failed(verify(released))


def test_a_verdict_that_was_turned_round(released: Path) -> None:
    """Also when the report is made again from it: the ledger holds the verdict."""
    (released / "audit.json").write_text('{"verdict": "consistent"}')
    what = "the results of the audit are those that the ledger names"
    assert "audit.json was edited; the ledger says: FAIL" in failed(verify(released))[what]
    notes = dataclasses.replace(NOTES, audit="consistent, not proof")
    plan = PrivacyPlan.load(released / PLAN_FILE)
    report = write_report(released, plan, read_ledger(released / LEDGER_FILE), notes)
    assert (report.strength.audit or "").startswith("FAIL")
    assert any("refutes the guarantee" in point for point in report.open_points)
    edit(released / JSON_FILE, r'"audit": "FAIL', '"audit": "consistent')
    assert "strength.audit" in failed(verify(released))[f"{JSON_FILE} says what plan and ledger say"]


def test_a_checkpoint_whose_ledger_was_cut(released: Path) -> None:
    """Its weights have taken more steps than the ledger charges; neither it nor its run's folder passes."""
    checkpoint = released / "checkpoint-4"
    for folder in (checkpoint, released):
        lines = (folder / LEDGER_FILE).read_bytes().splitlines(keepends=True)
        (folder / LEDGER_FILE).write_bytes(b"".join(lines[:3]))
    found = failed(verify(checkpoint))
    assert "4 taken, 2 charged" in found["the weights have taken no step that the ledger does not charge"]
    assert "has" in found["the model's files are those that were saved"]
    assert "holds 4 steps" in failed(verify(released))["the checkpoints in the folder are of this ledger"]

"""A folder that an earlier version wrote verifies as it is, and edits of it are found."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerContents
from dpllm.privacy.ledger_reader import LEDGER_FORMAT
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.report.earlier_reports import EARLIER_FORMATS, in_form, is_as_old
from dpllm.report.html import draw_figures
from dpllm.report.model_card import add_notes, settle
from dpllm.report.models import FORMAT, PrivacyReport, complaints
from dpllm.report.verify import verify

WRITTEN = Path(__file__).with_name("earlier_reports")
"""As the versions wrote them, but for the pictures of the page: their names are in their places."""
PICTURES = {"delta": "epsilon_over_delta", "steps": "epsilon_over_steps"}  # names in format 3
FOLDERS = {2: ["format2"], 3: ["format3"], 4: ["format4", "format4_replaced"]}
CASES = [(number, name) for number, names in FOLDERS.items() for name in names]


def failed(folder):
    return {check.what: check.detail for check in verify(folder).checks if not check.ok}


def whole(number, folder, name=None):
    """Copy what a version wrote, and draw the pictures of its page."""
    shutil.copytree(WRITTEN / (name or f"format{number}"), folder)
    plain = json.loads((folder / "privacy_report.json").read_text())
    figures = draw_figures(EARLIER_FORMATS[number].model_validate(plain))
    page = folder / "privacy_report.html"
    text, count = re.subn(
        r"<svg>(\w+)</svg>", lambda found: figures[PICTURES.get(found[1], found[1])].rstrip(), page.read_text()
    )
    assert count == (6 if number > 3 else 3)
    page.write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    return whole(2, tmp_path / "run")


@pytest.mark.parametrize(("number", "name"), CASES)
def test_an_untouched_folder_verifies(number, name, tmp_path):
    """Its JSON by its own schema, its pages exactly; the release's files are not named in it, which is said."""
    result = verify(whole(number, tmp_path / "run", name))
    assert result.ok, failed(tmp_path / "run")
    details = {check.what: check.detail for check in result.checks}
    assert f"in format {number}, of an earlier version" in details["privacy_report.json fits the published schema"]
    named = "the ledger names no files (an older run" if number == 2 else "there are none, and the ledger names none"
    assert named in details["the model's files are those that were saved"]
    assert json.loads((WRITTEN / f"format{number}" / "privacy_report.json").read_text())["format"] == number
    assert EARLIER_FORMATS[number].model_json_schema()["properties"]["format"]["const"] == number


@pytest.mark.parametrize(
    ("number", "name", "pattern", "by"),
    [
        *(
            (3, *edit)
            for edit in (
                ("privacy_report.json", r'"epsilon": (\d)\.(\d+)', r'"epsilon": \1.0\2'),
                ("privacy_report.json", r"at most (\d+)\.(\d)% of the time when", r"at most \1.\2\2% of the time when"),
                ("privacy_report.md", r"blind guessing", "guessing"),
                ("privacy_report.html", r"such a person finds at most", "such a person finds"),
                ("privacy_report.html", r'd="M \d', 'd="M 7'),
                ("README.md", r"- Every id in column", "- Each id in column"),
            )
        ),
        *(
            (4, *edit)
            for edit in (
                ("privacy_report.json", r'"epsilon": (\d+)\.(\d+)', r'"epsilon": \1.0\2'),
                ("privacy_report.json", r"more than 1e\+14", "more than 1e+13"),
                ("privacy_report.json", r'"section": "setting"', '"section": "utility"'),
                ("privacy_report.json", r'"share_without": 0\.5', '"share_without": 0.6'),
                ("privacy_report.json", r'"answer": "Each person has one row', '"answer": "Nobody has looked'),
                ("privacy_report.md", r"tossing a coin", "tossing coins"),
                ("privacy_report.html", r"The strength of the guarantee", "The value of the guarantee"),
                ("privacy_report.html", r"No attack lies", "No attack is"),
                ("privacy_report.html", r'd="M \d', 'd="M 7'),
                ("README.md", r"Settled: Each person", "Settled: No person"),
                ("README.md", r"\Z", "\nIt satisfies ε = 0.01.\n"),
            )
        ),
        (2, "privacy_report.json", r'"epsilon": 0\.(\d+)', r'"epsilon": 0.0\1'),
        (2, "privacy_report.json", r"with ε = 0\.", "with ε = 0.0"),
        (2, "privacy_report.json", r'"num_units": 1000', '"num_units": 1001'),
        (2, "privacy_report.json", r'"ledger_sha256": "..', '"ledger_sha256": "00'),
        (2, "privacy_report.md", r"one user", "one record"),
        (2, "privacy_report.html", r"ε = 0\.", "ε = 0.0"),
        (2, "README.md", r"epsilon: 0\.", "epsilon: 0.0"),
        (2, "README.md", r"\Z", "\nIt satisfies ε = 0.01.\n"),
    ],
)
def test_an_edit_is_found(number, name, pattern, by, tmp_path):
    """Of a number, of a number in a sentence, of a page, of the card."""
    folder = whole(number, tmp_path / "run")
    path = folder / name
    before = path.read_text(encoding="utf-8")
    text, count = re.subn(pattern, by, before, count=1)
    assert count == 1 and text != before
    path.write_text(text, encoding="utf-8")
    assert any(what.startswith((name, "README.md" if "answer" in by else name)) for what in failed(folder))


@pytest.mark.parametrize(("number", "name"), CASES)
def test_a_note_writes_the_report_again_in_todays_form(number, name, tmp_path):
    """Its card has today's guarantee and open points, so that the folder verifies."""
    folder = whole(number, tmp_path / "run", name)
    add_notes(folder, {"audience": "the staff"})
    assert failed(folder) == {}
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["format"] == FORMAT and report["setting"]["audience"] == "the staff"
    card = (folder / "README.md").read_text()
    assert report["front"]["odds"] in card and "such a person finds" not in card


@pytest.mark.parametrize("number", EARLIER_FORMATS)
def test_an_earlier_report_beside_a_later_ledger_is_found(number, tmp_path):
    """Of its sentences only the numbers are compared, so a report could be made to look old and say anything."""
    folder = whole(number, tmp_path / "run")
    plan, path = PrivacyPlan.load(folder / PLAN_FILE), folder / LEDGER_FILE
    path.unlink()
    with Ledger.create(path, plan) as ledger:
        ledger.append_end("completed")
    assert (
        "`dpllm report FOLDER` makes the report again" in failed(folder)["privacy_report.json is as old as the ledger"]
    )


@pytest.mark.parametrize(("written", "ledgers"), [(2, 2), (3, 2), (4, 3)])
def test_each_format_has_a_latest_ledger(written, ledgers, tmp_path):
    """A report of format 3 beside a ledger that a later version began is an edit, although that one is no more new."""
    contents = LedgerContents(path=tmp_path)
    for number in range(1, LEDGER_FORMAT + 1):
        contents.notes.format = number
        assert is_as_old(contents, written) == (number <= ledgers < LEDGER_FORMAT)


def test_statements_of_an_earlier_report_have_no_author_so_their_points_open_again(tmp_path):
    """They had no date, and no ledger has them; `dpllm report --settle` notes them as today."""
    folder = whole(4, tmp_path / "run")
    point = json.loads((folder / "privacy_report.json").read_text())["settled_points"][0]["point"]
    after = add_notes(folder, {"audience": "the staff"})
    assert point in after.open_points and after.settled_points == ()
    again = settle(folder, {point: "Each person has one row."}, "A. Meyer")
    assert point not in again.open_points and again.settled_points[0].by == "A. Meyer"
    assert failed(folder) == {}


def test_the_remedy_is_named(folder):
    """Earlier versions stated the ε of the steps taken where a run had stopped early."""
    path = folder / "privacy_report.json"
    path.write_text(path.read_text().replace('"num_steps_charged": 6', '"num_steps_charged": 5'), encoding="utf-8")
    assert (
        "`dpllm report FOLDER` makes the report again"
        in failed(folder)["privacy_report.json says what plan and ledger say"]
    )


def test_sentences_may_have_other_words_and_not_other_numbers():
    """Names and hashes have to be the same."""
    due = {"format": 3, "a": "holds 5 rows", "b": "one", "new": 1, "checklist": []}
    found = {"format": 2, "a": "has 5 rows", "b": "two", "old": 2, "checklist": []}
    assert in_form(found, due, keep_words=False) == {**due, "b": "two"}
    assert in_form(found, due, keep_words=True) == {**due, "a": "has 5 rows", "b": "two"}
    assert in_form({**found, "a": "has 6 rows"}, due, keep_words=False)["a"] == "has 6 rows"


def test_each_format_has_its_own_keys():
    """A report of format 2 has none of those that were added since, and all that were dropped."""
    report = json.loads((WRITTEN / "format2" / "privacy_report.json").read_text())
    assert complaints(EARLIER_FORMATS[2], report) == []
    found = "; ".join(complaints(PrivacyReport, report))
    for words in (
        *("noted_open_points is missing", "definition.facts is missing", "checkable.runs[0].file is missing"),
        *("accounting.steps.stated is missing", "strength.audit_noted is missing"),
        "definition.rows_left_out is no key of the report",
    ):
        assert words in found
    report["definition"]["facts"] = []
    assert complaints(EARLIER_FORMATS[2], report) == ["definition.facts is no key of the report"]

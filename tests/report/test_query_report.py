"""Report, page, card and push of a query run; `dpllm verify` finds every edit of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.mechanism.events import Step
from dpllm.mechanism.query import Query
from dpllm.methods.queries.run import QueryRun, prior_release
from dpllm.privacy.chained_file import CHAIN_START, next_chain
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.query_plan import Charge, PriorRelease, QueryPlan
from dpllm.registry import release_words
from dpllm.report.model_card import CARD_FILE, add_notes, adopt_run, metadata_in
from dpllm.report.models import PrivacyReport, report_schema
from dpllm.report.publishing import PublishError, published_files, repo_type_of, require_publishable
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE, ReleaseNotes, privacy_report
from dpllm.report.verify import standing_of, verify
from tests.methods.queries.making import UNITS, query_plan, train
from tests.mutations import kills

NOTES = ReleaseNotes(data_holder="A. Meyer", audience="the public", other_uses="none", utility={"error": "1 %"})


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on a trained model, with one released file."""
    place = tmp_path_factory.mktemp("original")
    train(place / "trained", expected_batch_size=1000, noise_multiplier=60.0)
    plan = query_plan(after=prior_release(place / "trained"))
    with QueryRun.begin(place / "run", plan, dataset="chats", notes=NOTES) as run:
        run.charge("votes", 4)
        run.charge("others", 2)
        run.fact("number of classes", 2)
        run.disclose("a figure on private rows", 2)
        (run.folder / "counts.json").write_text('{"a": 3}')
        run.release("counts.json")
        (run.private_folder / "exact.json").write_text('{"a": 2}')
    return place / "run"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def failed(folder: Path) -> str:
    """Return what verify finds wrong."""
    return "\n".join(f"{check.what}: {check.detail}" for check in verify(folder).checks if not check.ok)


def test_a_finished_run_verifies_and_says_what_it_released(folder: Path) -> None:
    """The words are those of the method; ε is that of model and answers; the report fits its schema."""
    assert failed(folder) == ""
    report = json.loads((folder / JSON_FILE).read_text())
    plan = QueryPlan.load(folder / PLAN_FILE)
    jsonschema.Draft202012Validator(report_schema()).validate(report)
    assert PrivacyReport.read(report).statement.epsilon == plan.epsilon
    page = (folder / MARKDOWN_FILE).read_text()
    method = release_words()[plan.method]
    for words in (
        method.what,
        "a figure on private rows | 2",
        "votes: charged, out of planned | 4 of 4",
        "clip | 0.5",
        *method.released,
        method.not_covered[0][0],
    ):
        assert words in page, words
    for name in (MARKDOWN_FILE, HTML_FILE, CARD_FILE):
        text = (folder / name).read_text()
        for foreign in (
            "fine-tuned",
            "training steps",
        ):
            assert foreign not in text, (name, foreign)
    checked = {check.what for check in verify(folder).checks}
    assert "the ledger holds the answers that the report counts" in checked
    assert not any(word in one for word in ("model", "weights", "steps") for one in checked)
    card = metadata_in(folder / CARD_FILE)
    assert card["differential_privacy"]["num_answers"] == 6 and "dp-sgd" not in card["tags"]
    assert method.use in (folder / CARD_FILE).read_text()


def rechained(folder: Path, edit: Callable[[list[dict]], None]) -> None:
    """Edit the lines of the ledger, and make its chain of hashes again."""
    path = folder / LEDGER_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    chain, text = CHAIN_START, ""
    for line in lines:
        line.pop("chain", None)
        body = json.dumps(line)
        chain = next_chain(chain, body)
        text += f'{body[:-1]}, "chain": "{chain}"}}\n'
    path.write_text(text)


def _other_event(lines: list[dict]) -> None:
    lines[1]["noise_multiplier"] = 120.0


def _more(lines: list[dict]) -> None:
    lines[1]["count"] = 9


def test_a_ledger_restored_from_an_older_copy_is_found(folder: Path) -> None:
    """Its last lines are gone, and the chain of the others holds."""
    path = folder / LEDGER_FILE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert failed(folder)
    assert not standing_of(folder).private


@kills(
    "a ledger with more answers than the plan's is reported",
    "dpllm/privacy/query_plan.py",
    "            if count > planned[name, event]:",
    "            if False:",
)
@pytest.mark.parametrize(
    ("edit", "words"),
    [(_more, "is charged 9 times, but the plan allows 4"), (_other_event, "an event that is not in the plan")],
)
def test_no_report_is_made_of_answers_that_the_plan_does_not_allow(folder: Path, edit, words: str) -> None:
    """More answers than planned, or others: ε of the plan would be too small for them."""
    rechained(folder, edit)
    with pytest.raises(ValueError, match=words):
        privacy_report(QueryPlan.load(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE))


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        (LEDGER_FILE, '"count": 4', '"count": 3', "edited, or lines before it"),
        (JSON_FILE, '"adjacency": "zero-out"', '"adjacency": "replace-one"', "says what plan and ledger say"),
        (CARD_FILE, "zero-out: 0.", "zero-out: 0.0", "differential_privacy"),
        (CARD_FILE, "## How to use it", "ε = 0.01 for everybody\n\n## How to use it", "a different claim"),
        ("counts.json", "3", "2", "counts.json is not what was saved"),
    ],
)
def test_an_edited_file_is_found(folder: Path, name: str, old: str, new: str, text: str) -> None:
    """Plan, ledger, report, pages, card and the released file."""
    path = folder / name
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new, 1))
    assert text in failed(folder)


def test_a_file_that_the_ledger_does_not_name_is_found(folder: Path) -> None:
    """One that may hold anything; text beside the release is listed as not covered."""
    (folder / "exact.json").write_text("{}")
    assert verify(folder).ok
    assert any("exact.json" in check.detail for check in verify(folder).checks if check.passed is None)
    (folder / "exact.parquet").write_bytes(b"PAR1")
    assert "exact.parquet may hold weights" in failed(folder)


def test_notes_and_statements_are_added(folder: Path) -> None:
    """`dpllm report` writes report and card again, and verify holds them to each other."""
    add_notes(folder, {"audience": "a partner"})
    assert failed(folder) == "" and "a partner" in (folder / MARKDOWN_FILE).read_text()
    adopt_run(folder)
    add_notes(folder, {"license": "cc-by-4.0"})
    assert "The ledger's file was copied" in (folder / CARD_FILE).read_text() and failed(folder) == ""
    settled = CliRunner().invoke(app, ["report", "note", str(folder), "1=no other copy was used", "by=A. Meyer"])
    assert settled.exit_code == 0, settled.output
    assert "no other copy was used" in (folder / CARD_FILE).read_text() and failed(folder) == ""
    with pytest.raises(ValueError, match="chats"):
        add_notes(folder, {"dataset": "letters"})
    printed = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert printed.exit_code == 0 and json.loads(printed.output)["accounting"]["steps"]["charged"] == 6


def test_only_released_files_are_published(folder: Path) -> None:
    """With the guarantee; not the exact counts, the recipe or a note; to a repository of data."""
    names = published_files(folder)
    assert "counts.json" in names and not [name for name in names if "exact" in name or "not_for_release" in name]
    assert {PLAN_FILE, LEDGER_FILE, CARD_FILE, JSON_FILE} < set(names) and repo_type_of(folder) == "dataset"
    with pytest.raises(PublishError, match="open point"):
        require_publishable(folder)
    require_publishable(folder, force_open_points=True)
    (folder / "counts.json").unlink()
    with pytest.raises(PublishError, match=r"counts\.json"):
        published_files(folder)


def test_a_run_that_released_nothing_is_not_published(tmp_path: Path) -> None:
    """And one whose stop may follow from its answers states the ε of its plan."""
    charges = (Charge(name="counts", event=Query(noise_multiplier=20.0), count=3),)
    with QueryRun.begin(tmp_path / "run", query_plan(charges=charges), dataset="chats", notes=NOTES) as run:
        run.charge("counts")
    with pytest.raises(PublishError, match="released no file"):
        published_files(tmp_path / "run")
    report = json.loads((tmp_path / "run" / JSON_FILE).read_text())
    assert report["accounting"]["steps"]["stated"] == 3 and "depended on the data" in report["statement"]["words"]
    assert report["statement"]["epsilon"] == run.plan.epsilon and failed(tmp_path / "run") == ""


def test_a_run_that_asked_nothing_says_so(tmp_path: Path) -> None:
    """It has a report without odds, and verifies."""
    with QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats"):
        pass
    report = json.loads((tmp_path / "run" / JSON_FILE).read_text())
    assert "has learnt nothing" in report["statement"]["words"] and report["front"]["table"] == []
    assert failed(tmp_path / "run") == ""


def test_every_method_has_words_for_every_place() -> None:
    """A method without words would leave a hole in its report."""
    for name, method in release_words().items():
        assert name == method.name and method.what[-1] != "." and method.use.strip()
        assert method.released and method.not_covered and method.assumptions and method.mechanism


def test_discrete_counts_after_a_sampled_training_have_another_accountant(tmp_path: Path) -> None:
    """No library has their losses together: zero-concentrated privacy bounds them, and no question stays open."""
    prior = PriorRelease(
        folder="trained",
        run="ab" * 8,
        plan_hash="0" * 64,
        chain="1" * 16,
        history=((Step(sampling_rate=0.02, noise_multiplier=2.0), 10),),
        unit="sequence",
        unit_column=None,
        num_units=UNITS,
        dataset="chats",
    )
    counts = Charge(name="counts", event=Query(noise_multiplier=20.0, discrete=True), count=3)
    plan = query_plan(charges=(counts,), after=prior, randomness="discrete")
    with QueryRun.begin(tmp_path / "run", plan, dataset="chats", notes=NOTES) as run:
        run.charge("counts", 3)
    report = json.loads((tmp_path / "run" / JSON_FILE).read_text())
    checks = {check["name"]: check for check in report["accounting"]["cross_checks"]}
    rho = 10 / (2 * 2.0**2) + 3 / (2 * 20.0**2)
    assert report["accounting"]["zcdp_rho"] == pytest.approx(rho)
    assert plan.epsilon < checks["zCDP"]["epsilon"] < rho + 2 * (rho * math.log(1 / plan.delta)) ** 0.5
    missing = [check["note"] for check in checks.values() if check["epsilon"] is None]
    assert len(missing) == 2 and all(note.startswith("does not apply") for note in missing)
    assert not [point for point in report["open_points"] if "other accountants" in point]

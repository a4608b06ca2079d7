"""Tests of dpllm.report.pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dpllm.config import PrivacyConfig
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.report.models import NOT_FILLED, SECTIONS, PrivacyReport
from dpllm.report.pages import draw_figures, render_html, render_markdown, rows_of, shown_beside
from dpllm.report.statement import ReleaseNotes, privacy_report

NOTES = ReleaseNotes(
    data_holder="the clinic",
    audience="<script>alert('staff')</script>",
    other_uses='![x](https://example.org/a.png) & "none"',
    utility={"<b>perplexity</b>": 12.5},
)


def report_of(folder: Path, notes: ReleaseNotes | None = NOTES, **change: Any) -> PrivacyReport:
    config = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 20, **change}
    plan = make_plan(PrivacyConfig(**config), num_units=1000, num_steps=6)
    with Ledger.create(folder / "privacy_ledger.jsonl", plan) as ledger:
        for number in range(6):
            ledger.append_step(number, plan.event)
        ledger.append_disclosure("training loss", 3)
        ledger.append_diagnostic("units with a non-finite gradient", 4)
        ledger.append_end("completed")
    return privacy_report(plan, read_ledger(ledger.path), notes)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PrivacyReport:
    return report_of(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(report: PrivacyReport) -> str:
    return render_html(report, draw_figures(report))


class Page(HTMLParser):
    """What a browser would find: tags with their attributes, and the words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.words += " " if tag in ("td", "dt", "dd", "p", "li", "h1", "title", "pre") else ""

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words += data


def test_page_stands_by_itself(page: str) -> None:
    """Well-formed, without a script, and without anything that would be loaded from elsewhere."""
    found = Page(page)
    assert found.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("#"), (tag, value)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in re.sub(r"url\(#[\w.-]+\)", "", page) and "@import" not in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page


def test_everything_of_the_report_is_on_the_page(page: str, report: PrivacyReport) -> None:
    """Every sentence, assumption, parameter, checklist line and hash, and ε rounded up."""
    words = " ".join(Page(page).words.split())
    lines = [*report.open_points, report.definition.mechanism, report.statement.words]
    lines += [f"{row.attack} {row.without} {row.with_the_model}" for row in report.front.table]
    lines += [f"{item.files} {item.why}".replace("`", "") for item in report.do_not_publish]
    lines += [item.how_ensured for item in report.accounting.assumptions]
    lines += [line.question for line in report.checklist]
    lines += [item.what for item in report.definition.never_covered]
    lines += [report.checkable.plan_hash, report.checkable.ledger_sha256]
    lines += [report.checkable.verify, report.checkable.recompute_from_the_numbers]
    lines += [format_epsilon(value) for _, value in report.statement.epsilon_by_adjacency.items()]
    lines += [check.note for check in report.accounting.cross_checks]
    lines += ["training loss 3", report.checkable.diagnostics_not_covered]
    for line in lines:
        assert " ".join(line.split()) in words, line
    for name, value in shown_beside(report)["parameters"]:
        assert f"{name} {'–' if value is None else value}" in words and "_" not in name.replace("B_max", "")
    assert page.count('class="missing">not filled in') == 2 * sum(not line.filled for line in report.checklist)
    for name in SECTIONS:
        assert page.count(f'id="{name}"') == 1
    assert {line.section for line in report.checklist} <= set(SECTIONS)


def test_what_people_noted_is_escaped(page: str) -> None:
    """A note is text, whatever it holds: no tag, no script, no picture."""
    found = Page(page)
    assert "<script>alert('staff')</script>" in found.words and "<b>perplexity</b>" in found.words
    assert '![x](https://example.org/a.png) & "none"' in found.words
    assert not {"script", "b"} & {tag for tag, _ in found.tags}


def test_page_can_be_made_again_from_the_json(page: str, report: PrivacyReport, tmp_path: Path) -> None:
    """The JSON alone gives the same page, to the letter."""
    stored = PrivacyReport.read(json.loads(json.dumps(report.to_dict())))
    assert render_html(stored, draw_figures(stored)) == page
    again = report_of(tmp_path)
    assert draw_figures(again) == draw_figures(report)


@pytest.mark.parametrize("change", [{"noise_multiplier": 0}, {"seed": 1}])
def test_not_private_is_said_first_thing(tmp_path: Path, change: dict[str, Any]) -> None:
    """Without noise or with a seed: the title says so; without noise there is nothing to draw."""
    report = report_of(tmp_path, **change)
    text = render_html(report, draw_figures(report))
    found = Page(text)
    assert "<title>NOT PRIVATE" in text and "<h1>NOT PRIVATE" in text and '<header class="none">' in text
    drawn = "seed" in change
    assert text.count("<svg ") == 6 * drawn and found.words.count("ε is not finite") == 3 * (not drawn)
    assert ("would hold only if the noise came from secret randomness" in found.words) == drawn


def test_a_missing_picture_is_refused(report: PrivacyReport) -> None:
    """A page with a hole is not made."""
    with pytest.raises(ValueError, match="tradeoff"):
        render_html(report, {})


def test_every_key_with_a_row_is_on_both_pages(page: str, report: PrivacyReport) -> None:
    """Neither template names it: a key of the models that has a row is shown."""
    words, markdown = " ".join(Page(page).words.split()), render_markdown(report)
    shown = [row for section in SECTIONS for row in rows_of(report, section)]
    assert len(shown) > 15 and len({label for label, _ in shown}) == len(shown)
    for label, text in shown:
        assert f"- {label}: {' '.join(text.split())}" in markdown, label
        text = text.replace("`", "") if text != NOT_FILLED else "not filled in"
        assert f"{label} {' '.join(text.split())}" in words, label


def test_the_report_has_delta_once_beside_the_plan(tmp_path: Path) -> None:
    """Pages, card and pictures read it from the statement, and ε under each adjacency as well."""
    report = report_of(tmp_path, delta=3.7e-5)  # which no other number is

    def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
        if isinstance(value, dict):
            for name, one in value.items():
                yield from leaves(one, f"{path}.{name}")
        elif isinstance(value, list):
            for number, one in enumerate(value):
                yield from leaves(one, f"{path}[{number}]")
        else:
            yield path, value

    plain = report.to_dict()
    found = [path for path, value in leaves(plain) if value == report.statement.delta]
    assert sorted(found) == [".checkable.plan.delta", ".statement.delta"]
    stated = {path for path, value in leaves(plain) if value == report.statement.epsilon}
    others = {path for path in stated if not path.startswith((".statement.", ".curves.", ".accounting.cross_checks"))}
    assert others == set()

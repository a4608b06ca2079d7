"""Tests of dpllm.report.html."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest

from dpllm.config import PrivacyConfig
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.report.glossary import glossary, linked
from dpllm.report.html import draw_figures, render_html
from dpllm.report.models import PrivacyReport
from dpllm.report.models_front import SECTIONS
from dpllm.report.pages import shown_beside, template
from dpllm.report.statement import HTML_FILE, ReleaseNotes, privacy_report, write_report

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


def test_statement_and_tier_come_first(page: str, report: PrivacyReport) -> None:
    """Before everything else: what was trained on what, by whom, when, the unit, the odds; then what is not done."""
    words, front = " ".join(Page(page).words.split()), report.front
    for line in (front.what, front.who, front.when, front.protected, front.odds, front.numbers, front.not_covered):
        place = words.index(" ".join(line.replace("`", "").split()))
        assert place < words.index(front.to_do)
    assert words.index(front.to_do) < words.index(report.open_points[0]) < words.index("Do not publish these files")
    assert "strong" in words[: words.index(front.to_do)]


def test_everything_of_the_report_is_on_the_page(page: str, report: PrivacyReport) -> None:
    """Every sentence, assumption, parameter, checklist line and hash, and ε rounded up."""
    words = " ".join(Page(page).words.split())
    lines = [*report.open_points, report.definition.mechanism, report.statement.words]
    lines += [how.replace("`", "") for how in report.how_to_clear]
    lines += [f"{row.attack} {row.without} {row.with_the_model}" for row in report.front.table]
    lines += [f"{item.files} {item.why}".replace("`", "") for item in report.do_not_publish]
    lines += [f"{entry.term} {entry.words}" for entry in glossary()]
    lines += [item.how_ensured for item in report.accounting.assumptions]
    lines += [line.question for line in report.checklist]
    lines += [item.what for item in report.definition.never_covered]
    lines += [report.checkable.plan_hash, report.checkable.ledger_sha256]
    lines += [report.checkable.verify, report.checkable.recompute_from_the_numbers]
    lines += [format_epsilon(value) for _, value in report.accounting.epsilon.items()]
    lines += [check.note for check in report.accounting.cross_checks]
    lines += ["training loss 3", "units with a non-finite gradient 4"]
    for line in lines:
        assert " ".join(line.split()) in words, line
    for name, value in shown_beside(report)["parameters"]:
        assert f"{name} {'–' if value is None else value}" in words and "_" not in name.replace("B_max", "")
    assert page.count('class="missing">not filled in') == 2 * sum(not line.filled for line in report.checklist)
    for name in SECTIONS:
        assert page.count(f'id="{name}"') == 1
    assert {line.section for line in report.checklist} <= set(SECTIONS)


def test_nothing_is_said_twice(page: str, report: PrivacyReport) -> None:
    """The checklist points to the sections, and a sentence about the numbers is there once."""
    words = " ".join(Page(page).words.split())
    for line in (report.definition.unit, report.definition.mechanism, report.front.odds, report.statement.words):
        assert words.count(" ".join(line.split())) == 1, line


def test_the_first_use_of_a_word_of_the_field_is_explained(page: str) -> None:
    """It is a link to the glossary, once, before any other use in the text; headings and pictures have none."""
    found = Page(page)
    targets = [attributes["href"] for tag, attributes in found.tags if attributes.get("class") == "term"]
    assert len(targets) == len(set(targets)) and {"#g-epsilon", "#g-delta", "#g-unit", "#g-noise"} <= set(targets)
    for target in targets:
        assert f'<dt id="{target[1:]}">' in page
    assert re.search(r"<h[123][^>]*>[^<]*<a", page) is None
    first = page.index("ε", page.index("<body>"))
    assert page[:first].endswith('<a class="term" href="#g-epsilon">')
    assert linked("<body><p>clipped <code>noise</code> and noise</p>", glossary()) == (
        '<body><p><a class="term" href="#g-clipping">clipped</a> <code>noise</code> and '
        '<a class="term" href="#g-noise">noise</a></p>'
    )


def test_a_phone_gets_pictures_and_tables_of_its_own(page: str, report: PrivacyReport) -> None:
    """Each picture is there in two sizes, of which a screen shows one; letters keep their size."""
    figures = draw_figures(report)
    for name in ("tradeoff", "epsilon_over_delta", "epsilon_over_steps"):
        wide, narrow = (re.search(r'viewBox="0 0 ([\d.]+) ', figures[end]) for end in (name, f"{name}_narrow"))
        assert wide is not None and narrow is not None and float(narrow[1]) < 0.6 * float(wide[1])
    assert "figure .wide { display: none; }" in page and "table.stack" in page and 'name="viewport"' in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_what_people_noted_is_escaped(page: str) -> None:
    """A note is text, whatever it holds: no tag, no script, no picture."""
    found = Page(page)
    assert "<script>alert('staff')</script>" in found.words and "<b>perplexity</b>" in found.words
    assert '![x](https://example.org/a.png) & "none"' in found.words
    assert not {"script", "b"} & {tag for tag, _ in found.tags}


def test_three_pictures_with_captions_and_words(page: str, report: PrivacyReport) -> None:
    """Each picture has a caption, and says in words what it shows."""
    found = Page(page)
    pictures = [attributes for tag, attributes in found.tags if attributes.get("role") == "img"]
    assert len(pictures) == 2 * page.count("<figcaption>") == page.count("<svg ") == 6
    alternatives = " ".join(str(attributes["aria-label"]) for attributes in pictures)
    assert "wrongly accuses" in alternatives and "over δ" in alternatives
    assert f"rising to {format_epsilon(report.statement.epsilon)} after 6 steps" in alternatives


def test_page_can_be_made_again_from_the_json(page: str, report: PrivacyReport, tmp_path: Path) -> None:
    """The JSON alone gives the same page, to the letter."""
    stored = PrivacyReport.read(json.loads(json.dumps(report.to_dict())))
    assert render_html(stored, draw_figures(stored)) == page
    again = report_of(tmp_path)
    assert draw_figures(again) == draw_figures(report)


def test_write_report_writes_the_page(tmp_path: Path) -> None:
    """The page lies beside the other two forms."""
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=20), 1000, 2)
    with Ledger.create(tmp_path / "privacy_ledger.jsonl", plan) as ledger:
        ledger.append_step(0, plan.event)
        report = write_report(tmp_path, plan, ledger)
    assert (tmp_path / HTML_FILE).read_text(encoding="utf-8") == render_html(report, draw_figures(report))


@pytest.mark.parametrize("change", [{"noise_multiplier": 0}, {"seed": 1}])
def test_not_private_is_said_first_thing(tmp_path: Path, change: dict[str, Any]) -> None:
    """Without noise or with a seed: the title says so; without noise there is nothing to draw."""
    report = report_of(tmp_path, **change)
    text = render_html(report, draw_figures(report))
    found = Page(text)
    assert "<title>NOT PRIVATE" in text and "<h1>NOT PRIVATE" in text and '<header class="none">' in text
    drawn = "seed" in change
    assert text.count("<svg ") == 6 * drawn and found.words.count("there is no finite ε to draw") == 3 * (not drawn)
    assert ("would hold only with noise from secret randomness" in found.words) == drawn


def test_missing_picture_or_key_is_refused(report: PrivacyReport) -> None:
    """A page with a hole is not made."""
    with pytest.raises(ValueError, match=r"the page has the pictures tradeoff, .*got none"):
        render_html(report, {})
    without = {name: value for name, value in report.to_dict().items() if name != "definition"}
    with pytest.raises(ValueError, match="definition is missing"):
        PrivacyReport.read(without)
    with pytest.raises(jinja2.UndefinedError):
        template("privacy_report.html").render(report=without)
    with pytest.raises(jinja2.UndefinedError):
        template("privacy_report.md").render(report=without)


def test_a_command_never_breaks_within_an_option(page: str, report: PrivacyReport) -> None:
    """On a narrow screen, a line ends between two words; a copied command has plain hyphens."""
    shown = re.findall(r'<code class="command">(.*?)</code>', page)
    assert len(shown) >= len(report.open_points)
    kept = re.findall(r'<span class="w">([^<]*)</span>', " ".join([*shown, *re.findall(r"<pre>.*?</pre>", page, re.S)]))
    assert {"--settle", "--noise-multiplier"} <= set(kept)
    assert "code .w, pre .w { white-space: nowrap; }" in page and "overflow-x: auto" in page
    assert not re.search(r"--\w", re.sub(r"<span class=\"w\">[^<]*</span>", "", " ".join(shown)))


def test_numbers_are_rounded_until_the_section_of_exact_figures(page: str) -> None:
    """One rule for both: no number with more than two figures or a power of ten before the section that says so."""
    before, _, after = page[page.index("<body>") :].partition('<section id="accounting">')
    words = Page(re.sub(r"<svg.*?</svg>", "", before, flags=re.S)).words
    words = words.partition("Facts of the run (exact figures)")[0]
    assert not re.search(r"\de[-+]\d", words)
    for number in re.findall(r"(?<![\d.])\d+\.\d+", words):
        assert len(number.replace(".", "").lstrip("0")) <= 3, number
    assert "exact figures" in after and "Bounds on attacks, exact figures" in after

"""Render the privacy report as a Markdown page, and as an HTML page with pictures.

A page is determined by the report's values, its template and its glossary, which explains technical terms to lay
readers; the page links the first use of each term to its explanation.

Everything on the pages comes from the report's JSON and nothing is computed here, so the JSON alone reproduces them.
The HTML page is self-contained: it has no script and loads nothing. All values are escaped, since notes may contain any
characters.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import jinja2
import markupsafe
import yaml

from dpllm.config.files import write_file
from dpllm.privacy.ledger import LEDGER_FILE, Ledger
from dpllm.privacy.rounding import format_delta, format_epsilon, format_percent, one_in, up, up_significant
from dpllm.report.disclosures import UTILITY_FILE
from dpllm.report.figures import plot_epsilon_curve, plot_epsilon_over_steps, plot_tradeoff
from dpllm.report.front import bounds, method_of, thing_of, unit_of
from dpllm.report.kinds import Part, Shown
from dpllm.report.models import NOT_FILLED, SECTIONS, Curves, Parameters, PrivacyReport, QueryParameters

CHECK_FILE = "check_epsilon.py"
"""The verifier that is copied next to the report; it computes ε without dpllm."""
WHERE = "Run the commands in the folder that contains this page: the dot in them stands for that folder."
EXACT = (
    "Sentences and tables above are rounded to two digits, in the safe direction. From here on, the numbers are exact "
    "and meant for experts."
)
KEPT = (
    "Publish the model with `dpllm push`, which leaves these files out. If you copy the folder by hand, leave them "
    "out as well."
)
CHECKPOINTS = (
    "ε covers the weights in every checkpoint. It does not cover all of the other files next to them, so do not "
    "publish a checkpoint's whole folder."
)


class _Verbatim(str):
    """A text that is printed with its spaces unchanged."""


@cache
def template(name: str) -> jinja2.Template:
    """Return a template; a key that is missing in a report is an error, not an empty text.

    HTML is escaped. Markdown prints each value on one line, even if a note has several, and None as "-".

    Args:
        name: name of the file in ``dpllm/report/templates``.
    """
    is_html = name.endswith(".html")
    environment = jinja2.Environment(
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=None if is_html else _in_one_line,
    )
    environment.filters.update(
        **{"epsilon": _epsilon, "delta": format_delta, "one_in": one_in, "chance": _chance, "share": _share},
        **{"cell": _cell, "verbatim": _Verbatim, "width": _width, "code": _code, "ceiling": _ceiling},
        **{"command": _command, "words": _words, "percent": format_percent},
        **{"literal": lambda value: _Verbatim(repr(value))},
    )
    environment.globals.update(method_of=method_of)
    environment.globals.update(not_filled=NOT_FILLED, sections=SECTIONS, glossary=glossary(), utility_file=UTILITY_FILE)
    environment.globals.update(where=WHERE, exact=EXACT, kept=KEPT, checkpoints=CHECKPOINTS)
    text = importlib.resources.files("dpllm").joinpath(f"report/templates/{name}").read_text(encoding="utf-8")
    return environment.from_string(text)


def part(name: str, block: str, **context: Any) -> str:
    """Return one block of a page, without the blank lines around it."""
    page = template(name)
    return "".join(page.blocks[block](page.new_context(context))).strip()


def check_text() -> str:
    """Return the text of `CHECK_FILE`."""
    return importlib.resources.files("dpllm").joinpath(f"report/{CHECK_FILE}").read_text(encoding="utf-8")


def write_pages(folder: str | Path, texts: Mapping[str, str], ledger: Any = None) -> None:
    """Write files of a report, or its card, and record their hashes in the folder's ledger.

    `dpllm verify` compares the files with the hashes.

    Args:
        folder: the ledger's folder. If it has no ledger, no hash is recorded.
        texts: the files' contents, by name.
        ledger: the folder's ledger, if it is open (`Ledger`, or `SharedLedger` on its first process). None: opens it.

    Raises:
        LedgerError: the ledger is damaged, or a run is writing it.
    """
    folder, digests = Path(folder), {}
    for name, text in texts.items():
        content = text.encode("utf-8")
        write_file(folder / name, content)
        digests[name] = hashlib.sha256(content).hexdigest()
    if ledger is not None:
        ledger.append_pages(digests)
    elif (folder / LEDGER_FILE).is_file():
        with Ledger.annotate(folder / LEDGER_FILE) as opened:
            opened.append_pages(digests)


def in_folder(text: str, folder: str | Path) -> str:
    """Return a text of a report with the dot in its commands replaced by a folder, and no word about the dot.

    A report itself names no folder, since its folder is moved, copied and published.

    >>> in_folder("`dpllm verify .`, `dpllm report note . audience=x`", "runs/a b")
    "`dpllm verify 'runs/a b'`, `dpllm report note 'runs/a b' audience=x`"
    """
    return re.sub(
        r"\bdpllm (verify|report note|report) \.(?![\w/.])",
        lambda found: f"dpllm {found[1]} {quote(str(folder))}",
        text.replace(f" {WHERE}", ""),
    )


def shown_beside(report: PrivacyReport) -> dict[str, Any]:
    """Return the values that the pages derive from the report: all bounds, and parameters with their names."""
    statement, parameters = report.statement, report.accounting.parameters
    if isinstance(parameters, QueryParameters):
        named = _of_queries(parameters)
    else:
        named = [
            ((Parameters.model_fields[name].description or name).removesuffix(".").partition(";")[0], value)
            for name, value in parameters
        ]
    return {
        "bounds": [row for _, row in bounds(report.strength, statement.adjacency, unit_of(statement.unit))],
        "parameters": named,
        "thing": thing_of(report),
        "rows": partial(rows_of, report),
        "curve": [
            (statement.delta, statement.epsilon_by_adjacency),
            *((row.delta, row) for row in report.accounting.curve),
        ],
        **(_TEXTS_OF_QUERIES if method_of(report) is not None else {}),
    }


def _of_queries(parameters: QueryParameters) -> list[tuple[str, Any]]:
    """Return the parameters of a query run as names and values, with one row per kind of answer and per setting."""
    of_answers = [
        (f"{one.name}: charged, out of planned", f"{one.charged:,} of {one.planned:,}") for one in parameters.answers
    ]
    fields = [(name, value) for name, value in parameters if name not in ("answers", "settings")]
    described = [
        ((QueryParameters.model_fields[name].description or name).removesuffix(".").partition(";")[0], value)
        for name, value in fields
    ]
    return [*described[:3], *of_answers, *parameters.settings.items(), *described[3:]]


_FORMS: dict[str, Callable[[Any], str]] = {
    "": lambda value: "; ".join(map(_in_words, value)) if isinstance(value, tuple) else _in_words(value),
    "number": lambda value: f"{value:g}",
    "rho": lambda value: f"{value:.6g}" if math.isfinite(value) else "infinite",
    "verbatim_code": lambda value: f"`{value}`",
    "or_none": lambda value: ", ".join(map(str, value)) or "none",
}


def _in_words(value: Any) -> str:
    return str(getattr(value, "in_words", value))


def rows_of(report: PrivacyReport, section: str) -> list[tuple[str, str]]:
    """Return the rows of a section: label and text of every value whose key has a `Shown` with this section.

    Args:
        report: the report that `privacy_report` returns.
        section: a key of `SECTIONS`.
    """
    trained, rows = method_of(report) is None, []
    step, made = ("step", "trained") if trained else ("answer", "made")
    parts = (report.setting, report.definition, report.noted, report.accounting, report.checkable)
    for part in (*parts, report.checkable.plan):
        for name, field in type(part).model_fields.items():
            for shown in field.metadata:
                if not isinstance(shown, Shown) or shown.section != section:
                    continue
                label = shown.label.format(thing=thing_of(report), step=step, Step=step.capitalize(), made=made)
                rows += [(label, text) for text in _texts(shown, getattr(part, name))]
    return rows


def _texts(shown: Shown, value: Any) -> list[str]:
    """Return the texts of a value's rows; a list of report parts has one row per part."""
    if value is None:
        return [] if shown.if_none is None else [shown.if_none]
    if isinstance(value, tuple) and not shown.form and any(isinstance(one, Part) for one in value):
        return [_in_words(one) for one in value]
    return [] if value == () and not shown.form else [_FORMS[shown.form](value)]


def _share(value: float) -> str:
    """Format a probability with four digits, rounded up."""
    return f"{float(up_significant(min(1.0, value))):.12g}"


def _width(value: float) -> str:
    """Format a probability as the width of a bar."""
    return f"{100 * value:.3g}%"


def _code(value: str) -> markupsafe.Markup:
    """Escape a text, and format what is between backticks as code."""
    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(value))))


def _words(value: str) -> markupsafe.Markup:
    """Escape a command so that lines break only between words, never at an option's hyphens."""
    return markupsafe.Markup(
        re.sub(r"\S*-\S*", lambda word: f'<span class="w">{word[0]}</span>', str(markupsafe.escape(value)))
    )


def _command(value: str) -> markupsafe.Markup:
    """Escape a text, and format what is between backticks as code; a command gets its own line."""
    parts = value.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is plain text
        return markupsafe.escape(value)
    return markupsafe.Markup("").join(
        markupsafe.Markup("<code{}>{}</code>").format(
            markupsafe.Markup(' class="command"') if part.startswith("dpllm ") and "-" in part else "", _words(part)
        )
        if place % 2
        else markupsafe.escape(part)
        for place, part in enumerate(parts)
    )


def _in_one_line(value: Any) -> str:
    if isinstance(value, _Verbatim):
        return value
    return "-" if value is None else " ".join(str(value).split())


def _cell(value: Any) -> str:
    return _in_one_line(value).replace("|", "\\|")


def _epsilon(value: float | None) -> str | None:
    return None if value is None else format_epsilon(value)


def _chance(value: float) -> str:
    """Format a probability, rounded up."""
    return up(min(1.0, value))


def _ceiling(value: float) -> float:
    """Return a number rounded up to four decimals."""
    return float(up(value))


class Entry(NamedTuple):
    """A technical term and its explanation."""

    anchor: str
    """Anchor of the entry on the page."""
    term: str
    """The term."""
    words: str
    """Its explanation."""
    pattern: str
    """Regular expression that matches its uses on the page."""
    of_queries: str | None = ""
    """Its explanation on a query run's page; empty: the same; None: that page has no such entry."""


@cache
def glossary(queries: bool = False) -> tuple[Entry, ...]:
    """Return every entry, in the page's order.

    Args:
        queries: whether the page is a query run's, which has no terms of training.
    """
    path = importlib.resources.files("dpllm").joinpath("report/templates/glossary.yaml")
    entries = tuple(Entry(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8")))
    if not queries:
        return entries
    return tuple(
        entry._replace(words=entry.of_queries or entry.words) for entry in entries if entry.of_queries is not None
    )


_TEXTS_OF_QUERIES = {
    "sections": {**SECTIONS, "utility": "How useful the release is"},
    "glossary": glossary(queries=True),
}
"""Section titles and glossary of a query run's page, which replace those of a training run."""
_TAG = re.compile(r"(<[^>]*>)")
_NOT_WITHIN = ("a", "h1", "h2", "h3", "style", "title", "svg", "pre", "code")


def linked(page: str, entries: Sequence[Entry]) -> str:
    """Return an HTML page in which the first use of each term links to its entry in the glossary.

    Headings, links, code, pictures and the glossary itself are left unchanged.

    Args:
        page: the page, with the glossary as its last section.
        entries: the entries of its glossary.

    >>> linked("<body><h1>δ</h1><p>δ and δ</p></body>", glossary())
    '<body><h1>δ</h1><p><a class="term" href="#g-delta">δ</a> and δ</p></body>'
    """
    head, opened, rest = page.partition("<body>")
    body, glossary, tail = rest.partition('<section id="glossary">')
    pieces, within, waiting = _TAG.split(body), 0, list(entries)
    for at, piece in enumerate(pieces):
        name = re.match(r"<(/?)([a-z0-9]+)", piece)
        if name is not None and name[2] in _NOT_WITHIN and not piece.endswith("/>"):
            within += -1 if name[1] else 1
        elif name is None and not within and piece.strip():
            pieces[at], waiting = _linked_in(piece, waiting)
    return head + opened + "".join(pieces) + glossary + tail


def _linked_in(text: str, waiting: list[Entry]) -> tuple[str, list[Entry]]:
    """Return a text with links at the first uses of the waiting terms, and the terms that still wait."""
    found = [(match.start(), match.end(), entry) for entry in waiting if (match := re.search(entry.pattern, text))]
    parts, last, used = [], 0, []
    for start, end, entry in sorted(found, key=lambda one: one[:2]):
        if start >= last:
            parts += [text[last:start], f'<a class="term" href="#g-{entry.anchor}">{text[start:end]}</a>']
            last = end
            used.append(entry)
    return "".join([*parts, text[last:]]), [entry for entry in waiting if entry not in used]


def render_markdown(report: Any) -> str:
    """Return the Markdown page of a report.

    Args:
        report: the report that `privacy_report` returns.
    """
    page = template("privacy_report.md")
    return page.render(report=report, title=title_of(report), **shown_beside(report))


def title_of(report: Any) -> str:
    """Return the page's title, which says whether there is a guarantee."""
    if report.statement.private:
        return "Privacy report"
    return "NOT PRIVATE: report of a run without a privacy guarantee"


_PICTURES = ("tradeoff", "epsilon_over_delta", "epsilon_over_steps")
FIGURES = (*_PICTURES, *(f"{name}_narrow" for name in _PICTURES))
"""Names of the pictures; each also has a version for narrow screens."""


def draw_figures(report: Any) -> dict[str, str]:
    """Return a report's pictures as SVG texts, by name; a picture without a curve is an empty text.

    Args:
        report: the report that `privacy_report` returns.
    """
    return dict(
        _drawn(report.curves, report.statement.delta, report.statement.epsilon, report.checkable.plan.target_epsilon)
    )


@lru_cache(maxsize=4)
def _drawn(curves: Curves, delta: float, epsilon: float, target_epsilon: float | None) -> dict[str, str]:
    """Draw the curves, with a cache, since a report is written several times."""
    tradeoff, steps, deltas = curves.tradeoff, curves.epsilon_over_steps, curves.epsilon_over_delta
    if not deltas.epsilon:
        return dict.fromkeys(FIGURES, "")
    found = {}
    for end, narrow in (("", False), ("_narrow", True)):
        found[f"tradeoff{end}"] = plot_tradeoff(
            tradeoff.false_positive_rate, tradeoff.true_positive_rate, tradeoff.from_epsilon_and_delta_alone, narrow
        )
        found[f"epsilon_over_delta{end}"] = plot_epsilon_curve(
            deltas.epsilon, dict(deltas.delta.items()), delta, epsilon, narrow
        )
        found[f"epsilon_over_steps{end}"] = (
            plot_epsilon_over_steps(steps.steps, steps.epsilon, target_epsilon, narrow) if steps.steps else ""
        )  # empty for a selection, whose ε covers all its runs
    return found


def render_html(report: Any, figures: Mapping[str, str]) -> str:
    """Return the HTML page of a report.

    Args:
        report: the report that `privacy_report` returns.
        figures: the pictures that `draw_figures` returns.

    Raises:
        ValueError: a picture is missing.
    """
    if set(figures) != set(FIGURES):
        raise ValueError(f"the page needs pictures {', '.join(FIGURES)}, got {', '.join(sorted(figures)) or 'none'}")
    page = template("privacy_report.html").render(
        report=report, figures=figures, title=title_of(report), **shown_beside(report)
    )
    return linked(page.rstrip() + "\n", glossary(queries=method_of(report) is not None))

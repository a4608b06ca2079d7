"""The templates of the report's pages, and the filters by which they print numbers and texts.

Place in the flow: below `dpllm.report.render`. A page follows from the report's values, its template and its
glossary.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from shlex import quote
from typing import Any

import jinja2
import markupsafe

from dpllm.config.files import write_file
from dpllm.privacy.ledger import LEDGER_FILE, Ledger
from dpllm.privacy.rounding import format_delta, format_epsilon, format_percent, one_in, up, up_significant
from dpllm.report.disclosures import UTILITY_FILE
from dpllm.report.front import bounds, method_of, thing_of, unit_of
from dpllm.report.glossary import glossary
from dpllm.report.kinds import Part, Shown
from dpllm.report.models import NOT_FILLED, SECTIONS, Parameters, PrivacyReport, QueryParameters

CHECK_FILE = "check_epsilon.py"
"""The verifier that travels with the report, as it is in this folder: it computes ε without dpllm."""
WHERE = "Type the commands in the folder in which this page is: the dot in them means that folder."
EXACT = (
    "Sentences and tables above are rounded to two figures, to the safe side. From here on, the numbers are exact "
    "figures, for readers who know the field."
)
KEPT = (
    "Publish the model with `dpllm push`, which leaves these files out. If you copy the folder by hand, leave them "
    "out, too."
)
CHECKPOINTS = (
    "ε covers the weights in every checkpoint. It does not cover each of the other files beside them, so a "
    "checkpoint's folder is not published as a whole."
)


class _Verbatim(str):
    """A text that is printed with its spaces."""


@cache
def template(name: str) -> jinja2.Template:
    """Return a template; a key that a report lacks is an error, not an empty place.

    HTML is escaped. In Markdown each value is printed in one line, whatever people noted, and None as "-".

    Args:
        name: of the file in ``dpllm/report/templates``.
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
    """Return one block of a page, without the empty lines around it.

    Args:
        name: of the template.
        block: of the block in it.
        context: the values that the block prints.
    """
    page = template(name)
    return "".join(page.blocks[block](page.new_context(context))).strip()


def check_text() -> str:
    """Return the text of `CHECK_FILE`."""
    return importlib.resources.files("dpllm").joinpath(f"report/{CHECK_FILE}").read_text(encoding="utf-8")


def write_pages(folder: str | Path, texts: Mapping[str, str], ledger: Any = None) -> None:
    """Write files of a report, or its card, and note their hashes in the ledger of the folder.

    `dpllm verify` compares the files with the hashes.

    Args:
        folder: of the ledger. Without a ledger in it, there is nothing to verify, and no hash is noted.
        texts: the files by name.
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
    """Return a text of a report whose commands name a folder; in the report itself it is the folder of the page.

    A report has no name of a folder: its folder is moved, copied and published, and its path is a fact of a machine.

    >>> in_folder("`dpllm verify .`, `dpllm report note . audience=x`", "runs/a b")
    "`dpllm verify 'runs/a b'`, `dpllm report note 'runs/a b' audience=x`"
    """
    return re.sub(
        r"\bdpllm (verify|report note|report) \.(?![\w/.])",
        lambda found: f"dpllm {found[1]} {quote(str(folder))}",
        text,
    )


_TEXTS_OF_QUERIES = {
    "sections": {**SECTIONS, "utility": "How useful the release is"},
    "glossary": glossary(queries=True),
}
"""Of the page of a query run, in place of those of a training."""


def shown_beside(report: PrivacyReport) -> dict[str, Any]:
    """Return what the pages show beside the report's own values, made from these: all bounds, named parameters."""
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
    """Return the parameters of a query run as names and values: each kind of answer and each setting in its row."""
    of_answers = [
        (f"{one.name}: charged, of those planned", f"{one.charged:,} of {one.planned:,}") for one in parameters.answers
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
    """Return the rows of a section: label and text of every value whose key has a `Shown` of this section.

    Args:
        report: made by `privacy_report`.
        section: of `SECTIONS`.
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
    """Return the texts of a value's rows: one for each part of a list of parts of the report."""
    if value is None:
        return [] if shown.if_none is None else [shown.if_none]
    if isinstance(value, tuple) and not shown.form and any(isinstance(one, Part) for one in value):
        return [_in_words(one) for one in value]
    return [] if value == () and not shown.form else [_FORMS[shown.form](value)]


def _share(value: float) -> str:
    """Print a probability with four figures, rounded up."""
    return f"{float(up_significant(min(1.0, value))):.12g}"


def _width(value: float) -> str:
    """Print a probability as the width of a bar."""
    return f"{100 * value:.3g}%"


def _code(value: str) -> markupsafe.Markup:
    """Escape a text, and show what is between backticks as code."""
    return markupsafe.Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(markupsafe.escape(value))))


def _words(value: str) -> markupsafe.Markup:
    """Escape a command such that a line breaks between its words only, never at the hyphens of an option."""
    return markupsafe.Markup(
        re.sub(r"\S*-\S*", lambda word: f'<span class="w">{word[0]}</span>', str(markupsafe.escape(value)))
    )


def _command(value: str) -> markupsafe.Markup:
    """Escape a text, and show commands and other code between backticks; a command has a line of its own."""
    parts = value.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner is text
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
    """Print a probability, rounded up."""
    return up(min(1.0, value))


def _ceiling(value: float) -> float:
    """Return a number with four decimals, rounded up."""
    return float(up(value))

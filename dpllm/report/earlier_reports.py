"""Reports that earlier versions wrote: for `dpllm verify`.

Place in the flow: before the comparisons of `dpllm.report.verify`. Each format is described by its difference from the
next one: the keys that were added since, and the values that had another form. A report is held to the keys of its own
format. Then its numbers, names and hashes are compared with those that are computed today; a sentence may have other
words, and must have the same numbers. Its pages and its card are made again with the templates of its format
(`dpllm.report.pages`), and compared letter by letter.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field, create_model

from dpllm.privacy.ledger_reader import LedgerContents
from dpllm.privacy.rounding import format_delta, nearest_delta
from dpllm.report import earlier_pages
from dpllm.report.checklist import is_seeded
from dpllm.report.front import unit_of
from dpllm.report.kinds import Count
from dpllm.report.models import (
    FORMAT,
    Accounting,
    Checkable,
    Definition,
    Part,
    PrivacyReport,
    Run,
    Steps,
    Strength,
)
from dpllm.report.models_front import Front, Noted, Settled


def _earlier(today: type[Part], without: tuple[str, ...] = (), **changed: Any) -> type[Part]:
    """Return the model that a part of the report had in an earlier format.

    Args:
        today: the part as it is.
        without: keys that were added since.
        changed: types of keys that had another one, and keys that were dropped since, as (type, field).
    """
    kept = {
        name: (changed.pop(name, field.annotation), field)
        for name, field in today.model_fields.items()
        if name not in without
    }
    return create_model(today.__name__, __base__=Part, __doc__=today.__doc__, **{**kept, **changed})


class _Answer(Part):
    """A line of the checklist, with the answer that the page repeated."""

    section: str = Field(description="Which part of the report it belongs to.")
    question: str = Field(description="The question.")
    answer: str | None = Field(description="The answer; null: not filled in.")
    filled: bool = Field(description="Whether there is an answer.")


_settled = Field(description="Open points that people settled: the point, and what they checked.")
_Settled4 = _earlier(Settled, without=("by", "at"))
_Format4 = _earlier(
    PrivacyReport,
    without=("settlements",),
    format=Literal[4],
    front=_earlier(Front, without=("alert",)),
    noted=_earlier(Noted, settled=(dict[str, str], _settled)),
    settled_points=tuple[_Settled4, ...],  # type: ignore[valid-type]
)
_left_out = Field(description="Rows that the bound on rows per user left out; depends on the private data.")
_in_words = Field(description="The bounds as sentences.")
_Strength3 = _earlier(Strength, in_plain_words=(tuple[str, ...], _in_words))
_ADDED_IN_4 = (
    *("front", "how_to_clear", "settled_points", "do_not_publish"),
    *("utility_elsewhere", "noted"),
)
_Format3 = _earlier(
    _Format4, without=_ADDED_IN_4, format=Literal[3], strength=_Strength3, checklist=tuple[_Answer, ...]
)
_Run = _earlier(Run, without=("file",))
_Format2 = _earlier(
    _Format3,
    without=("noted_open_points",),
    format=Literal[2],
    definition=_earlier(Definition, without=("facts",), rows_left_out=(Count | None, _left_out)),
    accounting=_earlier(Accounting, steps=_earlier(Steps, without=("stated",))),
    strength=_earlier(_Strength3, without=("audit_noted",)),
    checkable=_earlier(Checkable, runs=tuple[_Run, ...]),  # type: ignore[valid-type]
)


class Earlier(NamedTuple):
    """An earlier format."""

    model: type[Part]
    """The keys of its JSON."""
    pages: int
    """The format whose keys and templates its pages have."""
    ledger: int
    """The latest format of a ledger beside which a version wrote it."""


_FORMATS = {2: Earlier(_Format2, 3, 2), 3: Earlier(_Format3, 3, 2), 4: Earlier(_Format4, 4, 3)}
EARLIER_FORMATS: dict[int, type[Part]] = {number: one.model for number, one in _FORMATS.items()}
"""Formats of reports that are verified beside today's, and their keys."""

_ROUNDED_UP = 2  # format of the first ledgers whose reports round δ up
_NO_FILE = 2  # format of the last reports whose ledgers note no file
_DROPPED_LINES = ("Rows left out by the bound on rows per user",)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def format_of(recorded: Mapping[str, Any] | None) -> int | None:
    """Return the format that a JSON file names; None where it names none."""
    number = None if recorded is None else recorded.get("format")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def form_of(written: int | None) -> str:
    """Return the folder of the templates with which the pages of a format are printed; of today's format, none."""
    return f"format{_FORMATS[written].pages}/" if written in _FORMATS else ""


def forms_until(written: int) -> list[str]:
    """Return the folders of the templates of every format up to this one; today's is none."""
    return sorted({form_of(number) for number in (*_FORMATS, FORMAT) if number <= written})


def due_then(report: PrivacyReport, written: int) -> Any:
    """Return the report that a version of an earlier format would have made of the same values, as its pages show it.

    Args:
        report: as it is computed today.
        written: the format of the version.
    """
    pages = _FORMATS[written].pages
    values = _in_format_4(report)
    return then_of(values if pages == 4 else _in_format_3(report, values), written)


def then_of(values: Mapping[str, Any], written: int) -> Any:
    """Return the report that plain values are, in the format of the pages of an earlier format."""
    model = EARLIER_FORMATS[_FORMATS[written].pages]
    return model.model_validate_json(json.dumps(values), strict=True)


def _in_format_4(report: PrivacyReport) -> dict[str, Any]:
    values = {**report.to_dict(), "format": 4}
    answers = {item["point"]: item["answer"] for item in values.pop("settlements")}
    values["noted"] = {**values["noted"], "settled": answers}
    values["settled_points"] = [{"point": item.point, "answer": item.answer} for item in report.settled_points]
    values["front"] = {name: words for name, words in values["front"].items() if name != "alert"}
    words = earlier_pages.with_factor(report.statement.words, report.statement.epsilon)
    values["statement"] = {**values["statement"], "words": words}
    return values


def _in_format_3(report: PrivacyReport, in_format_4: Mapping[str, Any]) -> dict[str, Any]:
    statement = report.statement
    values = {name: value for name, value in in_format_4.items() if name not in _ADDED_IN_4}
    sentences = earlier_pages.attack_sentences(
        report.strength, statement.adjacency, unit_of(statement.unit), is_seeded(report.checkable)
    )
    lines = earlier_pages.checklist(report, sentences)
    values |= {"format": 3, "checklist": lines, "open_points": earlier_pages.open_points(report, lines)}
    values["strength"] = {**values["strength"], "in_plain_words": sentences}
    return values


def in_form(recorded: Mapping[str, Any], due: Mapping[str, Any], keep_words: bool) -> dict[str, Any]:
    """Return an earlier report with the keys of the format of its pages.

    Args:
        recorded: of an earlier format.
        due: as it is computed today, in the format of those pages (`due_then`).
        keep_words: keep sentences with the same numbers in the words of the record, and its checklist, as its pages
            show them. Otherwise they have today's words, so that what differs is no matter of words.

    Returns:
        What was recorded; keys that only the format of its pages has as they are due; none that it lacks.
    """
    form = _merged(recorded, due, keep_words)
    form["format"] = due["format"]
    if due["format"] == 3 and not keep_words and isinstance(recorded.get("checklist"), list):
        answers = {entry["question"]: entry for entry in recorded["checklist"] if isinstance(entry, dict)}
        form["checklist"] = [_merged(answers.get(entry["question"], entry), entry, False) for entry in due["checklist"]]
    return dict(form)


def in_todays_lines(page: str) -> str:
    """Return a page of an earlier report without the lines that today's have no more."""
    return "".join(line for line in page.splitlines(keepends=True) if not any(old in line for old in _DROPPED_LINES))


def rounds_to_nearest(contents: LedgerContents | None) -> bool:
    """Return whether an earlier version, which rounded δ to the nearest number, can have written a ledger's report.

    A report is not older than its ledger, whose lines name their format. In today's reports, a δ that is rounded down
    is an edit: the printed pair of ε and δ does not hold.
    """
    return contents is not None and contents.notes.format < _ROUNDED_UP


def is_as_old(contents: LedgerContents, written: int) -> bool:
    """Return whether a version that wrote reports of an earlier format can have written the report of a ledger.

    Of the sentences of earlier reports only the numbers are compared, so a later ledger has none.

    Args:
        contents: of the ledger.
        written: the format of the report.
    """
    older = contents.notes.format <= _FORMATS[written].ledger
    return older and (written > _NO_FILE or all(run.get("file") is None for run in contents.runs))


def deltas_rounded_up(text: str, due: Any) -> str:
    """Return a text with each δ as it is printed today; earlier versions rounded it to the nearest number.

    Args:
        text: a sentence or a page, of an earlier version or of today.
        due: as it is computed today; only its δ are looked for.
    """
    statement, share = due.statement, due.accounting.parameters
    for delta in (statement.delta, *(row.delta for row in due.accounting.curve)):
        text = _reprinted(text, nearest_delta(delta), format_delta(delta))
    times_units = share.delta * share.num_units
    return text.replace(f"δ = {nearest_delta(times_units)}/N", f"δ = {format_delta(times_units)}/N")


def sentences_rounded_up(value: Any, due: Any) -> Any:
    """Return the values of a report's JSON, and in their sentences each δ as it is printed today."""
    if isinstance(value, Mapping):
        return {key: sentences_rounded_up(one, due) for key, one in value.items()}
    if isinstance(value, list):
        return [sentences_rounded_up(one, due) for one in value]
    return deltas_rounded_up(value, due) if isinstance(value, str) and " " in value else value


def _reprinted(text: str, nearest: str, today: str) -> str:
    return text if nearest == today else re.sub(rf"(?<![\d.]){re.escape(nearest)}(?![\de]|\.\d)", today, text)


def _merged(found: Any, due: Any, keep_words: bool) -> Any:
    if isinstance(found, dict) and isinstance(due, dict):
        return {
            key: _merged(found[key], due[key], keep_words) if key in found else copy.deepcopy(due[key]) for key in due
        }
    if isinstance(found, list) and isinstance(due, list) and len(found) == len(due):
        return [_merged(one, other, keep_words) for one, other in zip(found, due, strict=True)]
    if isinstance(found, str) and isinstance(due, str) and not keep_words and _same_numbers(found, due):
        return due
    return found


def _same_numbers(found: str, due: str) -> bool:
    """Whether both are sentences with the same numbers; names and hashes are no sentences."""
    return " " in found and " " in due and _NUMBER.findall(found) == _NUMBER.findall(due)

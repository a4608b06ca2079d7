"""Reports that earlier versions wrote, in the form of today's: for `dpllm verify`.

Place in the flow: before the comparisons of `dpllm.report.verify`. A report of format 2 lacks keys that were added
since, and some of its sentences had other words. It is held to the keys of its own format. Then its numbers, names and
hashes are compared with those that are computed today; a sentence may have other words, and must have the same numbers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, create_model

from dpllm.privacy.ledger_reader import LEDGER_FORMAT, LedgerContents
from dpllm.privacy.rounding import format_delta, nearest_delta
from dpllm.report.kinds import Count
from dpllm.report.models import (
    Accounting,
    Checkable,
    Definition,
    Part,
    PrivacyReport,
    Run,
    Steps,
    Strength,
)


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


_left_out = Field(description="Rows that the bound on rows per user left out; depends on the private data.")
_Run = _earlier(Run, without=("file",))
_Format2 = _earlier(
    PrivacyReport,
    without=("noted_open_points",),
    format=Literal[2],
    definition=_earlier(Definition, without=("facts",), rows_left_out=(Count | None, _left_out)),
    accounting=_earlier(Accounting, steps=_earlier(Steps, without=("stated",))),
    strength=_earlier(Strength, without=("audit_noted",)),
    checkable=_earlier(Checkable, runs=tuple[_Run, ...]),  # type: ignore[valid-type]
)

EARLIER_FORMATS: dict[int, type[Part]] = {2: _Format2}
"""Formats of reports that are verified beside today's, and their keys."""

_DROPPED_LINES = ("Rows left out by the bound on rows per user",)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")


def format_of(recorded: Mapping[str, Any] | None) -> int | None:
    """Return the format that a JSON file names; None where it names none."""
    number = None if recorded is None else recorded.get("format")
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def in_todays_form(recorded: Mapping[str, Any], due: Mapping[str, Any], keep_words: bool) -> dict[str, Any]:
    """Return an earlier report with the keys of today's.

    Args:
        recorded: of an earlier format.
        due: as it is computed today.
        keep_words: keep sentences with the same numbers in the words of the record, and its checklist, as its pages
            show them. Otherwise they have today's words, so that what differs is no matter of words.

    Returns:
        What was recorded; keys that only today's form has as they are due; none that only the earlier form had.
    """
    form = _merged(recorded, due, keep_words)
    form["format"] = due["format"]
    if not keep_words and isinstance(recorded.get("checklist"), list):
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
    return contents is not None and contents.notes.format < LEDGER_FORMAT


def deltas_rounded_up(text: str, due: PrivacyReport) -> str:
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


def sentences_rounded_up(value: Any, due: PrivacyReport) -> Any:
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

"""Whether what lies in the folder of a run is what the run left behind: `dpllm verify`.

Place in the flow: after everything else, by anyone who holds the folder. Everything is computed anew from the plan and
the ledger and compared with the three forms of the report and with the model card. The hashes of plan and ledger are no
signatures: whoever edits a ledger and redoes its hashes, the report and the page consistently is not found out. What
people noted (who holds the data, utility, ...) and the recorded versions of the software are taken as they stand in
the JSON, and the other forms are held to them.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dpllm
from dpllm.config.versions import installed_version
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.report.checklist import completed
from dpllm.report.earlier_reports import (
    EARLIER_FORMATS,
    deltas_rounded_up,
    due_then,
    form_of,
    format_of,
    in_form,
    in_todays_lines,
    is_as_old,
    rounds_to_nearest,
    sentences_rounded_up,
    then_of,
)
from dpllm.report.html import draw_figures, render_html
from dpllm.report.markdown import render_markdown
from dpllm.report.model_card import (
    CARD_FILE,
    guarantee_section,
    metadata_in,
    own_lines,
    points_listed,
    privacy_metadata,
)
from dpllm.report.models import FORMAT, Part, PrivacyReport, Versions, complaints, listed
from dpllm.report.query_statement import check_answers
from dpllm.report.release_notes import settled_before
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE, ReleaseNotes, notes_of, privacy_report
from dpllm.report.verify_release import foreign_claims, missing_points, release_checks
from dpllm.report.verify_thresholds import thresholds_found

TOLERANCE = 1e-5
"""How far numbers may differ, relatively, if another processor or other versions of the numeric packages computed them.

Processors with other vector instructions differ in the last digit of a logarithm, of which the tail of a composition
made up to 3e-6. A report names no such instructions, so that every report is compared in this way.
"""

_THRESHOLDS = "each step in the ledger carries the clip threshold of a clipping that adapts"

_NUMERIC = ("dp_accounting", "numpy", "scipy", "python")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    """What must hold."""
    ok: bool
    """Whether it does."""
    detail: str
    """What was found; if it doesn't hold, where."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    folder: Path
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "ok": self.ok,
            "folder": str(self.folder),
            "checks": [{"what": check.what, "ok": check.ok, "detail": check.detail} for check in self.checks],
        }


def verification_rows(verification: Verification) -> list[tuple[str, str]]:
    """Return the result as (what, result) rows for people."""
    return [(check.what, f"{'ok' if check.ok else 'FAILED'}: {check.detail}") for check in verification.checks]


def verify(folder: str | Path) -> Verification:
    """Recompute everything from the plan and the ledger, and compare it with what the folder says.

    A file that is missing, or can't be read, is a failed check. Checked are: the plan against its hash; the ledger's
    chain of hashes; that the ledger is of that plan, each step the plan's, and no more of them than planned; that the
    report speaks of as many steps as the ledger (lines cut off at the ledger's end break no hash); the JSON against its
    schema, and key by key against what is recomputed; the Markdown and the HTML against the same, exactly; and, where
    there is one, the numbers, the guarantee and the open points of the model card, which may make no other claim. The
    files of the model, the checkpoints and the audits are held to the lines of the ledger that name them
    (`dpllm.report.verify_release`).

    Args:
        folder: of a run or of a checkpoint.

    Returns:
        All checks, also those that passed. Numbers in the JSON must agree to `TOLERANCE`, pages to the letter.
    """
    folder = Path(folder)
    checks: list[Check] = []
    plan, contents = check_ledger(folder, checks)
    queries = isinstance(plan, QueryPlan)
    recorded = _tried(checks, f"{JSON_FILE} can be read", lambda: _read_json(folder / JSON_FILE), _of_report)
    written = format_of(recorded)
    earlier = written if written in EARLIER_FORMATS else None
    if contents is not None and recorded is not None:
        checks.append(_step_count(contents, recorded, queries))
    if contents is not None:
        checks += [Check(*result) for result in release_checks(folder, contents, queries)]
    if recorded is not None:
        checks.append(_schema_check(recorded))
        if contents is not None and earlier is not None:
            checks.append(_age_check(contents, earlier))
    due: Any = _recomputed(checks, plan, contents, recorded)
    if due is not None and earlier is not None:
        due = due_then(due, earlier)
    nearest = rounds_to_nearest(contents)
    if due is not None and recorded is not None:
        printed, right = sentences_rounded_up(recorded, due) if nearest else recorded, _plain(due)
        found = printed if earlier is None else in_form(printed, right, keep_words=False)
        checks.append(_json_check(found, sentences_rounded_up(right, due) if nearest else right, recorded))
        if checks[-1].ok:  # so that rounding of numbers that other versions computed can't matter
            with contextlib.suppress(ValueError):  # a number just out of its range, which the schema's check named
                if earlier is None:
                    due = PrivacyReport.read(printed)
                else:
                    due = then_of(in_form(printed, right, keep_words=True), earlier)
    pages = None if due is None else _Pages(due, form_of(earlier), nearest)
    for name, compare in ((MARKDOWN_FILE, _markdown_check), (HTML_FILE, _html_check)):
        checks.append(_file_check(folder / name, pages, compare))
    if (folder / CARD_FILE).is_file():
        checks.append(_file_check(folder / CARD_FILE, pages, _card_check))
    return Verification(folder, tuple(checks))


def check_ledger(folder: Path, checks: list[Check]) -> tuple[PrivacyPlan | QueryPlan | None, LedgerContents | None]:
    """Read plan and ledger, and compare them; the checks are added to a list.

    Args:
        folder: of a run or of a checkpoint.
        checks: of the folder so far.

    Returns:
        Plan and ledger; None for one that cannot be read.
    """
    plan = _tried(checks, "the plan is there and fits its hash", lambda: load_plan(folder / PLAN_FILE), _of_plan)
    contents = _tried(
        checks, "the ledger is there and its lines are chained", lambda: read_ledger(folder / LEDGER_FILE), _of_ledger
    )
    if plan is not None and contents is not None:
        checks += _ledger_checks(plan, contents)
    return plan, contents


@dataclass(frozen=True)
class _Pages:
    """The pages that are due, in the form of the version that wrote those in the folder."""

    report: Any
    """Today's report, or one in the format of the pages."""
    form: str
    """The folder of the templates of an earlier version that wrote the folder's report; empty: today's."""
    nearest: bool
    """Whether that version may have rounded δ to nearest."""

    def comparable(self, text: str) -> str:
        """Return a file's text, or the text due in its place, in the one form in which both are compared."""
        lines = in_todays_lines(text) if self.form else text
        return deltas_rounded_up(lines, self.report) if self.nearest else lines

    def markdown(self) -> str:
        """Return the Markdown page."""
        return render_markdown(self.report, self.form)

    def html(self) -> str:
        """Return the page with its pictures."""
        return render_html(self.report, draw_figures(self.report), self.form)


def _plain(report: Any) -> dict[str, Any]:
    return dict(report.model_dump(mode="json", by_alias=True))


def _tried(checks: list[Check], what: str, load: Callable[[], Any], found: Callable[[Any], str]) -> Any:
    """Return what was loaded, or None, and note which."""
    try:
        value = load()
    except (ValueError, OSError, KeyError, TypeError) as error:
        checks.append(Check(what, False, _in_words(error)))
        return None
    checks.append(Check(what, True, found(value)))
    return value


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__} at {error}" if isinstance(error, KeyError) else " ".join(str(error).split())


def _of_plan(plan: PrivacyPlan | QueryPlan) -> str:
    return f"SHA-256 {plan.hash[:12]}"


def _of_ledger(contents: LedgerContents) -> str:
    counted = "answers" if contents.notes.answers else "steps"
    return f"{contents.num_steps} {counted}, {len(contents.runs)} start(s), SHA-256 {contents.sha256[:12]}"


def _of_report(report: Mapping[str, Any]) -> str:
    return f"format {report.get('format')}"


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{path} holds {constant}, which is no JSON")

    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no report")
    return value


def _ledger_checks(plan: PrivacyPlan | QueryPlan, contents: LedgerContents) -> list[Check]:
    others = [run["plan_hash"][:12] for run in contents.runs if run["plan_hash"] != plan.hash]
    own = Check(
        "the ledger is of this plan",
        not others,
        f"it was written under {', '.join(others)}, and the plan is {plan.hash[:12]}"
        if others
        else "each run in it names the plan's hash",
    )
    if isinstance(plan, QueryPlan):
        wrong = check_answers(plan, contents)
        words = wrong or f"{contents.num_steps:,} of {plan.num_steps:,} planned answers, with the plan's events"
        return [
            own,
            Check("each answer in the ledger is the plan's, and there are no more than planned", not wrong, words),
        ]
    foreign = sum(count for step, count in contents.history if step != plan.event)
    taken, adapted = contents.num_steps, thresholds_found(plan, contents)
    return [
        *([] if adapted is None else [Check(_THRESHOLDS, *adapted)]),
        own,
        Check(
            "each step in the ledger is the plan's",
            not foreign,
            f"{foreign} steps have other numbers than the plan" if foreign else "same q, B_max, σ and C",
        ),
        Check(
            "no more steps than planned",
            taken <= plan.num_steps,
            f"{taken} of {plan.num_steps} planned steps" + ("" if taken <= plan.num_steps else ": too many"),
        ),
    ]


def _step_count(contents: LedgerContents, recorded: Mapping[str, Any], queries: bool) -> Check:
    steps = "answers" if queries else "steps"
    what = f"the ledger holds the {steps} that the report counts"
    try:
        counted = recorded["accounting"]["parameters"]["num_steps_charged"]
    except (KeyError, TypeError):
        return Check(what, False, f"the report counts no {steps}")
    if counted == contents.num_steps:
        return Check(what, True, f"{counted} {steps}")
    missing = isinstance(counted, int) and counted > contents.num_steps
    cause = (
        "lines were cut off its end, or the report is of an earlier state" if missing else "the run went on after it"
    )
    return Check(what, False, f"the report counts {counted} {steps}, the ledger {contents.num_steps}: {cause}")


def _schema_check(recorded: Mapping[str, Any]) -> Check:
    what = f"{JSON_FILE} fits the published schema"
    known: dict[int, type[Part]] = {FORMAT: PrivacyReport, **EARLIER_FORMATS}
    written = format_of(recorded)
    if written is None or written not in known:
        return Check(
            what,
            False,
            f"it has format {_short(recorded.get('format'))}, and this version of dpllm reads "
            f"{', '.join(map(str, sorted(known)))}: verify it with the version that wrote it",
        )
    lines = complaints(known[written], recorded)
    found = "every key known, none missing"
    if written in EARLIER_FORMATS:
        found += f" in format {written}, of an earlier version: its sentences are compared by their numbers"
    return Check(what, not lines, listed(lines) if lines else found)


def _age_check(contents: LedgerContents, written: int) -> Check:
    """Whether an earlier version can have written the report: of its sentences only the numbers are compared."""
    older = is_as_old(contents, written)
    return Check(
        f"{JSON_FILE} is as old as the ledger",
        older,
        "both are of an earlier version"
        if older
        else "it has the format of an earlier version, and the ledger is of a later one: `dpllm report FOLDER` makes "
        "the report again",
    )


def _recomputed(
    checks: list[Check],
    plan: PrivacyPlan | QueryPlan | None,
    contents: LedgerContents | None,
    recorded: dict[str, Any] | None,
) -> PrivacyReport | None:
    """Return the report as it should be: what people noted and the versions are taken from what was recorded."""
    if plan is None or contents is None:
        return None
    what = "the report can be computed anew"
    notes, settled = _notes(recorded)
    try:
        report = _with_its_software(privacy_report(plan, contents, notes, settled_before=settled), recorded or {})
    except ValueError as error:
        checks.append(Check(what, False, _in_words(error)))
        return None
    epsilon = report.statement.epsilon
    checks.append(Check(what, True, f"ε = {format_epsilon(epsilon)}"))
    return report


def _notes(recorded: Mapping[str, Any] | None) -> tuple[ReleaseNotes, Mapping[str, str]]:
    try:
        return notes_of(recorded or {}), settled_before(recorded or {})
    except (KeyError, TypeError, AttributeError, ValueError):
        return ReleaseNotes(), {}  # what is missing is found when the keys are compared


def _with_its_software(report: PrivacyReport, recorded: Mapping[str, Any]) -> PrivacyReport:
    """Return the report with the software that the record names, where it names it as reports do."""
    accounting, checkable = _part(recorded, "accounting"), _part(recorded, "checkable")
    tool, machine = accounting.get("tool_version"), checkable.get("machine")
    versions = checkable.get("versions")
    if isinstance(tool, str):
        report = report.with_part("accounting", tool_version=tool)
    if isinstance(machine, str):
        report = report.with_part("checkable", machine=machine)
    if isinstance(versions, dict) and not complaints(Versions, versions):
        report = report.with_part("checkable", versions=Versions.model_validate(versions))
    return completed(report)


def _part(recorded: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = recorded.get(name)
    return part if isinstance(part, dict) else {}


def _json_check(found: Mapping[str, Any], due: Mapping[str, Any], recorded: Mapping[str, Any]) -> Check:
    what = f"{JSON_FILE} says what plan and ledger say"
    changed = _other_versions(recorded)
    lines = [_difference(path, one, right) for path, one, right in _differences(found, due, "", TOLERANCE)]
    if lines:
        return Check(what, False, f"{listed(lines)}{_other_dpllm(recorded)}")
    why = f", since other versions computed it ({', '.join(changed)})" if changed else ""
    return Check(what, True, f"every key agrees, numbers to {TOLERANCE:g}{why}")


def _other_versions(recorded: Mapping[str, Any]) -> list[str]:
    """Return the recorded versions of numeric software that are not the installed ones."""
    checkable = recorded.get("checkable")
    versions = checkable.get("versions") if isinstance(checkable, dict) else None
    if not isinstance(checkable, dict) or not isinstance(versions, dict):
        return []
    now = {name: _installed(name) for name in _NUMERIC}
    changed = [f"{name} {versions.get(name)}" for name in _NUMERIC if versions.get(name) != now[name]]
    if checkable.get("machine") != platform.machine():
        changed.append(f"a {checkable.get('machine')} processor")
    return changed


def _installed(name: str) -> str | None:
    return platform.python_version() if name == "python" else installed_version(name)


def _other_dpllm(recorded: Mapping[str, Any]) -> str:
    if format_of(recorded) in EARLIER_FORMATS:
        return (
            ". An earlier version wrote it, which stated the ε of the steps taken where a run had stopped early: "
            "`dpllm report FOLDER` makes the report again"
        )
    try:
        version = recorded["checkable"]["versions"]["dpllm"]
    except (KeyError, TypeError):
        return ""
    if version == dpllm.__version__:
        return ""
    return f". It was written by dpllm {version} and this is {dpllm.__version__}: verify it with that version"


_ABSENT = object()


def _differences(found: Any, due: Any, path: str, tolerance: float) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, what stands there, what should) for every leaf that differs."""
    if isinstance(found, dict) and isinstance(due, dict):
        for key in [*due, *(key for key in found if key not in due)]:
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(found.get(key, _ABSENT), due.get(key, _ABSENT), below, tolerance)
    elif isinstance(found, list) and isinstance(due, list) and len(found) == len(due):
        for number, (one, other) in enumerate(zip(found, due, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]", tolerance)
    elif not _equal(found, due, tolerance):
        yield path, found, due


def _equal(found: Any, due: Any, tolerance: float) -> bool:
    if isinstance(found, bool) or isinstance(due, bool):
        return found is due
    if isinstance(found, float) and isinstance(due, float):
        return math.isclose(found, due, rel_tol=tolerance, abs_tol=1e-15)
    return type(found) is type(due) and bool(found == due)


def _difference(path: str, found: Any, due: Any) -> str:
    if found is _ABSENT:
        return f"{path} is missing"
    if due is _ABSENT:
        return f"{path} does not belong there"
    return f"{path} is {_short(found)} and should be {_short(due)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _file_check(path: Path, pages: _Pages | None, compare: Callable[[Path, str, _Pages], tuple[bool, str]]) -> Check:
    what = f"{path.name} says the same"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return Check(what, False, f"{path} cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        return Check(what, False, f"{path} is no UTF-8 text")
    if pages is None:
        return Check(what, False, "there is nothing to compare it with, since plan or ledger cannot be used")
    try:
        return Check(what, *compare(path, pages.comparable(text), pages))
    except ValueError as error:
        return Check(what, False, _in_words(error))


def _markdown_check(_path: Path, text: str, pages: _Pages) -> tuple[bool, str]:
    return _same_text(text, pages.comparable(pages.markdown()), "exactly")


def _html_check(_path: Path, text: str, pages: _Pages) -> tuple[bool, str]:
    """Compare the pictures too, where the program that drew them is the one installed."""
    drawn, here = pages.report.checkable.versions.matplotlib, installed_version("matplotlib")
    page = pages.comparable(pages.html())
    if drawn == here:
        return _same_text(text, page, "exactly, with its pictures")
    without = re.compile(r"<svg.*?</svg>", flags=re.DOTALL)
    how = f"without its pictures, which matplotlib {drawn} drew and {here} may draw otherwise"
    return _same_text(without.sub("", text), without.sub("", page), how)


def _same_text(found: str, due: str, how: str) -> tuple[bool, str]:
    if found == due:
        return True, how
    pairs = zip([*found.split("\n"), "nothing"], [*due.split("\n"), "nothing"], strict=False)
    number, (one, other) = next((at, pair) for at, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return False, f"line {number} is {_short(one)} and should be {_short(other)}"


def _card_check(path: Path, text: str, pages: _Pages) -> tuple[bool, str]:
    due, found = pages.report, metadata_in(path).get("differential_privacy", _ABSENT)
    blocks = [block for block in guarantee_section(due) if block not in text]
    if found is _ABSENT:
        claims, words = foreign_claims(text, ())
        if claims:
            return False, f"its block differential_privacy is missing, and it claims: {listed([*map(_short, claims)])}"
        return True, f"it claims no ε{_not_checked(words)}"
    right = json.loads(json.dumps(privacy_metadata(due)))
    lines = [_difference(*found_) for found_ in _differences(found, right, "differential_privacy", 0.0)]
    lines += [f"its text lacks {_short(block)}" for block in blocks]
    lines += [f"its open points lack {_short(point)}" for point in missing_points(text, points_listed(due))]
    foreign, words = foreign_claims(text, own_lines(due, metadata_in(path).get("base_model")))
    lines += [f"another claim: {_short(line)}" for line in foreign]
    if lines:
        return False, listed(lines)
    return True, f"its numbers, its guarantee and its open points are the report's{_not_checked(words)}"


def _not_checked(words: list[str]) -> str:
    return f"; not checked, since people wrote it: {listed([_short(line) for line in words])}" if words else ""

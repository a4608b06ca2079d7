"""Check that a run's folder contains what the run wrote: `dpllm verify`.

Anyone who has the folder can run it. It recomputes the numbers from the plan and the ledger and compares them with the
report's JSON. It compares the report's files and the model card with their hashes in the ledger; in a card that people
edited, it compares the parts that dpllm wrote. Hashes are not signatures: a ledger that was edited with all hashes
recomputed consistently is not detected. People's notes (who holds the data, utility, …) and the recorded software
versions are taken from the JSON.

`dpllm generate` states the guarantee of a model's folder before it uses the model. It checks only the plan, the ledger
and the model's files (`standing_of`), which is faster.

The guarantee is about weights: a correct report next to different weights says nothing about them. So the weights,
checkpoints and audits in the folder must also be those that its ledger names (`release_checks`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE
from dpllm.config.versions import code_version, has_format, installed_version, other_format, version_words
from dpllm.mechanism.parts import AdaptiveClipping
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.private_folder import PRIVATE_FOLDER
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.privacy.rounding import format_epsilon
from dpllm.privacy.run_folder import (
    check_checkpoint,
    checkpoints_in,
    public_start_differences,
    released_files,
    steps_of_weights,
    unnamed_in_checkpoint,
    unnamed_weights,
)
from dpllm.privacy.stated import stated_guarantee
from dpllm.registry import MethodError
from dpllm.report.checklist import completed
from dpllm.report.model_card import (
    BLOCK,
    CARD_FILE,
    guarantee_section,
    metadata_in,
    own_lines,
    points_listed,
    privacy_metadata,
)
from dpllm.report.models import FORMAT, PrivacyReport, Versions, complaints, listed
from dpllm.report.pages import CHECK_FILE
from dpllm.report.private_strings import check_strings
from dpllm.report.release_notes import written_by
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE, ReleaseNotes, notes_of, privacy_report

_LISTED = 6
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)  # of HTML, which nobody sees
_CLAIM = re.compile(r"(?:ε|\bepsilon)\s*(?:=|:|≤|<=|of|is)\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_BY_NAME = (RECIPE_FILE, "training.png", "training_args.bin")
_KNOWN = (*checkpoints.DOCUMENTS, PLAN_FILE, LEDGER_FILE, *_BY_NAME)
_Result = tuple[str, bool | None, str]


def release_checks(folder: Path, contents: LedgerContents, queries: bool = False) -> Iterator[_Result]:
    """Yield (what must hold, whether it does, the finding) for the files next to a ledger; None: not checked.

    Args:
        folder: folder of a run, of a checkpoint or of a saved model.
        contents: the contents of its ledger.
        queries: whether it is a query run's folder, whose files take no training steps.
    """
    files = "the released files" if queries else "the model's files"
    what = f"{files} are those that were saved"
    yield _weights(what, folder, contents)
    if contents.notes.public_start is not None:
        yield _public_start(folder, contents)
    if not queries:
        yield _steps(folder, contents)
    yield _other_files(folder, contents)
    found = list(checkpoints_in(folder))
    if found:
        yield _checkpoints(folder / LEDGER_FILE, found)
    if contents.notes.audits:
        yield _audits(folder, contents)


def _weights(what: str, folder: Path, contents: LedgerContents) -> _Result:
    if (folder / checkpoints.MANIFEST_FILE).is_file():
        try:
            checkpoints.verify(folder)
        except checkpoints.CheckpointError as error:
            return what, False, str(error)
        added = unnamed_in_checkpoint(folder)
        if added:
            return what, False, _some([f"{name} may hold weights, and the manifest does not name it" for name in added])
        return what, True, "as the checkpoint's manifest names them"
    named = released_files(contents, folder)
    if named is None:
        return _unnamed(what, folder, contents)
    wrong = [f"{name} {difference}" for name, difference in checkpoints.differing(folder, named).items()]
    weights, _ = unnamed_weights(folder, named)
    wrong += [f"{name} may hold weights, and the ledger does not name it" for name in weights]
    return what, not wrong, _some(wrong) if wrong else f"{len(named)} files as the ledger names them"


def _other_files(folder: Path, contents: LedgerContents) -> _Result:
    """Return the result for files that dpllm did not write and the ledger does not name: their contents are unknown."""
    what = "no other file lies in the folder"
    named = {*_KNOWN, *(released_files(contents, folder) or {}), *(audit["file"] for audit in contents.notes.audits)}
    named |= {f"{PRETRAINED_FOLDER}/{name}" for name in contents.notes.public_start or {}}
    if (folder / checkpoints.MANIFEST_FILE).is_file():
        named |= {checkpoints.MANIFEST_FILE, *checkpoints.named_files(folder)}
    whole = {path.name for path in checkpoints_in(folder)}
    unknown = {_shown(name) for name in _names(folder) if name not in named and name.split("/")[0] not in whole}
    if unknown:
        return (
            what,
            None,
            f"neither the ledger nor ε covers {_some(sorted(unknown))}: inspect these files before a release",
        )
    kept = f"{PRIVATE_FOLDER}/, which must not be released, and {', '.join(_BY_NAME)}, which are known only by name"
    return what, True, f"except for {kept}"


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of all files and links below a folder, except those that are never released."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (path.is_file() or path.is_symlink()) and name.split("/")[0] != PRIVATE_FOLDER:
            yield name


def _shown(name: str) -> str:
    """Return a file's name for a list; for a file in a hidden folder, the folder's name."""
    top = name.split("/")[0]
    return f"{top}/" if top.startswith(".") and top != name else name


def _public_start(folder: Path, contents: LedgerContents) -> _Result:
    what = "the public weights are those that the run began with"
    wrong = public_start_differences(contents, folder)
    if wrong is None:
        return what, None, f"{PRETRAINED_FOLDER}/ is not in this folder"
    return what, not wrong, _some(wrong) if wrong else f"{len(contents.notes.public_start or ())} files"


def _unnamed(what: str, folder: Path, contents: LedgerContents) -> _Result:
    """Return the result if the ledger names no files: any weights next to it are then of unknown origin."""
    weights, _ = unnamed_weights(folder, {})
    if not weights:
        saved = ", ".join(dict.fromkeys(release["folder"] for release in contents.notes.released))
        return what, None, "there are none here; the ledger names " + (f"those in {saved}" if saved else "none")
    listed = _some([f"{name} may hold weights, and the ledger does not name it" for name in weights])
    return (
        what,
        False,
        f"{listed}. Save the model with DPTrainer.save_model, or in the run's folder before PrivateRun.finish",
    )


def _steps(folder: Path, contents: LedgerContents) -> _Result:
    what = "the weights have taken no step that the ledger does not charge"
    try:
        taken = steps_of_weights(folder)
    except ValueError as error:
        return what, False, str(error)
    if taken is None:
        return what, None, "the folder does not record how many they have taken"
    words = f"{taken} taken, {contents.num_steps} charged"
    return what, taken <= contents.num_steps, words if taken <= contents.num_steps else f"{words}: lines were cut off"


def _checkpoints(ledger: Path, found: Sequence[Path]) -> _Result:
    what = "the checkpoints in the folder are of this ledger"
    wrong = []
    for path in found:
        try:
            check_checkpoint(ledger, path)
            checkpoints.verify(path)
            added = unnamed_in_checkpoint(path)
        except ValueError as error:
            wrong.append(" ".join(str(error).split()))
            continue
        wrong += [f"{path.name}/{name} may hold weights, and the manifest does not name it" for name in added]
    return what, not wrong, _some(wrong) if wrong else ", ".join(path.name for path in found)


def _audits(folder: Path, contents: LedgerContents) -> _Result:
    what = "the results of the audit are those that the ledger names"
    last = {audit["file"]: audit for audit in contents.notes.audits}
    wrong = []
    for name, audit in last.items():
        path = folder / name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != audit["sha256"]:
            wrong.append(f"{name} was edited; the ledger says: {audit['summary']}")
    return what, not wrong, _some(wrong) if wrong else "; ".join(audit["summary"] for audit in last.values())


def other_claims(text: str, own: Collection[str]) -> list[str]:
    """Return each ε that a model card states and dpllm's own lines do not.

    >>> other_claims("ε = 2.0 and epsilon: 0.5", ["epsilon: 2"])
    ['epsilon: 0.5']
    """
    stated = {float(found[1]) for one in own for found in _CLAIM.finditer(one)}
    return [found[0] for found in _CLAIM.finditer(text) if float(found[1]) not in stated]


def without_comments(text: str) -> str:
    """Return the text of a card that readers see."""
    return _COMMENT.sub("", text)


def missing_points(text: str, points: Sequence[str]) -> list[str]:
    """Return the report's open points that the card does not list on lines of their own.

    Args:
        text: the card's text, `without_comments`.
        points: the report's open points.
    """
    listed = {line.strip() for line in text.split("\n")}
    return [point for point in points if f"- {point}" not in listed]


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "; ".join(lines[:_LISTED]) + more


TOLERANCE = 1e-5
"""Largest relative difference between numbers from different processors or versions of the numeric packages.

Processors with different vector instructions differ in the last digit of a logarithm, which the tail of a composition
amplified to at most 3e-6. A report does not name these instructions, so every report is compared in this way.
"""

_THRESHOLDS = "each step in the ledger has the clip threshold that the plan's adaptive clipping allows"

_AGAIN = "`dpllm report RUN --write` writes it again"
_NUMERIC = ("dp_accounting", "numpy", "scipy", "python")


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    what: str
    """What must hold."""
    passed: bool | None
    """Whether it holds; None: it was not checked."""
    detail: str
    """The finding; for a failed check, where; for one that was not checked, why."""
    has_remedy: bool = False
    """Whether the detail of a failed check says what to do."""

    @property
    def ok(self) -> bool:
        """Whether the check did not fail."""
        return self.passed is not False

    @property
    def result(self) -> str:
        """The result in words."""
        return {True: "ok", False: "failed", None: "not checked"}[self.passed]


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    folder: Path
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "ok": self.ok,
            "folder": str(self.folder),
            "checks": [{"what": check.what, "result": check.result, "detail": check.detail} for check in self.checks],
        }


def verification_rows(verification: Verification) -> list[tuple[str, str]]:
    """Return the result as (what, result) rows for people."""
    shown = {True: "ok", False: "FAILED", None: "not checked"}
    return [(check.what, f"{shown[check.passed]}: {check.detail}") for check in verification.checks]


def verify(folder: str | Path) -> Verification:
    """Compare a folder with the numbers that follow from its plan and ledger, and with the hashes in the ledger.

    A missing or unreadable file is a failed check. The checks are:

    - the plan matches its hash, and the ledger's lines form a chain of hashes;
    - the ledger belongs to that plan, each step is a planned one, and there are no more steps than planned;
    - the report counts as many steps as the ledger (no hash reveals lines that were cut off at the ledger's end);
    - the JSON fits its schema and, key by key, the recomputed values;
    - the report's files match the hashes in the ledger;
    - the model card, if there is one, has the report's guarantee and open points, and states no different ε;
    - the model's files, the checkpoints and the audits match the lines of the ledger that name them
      (`release_checks`);
    - on the machine of the training, the texts to publish contain no strings of the private data
      (`dpllm.report.private_strings`).

    If a different version of dpllm wrote the report, its sentences are only compared with its hash.

    Returns:
        All checks, including those that passed. Numbers in the JSON must agree within `TOLERANCE`.

    Raises:
        MethodError: the plan uses a method that is not installed.
    """
    folder = Path(folder)
    checks: list[Check] = []
    plan, contents = check_ledger(folder, checks)
    queries = isinstance(plan, QueryPlan)
    recorded = _tried(checks, f"{JSON_FILE} can be read", lambda: _read_json(folder / JSON_FILE), _of_report)
    if contents is not None:
        if recorded is not None:
            checks += [_version_check(contents, recorded), _step_count(contents, recorded, queries)]
        checks += [Check(*result) for result in release_checks(folder, contents, queries)]
    if not queries and (compared := check_strings(folder)) is not None:
        checks.append(Check(*compared, has_remedy=True))
    if recorded is not None:
        checks.append(_schema_check(recorded))
    due = _recomputed(checks, plan, contents, recorded)
    same_code = recorded is not None and _is_of_this_code(recorded)
    if due is not None and recorded is not None:
        checks.append(_json_check(recorded, _plain(due), same_code))
        if checks[-1].ok:  # so that the rounding of numbers from other versions cannot matter
            with contextlib.suppress(ValueError):  # a number just out of range, which the schema check reported
                due = PrivacyReport.read(recorded)
    checks += [_hash_check(folder / name, contents) for name in (JSON_FILE, MARKDOWN_FILE, HTML_FILE)]
    checks.append(_verifier_check(folder / CHECK_FILE, contents))
    if not (folder / CARD_FILE).is_file() and contents is not None and CARD_FILE in contents.notes.pages:
        checks.append(Check(f"{CARD_FILE} has the guarantee of the report", None, "dpllm wrote one, but it is missing"))
    if (folder / CARD_FILE).is_file():
        checks.append(_card_check(folder / CARD_FILE, due, contents, same_code))
    return Verification(folder, tuple(checks))


def check_ledger(folder: Path, checks: list[Check]) -> tuple[PrivacyPlan | QueryPlan | None, LedgerContents | None]:
    """Read plan and ledger, compare them, and append the checks to a list.

    Args:
        folder: folder of a run or of a checkpoint.
        checks: the folder's checks so far.

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


def _plain(report: Any) -> dict[str, Any]:
    return dict(report.model_dump(mode="json", by_alias=True))


def _tried(checks: list[Check], what: str, load: Callable[[], Any], found: Callable[[Any], str]) -> Any:
    """Return the loaded value, or None if loading failed, and append the check."""
    try:
        value = load()
    except MethodError:
        raise
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
        raise ValueError(f"{path} holds {constant}, which is not valid JSON")

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
        f"it was written under {', '.join(others)}, but the plan is {plan.hash[:12]}"
        if others
        else "each run in it names the plan's hash",
    )
    if isinstance(plan, QueryPlan):
        wrong = plan.unplanned(contents)
        words = wrong or f"{contents.num_steps:,} of {plan.num_steps:,} planned answers, with the plan's events"
        return [
            own,
            Check("each answer in the ledger is the plan's, and there are no more than planned", not wrong, words),
        ]
    wrong = plan.unplanned(contents)
    taken, adapted = contents.num_steps, thresholds_found(plan, contents)
    return [
        *([] if adapted is None else [Check(_THRESHOLDS, *adapted)]),
        own,
        Check(
            "each step in the ledger is the plan's",
            wrong is None,
            wrong or "same q, B_max, σ and C",
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
        return Check(what, False, f"the report has no count of {steps}")
    if counted == contents.num_steps:
        return Check(what, True, f"{counted} {steps}")
    missing = isinstance(counted, int) and counted > contents.num_steps
    cause = "lines were cut off at its end, or the report is older" if missing else "the run continued after the report"
    return Check(what, False, f"the report counts {counted} {steps}, the ledger {contents.num_steps}: {cause}")


def _schema_check(recorded: Mapping[str, Any]) -> Check:
    what = f"{JSON_FILE} fits the published schema"
    if not has_format(recorded.get("format"), FORMAT):
        words = other_format("privacy report", recorded.get("format"), FORMAT, written_by(recorded))
        return Check(what, False, f"it {words}")
    lines = complaints(PrivacyReport, recorded)
    if lines and not _is_of_this_code(recorded):
        words = f"{written_by(recorded)} wrote it with different keys ({listed(lines, 3)})"
        return Check(what, None, f"{words}; {_AGAIN} with the keys of this version")
    return Check(what, not lines, listed(lines) if lines else "no key is unknown or missing")


def _version_check(contents: LedgerContents, recorded: Mapping[str, Any]) -> Check:
    """Check whether this version of dpllm wrote report and ledger; different code may compute different values."""
    what, here = "report and ledger were written by this version of dpllm", version_words(*code_version())
    report = written_by(recorded)
    runs = dict.fromkeys(version_words(run["version"], run["commit"], run["changed"]) for run in contents.runs)
    if report == here and list(runs) == [here] and code_version().commit and not code_version().changed:
        return Check(what, True, here)
    if report == here and list(runs) == [here]:
        return Check(what, None, f"no commit holds the code of {here}, so it cannot be compared")
    return Check(
        what,
        None,
        f"written by a different version: report {report or 'unknown'}; ledger {', '.join(runs)}; you run {here}, "
        "which recomputed the numbers",
    )


def _is_of_this_code(recorded: Mapping[str, Any]) -> bool:
    """Return whether a report's sentences must be those of this version; also true if it names no version."""
    return written_by(recorded) in (None, version_words(*code_version()))


def _recomputed(
    checks: list[Check],
    plan: PrivacyPlan | QueryPlan | None,
    contents: LedgerContents | None,
    recorded: dict[str, Any] | None,
) -> PrivacyReport | None:
    """Return the report as it should be, with the recorded notes and versions."""
    if plan is None or contents is None:
        return None
    what = "the report can be computed again"
    try:
        report = _with_its_software(privacy_report(plan, contents, _notes(recorded)), recorded or {})
    except ValueError as error:
        checks.append(Check(what, False, _in_words(error)))
        return None
    epsilon = report.statement.epsilon
    checks.append(Check(what, True, f"ε = {format_epsilon(epsilon)}"))
    return report


def _notes(recorded: Mapping[str, Any] | None) -> ReleaseNotes:
    try:
        return notes_of(recorded or {})
    except (KeyError, TypeError, AttributeError, ValueError):
        return ReleaseNotes()  # the comparison of the keys finds what is missing


def _with_its_software(report: PrivacyReport, recorded: Mapping[str, Any]) -> PrivacyReport:
    """Return the report with the recorded software versions, if they have the form that reports use."""
    accounting, checkable = _part(recorded, "accounting"), _part(recorded, "checkable")
    tool, machine = accounting.get("tool_version"), checkable.get("machine")
    versions = checkable.get("versions")
    if isinstance(tool, str):
        report = report.with_part("accounting", tool_version=tool)
    if isinstance(machine, str):
        report = report.with_part("checkable", machine=machine)
    if isinstance(checkable.get("commit"), str | None) and isinstance(checkable.get("changed"), bool):
        report = report.with_part("checkable", commit=checkable.get("commit"), changed=checkable["changed"])
    if isinstance(versions, dict) and not complaints(Versions, versions):
        report = report.with_part("checkable", versions=Versions.model_validate(versions))
    return completed(report)


def _part(recorded: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = recorded.get(name)
    return part if isinstance(part, dict) else {}


_NUMBERS = ("format", "statement", "accounting", "strength", "curves", "checkable")
"""Parts of the JSON whose numbers are compared even if a different version wrote the report."""


def _json_check(found: Mapping[str, Any], due: Mapping[str, Any], same_code: bool) -> Check:
    """Compare the JSON with the recomputed values; if a different version wrote it, only its numbers and names."""
    what = f"{JSON_FILE} says what plan and ledger say"
    changed = _other_versions(found)
    if not same_code:
        found, due = ({name: part[name] for name in _NUMBERS if name in part} for part in (found, due))
    lines = [
        _difference(path, one, right)
        for path, one, right in _differences(found, due, "", TOLERANCE)
        if same_code or not ((_is_words(one) and _is_words(right)) or _has_other_keys(path, one, right))
    ]
    if lines:
        return Check(what, False, listed(lines))
    why = f", since different versions computed it ({', '.join(changed)})" if changed else ""
    which = "every key agrees, numbers" if same_code else "its numbers agree"
    return Check(what, True, f"{which} within {TOLERANCE:g}{why}")


def _has_other_keys(path: str, found: Any, due: Any) -> bool:
    """Return whether a different version has a key or list that this one lacks; every version has the statement."""
    both_lists = isinstance(found, list) and isinstance(due, list)
    return not path.startswith("statement") and (found is _ABSENT or due is _ABSENT or both_lists)


def _is_words(value: Any) -> bool:
    """Return whether a value consists of sentences, which a different version may word differently."""
    if isinstance(value, list):
        return all(map(_is_words, value))
    return value is _ABSENT or value is None or (isinstance(value, str) and " " in value)


def _other_versions(recorded: Mapping[str, Any]) -> list[str]:
    """Return the recorded versions of numeric packages that differ from the installed ones."""
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


_ABSENT = object()


def _differences(found: Any, due: Any, path: str, tolerance: float) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, actual value, expected value) for every leaf that differs."""
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text") from error


def _hash_check(path: Path, contents: LedgerContents | None) -> Check:
    """Compare a file of the report with its last hash in the ledger."""
    what = f"{path.name} is as dpllm wrote it"
    try:
        content = path.read_bytes()
    except OSError as error:
        return Check(what, False, f"{path} cannot be read ({error.strerror}); {_AGAIN}")
    if contents is None:
        return Check(what, False, "it cannot be compared, since the ledger cannot be used")
    written = contents.notes.pages.get(path.name)
    if written is None:
        return Check(what, False, "the ledger does not name it: dpllm did not write it, or ledger lines were cut off")
    digest = hashlib.sha256(content).hexdigest()
    if digest != written:
        hashes = f"its SHA-256 is {digest[:12]}, but the ledger names {written[:12]}"
        return Check(what, False, f"{hashes}: it was edited, or ledger lines were cut off. Restore both files")
    return Check(what, True, f"SHA-256 {digest[:12]}")


def _verifier_check(path: Path, contents: LedgerContents | None) -> Check:
    """Compare the verifier next to the report with its hash in the ledger, and say how to run it."""
    if contents is not None and path.name not in contents.notes.pages and not path.exists():
        why = (
            "no report was written"
            if JSON_FILE not in contents.notes.pages
            else "the version that wrote the report did not have one"
        )
        return Check(f"{path.name} is as dpllm wrote it", None, f"{why}; {_AGAIN}")
    found = _hash_check(path, contents)
    how = f"`python {path.name}` in the folder recomputes ε without dpllm, or says why it cannot"
    return replace(found, detail=f"{found.detail}; {how}") if found.passed else found


def _card_check(path: Path, due: PrivacyReport | None, contents: LedgerContents | None, same_code: bool) -> Check:
    """Compare dpllm's parts of the card with the report; people may have edited the rest."""
    what = f"{path.name} has the guarantee and the open points of the report"
    try:
        text, metadata = _read_text(path), metadata_in(path)
    except ValueError as error:
        return Check(what, False, _in_words(error))
    if due is None or contents is None:
        return Check(what, False, "it cannot be compared, since plan or ledger cannot be used")
    right = json.loads(json.dumps(privacy_metadata(due)))
    found, written = metadata.get(BLOCK, _ABSENT), contents.notes.pages.get(path.name)
    own = [*own_lines(due, metadata.get("base_model")), *(f"epsilon: {value}" for value in _epsilons(right))]
    claims = [f"a different claim: {claim}" for claim in other_claims(text, own)]
    if found is _ABSENT and written is None and not claims:
        return Check(what, None, "dpllm wrote no card here")
    if found is _ABSENT:
        return Check(what, False, listed([f"its block {BLOCK} is missing", *claims]))
    lines = [_difference(*one) for one in _differences(found, right, BLOCK, 0.0)]
    same = hashlib.sha256(text.encode("utf-8")).hexdigest() == written
    seen = without_comments(text)
    if same_code:
        lacks = [block for block in guarantee_section(due) if block not in seen]
        lines += [f"its text lacks {_short(block)}: restore the card that dpllm wrote" for block in lacks]
    if same_code or not same:
        points = points_listed(due) if same_code else due.open_points
        lines += [f"its open points lack {_short(point)}" for point in missing_points(seen, points)]
    lines += [] if same else claims
    if lines:
        return Check(what, False, listed(lines))
    if not same_code and not same:
        return Check(what, None, "a different version wrote it and people edited it: its sentences were not compared")
    return Check(what, True, "as dpllm wrote it" if same else "people edited the rest, which is not checked")


def _epsilons(block: Mapping[str, Any]) -> list[Any]:
    """Return the values of ε in the card's machine-readable block."""
    return [block["epsilon"], *block["epsilon_by_adjacency"].values()]


_DEVIATIONS = 10.0  # of the noise; a sound step exceeds them with a probability below 2e-23
_SAME = 1e-9  # relative; machines differ in the last digits of a logarithm


def thresholds_found(plan: PrivacyPlan, contents: LedgerContents) -> tuple[bool, str] | None:
    """Compare the thresholds of a ledger's steps with the plan's clipping.

    Only the noisy statistic of a step may change the threshold. The statistic itself is in no file, but the units of a
    step and their noise bound it, and therefore the next threshold. A threshold that anything else changed, such as a
    custom training loop, may contain private values.

    Returns:
        Whether they fit the plan, and the finding in words; None if the plan needs none and the ledger has none.
    """
    clipping, path = plan.mechanism.clipping, contents.notes.thresholds
    if not isinstance(clipping, AdaptiveClipping):
        return (False, f"{len(path)} steps have one, and the plan does not adapt it") if path else None
    carried = contents.num_steps - contents.torn_steps
    first_is_due = path[:1] in ([], [clipping.threshold]) or contents.torn_steps > 0
    if len(path) != carried or not first_is_due:
        return False, f"{len(path)} steps have one: not as the plan says"
    wrong = next(_wrong(plan, clipping, path, contents.notes.begun_at), None)
    return (wrong is None, f"{len(path)} steps have one" + ("" if wrong is None else f": {wrong}"))


def _wrong(plan: PrivacyPlan, clipping: AdaptiveClipping, path: list[float], begun_at: list[int]) -> Iterator[str]:
    """Yield each threshold that the previous step's noisy statistic cannot explain."""
    furthest, begun = _largest_statistic(plan), set(begun_at)
    for at in range(1, len(path)):
        before, now = path[at - 1], path[at]
        if math.isclose(now, before, rel_tol=_SAME):  # the previous step was drawn but not taken
            continue
        if at in begun:
            yield f"number {at + 1} is {now:g} after a resume, but the last one charged was {before:g}"
            continue
        moved = [
            clipping.at(before).updated(statistic, plan.expected_batch_size).threshold
            for statistic in (-furthest, furthest)
        ]
        if not min(moved) * (1 - _SAME) <= now <= max(moved) * (1 + _SAME):
            yield (
                f"number {at + 1} is {now:g}, but the noisy count of the previous step can only change {before:g} to "
                f"between {min(moved):g} and {max(moved):g}: something else changed it"
            )


def _largest_statistic(plan: PrivacyPlan) -> float:
    """Return a bound on the size of a step's noisy statistic, in units."""
    chosen = plan.seeded or plan.noise_multiplier == 0  # such a run may use more units than it draws
    units = plan.num_units if chosen else plan.max_batch_size
    noise = plan.mechanism.noise
    variance = max(noise.variance(step, plan.num_steps) for step in (0, plan.num_steps - 1))
    return units / 2 + _DEVIATIONS * plan.mechanism.statistic_stddev * math.sqrt(variance)


_STATED = "the report states the ε of the ledger"


@dataclass(frozen=True)
class Standing:
    """The guarantee of a folder.

    Attributes:
        words: one sentence.
        private: whether there is a guarantee at all: a run without noise or with a fixed seed has none.
        checks: the checks of plan, ledger, the model's files and the stated ε.
    """

    words: str
    private: bool
    checks: tuple[Check, ...]

    @property
    def failed(self) -> Check | None:
        """The first check that failed; None if none did."""
        return next((check for check in self.checks if not check.ok), None)


def standing_of(folder: str | Path) -> Standing:
    """Return the guarantee of a folder, computed from its ledger.

    Args:
        folder: folder of a run or of a checkpoint, or a copy of a published one.

    Raises:
        ValueError: it is not a folder, or holds no ledger.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Pass the folder of a run, or of a model that a run released")
    if not (folder / LEDGER_FILE).is_file():
        raise ValueError(f"{folder} holds no {LEDGER_FILE}, so there is no guarantee to check")
    checks: list[Check] = []
    plan, contents = check_ledger(folder, checks)
    if plan is None or contents is None:
        return Standing("No guarantee: plan or ledger cannot be read.", False, tuple(checks))
    checks += [Check(*result) for result in release_checks(folder, contents)]
    if isinstance(plan, QueryPlan):
        return Standing("No model: the folder holds the release of a query run.", False, tuple(checks))
    if plan.unplanned(contents) is not None:
        return Standing("No guarantee: the ledger charges steps that are not in the plan.", False, tuple(checks))
    stated = stated_guarantee(plan, contents)
    checks.append(_stated(folder, stated.epsilon))
    if plan.seeded or contents.seeded or not stated.is_finite:
        reason = "no noise was added" if not stated.is_finite else "a fixed seed, which is for tests, made the noise"
        return Standing(f"NOT PRIVATE: {reason}.", False, tuple(checks))
    words = (
        f"{stated} for each {stated.one_unit} of "
        f"{plan.num_units:,}, recomputed from the ledger of {contents.num_steps:,} steps."
    )
    return Standing(words, True, tuple(checks))


def _stated(folder: Path, spent: float) -> Check:
    """Compare the report's ε, within the tolerance for different versions of the numeric packages."""
    try:
        stated = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))["statement"]["epsilon"]
        value = math.inf if stated == "inf" else float(stated)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Check(_STATED, False, f"{JSON_FILE} cannot be read ({type(error).__name__})")
    same = value == spent or math.isclose(value, spent, rel_tol=TOLERANCE)
    return Check(_STATED, same, f"ε = {value:g}" if same else f"it states {value:g}, but the ledger gives {spent:g}")

"""Whether the weights, checkpoints, audits and the card in a run's folder are those that its ledger names.

Place in the flow: the part of `dpllm verify` that looks beyond the report (`dpllm.verify`). The guarantee is about
weights: a report that is right beside other weights says nothing about them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm import checkpoints
from dpllm.identity import check_checkpoint, checkpoints_in, released_files, steps_of_weights, unnamed_weights
from dpllm.ledger import LEDGER_FILE, LedgerContents

_LISTED = 6
_NUMBER = r"[^\n\d]{0,24}[=:≤<≈~][^\n\d]{0,12}[\d.]"
_CLAIM = re.compile(
    rf"(?:ε|\bepsilon\b|\beps\b|δ|\bdelta\b){_NUMBER}|\(\s*[\d.]+\s*,\s*[\d.e-]+\s*\)\s*-?\s*(?:DP\b|differential)",
    flags=re.IGNORECASE,
)
_KNOWN = (
    "README.md",
    LEDGER_FILE,
    "privacy_plan.json",
    "privacy_report.json",
    "privacy_report.md",
    "privacy_report.html",
)
_Result = tuple[str, bool, str]


def release_checks(folder: Path, contents: LedgerContents) -> Iterator[_Result]:
    """Yield (what must hold, whether it does, what was found) for the files beside a ledger.

    Args:
        folder: of a run, of a checkpoint, or one that a model was saved in.
        contents: what the ledger in it says.
    """
    yield _weights(folder, contents)
    yield _steps(folder, contents)
    found = list(checkpoints_in(folder))
    if found:
        yield _checkpoints(folder / LEDGER_FILE, found)
    if contents.notes.audits:
        yield _audits(folder, contents)


def _weights(folder: Path, contents: LedgerContents) -> _Result:
    what = "the model's files are those that were saved"
    if (folder / checkpoints.MANIFEST_FILE).is_file():
        try:
            checkpoints.verify(folder)
        except checkpoints.CheckpointError as error:
            return what, False, str(error)
        return what, True, "as the checkpoint's manifest names them"
    named = released_files(contents, folder)
    if named is None:
        return what, True, "not compared: the ledger names no files (an older run, or a model that was saved by hand)"
    wrong = [f"{name} {difference}" for name, difference in checkpoints.differing(folder, named).items()]
    weights, others = unnamed_weights(folder, named)
    wrong += [f"{name} may hold weights, and the ledger does not name it" for name in weights]
    if wrong:
        return what, False, _some(wrong)
    beside = [name for name in others if name not in _KNOWN]
    more = f"; not named by the ledger, and not covered by ε for that reason: {_some(beside)}" if beside else ""
    return what, True, f"{len(named)} files as the ledger names them{more}"


def _steps(folder: Path, contents: LedgerContents) -> _Result:
    what = "the weights have taken no step that the ledger does not charge"
    try:
        taken = steps_of_weights(folder)
    except ValueError as error:
        return what, False, str(error)
    if taken is None:
        return what, True, "the folder does not say how many they have taken"
    words = f"{taken} taken, {contents.num_steps} charged"
    return what, taken <= contents.num_steps, words if taken <= contents.num_steps else f"{words}: lines were cut off"


def _checkpoints(ledger: Path, found: Sequence[Path]) -> _Result:
    what = "the checkpoints in the folder are of this ledger"
    wrong = []
    for path in found:
        try:
            check_checkpoint(ledger, path)
        except ValueError as error:
            wrong.append(" ".join(str(error).split()))
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


def foreign_claims(text: str, own: Sequence[str], report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a model card that claim an ε or a δ and are not the guarantee of the report.

    Args:
        text: of the card.
        own: the blocks of the guarantee, each of which a card has once.
        report: whose open points a card repeats.
    """
    lines = []
    if text.startswith("---"):
        front, _, text = text[3:].partition("\n---")
        keys = re.findall(r"^(\s*)([^\s#:]*(?:epsilon|privacy)[^\s:]*):", front, flags=re.MULTILINE | re.IGNORECASE)
        known = {"differential_privacy", "epsilon", "epsilon_by_adjacency"}
        names = [name for _, name in keys]
        lines += [f"{name} in its metadata" for name in names if name not in known or names.count(name) > 1]
        lines += [f"{name} in its metadata" for indent, name in keys if not indent and name != "differential_privacy"]
    for block in [*own, *report["open_points"]]:
        text = text.replace(block, "", 1)
    return [*dict.fromkeys(lines), *(line.strip() for line in text.split("\n") if _CLAIM.search(line))]


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "; ".join(lines[:_LISTED]) + more

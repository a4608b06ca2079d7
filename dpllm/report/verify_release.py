"""Check that the weights, checkpoints and audits in a run's folder are those that its ledger names.

`dpllm verify` (`dpllm.report.verify`) runs these checks in addition to those of the report. The guarantee is about
weights: a correct report next to different weights says nothing about them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.private_folder import PRIVATE_FOLDER
from dpllm.privacy.run_folder import (
    check_checkpoint,
    checkpoints_in,
    public_start_differences,
    released_files,
    steps_of_weights,
    unnamed_in_checkpoint,
    unnamed_weights,
)

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

"""Whether the weights, checkpoints, audits and the card in a run's folder are those that its ledger names.

Place in the flow: the part of `dpllm verify` that looks beyond the report (`dpllm.report.verify`). The guarantee is
about weights: a report that is right beside other weights says nothing about them.
"""

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from dpllm.config import PRETRAINED_FOLDER
from dpllm.privacy import checkpoints
from dpllm.privacy.identity import (
    check_checkpoint,
    checkpoints_in,
    public_start_differences,
    released_files,
    steps_of_weights,
    unnamed_in_checkpoint,
    unnamed_weights,
)
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents
from dpllm.report.model_card import TAGS

_LISTED = 6
# A claim in any wording and language: the symbol or its name, whatever stands beside it.
_EPSILON = re.compile(r"ε|epsilon|\beps\b|эпсилон|イプシロン|エプシロン|艾普西|엡실론")
# Other names of a guarantee, which are a claim where a number is near them.
_GUARANTEE = re.compile(
    r"differential|differenz|différentiel|diferencial|差分|차등|дифференциальн|\bdp\b|\bgdp\b|zcdp|dp-sgd|\bdelta\b|δ|"
    r"\brho\b|ρ|r[eé]nyi|privacy (?:budget|loss|guarantee|parameter|level)|隐私|隱私|プライバシー"
)
# Words about privacy without a number: nobody can check them, so they are listed.
_PRIVACY = re.compile(
    r"priva[ct]|privé|privad|anonym|anónim|confidential|vertraulich|datenschutz|gdpr|dsgvo|guarantee|garanti|protect|"
    r"schützt|memori[sz]|\bleak|reveal|personal data|приват|конфиденц|匿名|개인정보"
)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)  # of HTML, which nobody sees
_MARKUP = re.compile(r"<[^>]*>|[*_`$\\{}|#>]")
_OF_THE_SYMBOL = str.maketrans({"ɛ": "ε", "є": "ε", "ϵ": "ε", "∊": "ε", "∈": "ε"})
_KNOWN = (
    "README.md",
    LEDGER_FILE,
    "privacy_plan.json",
    "privacy_report.json",
    "privacy_report.md",
    "privacy_report.html",
)
_IDS = ("base_model", "datasets")  # names on the Hub, which may have any letters and numbers
_TAG_LINES = tuple(f"- {tag}" for tag in TAGS)
_Result = tuple[str, bool, str]


def release_checks(folder: Path, contents: LedgerContents, queries: bool = False) -> Iterator[_Result]:
    """Yield (what must hold, whether it does, what was found) for the files beside a ledger.

    Args:
        folder: of a run, of a checkpoint, or one that a model was saved in.
        contents: what the ledger in it says.
        queries: whether it is that of a query run, which has no steps of weights.
    """
    files = "the released files" if queries else "the model's files"
    what = f"{files} are those that were saved"
    yield _weights(what, folder, contents)
    if contents.notes.public_start is not None:
        yield _public_start(folder, contents)
    if not queries:
        yield _steps(folder, contents)
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
    weights, others = unnamed_weights(folder, named)
    wrong += [f"{name} may hold weights, and the ledger does not name it" for name in weights]
    if wrong:
        return what, False, _some(wrong)
    beside = [name for name in others if name not in _KNOWN]
    more = f"; not named by the ledger, and not covered by ε for that reason: {_some(beside)}" if beside else ""
    return what, True, f"{len(named)} files as the ledger names them{more}"


def _public_start(folder: Path, contents: LedgerContents) -> _Result:
    what = "the public weights are those that the run began with"
    wrong = public_start_differences(contents, folder)
    if wrong is None:
        return what, True, f"{PRETRAINED_FOLDER}/ is not in this folder"
    return what, not wrong, _some(wrong) if wrong else f"{len(contents.notes.public_start or ())} files"


def _unnamed(what: str, folder: Path, contents: LedgerContents) -> _Result:
    """The result where the ledger names no files: whose weights lie beside it then, nobody can tell."""
    if all(run.get("file") is None for run in contents.runs):
        return what, True, "not compared: the ledger names no files (an older run)"
    weights, _ = unnamed_weights(folder, {})
    if not weights:
        return what, True, "there are none, and the ledger names none"
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
        return what, True, "the folder does not say how many they have taken"
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


def foreign_claims(text: str, own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the lines of a model card that claim a guarantee and are not dpllm's, and those that speak of privacy.

    Args:
        text: of the card.
        own: the lines that dpllm writes for this report (`dpllm.report.model_card.own_lines`).

    Returns:
        Lines with an ε in any spelling, or with a number beside another name of a guarantee; and lines with other words
        about privacy, which hold no number that could be checked.
    """
    claims: list[str] = []
    words: list[str] = []
    if text.startswith("---"):
        front, _, text = text[3:].partition("\n---")
        claims += [f"{line} in its metadata" for line in _foreign_metadata(front)]
    lines = [line.strip() for line in text.split("\n")]
    foreign = [line for line in lines if line and line not in own]
    for before, line, after in zip(["", *foreign], foreign, [*foreign[1:], ""], strict=False):
        plain = _plain(line)
        if _EPSILON.search(plain):
            claims.append(line)
        elif _GUARANTEE.search(plain):
            number = any(character.isnumeric() for character in f"{_plain(before)}{plain}{_plain(after)}")
            (claims if number else words).append(line)
        elif _PRIVACY.search(plain):
            words.append(line)
    return list(dict.fromkeys(claims)), list(dict.fromkeys(words))


def missing_points(text: str, points: Sequence[str]) -> list[str]:
    r"""Return the open points of a report that its card does not list, each in a line of its own that readers see.

    Args:
        text: of the card.
        points: of the report.

    >>> missing_points("- one\n<!--\n- two\n-->\n", ["one", "two", "three"])
    ['two', 'three']
    """
    listed = {line.strip() for line in _COMMENT.sub("", text).split("\n")}
    return [point for point in points if f"- {point}" not in listed]


def _foreign_metadata(front: str) -> Iterator[str]:
    """Keys and values of a card's metadata that speak of a guarantee, outside of the block that dpllm writes.

    A key that is there twice is named too: which of the two a program reads is anybody's guess.
    """
    inside, name = False, ""
    seen: set[str] = set()
    for line in front.split("\n"):
        key = re.match(r"([^\s#:-][^:]*):", line)
        if key:
            name = key.group(1).strip("\"' ")
            inside = name == "differential_privacy" and name not in seen
            if name in seen:
                yield f"a second {name}"
            seen.add(name)
        plain = _plain(line)
        spoken = _EPSILON.search(plain) or re.search(r"\beps|_eps|^[^:]*privacy[^:]*:", line.lower())
        if name not in _IDS and any(character.isnumeric() for character in plain):
            spoken = spoken or _GUARANTEE.search(plain)  # an underscore has become a space there
        if not inside and line.strip() not in _TAG_LINES and spoken:
            yield line.strip()


def _plain(line: str) -> str:
    """A line without markup and with one spelling of each symbol: with spaces for the markup, and with nothing."""
    text = unicodedata.normalize("NFKC", html.unescape(line)).translate(_OF_THE_SYMBOL).casefold()
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")  # invisible
    return f"{_MARKUP.sub(' ', text)} {_MARKUP.sub('', text)}"


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
    return "; ".join(lines[:_LISTED]) + more

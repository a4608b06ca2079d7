"""Check what in a run's folder belongs to its ledger, whether a new run may use it, and whether the rows are the same.

A checkpoint's manifest and a budget entry hold the head of their run's ledger
(`dpllm.privacy.ledger_reader.LedgerHead`). If the folder's ledger does not contain the head, the checkpoint belongs to
a different run, the ledger was cut or restored from an older copy, or a copy of the folder was resumed separately. In
each case the ledger charges fewer steps than the weights have taken, so the run cannot be resumed from there. The
ledger holds the hashes of a saved model's files, so different weights next to it are detected.

A refused model, a full disk or an option that only an engine can check may end a run between the opening of its ledger
and the first charge. No step has then released anything private, so a new run may replace such a ledger, and its
reservation returns to the budget. A ledger with a step, one that cannot be read, or a copy of a ledger (whose original
may have steps by now) is never touched. A run that crashed after a step is settled by a person (`dpllm budget settle`);
one that ends normally settles itself (`dpllm.training.shared_ledger`).

**The same rows.** ε covers the people in one data set. A run that is resumed on different rows would have trained on
two data sets, but its ledger would cover only one. When a run starts, a digest of the rows' contents is written to the
ledger; when it resumes, the digest is compared. The digest is an HMAC-SHA256 with a random key, which is stored in the
run's folder in a file that must not be released: without the key, nobody can use the ledger to test whether a guessed
text is in the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dpllm.config import PRETRAINED_FOLDER
from dpllm.config.files import write_file
from dpllm.privacy import checkpoints
from dpllm.privacy.budget import BudgetError, Entry, entry_of, read_budget, require_own_ledger, settle
from dpllm.privacy.chained_file import is_at, lock
from dpllm.privacy.ledger import (
    LEDGER_FILE,
    REPORT_FILE,
    Ledger,
    LedgerError,
    is_being_written,
    read_ledger,
    require_own_file,
)
from dpllm.privacy.ledger_reader import LedgerContents, LedgerHead, require_prefix
from dpllm.privacy.private_folder import PRIVATE_FOLDER, known_writer, private_path

STATE_FILE = "trainer_state.json"
"""The file in which the Trainer records the number of steps that its weights have taken."""
LOST_STEPS = "charged steps that were lost before a resume and are not in the weights"
"""Name of the ledger's fact about them. The last of several values counts, since it includes the others."""
ADOPTED = (
    "The ledger's file was copied or restored from a copy, and then adopted by hand. Steps that a different copy took "
    "are charged there and not here. Make sure that no other copy was resumed, or add up the ε of all copies."
)
_READABLE = (
    *(".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".html", ".png", ".svg", ".jpg", ".jpeg", ".pdf", ".csv"),
    *(".log", ".lock", ".py", ".sh", ".toml", ".ini", ".cfg", ".ipynb", ".jinja", ".tmpl"),
)  # files that people read; any other file may hold weights under any name
_CONFIGURATIONS = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_UNPUBLISHED = ("training_args.bin",)
"""Files of a model that are never uploaded (`dpllm.report.publishing`), so a downloaded model lacks them."""
_NO_WEIGHTS = ("LICENSE", "NOTICE", "COPYING")
_LOG_OF_A_TRACKER = "events.out.tfevents."


class RunName(NamedTuple):
    """The name of a run: its folder and id. A folder that was emptied and used again holds another run."""

    folder: Path
    """Folder of the run."""
    run: str | None
    """Id of the run, from the first line of its ledger; None: no ledger can be read there."""


def run_in(folder: str | Path) -> RunName:
    """Return the run that wrote the ledger of a folder."""
    folder = Path(folder).resolve()
    try:
        return RunName(folder, read_ledger(folder / LEDGER_FILE).runs[0]["run"])
    except LedgerError:
        return RunName(folder, None)


def head_of(checkpoint: str | Path) -> LedgerHead:
    """Return the head of the ledger when a checkpoint was made.

    Raises:
        LedgerError: the checkpoint names no head.
        CheckpointError: it has no manifest.
    """
    noted = checkpoints.ledger_of(checkpoint)
    if noted is None:
        raise LedgerError(
            f"{checkpoint} names no ledger, so its steps cannot be checked. Resume from a checkpoint of a private run"
        )
    return LedgerHead.of(noted)


def steps_of_weights(folder: str | Path) -> int | None:
    """Return the steps that the weights in a folder have taken; None if the Trainer's state is missing.

    Raises:
        LedgerError: the state cannot be read.
    """
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read ({error}). Restore it, or use a different checkpoint") from error


def lost_steps(contents: LedgerContents) -> int:
    """Return the charged steps that a crash lost before the last resume, so that the weights do not contain them."""
    return int(str(contents.notes.facts.get(LOST_STEPS, [0])[-1]).split(" ")[0])


def lost_fact(lost: int, contents: LedgerContents) -> str:
    """Return the value of the fact `LOST_STEPS` for a resume; each resume has its own, since no fact is noted twice.

    Args:
        lost: the charged steps that the weights do not hold.
        contents: contents of the ledger, with the line of this resume.
    """
    return f"{lost} of {contents.num_steps} (resume {len(contents.runs) - 1})"


def check_checkpoint(ledger: str | Path, checkpoint: str | Path) -> None:
    """Check that a checkpoint belongs to this ledger's run and contains only steps that the ledger charges.

    Raises:
        LedgerError: it belongs to a different run or to a fork, or the ledger was cut or restored from an older copy.
    """
    head = head_of(checkpoint)
    require_prefix(ledger, head, f"The checkpoint {checkpoint}")
    taken = steps_of_weights(checkpoint)
    if taken is not None and taken > head.num_steps:
        raise LedgerError(
            f"The weights of {checkpoint} have taken {taken} steps, but its ledger charged {head.num_steps}: the "
            "checkpoint was edited. Resume from a different checkpoint"
        )


def adopt(folder: str | Path) -> int:
    """Declare that the copy of a ledger in this folder is the one to continue (`require_own_file`).

    The ledger then has an open point about it; `dpllm.report.model_card.adopt_run` rewrites the report and the card. A
    budget entry still refuses a copy whose original was resumed.

    Returns:
        The steps that it charges.

    Raises:
        LedgerError: there is no ledger, it was edited, or a run is writing it; or the folder is a checkpoint, whose
            manifest names its copy of the ledger.
    """
    folder = Path(folder)
    if (folder / checkpoints.MANIFEST_FILE).is_file():
        raise LedgerError(
            f"{folder} is a checkpoint, whose copy of the ledger never changes: it is resumed with the ledger in its "
            f"run's folder. Adopt that folder: `dpllm verify {folder.parent} --adopt`"
        )
    path = folder / LEDGER_FILE
    if is_being_written(path):
        raise LedgerError(f"a run is writing {path}{known_writer(folder)}: wait for its end")
    with Ledger.annotate(path) as ledger:
        ledger.append_adopted()
        ledger.append_open_point(ADOPTED)
        return ledger.num_steps


def is_finished(folder: str | Path) -> bool:
    """Return whether a folder's run has ended as planned and saved its model, so that nothing is left to do.

    Raises:
        LedgerError: the ledger is damaged.
    """
    path = Path(folder) / LEDGER_FILE
    if not path.is_file():
        return False
    contents = read_ledger(path)
    own = [release for release in contents.notes.released if release["folder"] == _name(folder)]
    return ended_as_planned(contents) and bool(own) and not checkpoints.differing(folder, own[-1]["files"])


def ended_as_planned(contents: LedgerContents) -> bool:
    """Return whether the last run of a ledger ended with all planned steps charged."""
    return contents.end is not None and contents.end.startswith((COMPLETED, STOPPED_AT_BUDGET))


COMPLETED = "completed"
"""Prefix of the reason of an end after all planned steps were charged."""
STOPPED_AT_BUDGET = "stopped at the budget"
"""Prefix of the reason when all planned steps were charged, but ε allowed fewer steps than were requested."""
STOPPED_EARLY = "stopped early"
"""The reason of an end with fewer steps than planned."""


def snapshot(folder: str | Path) -> dict[str, tuple[int, int, int]]:
    """Return the files of a folder that may belong to a model, each with its inode, modification time and size."""
    folder = Path(folder)
    found = {}
    for name in _files(folder):
        status = (folder / name).stat()
        found[name] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return found


def written_since(folder: str | Path, before: Mapping[str, tuple[int, int, int]]) -> dict[str, dict[str, Any]]:
    """Return the size and hash of every file of a folder that was written since a `snapshot`."""
    names = [name for name, state in snapshot(folder).items() if before.get(name) != state]
    names = [name for name in names if name not in checkpoints.DOCUMENTS]  # PEFT writes a card that dpllm's replaces
    return checkpoints.seal(folder, names)


def note_release(ledger: Any, folder: str | Path, before: Mapping[str, tuple[int, int, int]]) -> None:
    """Append to a ledger (`Ledger` or `SharedLedger`) the files that were written since a `snapshot`."""
    files = written_since(folder, before)
    if files:
        ledger.append_released(_name(folder), files)


def note_public_start(ledger: Ledger) -> None:
    """Append to a new run's ledger the files of the public training in its folder, if there are any."""
    folder = ledger.path.parent / PRETRAINED_FOLDER
    names = _own_files(folder)
    if names:
        ledger.append_public_start(checkpoints.seal(folder, names))


def public_start_differences(contents: LedgerContents, folder: str | Path) -> list[str] | None:
    """Compare the files of the public training with those at the start of the run.

    An adapter is trained on these weights: with different weights it is a different model.

    Returns:
        The files that differ and those that may hold additional weights, each with the difference; None if the ledger
        names no such files, or the whole folder is missing.
    """
    start, named = Path(folder) / PRETRAINED_FOLDER, contents.notes.public_start
    if named is None or not start.is_dir():
        return None
    found = [f"{PRETRAINED_FOLDER}/{name} {what}" for name, what in checkpoints.differing(start, named).items()]
    added = [name for name in _own_files(start) if name not in named and _may_hold_weights(name)]
    return found + [f"{PRETRAINED_FOLDER}/{name} may hold weights, and the ledger does not name it" for name in added]


def require_public_start(ledger: str | Path) -> None:
    """Check, before a run is resumed, that the weights of the public training are those from its start.

    Raises:
        LedgerError: they are not.
    """
    ledger = Path(ledger)
    wrong = public_start_differences(read_ledger(ledger), ledger.parent)
    if wrong:
        raise LedgerError(
            f"The run in {ledger.parent} started with different public weights: {'; '.join(wrong)}. Restore "
            f"{PRETRAINED_FOLDER}/ of the first start from a backup, or start a new run in a different folder"
        )


def _own_files(folder: Path) -> list[str]:
    """Return the names of the files directly in a folder, which `from_pretrained` reads."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def refuse_other_run(folder: str | Path, ledger: Any) -> None:
    """Check, before a model is saved, that the folder does not hold a different run's ledger.

    The plan and a copy of the ledger are written next to a model. A copy of a different ledger may be replaced, since
    the original is in its run's folder.

    Args:
        folder: the folder for the model.
        ledger: ledger of the run (`Ledger` or `SharedLedger`); None: it has none.

    Raises:
        LedgerError: it holds the ledger of a different run.
    """
    path = Path(folder) / LEDGER_FILE
    if ledger is None or not path.is_file():
        return
    there = read_ledger(path)
    if there.runs[0]["run"] == read_ledger(ledger.path).runs[0]["run"]:
        return
    try:
        require_own_file(there)
    except LedgerError:  # a copy
        return
    raise LedgerError(
        f"{folder} is the folder of a different private run ({there.num_steps} steps). Saving this model there would "
        "replace that run's model and its ledger, the only record of its steps. Save the model in a different folder"
    )


def note_own_release(ledger: Any, folder: str | Path, before: Mapping[str, tuple[int, int, int]]) -> None:
    """Append to a ledger the weights that a custom loop saved, and the configurations next to them.

    Unlike `note_release`, it omits other files, such as a log, which may be written again later.
    """
    written = [name for name, state in snapshot(folder).items() if before.get(name) != state]
    weights = [name for name in written if _may_hold_weights(name)]
    beside = {str(Path(name).with_name(other)) for name in weights for other in _CONFIGURATIONS}
    if weights:
        ledger.append_released(
            _name(folder), checkpoints.seal(folder, [*weights, *sorted(beside.intersection(written))])
        )


def released_files(contents: LedgerContents, folder: str | Path) -> dict[str, dict[str, Any]] | None:
    """Return the files that a ledger names for the model in a folder, by size and hash; None if it names none.

    A model that was saved several times has several lines, and the uploaded files have one. Of the lines that match the
    folder, the one with the most files counts, and the last of several. If none matches, the last line for a folder of
    this name or with a file that is here counts. A file that is never published may be missing from the folder, and is
    then omitted.
    """
    lines = [(release["folder"], _without_unpublished(folder, release["files"])) for release in contents.notes.released]
    matching = [files for _, files in lines if not checkpoints.differing(folder, files)]
    here = [
        files for name, files in lines if name == _name(folder) or any((Path(folder) / one).exists() for one in files)
    ]
    return max(reversed(matching or here[-1:]), key=len, default=None)


def names_exactly(contents: LedgerContents, files: Mapping[str, Any]) -> bool:
    """Return whether a line of a ledger names these files of a model, and no others that are ever published."""
    wanted = {name: entry for name, entry in files.items() if name not in _UNPUBLISHED}
    lines = [release["files"] for release in contents.notes.released]
    return any({name: line[name] for name in line if name not in _UNPUBLISHED} == wanted for line in lines)


def _without_unpublished(folder: str | Path, files: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    here = Path(folder)
    return {name: entry for name, entry in files.items() if name not in _UNPUBLISHED or (here / name).exists()}


def unnamed_weights(folder: str | Path, named: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the files that are not named: those that may hold weights, and the others.

    Any file that people do not normally read may hold weights. Hidden files, such as those that a download or a desktop
    creates, hold none, since nothing loads them.
    """
    folder = Path(folder)
    others = [name for name in _files(folder, every=True) if name not in named and not _is_hidden(name)]
    weights = [name for name in others if _may_hold_weights(name)]
    return weights, [name for name in others if name not in weights]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)


def _may_hold_weights(path: str) -> bool:
    name = Path(path).name
    if _is_hidden(path):
        return False
    if name == "adapter_config.json" or name.endswith(".index.json"):
        return True  # they decide which files or which model `from_pretrained` loads
    known = name in _NO_WEIGHTS or name.startswith(_LOG_OF_A_TRACKER)
    return not known and not name.lower().endswith(_READABLE)


def unnamed_in_checkpoint(checkpoint: str | Path) -> list[str]:
    """Return the files of a checkpoint that may hold weights and are not in its manifest."""
    named = {checkpoints.MANIFEST_FILE: None, **checkpoints.named_files(checkpoint)}
    return unnamed_weights(checkpoint, named)[0]


def checkpoints_in(folder: str | Path) -> Iterator[Path]:
    """Yield the published checkpoints in a run's folder."""
    for path in sorted(Path(folder).glob("checkpoint-*")):
        if path.is_dir() and (path / checkpoints.MANIFEST_FILE).is_file():
            yield path


def _name(folder: str | Path) -> str:
    return Path(folder).resolve().name


def _files(folder: Path, every: bool = False) -> list[str]:
    """Return the files below a folder by name, without complete checkpoints, logs and public weights.

    With ``every``, links are included, of which a folder in the Hub's cache consists.
    """
    if not folder.is_dir():
        return []
    whole = {path.name for path in checkpoints_in(folder)}
    left_out = {checkpoints.STAGING_FOLDER, PRETRAINED_FOLDER, ".git", *(whole if every else ())}
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        top = name.parts[0]
        inside = len(name.parts) > 1
        if inside and (top in left_out or (not every and (top == "runs" or top.startswith("checkpoint-")))):
            continue
        if (path.is_file() and not path.is_symlink()) or (every and path.is_symlink()):
            names.append(name.as_posix())
    return names


def is_used(path: str | Path) -> bool:
    """Return whether there is a ledger file that a new run must not replace.

    Args:
        path: the ledger of a run's folder; it need not exist.
    """
    return Path(path).exists() and _unused(Path(path)) is None


def make_way(path: str | Path, budget_file: str | None) -> dict[str, int]:
    """Remove the ledger and the report of a run that took no step, and settle its reservation. On rank 0.

    Args:
        path: path of the ledger; if there is none, or it is used, nothing happens.
        budget_file: budget file of the new run. If the unused ledger names another file, that file is not changed.

    Returns:
        The disclosures of the unused run, and how often each was made; the new ledger has to note them again.

    Raises:
        BudgetError: the budget file cannot be read or written, or counts steps that the ledger has lost.
    """
    path = Path(path)
    if not path.exists() or _unused(path) is None:
        return {}
    with _locked(path) as held:  # two new runs do not both take it for unused, and one does not remove the other's
        contents = read_ledger(path) if held else None
        if contents is None or contents.num_steps or contents.torn_lines:
            return {}
        named = contents.runs[0].get("budget") if contents.runs else None
        if named and budget_file is not None and named["file"] == Path(budget_file).name:
            entry = _own_entry(budget_file, path, contents)
            if entry is not None:
                settle(budget_file, entry.id, 0)
        path.with_name(REPORT_FILE).unlink(missing_ok=True)  # it would be mistaken for the new run's
        path.unlink()
    return dict(contents.disclosures)


@contextlib.contextmanager
def charging(ledger: Ledger, budget_file: str | Path, entry: str) -> Iterator[None]:
    """Charge a budget within this block, for a new ledger that names the entry.

    The ledger is written first: if the run is killed before it charges or right after, the ledger shows whose entry it
    is and that no step was taken, and `make_way` or `dpllm budget settle` returns the reservation. If the block fails,
    the reservation is returned and the ledger is removed.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # must not mask the first error
            if any(one.id == entry for one in read_budget(budget_file).entries):
                settle(budget_file, entry, 0)
            ledger.path.unlink(missing_ok=True)  # while its lock is held: nobody else writes it
        ledger.close()
        raise


def settle_crashed(path: str | Path, folder: str | Path, independent: bool = False) -> int:
    """Settle a run that crashed, so that the budget counts the steps whose ε the run's report states.

    A run whose ledger charges no step returns its whole reservation. A run with steps keeps its planned steps
    reserved: its stop may depend on the data or on its releases, and its report states the ε of the plan
    (`dpllm.privacy.stated.stated_history`). If people declare that the stop does not depend on them, the ledger records
    the declaration, the report states the ε of the steps taken, and the remaining steps return to the budget. A run
    that is resumed later reserves the steps it needs again.

    Args:
        path: the budget file.
        folder: output folder of the run.
        independent: declares that the crash depended neither on the private data nor on the run's releases (a power
            failure, a time limit that was fixed in advance).

    Returns:
        The steps that its ledger charges.

    Raises:
        BudgetError: the run is still running, or is charged to another file or to none.
        LedgerError: the ledger is missing, was edited, or is a copy of the file that the run wrote.
    """
    ledger = Path(folder) / LEDGER_FILE
    contents = read_ledger(ledger)
    if is_being_written(ledger):
        raise BudgetError(
            f"{ledger} is being written: the run is still in progress{known_writer(folder)} and needs its reservation. "
            "Wait for its end"
        )
    named = contents.runs[0].get("budget")
    if not named or named["file"] != Path(path).name:
        raise BudgetError(
            f"{ledger} is charged to {named['file'] if named else 'no budget file'}, not to {path}. Pass the file to "
            "which the run was charged"
        )
    entry = _own_entry(path, ledger, contents)
    if entry is None:
        return 0
    require_own_file(contents)  # a copy that was made before the crash holds fewer steps than were taken
    answers = entry.step.answers is not None
    planned = entry.steps_reserved if entry.step.answers is None else sum(count for _, count in entry.step.answers)
    early = 0 < contents.num_steps < planned
    if early and independent and not contents.notes.stopped_independently:
        what = "answers" if answers else "releases"
        with Ledger.annotate(ledger) as opened:
            opened.append_end(f"crashed; declared independent of the data and of the {what}", independent=True)
        contents = read_ledger(ledger)
    keep = not contents.answers_end_independently if answers else early and not contents.notes.stopped_independently
    settle(path, entry.id, contents.history, contents.head, keep_reserved=keep)
    return contents.num_steps


def _own_entry(budget_file: str | Path, ledger: Path, contents: LedgerContents) -> Entry | None:
    """Return the entry of a budget that a run's ledger names; None if the run was killed before it charged.

    Raises:
        BudgetError: the budget cannot be read, lacks the entry of a run with steps, or has it for a different ledger.
    """
    budget, named = read_budget(budget_file), contents.runs[0]["budget"]["entry"]
    if contents.num_steps == 0 and not contents.torn_lines and named not in {one.id for one in budget.entries}:
        return None  # and therefore before any step
    entry = entry_of(budget, named)
    require_own_ledger(budget_file, entry, ledger)
    return entry


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a ledger; yield whether it is held, and the file is still the one of this name."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:  # another new run has removed it
        yield False
        return
    try:
        yield lock(descriptor) and is_at(descriptor, path)
    finally:
        os.close(descriptor)


def _unused(path: Path) -> LedgerContents | None:
    """Return the contents of a ledger that charges nothing; None for any other."""
    try:
        if is_being_written(path):
            return None
        contents = read_ledger(path)
        require_own_file(contents)
    except LedgerError:
        return None
    return contents if contents.num_steps == 0 and not contents.torn_lines else None


KEY_FILE = f"{PRIVATE_FOLDER}/data_key.txt"
"""Relative to the run's folder; only its owner can read it."""
DIGEST = "digest of the training rows, under a key that is not released"
"""Name of the fact in ledger and report."""
RECORDS_DIGEST = "digest of the training records, under a key that is not released"
"""Name of the fact about the records from which the rows were made."""
_KEY_BYTES = 32


class _Facts(Protocol):
    path: Path

    def append_fact(self, name: str, value: str | int | float) -> None: ...
    def append_open_point(self, text: str) -> None: ...


def compare_rows(ledger: str | Path, contents: str) -> str | None:
    """Compare the rows with those of the run's last start, before its ledger is opened; on rank 0.

    Args:
        ledger: ledger of the run that will be resumed.
        contents: hash of the rows (`dpllm.training.checks.agreement.contents`).

    Returns:
        An open point if they cannot be compared; None if they are the same.

    Raises:
        LedgerError: the rows differ, or the ledger is damaged.
    """
    ledger = Path(ledger)
    noted = read_ledger(ledger).notes.facts.get(DIGEST)
    if not noted:
        return _point("its ledger holds no digest of them")
    key = _read_key(ledger.parent / KEY_FILE)
    if key is None:
        return _point(f"{KEY_FILE} is missing or damaged")
    if not hmac.compare_digest(str(noted[-1]), _digest(key, contents)):
        raise LedgerError(
            f"The rows differ from those at the start of the run in {ledger.parent}: their digest "
            f"is {_digest(key, contents)[:12]}, but the ledger has {str(noted[-1])[:12]}. A run's ε covers only one "
            "data set. Resume with the data, the tokenizer and the data section of the first start, or start a new run "
            "in a different folder, which is accounted for separately"
        )
    return None


def remember_rows(ledger: _Facts, contents: str, point: str | None = None) -> None:
    """Note the digest of the rows in an open ledger; on rank 0.

    Args:
        ledger: ledger of the run.
        contents: hash of the rows.
        point: the open point of `compare_rows`. The key is always replaced, so that a later resume can compare.

    Raises:
        OSError: the key cannot be written.
    """
    ledger.append_fact(DIGEST, _digest(_new_key(ledger), contents))
    if point is not None:
        ledger.append_open_point(point)


def remember_records(ledger: _Facts, contents: str) -> None:
    """Note the digest of the records in the open ledger of a new run, after that of its rows; on rank 0.

    Args:
        ledger: ledger of the run.
        contents: hash of the records (`dpllm.data.records.contents_of`).

    Raises:
        OSError: the key cannot be written.
    """
    key = _read_key(ledger.path.parent / KEY_FILE) or _new_key(ledger)
    ledger.append_fact(RECORDS_DIGEST, _digest(key, contents))


def compare_records(ledger: str | Path, contents: str | None) -> str | None:
    """Compare records with those of a training run, before they are read for another purpose.

    Args:
        ledger: ledger of the training run.
        contents: hash of the records; None: they have none.

    Returns:
        An open point if they cannot be compared; None if they are the same.

    Raises:
        LedgerError: the records differ, or the ledger is damaged.
    """
    ledger = Path(ledger)
    facts, key = read_ledger(ledger).notes.facts, _read_key(ledger.parent / KEY_FILE)
    noted, starts = facts.get(RECORDS_DIGEST), facts.get(DIGEST, [])
    if noted and key is not None and contents is not None and len(starts) <= 1:  # otherwise the key is a later one
        if hmac.compare_digest(str(noted[0]), _digest(key, contents)):
            return None
        raise LedgerError(
            f"the records differ from those of the training in {ledger.parent}: their digest is "
            f"{_digest(key, contents)[:12]}, but the ledger has {str(noted[0])[:12]}. Their joint ε covers only the "
            "same people. Restore the training's records; nothing was charged"
        )
    why = "its ledger holds no digest of them" if not noted else f"{KEY_FILE} is missing, damaged or of a later start"
    return (
        f"Private records were read again, and could not be compared with those of the training: {why}. Make sure that "
        "they are the same records; ε covers only one data set."
    )


def _new_key(ledger: _Facts) -> bytes:
    path = private_path(ledger.path.parent, KEY_FILE)
    key = secrets.token_bytes(_KEY_BYTES)
    path.unlink(missing_ok=True)  # whatever its permissions were
    write_file(path, key.hex() + "\n", 0o600)
    return key


def _read_key(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return key if len(key) == _KEY_BYTES else None


def _digest(key: bytes, contents: str) -> str:
    return hmac.new(key, contents.encode(), hashlib.sha256).hexdigest()


def _point(why: str) -> str:
    return (
        f"The run was resumed, and its rows could not be compared with those of its first start: {why}. Make sure that "
        "they are the same data set; ε covers only one."
    )

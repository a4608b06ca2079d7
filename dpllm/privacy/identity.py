"""The identity of a run: check that a checkpoint, a budget entry and released files belong to the ledger beside them.

Place in the flow: above ledger and checkpoints, which do not depend on each other. A checkpoint's manifest and a budget
entry carry the head of their run's ledger (`dpllm.privacy.ledger_reader.LedgerHead`). If the ledger of the folder does
not contain the head, the checkpoint belongs to another run, the ledger was cut or restored from an older copy, or a
copy of the folder was resumed separately. In each case the ledger charges fewer steps than the weights have taken, so
the run cannot be resumed from there. The hashes of a saved model's files are in the ledger, so other weights beside it
are found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dpllm.config import PRETRAINED_FOLDER
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, is_being_written, read_ledger, require_own_file
from dpllm.privacy.ledger_reader import LedgerContents, LedgerHead, steps_at
from dpllm.privacy.writer import known_writer

STATE_FILE = "trainer_state.json"
"""The file in which the Trainer records the number of steps that its weights have taken."""
LOST_STEPS = "charged steps that were lost before a resume and are not in the weights"
"""The name of the ledger's fact about them; of several values the last one counts, which includes the others."""
ADOPTED = (
    "The ledger's file was copied, or restored from a copy, and adopted by hand. Steps that another copy took are "
    "charged there and not here: make sure that no other copy was resumed, or add up the ε of all."
)
_READABLE = (
    *(".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".html", ".png", ".svg", ".jpg", ".jpeg", ".pdf", ".csv"),
    *(".log", ".lock", ".py", ".sh", ".toml", ".ini", ".cfg", ".ipynb", ".jinja", ".tmpl"),
)  # files that people read; any other file may hold weights under any name
_CONFIGURATIONS = ("config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json")
_UNPUBLISHED = ("training_args.bin",)
"""Files beside a model that are never uploaded (`dpllm.report.publishing`). A downloaded model lacks them."""
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


def require_prefix(ledger: str | Path, head: LedgerHead, owner: str) -> None:
    """Make sure that a ledger contains a head.

    Args:
        ledger: the file.
        head: a head that a checkpoint or a budget recorded.
        owner: its owner, for the error: "The checkpoint runs/a/checkpoint-5".

    Raises:
        LedgerError: it does not contain the head.
    """
    if steps_at(ledger, head.chain) == head.num_steps:
        return
    charged = read_ledger(ledger).num_steps
    if head.num_steps > charged:
        raise LedgerError(
            f"{owner} holds {head.num_steps} steps, {ledger} charges {charged}: it is not the ledger of that run, or "
            "it was cut or restored from an older copy. Replace it by the run's own latest ledger"
        )
    raise LedgerError(
        f"{owner} belongs to another ledger than {ledger}: it comes from another run, or from a copy of this folder "
        "that was resumed separately, and its steps are not charged here. Resume from a checkpoint of this folder's "
        "run, or in the folder that made this checkpoint"
    )


def head_of(checkpoint: str | Path) -> LedgerHead:
    """Return the head of the ledger when a checkpoint was made.

    Raises:
        LedgerError: the checkpoint names no head.
        CheckpointError: it has no manifest.
    """
    noted = checkpoints.ledger_of(checkpoint)
    if noted is None:
        raise LedgerError(
            f"{checkpoint} names no ledger, so its steps cannot be found in one. Resume from a checkpoint of a private "
            "run"
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
        raise LedgerError(f"{path} cannot be read ({error}): restore it, or use another checkpoint") from error


def lost_steps(contents: LedgerContents) -> int:
    """Return the charged steps that the run's weights do not hold: a crash lost them, before the last resume."""
    return int(str(contents.notes.facts.get(LOST_STEPS, [0])[-1]).split(" ")[0])


def lost_fact(lost: int, contents: LedgerContents) -> str:
    """Return the value of the fact `LOST_STEPS` for a resume; each resume has its own, since no fact is noted twice.

    Args:
        lost: the charged steps that the weights do not hold.
        contents: contents of the ledger, with the line of this resume.
    """
    return f"{lost} of {contents.num_steps} (resume {len(contents.runs) - 1})"


def check_checkpoint(ledger: str | Path, checkpoint: str | Path) -> None:
    """Make sure that a checkpoint belongs to this ledger's run and holds only steps that the ledger charges.

    Raises:
        LedgerError: it belongs to another run or to a fork, or the ledger was cut or restored from an older copy.
    """
    head = head_of(checkpoint)
    require_prefix(ledger, head, f"The checkpoint {checkpoint}")
    taken = steps_of_weights(checkpoint)
    if taken is not None and taken > head.num_steps:
        raise LedgerError(
            f"The weights of {checkpoint} have taken {taken} steps, but its ledger charged {head.num_steps}: the "
            "checkpoint was edited. Resume from another checkpoint"
        )


def adopt(folder: str | Path) -> int:
    """Declare that the copy of a ledger in this folder is the one to continue (`require_own_file`).

    The ledger then has an open point about it; `dpllm.report.model_card.adopt_run` rewrites the report and the card. A
    budget entry still refuses a copy whose original was resumed.

    Args:
        folder: folder of a run.

    Returns:
        The steps that it charges.

    Raises:
        LedgerError: there is no ledger, it was edited, or a run is writing it; or the folder is a checkpoint, whose
            manifest names its copy of the ledger.
    """
    folder = Path(folder)
    if (folder / checkpoints.MANIFEST_FILE).is_file():
        raise LedgerError(
            f"{folder} is a checkpoint: it is resumed with the ledger of its run's folder, and its own copy of the "
            f"ledger never changes. Adopt the folder in which the run continues: `dpllm verify {folder.parent} --adopt`"
        )
    path = folder / LEDGER_FILE
    if is_being_written(path):
        raise LedgerError(f"{path} is being written by a run now{known_writer(folder)}: wait for its end")
    with Ledger.annotate(path) as ledger:
        ledger.append_adopted()
        ledger.append_open_point(ADOPTED)
        return ledger.num_steps


def is_finished(folder: str | Path) -> bool:
    """Return whether the run of a folder has ended as planned and saved its model, so that nothing remains to be done.

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

    An adapter is trained on these weights: with other weights it is a different model.

    Args:
        contents: contents of the ledger.
        folder: folder of the run.

    Returns:
        The files that differ and those that may hold other weights, each with the difference; None if the ledger
        names no such files, or the whole folder is missing.
    """
    start, named = Path(folder) / PRETRAINED_FOLDER, contents.notes.public_start
    if named is None or not start.is_dir():
        return None
    found = [f"{PRETRAINED_FOLDER}/{name} {what}" for name, what in checkpoints.differing(start, named).items()]
    added = [name for name in _own_files(start) if name not in named and _may_hold_weights(name)]
    return found + [f"{PRETRAINED_FOLDER}/{name} may hold weights, and the ledger does not name it" for name in added]


def require_public_start(ledger: str | Path) -> None:
    """Make sure, before a run is resumed, that the weights of the public training are those at its start.

    Raises:
        LedgerError: they are not.
    """
    ledger = Path(ledger)
    wrong = public_start_differences(read_ledger(ledger), ledger.parent)
    if wrong:
        raise LedgerError(
            f"The run in {ledger.parent} began with other public weights: {'; '.join(wrong)}. Restore "
            f"{PRETRAINED_FOLDER}/ of the first start from a copy, or start a new run in another folder"
        )


def _own_files(folder: Path) -> list[str]:
    """Return the names of the files directly in a folder, which `from_pretrained` reads."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def refuse_other_run(folder: str | Path, ledger: Any) -> None:
    """Make sure, before a model is saved, that the folder does not hold the ledger of another run.

    The plan and a copy of the ledger are written beside a model. A copy of another ledger may be replaced: the original
    is in the folder of its run.

    Args:
        folder: the folder for the model.
        ledger: ledger of the run (`Ledger` or `SharedLedger`); None: it has none.

    Raises:
        LedgerError: it holds the ledger of another run.
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
        f"{folder} is the folder of another private run ({there.num_steps} steps): saving this model there would "
        "replace that run's model and its ledger, which is the only record of its steps. Save the model in another "
        "folder"
    )


def note_own_release(ledger: Any, folder: str | Path, before: Mapping[str, tuple[int, int, int]]) -> None:
    """Append to a ledger the weights that a custom loop saved, and the configurations beside them.

    Unlike `note_release`, it leaves out other files, such as a log, which may be written again later.
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

    A model that was saved several times has several lines, and the files that were uploaded have one. Of the lines that
    match the folder, the one with most files counts, and of several the last; if none matches, the last line for a
    folder of this name, or with a file that is here. A file that is never published may be missing from the
    folder, and is then left out.
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

    Any file that people do not normally read may hold weights. Hidden files, such as the notes that a download or a
    desktop leaves, hold none: nothing loads them.
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

"""Write files of a run that must not be released: counts for single steps, and which process writes the run.

The ledger is published, so it holds no figures of private rows: the number of units in a step without a finite gradient
distinguishes two neighbouring data sets. Such counts go into a file of this folder. So does a note about the process
that writes the run, with its machine and its job, so that an error can name it: the ledger's lock shows that a process
writes, but not which one. No decision depends on this note.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PRIVATE_FOLDER = "not_for_release"
"""Relative to the run's folder; only its owner can read it."""
DIAGNOSTICS_FILE = f"{PRIVATE_FOLDER}/diagnostics.jsonl"
"""Relative to the run's folder: an object with step, what and count for each line."""
DATA_FILES_FILE = f"{PRIVATE_FOLDER}/data_files.json"
"""Relative to the run's folder: the files of the training records, with the number of records in each."""


def private_path(folder: str | Path, name: str) -> Path:
    """Return the path of a file that must not be released; create its folder, which only its owner can read.

    Args:
        folder: folder of the run.
        name: the file, relative to it, such as `DIAGNOSTICS_FILE`.

    Raises:
        OSError: the folder cannot be made.
    """
    path = Path(folder) / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.stat().st_mode & 0o077:
        path.parent.chmod(0o700)
    return path


def append_diagnostic(folder: str | Path, step: int, what: str, count: int) -> None:
    """Append a count of a step to the diagnostics.

    Args:
        folder: folder of the run.
        step: number of steps charged so far.
        what: what was counted.
        count: at least 1.

    Raises:
        ValueError: the count is smaller.
    """
    if count < 1:
        raise ValueError(f"the count of a diagnostic must be at least 1, got {count}")
    with private_path(folder, DIAGNOSTICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "what": what, "count": count}) + "\n")


def read_diagnostics(folder: str | Path) -> dict[str, int]:
    """Return the counts of all steps together, by what was counted; empty if there are none."""
    path, counts = Path(folder) / DIAGNOSTICS_FILE, dict[str, int]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry: dict[str, Any] = json.loads(line)
        counts[entry["what"]] = counts.get(entry["what"], 0) + entry["count"]
    return counts


WRITER_FILE = "not_for_release/writer.json"
"""Relative to the run's folder; readable by its owner only."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")


def note_writer(folder: str | Path) -> None:
    """Note that this process writes the folder from now on, and replace an earlier note.

    A note that cannot be written is skipped: it only improves the message of a later error.
    """
    path = Path(folder) / WRITER_FILE
    job = next((f"{name}={os.environ[name]}" for name in _JOBS if os.environ.get(name)), None)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    note = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": since}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        private_path(folder, WRITER_FILE)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(note, file)
        os.replace(temporary, path)


def is_own_process(folder: str | Path) -> bool:
    """Return whether this process was the last one that wrote the folder."""
    try:
        note = json.loads((Path(folder) / WRITER_FILE).read_text(encoding="utf-8"))
        return bool(note["pid"] == os.getpid() and note["host"] == socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def known_writer(folder: str | Path) -> str:
    """Return the last process that wrote the folder, in parentheses; an empty text if there is no note."""
    try:
        note = json.loads((Path(folder) / WRITER_FILE).read_text(encoding="utf-8"))
        job = f", job {note['job']}" if note["job"] else ""
        return f" (process {note['pid']} on {note['host']}{job}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""

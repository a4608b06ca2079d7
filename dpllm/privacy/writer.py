"""Record the process that writes a run's folder, so that an error can name it.

Place in the flow: beside the ledger, whose lock shows that a process writes, but not which one. The run notes its
machine, its process and its job in a file that is not for release. No decision depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from dpllm.privacy.not_for_release import private_path

WRITER_FILE = "not_for_release/writer.json"
"""Relative to the run's folder; readable by its owner only."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "TORCHELASTIC_RUN_ID")


def note_writer(folder: str | Path) -> None:
    """Note that this process writes the folder from now on, and replace an earlier note.

    A note that cannot be written is skipped: it only improves the message of a later error.

    Args:
        folder: folder of the run.
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
    """Return whether this process was the last one that wrote the folder.

    Args:
        folder: folder of the run.
    """
    try:
        note = json.loads((Path(folder) / WRITER_FILE).read_text(encoding="utf-8"))
        return bool(note["pid"] == os.getpid() and note["host"] == socket.gethostname())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def known_writer(folder: str | Path) -> str:
    """Return the last process that wrote the folder, as words in brackets; an empty text if there is no note.

    Args:
        folder: folder of the run.
    """
    try:
        note = json.loads((Path(folder) / WRITER_FILE).read_text(encoding="utf-8"))
        job = f", job {note['job']}" if note["job"] else ""
        return f" (process {note['pid']} on {note['host']}{job}, since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""

"""The folder of a run for what ε does not cover, and the counts of single steps in it.

Place in the flow: beside the ledger. The ledger is published, so it holds no figure of private rows: how many units of
a step had no finite gradient tells two neighbouring data sets apart. Such counts go into a file of this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PRIVATE_FOLDER = "not_for_release"
"""Relative to the run's folder; only its owner can read it."""
DIAGNOSTICS_FILE = f"{PRIVATE_FOLDER}/diagnostics.jsonl"
"""Relative to the run's folder: an object with step, what and count for each line."""
DATA_FILES_FILE = f"{PRIVATE_FOLDER}/data_files.json"
"""Relative to the run's folder: the files of the training records, with the number of records in each."""


def private_path(folder: str | Path, name: str) -> Path:
    """Return the path of a file that is not for release; its folder is made, and only its owner can read it.

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
        raise ValueError(f"a diagnostic counts at least 1, got {count}")
    with private_path(folder, DIAGNOSTICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "what": what, "count": count}) + "\n")


def read_diagnostics(folder: str | Path) -> dict[str, int]:
    """Return the counts of all steps together, by what was counted; empty if there are none.

    Args:
        folder: folder of the run.
    """
    path, counts = Path(folder) / DIAGNOSTICS_FILE, dict[str, int]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry: dict[str, Any] = json.loads(line)
        counts[entry["what"]] = counts.get(entry["what"], 0) + entry["count"]
    return counts

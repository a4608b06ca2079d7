"""The record of a private tuning: the number of runs and the candidates that were drawn, and how each run ended.

The record is private: the guarantee of a tuning holds only while the number of runs stays secret. The draws are on the
disk before any run begins, and a restart uses them again. Repeating the draws until they please would make the stated ε
untrue.

It is a chained file, as a ledger is (`dpllm.privacy.chained_file`). If the tuning is charged to a budget, the entry
there holds the hash of the draws, so that they cannot be replaced.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpllm.config.files import sync_folder
from dpllm.privacy.chained_file import CHAIN_START, ChainedFile, chained_lines, is_copy, lines_of


class TuningError(ValueError):
    """The files of a tuning contradict each other, or were edited."""


class RecordFile(ChainedFile):
    """The file of a record, open for appending."""

    error = TuningError

    @staticmethod
    def is_locked_words(path: Path) -> str:
        """Return the error for a record that another process continues."""
        return f"{path} is being written by another tuning now: wait for its end"


@dataclass(frozen=True)
class DrawnRun:
    """A run that was drawn."""

    folder: str
    """Random name of its folder, which does not reveal its place among the runs."""
    candidate: int
    """Number of its candidate."""


@dataclass
class Record:
    """The contents of a record, and how to append to it."""

    path: Path
    draws: dict[str, Any]
    """The first line: the settings and the runs that were drawn."""
    draws_hash: str
    """Hash of the first line."""
    begun: set[int] = field(default_factory=set)
    """Numbers of the runs that were started."""
    scores: dict[int, float | None] = field(default_factory=dict)
    """The score of each run that has ended, a larger one is better; None: it failed."""
    selected: int | None = None
    """Number of the run that is released."""
    is_decided: bool = False
    """Whether all runs have ended and the best was chosen."""
    chain: str = ""
    """Hash over all lines."""
    size: int = 0
    """Bytes of all whole lines."""
    file: RecordFile | None = field(default=None, compare=False)
    """Open and locked while the tuning is continued (`open_record`); None: each line is appended under its own lock."""

    @property
    def runs(self) -> list[DrawnRun]:
        """The runs that were drawn, in order."""
        return [DrawnRun(run["folder"], run["candidate"]) for run in self.draws["runs"]]

    def folder_of(self, number: int) -> Path:
        """Return the folder of a run."""
        return self.path.parent / self.runs[number].folder

    def begin(self, number: int) -> None:
        """Note, durably, that a run is started."""
        if number not in self.begun:
            self._append({"kind": "begun", "run": number})
            self.begun.add(number)

    def end(self, number: int, score: float | None) -> None:
        """Note, durably, how a run ended."""
        self._append({"kind": "ended", "run": number, "score": score})
        self.scores[number] = score

    def decide(self, number: int | None) -> None:
        """Note, durably, which run is released; None: none of them."""
        self._append({"kind": "decided", "run": number})
        self.selected, self.is_decided = number, True

    def _append(self, entry: Mapping[str, Any]) -> None:
        file = self.file or RecordFile.take(self.path)
        file.go_on(self.chain, self.size)
        try:
            file.append(entry)
        finally:
            if self.file is None:
                file.close()
        self.chain, self.size = file.chain, file.size


def create_record(path: Path, draws: Mapping[str, Any], runs: Sequence[DrawnRun]) -> Record:
    """Write the draws of a new tuning, durably.

    Raises:
        TuningError: the file exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    name = secrets.token_hex(8)
    drawn = [{"folder": run.folder, "candidate": run.candidate} for run in runs]
    try:
        with RecordFile.make(half, 0o600) as file:
            file.append({"kind": "drawn", "id": name, "file": file.identity(name), **draws, "runs": drawn})
        os.link(half, path)  # unlike a rename, it fails if the file exists
    except FileExistsError as error:
        raise TuningError(f"{path} exists: the draws of a tuning are never repeated") from error
    finally:
        half.unlink(missing_ok=True)
    sync_folder(path.parent)
    return read_record(path)


def read_record(path: Path) -> Record:
    """Read and check a record; a last line that a crash left incomplete is left out.

    Raises:
        TuningError: the file cannot be read, or a line was edited, lost, moved or added.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TuningError(f"{path} cannot be read ({error}): restore it; without it the draws are unknown") from error
    size = data.rfind(b"\n") + 1
    entries, chain, first = [], CHAIN_START, ""
    for line in chained_lines(lines_of(data[:size])):
        if not line.whole:
            raise _edited(path, line.number)
        entries.append(json.loads(line.body))
        chain, first = line.chain, first or line.chain
    if not entries or entries[0].get("kind") != "drawn":
        raise _edited(path, 1)
    record = Record(path=path, draws=entries[0], draws_hash=first, chain=chain, size=size)
    for number, entry in enumerate(entries[1:], start=2):
        _take(record, number, entry)
    return record


def _take(record: Record, number: int, entry: Mapping[str, Any]) -> None:
    kind, run = entry["kind"], entry.get("run")
    exists = isinstance(run, int) and 0 <= run < len(record.runs)
    if kind == "begun" and isinstance(run, int) and exists and not record.is_decided:
        record.begun.add(run)
    elif kind == "ended" and run in record.begun and run not in record.scores and not record.is_decided:
        record.scores[run] = entry["score"]
    elif kind == "decided" and (run is None or exists) and not record.is_decided:
        record.selected, record.is_decided = run, True
    else:
        raise _edited(record.path, number)


def open_record(path: Path) -> tuple[Record, RecordFile]:
    """Read a record and lock it for this process, before a tuning is continued.

    Returns:
        The record, and its file, whose lock lasts until it is closed.

    Raises:
        TuningError: it was edited, is a copy, or another process continues this tuning.
    """
    file = RecordFile.take(path)
    try:
        record = read_record(path)
        if is_copy(path, record.draws["id"], record.draws["file"]):
            raise TuningError(
                f"{path} is a copy of the file that the tuning wrote, or was restored from one. A tuning that goes on "
                "in two places releases two selections, and states the ε of one. Continue in the original folder, or "
                "begin another tuning, which is charged separately"
            )
        file.cut(record.size)  # an incomplete line after a crash
    except BaseException:
        file.close()
        raise
    record.file = file
    return record, file


def _edited(path: Path, number: int) -> TuningError:
    return TuningError(
        f"{path} line {number} was edited, or lines before it are missing. The number of runs, the candidates and the "
        "scores decide which model may be released: restore the file of this tuning. If it is lost, release nothing "
        "of the tuning; it stays charged"
    )

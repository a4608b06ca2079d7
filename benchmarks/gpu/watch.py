"""Run a command's parts in processes, end what takes too long, and go on with the next part.

A process that hangs or crashes, in compiled code too, loses one part at most: its figures are in the file, and a new
process continues. This module needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu.plan import OWN, PROGRAMS, Part
from gpu.record import AVOIDED, NOT_REACHED, RUNNING, WRONG, Record

PROGRAM = Path(__file__).parent
START_LIMIT = 90  # seconds until a process begins its first part
POLL = 0.1


class Limits:
    """Time limits of a command's parts and of the whole command."""

    def __init__(self, end: float, part: float | None) -> None:
        """Set the limits.

        Args:
            end: time by `time.time` at which the command ends.
            part: seconds for each part; None: those of the plan.
        """
        self.end, self._part = end, part

    def of(self, part: Part) -> float:
        """Return the seconds after which a part's process is killed."""
        return part.limit if self._part is None else self._part

    def is_over(self) -> bool:
        """Whether the command's time is over."""
        return time.time() > self.end


def run(parts: Sequence[Part], arguments: Sequence[str], record: Path, log: TextIO, limits: Limits) -> None:
    """Run parts in one process, and in further ones as long as one ends early and parts remain.

    Args:
        parts: the parts, in order.
        arguments: the program's arguments, to which the parts' numbers are added.
        record: the file of the figures.
        log: file for all output.
        limits: the time limits.
    """
    left, resumed = list(parts), set()
    while left and not limits.is_over():
        why = _process([*arguments, *(f"--part={part.step}/{part.name}" for part in left)], left, record, log, limits)
        book = Record(record)
        ended_in = next((part for part in left if (part.step, part.name) == book.running()), None)
        if ended_in is not None:
            _close(book, ended_in, why)
            _say(f"   {WRONG}: {why}", log)
        begun = [part for part in left if book.part(part.step, part.name)]
        if not begun:  # not even the first one: another process would not begin it either
            for part in left:
                book.enter(part.step, part.name, state=NOT_REACHED, error=why)
            _say(f"== {why}", log)
            return
        again = [part for part in begun if part == ended_in and part.resumes and part not in resumed]
        resumed.update(again)
        left = again + [part for part in left if part not in begun]


def _close(book: Record, part: Part, why: str) -> None:
    """Note where a process ended: in a part, and in one of its methods if it measures several."""
    entry: Any = book.part(part.step, part.name)
    entry |= {"state": WRONG, "error": why, "wrong": [why]}
    for name, method in entry["figures"].get("methods", {}).items():
        if method.get("error") == RUNNING:
            method["error"] = f"{why}: {method.pop('reason')}" if "reason" in method else why
            if name in OWN:
                book.doubt_kernels(AVOIDED, f"{why} in {name}")
    if part.function == PROGRAMS:
        book.doubt_kernels(AVOIDED, f"{why} in a Triton program")
    book.save()


def _process(arguments: list[str], parts: Sequence[Part], record: Path, log: TextIO, limits: Limits) -> str:
    """Run one process to its end or to a limit, print its output, and return in words how it ended."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    printer = threading.Thread(target=_print, args=(process, log), daemon=True)
    printer.start()
    began, why = time.time(), ""
    try:
        while process.poll() is None and not why:
            why = _exceeded(began, parts, record, limits)
            time.sleep(POLL)
    finally:
        end(process)
        process.wait()
        printer.join(timeout=5)
    return why or f"its process ended with status {process.returncode}"


def _exceeded(began: float, parts: Sequence[Part], record: Path, limits: Limits) -> str:
    """Return which limit was reached, or nothing."""
    if limits.is_over():
        return "stopped at the end of the command's time"
    book = Record(record)
    now = book.running()
    if now is None:
        if not any(book.part(part.step, part.name) for part in parts) and time.time() - began > START_LIMIT:
            return f"no part began within {START_LIMIT} s"
        return ""
    entry: Any = book.part(*now)
    limit = limits.of(next(part for part in parts if (part.step, part.name) == now))
    return f"stopped after {limit:.0f} s" if time.time() - entry["began"] > limit else ""


def _print(process: subprocess.Popen, log: TextIO) -> None:
    for line in process.stdout or ():
        _say(line.rstrip("\n"), log)


def _say(line: str, log: TextIO) -> None:
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


def end(process: subprocess.Popen) -> None:
    """Kill a process and everything in its group; nothing happens if they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

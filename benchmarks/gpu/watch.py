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
    pending, second_tries = list(parts), set()
    while pending and not limits.is_over():
        why = _process(
            [*arguments, *(f"--part={part.step}/{part.name}" for part in pending)], pending, record, log, limits
        )
        book = Record(record)
        last = next((part for part in pending if (part.step, part.name) == book.running()), None)
        if last is not None:
            _close(book, last, why)
            _say(f"   {WRONG}: {why}", log)
        started = [part for part in pending if book.part(part.step, part.name)]
        if not started:  # not even the first one: another process would not begin it either
            for part in pending:
                book.enter(part.step, part.name, state=NOT_REACHED, error=why)
            _say(f"== {why}", log)
            return
        retried = [part for part in started if part == last and part.resumes and part not in second_tries]
        second_tries.update(retried)
        pending = retried + [part for part in pending if part not in started]


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
        starts = [(book.part(part.step, part.name) or {}).get("began", 0.0) for part in parts]
        if max(starts) < began < time.time() - START_LIMIT:
            return f"no part began within {START_LIMIT} s"
        return ""
    entry: Any = book.part(*now)
    limit = max((limits.of(part) for part in parts if (part.step, part.name) == now), default=0.0)
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

"""Programs that tests start: each is ended with everything it started, whatever happens to the test.

A time limit here only catches a deadlock. No test may depend on how fast the machine is, or on its load.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

LIMIT = 3600.0  # seconds
_GRACE = 60.0  # seconds that other processes get to report why they failed, once one has failed
_MARK = "DPLLM_TEST_CHILD"  # in the environment of a child and of all its descendants

_alive: set[Child] = set()


class Child(subprocess.Popen):
    """A program in a session of its own. `kill` ends it and all its descendants, and waits for it.

    Descendants are found by a mark in their environment: torch's launcher gives each worker a session of its own, and a
    worker whose launcher has died has another parent.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None, **options: Any) -> None:
        """Start it; arguments as of ``subprocess.Popen``."""
        self.mark = uuid.uuid4().hex
        marked = {**(os.environ if env is None else env), _MARK: self.mark}
        super().__init__(command, env=marked, start_new_session=True, **options)
        _alive.add(self)

    def kill(self) -> None:
        """End it with all its descendants, wait for it and close its pipes; nothing happens if it has ended."""
        while started := list(self.family()):
            for process in started:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)  # psutil's own wait would take the child's exit status away from `wait`
        super().wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        _alive.discard(self)

    def family(self) -> Iterator[psutil.Process]:
        """The processes that run of it and of its descendants."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def end_all() -> None:
    """End every child that a test left behind."""
    for child in list(_alive):
        child.kill()


def run(
    command: Sequence[str], *, check: bool = True, text: bool = True, input: Any = None, **options: Any
) -> subprocess.CompletedProcess:
    """Run a program to its end and return its exit status and what it printed.

    Raises:
        AssertionError: with ``check``, it failed; with what it printed.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE if input else None}
    child = Child(command, text=text, **{**pipes, **options})
    try:
        out, err = child.communicate(input, timeout=LIMIT)
    finally:
        child.kill()
    assert not check or child.returncode == 0, f"exit status {child.returncode} of {command}\n{out}\n{err}"
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def wait_all(children: Sequence[subprocess.Popen]) -> list[int | None]:
    """Exit statuses of programs that run together; all of them have ended then.

    Once one has failed, the others are not waited for any longer than it takes them to report why.
    """
    begin, failed = time.monotonic(), None
    try:
        while any(child.poll() is None for child in children):
            now = time.monotonic()
            if failed is None and any(child.returncode for child in children):
                failed = now
            if now - begin > LIMIT or (failed is not None and now - failed > _GRACE):
                break
            time.sleep(0.05)
        return [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so; let the condition end as well when the program that is to bring it about has.

    Raises:
        AssertionError: a deadlock.
    """
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)

"""Programs that tests start: each is ended with everything it started, whatever happens to the test.

A time limit here only catches a deadlock. No test may depend on how fast the machine is, or on its load.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

LIMIT = 3600.0  # seconds
_GRACE = 60.0  # seconds that other processes get to report why they failed, once one has failed
_MARK = "DPLLM_TEST_CHILD"  # in the environment of a child and of all its descendants

# Loaded once by the process that others are forked from; each would take seconds to load them itself. Nothing of dpllm
# is among them: a fork may import another copy of it.
_LOADED = (
    "torch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "peft",
    "deepspeed",
    "torch.utils.cpp_extension",  # this and the next are imported by DeepSpeed when it begins
    "torch._inductor.compile_fx",
    "scipy.stats",
    "dp_accounting.pld.privacy_loss_distribution",
    "pytest",
    "tests.distributed.gloo",
)


class Process(Protocol):
    """A program that runs: an interpreter of its own, or a fork."""

    @property
    def returncode(self) -> int | None:
        """The exit status at the last `poll`; None while it runs."""

    def poll(self) -> int | None:
        """The exit status; None while it runs."""

    def kill(self) -> None:
        """End it and wait for it."""


_alive: set[Process] = set()


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


class Forked:
    """A function in a process forked from one that has loaded the libraries, in a session of its own.

    It starts in milliseconds. Forks share the seed of Python's hashes; interpreters of their own do not.
    """

    def __init__(
        self, function: Callable[..., None], *arguments: Any, env: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        """Start it.

        Args:
            function: of a module's top level.
            arguments: its arguments, which are pickled.
            env: all of its environment. What a library reads at its import comes from `load` instead.
            log: file of its output.
            cwd: its working directory.
        """
        load()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_in_fork, args=(function, arguments, dict(env), str(log), str(cwd)))
        self._process.start()
        self.returncode: int | None = None
        _alive.add(self)

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        self.returncode = self._process.exitcode
        return self.returncode

    def kill(self) -> None:
        """End it with all processes of its session's first group, and wait for it; nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.poll()
        _alive.discard(self)


def load() -> None:
    """Start the process that others are forked from, unless it runs: one thread, on CPUs, this checkout's modules."""
    root = str(Path(__file__).parents[1])
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": root}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        forkserver.set_forkserver_preload(list(_LOADED))
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _in_fork(function: Callable[..., None], arguments: Sequence[Any], env: dict[str, str], log: str, cwd: str) -> None:
    os.setsid()
    with open(log, "wb", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    np.random.seed()  # as an interpreter of its own would have begun; Python's random numbers do so by themselves
    function(*arguments)


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


def run_pytest(copy: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """Run pytest on a copy of this checkout, in a fork that imports the copy's modules.

    Returns:
        Its exit status and what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = {**os.environ, "PYTHONPATH": str(copy)}
        codes = wait_all([Forked(_pytest, str(copy), list(arguments), env=env, log=log, cwd=copy)])
        return codes[0], log.read_text(encoding="utf-8", errors="replace")


def _pytest(copy: str, arguments: Sequence[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("dpllm", "tests")]:
        del sys.modules[name]
    sys.path[:] = [copy, *(place for place in sys.path if place and Path(place) != Path(__file__).parents[1])]
    import pytest  # only here: the processes of a group do without it

    loaded = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
    raise SystemExit(int(pytest.main(["-W", loaded, *arguments])))


def wait_all(children: Sequence[Process]) -> list[int | None]:
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

"""Handle signals that end a run in order: after the current step, with a checkpoint, a ledger line and a report.

`DPTrainer.train` and the programs that call it use it. Python runs a handler between two bytecodes of the main thread,
so a handler only sets a flag here; the training loop reads it after each step.

Senders of signals (Linux):

* Ctrl-C in a terminal goes to the whole foreground process group: to this process and to a launcher above it.
* ``accelerate launch`` with one process only waits for its child. Ctrl-C ends it with a traceback while the child ends
  in order; SIGTERM and SIGHUP end it and leave the child behind. So the child asks the kernel for SIGTERM when the
  launcher dies (PR_SET_PDEATHSIG).
* ``torchrun``, and with it ``accelerate launch`` with several processes, starts each worker in a new session. It
  forwards SIGINT, SIGTERM and SIGHUP to them, waits for 30 seconds, kills the remaining workers, and ends with its own
  traceback, which a worker cannot prevent.

A signal that arrives twice within `ONCE` seconds, from the terminal and from a launcher, counts once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ONCE = 2.0
"""Seconds within which further signals belong to the first one."""

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Slurm sends SIGUSR1 ahead of a time limit (``--signal=B:USR1@300``)."""

_LAUNCHERS = frozenset(
    {
        *("accelerate", "accelerate-launch", "torchrun", "deepspeed"),
        *("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "torch.distributed.run"),
        *("torch.distributed.launch", "deepspeed.launcher.launch", "deepspeed.launcher.runner"),
    }
)
_PR_SET_PDEATHSIG = 1


class StopRequest:
    """The record of whether a signal asked this process to stop, and which signal.

    Args:
        then: the program's reaction, in words for the user.
    """

    def __init__(self, then: str = "finishing this step, then saving a checkpoint and the privacy report") -> None:
        """Begin without a request."""
        self._then = then
        self.number: int | None = None
        """The first signal that arrived."""
        self._since = 0.0
        self._terminals: list[int] = []
        self._at_once = False  # whether another Ctrl-C ends this process at once, which the message then promises

    @property
    def requested(self) -> bool:
        """Return whether a signal arrived."""
        return self.number is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals while the block runs. Only the main thread can handle signals; in others nothing is done.

        A signal that this process was started to ignore (``nohup``, a background job of a script) stays ignored,
        unless a launcher forwards it. SIGUSR1 is left to a program that handles it.
        """
        self.number = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        before = {number: signal.getsignal(number) for number in STOPPING}
        handled = [number for number, handler in before.items() if self._is_ours(number, handler)]
        for number in handled:
            signal.signal(number, self._on_signal)
        # Below a launcher, which may end before a signal arrives, the next Ctrl-C goes to the shell or to torchrun.
        self._at_once = signal.SIGINT in handled and not launched()
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    @staticmethod
    def _is_ours(number: int, handler: Any) -> bool:
        if handler is None:  # not set from Python, so it could not be restored
            return False
        if handler == signal.SIG_IGN:
            return forwarded_by_a_launcher()
        return number != getattr(signal, "SIGUSR1", None) or handler == signal.SIG_DFL

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == getattr(signal, "SIGHUP", None):
            self._leave_the_terminal()
        if self.number is None:
            self.number, self._since = number, now
            again = "A second Ctrl-C" if number == signal.SIGINT else "Ctrl-C"
            at_once = f" {again}, after {ONCE:g} s, stops at once." if self._at_once else ""
            _say(f"{signal.Signals(number).name}: {self._then}.{at_once}")
        elif number == signal.SIGINT and now - self._since > ONCE:
            raise KeyboardInterrupt

    def _leave_the_terminal(self) -> None:
        """Redirect output from a closed terminal to /dev/null: a write error would end the run unsaved."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _say(text: str) -> None:
    """Write to the screen on each machine's first process; the handler may have interrupted a log line."""
    if int(os.environ.get("LOCAL_RANK", "0")) < 1:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def exit_code(number: int) -> int:
    """Return the exit code of a program that ended in order on a signal: 128 + its number, as in shells.

    After Ctrl-C under a launcher it is 0, since the launcher would report any other code as a crash with a traceback.
    """
    return 0 if number == signal.SIGINT and launched() else 128 + number


def launched() -> bool:
    """Return whether the parent of this process is a launcher: accelerate, torchrun or deepspeed. Linux only."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return False
    # The first words: the interpreter with its options, the program's path or the module's name.
    return any(Path(word).name in _LAUNCHERS for word in command.split("\0")[:5])


def forwarded_by_a_launcher() -> bool:
    """Return whether this process is a worker in a session that its launcher created for it, as torchrun's are."""
    return hasattr(os, "getsid") and launched() and os.getsid(0) == os.getpid()


def end_with_the_launcher() -> None:
    """Ask for SIGTERM when the launcher of this process dies for any reason; does nothing without a launcher.

    Without this a process continues unnoticed after its launcher was killed.
    """
    parent = os.getppid()
    if not sys.platform.startswith("linux") or not launched():
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # the launcher died in between
        os.kill(os.getpid(), signal.SIGTERM)

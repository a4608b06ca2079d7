"""Lock a budget file, and record its last write in the lock file.

The lock file is never deleted. It holds the name of the process that locked it last, and the number and the hash of the
budget's last write. A budget that was restored from an older copy (git, a backup) lacks the runs that were charged
since then. It has a lower number, and is refused.

Only the system call is filelock's (`lock_descriptor`). Its class `FileLock` does not expose its descriptor, so no note
could be written under the lock; it refuses a lock file that a different user created, although reading it is enough;
and on a file system without locks it uses a file instead, which remains after its process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock

from dpllm.privacy.chained_file import is_at

_LOCK_PATIENCE, _LOCK_LIMIT = 2.0, 600.0  # seconds
_MOST = 4096  # bytes of the lock file


class BudgetError(ValueError):
    """Error: the budget does not allow a run, belongs to another data set, or was changed after it was written."""


@dataclass(frozen=True)
class BudgetLock:
    """A lock that this process holds."""

    budget: Path
    """The file that it locks."""
    path: Path
    descriptor: int

    def require_latest(self, written: int, sha256: str) -> None:
        """Check that the budget is the file that was written last, or a later one.

        Args:
            written: number of the write that made it.
            sha256: hash of its contents.

        Raises:
            BudgetError: it is an older copy, or a different file with the same number of writes.
        """
        noted = _noted(self.descriptor)
        if noted is None or written > noted[0] or (written, sha256) == noted:
            return
        raise BudgetError(
            f"{self.budget} is not the file that was written here last (write {written} of {noted[0]}): it was "
            "restored from a different copy and lacks the charges of later runs. Replace it with the latest copy; if "
            f"that is lost and this file has every run, delete {self.path}"
        )

    def note(self, written: int, sha256: str) -> None:
        """Record a write."""
        _put(self.descriptor, {"written": written, "sha256": sha256})

    def require_held(self) -> None:
        """Check, before the budget is replaced, that no other process can hold the lock as well.

        Raises:
            BudgetError: the lock file was removed, so another process may have made a new one.
        """
        if not is_at(self.descriptor, self.path):
            raise BudgetError(
                f"{self.path} was removed while it was locked, so another process may be writing {self.budget}. This "
                "process has not changed it. Do not remove the lock file, and start again"
            )


@contextlib.contextmanager
def locked(budget: Path) -> Iterator[BudgetLock]:
    """Hold the lock of a budget file; the system releases it when the process dies.

    Raises:
        BudgetError: the folder does not allow it, or another process has held the lock for minutes.
    """
    path = budget.with_name(f"{budget.name}.lock")
    while True:
        descriptor = _opened(path, budget)
        try:
            _wait_for_lock(descriptor, budget)
            if is_at(descriptor, path):
                yield BudgetLock(budget, path, descriptor)
                return
        finally:
            os.close(descriptor)


def _opened(path: Path, budget: Path) -> int:
    try:
        try:
            return os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except PermissionError:  # another user of the folder made it; reading is enough to lock it
            return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BudgetError(
            f"{budget} cannot be locked ({error.strerror}). Its folder must exist, and every run on the data must have "
            "permission to write there"
        ) from error


def _wait_for_lock(descriptor: int, budget: Path) -> None:
    """Take the lock. After a wait of two seconds, print the name of its holder; after ten minutes, give up.

    Raises:
        BudgetError: another process has held it for all that time, or the file system has no locks.
    """
    began, told = time.monotonic(), False
    try:
        while not filelock.lock_descriptor(descriptor, blocking=False):
            waited = time.monotonic() - began
            holder = "another process"
            with contextlib.suppress(OSError):  # Windows lets only the holder read it
                holder = _lines(descriptor)[0].strip() or holder
            if waited > _LOCK_LIMIT:
                raise BudgetError(
                    f"{budget} has been locked by {holder} for {waited:.0f} s. End that process if it hangs, and start "
                    "again"
                )
            if waited > _LOCK_PATIENCE and not told:
                told = True
                print(f"waiting for {budget}, which is locked by {holder}", file=sys.stderr, flush=True)
            time.sleep(0.05)
    except OSError as error:  # ENOSYS, ENOLCK, EOPNOTSUPP of network file systems
        raise BudgetError(
            f"{budget} cannot be locked ({error.strerror}), so another run could charge it at the same time. Move it "
            "to a file system with locks that hold on all machines (Lustre: mount it with -o flock; NFS: version 4)"
        ) from error
    _put(descriptor, None)


def _lines(descriptor: int) -> list[str]:
    """Return the lines of a lock file, at least one."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    return os.read(descriptor, _MOST).decode("utf-8", errors="replace").split("\n")


def _noted(descriptor: int) -> tuple[int, str] | None:
    """Return the number and hash of the last write; None if there is no readable record of it."""
    try:
        noted = json.loads(_lines(descriptor)[1])
        return int(noted["written"]), str(noted["sha256"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _put(descriptor: int, noted: dict[str, int | str] | None) -> None:
    """Write the holder of the lock, and the note; None keeps the note. Nothing depends on the holder's name."""
    with contextlib.suppress(OSError):
        lines = _lines(descriptor)
        kept = json.dumps(noted) if noted is not None else (lines[1] if len(lines) > 1 else "")
        text = f"process {os.getpid()} on {socket.gethostname()}\n{kept}\n".encode()
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text)
        os.ftruncate(descriptor, len(text))

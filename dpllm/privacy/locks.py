"""Operating-system facilities that a ledger needs and Windows lacks.

Place in the flow: below `dpllm.privacy.ledger`. A ledger is locked itself, not a file beside it: every version of dpllm
respects this lock, and a reader needs no permission to write. Windows hides a locked file from its readers, so no
ledger is written there; every module can still be imported.
"""

from __future__ import annotations

import errno
import os
import sys

import filelock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_GET_GENERATION = 0x80087601  # FS_IOC_GETVERSION of Linux: changes when an inode is used for another file


def lock(descriptor: int) -> bool:
    """Lock an open file for this process only, without waiting; the system releases the lock when the process dies.

    Returns:
        Whether the lock is held; False where another process holds it.

    Raises:
        OSError: the file system or the operating system has no such locks.
    """
    _require_readable_locks()
    return filelock.lock_descriptor(descriptor, blocking=False)


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock of an open file.

    The test takes a shared lock, which filelock does not have: it needs no permission to write, and two tests at the
    same time do not take each other for a writer.

    Raises:
        OSError: the file system or the operating system has no such locks.
    """
    _require_readable_locks()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def generation(descriptor: int) -> int | None:
    """Return the generation of an open file's inode; None where the file system has none.

    Such are tmpfs, which uses no inode twice, and network file systems.
    """
    if fcntl is None:
        return None
    number = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _GET_GENERATION, number)
    except OSError:
        return None
    return int.from_bytes(number[:4], sys.byteorder)


def _require_readable_locks() -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system hides a locked file from its readers; use Linux, macOS or WSL")


def identities(descriptor: int) -> list[str]:
    """Return the identities of a file, the most precise last: its inode, and the inode with its generation, if any."""
    inode = str(os.fstat(descriptor).st_ino)
    number = generation(descriptor)
    return [inode] if number is None else [inode, f"{inode}.{number}"]

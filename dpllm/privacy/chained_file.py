"""Append to a file of JSON lines, each with a hash of itself and of all previous lines.

The ledger of a run (`dpllm.privacy.ledger`) and the record of a private tuning (`dpllm.methods.tune.record`) are such
files. A line is on the disk before the call that appends it returns. A line that was edited, lost or moved is detected,
unless lines are cut off at the very end. The hash is not a signature: it protects against accidents, and against edits
by someone who does not recompute the hashes.

The file itself is locked instead of a separate lock file, so a reader needs no write permission. Windows hides a locked
file from its readers, so no such file is written there; every module can still be imported. A line in the file holds
the keyed hash of its inode (`file_hash`), which shows whether the file is the one that was written, or a copy.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import filelock

from dpllm.config.files import naming, sync_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CHAIN_LENGTH = 16
CHAIN_START = hashlib.sha256(b"dpllm privacy ledger, format 1").hexdigest()[:CHAIN_LENGTH]
_SUFFIX_LENGTH = len(', "chain": ""}') + CHAIN_LENGTH
_GET_GENERATION = 0x80087601  # FS_IOC_GETVERSION of Linux: changes when an inode is used for another file


class ChainedLine(NamedTuple):
    """A line that was read."""

    number: int
    """The first is 1."""
    text: str
    body: str
    """Its JSON without the hash; meaningful only if the line is `whole`."""
    chain: str
    """Hash over all whole lines up to this one."""
    whole: bool
    """Whether the line continues the chain. It does not if it was edited, a crash left it incomplete, or lines before
    it are missing."""


def chained_lines(lines: list[str]) -> Iterator[ChainedLine]:
    """Yield the lines of a file; the chain continues after the last whole one."""
    chain = CHAIN_START
    for number, line in enumerate(lines, start=1):
        body = line[:-_SUFFIX_LENGTH] + "}"
        after = next_chain(chain, body)
        whole = line[-_SUFFIX_LENGTH:] == f', "chain": "{after}"}}'
        chain = after if whole else chain
        yield ChainedLine(number, line, body, chain, whole)


def lines_of(data: bytes) -> list[str]:
    """Return the lines of a file's bytes, including an incomplete last one.

    A byte outside ASCII can only come from damage; its replacement matches no hash.
    """
    lines = data.decode("ascii", errors="replace").split("\n")
    return lines if lines[-1] else lines[:-1]


def next_chain(chain: str, body: str) -> str:
    """Return the hash of a line and of all previous lines; ``chain`` is the hash of the previous line."""
    return hashlib.sha256(f"{chain}{body}".encode("utf-8", errors="replace")).hexdigest()[:CHAIN_LENGTH]


class ChainedFile:
    """A chained file that is open for appending and locked for this process. `make` and `take` return one.

    Guarantee: when `append` returns, its line is on the disk. After a failure nothing more is written, since the file
    may end in an incomplete line.
    """

    error: ClassVar[type[ValueError]] = ValueError
    """Class of all errors except those of the system."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over an open and locked file; use `make` or `take`."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._chain = CHAIN_START
        self._size = 0  # bytes that the file must have
        self._torn = False

    @classmethod
    def make(cls, path: Path, mode: int = 0o644) -> Self:
        """Make the file, with no line in it.

        Raises:
            FileExistsError: it exists.
            ValueError: as `take`; of the class `error`.
        """
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, mode)
        cls._lock(path, descriptor)
        sync_folder(path.parent)
        return cls(path, descriptor)

    @classmethod
    def take(cls, path: Path) -> Self:
        """Open the file and keep others from appending. The caller then reads the lines and calls `go_on`.

        Raises:
            ValueError: it cannot be opened or locked, or another process writes it; of the class `error`.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise cls.error(f"{path} cannot be opened for writing ({error.strerror})") from error
        cls._lock(path, descriptor)
        return cls(path, descriptor)

    @classmethod
    def _lock(cls, path: Path, descriptor: int) -> None:
        """Keep other processes from appending; the system releases the lock when the process dies.

        Raises:
            ValueError: another process is writing it, or its file system has no locks. The descriptor is closed.
        """
        try:
            if lock(descriptor):
                return
        except OSError as error:  # ENOSYS, ENOLCK, EOPNOTSUPP of network file systems
            os.close(descriptor)
            if path.stat().st_size == 0:  # made by this call
                path.unlink()
            raise cls.error(
                f"{path} cannot be locked ({error.strerror}), so another run could write it at the same time. Set "
                "train.output_dir to a file system with locks that hold on all machines (Lustre: mount it with -o "
                "flock; NFS: version 4)"
            ) from error
        os.close(descriptor)
        raise cls.error(cls.is_locked_words(path))

    @staticmethod
    def is_locked_words(path: Path) -> str:
        """Return the error for a file that another process is writing."""
        return f"another process is writing {path}: wait for its end"

    def go_on(self, chain: str, size: int) -> None:
        """Continue after the lines that were read; pass the hash over all of them and the file's size in bytes."""
        self._chain, self._size = chain, size

    @property
    def is_open(self) -> bool:
        """Whether lines can be appended."""
        return self._descriptor is not None

    @property
    def chain(self) -> str:
        """Hash over all lines."""
        return self._chain

    @property
    def size(self) -> int:
        """Bytes that the file must have."""
        return self._size

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line, durably.

        Args:
            entry: JSON values, all finite.

        Raises:
            ValueError: the file is closed or was changed by others; of the class `error`.
            OSError: it cannot be written.
        """
        body = json.dumps(entry, allow_nan=False)
        chain = next_chain(self._chain, body)
        self._write(f'{body[:-1]}, "chain": "{chain}"}}\n'.encode("ascii"))
        self._chain = chain

    def cut(self, size: int) -> None:
        """Cut off an incomplete last line after a crash: keep ``size`` bytes."""
        os.ftruncate(self._open, size)
        self._size = size

    def identity(self, name: str) -> str:
        """Return the keyed hash of the file's inode (`file_hash`)."""
        return file_hash(name, identities(self._open)[-1])

    def require_intact(self) -> None:
        """Check that the file under the name is the file that this process writes, and that it is complete.

        Raises:
            ValueError: it is closed, was replaced, removed, cut, or written by another process; of the class `error`.
        """
        if not is_at(self._open, self.path):
            raise self.error(self._moved_words("replaced by another file" if self.path.exists() else "removed"))
        size = os.fstat(self._open).st_size
        if size != self._size:
            raise self.error(self._changed_words(size))

    def _moved_words(self, what: str) -> str:
        return f"{self.path} was {what} while it was being written. Restore it, and start again"

    def _changed_words(self, size: int) -> str:
        return (
            f"{self.path} has {size} bytes, but this process wrote or read {self._size}: another process wrote to it "
            "or cut it. Restore the file from a backup, and start again"
        )

    def _write(self, data: bytes) -> None:
        if self._torn and self._descriptor is not None:
            raise self.error(
                f"an earlier write to {self.path} failed, so it may end in an incomplete line and nothing more is "
                "written to it. Free space on the disk or repair it, and start again, which repairs the file"
            )
        self.require_intact()
        self._torn = True  # until it is known to be on the disk
        view = memoryview(data)
        with naming(self.path):
            while view:
                view = view[os.write(self._open, view) :]
            os.fsync(self._open)
        self._size += len(data)
        self._torn = False

    @property
    def _open(self) -> int:
        """The descriptor of the open file."""
        if self._descriptor is None:
            raise self.error(f"{self.path} is closed")
        return self._descriptor

    def unlock(self) -> None:
        """Let other processes append, while the file stays open."""
        filelock.unlock_descriptor(self._open)

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def file_hash(name: str, identity: str) -> str:
    """Return a keyed hash of a file's inode, which shows whether a file is still the one that was written."""
    return hashlib.sha256(f"{name}:{identity}".encode()).hexdigest()[:CHAIN_LENGTH]


def is_copy(path: Path, name: str, noted: str) -> bool:
    """Return whether a file is not the one whose hash was noted under a name (`ChainedFile.identity`)."""
    with open(path, "rb") as file:
        return noted not in {file_hash(name, identity) for identity in identities(file.fileno())}


def identities(descriptor: int) -> list[str]:
    """Return the identities of a file, the most precise last: its inode, and the inode with its generation, if any."""
    inode = str(os.fstat(descriptor).st_ino)
    number = _generation(descriptor)
    return [inode] if number is None else [inode, f"{inode}.{number}"]


def _generation(descriptor: int) -> int | None:
    """Return the generation of an open file's inode; None if the file system has none.

    Examples are tmpfs, which uses no inode twice, and network file systems.
    """
    if fcntl is None:
        return None
    number = bytearray(8)
    try:
        fcntl.ioctl(descriptor, _GET_GENERATION, number)
    except OSError:
        return None
    return int.from_bytes(number[:4], sys.byteorder)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def lock(descriptor: int) -> bool:
    """Lock an open file for this process only, without waiting; the system releases the lock when the process dies.

    Returns:
        Whether the lock is held; False if another process holds it.

    Raises:
        OSError: the file system or the operating system has no such locks.
    """
    _require_readable_locks()
    return filelock.lock_descriptor(descriptor, blocking=False)


def is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock of an open file.

    The test takes a shared lock, which filelock does not offer: it needs no write permission, and two tests at the same
    time do not mistake each other for a writer.

    Raises:
        OSError: the file system or the operating system has no such locks.
    """
    _require_readable_locks()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _require_readable_locks() -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system hides a locked file from its readers; use Linux, macOS or WSL")

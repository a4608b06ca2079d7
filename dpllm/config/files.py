"""Write the small files of a run such that a power failure, a full disk or a disk that turns read-only loses none.

The operating system keeps a written and closed file in memory for up to half a minute. If the machine dies in that
time, the file's name is on the disk and its content is not. A run whose plan is an empty file cannot be continued.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)


def write_file(path: str | Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file whole and durably: at every moment its readers, and the disk, have the old content or the new one.

    An existing file keeps its permissions. Of several writers at the same time, the last one wins.

    Args:
        path: the file; its folder exists.
        content: text is encoded as UTF-8.
        mode: permissions of a new file, less those that the process's umask removes.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # hidden: what a crash leaves is no result
    left = memoryview(content.encode("utf-8") if isinstance(content, str) else content)
    with naming(path):
        try:
            with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as file:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            if path.exists():
                with contextlib.suppress(PermissionError):  # of file systems without permissions
                    shutil.copymode(path, half)
            os.replace(half, path)
        except BaseException:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_files(folder: str | Path) -> None:
    """Make the files of a folder durable that a library wrote.

    Raises:
        OSError: the disk failed; the error names the file.
    """
    for path in Path(folder).iterdir():
        if path.is_file():
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
    sync_folder(Path(folder).absolute().parent)


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable, if the system allows that.

    Raises:
        OSError: the disk failed; the error names the folder.
    """
    with naming(folder):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError:
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # of network file systems
                raise
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name a file in an error of the operating system, which has only a descriptor, or a temporary name."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise

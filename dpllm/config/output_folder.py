"""Check that a run can write its results, before any record is read.

The check creates the folder, writes and removes a small file, and removes the folders that it created, so a refused
recipe leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from pathlib import Path

from dpllm.config.values import ConfigError

_PROBE = 64 * 1024
_TRIES = 20
REPORTS = 4 * 1024**2
"""Bytes for ledger, report, pictures and the like."""


def check_output_folder(name: str, path: str | Path, needed: int = REPORTS) -> None:
    """Check that a folder can be created and written to, and that its disk has room.

    Args:
        name: name of the key, for the message.
        path: the folder; it need not exist.
        needed: the fewest bytes that will be written there.

    Raises:
        ConfigError: it is a file, or cannot be made or written to, or the disk has less room.
    """
    for attempt in range(_TRIES):
        try:
            free = _try_out(name, Path(path).expanduser())
            break
        except FileNotFoundError as error:  # removed by another process of the run, which tests it at the same time
            if attempt == _TRIES - 1:
                raise ConfigError(f"{name}={_short(Path(path))} cannot be used: {_reason(error)}") from error
    if free < needed:
        raise ConfigError(
            f"{name}={_short(Path(path))} has {size_in_words(free)} of free space, but the model, its checkpoints and "
            f"its reports need {size_in_words(needed)}: make room there, or name a folder on another disk"
        )


def _try_out(name: str, folder: Path) -> int:
    """Create the folder, write to it, undo both, and return the number of free bytes."""
    made: list[Path] = []
    try:
        if _is_file(folder):
            raise ConfigError(f"{name}={folder} is a file: name a folder, which need not exist yet")
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        for place in reversed(missing):
            try:
                place.mkdir()
                made.append(place)
            except FileExistsError:  # made by another process of the run at this moment
                if _is_file(place):
                    raise
        probe = folder / f".dpllm-{secrets.token_hex(8)}"
        try:
            with open(probe, "wb") as file:
                file.write(b"\0" * _PROBE)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{name}={_short(folder)} cannot be used: {_reason(error)}") from error
    finally:
        for place in reversed(made):
            with contextlib.suppress(OSError):  # another process is using it
                place.rmdir()
    return free


def _is_file(path: Path) -> bool:
    """Whether a path is there and no folder; asked once, since another process may make and remove the folder."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _short(folder: Path) -> str:
    text = str(folder)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _reason(error: OSError) -> str:
    words = {
        errno.ENOSPC: "there is no room left on its disk. Make room, or name a folder on another disk",
        errno.EDQUOT: "the disk quota is used up. Make room, or name a folder on another disk",
        errno.ENAMETOOLONG: "the name is too long. Shorten it",
        errno.EACCES: "this user may not write there. Name a folder that belongs to this user",
        errno.EPERM: "this user may not write there. Name a folder that belongs to this user",
        errno.EROFS: "its disk is read-only. Name a folder on another disk",
        errno.ENOTDIR: "a part of its path is a file. Name a folder",
        errno.EEXIST: "a part of its path is a file. Name a folder",
    }
    return words.get(error.errno or 0, f"{error.strerror or error}. Name a folder that can be written to")


def size_in_words(count: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> size_in_words(3 * 1024**2)
    '3 MiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"

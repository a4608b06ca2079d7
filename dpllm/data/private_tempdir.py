"""A private folder for copies of private text, and the tables written there.

Place in the flow: below everything that reads records. Records and their rows are stored on the disk and mapped into
memory. Only their owner can read the copies, regardless of the umask. They are removed when the process ends, and none
is left in the cache of `datasets`. Each process has its own folder and locks it while it runs. The folder of a process
that was killed is removed by the next process that reads records.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import datasets
import filelock
import pyarrow as pa

PREFIX = "dpllm-private-"
"""Beginning of the name of a process's folder."""

_LOCK = "lock"
_UNLOCKED = f"new-{PREFIX}"  # beginning of the name until the lock is held; such a folder holds only the lock
_folders: dict[int, Path] = {}  # process id -> its folder: a forked child makes its own
_descriptors: list[int] = []


def private_folder() -> Path:
    """Return the private folder of this process (mode 0700), made at the first call.

    It is in the cache folder of `datasets` (``HF_DATASETS_CACHE``), or in the system's temporary folder where that one
    cannot be written.
    """
    own = _folders.get(os.getpid())
    if own is not None and own.is_dir():
        return own
    try:
        folder = _made_in(Path(datasets.config.HF_DATASETS_CACHE))
    except OSError:
        folder = _made_in(Path(tempfile.gettempdir()))
    _folders[os.getpid()] = folder
    return folder


def _made_in(place: Path) -> Path:
    """Make a folder and hold its lock; it is named afterwards, so that no process mistakes it for an abandoned one.

    Raises:
        OSError: the place cannot be written.
    """
    place.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=place))
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: only this process removes the folder
        filelock.lock_descriptor(descriptor, blocking=False)
    _descriptors.append(descriptor)
    return folder.rename(place / folder.name.removeprefix("new-"))


def remove_private_folder() -> None:
    """Remove this process's folder; for a process that ends without the interpreter's normal shutdown."""
    folder = _folders.pop(os.getpid(), None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(remove_private_folder)


def store(
    tables: Iterable[pa.Table], finish: Callable[[pa.Schema], pa.Schema] = lambda schema: schema
) -> datasets.Dataset | None:
    """Write tables one after the other into the private folder, and return them as one memory-mapped data set.

    A table may lack a column, a field, or all values of a column that another table has; the result has all of them,
    filled with nulls.

    Args:
        tables: the tables.
        finish: returns the schema of the data set for one that fits all tables, such as JSON in place of text.

    Returns:
        The data set; None when there is no row.

    Raises:
        pyarrow.ArrowInvalid: two tables hold different kinds of values in one column.
    """
    folder = Path(tempfile.mkdtemp(dir=private_folder()))
    parts: list[tuple[Path, pa.Schema]] = []
    writer = None
    try:
        for table in tables:
            if table.num_rows == 0:
                continue
            if not parts or not parts[-1][1].equals(table.schema):
                if writer is not None:
                    writer.close()
                parts.append((folder / f"part-{len(parts)}.arrow", table.schema))
                writer = _writer(*parts[-1])
            assert writer is not None
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if not parts:
        return None
    whole = pa.unify_schemas([schema for _, schema in parts], promote_options="permissive")
    whole = whole.with_metadata(parts[0][1].metadata)
    finished = finish(whole)
    found = []
    for path, schema in parts:
        if not schema.equals(finished):
            path = _cast(path, whole, finished)
        found.append(datasets.Dataset.from_file(str(path)))
    return found[0] if len(found) == 1 else datasets.concatenate_datasets(found)


def _writer(path: Path, schema: pa.Schema) -> pa.RecordBatchStreamWriter:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    return pa.ipc.new_stream(str(path), schema)


def _cast(path: Path, schema: pa.Schema, finished: pa.Schema) -> Path:
    """Write a part again under a wider schema, and under that of the data set."""
    wider = path.with_suffix(".wide.arrow")
    with pa.memory_map(str(path)) as source, _writer(wider, finished) as writer:
        for batch in _batches(source):
            table = pa.concat_tables(
                [pa.Table.from_batches([batch]), schema.empty_table()], promote_options="permissive"
            )
            writer.write_table(table.select(schema.names).cast(schema).cast(finished))
    path.unlink()
    return wider


def _batches(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(source) as reader:
        yield from reader


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of this user's processes that are gone: nobody holds their locks."""
    user = os.getuid() if hasattr(os, "getuid") else 0  # on Windows every file is of user 0
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != user:
                continue
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                if filelock.lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)

"""Write checkpoints that are either complete or absent.

Saving model, optimizer and scheduler writes many files, often from several processes. They write into
``output_dir/_staging/checkpoint-<step>``. When all have finished, one process publishes: every file is flushed to the
disk, its size and hash are written to a manifest, and one rename gives the folder its name. If the save is interrupted
(a kill, a full disk, a power cut), the previous checkpoint is unchanged.

    folder = prepare_staging(output_dir, step)                  # main process, then a barrier
    with saving(output_dir, step) as folder: ...                # every process writes into `folder`, then a barrier
    publish(folder, checkpoint_folder(output_dir, step))        # main process
    rotate(output_dir, save_total_limit)                        # main process
    checkpoint, passed_over = latest_whole(output_dir)          # on resume

The staging folder holds folders with the Trainer's own names, so that its methods can write there. Its name begins with
an underscore, because the Trainer does not push such names to the Hub (`transformers.Trainer.push_to_hub`). Nothing
here touches the ledger: a step whose checkpoint was lost stays charged.

If the machines do not share a file system, one process on each machine prepares and publishes. The run can then be
resumed from a step whose checkpoint is complete on every machine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

from dpllm.config.files import naming, sync_folder, write_file

MANIFEST_FILE = "checkpoint_manifest.json"
DOCUMENTS = ("README.md", "privacy_report.json", "privacy_report.md", "privacy_report.html", "check_epsilon.py")
"""Files that are rewritten when people add a note; `dpllm.report.verify` checks them against the ledger."""
STAGING_FOLDER = "_staging"

HASH_WHOLE_UP_TO = 2**30
"""Files up to this many bytes are hashed entirely; in larger files, `SAMPLES` blocks are hashed."""
SAMPLES = 64
SAMPLE_BYTES = 2**20

_FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_DEEPSPEED_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_\w+\.pt$")
_FSDP_SHARD = re.compile(r"(?:^|/)__(\d+)_\d+\.distcp$")
_REPLACED = re.compile(r"replaced-checkpoint-(\d+)")
_MAX_THREADS = 8
_LITTLE_ROOM = 2**30  # bytes free; below this, a full disk may be the cause of a failed save


class CheckpointError(ValueError):
    """Error: a checkpoint is not complete, or could not be saved."""


def checkpoint_folder(output_dir: str | Path, step: int) -> Path:
    """Return the folder of a published checkpoint, which is the Trainer's own.

    >>> checkpoint_folder("runs/a", 30).as_posix(), staging_folder("runs/a", 30).as_posix()
    ('runs/a/checkpoint-30', 'runs/a/_staging/checkpoint-30')
    """
    return Path(output_dir) / f"checkpoint-{step}"


def staging_folder(output_dir: str | Path, step: int) -> Path:
    """Return the folder that the processes write a checkpoint into."""
    return Path(output_dir) / STAGING_FOLDER / f"checkpoint-{step}"


def prepare_staging(output_dir: str | Path, step: int) -> Path:
    """Make an empty staging folder, after `discard_staging`. Call it on one process, before the others write.

    Returns:
        The folder.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be made.
    """
    folder = staging_folder(output_dir, step)
    try:
        discard_staging(output_dir)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _not_saved(folder, Path(output_dir), error) from error
    return folder


def discard_staging(output_dir: str | Path) -> None:
    """Remove the leftovers of crashed or failed saves. Call it on one process, while no other writes.

    Also call it after a save has failed on a full disk: the ledger and the report need room for their last lines. A
    checkpoint that was being replaced when the process died gets its name back.

    Raises:
        OSError: a file or folder cannot be removed or renamed.
    """
    for folder in _folders(Path(output_dir) / STAGING_FOLDER):
        replaced = _REPLACED.fullmatch(folder.name)
        if replaced and not (final := checkpoint_folder(output_dir, int(replaced[1]))).exists():
            _rename(folder, final)
        elif replaced or _CHECKPOINT.fullmatch(folder.name):
            _remove(folder)


@contextlib.contextmanager
def saving(output_dir: str | Path, step: int) -> Iterator[Path]:
    """Yield the staging folder of a step, and turn any failure inside into an error with a remedy.

    Every failure is translated, not only those of the file system: on a full disk `torch.save` raises a RuntimeError
    about stream positions, safetensors raises its own error, and torch.distributed.checkpoint raises one that is not an
    Exception.

    Raises:
        CheckpointError: saving failed; the message gives the reason, the file, the free space of the disk, and the last
            complete checkpoint. The cause is chained.
    """
    folder = staging_folder(output_dir, step)
    try:
        yield folder
    except (KeyboardInterrupt, SystemExit, GeneratorExit, CheckpointError):
        raise
    except BaseException as error:
        raise _not_saved(folder, Path(output_dir), error) from error


def publish(
    staging: str | Path,
    final: str | Path,
    hash_whole_up_to: int = HASH_WHOLE_UP_TO,
    ledger: Mapping[str, Any] | None = None,
    made_by: tuple[int, str] | tuple[int, str, str] | None = None,
) -> None:
    """Make a complete staging folder the checkpoint `final`. Call it on one process, after all have written.

    Guarantee: at every moment `final` is either unchanged or complete and on the disk. An existing checkpoint of that
    name is moved into the staging folder, and deleted when the new one has its name. If the process dies in between,
    `latest_whole` finds the old checkpoint there.

    Trade-off: reading all files back for their hashes takes about a second per GB and processor. A file above
    `hash_whole_up_to` is therefore represented by its size and by 64 blocks of 1 MiB spread evenly over it, the first
    and the last block included. This finds a file that was cut off, and a hole of more than 1/63 of its size; it finds
    a single byte flipped later only with a chance of 64 MiB over the file's size. The plan, the ledger and the
    Trainer's state are always small enough to be hashed entirely.

    Args:
        staging: the folder written into. It no longer exists afterwards: it is renamed or, after a failure, deleted to
            free its space.
        final: ``output_dir/checkpoint-<step>``, on the same file system.
        hash_whole_up_to: bytes.
        ledger: the head of the run's ledger, for the manifest (`dpllm.privacy.run_folder`).
        made_by: the number of processes, the class of their engine and, if it is known, the accelerate config that
            selects it ("zero3"), for the manifest.

    Raises:
        CheckpointError: the folder is missing, empty, holds a link, or lacks the shards of a process; or the file
            system failed, for instance because the disk is full. The message names the file and the checkpoint to
            resume from.
    """
    staging, final = Path(staging), Path(final)
    names = _files_of(staging)
    if not names:
        raise CheckpointError(
            f"{staging} holds no file, so there is no checkpoint to publish. Save into it first, and call publish when "
            "every process has done so"
        )
    size, engine, *config = made_by or (1, "")
    if absent := ranks_without_shards(names, size):
        raise CheckpointError(
            f"{staging} lacks the shards of rank(s) {_listed(absent)} of {size} ({engine}), so the checkpoint could "
            "not be resumed. These ranks may have written to a local disk: set train.output_dir to a folder on a file "
            "system that all machines share"
        )
    try:
        entries = _in_parallel(lambda name: _seal(staging / name, hash_whole_up_to), names)
        for folder in sorted({parent for name in names for parent in (staging / name).parents}, reverse=True):
            if folder == staging or staging in folder.parents:
                sync_folder(folder)
        # A counter, because a clock can be set back; only the order of publication depends on it.
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "published": 1 + max(map(_published, _checkpoints(final.parent)), default=0),
            "files": dict(zip(names, entries, strict=True)),
        }
        if made_by is not None:
            manifest["made_by"] = {"processes": size, "engine": engine} | ({"config": config[0]} if config else {})
        if ledger is not None:
            manifest["ledger"] = dict(ledger)
        write_file(staging / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
        _put(staging, final)
    except OSError as error:
        failure = _not_saved(staging, final.parent, error, final.name)
        with contextlib.suppress(OSError):
            _remove(staging)
        raise failure from error


def verify(checkpoint: str | Path) -> None:
    """Check a checkpoint against its manifest; files that were added later are ignored, and so are `DOCUMENTS`.

    Raises:
        CheckpointError: there is no manifest or it cannot be read, or a file is missing or differs in length or
            contents; the message names the file.
    """
    checkpoint = Path(checkpoint)
    manifest = _read_manifest(checkpoint)
    entries = {name: entry for name, entry in manifest["files"].items() if name not in DOCUMENTS}
    found = differing(checkpoint, entries)
    for name, what in found.items():
        ranks = sorted({rank for other in found if (rank := rank_of_shard(other)) is not None})
        made = manifest.get("made_by", {})
        if ranks and made:
            what += f"; files of rank(s) {_listed(ranks)} of {made['processes']} ({made['engine']}) are not as saved"
        raise _not_whole(checkpoint / name, what)


def rank_of_shard(name: str) -> int | None:
    """Return the rank that wrote a shard, from the name that DeepSpeed or FSDP2 gave it; None for other files.

    >>> rank_of_shard("global_step2/zero_pp_rank_3_mp_rank_00_optim_states.pt"), rank_of_shard("model/__1_0.distcp")
    (3, 1)
    """
    match = _DEEPSPEED_SHARD.search(name) or _FSDP_SHARD.search(name)
    return None if match is None else int(match[1])


def ranks_without_shards(names: Sequence[str], size: int) -> list[int]:
    """Return the ranks of a sharded save that have no file.

    Only DeepSpeed's shards are checked: under FSDP2 a rank that holds no part of the weights writes no file.
    """
    ranks = {int(match[1]) for name in names if (match := _DEEPSPEED_SHARD.search(name))}
    return [rank for rank in range(size) if rank not in ranks] if ranks else []


def named_files(checkpoint: str | Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's manifest by file name.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    return dict(_read_manifest(Path(checkpoint))["files"])


def made_by(checkpoint: str | Path) -> Mapping[str, Any]:
    """Return what a checkpoint's manifest says about its engine: "processes", "engine" and, if it was known, "config".

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    made: Mapping[str, Any] = _read_manifest(Path(checkpoint)).get("made_by", {})
    return made


def ledger_of(checkpoint: str | Path) -> Mapping[str, Any] | None:
    """Return the head of the ledger in a checkpoint's manifest; None if the manifest has none.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    ledger: Mapping[str, Any] | None = _read_manifest(Path(checkpoint)).get("ledger")
    return ledger


def seal(folder: str | Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Flush files to the disk and return the size and hash of each by name; large files are sampled as in `publish`."""
    folder = Path(folder)
    entries = _in_parallel(lambda name: _seal(folder / name, HASH_WHOLE_UP_TO), list(names))
    return dict(zip(names, entries, strict=True))


def differing(folder: str | Path, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the files that differ from their description by `seal` or a manifest, each with the difference.

    Sizes are compared first; files are only read when all sizes agree.

    Args:
        folder: the folder of the files.
        entries: name to {"size", "hashed", "sha256"}.
    """
    folder = Path(folder)
    found = {}
    for name, entry in entries.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            found[name] = f"is missing ({error.strerror})"
            continue
        if size != entry["size"]:
            found[name] = f"has {size} bytes instead of {entry['size']}"
    if found:
        return found
    names = list(entries)
    digests = _in_parallel(lambda name: _digest_of(folder / name, entries[name]["hashed"] == "whole"), names)
    for name, digest in zip(names, digests, strict=True):
        if digest != entries[name]["sha256"]:
            found[name] = "is not what was saved: its hash differs"
    return found


def latest_whole(output_dir: str | Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Find the checkpoint to resume from. Nothing is changed, so any process may call it.

    Returns:
        The checkpoint of the latest step that verifies, or None; and the folders that were skipped, with the reason:
        unfinished saves first, then later checkpoints that are not complete, from the latest on. A checkpoint whose
        replacement was interrupted is found inside the staging folder, to which it was moved.
    """
    output_dir = Path(output_dir)
    passed_over, candidates = [], []
    for folder in _folders(output_dir / STAGING_FOLDER):
        if match := _REPLACED.fullmatch(folder.name):
            candidates.append((int(match[1]), 0, folder))
        elif _CHECKPOINT.fullmatch(folder.name):
            passed_over.append((folder, "unfinished: the process that wrote it ended before it was published"))
    for folder in _folders(output_dir):
        if match := _CHECKPOINT.fullmatch(folder.name):
            candidates.append((int(match[1]), 1, folder))
    for _, _, folder in sorted(candidates, reverse=True):
        try:
            verify(folder)
        except CheckpointError as error:
            passed_over.append((folder, str(error)))
        else:
            return folder, passed_over
    return None, passed_over


def rotate(output_dir: str | Path, limit: int) -> None:
    """Delete all but the most recently published checkpoints. Call it on one process, after `publish`.

    The Trainer's own rotation sorts by step when times are close together, so it may keep a damaged checkpoint of a
    later step and delete the complete one that was made after resuming from an earlier step. Here the order of
    publication counts, which is a number in each manifest and does not depend on the clock.

    Args:
        output_dir: output folder of the run.
        limit: number of checkpoints to keep; at least 1.

    Raises:
        ValueError: the limit is below 1.
        CheckpointError: the file system failed.
    """
    if limit < 1:
        raise ValueError(f"limit={limit} would delete every checkpoint: keep at least 1")
    for folder in sorted(_checkpoints(output_dir), key=_order, reverse=True)[limit:]:
        # Rename it first, so that a kill during the deletion leaves no incomplete checkpoint under its name.
        doomed = staging_folder(output_dir, int(folder.name.removeprefix("checkpoint-")))
        try:
            doomed.parent.mkdir(exist_ok=True)
            _rename(folder, doomed)
            _remove(doomed)
        except OSError as error:
            raise CheckpointError(f"{folder} could not be deleted to enforce limit={limit}: {error}") from error


def discard_start(output_dir: str | Path) -> None:
    """Delete ``checkpoint-0``, the start of a run, when a later checkpoint or the model has replaced it.

    Call it on one process. If there is none, nothing happens; a folder of that name without a manifest is left alone.

    Raises:
        CheckpointError: the file system failed.
    """
    start, doomed = checkpoint_folder(output_dir, 0), staging_folder(output_dir, 0)
    if not (start / MANIFEST_FILE).is_file():
        return
    try:
        if doomed.exists():
            _remove(doomed)
        doomed.parent.mkdir(exist_ok=True)
        _rename(start, doomed)  # a kill during the deletion leaves no incomplete checkpoint under its name
        _remove(doomed)
        with contextlib.suppress(OSError):  # not empty
            doomed.parent.rmdir()
    except OSError as error:
        raise CheckpointError(f"{start} could not be deleted: {error}") from error


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def _checkpoints(output_dir: str | Path) -> list[Path]:
    return [folder for folder in _folders(Path(output_dir)) if _CHECKPOINT.fullmatch(folder.name)]


def _order(folder: Path) -> tuple[int, int]:
    """Return the sort key of a checkpoint: the number of its publication, and its time if it has no number."""
    manifest = folder / MANIFEST_FILE
    return _published(folder), manifest.stat().st_mtime_ns if manifest.is_file() else 0


def _published(folder: Path) -> int:
    """Return the number in a checkpoint's manifest; 0 for a checkpoint without a readable manifest or number."""
    try:
        number = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))["published"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return number if isinstance(number, int) else 0


def _put(staging: Path, final: Path) -> None:
    """Rename a sealed folder to its final name; an existing folder of that name is moved aside first."""
    if not final.exists():
        _rename(staging, final)
        return
    aside = final.parent / STAGING_FOLDER / f"replaced-{final.name}"
    if aside.exists():
        _remove(aside)
    aside.parent.mkdir(exist_ok=True)
    _rename(final, aside)
    try:
        _rename(staging, final)
    except OSError:
        _rename(aside, final)
        raise
    # The new checkpoint is in place; a remainder of the old one is removed before the next save.
    shutil.rmtree(aside, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    sync_folder(target.parent)
    sync_folder(source.parent)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        return
    for path in folder.rglob("*"):
        # A writer that failed may still hold its file open; a deleted file then still takes space, an empty one does
        # not.
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            os.truncate(path, 0)
    shutil.rmtree(folder)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _files_of(staging: Path) -> list[str]:
    """Return the files below a folder as relative names with forward slashes, sorted, without the manifest."""
    if not staging.is_dir():
        raise CheckpointError(f"{staging} is not a folder, so there is nothing to publish. Save into it first")
    names = []
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise CheckpointError(
                f"{path} is neither a file nor a folder, but a checkpoint must contain its own copy of every file. "
                "Save the file itself"
            )
        if path.is_file() and name != MANIFEST_FILE:
            names.append(name)
    return names


def _in_parallel(function: Any, names: list[str]) -> list[Any]:
    # Hashing and flushing release the interpreter's lock, so threads help when there are several large files.
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, names))


def _seal(path: Path, hash_whole_up_to: int) -> dict[str, Any]:
    """Flush a file to the disk, and return its entry in the manifest."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        whole = size <= max(hash_whole_up_to, SAMPLE_BYTES)
        return {"size": size, "hashed": "whole" if whole else "samples", "sha256": _digest(file, size, whole)}


def _digest_of(path: Path, whole: bool) -> str:
    try:
        with path.open("rb") as file:
            return _digest(file, os.fstat(file.fileno()).st_size, whole)
    except OSError as error:
        raise _not_whole(path, f"cannot be read ({error.strerror})") from error


def _digest(file: BufferedReader, size: int, whole: bool) -> str:
    if whole:
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for number in range(SAMPLES):
        file.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _not_whole(path, f"is missing ({error.strerror}): it is written last") from error
    except ValueError as error:
        raise _not_whole(path, f"is damaged ({error})") from error
    files = manifest.get("files") if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else None
    if not isinstance(files, dict) or not files or not all(_is_entry(*item) for item in files.items()):
        raise _not_whole(path, f"is not a manifest of format {_FORMAT}")
    return dict(manifest)


def _is_entry(name: str, entry: Any) -> bool:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return False
    if (
        not isinstance(entry, dict)
        or entry.keys() != {"size", "hashed", "sha256"}
        or not isinstance(entry["size"], int)
    ):
        return False
    return entry["hashed"] == "whole" or (entry["hashed"] == "samples" and entry["size"] > SAMPLE_BYTES)


def _not_whole(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}. This checkpoint is not complete; resume from a different one")


def innermost_cause(error: BaseException) -> BaseException:
    """Return the first error in a chain, which names the file; the later ones only name the surrounding operation.

    torch.distributed.checkpoint stores the ranks' errors in ``failures``, each with its traceback; an error that rank 0
    received from another rank is not a cause in Python's sense.

    >>> outer = RuntimeError("saving failed")
    >>> outer.__cause__ = PermissionError(13, "Permission denied", "a/__1_0.distcp")
    >>> innermost_cause(outer)
    PermissionError(13, 'Permission denied')
    """
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        failures = getattr(error, "failures", None)
        first = next(iter(failures.values()), None) if isinstance(failures, Mapping) else None
        first = first[0] if isinstance(first, tuple) and first else first
        hidden = None if error.__suppress_context__ else error.__context__
        inner = first if isinstance(first, BaseException) else error.__cause__ or hidden
        error = error if inner is None else inner
    return error


def _not_saved(staging: Path, output_dir: Path, error: BaseException, name: str | None = None) -> CheckpointError:
    """Return the error with the cause, the file, the free space and the checkpoint to resume from."""
    error = innermost_cause(error)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
    last = None if getattr(error, "filename", None) else _last_written(staging)
    where = f"; the last file written is {last}" if last else ""
    free = shutil.disk_usage(output_dir).free if output_dir.is_dir() else 0
    # Libraries that write files raise their own errors on a full disk; a disk with enough space is not the cause.
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or free < _LITTLE_ROOM
    room = f"{free / 1e6:,.1f} MB are free on this disk. Free space, or fix" if full else "Fix"
    whole, _ = latest_whole(output_dir)
    remedy = f"resume from {whole}, which is complete" if whole else "there is no complete earlier checkpoint"
    return CheckpointError(
        f"{name or staging.name} could not be saved ({reason}{where}). {room} the cause that the error names; "
        f"{remedy}. Steps taken since then stay charged"
    )


def _last_written(folder: Path) -> Path | None:
    """Return the file that was written last: the one that failed or the one before it, if the error names none."""
    newest: tuple[int, Path | None] = (-1, None)
    for parent, _, names in os.walk(folder):
        for path in (Path(parent) / name for name in names):
            with contextlib.suppress(OSError):  # another process may be removing it
                newest = max(newest, (path.stat().st_mtime_ns, path), key=lambda pair: pair[0])
    return newest[1]

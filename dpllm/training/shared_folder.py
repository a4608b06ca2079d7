"""Check that all processes see the same output folder, before a ledger is opened there.

If each machine has a separate folder of the same name, rank 0 writes the ledger and every machine writes its shards
into different folders: checkpoints look complete on each machine, but none of them can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

from dpllm.config import ConfigError
from dpllm.engines.processes import Processes

_WAIT = 20.0  # seconds that a network file system may take to show a new file to another machine
_PAUSE = 0.2


def require_shared_folder(folder: str | Path, processes: Processes) -> None:
    """Check that every process can read the files that rank 0 writes; all processes call this together.

    Rank 0 creates the folder, writes a random number into a file, and deletes the file afterwards. Nothing else is
    changed.

    Args:
        folder: the output folder of a run.
        processes: all processes of the run.

    Raises:
        ConfigError: some processes do not see the file; the message names them and their machines.
        OSError: rank 0 cannot write into the folder; on every process.
    """
    if processes.size == 1:
        return
    folder = Path(folder)
    made: list[Path] = []

    def write() -> tuple[str, str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        name, nonce = f".shared-folder-{secrets.token_hex(8)}", secrets.token_hex(16)
        with (folder / name).open("x", encoding="ascii") as file:
            made.append(folder / name)
            file.write(nonce)
            file.flush()
            os.fsync(file.fileno())
        return name, nonce, str(folder)

    name, nonce, told = processes.from_main(write)
    try:
        answers = processes.gather((_reads(folder / name, nonce), socket.gethostname()))
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        shown = ", ".join(blind[:8]) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
        raise ConfigError(
            f"The output folder {told} of rank 0 (on {answers[0][1]}) is not the one that {shown} sees, so files "
            "written by rank 0 cannot be read there. Set train.output_dir to one folder on "
            "a file system that all machines share, the same on every process; nothing was charged"
        )


def _reads(path: Path, nonce: str) -> bool:
    """Return whether the file becomes visible in time with the right content."""
    end = time.monotonic() + _WAIT
    while True:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == nonce:
                return True
            os.listdir(path.parent)  # makes a network file system refresh its view
        # If the folder itself does not exist, waiting for a cache does not help.
        if time.monotonic() >= end or not _may_appear(path.parent):
            return False
        time.sleep(_PAUSE)


def _may_appear(folder: Path) -> bool:
    """Return whether the folder is on a file system whose view may be behind; a local disk shows a file at once."""
    try:
        kinds = {fields[1]: fields[2] for fields in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    except (OSError, IndexError):
        return True
    here = folder.resolve()
    mount = next((str(parent) for parent in (here, *here.parents) if str(parent) in kinds), "/")
    return kinds.get(mount, "") not in {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "vfat"}

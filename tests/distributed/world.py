"""Runs a function of this test suite in several processes that form one gloo group, and brings its results back."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import children

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of torch.distributed, accelerate and DeepSpeed; one thread each, for two cores."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        **tools(),
    }


def tools() -> dict[str, str]:
    """For the operation that DeepSpeed builds: ninja on the path, and a separate folder for each environment."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
    }


def run(folder: Path, target: str, size: int = 2, fresh: bool = False, **arguments: Any) -> list[Any]:
    """Call ``module:function`` with the arguments in every process.

    Args:
        folder: for arguments, results and output.
        target: module and function.
        size: number of processes.
        fresh: start an interpreter for each process, with a seed of its own for Python's hashes, instead of a fork.
        arguments: of the function.

    Returns:
        The result of each rank, in order.

    Raises:
        AssertionError: a process failed; the message has its output.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.pickle").write_bytes(pickle.dumps(arguments))
    processes: list[children.Process] = []
    for rank in range(size):
        env, path = environment(rank, size, port), folder / f"log.{rank}"
        if not fresh:
            processes.append(children.Forked(main, target, folder, env=env, log=path, cwd=ROOT))
            continue
        with open(path, "wb") as log:
            command = [sys.executable, "-m", "tests.distributed.world", target, str(folder)]
            processes.append(children.Child(command, env=env, stdout=log, stderr=log, cwd=ROOT))
    codes = children.wait_all(processes)
    logs = "\n".join((folder / f"log.{rank}").read_text(errors="replace")[-4000:] for rank in range(size))
    assert codes == [0] * size, f"exit codes {codes}\n{logs}"
    return [pickle.loads((folder / f"result.{rank}").read_bytes()) for rank in range(size)]


def main(target: str, folder: Path) -> None:
    """One process."""
    arguments: Mapping[str, Any] = pickle.loads((folder / "arguments.pickle").read_bytes())
    module, _, name = target.partition(":")
    dist.init_process_group("gloo")
    result = getattr(importlib.import_module(module), name)(**arguments)
    (folder / f"result.{dist.get_rank()}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Without the interpreter's own end, under which gloo's threads that wait for it abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

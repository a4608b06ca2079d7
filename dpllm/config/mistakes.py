"""Print an error: one line for a mistake of the user, a traceback for a bug.

A mistake in a recipe, in the data or on the disk is one line, ``error: ...``, with exit code 2. Any other error is a
bug: one line with the error, the whole traceback, and exit code 1.
"""

from __future__ import annotations

import errno
import io
import sys
import traceback
from collections.abc import Callable

MISTAKE, FAULT = 2, 1
"""Exit codes."""

# Errors of this library whose texts include the remedy.
_WITH_REMEDY = ("MicrobatchTooLargeError", "OtherProcessError", "UpdateError")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# By name: the libraries need not be loaded for an error that they did not raise.
_OTHER_MISTAKES = {
    "SafetensorError": "a file of weights (.safetensors) is damaged or incomplete. Copy or download the model again",
    "StrictDataclassError": "a value of the model's configuration (config.json, model.config) cannot be used",
    "StrictDataclassFieldValidationError": "a value of the model's configuration (config.json, model.config) cannot "
    "be used",
    "DistNetworkError": "another process of the run cannot be reached: it has ended, or MASTER_ADDR and MASTER_PORT "
    "are not those of this run. Look for the cause in the output of the other processes",
    "TransportError": "a server such as the Hub cannot be reached. Check network and proxy, or give local files",
    "OutOfMemoryError": "the GPU's memory is used up. Lower microbatch.tokens or train.per_device_train_batch_size",
}


def words_of(error: BaseException) -> str | None:
    """Return one line for the user, or None where the error is a fault of the program.

    >>> words_of(ValueError("train.max_steps must be at least 1, got 0"))
    'train.max_steps must be at least 1, got 0'
    >>> words_of(KeyError("rank")) is None
    True
    """
    if isinstance(error, OSError):
        return _words_of_system(error)
    if isinstance(error, ValueError):
        return _one_line(error)
    if isinstance(error, ArithmeticError):
        return (
            f"a number is too large or too small to compute with ({_one_line(error)}): look at the ε, σ, δ, clip norm, "
            "sampling rate and steps that were given"
        )
    if type(error).__name__ in _WITH_REMEDY:
        return _one_line(error)
    if isinstance(error, RuntimeError) and "out of memory" in str(error):  # of CUDA, Triton or an accelerator
        return f"{_OTHER_MISTAKES['OutOfMemoryError']} ({_one_line(error)[:200]})"
    if isinstance(error, RuntimeError) and "connectFullMesh" in str(error):  # of gloo
        return (
            "the processes cannot connect to each other. After a restart by torchrun (--max_restarts), PyTorch's gloo "
            "looks for the processes of the attempt before: start the whole command again, with "
            "train.resume_from_checkpoint=auto. On machines with several networks, set GLOO_SOCKET_IFNAME to the one "
            f"between them ({_one_line(error)[:200]})"
        )
    if isinstance(error, RuntimeError) and "EADDRINUSE" in str(error):  # of torch's store
        return (
            "another program has the port at which the processes of the run would meet: give another one "
            f"(--main_process_port of accelerate, MASTER_PORT) ({_one_line(error)[:200]})"
        )
    for kind in type(error).__mro__:
        if kind.__name__ in _OTHER_MISTAKES:
            return f"{_OTHER_MISTAKES[kind.__name__]} ({_one_line(error)[:200]})"
    return None


def print_any_character() -> None:
    """Let the screen accept every character; one that its encoding lacks (ε in Latin-1) is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tell(error: BaseException, write: Callable[[str], None] | None = None) -> int:
    """Print an error for the user, and return the exit code.

    Args:
        error: the error that ended the program.
        write: called with each text. None: prints to the error stream.
    """
    write = write or (lambda text: print(text, file=sys.stderr))
    words = words_of(error)
    if words is not None:
        write(f"error: {words}")
        return int(getattr(error, "exit_code", MISTAKE))  # of another process, which ended this one
    write(
        f"error: this is a fault of dpllm or of a library under it, not a mistake of yours ({type(error).__name__}: "
        f"{_one_line(error)[:200]}). Please report it on the issue tracker of dpllm with the lines below"
    )
    write("".join(traceback.format_exception(error)).rstrip())
    return FAULT


def _words_of_system(error: OSError) -> str:
    """Name the file, and for a full disk the remedy."""
    if error.errno is None:
        return _one_line(error)
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _DISK_FULL:
        return (
            f"{where}there is no room left on the disk. Make room in train.output_dir (or in the folder of the cache, "
            "HF_HOME), then start again; a run that has a checkpoint goes on with train.resume_from_checkpoint=true"
        )
    if error.errno == errno.EROFS:
        return (
            f"{where}the file system is read-only. A disk that fails turns read-only (look at the system's log): have "
            "it mended, or name a folder elsewhere, then start again; a run that has a checkpoint goes on with "
            "train.resume_from_checkpoint=true"
        )
    return f"{where}{error.strerror or _one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

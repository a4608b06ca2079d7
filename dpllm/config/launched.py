"""What passes between a launcher and the processes it starts: numbers in the environment, and exit codes.

accelerate, torchrun and DeepSpeed number their processes by environment variables, and exit with code 1 whatever the
exit code of a process is. The processes of `dpllm train` therefore write their exit codes to a file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from dpllm.config.values import ConfigError, shown

EXIT_CODES = "DPLLM_EXIT_CODES"
"""Environment variable with the file in which processes note their exit codes."""
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def process_number(name: str, default: int = 0, environment: Mapping[str, str] | None = None) -> int:
    """Return a number that a launcher gives its processes, such as RANK; ``default`` without a launcher.

    Args:
        name: of the environment variable.
        default: the number without a launcher.
        environment: environment variables. None: those of this process.

    Raises:
        ConfigError: it is no number.

    >>> process_number("RANK", environment={"RANK": "3"})
    3
    """
    text = (os.environ if environment is None else environment).get(name, str(default))
    if not (text.strip().isascii() and text.strip().removeprefix("-").isdecimal()):
        raise ConfigError(
            f"the environment variable {name} is {shown(text)}, and a launcher sets it to a number: remove it (unset "
            f"{name}), or start with dpllm train, accelerate launch or torchrun, which set it"
        )
    return int(text)


def check_numbers() -> None:
    """Check the numbers of a launcher, so that no later part stumbles over them.

    Raises:
        ConfigError: one is no number.
    """
    for name in _NUMBERS:
        process_number(name)


def note_exit_code(code: int) -> None:
    """Append this process's exit code to the file of `dpllm train`; without such a file, do nothing."""
    path = os.environ.get(EXIT_CODES)
    if path:
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(f"{code}\n")


def noted_exit_code(path: Path, code: int) -> int:
    """Return the exit code of a launcher's processes: the least that they noted, so that a fault is not hidden.

    Args:
        path: the file in which they noted it; it need not exist.
        code: that of the launcher, which is kept if nothing was noted.
    """
    with contextlib.suppress(OSError):
        noted = [int(line) for line in path.read_text(encoding="utf-8").split()]
        return min(noted, default=code)
    return code

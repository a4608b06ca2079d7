"""A mistake is one line; a fault of the program shows its traceback."""

from __future__ import annotations

import errno

import pytest

from dpllm.config import ConfigError
from dpllm.mistakes import FAULT, MISTAKE, tell, words_of


class SafetensorError(Exception):
    """As the library's, by name."""


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (ConfigError("train.max_steps must be\nat least 1"), "train.max_steps must be at least 1"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room left on the disk. Make room in train.output_dir"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "runs/a: there is no room left"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), "runs/a: Permission denied"),
        (OSError("no such model"), "no such model"),
        (OverflowError("math range error"), "too large or too small"),
        (ZeroDivisionError("division by zero"), "too large or too small"),
        (SafetensorError("header too large"), "damaged or incomplete"),
    ],
)
def test_a_mistake_is_one_line(error: Exception, match: str) -> None:
    """Exit code 2, and nothing but the line."""
    written: list[str] = []
    assert tell(error, written.append) == MISTAKE
    assert len(written) == 1 and written[0].startswith("error: ") and "\n" not in written[0] and match in written[0]


@pytest.mark.parametrize("error", [KeyError("rank"), TypeError("unsupported"), AssertionError("attach() comes first")])
def test_a_fault_shows_its_traceback(error: Exception) -> None:
    """A line says that it is no mistake of the user, and nothing is hidden."""
    written: list[str] = []
    try:
        raise error
    except Exception as caught:
        assert words_of(caught) is None
        assert tell(caught, written.append) == FAULT
    assert "report it" in written[0] and "Traceback" in written[1] and "test_mistakes" in written[1]

"""A mistake is one line; a fault of the program shows its traceback."""

from __future__ import annotations

import errno
import io
import sys

import pytest
from torch.distributed import DistNetworkError

from dpllm.config import ConfigError
from dpllm.config.mistakes import FAULT, MISTAKE, print_any_character, tell, words_of


class SafetensorError(Exception):
    """An error with the name of the library's error."""


class TransportError(Exception):
    """That of huggingface_hub's library for HTTP, by its name."""


class ConnectError(TransportError):
    """There is no network."""


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (ConfigError("train.max_steps must be\nat least 1"), "train.max_steps must be at least 1"),
        (OSError(errno.ENOSPC, "No space left on device"), "no room left on the disk. Make room in train.output_dir"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "runs/a: there is no room left"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), "runs/a: Permission denied"),
        (ZeroDivisionError("division by zero"), "too large or too small"),
        (SafetensorError("header too large"), "damaged or incomplete"),
        (ConnectError("[Errno -2] Name or service not known"), "cannot be reached"),
        (OSError(errno.EROFS, "Read-only file system", "runs/a"), "runs/a: the file system is read-only"),
        (DistNetworkError("failed to listen on port 1 (EADDRINUSE)"), "--main_process_port"),
        (DistNetworkError("Failed to recv, got 0 bytes"), "output of the other processes"),
        (RuntimeError("Gloo connectFullMesh failed: Connection refused"), "start the whole command again"),
    ],
)
def test_a_mistake_is_one_line(error: Exception, match: str) -> None:
    """The exit code is 2, and nothing but the line is written."""
    written: list[str] = []
    assert tell(error, written.append) == MISTAKE
    assert len(written) == 1 and written[0].startswith("error: ") and "\n" not in written[0] and match in written[0]


def test_a_screen_without_the_letter_epsilon_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older clusters have LANG=en_US, whose encoding is Latin-1."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    print_any_character()
    print("ε = 8, müde", flush=True)
    assert written.getvalue().decode("latin-1").strip() == r"\u03b5 = 8, müde"


@pytest.mark.parametrize("error", [KeyError("rank"), TypeError("unsupported"), AssertionError("attach() comes first")])
def test_a_fault_shows_its_traceback(error: Exception) -> None:
    """A line says that the user made no mistake, and the whole traceback follows."""
    written: list[str] = []
    try:
        raise error
    except Exception as caught:
        assert words_of(caught) is None
        assert tell(caught, written.append) == FAULT
    assert "report it" in written[0] and "Traceback" in written[1] and "test_mistakes" in written[1]

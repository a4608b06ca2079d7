"""Check that a resumed run reads the rows with which it was started.

Place in the flow: between the rows and the ledger, at each start. ε covers the people in one data set. A run that is
resumed on other rows has trained on two data sets, but its ledger would cover only one. When a run starts, a digest of
the rows' contents is written to the ledger; when it resumes, the digest is compared. The digest is an HMAC-SHA256 under
a random key, which is kept in a file of the run's folder and is not for release: without the key, nobody can use the
ledger to test whether a guessed text is in the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Protocol

from dpllm.privacy.ledger import LedgerError, read_ledger

KEY_FILE = "not_for_release/data_key.txt"
"""Relative to the run's folder; readable by its owner only."""
DIGEST = "digest of the training rows, under a key that is not released"
"""Name of the fact in ledger and report."""
_KEY_BYTES = 32


class _Facts(Protocol):
    path: Path

    def append_fact(self, name: str, value: str | int | float) -> None: ...
    def append_open_point(self, text: str) -> None: ...


def compare_rows(ledger: str | Path, contents: str) -> str | None:
    """Compare the rows with those of the run's last start, before its ledger is opened; on rank 0.

    Args:
        ledger: ledger of the run that is to be resumed.
        contents: hash of the rows (`dpllm.training.checks.agreement.contents`).

    Returns:
        An open point if they cannot be compared; None if they are the same.

    Raises:
        LedgerError: they are other rows, or the ledger is damaged.
    """
    ledger = Path(ledger)
    noted = read_ledger(ledger).notes.facts.get(DIGEST)
    if not noted:
        return _point("its ledger holds no digest of them")
    key = _read_key(ledger.parent / KEY_FILE)
    if key is None:
        return _point(f"{KEY_FILE} is missing or damaged")
    if not hmac.compare_digest(str(noted[-1]), _digest(key, contents)):
        raise LedgerError(
            f"The rows differ from those at the start of the run in {ledger.parent}: their digest "
            f"is {_digest(key, contents)[:12]}, and the ledger has {str(noted[-1])[:12]}. The ε of a run covers one "
            "data set. Resume with the data, the tokenizer and the data section of the first start, or start a new run "
            "in another folder, which is accounted for separately"
        )
    return None


def remember_rows(ledger: _Facts, contents: str, point: str | None = None) -> None:
    """Note the digest of the rows in an open ledger; on rank 0.

    Args:
        ledger: ledger of the run.
        contents: hash of the rows.
        point: the open point of `compare_rows`. The key is always replaced, so that a later resume can compare.

    Raises:
        OSError: the key cannot be written.
    """
    path = ledger.path.parent / KEY_FILE
    key = secrets.token_bytes(_KEY_BYTES)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    ledger.append_fact(DIGEST, _digest(key, contents))
    if point is not None:
        ledger.append_open_point(point)


def _read_key(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return key if len(key) == _KEY_BYTES else None


def _digest(key: bytes, contents: str) -> str:
    return hmac.new(key, contents.encode(), hashlib.sha256).hexdigest()


def _point(why: str) -> str:
    return (
        f"The run was resumed, and its rows could not be compared with those of its first start: {why}. Make sure that "
        "they are the same data set; ε is about one."
    )

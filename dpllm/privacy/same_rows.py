"""Check that a resumed run reads the same rows as at its start, and that a later count reads the training's records.

ε covers the people in one data set. A run that is resumed on different rows would have trained on two data sets, but
its ledger would cover only one. When a run starts, a digest of the rows' contents is written to the ledger; when it
resumes, the digest is compared. The digest is an HMAC-SHA256 with a random key, which is stored in the run's folder in
a file that must not be released: without the key, nobody can use the ledger to test whether a guessed text is in the
data.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Protocol

from dpllm.config.files import write_file
from dpllm.privacy.ledger import LedgerError, read_ledger
from dpllm.privacy.private_folder import PRIVATE_FOLDER, private_path

KEY_FILE = f"{PRIVATE_FOLDER}/data_key.txt"
"""Relative to the run's folder; only its owner can read it."""
DIGEST = "digest of the training rows, under a key that is not released"
"""Name of the fact in ledger and report."""
RECORDS_DIGEST = "digest of the training records, under a key that is not released"
"""Name of the fact about the records from which the rows were made."""
_KEY_BYTES = 32


class _Facts(Protocol):
    path: Path

    def append_fact(self, name: str, value: str | int | float) -> None: ...
    def append_open_point(self, text: str) -> None: ...


def compare_rows(ledger: str | Path, contents: str) -> str | None:
    """Compare the rows with those of the run's last start, before its ledger is opened; on rank 0.

    Args:
        ledger: ledger of the run that will be resumed.
        contents: hash of the rows (`dpllm.training.checks.agreement.contents`).

    Returns:
        An open point if they cannot be compared; None if they are the same.

    Raises:
        LedgerError: the rows differ, or the ledger is damaged.
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
            f"is {_digest(key, contents)[:12]}, but the ledger has {str(noted[-1])[:12]}. A run's ε covers only one "
            "data set. Resume with the data, the tokenizer and the data section of the first start, or start a new run "
            "in a different folder, which is accounted for separately"
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
    ledger.append_fact(DIGEST, _digest(_new_key(ledger), contents))
    if point is not None:
        ledger.append_open_point(point)


def remember_records(ledger: _Facts, contents: str) -> None:
    """Note the digest of the records in the open ledger of a new run, after that of its rows; on rank 0.

    Args:
        ledger: ledger of the run.
        contents: hash of the records (`dpllm.data.records.contents_of`).

    Raises:
        OSError: the key cannot be written.
    """
    key = _read_key(ledger.path.parent / KEY_FILE) or _new_key(ledger)
    ledger.append_fact(RECORDS_DIGEST, _digest(key, contents))


def compare_records(ledger: str | Path, contents: str | None) -> str | None:
    """Compare records with those of a training run, before they are read for another purpose.

    Args:
        ledger: ledger of the training run.
        contents: hash of the records; None: they have none.

    Returns:
        An open point if they cannot be compared; None if they are the same.

    Raises:
        LedgerError: the records differ, or the ledger is damaged.
    """
    ledger = Path(ledger)
    facts, key = read_ledger(ledger).notes.facts, _read_key(ledger.parent / KEY_FILE)
    noted, starts = facts.get(RECORDS_DIGEST), facts.get(DIGEST, [])
    if noted and key is not None and contents is not None and len(starts) <= 1:  # otherwise the key is a later one
        if hmac.compare_digest(str(noted[0]), _digest(key, contents)):
            return None
        raise LedgerError(
            f"the records differ from those of the training in {ledger.parent}: their digest is "
            f"{_digest(key, contents)[:12]}, but the ledger has {str(noted[0])[:12]}. Their joint ε covers only the "
            "same people. Restore the training's records; nothing was charged"
        )
    why = "its ledger holds no digest of them" if not noted else f"{KEY_FILE} is missing, damaged or of a later start"
    return (
        f"Private records were read again, and could not be compared with those of the training: {why}. Make sure that "
        "they are the same records; ε covers only one data set."
    )


def _new_key(ledger: _Facts) -> bytes:
    path = private_path(ledger.path.parent, KEY_FILE)
    key = secrets.token_bytes(_KEY_BYTES)
    path.unlink(missing_ok=True)  # whatever its permissions were
    write_file(path, key.hex() + "\n", 0o600)
    return key


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
        "they are the same data set; ε covers only one."
    )

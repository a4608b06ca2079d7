"""Tests of dpllm.privacy.chained_file: lines that cannot be edited, lost or moved unseen, in a file of one writer."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from dpllm.privacy.chained_file import ChainedFile, chained_lines, is_copy, lines_of
from tests.mutations import kills


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of three lines."""
    with ChainedFile.make(tmp_path / "lines.jsonl") as file:
        for number in range(3):
            file.append({"kind": "line", "number": number})
    return tmp_path / "lines.jsonl"


def read(path: Path) -> list[bool]:
    return [line.whole for line in chained_lines(lines_of(path.read_bytes()))]


def test_the_bytes_are_those_of_every_ledger_so_far(path: Path) -> None:
    """JSON as `json.dumps` writes it, and 16 digits of the SHA-256 of the line before and this one."""
    chain, lines = hashlib.sha256(b"dpllm privacy ledger, format 1").hexdigest()[:16], []
    for number in range(3):
        body = json.dumps({"kind": "line", "number": number})
        chain = hashlib.sha256((chain + body).encode()).hexdigest()[:16]
        lines.append(f'{body[:-1]}, "chain": "{chain}"}}\n')
    assert path.read_text() == "".join(lines)
    found = list(chained_lines(lines_of(path.read_bytes())))
    assert [json.loads(line.body)["number"] for line in found] == [0, 1, 2] and found[-1].chain == chain


@kills(
    "a line of a chained file may be edited",
    "dpllm/privacy/chained_file.py",
    """        whole = line[-_SUFFIX_LENGTH:] == f', "chain": "{after}"}}'""",
    "        whole = True",
)
@pytest.mark.parametrize(
    ("edit", "whole"),
    [
        (lambda lines: [lines[0], lines[1].replace("1", "7", 1), lines[2]], [True, False, False]),
        (lambda lines: [lines[0], lines[2]], [True, False]),
        (lambda lines: [lines[1], lines[0], lines[2]], [False, True, False]),
        (lambda lines: [*lines, "{}"], [True, True, True, False]),
        (lambda lines: [*lines[:2], lines[2][:-9]], [True, True, False]),
        (lambda lines: [lines[0], lines[1].replace("line", "liné"), lines[2]], [True, False, False]),
    ],
    ids=["edited", "lost", "moved", "added", "torn", "damaged"],
)
def test_what_does_not_continue_the_chain_is_named(path: Path, edit, whole: list[bool]) -> None:
    """Every later line too, until it is put right."""
    path.write_text("\n".join(edit(path.read_text().splitlines())) + "\n", encoding="utf-8")
    assert read(path) == whole


def test_one_process_writes_it_and_a_copy_is_known(path: Path, tmp_path: Path) -> None:
    """The lock is of the file itself; the name of the inode is under a key, and a rename keeps it."""
    with ChainedFile.take(path) as file:
        noted = file.identity("key")
        with pytest.raises(ValueError, match="another process is writing"):
            ChainedFile.take(path)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    path.rename(tmp_path / "renamed")
    assert not is_copy(tmp_path / "renamed", "key", noted) and is_copy(tmp_path / "copy", "key", noted)
    with pytest.raises(FileExistsError):
        ChainedFile.make(tmp_path / "renamed")


def test_a_file_that_was_changed_meanwhile_gets_no_further_line(path: Path) -> None:
    """Cut, replaced, removed, or closed by ourselves."""
    with ChainedFile.take(path) as file:
        size = path.stat().st_size
        chain = list(chained_lines(lines_of(path.read_bytes())))[-1].chain
        file.go_on(chain, size)
        os.truncate(path, size - 1)
        with pytest.raises(ValueError, match="wrote to it or cut it"):
            file.append({})
        file.go_on(chain, size - 1)
        path.rename(path.with_name("other"))
        with pytest.raises(ValueError, match="was removed"):
            file.append({})
        path.touch()
        with pytest.raises(ValueError, match="replaced by another file"):
            file.append({})
    with pytest.raises(ValueError, match="is closed"):
        file.append({})


def test_after_a_failed_write_nothing_more_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line may be on the disk in part; whoever opens the file again decides what it was."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ChainedFile.take(path) as file:
        file.go_on(list(chained_lines(lines_of(path.read_bytes())))[-1].chain, path.stat().st_size)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="space left"):
                file.append({})
        with pytest.raises(ValueError, match="incomplete line"):
            file.append({})

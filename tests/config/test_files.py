"""A small file of a run is on the disk, whole, when the run goes on; a disk that fails is an error with its name."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpllm.config import PrivacyConfig
from dpllm.config.files import sync_files, sync_folder, write_file
from dpllm.config.mistakes import words_of
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import make_plan
from tests.mutations import kills


def test_a_file_keeps_its_permissions_and_a_link_stays_one(tmp_path):
    """A new file has those that are asked for."""
    path, link = tmp_path / "file", tmp_path / "link"
    write_file(path, "ε = 8\n", 0o600)
    assert path.read_bytes() == "ε = 8\n".encode() and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, b"other")
    assert link.is_symlink() and path.read_bytes() == b"other" and path.stat().st_mode & 0o777 == 0o640
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]


@pytest.fixture
def on_disk(monkeypatch):
    """What a disk has that lost power: the files and folders that were flushed, each as it was then."""
    found: dict[int, bytes] = {}
    flush = os.fsync

    def fsync(descriptor):
        flush(descriptor)
        inode = os.fstat(descriptor).st_ino
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            found[inode] = " ".join(sorted(os.listdir(path))).encode()
        else:
            with open(path, "rb") as file:
                found[inode] = file.read()

    monkeypatch.setattr(os, "fsync", fsync)
    return lambda path: found.get(os.stat(path).st_ino)


@kills(
    "a power failure leaves a run with an empty plan",
    "dpllm/config/files.py",
    "                os.fsync(file.fileno())\n            if path",
    "            if path",
)
def test_the_plan_and_the_ledger_of_a_run_survive_a_power_failure(on_disk, tmp_path):
    """Their contents and their names, before the first step is charged."""
    plan = make_plan(PrivacyConfig(noise_multiplier=2.0, clip_norm=1.0, expected_batch_size=10), 500, 3)
    with Ledger.create(tmp_path / "privacy_ledger.jsonl", plan):
        plan.save(tmp_path / "privacy_plan.json")
    assert on_disk(tmp_path / "privacy_plan.json") == (tmp_path / "privacy_plan.json").read_bytes()
    assert on_disk(tmp_path / "privacy_ledger.jsonl") == (tmp_path / "privacy_ledger.jsonl").read_bytes()
    assert on_disk(tmp_path) == b"privacy_ledger.jsonl privacy_plan.json"


def test_several_writers_of_a_file_leave_one_whole_content(tmp_path):
    """As of two terminals; a reader never sees a part of it, and nothing else is left."""
    path, contents = tmp_path / "file", [letter * 100_000 for letter in "abcd"]
    write_file(path, contents[0])

    def write(content):
        for _ in range(20):
            write_file(path, content)
            assert path.read_text() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert path.read_text() in contents and list(tmp_path.iterdir()) == [path]


def test_files_of_a_library_are_flushed(on_disk, tmp_path):
    """Those of the public start; folders in it are not read."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "runs").mkdir()
    sync_files(tmp_path)
    assert on_disk(tmp_path / "model.safetensors") == b"weights" and on_disk(tmp_path) == b"model.safetensors runs"
    assert tmp_path.name.encode() in on_disk(tmp_path.parent).split()


@pytest.mark.parametrize(("number", "says"), [(errno.EROFS, "is read-only"), (errno.ENOSPC, "no room left"), (5, "")])
def test_a_disk_that_fails_is_named_and_the_file_stays(number, says, tmp_path, monkeypatch):
    """The error has the file, although the system names only a descriptor; nothing half is left."""
    path = tmp_path / "file"
    write_file(path, "first")

    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) as caught:
        write_file(path, "second")
    words = words_of(caught.value)
    assert str(path) in words and says in words
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_cannot_flush_folders_is_no_error(tmp_path, monkeypatch):
    """As some network file systems; a disk error is one."""

    def fail(descriptor):
        raise OSError(failing[0], "")

    monkeypatch.setattr(os, "fsync", fail)
    for number in (errno.EINVAL, errno.ENOTSUP):
        failing = [number]
        sync_folder(tmp_path)
    failing = [errno.EIO]
    with pytest.raises(OSError, match=tmp_path.name):
        sync_folder(tmp_path)

"""Tests of dpllm.privacy.checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dpllm.privacy.checkpoints import (
    MANIFEST_FILE,
    STAGING_FOLDER,
    CheckpointError,
    checkpoint_folder,
    discard_staging,
    discard_start,
    latest_whole,
    made_by,
    prepare_staging,
    publish,
    rotate,
    saving,
    staging_folder,
    verify,
)
from tests import children

FILES = {
    "model.safetensors": 300_000,
    "trainer_state.json": 500,
    "rng_state_0.pth": 2_000,
    "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt": 50_000,
    "pytorch_model_fsdp_0/__0_0.distcp": 40_000,
    "pytorch_model_fsdp_0/.metadata": 300,
    "empty": 0,
}


def stage(output_dir: Path, step: int, seed: int = 0) -> Path:
    """Write the files of a checkpoint as several processes leave them, without publishing."""
    folder = prepare_staging(output_dir, step)
    for number, (name, size) in enumerate(FILES.items()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes([(step + seed + number) % 256]) * size)
    return folder


def save(output_dir: Path, step: int, seed: int = 0) -> Path:
    final = checkpoint_folder(output_dir, step)
    publish(stage(output_dir, step, seed), final)
    return final


def run(script: str, *arguments: Path) -> str:
    """Run a program of its own, which sees nothing of this one."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return children.run(command).stdout


def test_published_checkpoint_holds_every_file(tmp_path: Path) -> None:
    """Publishing renames: nothing is lost, nothing is left behind, and the manifest names each file."""
    final = save(tmp_path, 7)
    manifest = json.loads((final / MANIFEST_FILE).read_text())
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == FILES
    assert all((final / name).stat().st_size == size for name, size in FILES.items())
    assert not list((tmp_path / STAGING_FOLDER).iterdir())
    verify(final)
    assert latest_whole(tmp_path) == (final, [])


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, each folder and the manifest are flushed before the rename, and the two parents after it."""
    staging, final = stage(tmp_path, 7), checkpoint_folder(tmp_path, 7)
    fsync, rename, calls = os.fsync, os.rename, []

    def flushing(descriptor: int) -> None:
        calls.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def renaming(source: Path, target: Path) -> None:
        calls.append(0)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "rename", renaming)
    publish(staging, final)
    at = calls.index(0)
    content = {path.stat().st_ino: path.name for path in [final, *final.rglob("*")]}
    assert set(calls[:at]) == set(content) and len(content) == len(FILES) + 4
    assert calls[at - 2] == (final / MANIFEST_FILE).stat().st_ino and calls[at - 1] == final.stat().st_ino
    assert set(calls[at + 1 :]) == {tmp_path.stat().st_ino, (tmp_path / STAGING_FOLDER).stat().st_ino}


def test_latest_is_by_step_and_names_the_unfinished(tmp_path: Path) -> None:
    """Step 10 comes after step 9, other folders do not count, and a staging folder is reported, not used."""
    assert latest_whole(tmp_path / "nowhere") == (None, [])
    for step in (9, 10):
        save(tmp_path, step)
    for name in ("checkpoint-99x", "best-checkpoint-99", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-98").write_text("a file")
    staging = stage(tmp_path, 11)
    whole, passed_over = latest_whole(tmp_path)
    assert whole == tmp_path / "checkpoint-10"
    assert passed_over == [(staging, "unfinished: the process that wrote it ended before it was published")]


DAMAGE = [
    (
        lambda folder: os.truncate(folder / "model.safetensors", 299_999),
        r"model\.safetensors has 299999 bytes instead of",
    ),
    (lambda folder: os.truncate(folder / "pytorch_model_fsdp_0" / ".metadata", 299), "has 299 bytes instead of 300"),
    (lambda folder: flip(folder / "model.safetensors", 150_000), r"is not what was saved: its hash differs"),
    (lambda folder: (folder / "rng_state_0.pth").unlink(), r"rng_state_0\.pth is missing \(No such file"),
]


@pytest.mark.parametrize(("damage", "match"), DAMAGE, ids=["torn", "torn within", "flipped", "deleted"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, damage, match: str) -> None:
    """A file that lost its end is named with both lengths; with no other checkpoint there is none to use."""
    before, damaged = save(tmp_path, 1), save(tmp_path, 2)
    damage(damaged)
    with pytest.raises(CheckpointError, match=match):
        verify(damaged)
    whole, [(folder, reason)] = latest_whole(tmp_path)
    assert whole == before and folder == damaged and re.search(match, reason)
    shutil.rmtree(before)
    assert latest_whole(tmp_path)[0] is None


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_large_file_is_sampled(tmp_path: Path) -> None:
    """Above the limit, the ends and a hole are found; a byte between the samples is the stated price."""
    size = 200 * 2**20
    staging = prepare_staging(tmp_path, 1)
    with (staging / "optimizer.pt").open("wb") as file:
        file.truncate(size)  # sparse: zeros that take no room
    publish(staging, final := checkpoint_folder(tmp_path, 1), hash_whole_up_to=2**20)
    entry = json.loads((final / MANIFEST_FILE).read_text())["files"]["optimizer.pt"]
    assert entry["size"] == size and entry["hashed"] == "samples"
    path = final / "optimizer.pt"
    flip(path, 2**21)  # between the first sample and the second, which starts after 3.2 MiB
    verify(final)
    for position in (0, 2**20 - 1, size - 2**20, size - 1):
        flip(path, position)
        with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
            verify(final)
        flip(path, position)
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(b"\1" * (size // 63))
    with pytest.raises(CheckpointError, match=r"optimizer\.pt"):
        verify(final)
    os.truncate(path, size - 1)
    with pytest.raises(CheckpointError, match="bytes instead"):
        verify(final)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, r"checkpoint_manifest\.json is missing"),
        ('{"format": 1, "fil', r"checkpoint_manifest\.json is damaged"),
        ("[]", "not a manifest of format 1"),
        ('{"format": 2, "files": {"a": {"size": 0, "hashed": "whole", "sha256": ""}}}', "not a manifest of format 1"),
    ],
)
def test_damaged_manifest(tmp_path: Path, text: str | None, match: str) -> None:
    """Without a manifest that can be trusted a folder is not whole, whoever made it."""
    final = save(tmp_path, 1)
    (final / MANIFEST_FILE).unlink()
    if text is not None:
        (final / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        verify(final)
    assert latest_whole(tmp_path)[0] is None


def test_files_added_later_are_left_alone(tmp_path: Path) -> None:
    """A note put into a checkpoint does not make it torn."""
    final = save(tmp_path, 1)
    (final / "note.txt").write_text("the good one")
    assert latest_whole(tmp_path) == (final, [])


def test_publishing_nothing_is_refused(tmp_path: Path) -> None:
    """No folder, an empty folder and a link are mistakes of the caller, and do not change the earlier checkpoint."""
    before = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="is not a folder"):
        publish(staging_folder(tmp_path, 2), checkpoint_folder(tmp_path, 2))
    staging = prepare_staging(tmp_path, 2)
    with pytest.raises(CheckpointError, match="holds no file"):
        publish(staging, checkpoint_folder(tmp_path, 2))
    (staging / "model.safetensors").symlink_to(before / "model.safetensors")
    with pytest.raises(CheckpointError, match="every file"):
        publish(staging, checkpoint_folder(tmp_path, 2))
    assert latest_whole(tmp_path)[0] == before


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """The second save of a step wins, and no trace of the first stays."""
    save(tmp_path, 3, seed=1)
    final = save(tmp_path, 3, seed=2)
    assert (final / "trainer_state.json").read_bytes()[0] == 3 + 2 + 1
    assert latest_whole(tmp_path) == (final, []) and not list((tmp_path / STAGING_FOLDER).iterdir())


def test_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the new folder cannot get its name, the old one has it again."""
    final, rename = save(tmp_path, 3, seed=1), os.rename
    staging = stage(tmp_path, 3, seed=2)

    def failing(source: Path, target: Path) -> None:
        if Path(source) == staging:
            raise OSError(18, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="checkpoint-3"):
        publish(staging, final)
    assert latest_whole(tmp_path) == (final, [])
    assert (final / "trainer_state.json").read_bytes()[0] == 3 + 1 + 1


def test_only_remnants_of_saves_are_discarded(tmp_path: Path) -> None:
    """Preparing a save removes the leftovers of a crash, and no file of anybody else."""
    stage(tmp_path, 4)
    (tmp_path / STAGING_FOLDER / "mine").mkdir()
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / STAGING_FOLDER / "checkpoint-5").symlink_to(outside)
    folder = prepare_staging(tmp_path, 6)
    assert {path.name for path in (tmp_path / STAGING_FOLDER).iterdir()} == {"mine", "checkpoint-6"}
    assert not list(folder.iterdir()) and (outside / "kept").exists()
    discard_staging(tmp_path)
    assert not folder.exists()


def test_rotation_keeps_what_was_published_last(tmp_path: Path) -> None:
    """A later step that is torn goes before the checkpoint that was made after it."""
    for number, step in enumerate((1, 9, 3, 4)):
        final = save(tmp_path, step)
        os.utime(final / MANIFEST_FILE, ns=(0, 10**9 * (number + 1)))
    (tmp_path / "checkpoint-7").mkdir()
    rotate(tmp_path, 3)
    assert checkpoints_in(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-9"]
    rotate(tmp_path, 1)
    assert checkpoints_in(tmp_path) == ["checkpoint-4"]
    rotate(tmp_path / "empty", 1)
    with pytest.raises(ValueError, match="limit=0"):
        rotate(tmp_path, 0)


def test_rotation_does_not_go_by_the_clock(tmp_path: Path) -> None:
    """A clock that was put back between two checkpoints does not cost the later one."""
    for number, seconds in ((1, 9_000), (2, 8_000), (3, 10)):
        final = save(tmp_path, number)
        os.utime(final / MANIFEST_FILE, ns=(0, seconds * 10**9))
        rotate(tmp_path, 1)
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [final.name]


def test_rotation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be deleted is named."""
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        rotate(tmp_path, 1)
    assert latest_whole(tmp_path)[0] == tmp_path / "checkpoint-2"


def checkpoints_in(folder: Path) -> list[str]:
    """Names of all checkpoints, the staging folder's included."""
    return sorted(path.name for path in folder.rglob("*checkpoint-*") if path.is_dir())


# Dies just before the n-th call that changes the disk, for every n, until a run gets through.
CRASHES = """
    import itertools, os, signal, sys
    from pathlib import Path
    from dpllm.privacy.checkpoints import checkpoint_folder, latest_whole, prepare_staging, publish

    CALLS = ("fsync", "rename", "unlink", "rmdir", "mkdir")

    def save(out, step, text, after=None):
        staging = prepare_staging(out, step)
        (staging / "shard").mkdir()
        for name in ("model", "shard/a", "shard/b"):
            (staging / name).write_text(text)
        if after is not None:
            left = itertools.count(after, -1)
            for call in CALLS:
                setattr(os, call, dying(getattr(os, call), left))
        publish(staging, checkpoint_folder(out, step))

    def dying(real, left):
        def call(*arguments, **options):
            if next(left) <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        return call

    for replace in (False, True):
        for number in itertools.count():
            out = Path(sys.argv[1]) / f"{replace}-{number}"
            save(out, 1, "first")
            if replace:
                save(out, 2, "old")
            child = os.fork()
            if child == 0:
                save(out, 2, "new", after=number)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            whole, _ = latest_whole(out)
            found = whole.joinpath("model").read_text()
            prepare_staging(out, 3)
            again, passed_over = latest_whole(out)
            left = sorted(path.name for path in out.rglob("checkpoint-*") if path.is_dir())
            print(replace, status, found, again.name, again.joinpath("model").read_text(), *left)
            if status == 0:
                break
"""


def test_killed_before_any_call_that_changes_the_disk(tmp_path: Path) -> None:
    """Wherever the process dies, a whole checkpoint is found, and the next save tidies up around the same one."""
    lines = [line.split() for line in run(CRASHES, tmp_path).splitlines()]
    fresh = [line[1:] for line in lines if line[0] == "False"]
    again = [line[1:] for line in lines if line[0] == "True"]
    killed = str(int(signal.SIGKILL))
    for outcomes, before in ((fresh, ("first", "checkpoint-1")), (again, ("old", "checkpoint-2"))):
        assert len(outcomes) > 8 and [status for status, *_ in outcomes] == [killed] * (len(outcomes) - 1) + ["0"]
        for _, found, name, found_again, *_ in outcomes:
            assert found == found_again and (found, name) in (before, ("new", "checkpoint-2"))
        assert {found for _, found, *_ in outcomes} == {before[0], "new"}
    assert {tuple(names) for _, found, _, _, *names in fresh if found == "first"} == {("checkpoint-1", "checkpoint-3")}
    assert {tuple(names) for *_, a, b, c in again for names in [(a, b, c)]} == {
        ("checkpoint-1", "checkpoint-2", "checkpoint-3")
    }


def test_killed_from_outside_while_publishing(tmp_path: Path) -> None:
    """A SIGKILL while a huge file is being hashed leaves the checkpoint before and an unfinished folder."""
    before = save(tmp_path, 1)
    staging = stage(tmp_path, 2)
    with (staging / "optimizer.pt").open("wb") as file:
        file.truncate(64 * 2**30)  # sparse; hashing it takes minutes
    script = f"""
        from pathlib import Path
        from dpllm.privacy.checkpoints import publish
        print("publishing", flush=True)
        publish({str(staging)!r}, {str(tmp_path / "checkpoint-2")!r}, hash_whole_up_to=2**50)
    """
    process = children.Child([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "publishing\n"
    time.sleep(0.2)
    process.kill()
    assert process.returncode == -signal.SIGKILL
    whole, [(folder, reason)] = latest_whole(tmp_path)
    assert whole == before and folder == staging and reason.startswith("unfinished")


def test_file_too_large_while_publishing(tmp_path: Path) -> None:
    """When the manifest cannot be written, the error names it and the checkpoint to resume from, which stays whole."""
    before, staging = save(tmp_path, 1), stage(tmp_path, 2)
    script = """
        import resource, sys
        from dpllm.privacy.checkpoints import CheckpointError, publish
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
        try:
            publish(sys.argv[1], sys.argv[2])
        except CheckpointError as error:
            print(error)
    """
    text = run(script, staging, tmp_path / "checkpoint-2")
    assert text.startswith("checkpoint-2 could not be saved (OSError: [Errno 27] File too large")
    assert str(staging / MANIFEST_FILE) in text and f"resume from {before}, which is complete" in text
    assert latest_whole(tmp_path) == (before, []) and not staging.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("mounting a small disk takes root; the file-size limit above is the same error without it")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def torch_file(path: Path) -> None:
    torch.save(torch.zeros(1_000_000), path)


def safetensors_file(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(1_000_000)}, path)


def plain_file(path: Path) -> None:
    path.write_bytes(bytes(4_000_000))


@pytest.mark.parametrize(
    ("writer", "error", "last"),
    [
        (torch_file, "RuntimeError: ", "optimizer.pt"),
        (safetensors_file, "SafetensorError: ", "trainer_state.json"),  # it removes its own file when it fails
        (plain_file, "OSError: [Errno 28] No space left", "optimizer.pt"),
    ],
)
def test_disk_full_while_saving(small_disk: Path, writer, error: str, last: str) -> None:
    """For any error of the writing library, the error names the last file and the checkpoint to resume from."""
    before = save(small_disk, 1)
    prepare_staging(small_disk, 2)
    with pytest.raises(CheckpointError) as caught, saving(small_disk, 2) as folder:
        (folder / "trainer_state.json").write_text("{}")
        time.sleep(0.02)  # the clock of the file system is coarse
        writer(folder / "optimizer.pt")
    for words in (
        f"checkpoint-2 could not be saved ({error}",
        f"the last file written is {folder / last}",
        "MB are free on this disk",
        f"resume from {before}, which is complete",
    ):
        assert words in str(caught.value)
    assert caught.value.__cause__ is not None
    assert latest_whole(small_disk)[0] == before
    discard_staging(small_disk)
    assert shutil.disk_usage(small_disk).free > 1_000_000


def test_errors_while_saving_name_what_there_is(tmp_path: Path) -> None:
    """Without an earlier checkpoint the error says so; errors that are no Exception are translated, Ctrl-C is not."""

    class Distributed(BaseException):
        """As torch.distributed.checkpoint's CheckpointException."""

    message = r"\(Distributed: two ranks failed\).* no complete earlier checkpoint"
    with pytest.raises(CheckpointError, match=message), saving(tmp_path, 2):
        raise Distributed("two ranks failed")
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), saving(tmp_path, 2):
            raise kind
    with pytest.raises(CheckpointError, match=r"^as it is$"), saving(tmp_path, 2):
        raise CheckpointError("as it is")


SHARDS = ["global_step2/zero_pp_rank_{}_mp_rank_00_optim_states.pt", "global_step2/mp_rank_00_model_states.pt"]


def shards(output_dir: Path, ranks: list[int]) -> Path:
    staging = prepare_staging(output_dir, 2)
    (staging / "global_step2").mkdir()
    for rank in ranks:
        (staging / SHARDS[0].format(rank)).write_text(f"shard {rank}")
    (staging / SHARDS[1]).write_text("model")
    return staging


def test_a_checkpoint_that_lacks_the_shards_of_a_process_is_not_published(tmp_path: Path) -> None:
    """As where each machine writes to a disk of its own under one name."""
    with pytest.raises(CheckpointError, match="DeepSpeedZero"):
        publish(shards(tmp_path, [0, 2]), checkpoint_folder(tmp_path, 2), made_by=(4, "DeepSpeedZero"))
    assert not checkpoint_folder(tmp_path, 2).exists()


def test_a_resume_that_finds_shards_missing_names_their_processes(tmp_path: Path) -> None:
    """The manifest records how many processes wrote it, under which engine."""
    final = checkpoint_folder(tmp_path, 2)
    publish(shards(tmp_path, [0, 1, 2, 3]), final, made_by=(4, "DeepSpeedZero", "zero3"))
    assert made_by(final) == {"processes": 4, "engine": "DeepSpeedZero", "config": "zero3"}
    verify(final)
    for rank in (1, 3):
        (final / SHARDS[0].format(rank)).unlink()
    with pytest.raises(CheckpointError, match="DeepSpeedZero"):
        verify(final)


def test_a_folder_of_that_name_that_is_no_start_of_a_run_is_left_alone(tmp_path):
    """A user's own files are not those of an earlier run."""
    own = tmp_path / "checkpoint-0" / "mine.txt"
    own.parent.mkdir()
    own.write_text("mine", encoding="utf-8")
    discard_start(tmp_path)
    assert own.read_text(encoding="utf-8") == "mine"


class Wrapped(BaseException):
    """As torch.distributed.checkpoint raises it: the errors of the ranks, each with a traceback, in ``failures``."""

    def __init__(self, failures):
        super().__init__(f"CheckpointException ranks:{set(failures)} " + "Traceback of a thread pool, " * 30)
        self.failures = failures


def test_the_cause_of_a_failed_save_is_named_and_not_the_work_around_it(tmp_path):
    """A rank may not write its shard: three errors say where the work was, and the innermost one says why."""
    prepare_staging(tmp_path, 2)
    refused = PermissionError(13, "Permission denied", str(tmp_path / "__1_0.distcp"))
    inner = RuntimeError("the thread pool failed")
    inner.__cause__ = refused
    with (
        pytest.raises(CheckpointError, match=r"PermissionError.*Permission denied.*__1_0\.distcp"),
        saving(tmp_path, 2),
    ):
        raise Wrapped({1: (inner, None)})

"""A checkpoint of the Trainer has its name when all files are written, and otherwise leaves nothing."""

import pytest

from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import CheckpointError, publish
from dpllm.training.trainer import StagedCheckpoints


def test_files_are_written_beside_the_name_and_old_checkpoints_go_last(tmp_path):
    """While it is written, the Trainer's own folder is the staging folder."""
    staged, seen = StagedCheckpoints(Processes()), []
    for step in (1, 2, 3):

        def save(step=step):
            folder = staged.output_dir(str(tmp_path))
            seen.append(folder)
            (tmp_path / "_staging" / f"checkpoint-{step}" / "weights").write_text("w")

        staged.write(tmp_path, step, save, publish, limit=2)
        assert staged.output_dir(str(tmp_path)) == str(tmp_path)
    assert seen == [str(tmp_path / "_staging")] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_a_failed_save_publishes_nothing(tmp_path):
    """The error is the reason, the half-written folder is gone, and the next save is not a staged one by mistake."""
    staged, published = StagedCheckpoints(Processes()), []

    def save():
        (tmp_path / "_staging" / "checkpoint-1" / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        staged.write(tmp_path, 1, save, lambda *folders: published.append(folders), limit=None)
    assert not published and not staged.is_writing
    assert not (tmp_path / "checkpoint-1").exists() and not list(tmp_path.rglob("weights"))

"""Checkpoints of the Trainer, which are written completely or not at all, by all processes together.

Place in the flow: between `dpllm.DPTrainer` and the files (`dpllm.privacy.checkpoints`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import (
    STAGING_FOLDER,
    CheckpointError,
    checkpoint_folder,
    discard_staging,
    prepare_staging,
    rotate,
    saving,
    staging_folder,
)


class StagedCheckpoints:
    """Writes each checkpoint into a staging folder first, and renames it when all processes have written their files.

    Attributes:
        is_writing: whether a checkpoint is being written into the staging folder.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        """Begin without a checkpoint."""
        self._processes = processes
        self.is_writing = False

    def output_dir(self, output: str) -> str:
        """Return the folder in which the Trainer makes a checkpoint's folder: ``output``, or its staging folder."""
        return str(Path(output) / STAGING_FOLDER) if self.is_writing else output

    def write(
        self,
        output: Path,
        step: int,
        save: Callable[[], None],
        publish: Callable[[Path, Path], None],
        limit: int | None,
    ) -> None:
        """Save a checkpoint. Called by all processes together.

        Args:
            output: folder of the run.
            step: number of the Trainer's step.
            save: saves this process's files into the staging folder.
            publish: makes the staging folder the checkpoint; called on rank 0 only.
            limit: the most checkpoints that are kept. None: all.

        Raises:
            CheckpointError: a process could not write its files; the staging folder is removed.
        """
        self._processes.from_main(lambda: prepare_staging(output, step))
        failure: CheckpointError | None = None
        self.is_writing = True
        try:
            with saving(output, step):
                save()
        except CheckpointError as error:
            failure = error
        finally:
            self.is_writing = False
        self._processes.from_main(lambda: None)
        failures = [error for error in self._processes.gather(failure) if error is not None]
        if failures:
            self._processes.from_main(lambda: discard_staging(output))
            raise failures[0]

        def finish() -> None:
            publish(staging_folder(output, step), checkpoint_folder(output, step))
            if limit:
                rotate(output, limit)
            with contextlib.suppress(OSError):  # not empty: it holds an older checkpoint to be restored
                (output / STAGING_FOLDER).rmdir()

        self._processes.from_main(finish)

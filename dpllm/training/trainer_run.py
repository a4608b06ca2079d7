"""One private run as the Trainer drives it: from its open ledger to its report.

Place in the flow: between `dpllm.DPTrainer`, whose ``train()`` makes it, and `dpllm.training.run.PrivateRun`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from dpllm.engines.deepspeed_checkpoint import complete_load, prepare_to_load
from dpllm.engines.fragments import require_whole_saves
from dpllm.engines.weights import NonfiniteSteps
from dpllm.privacy.checkpoints import publish
from dpllm.privacy.identity import COMPLETED, STOPPED_AT_BUDGET
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.not_for_release import DIAGNOSTICS_FILE
from dpllm.report.statement import ReleaseNotes, write_report
from dpllm.training.prepared import Prepared
from dpllm.training.rows import LossOf
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import Progress, StepDiagnostics, unseen

logger = logging.get_logger(__name__)


class LogicalBatches:
    """The Trainer's data loader: each item is the set of units drawn for one private step.

    One pass is 1/q steps, the number in which every unit is expected to take part once, so that ``epoch`` in the logs
    keeps its meaning.
    """

    def __init__(self, run: PrivateRun, dataset: Any) -> None:
        """Load the draws of this run."""
        self.dataset, self._run = dataset, run

    def __len__(self) -> int:
        """Steps per expected pass over the units."""
        return max(1, round(1 / self._run.plan.sampling_rate))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Draw one pass; the draws of all passes are independent. It ends when all steps are charged."""
        if self._run.ledger.num_steps >= self._run.steps_planned:
            return
        for unit_ids in self._run.draws(len(self)):
            yield {"unit_ids": torch.from_numpy(unit_ids)}


class TrainerRun:
    """The run of one ``train()``.

    Attributes:
        private: the run.
        is_attached: whether the model is hooked.
        began: the time at which it was hooked, after the callbacks at the start of training. None: not yet.
        averaging: the average of the weights that is released. None: those after the last step are.

    Args:
        prepared: guarantee, data and plan.
        ledger: the open ledger.
        checkpoint: the checkpoint from which the run continues. None: it starts.
    """

    def __init__(self, prepared: Prepared, ledger: SharedLedger, checkpoint: Path | None) -> None:
        """Make the run, without a model."""
        self._prepared, self._checkpoint = prepared, checkpoint
        self.private, self.averaging = prepared.run(ledger), prepared.averaging()
        self.is_attached = False
        self.began: float | None = None
        self._nonfinite = NonfiniteSteps(prepared.plan.expected_batch_size)

    @property
    def ledger(self) -> SharedLedger:
        """The ledger that the run charges."""
        return self.private.ledger

    @property
    def is_complete(self) -> bool:
        """Whether all steps of all starts are charged."""
        return self.ledger.num_steps >= self.private.steps_planned

    # ------------------------------------------------------------------- model

    def prepare_to_load(self, deepspeed_config: Any) -> None:
        """Prepare DeepSpeed's configuration for the checkpoint's number of processes, if the run continues one."""
        if self._checkpoint:
            prepare_to_load(self._checkpoint, deepspeed_config, self._prepared.processes)

    def attach(self, model: Any, optimizer: Any, by_deepspeed: bool, loss_of: LossOf, lr_scheduler: Any = None) -> None:
        """Hook a model once; later calls do nothing.

        Args:
            model: the distributed model.
            optimizer: its optimizer.
            by_deepspeed: whether DeepSpeed has loaded the checkpoint.
            loss_of: as for `PrivateRun.step`.
            lr_scheduler: its scheduler, with the state of the checkpoint.
        """
        if self.is_attached:
            return
        self.began = time.time()
        if self._checkpoint and by_deepspeed:
            complete_load(model, self._checkpoint, self._prepared.processes)
        if self.averaging is not None and by_deepspeed:
            require_whole_saves(model)
        self._prepared.attach(self.private, model, optimizer, self.averaging, loss_of, lr_scheduler)
        if self.averaging is not None and self._checkpoint:
            self.averaging.load(self._checkpoint)
        self.is_attached = True

    def detach(self) -> None:
        """Remove the hooks."""
        self.private.detach()
        self.is_attached = False

    # ------------------------------------------------------------------- steps

    def step(self, unit_ids: np.ndarray, loss_of: LossOf, progress: Progress = unseen) -> StepDiagnostics:
        """Take a private step; warn if memory ran out or a unit's gradient was not finite.

        Raises:
            NonfiniteError: no unit has had a finite gradient for half a batch of units.
            ConfigError, ValueError: see `PrivateRun.step`.
        """
        done = self.private.step(unit_ids, loss_of, progress)
        self._nonfinite.look(done.num_units, done.num_nonfinite, self.ledger.num_steps)
        if done.num_divided:
            logger.warning(
                "Memory ran out %d time(s), and microbatches were split in half and retried; no step was lost. A "
                "microbatch has at most %d tokens from now on: set max_tokens_per_microbatch (in a recipe "
                "microbatch_tokens) to this number in the next run.",
                done.num_divided,
                self.private.max_tokens,
            )
        if done.num_nonfinite:
            logger.warning_once(
                "Some units have a non-finite gradient and contribute nothing; %s counts them. If the loss "
                "does not fall, look for "
                "overflow: a lower learning rate, bf16 instead of fp16 weights.",
                DIAGNOSTICS_FILE,
            )
        return done

    # --------------------------------------------------------------------- end

    def publish(self, staging: Path, folder: Path) -> None:
        """Rename a whole checkpoint to its name, with the ledger's chain and the run's engine; for one process."""
        made_by = (self._prepared.processes.size, self.private.engine_name)
        publish(staging, folder, ledger=self.ledger.mark().to_dict(), made_by=made_by)

    def reason_of_end(self) -> str:
        """Return the reason for the ledger why a run ended without an error or a signal."""
        plan, planned = self._prepared.plan, self.private.steps_planned
        wanted = plan.num_steps_wanted or plan.num_steps
        if planned == wanted or not self.is_complete:
            return COMPLETED  # the ledger says "stopped early" where steps are missing
        return f"{STOPPED_AT_BUDGET}, after {planned} of {wanted} steps"

    def end(self, folder: Path, reason: str, notes: ReleaseNotes) -> None:
        """Note the end and write the report; after a failure, an error here must not hide the first error.

        Args:
            folder: the run's output folder.
            reason: reason of the end, for the ledger; "failed" after an error.
            notes: facts about the release that only people know.
        """
        try:
            self.ledger.append_end(reason, independent=self._prepared.privacy.stop == "independent")
            if self.private.is_main:
                write_report(folder, self._prepared.plan, read_ledger(self.ledger.path), notes, opened=self.ledger)
        except (OSError, ValueError) as error:
            if reason != "failed":
                raise
            logger.error("the end of the run could not be written: %s", error)

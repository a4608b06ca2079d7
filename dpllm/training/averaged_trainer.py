"""The part of the trainer that releases an average of the weights after its steps (`dpllm.training.averaging`).

Place in the flow: between `dpllm.training.training_log` and `dpllm.DPTrainer`. During the training the model holds the
weights of the last step, and the average is shown only for an evaluation. After it the model holds the average, so that
whatever is evaluated or saved is what is released. A checkpoint holds the weights of its step and the average beside
them.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import nn

from dpllm.training.averaging import Averaging
from dpllm.training.trainer_run import TrainerRun
from dpllm.training.training_log import CoveredTrainer


class AveragedTrainer(CoveredTrainer):
    """A Trainer that may release an average of the weights."""

    _run: TrainerRun | None

    @property
    def averaging(self) -> Averaging | None:
        """The average of the present or the last run. None: the weights after the last step are released."""
        return None if self._run is None else self._run.averaging

    def attach(self) -> None:
        """Hook the model."""
        raise NotImplementedError

    def weights_to_release(self) -> AbstractContextManager[None]:
        """Have the weights in the model that are released, while a block runs; on all processes together.

        During the training these are the average, if the run has one; afterwards they are in the model anyway.
        """
        return contextlib.nullcontext() if self.averaging is None else self.averaging.shown()

    def last_weights(self) -> AbstractContextManager[None]:
        """Have the weights after the last step in the model, while a block runs; on all processes together."""
        return contextlib.nullcontext() if self.averaging is None else self.averaging.hidden()

    @property
    def _keeps_last(self) -> bool:
        return self.averaging is not None and self.averaging.average.keep_last

    def _release_average(self) -> None:
        """Have the average in the model after the training."""
        if self.averaging is not None:
            self.attach()  # a resume without a step left has not
            self.averaging.release()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as ``Trainer`` does, with the average where ``average.evaluate`` asks for it."""
        shows = self.averaging is not None and self.averaging.average.evaluate == "average"
        with self.weights_to_release() if shows else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and the average in it."""
        super()._save_checkpoint(model, trial)
        if self.averaging is not None:
            self.averaging.save(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")

"""When the Trainer hooks the model: after it was spread over the processes, and before the first draw is charged.

Place in the flow: below the trainer. An engine, or a part of the model, that cannot train privately is refused here,
with nothing charged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class _Trainer(Protocol):
    def attach(self) -> None: ...


class AttachFirst(TrainerCallback):
    """Calls the trainer's `attach` before an epoch's first batch is drawn; the later calls do nothing."""

    def __init__(self, trainer: _Trainer) -> None:
        """Remember the trainer."""
        self._trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        self._trainer.attach()


class WhenAttached(TrainerCallback):
    """Calls a function once, when the run is opened and attached: nothing can refuse the start or the resume any more.

    To be added to a trainer that exists, so that it comes after `AttachFirst`.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        """Remember what to do."""
        self._action: Callable[[], None] | None = action

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do it."""
        action, self._action = self._action, None
        if action is not None:
            action()

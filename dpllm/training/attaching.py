"""The moment at which the Trainer hooks the model: after its distribution and before the first draw is charged.

Place in the flow: below the trainer. An engine or a part of the model that cannot be trained privately is refused here,
before any charge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class _Trainer(Protocol):
    def attach(self) -> None: ...


class AttachFirst(TrainerCallback):
    """Callback that calls the trainer's `attach` before an epoch's first draw; later calls do nothing."""

    def __init__(self, trainer: _Trainer) -> None:
        """Store the trainer."""
        self._trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        self._trainer.attach()


class WhenAttached(TrainerCallback):
    """Callback that calls a function once, when the run is open and attached, so its start can no longer be refused.

    Add it to an existing trainer, so that it comes after `AttachFirst`.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        """Store the function."""
        self._action: Callable[[], None] | None = action

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call the function the first time."""
        action, self._action = self._action, None
        if action is not None:
            action()

"""The end of a Trainer's run by a signal, or because all planned steps are charged.

Place in the flow: a callback of `dpllm.DPTrainer`, above `dpllm.training.signals`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dpllm.engines.processes import Processes
from dpllm.training.signals import StopRequest, Terminal, end_with_the_launcher


class Interrupt(TrainerCallback):
    """Callback that ends the run after the current step on a signal, with a checkpoint and a correct report.

    See `dpllm.training.signals`. It also ends a resumed run when the plan's steps are used up, since steps lost in a
    crash were charged.

    Attributes:
        signal: the signal that ended the last run early. None: no signal did.

    Args:
        processes: the processes of the run; all stop after the same step.
        is_complete: returns whether all planned steps of the run are charged.
    """

    def __init__(self, processes: Processes, is_complete: Callable[[], bool]) -> None:
        """Begin without a signal."""
        self._processes, self._is_complete = processes, is_complete
        self._request, self._agreed = StopRequest(), False
        self.signal: int | None = None

    def forget(self) -> None:
        """Forget the signal that ended an earlier run."""
        self.signal = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the block runs."""
        self._agreed = False
        end_with_the_launcher()
        with Terminal().taken(), self._request.listening():
            yield

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop and save on a request or at the end of the plan."""
        self._agreed = self._processes.any(self._request.requested)  # all stop after the same step, or none
        if self._agreed or self._is_complete():
            control.should_training_stop = True
            control.should_save = control.should_save or self._agreed
            control.should_evaluate = control.should_evaluate and not self._agreed  # a launcher waits only for seconds
        return control

    def has_ended_run(self) -> bool:
        """Return whether a signal ended the run before all planned steps. Called by all processes together."""
        if self._agreed and not self._is_complete():
            numbers = self._processes.gather(self._request.number)
            self.signal = next((number for number in numbers if number is not None), None)
        return self.signal is not None

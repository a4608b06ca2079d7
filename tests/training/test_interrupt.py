"""A signal or the last planned step ends the Trainer's loop after a step; only a signal is an interrupt."""

import os
import signal

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from dpllm.engines.processes import Processes
from dpllm.training.interrupt import Interrupt


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("signalled", [False, True])
def test_the_end_of_a_run(complete, signalled, tmp_path):
    """A signal in the last step comes too late to interrupt the run, but its checkpoint is saved."""
    interrupt = Interrupt(Processes(), lambda: complete)
    control, args = TrainerControl(should_evaluate=True), TrainingArguments(str(tmp_path), use_cpu=True)
    with interrupt.listening():
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        interrupt.on_step_end(args, TrainerState(), control)
        assert control.should_training_stop == (complete or signalled)
        assert control.should_save == signalled and control.should_evaluate != signalled
        assert interrupt.has_ended_run() == (signalled and not complete)
    assert interrupt.signal == (signal.SIGTERM if signalled and not complete else None)
    interrupt.forget()
    assert interrupt.signal is None and not Interrupt(Processes(), lambda: False).has_ended_run()

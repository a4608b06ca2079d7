"""A signal or the last planned step ends the Trainer's loop after a step; only a signal is an interrupt."""

import os
import signal

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from dpllm.engines.processes import Processes
from dpllm.training.signals import StopRequest
from dpllm.training.trainer import Interrupt


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


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_is_told_how_the_run_is_ended_at_once(name, capfd):
    """Only after Ctrl-C it is a second one."""
    request = StopRequest("finishing")
    with request.listening():
        os.kill(os.getpid(), signal.Signals[name])
        assert request.requested
    first = "A second Ctrl-C" if name == "SIGINT" else "Ctrl-C"
    assert capfd.readouterr().err.strip() == f"{name}: finishing. {first}, after 2 s, stops at once."

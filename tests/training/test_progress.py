"""The bar of a training: time left without the first step, throughput of the expected batch, and ε."""

import io
import sys

import pytest
from transformers import ProgressCallback, TrainerControl, TrainerState

from dpllm.report.disclosures import receivers
from dpllm.training.screen import Batch, StepProgress
from dpllm.training.trainer_setup import expected_batch
from tests.training.test_trainer import arguments, trainer


class Clock:
    """Seconds that a test sets; the bar reads them too."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now


@pytest.fixture
def bar(monkeypatch):
    """A bar of 10 steps with ε = the steps so far, its clock, and a function that takes a step of some seconds."""
    clock, screen = Clock(), io.StringIO()
    monkeypatch.setattr("dpllm.training.screen.time", clock)
    monkeypatch.setattr(sys, "stderr", screen)
    state = TrainerState(max_steps=10, is_world_process_zero=True)
    callback = StepProgress(Batch(units=50, tokens=2000.0), lambda: float(state.global_step))
    callback.on_train_begin(None, state, TrainerControl())
    monkeypatch.setattr(callback.training_bar, "_time", clock.time)
    callback.training_bar.start_t = clock.now

    def step(seconds, shares=()):
        callback.on_step_begin(None, state, TrainerControl())
        for share in shares:  # at equal times within the step
            clock.now += seconds / len(shares)
            callback.moved(share)
        clock.now += 0 if shares else seconds
        state.global_step += 1
        callback.on_step_end(None, state, TrainerControl())
        return callback.training_bar

    step.screen = screen
    yield step
    callback.on_train_end(None, state, TrainerControl())


def test_time_left_and_throughput_are_those_of_the_steps_after_the_first(bar):
    """The first has checks of 1000 s; each of the others takes 2 s."""
    bar(1000)
    for _ in range(3):
        shown = bar(2)
    assert shown.format_dict["rate"] == pytest.approx(0.5)
    assert "[16:46<00:12" in str(shown)  # of 1006 s in all; six more steps of 2 s
    assert "25 units/s, 1,000 tokens/s" in str(shown)


def test_a_file_says_now_and_then_that_a_step_is_under_way_and_not_how_far(bar):
    """The share follows the number of units that were drawn, which ε does not cover."""
    bar(100, [number / 20 for number in range(20)])
    written = bar.screen.getvalue()
    assert written.count("step 1: under way") == 3 and "%" not in written.replace("%|", "")


def test_an_epsilon_of_an_earlier_step_is_named_so_and_that_of_the_last_step_is_computed(monkeypatch):
    """Computing it takes longer than the steps: a line that is copied must not state less than was spent."""
    clock, spent = Clock(), []
    monkeypatch.setattr("dpllm.training.screen.time", clock)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    state = TrainerState(max_steps=3, is_world_process_zero=True)

    def epsilon():
        clock.now += 5.0
        return float(state.global_step)

    callback = StepProgress(Batch(units=50, tokens=2000.0), epsilon)
    callback.on_train_begin(None, state, TrainerControl())
    for _ in range(3):
        state.global_step += 1
        callback.on_step_end(None, state, TrainerControl())
        spent.append(str(callback.training_bar))
    callback.on_train_end(None, state, TrainerControl())
    assert "ε 1" in spent[0] and "after step" not in spent[0]
    assert "after step 1" in spent[1]
    assert "ε 3" in spent[2] and "after step" not in spent[2]


def test_every_trainer_with_a_bar_has_it_and_none_without(tmp_path):
    """`disable_tqdm` has the printed lines; the report counts the bar as the screen."""
    shown = trainer(tmp_path / "a", args=arguments(tmp_path / "a", disable_tqdm=False))
    kinds = [type(one) for one in shown.callback_handler.callbacks if isinstance(one, ProgressCallback)]
    assert kinds == [StepProgress]
    batch = expected_batch(shown._prepared)
    assert batch.units == shown.plan.expected_batch_size and batch.tokens > batch.units
    assert receivers(shown.callback_handler.callbacks) == "the Trainer's state, the screen"
    hidden = trainer(tmp_path / "b", args=arguments(tmp_path / "b", disable_tqdm=True))
    assert not any(isinstance(one, ProgressCallback) for one in hidden.callback_handler.callbacks)

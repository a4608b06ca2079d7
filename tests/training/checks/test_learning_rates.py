"""Learning rates are recorded, and a loop of one's own is asked what they follow."""

import math

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.optim import lr_scheduler

from dpllm import PrivateRun
from dpllm.config import ConfigError
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.learning_rates import DECLARED, INDEPENDENT, LEARNING_RATES, OWN_LOOP
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

STEPS = 5


def run_with(folder, schedule=None, step=None, **declared):
    """The report of a loop of one's own.

    Args:
        folder: of the run.
        schedule: makes a scheduler of the optimizer, which steps after each update.
        step: calls the scheduler, with the loss of the step.
        declared: as for `PrivateRun.attach`.
    """
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(folder, plan_of(num_steps=STEPS), rows_of())
    run.attach(model, optimizer, **declared)
    scheduler = schedule(optimizer) if schedule else None
    for unit_ids in run.draws(STEPS):
        done = run.step(unit_ids, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            step(scheduler, done.mean_loss) if step else scheduler.step()
    return run.finish()


def asked(report):
    """The open points, without the sections that people fill in."""
    return [point for point in report["open_points"] if not point.startswith("Not filled in")]


def recorded(report):
    return next((one["values"] for one in report["definition"]["facts"] if one["name"] == LEARNING_RATES), [])


def by_the_loss(scheduler, loss):
    for group in scheduler.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + loss) if math.isfinite(loss) else 0.05  # of a step without units


FOLLOWING = {
    "set by the loop": (lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0), by_the_loss),
    "ReduceLROnPlateau": (
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9),
        lambda scheduler, loss: scheduler.step(loss),
    ),
}


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_learning_rate_that_follows_the_loss_is_an_open_point_and_recorded(name, tmp_path):
    report = run_with(tmp_path, *FOLLOWING[name])
    assert asked(report) == [OWN_LOOP]
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == STEPS
    assert recorded(report)[0] == "step 1: 0.1" and recorded(report)[-1].startswith("step 5, the last: 0.0")


def test_a_declaration_is_a_fact_of_the_report(tmp_path):
    """A statement of people, which replaces the open point; the rates are recorded all the same."""
    report = run_with(tmp_path, lambda o: lr_scheduler.ExponentialLR(o, 0.5), schedule_is_independent=True)
    assert asked(report) == []
    assert {"name": DECLARED, "values": [INDEPENDENT]} in report["definition"]["facts"]
    assert recorded(report) == [
        "step 1: 0.1",
        "step 2: 0.05",
        "step 4: 0.0125",
        "step 5, the last: 0.00625; least 0.00625, largest 0.1",
    ]


def test_rates_of_several_groups_and_of_tensors_are_recorded(tmp_path):
    model = network()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": others, "lr": torch.tensor(0.1)}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=1), rows_of())
    run.attach(model, optimizer)
    for unit_ids in run.draws(1):
        run.step(unit_ids, loss_of)
        optimizer.step()
    report = run.finish()
    assert recorded(report) == ["step 1: 0.2, 0.1", "step 1, the last: 0.2, 0.1; least 0.1, largest 0.2"]


class Halving(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["lr"] *= 0.5


def test_a_callback_of_a_trainer_that_changes_the_rate_is_an_open_point(tmp_path):
    """By its name; the schedules of a Trainer are checked before the run."""
    run = trainer(tmp_path, callbacks=[Halving()])
    run.train()
    report = run.privacy_report()
    assert OWN_LOOP not in report["open_points"]
    assert any("The callback Halving" in point for point in report["open_points"])
    assert recorded(report)[0].startswith("step 1: ")


def test_a_scheduler_of_a_trainer_that_follows_evaluations_is_refused_below_accelerates_wrapper(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = Accelerator(cpu=True).prepare_scheduler(lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        trainer(tmp_path, optimizers=(optimizer, scheduler))

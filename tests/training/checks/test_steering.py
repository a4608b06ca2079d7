"""Learning rates that a custom loop sets: an open point, unless PyTorch's schedulers did, or it was declared."""

import math

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from dpllm import PrivateRun
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.steering import DECLARED
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import trainer

STEPS = 5


def run_with(folder, steer=None, schedule=None, kind=torch.optim.SGD, step=None, **declared):
    """The report of a loop that calls ``steer(optimizer, number, loss)`` at a time that it chooses.

    Args:
        folder: of the run.
        steer: between the private step and the update.
        schedule: makes a scheduler of the optimizer, which steps after each update.
        kind: of the optimizer.
        step: calls the scheduler, with the loss.
        declared: as for `PrivateRun.attach`.
    """
    plan = plan_of(num_steps=STEPS)
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    run = PrivateRun.start(folder, plan, rows_of())
    run.attach(model, optimizer, **declared)
    scheduler = schedule(optimizer) if schedule else None
    for number, unit_ids in enumerate(run.draws(STEPS)):
        done = run.step(unit_ids, loss_of)
        if steer is not None:
            steer(optimizer, number, done.mean_loss)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            step(scheduler, done.mean_loss) if step else scheduler.step()
    return run.finish()


def noted(report):
    return [point.split(" of the optimizer")[0] for point in report["open_points"] if "hyperparameter" in point]


def by_the_loss(optimizer, number, loss):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + loss) if math.isfinite(loss) else 0.05  # of a step without units


def test_a_learning_rate_that_follows_the_loss_is_an_open_point(tmp_path):
    """The change is noted once, in spite of later steps; the run's own hyperparameters do not count."""
    assert noted(run_with(tmp_path / "followed", by_the_loss)) == ["The hyperparameter lr"]
    assert read_ledger(tmp_path / "followed" / LEDGER_FILE).num_steps == STEPS
    assert noted(run_with(tmp_path / "constant")) == []


@pytest.mark.parametrize("when", [0, STEPS - 1], ids=["first update", "last update"])
@pytest.mark.parametrize("name", ["weight_decay", "momentum"])
def test_any_hyperparameter_and_any_update_is_looked_at(when, name, tmp_path):
    """A weight decay or a momentum reaches the weights as a learning rate does."""

    def steer(optimizer, number, loss):
        if number == when:
            optimizer.param_groups[0][name] = 0.01 * loss if math.isfinite(loss) else 0.01

    assert noted(run_with(tmp_path, steer)) == [f"The hyperparameter {name}"]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.99),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ],
    ids=["exponential", "step", "cosine"],
)
def test_a_rate_that_a_scheduler_carries_on_is_an_open_point(schedule, tmp_path):
    """It multiplies the rate that it finds, which the loop has changed by the loss after the update."""

    def step(scheduler, loss):
        by_the_loss(scheduler.optimizer, 0, loss)
        scheduler.step()

    assert noted(run_with(tmp_path / "followed", schedule=schedule, step=step)) == ["The hyperparameter lr"]
    assert noted(run_with(tmp_path / "sound", schedule=schedule)) == []


def test_a_learning_rate_that_is_changed_within_the_step_is_an_open_point(tmp_path):
    """By the loss function, between two microbatches."""
    optimizers = []

    def steering_loss(model, inputs):
        loss_B = loss_of(model, inputs)
        optimizers[0].param_groups[0]["lr"] = float(loss_B.detach().mean())
        return loss_B

    plan, model = plan_of(num_steps=2), network()
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    run = PrivateRun.start(tmp_path, plan, rows_of())
    run.attach(model, optimizers[0])
    for unit_ids in run.draws(2):
        run.step(unit_ids, steering_loss)
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert noted(run.finish()) == ["The hyperparameter lr"]


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "warm-up": lambda o: transformers.get_linear_schedule_with_warmup(o, 2, STEPS),
    "cosine with restarts": lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 1, STEPS, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=2),
    "one after another": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
def test_schedules_of_pytorch_and_transformers_are_none(name, kind, tmp_path):
    """They follow the number of the step, also where they turn momentum and betas."""
    assert noted(run_with(tmp_path, None, SCHEDULES[name], kind)) == []


class Restarting(lr_scheduler.LRScheduler):
    """A custom scheduler, which stores no last rates."""

    def step(self, epoch=None):
        self.last_epoch += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.last_epoch % 2)


def test_a_subclass_of_the_schedulers_is_none(tmp_path):
    assert noted(run_with(tmp_path, None, Restarting)) == []


def test_a_schedule_that_follows_the_loss_is_an_open_point(tmp_path):
    """ReduceLROnPlateau, also beside another scheduler; and a rate that is set past a scheduler."""

    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    def both(optimizer):
        return lr_scheduler.ExponentialLR(optimizer, 0.9), plateau(optimizer)

    def step_both(schedulers, loss):
        schedulers[1].step(loss)
        schedulers[0].step()

    found = [
        run_with(tmp_path / "plateau", None, plateau, step=lambda scheduler, loss: scheduler.step(loss)),
        run_with(tmp_path / "both", None, both, step=step_both),
        run_with(tmp_path / "past", by_the_loss, SCHEDULES["lambda"]),
    ]
    assert [noted(report) for report in found] == [["The hyperparameter lr"]] * 3


def test_a_declared_schedule_is_a_fact_of_the_report(tmp_path):
    """A statement of people, which replaces the open point."""
    report = run_with(tmp_path, by_the_loss, schedule_is_independent=True)
    assert noted(report) == []
    assert {"name": DECLARED, "values": ["lr"]} in report["definition"]["facts"]


class Adapting(torch.optim.SGD):
    """Keeps its own state among the hyperparameters, as optimizers without a learning rate do."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9
            group["k"] = group.get("k", 0) + 1


def test_what_an_optimizer_changes_by_itself_is_none(tmp_path):
    """It computes it from the noisy gradients."""
    assert noted(run_with(tmp_path, kind=Adapting)) == []


class Halving(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["lr"] *= 0.5


def test_a_trainer_has_its_own_rule(tmp_path):
    """A callback is an open point by its name, and its schedules are checked before the run."""
    run = trainer(tmp_path, callbacks=[Halving()])
    run.train()
    report = run.privacy_report()
    assert noted(report) == [] and any("The callback Halving" in point for point in report["open_points"])

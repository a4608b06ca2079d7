"""Decisions of a custom loop about updates: open points, unless PyTorch's schedulers made them, or declared."""

import math

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.optim import lr_scheduler

from dpllm import PrivateRun
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.steering import DECISIONS, DECLARED
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

STEPS = 5


def run_with(folder, steer=None, schedule=None, kind=torch.optim.SGD, step=None, update=None, steps=STEPS, **declared):
    """The report of a loop that calls ``steer(optimizer, number, loss)`` at a time that it chooses.

    Args:
        folder: of the run.
        steer: between the private step and the update.
        schedule: makes a scheduler of the optimizer, which steps after each update.
        kind: of the optimizer.
        step: calls the scheduler, with the loss.
        update: called in place of the optimizer's step, with the optimizer, the number of the step and the loss.
        steps: of the run.
        declared: as for `PrivateRun.attach`.
    """
    plan = plan_of(num_steps=steps)
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    run = PrivateRun.start(folder, plan, rows_of())
    run.attach(model, optimizer, **declared)
    scheduler = schedule(optimizer) if schedule else None
    for number, unit_ids in enumerate(run.draws(steps)):
        done = run.step(unit_ids, loss_of)
        if steer is not None:
            steer(optimizer, number, done.mean_loss)
        update(optimizer, number, done.mean_loss) if update else optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            step(scheduler, done.mean_loss) if step else scheduler.step()
    return run.finish()


def noted(report):
    return [point.split(" of the optimizer")[0] for point in report["open_points"] if "hyperparameter" in point]


def decided(report):
    """Of the open points, those about other decisions than hyperparameters."""
    return [point.split(": make sure")[0] for point in report["open_points"] if "decides nothing by itself" in point]


def is_high(loss):
    """A decision that follows the loss."""
    return math.isfinite(loss) and loss > 0.5


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


SKIPPED = "A private step was followed by no update of the optimizer"
SEVERAL = "A private step was followed by several updates"


def twice(optimizer, number, loss):
    optimizer.step()
    if number == 1:
        optimizer.step()


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (lambda optimizer, number, loss: None if number == 1 else optimizer.step(), SKIPPED),
        (lambda optimizer, number, loss: None if number == STEPS - 1 else optimizer.step(), SKIPPED),
        (twice, SEVERAL),
    ],
    ids=["left out", "the last one left out", "twice"],
)
def test_an_update_that_is_left_out_or_made_twice_is_an_open_point(update, expected, tmp_path):
    """The loop may choose by the loss of the step."""
    assert decided(run_with(tmp_path / "asked", update=update)) == [expected]
    report = run_with(tmp_path / "declared", update=update, schedule_is_independent=True)
    assert decided(report) == []
    assert [fact["name"] for fact in report["definition"]["facts"]].count(DECISIONS) == 1


def test_a_draw_without_a_step_is_an_open_point(tmp_path):
    """The loop may leave out a step by the loss of the one before; it is charged all the same."""
    plan, model = plan_of(num_steps=3), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(tmp_path, plan, rows_of())
    run.attach(model, optimizer)
    for number, unit_ids in enumerate(run.draws(3)):
        if number != 1:
            run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()
    assert decided(run.finish()) == ["A draw of units was followed by no private step"]


PACE = "The scheduler {} was not stepped at one fixed pace over the updates"


@pytest.mark.parametrize(
    ("schedule", "step", "name"),
    [
        (lambda o: lr_scheduler.StepLR(o, 1, 0.5), lambda s, n: s.step() if n not in (1, 2) else None, "StepLR"),
        (lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e), lambda s, n: s.step() if n < 2 else None, "LambdaLR"),
        (lambda o: lr_scheduler.StepLR(o, 1, 0.5), lambda s, n: s.step() if n == 1 else None, "StepLR"),
        (lambda o: lr_scheduler.StepLR(o, 100, 0.5), lambda s, n: [s.step() for _ in range(1 + n % 2)], "StepLR"),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2), lambda s, n: s.step(n / 2 + n % 2), "Cosine"),
    ],
    ids=["some steps left out", "stopped", "once", "more steps at times", "parts of an epoch"],
)
def test_a_scheduler_that_is_stepped_at_a_changing_pace_is_an_open_point(schedule, step, name, tmp_path):
    """The loop may choose by the loss when it steps the scheduler, or how far."""
    numbers = iter(range(100))
    found = decided(run_with(tmp_path, schedule=schedule, step=lambda s, loss: step(s, next(numbers)), steps=8))
    assert len(found) == 1 and found[0].startswith(PACE.format(name).split(" was")[0])


def test_an_epoch_that_the_loop_gives_to_a_scheduler_is_an_open_point(tmp_path):
    """Its rate is the one of its closed form, at an epoch that the loss chose."""

    def step(scheduler, loss):
        with pytest.warns(UserWarning, match="epoch parameter"):
            scheduler.step(int(10 * loss) if math.isfinite(loss) else 1)

    report = run_with(tmp_path, schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.9), step=step)
    assert decided(report) == [PACE.format("ExponentialLR")]


@pytest.mark.parametrize(
    ("schedule", "kind", "name"),
    [
        (lambda o: lr_scheduler.ExponentialLR(o, 0.99), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5), "momentum"),
        (lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)), torch.optim.Adam, "betas"),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=20), torch.optim.Adam, "betas"),
    ],
    ids=["momentum", "betas", "betas that a scheduler turns"],
)
def test_a_momentum_that_follows_the_loss_beside_a_scheduler_is_an_open_point(schedule, kind, name, tmp_path):
    """A scheduler of the learning rate explains a change of the learning rate only."""

    def steer(optimizer, number, loss):
        value = 0.4 if is_high(loss) else 0.3
        optimizer.param_groups[0][name] = value if name == "momentum" else (value, 0.99)

    assert noted(run_with(tmp_path, steer, schedule, kind)) == [f"The hyperparameter {name}"]


def another_scheduler(schedulers, loss):
    schedulers[-1].step()
    if len(schedulers) < 3:
        optimizer = schedulers[0].optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 0.03
        schedulers.append(lr_scheduler.CosineAnnealingLR(optimizer, 10))


def other_base_rates(schedulers, loss):
    schedulers[0].base_lrs = [0.07]
    schedulers[0].step()


@pytest.mark.parametrize("schedule", [lambda o: lr_scheduler.CosineAnnealingLR(o, 10)], ids=["cosine"])
def test_a_scheduler_that_takes_the_place_of_another_is_an_open_point(schedule, tmp_path):
    """It begins at a rate that the loop has set, at a time that the loop has chosen."""
    report = run_with(tmp_path, schedule=lambda o: [schedule(o)], step=another_scheduler)
    assert noted(report) == ["The hyperparameter lr"]


@pytest.mark.parametrize("own", [True, False], ids=["a function of one's own", "PyTorch's"])
def test_base_rates_that_the_loop_writes_are_an_open_point(own, tmp_path):
    """A scheduler multiplies them."""
    make = lr_scheduler.LambdaLR if own else transformers.get_constant_schedule
    report = run_with(tmp_path, schedule=lambda o: [make(o, lambda e: 1.0) if own else make(o)], step=other_base_rates)
    assert noted(report) + decided(report)


def test_a_rate_that_is_put_back_after_its_scheduler_is_an_open_point(tmp_path):
    """The rate stays, and the scheduler's own would have changed."""
    for name, schedule in {
        "foreseen": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "own": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    }.items():

        def step(scheduler, loss):
            scheduler.step()
            scheduler.optimizer.param_groups[0]["lr"] = 0.1

        assert noted(run_with(tmp_path / name, schedule=schedule, step=step)) == ["The hyperparameter lr"]


def test_a_rate_that_is_a_tensor_is_compared_by_its_value(tmp_path):
    """It is written in place."""

    def kind(parameters, lr):
        return torch.optim.Adam(parameters, lr=torch.tensor(lr))

    def steer(optimizer, number, loss):
        optimizer.param_groups[0]["lr"].mul_(0.5 if is_high(loss) else 0.9)

    def schedule(optimizer):
        return lr_scheduler.ExponentialLR(optimizer, 0.99)

    assert noted(run_with(tmp_path / "followed", steer, schedule, kind)) == ["The hyperparameter lr"]
    assert noted(run_with(tmp_path / "without a scheduler", steer, None, kind)) == ["The hyperparameter lr"]
    assert noted(run_with(tmp_path / "sound", None, schedule, kind)) == []


def test_a_rate_that_a_hook_of_the_loop_sets_is_an_open_point(tmp_path):
    """Optimizers of PyTorch change none of their hyperparameters within an update."""

    def update(optimizer, number, loss):
        if number == 0:
            optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=0.01))
        optimizer.step()

    assert noted(run_with(tmp_path, update=update)) == ["The hyperparameter lr"]


def test_parameters_that_move_between_groups_are_an_open_point(tmp_path):
    """Each group has its own learning rate."""

    def kind(parameters, lr):
        return torch.optim.SGD([{"params": list(parameters), "lr": lr}, {"params": [], "lr": lr / 10}])

    def update(optimizer, number, loss):
        if number == 2:
            first, second = optimizer.param_groups
            first["params"], second["params"] = second["params"], first["params"]
        optimizer.step()

    found = decided(run_with(tmp_path, update=update, kind=kind))
    assert found == ["The parameters in the groups of the optimizer were changed after the first step"]


MORE_SCHEDULES = {
    "cosine beyond its end": lambda o: lr_scheduler.CosineAnnealingLR(o, 2, eta_min=0.01),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "multiplied": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "averaged": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2),
    "triangular": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=2, mode="triangular2"),
    "constant": transformers.get_constant_schedule,
    "inverse root": lambda o: transformers.get_inverse_sqrt_schedule(o, 2),
    "from a later epoch": lambda o: (
        o.param_groups[0].setdefault("initial_lr", 0.1) and lr_scheduler.CosineAnnealingLR(o, 10, last_epoch=4)
    ),
}


@pytest.mark.parametrize("name", MORE_SCHEDULES)
def test_further_schedules_are_none(name, tmp_path):
    """Those of PyTorch and transformers that the list above lacks, and one that goes on at a later epoch."""

    def kind(parameters, lr):
        return torch.optim.SGD(parameters, lr, momentum=0.9)

    report = run_with(tmp_path, None, MORE_SCHEDULES[name], kind)
    assert noted(report) + decided(report) == []


def every(count):
    numbers = iter(range(1, 100))
    return lambda scheduler, loss: scheduler.step() if next(numbers) % count == 0 else None


def parts_of_an_epoch():
    numbers = iter(range(100))
    return lambda scheduler, loss: scheduler.step(next(numbers) / 4)


def several_times(scheduler, loss):
    """As accelerate does in several processes, for a scheduler with a last step."""
    for _ in range(3):
        if scheduler._step_count <= scheduler.total_steps:
            scheduler.step()


@pytest.mark.parametrize(
    ("schedule", "step"),
    [
        (lambda o: lr_scheduler.StepLR(o, 1, 0.5), every(2)),
        (lambda o: lr_scheduler.StepLR(o, 1, 0.5), every(5)),
        (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 1, 2), parts_of_an_epoch()),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10), several_times),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=2), lambda s, _: s.step() if s.last_epoch < 2 else None),
        (
            lambda o: [
                lr_scheduler.LinearLR(o, 0.5, total_iters=3),
                transformers.get_linear_schedule_with_warmup(o, 2, 9),
            ],
            lambda both, _: [both[1].step(), both[0].step()],
        ),
    ],
    ids=["every second update", "epochs", "parts of an epoch", "several times, to an end", "until its end", "two"],
)
def test_a_fixed_pace_is_none(schedule, step, tmp_path):
    report = run_with(tmp_path, schedule=schedule, step=step, steps=8)
    assert noted(report) + decided(report) == []


def test_a_scheduler_that_goes_on_from_a_state_dict_is_none(tmp_path):
    """Its copies begin where it begins."""

    def schedule(optimizer):
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 3, "_step_count": 4, "_last_lr": [0.08]})
        optimizer.param_groups[0]["lr"] = 0.08
        return scheduler

    report = run_with(tmp_path, schedule=schedule)
    assert noted(report) + decided(report) == []


def test_accelerates_wrappers_are_none(tmp_path):
    """A wrapped scheduler steps as often as there are processes."""
    accelerator = Accelerator(cpu=True)
    plan, model = plan_of(num_steps=STEPS), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run = PrivateRun.start(tmp_path, plan, rows_of())
    run.attach(model, optimizer)
    for unit_ids in run.draws(STEPS):
        run.step(unit_ids, loss_of)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    report = run.finish()
    assert noted(report) + decided(report) == []


def test_a_checkpoint_or_another_attachment_in_mid_run_is_an_open_point(tmp_path):
    """Either brings another state of the optimizer, at a time that the loop chooses."""
    found = []
    for name in ("loaded", "attached again"):
        plan, model = plan_of(num_steps=2), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = PrivateRun.start(tmp_path / name, plan, rows_of())
        run.attach(model, optimizer)
        for unit_ids in run.draws(2):
            run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            if run.ledger.num_steps == 1 and name == "loaded":
                run.load_state_dict(run.state_dict())
            elif run.ledger.num_steps == 1:
                run.detach()
                run.attach(model, optimizer)
        found += decided(run.finish())
    assert found == [
        "A checkpoint was loaded after a private step of the same process",
        "The run was detached and attached again after a private step",
    ]

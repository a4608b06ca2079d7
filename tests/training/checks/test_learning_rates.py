"""Learning rates are recorded and compared with the schedule; a loop of one's own is asked what they follow."""

import math

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.optim import lr_scheduler

from dpllm import PrivateRun
from dpllm.config import ConfigError
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.definition import LEARNING_RATES
from dpllm.training.checks.watch import DECLARED, INDEPENDENT, OWN_LOOP, UNKNOWN, WatchError, scheduled_rates
from tests.mutations import kills
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, trainer

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
    (rates,) = recorded(report)
    assert rates.startswith("first 0.1, last 0.0") and rates.endswith("largest 0.1")


def test_a_declaration_is_a_fact_of_the_report(tmp_path):
    """A statement of people, which replaces the open point; the rates are recorded all the same."""
    report = run_with(tmp_path, lambda o: lr_scheduler.ExponentialLR(o, 0.5), schedule_is_independent=True)
    assert asked(report) == []
    assert {"name": DECLARED, "values": [INDEPENDENT]} in report["definition"]["facts"]
    assert recorded(report) == ["first 0.1, last 0.00625; least 0.00625, largest 0.1"]
    rates = [(step, f"{0.1 * 0.5 ** (step - 1):.10g}") for step in range(1, STEPS + 1)]
    assert read_ledger(tmp_path / LEDGER_FILE).notes.rates == rates


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
    assert recorded(report) == ["0.2 and 0.1 in all updates"]


class Halving(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["lr"] *= 0.5


@kills(
    "a rate that nobody planned is used",
    "dpllm/training/checks/watch.py",
    "rate is None or planned is None or math.isclose(rate, planned, rel_tol=_TOLERANCE)",
    "True",
)
def test_a_callback_of_a_trainer_that_changes_the_rate_is_refused_before_the_update(tmp_path):
    """Its own schedule is known when the run is attached."""
    run = trainer(tmp_path, callbacks=[Halving()])
    with pytest.raises(WatchError, match=r"learning rate of step 2 is 0\.00375, .* planned 0\.0075"):
        run.train()
    assert read_ledger(tmp_path / LEDGER_FILE).notes.rates == [(1, "0.01")]


def test_a_rate_set_at_the_start_of_training_is_refused(tmp_path):
    """It would be found from the private rows, before the model is attached."""

    class Found(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            optimizer.param_groups[0]["lr"] = 0.5

    with pytest.raises(WatchError, match=r"learning rate of step 1 is 0\.5, .* planned 0\.01"):
        trainer(tmp_path, callbacks=[Found()]).train()


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[1.0, 2.0], total_steps=STEPS),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, factor=0.1, total_iters=2), lr_scheduler.ExponentialLR(o, gamma=0.9)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, T_max=3)], milestones=[2]
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "warm-up": lambda o: transformers.get_scheduler("cosine", o, num_warmup_steps=2, num_training_steps=STEPS),
    "accelerate": lambda o: Accelerator(cpu=True).prepare_scheduler(lr_scheduler.StepLR(o, step_size=2)),
}


@pytest.mark.parametrize("taken", [0, 2], ids=["at the start", "resumed"])
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_all_updates_are_computed_before_the_first(name, tensor, taken):
    """From a copy: the scheduler, the optimizer and its weights stay as they are."""
    rates = [torch.tensor(rate) if tensor else rate for rate in (0.3, 0.7)]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, momentum=0.5)
    scheduler = SCHEDULES[name](optimizer)
    for _ in range(taken):
        optimizer.step()
        scheduler.step()
    before = repr(optimizer.param_groups), repr(scheduler.state_dict())
    planned = scheduled_rates(scheduler, optimizer, STEPS - taken)
    assert (repr(optimizer.param_groups), repr(scheduler.state_dict())) == before
    used = []
    for step in range(STEPS - taken):
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if step < STEPS - taken - 1:
            scheduler.step()
    assert planned == used


def test_a_loop_that_names_its_scheduler_has_its_rates_compared(tmp_path):
    """The open point about other decisions stays."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=STEPS), rows_of())
    run.attach(model, optimizer, lr_scheduler=scheduler)
    for step, unit_ids in enumerate(run.draws(2)):
        run.step(unit_ids, loss_of)
        if step == 1:
            before = [p.clone() for p in model.parameters()]
            optimizer.param_groups[0]["lr"] = 0.06
            with pytest.raises(WatchError, match=r"step 2 is 0\.06, .* planned 0\.05"):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        else:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert OWN_LOOP in read_ledger(tmp_path / LEDGER_FILE).notes.open_points
    run.detach()


def test_a_scheduler_that_takes_metrics_is_refused_when_it_is_attached(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=STEPS), rows_of())
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        run.attach(model, optimizer, lr_scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))


class Uncopied(lr_scheduler.LambdaLR):
    def __deepcopy__(self, memo):
        raise TypeError("no copy")


def test_a_schedule_that_cannot_be_computed_is_an_open_point(tmp_path):
    """The run goes on, and its rates are recorded."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=1), rows_of())
    run.attach(model, optimizer, schedule_is_independent=True, lr_scheduler=Uncopied(optimizer, lambda n: 1.0))
    for unit_ids in run.draws(1):
        run.step(unit_ids, loss_of)
        optimizer.step()
    report = run.finish()
    assert asked(report) == [UNKNOWN.format(kind="Uncopied", error="TypeError: no copy")]
    assert recorded(report) == ["0.1 in all updates"]


def test_a_scheduler_of_a_trainer_that_follows_evaluations_is_refused_below_accelerates_wrapper(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = Accelerator(cpu=True).prepare_scheduler(lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        trainer(tmp_path, optimizers=(optimizer, scheduler))


def test_a_base_rate_that_is_found_at_the_start_of_training_is_refused(tmp_path):
    """By a search on the private rows; with a warm-up the first rate is 0 in either schedule."""

    class Finder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
            lr_scheduler.base_lrs = [0.777 for _ in lr_scheduler.base_lrs]

    run = trainer(tmp_path, callbacks=[Finder()], args=arguments(tmp_path, learning_rate=0.01, warmup_steps=2))
    with pytest.raises(WatchError, match="starts from the learning rate"):
        run.train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 0


@pytest.mark.parametrize("resumes", [True, False])
def test_a_schedule_that_accelerate_loads_is_the_one_that_is_compared(resumes, tmp_path):
    """The rates of the updates to come are computed again: the loop goes on at the step of the checkpoint."""

    def begin(run):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = Accelerator(cpu=True)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        run.attach(model, optimizer, lr_scheduler=scheduler)
        accelerator.register_for_checkpointing(run)
        return accelerator, optimizer, scheduler

    def take(run, optimizer, scheduler, steps):
        for unit_ids in run.draws(steps):
            run.step(unit_ids, loss_of)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    plan = plan_of(num_steps=STEPS)
    run = PrivateRun.start(tmp_path / "run", plan, rows_of())
    accelerator, *parts = begin(run)
    take(run, *parts, 2)
    accelerator.save_state(tmp_path / "state")
    if resumes:
        run.detach()
        run.ledger.close()
        run = PrivateRun.resume(tmp_path / "run", plan, rows_of())
        accelerator, *parts = begin(run)
    else:
        take(run, *parts, 1)
    accelerator.load_state(tmp_path / "state")
    take(run, *parts, 2)
    run.finish()


def test_rates_that_the_optimizer_sets_by_itself_are_an_open_point(tmp_path):
    """Adafactor's relative steps, with the scheduler that transformers documents for them."""
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = network()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=STEPS), rows_of())
    scheduler = AdafactorSchedule(optimizer)
    run.attach(model, optimizer, lr_scheduler=scheduler, schedule_is_independent=True)
    for unit_ids in run.draws(STEPS):
        run.step(unit_ids, loss_of)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert any("could not be computed before the training" in point for point in asked(run.finish()))

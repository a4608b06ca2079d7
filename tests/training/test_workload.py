"""The workload has the learning rates and the momentum of the Trainer that runs; the plan's strategy is made for it."""

import pytest
from transformers import TrainerCallback, TrainingArguments

from dpllm.config import PrivacyConfig
from dpllm.data.units import UnitIndex
from dpllm.mechanism.strategies import Workload, best_ratio
from dpllm.training.arguments import plan_for
from dpllm.training.workload import learning_rates, workload_of
from tests.training.test_trainer import arguments, privacy, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

SCHEDULES = [
    ("linear", {}, 0),
    ("linear", {}, 3),
    ("constant", {}, 0),
    ("constant_with_warmup", {}, 3),
    ("cosine", {}, 2),
    ("cosine_with_restarts", {"num_cycles": 2}, 0),
    ("cosine_with_min_lr", {"min_lr": 1e-5}, 2),
    ("polynomial", {"power": 2.0}, 0),
    ("inverse_sqrt", {}, 3),
    ("warmup_stable_decay", {"num_decay_steps": 3}, 2),
]


def args_of(**options):
    return TrainingArguments("out", use_cpu=True, report_to=[], **options)


@pytest.mark.parametrize(("kind", "options", "warmup"), SCHEDULES)
def test_the_rates_are_those_of_the_schedule(kind, options, warmup):
    """Of the first step to the last; a linear decay ends one step above 0, and a warm-up begins at 0."""
    args = args_of(learning_rate=1e-3, lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=warmup)
    rates = learning_rates(args, 10)
    assert len(rates) == 10 and max(rates) == pytest.approx(1e-3) and (rates[0] == 0) == (warmup > 0)
    if kind == "linear":
        fall = [(10 - step) / (10 - warmup) for step in range(warmup, 10)]
        assert rates == pytest.approx([*(1e-3 * step / 3 for step in range(warmup)), *(1e-3 * part for part in fall)])


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_waits_for_a_loss_counts_as_constant(kind):
    """Its rates depend on the run."""
    assert learning_rates(args_of(learning_rate=0.25, lr_scheduler_type=kind, eval_strategy="epoch"), 3) == [0.25] * 3


def test_the_rates_are_those_that_a_trainer_uses(tmp_path):
    """Written down in each step of a private run."""
    used = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
            used.append(optimizer.param_groups[0]["lr"])

    args = arguments(tmp_path, lr_scheduler_type="cosine", warmup_steps=2, max_steps=5)
    run = trainer(tmp_path, dataset=rows(60), config=privacy(expected_batch_size=8), args=args, callbacks=[Look()])
    run.train()
    assert used == pytest.approx(learning_rates(args, 5))


@pytest.mark.parametrize(
    ("options", "momentum", "bias_correction"),
    [
        ({}, 0.9, True),
        ({"adam_beta1": 0.8}, 0.8, True),
        ({"optim": "sgd", "optim_args": "momentum=0.7"}, 0.7, False),
        ({"optim": "sgd"}, 0.0, False),
        ({"optim": "rmsprop", "optim_args": "momentum=0.8"}, 0.8, False),
        ({"optim": "adafactor"}, 0.0, False),
        ({"optim": "galore_adamw", "optim_target_modules": ["q_proj"]}, 0.9, True),
    ],
)
def test_the_momentum_is_that_of_the_optimizer(options, momentum, bias_correction):
    """Adam corrects the bias of its first moment, which enlarges the first updates."""
    args = args_of(lr_scheduler_type="constant", **options)
    expected = Workload.released([1.0] * 12, momentum, bias_correction=bias_correction)
    assert workload_of(args, 12).response == pytest.approx(expected.response, rel=1e-12)
    averaging = [0.0] * 8 + [0.25] * 4
    averaged = Workload.released([1.0] * 12, momentum, bias_correction=bias_correction, averaging=averaging)
    assert workload_of(args, 12, {"kind": "tail", "share": 1 / 3}).response == pytest.approx(
        averaged.response, rel=1e-12
    )


def test_the_plan_has_the_strategy_for_the_run():
    """Another schedule has another one; a caller's own optimizer is unknown, so the sums of all steps count."""
    config = PrivacyConfig(
        noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=8, noise={"kind": "banded", "bands": 4}
    )
    units = UnitIndex.one_row_per_unit(60)
    ratios = {}
    for kind in ("linear", "constant"):
        args = args_of(max_steps=30, lr_scheduler_type=kind, optim="sgd", optim_args="momentum=0.9")
        noise = plan_for(args, config, units).mechanism.noise
        ratios[kind] = noise.ratio
        assert noise.ratio == best_ratio(4, workload_of(args, 30))
    assert ratios["linear"] != ratios["constant"]
    averaged = plan_for(args, config, units, average={"kind": "ema", "decay": 0.8})
    assert averaged.mechanism.noise.ratio == best_ratio(4, workload_of(args, 30, {"kind": "ema", "decay": 0.8}))
    assert averaged != plan_for(args, config, units)
    assert plan_for(args, config, units, own_optimizer=True).mechanism.noise.strategy == "free"

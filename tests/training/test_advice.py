"""Advice names each setting that was measured worse, with the value to write, and is silent about all others."""

import pytest
from transformers import TrainingArguments

from dpllm.config import PrivacyConfig
from dpllm.config.train_values import WARM_UP, with_schedule
from dpllm.data.units import UnitIndex
from dpllm.training.arguments import plan_for, training_arguments
from dpllm.training.workload import UpdateRule, advice

pytestmark = pytest.mark.usefixtures("rows_not_compared")

BANDED = {"kind": "banded", "bands": 4}
GOOD = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}


def advice_of(noise, average="ema", num_steps=30, sigma=1.0, **options):
    """Return the advice of a recipe's ``train`` section, which gets the default schedule."""
    section = with_schedule(
        {"output_dir": "out", "report_to": "none", "use_cpu": True, "learning_rate": 1e-3, **options}
    )
    args = training_arguments({**section, "max_steps": num_steps})
    config = PrivacyConfig(noise_multiplier=sigma, clip_norm=1.0, expected_batch_size=8, noise=noise)
    plan = plan_for(args, config, UnitIndex.one_row_per_unit(60), average=average)
    return advice(plan, UpdateRule.of(args, num_steps, average))


@pytest.mark.parametrize(
    ("noise", "average", "options"),
    [
        (BANDED, "ema", {}),
        (BANDED, {"kind": "tail", "share": 0.2}, GOOD),
        (BANDED, "ema", {**GOOD, "adam_beta1": 0.8}),
        (BANDED, None, {"optim": "sgd", "optim_args": "momentum=0.9", "lr_scheduler_type": "linear"}),
        ({"kind": "banded", "bands": 1}, "ema", {"lr_scheduler_type": "constant", "adam_beta1": 0.0}),
        ("independent", "ema", {"lr_scheduler_type": "constant", "adam_beta1": 0.0}),
        ("independent", None, {"lr_scheduler_type": "linear"}),
        ("independent", None, {"lr_scheduler_type": "cosine"}),
    ],
)
def test_settings_that_were_measured_well_get_none(noise, average, options):
    """Above all the defaults with an average, and SGD with a falling rate, whose updates are linear in the noise."""
    assert advice_of(noise, average, **options) == []


@pytest.mark.parametrize(
    ("noise", "average", "options", "words"),
    [
        (BANDED, "ema", {"adam_beta1": 0.0}, ["momentum is 0. ", "Set train.adam_beta1=0.9"]),
        (BANDED, "ema", {"optim": "sgd"}, ["momentum is 0. ", "train.optim_args=momentum=0.9"]),
        (BANDED, "ema", {"optim": "adafactor"}, ["momentum is 0. "]),
        (BANDED, "ema", {"lr_scheduler_type": "constant"}, ["There is no warm-up", "train.warmup_steps=0.1"]),
        (BANDED, "ema", {"warmup_steps": 0}, ["There is no warm-up"]),
        (BANDED, "ema", {"lr_scheduler_type": "linear", "warmup_steps": 0.1}, ["falls to 4% of", "correlated noise"]),
        ("independent", "ema", {"lr_scheduler_type": "linear"}, ["falls to 3% of", "With an average of the weights"]),
        (BANDED, None, {}, ["no average of the weights", "Set train.average=ema"]),
        ("independent", None, {}, ["no average of the weights"]),
    ],
)
def test_each_setting_that_was_measured_worse_gets_one_line(noise, average, options, words):
    """The line says what to write, and following it ends the advice."""
    (line,) = advice_of(noise, average, **options)
    assert all(part in line for part in words) and "\n" not in line and "Set train." in line


@pytest.mark.parametrize("rate", [5e-5, None])
def test_the_default_rate_of_a_trainer_is_named(rate):
    """It is for training without noise; another rate, and an optimizer that does not divide by the noise, stay."""
    (line,) = advice_of("independent", learning_rate=rate)
    assert "5e-05, the default of TrainingArguments" in line and "Set train.learning_rate" in line
    assert advice_of("independent", learning_rate=6e-5) == []
    assert advice_of("independent", learning_rate=rate, optim="sgd", lr_scheduler_type="linear", average=None) == []


def test_several_settings_get_several_lines():
    """A bare Trainer's arguments with correlated noise: Adam, linear, no warm-up."""
    lines = advice_of(BANDED, None, lr_scheduler_type="linear", warmup_steps=0)
    assert len(lines) == 2 and "no warm-up" in lines[0] and "falls" in lines[1]


def test_a_rate_that_is_never_above_zero_is_named():
    """A warm-up begins at 0, so a run within its warm-up may train nothing; the default avoids it for one step."""
    (line,) = advice_of("independent", num_steps=1, **GOOD)
    assert "0 in every step" in line and "train.warmup_steps=0" in line
    assert advice_of("independent", num_steps=2) == []
    assert "warmup_steps" not in with_schedule({"max_steps": 1})


def test_without_noise_there_is_none():
    """Nothing has to be averaged out."""
    assert advice_of(BANDED, None, sigma=0.0, lr_scheduler_type="linear", adam_beta1=0.0) == []


def test_the_default_schedule_is_the_one_that_is_trained_with():
    """Keys of the default exist in `TrainingArguments`, and mean a share of the steps."""
    args = TrainingArguments("out", report_to="none", use_cpu=True, **WARM_UP)
    assert args.get_warmup_steps(40) == 4 and args.get_warmup_steps(36) == 4

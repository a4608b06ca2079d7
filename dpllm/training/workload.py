"""Compute the workload of a run: how momentum, learning rates and averaging carry noise into the released weights.

It follows from the training arguments, before the plan. The planner designs correlated noise for it
(`dpllm.mechanism.strategies`). The numbers are public, and cannot change ε.

`advice` names settings of optimizer, schedule and average that performed worse in measurements of private training.
`dpllm plan` prints the advice, and `dpllm.DPTrainer` logs it when a run begins. None of it concerns ε, and
no setting is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from dpllm.config.train_values import WARM_UP
from dpllm.mechanism.averages import Average, average_of, weights_of
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.corrected_adamw import asked_second_moment


@dataclass(frozen=True)
class UpdateRule:
    """The rule by which a run computes the released weights from its noisy gradients.

    Attributes:
        rates: (T,) the learning rate of each step.
        momentum: the decay of the optimizer's first moment; 0: it has none.
        bias_correction: whether the first moment is divided by 1 - β^(t+1), as Adam does.
        divides: whether the update is divided by the size of the gradients (Adam, Adafactor, Lion), so that it does not
            grow with their noise.
        average: the average of the weights that is released. None: the last weights are released.
    """

    rates: tuple[float, ...]
    momentum: float
    bias_correction: bool
    divides: bool
    average: Average | None

    @classmethod
    def of(cls, args: TrainingArguments, num_steps: int, average: Any = None) -> UpdateRule:
        """Return the rule of a run with the optimizer and the schedule of the arguments.

        Args:
            args: training arguments, whose optimizer and schedule can be built (`dpllm.training.arguments`).
            num_steps: T.
            average: the average of the weights that is released, as a recipe names it; None: the last weights are
                released.
        """
        momentum, bias_correction = _first_moment(args)
        return cls(
            rates=tuple(learning_rates(args, num_steps)),
            momentum=momentum,
            bias_correction=bias_correction,
            divides="sgd" not in str(getattr(args.optim, "value", args.optim)),
            average=average_of(average),
        )

    def workload(self) -> Workload:
        """Return the linear map from the noise of the steps to the released weights."""
        averaging = None if self.average is None else weights_of(self.average, len(self.rates)).tolist()
        return Workload.released(self.rates, self.momentum, bias_correction=self.bias_correction, averaging=averaging)


def workload_of(args: TrainingArguments, num_steps: int, average: Any = None) -> Workload:
    """Return the workload of a run with the optimizer and the schedule of the arguments; see `UpdateRule.of`."""
    return UpdateRule.of(args, num_steps, average).workload()


def learning_rates(args: TrainingArguments, num_steps: int) -> list[float]:
    """Return the (T,) learning rates of the arguments' schedule; for one that follows a loss, the first rate."""
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind in ("reduce_lr_on_plateau", "greedy"):
        return [args.learning_rate] * num_steps
    options: Any = args.lr_scheduler_kwargs
    schedule: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate),
        num_warmup_steps=args.get_warmup_steps(num_steps),
        num_training_steps=num_steps,
        scheduler_specific_kwargs=dict(options or {}),
    )
    (factor,) = schedule.lr_lambdas
    return [args.learning_rate * float(factor(step)) for step in range(num_steps)]


def _first_moment(args: TrainingArguments) -> tuple[float, bool]:
    """Return the decay of the optimizer's first moment, and whether its bias is corrected as Adam does."""
    if args.optim_target_modules is not None:
        return args.adam_beta1, True  # GaLore and others, which need the model: Adam in a subspace
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError:  # not installed where the plan is made; the run itself refuses it
        return args.adam_beta1, True
    name = kind.__name__.lower()
    if "lion" in name:
        return float(options["betas"][1]), False
    if "betas" in options:
        return float(options["betas"][0]), "adam" in name and asked_second_moment(args) != "low_passed"
    return float(options.get("momentum") or options.get("beta1") or 0.0), False


# -------------------------------------------------------------------------------------------------------- advice


_CONSTANT = " and ".join(f"train.{name}={value}" for name, value in WARM_UP.items())
_LITTLE_MOMENTUM = 0.5
_FALLEN = 0.5
"""A learning rate that ends below this share of its largest value counts as falling."""
_TRAINERS_RATE = 5e-5
"""The default of ``TrainingArguments.learning_rate``."""


def advice(plan: PrivacyPlan, rule: UpdateRule) -> list[str]:
    """Return one line for each setting with which the released weights are noisier than necessary.

    Args:
        plan: the plan of the run.
        rule: the optimizer, schedule and average of the run.
    """
    largest = max(rule.rates)
    if plan.noise_multiplier == 0:
        return []
    if largest == 0:
        return ["The learning rate is 0 in every step: the run spends ε but trains nothing. Set train.warmup_steps=0."]
    found = []
    if largest == _TRAINERS_RATE and rule.divides:
        found.append(
            "The learning rate is 5e-05, the default of TrainingArguments, which is for training without noise. In "
            "private training, the best measured rates are at least 10 times as large. Set train.learning_rate; dpllm "
            "plan suggest RECIPE computes one."
        )
    correlated = plan.mechanism.noise.tensors_kept > 0
    falls = rule.rates[-1] < _FALLEN * largest
    if correlated and rule.momentum < _LITTLE_MOMENTUM:
        found.append(
            f"The optimizer's momentum is {rule.momentum:g}. Correlated noise needs momentum; without it, steps follow "
            "noise that later steps cancel. Set train.adam_beta1=0.9, or with SGD train.optim_args=momentum=0.9."
        )
    if correlated and rule.bias_correction and rule.rates[0] == largest:
        found.append(
            "There is no warm-up. The bias correction of Adam's first moment enlarges the first updates, so later "
            f"steps do not cancel their noise. Set {_CONSTANT}."
        )
    if rule.divides and falls and (correlated or rule.average is not None):
        reason = "correlated noise" if correlated else "an average of the weights"
        found.append(
            f"The learning rate falls to {rule.rates[-1] / largest:.0%} of its largest value. With {reason}, a "
            f"constant rate and an average performed better in measurements. Set {_CONSTANT}, train.average=ema."
        )
    if not falls and rule.average is None:
        found.append(
            "The learning rate does not fall, and no average of the weights is released, so the released weights "
            "contain the noise of the last steps. Set train.average=ema, which costs no ε."
        )
    return found

"""Compute the workload of a run: how momentum, learning rates and averaging carry noise into the released weights.

It follows from the training arguments, before the plan. The planner designs correlated noise for it
(`dpllm.mechanism.strategies`). The numbers are public, and cannot change ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from dpllm.mechanism.averages import Average, average_of, weights_of
from dpllm.mechanism.strategies import Workload
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

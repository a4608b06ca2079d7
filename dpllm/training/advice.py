"""Advise on optimizer, schedule and average: settings that performed worse in measurements of private training.

`dpllm plan` prints the advice, and `dpllm.DPTrainer` logs it when a run begins. None of it concerns ε, and
no setting is changed.
"""

from __future__ import annotations

from dpllm.config.train_values import WARM_UP
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.workload import UpdateRule

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

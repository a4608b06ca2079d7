"""A learning rate that was computed for another plan: `dpllm plan` names the rate of the rule for the plan at hand.

Place in the flow: after the recipe is read. The rule is 0.3 rms(W) / √T · r (`dpllm.training.settings`). An override of
the number of steps or of the noise changes it, and the rate of the recipe stays. r, the noise of a step over that of
independent noise, follows from the whole plan: with bands and fewer steps the rule's rate may even fall. Nothing here
concerns ε.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpllm.config import ConfigError

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.privacy.calibration import Prediction
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.training.workload import UpdateRule

RATE = "train.learning_rate"
_OF_THE_RULE = ("train.max_steps", "train.num_train_epochs", "privacy.expected_batch_size", "privacy.noise")
_MOST_READ = 1_000_000_000
"""Trained parameters whose size is read only because of a remark."""


def stale_rate(path: str, overrides: Sequence[str], recipe: Recipe) -> str | None:
    """Return a remark on the learning rate of a recipe's file that overrides leave behind; None if there is none.

    Args:
        path: of the recipe.
        overrides: key=value.
        recipe: with the overrides.
    """
    keys = [one.partition("=")[0] for one in overrides]
    changed = [key for key in keys if key in _OF_THE_RULE or key.startswith("privacy.noise.")]
    rate, optimizer = recipe.train.get("learning_rate"), str(recipe.train.get("optim", "adamw"))
    if rate is None or not changed or RATE in keys or not optimizer.startswith("adam"):
        return None
    return (
        f"note: {' and '.join(changed)} replaced, and {RATE}={rate:g} stays as in the recipe. If it was computed, it "
        f"was for another plan; the rate for this one: dpllm plan {shlex.join([path, *overrides])}"
    )


def computed_rate(recipe: Recipe, plan: PrivacyPlan, rule: UpdateRule, predicted: Prediction | None) -> float | None:
    """Return the learning rate that the rule gives for a plan; None where it does not apply, or takes long to compute.

    Args:
        recipe: whose model's weights are read.
        plan: its plan.
        rule: its optimizer and schedule.
        predicted: the noise of its steps; None: the noise is independent.
    """
    from dpllm.training.settings import starting_rate
    from dpllm.training.weight_size import size_of_model

    staged, own = recipe.public_pretrain is not None, recipe.train.get("trainer") is not None
    if staged or own or recipe.model.name is None or plan.noise_multiplier == 0 or not rule.divides:
        return None
    try:
        size = size_of_model(recipe.model, _MOST_READ)
    except ConfigError:  # the weights are not here
        return None
    if size is None:
        return None
    return starting_rate(size.rms, plan.num_steps, 1.0 if predicted is None else predicted.step_ratio)


def rate_words(recipe: Recipe, rule: UpdateRule, computed: float | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the row of the plan about the learning rate, and the advice about one that is far from the rule's.

    Args:
        recipe: the recipe.
        rule: its optimizer and schedule.
        computed: the result of `computed_rate`.
    """
    from dpllm.privacy.defaults import rate_range

    if computed is None:
        return [], []
    given = max(rule.rates)
    low, high = rate_range(computed, recipe.model.adapter is not None)
    same = f"{given:.2g}" == f"{computed:.2g}"
    by_rule = "that of the rule" if same else f"and {computed:g} by the rule"
    row = ("learning rate", f"{given:g}, {by_rule} for this plan")
    if low <= given <= high:
        return [row], []
    return [row], [
        f"The learning rate is {given:g}, and the rule gives {computed:g} for T = {len(rule.rates)} steps of this "
        f"noise ({low:g} to {high:g} are worth a rehearsal). If it was computed for another number of steps or other "
        f"noise, set {RATE}={computed:g}."
    ]


def rate_values(rule: UpdateRule, computed: float | None) -> dict[str, Any]:
    """Return the same as values for JSON."""
    return {"learning_rate": max(rule.rates), "computed_learning_rate": computed}

"""The run that `dpllm plan suggest` suggests: a recipe's data, guarantee and model with the settings to start from.

Place in the flow: before any training. The defaults are those that were measured best (`docs/correlated_noise.md`):
AdamW without weight decay, a constant learning rate after a warm-up, an average of the weights, and correlated noise
whose bands are chosen as ``bands: auto`` does. Only public numbers are used: N, the plan, and the model's weights.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from dpllm.config import ConfigError, Recipe
from dpllm.config.privacy_section import CLIP_NORM, ROWS_PER_UNIT
from dpllm.config.recipe import refuse_trainer
from dpllm.config.train_values import WARM_UP
from dpllm.data.units import UnitIndex
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Noise, Spec
from dpllm.mechanism.strategies import Workload
from dpllm.privacy import defaults
from dpllm.privacy.calibration import Prediction, predicted_noise, prediction
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.arguments import num_private_steps, plan_for, training_arguments
from dpllm.training.preflight import to_plan
from dpllm.training.settings import (
    WARM_UP_SHARE,
    Setting,
    Suggestion,
    average_decay,
    rate_reason,
    starting_rate,
)
from dpllm.training.weight_size import WeightSize
from dpllm.training.workload import UpdateRule

_ADAMW = {"optim": "adamw_torch", "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0}
_FEW_STEPS = 10
_ABOVE_EPSILON = 100
_PEFT_RANK = 8  # of LoraConfig
RATE = "train.learning_rate"


@dataclass(frozen=True)
class Suggested:
    """The suggested run, without its learning rate.

    Attributes:
        recipe: the recipe with the suggested settings; its learning rate is still the recipe's.
        plan: the plan of that run.
        rule: its optimizer, schedule and average.
        predicted: the predicted noise of the released weights. None: the noise is independent.
        settings: the suggested settings, without the learning rate.
        before: the learning rate of the recipe.
        fixed_order: the predicted noise with BLT noise, over that of independent noise. None: it was not compared.
    """

    recipe: Recipe
    plan: PrivacyPlan
    rule: UpdateRule
    predicted: Prediction | None
    settings: tuple[Setting, ...]
    before: float
    fixed_order: float | None = None

    @property
    def step_ratio(self) -> float:
        """r: the noise of a step over that of independent noise at the same ε and δ."""
        return 1.0 if self.predicted is None else self.predicted.step_ratio

    def rate_for(self, size: WeightSize) -> Setting:
        """Return the computed learning rate for trained weights of this size."""
        steps, r = self.plan.num_steps, self.step_ratio
        reason = rate_reason(size.words, size.rms, steps, r)
        return Setting(RATE, starting_rate(size.rms, steps, r), reason, self.before)

    def with_rate(self, rate: Setting, notes: tuple[str, ...] = ()) -> Suggestion:
        """Return the whole suggestion.

        Args:
            rate: the learning rate, with its reason.
            notes: further remarks, which come first.
        """
        found = [*_notes(self.recipe, self.plan), *self._about_a_fixed_order()]
        return Suggestion((rate, *self.settings), (*notes, *found), _guides(self.recipe, self.plan))

    def range_around(self, rate: Setting) -> str:
        """Return a remark on the learning rates around the computed one."""
        return defaults.range_words(float(rate.value), self.recipe.model.adapter is not None, self.step_ratio != 1)

    def _about_a_fixed_order(self) -> list[str]:
        """Return the remark on units that cannot be sampled."""
        if self.fixed_order is None:
            return []
        suggested = 1.0 if self.predicted is None else self.predicted.noise / self.predicted.independent
        return [
            "For units that cannot be sampled: privacy.noise=blt visits them in a fixed order. Its predicted noise is "
            f"{self.fixed_order:.2f} of that of independent noise, and that of the suggestion {suggested:.2f}. The "
            "one fine-tuning that was measured was about as good as with 16 bands, and a resume is charged as a second "
            "release of all units."
        ]


def suggested_run(recipe: Recipe, units: UnitIndex, own_noise: bool = False) -> Suggested:
    """Return the suggested run for a recipe.

    Args:
        recipe: its data, model, guarantee, batch size and number of steps are kept.
        units: index of the rows of each unit.
        own_noise: whether the recipe's noise is kept, whatever it is.

    Raises:
        ConfigError: the recipe is of a private tuning, or its run has no noise.
        ValueError: no plan can be made.
    """
    if recipe.train.get("trainer") != "sft":  # whose loss is a mean over tokens, as in the measurements
        refuse_trainer(recipe, "A suggestion of settings")
    privacy = recipe.privacy
    if privacy.selection is not None:
        raise ConfigError("a suggestion is for single runs: leave privacy.selection out")
    if privacy.noise_multiplier == 0:
        raise ConfigError(
            "privacy.noise_multiplier=0 trains without privacy, and the suggestion is for noisy gradients: set "
            "privacy.epsilon, or another noise_multiplier"
        )
    population = units.num_rows if privacy.sampling == "example" else units.num_units
    steps = num_private_steps(training_arguments(to_plan(recipe.train)), privacy, population)
    settings = [*_optimizer(recipe), *_schedule(recipe, steps)]
    train = {**recipe.train, **{item.key.removeprefix("train."): item.value for item in settings}}
    noise, kept = (privacy.noise, "Kept.") if own_noise else _noise_to_choose_from(recipe)
    chosen = dataclasses.replace(
        recipe, train=train, privacy=dataclasses.replace(privacy, noise=noise, clip_norm=CLIP_NORM)
    )
    arguments = training_arguments(to_plan(train))
    plan = plan_for(arguments, chosen.privacy, units, average=train["average"])
    rule = UpdateRule.of(arguments, plan.num_steps, train["average"])
    written = _noise_to_write(plan, noise)
    predicted = None if written == "independent" else prediction(plan, rule.workload())
    settings += [
        Setting(
            "privacy.clip_norm",
            CLIP_NORM,
            "C far below typical norms of gradients, so that nearly every contribution is clipped. AdamW divides by C "
            "again, so the learning rate does not depend on it. C = 0.1 and normalised gradients were measured alike.",
            privacy.clip_norm,
        ),
        Setting("privacy.noise", written, kept or _noise_reason(predicted), privacy.noise),
    ]
    final = dataclasses.replace(chosen, privacy=dataclasses.replace(chosen.privacy, noise=written))
    fixed = None if kept else _noise_in_a_fixed_order(plan, rule.workload(), predicted)
    rate = float(training_arguments(to_plan(recipe.train)).learning_rate)
    return Suggested(final, plan, rule, predicted, tuple(settings), rate, fixed)


def _noise_in_a_fixed_order(plan: PrivacyPlan, workload: Workload, predicted: Prediction | None) -> float | None:
    """Return the predicted noise with BLT noise, over that of independent noise at the same ε and δ.

    It is None if no σ reaches ε.
    """
    draw, target = plan.mechanism.draw, plan.epsilon_under(plan.adjacency)

    def noise_of(one: Noise) -> float:
        return predicted_noise(one, draw, workload, target, plan.num_steps, plan.delta, plan.adjacency)

    independent = noise_of(IndependentNoise()) if predicted is None else predicted.independent
    (fixed,) = BltNoise().candidates(draw, workload)
    ratio = noise_of(fixed) / independent
    return ratio if math.isfinite(ratio) else None


def _optimizer(recipe: Recipe) -> list[Setting]:
    """Return AdamW's settings where the recipe has others."""
    args: Any = training_arguments(to_plan(recipe.train))
    now = {name: getattr(args, name) for name in _ADAMW}
    now["optim"] = str(getattr(args.optim, "value", args.optim))
    wanted = {**_ADAMW, **({"optim": now["optim"]} if now["optim"].startswith("adamw") else {})}
    reason = "AdamW with momentum 0.9 and without weight decay was measured best; the learning rate is for it."
    found = [Setting(f"train.{name}", value, reason, now[name]) for name, value in wanted.items() if now[name] != value]
    if wanted["optim"] != now["optim"]:
        for name in ("optim_args", "optim_target_modules"):
            if recipe.train.get(name) is not None:
                found.append(Setting(f"train.{name}", None, "It belongs to another optimizer.", recipe.train[name]))
    return found


def _schedule(recipe: Recipe, num_steps: int) -> list[Setting]:
    before = recipe.train
    constant = (
        "A constant rate after a warm-up: the average replaces a falling rate, and the warm-up keeps Adam's first, "
        "enlarged updates small."
    )
    few = num_steps < _FEW_STEPS
    kind = "constant" if few else WARM_UP["lr_scheduler_type"]
    share = 0 if few else WARM_UP_SHARE
    words = "So few steps have no warm-up." if few else constant
    decay = average_decay(num_steps)
    average, covered = {"kind": "ema", "decay": decay}, round(1 / (1 - decay))
    most = "" if None in (recipe.privacy.epsilon, recipe.privacy.noise_multiplier) else "at most "
    found = [
        Setting("train.lr_scheduler_type", kind, words, before.get("lr_scheduler_type")),
        Setting("train.warmup_steps", share, words, before.get("warmup_steps", 0)),
        Setting(
            "train.average",
            average,
            f"The released weights are an average of about the last {covered} of {most}{num_steps:,} steps, which have "
            "less noise. It costs no ε.",
            _as_mapping(before.get("average")),
        ),
    ]
    if before.get("lr_scheduler_kwargs") is not None:
        reason = "It belongs to another schedule."
        found.append(Setting("train.lr_scheduler_kwargs", None, reason, before["lr_scheduler_kwargs"]))
    return found


def _as_mapping(average: Any) -> Any:
    """Return an average as a recipe writes it with all words: "ema" is the one with decay 0.95."""
    return {"kind": "ema", "decay": 0.95} if average in ("ema", {"kind": "ema"}) else average


def _noise_to_choose_from(recipe: Recipe) -> tuple[Any, str]:
    """Return the noise whose candidates are compared, and the reason if the recipe's is kept."""
    privacy, spec = recipe.privacy, Spec.of(recipe.privacy.noise)
    if privacy.noise_multiplier is not None:
        return privacy.noise, "Kept: noise_multiplier fixes σ, and bands are compared only where ε determines it."
    if privacy.sampling == "example":
        return privacy.noise, "Kept: correlated noise is for runs that draw whole units."
    if privacy.randomness == "discrete":
        return privacy.noise, "Kept: correlated noise is for normal numbers, and the recipe's are discrete."
    if spec.kind not in ("independent", "banded"):
        return (
            privacy.noise,
            "Kept: its units are not sampled, and bands: auto compares noises of sampled ones.",
        )
    strategy = dict(spec.options).get("strategy") if spec.kind == "banded" else None
    return {"kind": "banded", "bands": "auto", **({"strategy": strategy} if strategy else {})}, ""


def _noise_to_write(plan: PrivacyPlan, compared: Any) -> Any:
    """Return the noise for the recipe: the chosen bands, whose strategy the plan computes again."""
    if Spec.of(compared).options == () or dict(Spec.of(compared).options).get("bands") != "auto":
        return compared
    chosen = dict(plan.noise.options)
    if chosen["bands"] == 1:
        return "independent"
    return {**Spec.of(compared).to_plain(), "bands": chosen["bands"]}  # type: ignore[dict-item]


def _noise_reason(predicted: Prediction | None) -> str:
    if predicted is None:
        return "More bands would not lower the predicted noise of the released weights by 5 %."
    return (
        f"The fewest bands within 5 % of the least predicted noise of the released weights: "
        f"{predicted.noise / predicted.independent:.2f} of that of independent noise at the same ε."
    )


def _guides(recipe: Recipe, plan: PrivacyPlan) -> tuple[Setting, ...]:
    """Return the rules for settings that a suggestion keeps: b, T, δ, k and the rank."""
    privacy, num_units = recipe.privacy, plan.num_units
    by_example = privacy.sampling == "example"
    found = []
    if not by_example:
        batch, steps = defaults.batch_and_steps(num_units)
        reason = defaults.batch_reason(num_units, batch, steps)
        found += [
            Setting("privacy.expected_batch_size", batch, reason, plan.expected_batch_size),
            Setting("train.max_steps", steps, reason, plan.num_steps),
        ]
    found.append(Setting("privacy.delta", defaults.delta_for(num_units), defaults.delta_reason(num_units), plan.delta))
    if privacy.max_rows_per_unit is not None:
        rows = privacy.max_rows_per_unit if by_example else ROWS_PER_UNIT
        found.append(
            Setting(
                "privacy.max_rows_per_unit", rows, defaults.rows_reason(rows, by_example), privacy.max_rows_per_unit
            )
        )
    if recipe.model.adapter is not None:
        found.append(
            Setting(
                "model.adapter.r",
                defaults.RANK,
                defaults.rank_reason(defaults.RANK),
                recipe.model.adapter.get("r", _PEFT_RANK),
            )
        )
    return tuple(found)


def _notes(recipe: Recipe, plan: PrivacyPlan) -> tuple[str, ...]:
    found = defaults.need_words(plan.num_units, plan.target_epsilon or plan.epsilon, plan.unit)
    peft = recipe.model.adapter
    if peft is not None:
        found.append("The rule for the learning rate was not measured with adapters: rehearse it on public text.")
        if not peft.get("modules_to_save"):
            found.append(
                "Adapters alone were measured far worse where the private domain differs from the model's: then train "
                "embeddings and head too (model.adapter.modules_to_save)."
            )
    smallest = _ABOVE_EPSILON * float(training_arguments(to_plan(recipe.train)).adam_epsilon)
    if plan.noise_stddev / plan.expected_batch_size < smallest:
        found.append(
            f"The noise of a step, {plan.noise_stddev / plan.expected_batch_size:.1g} in each entry, is near "
            "train.adam_epsilon, which then shrinks the updates: lower train.adam_epsilon."
        )
    return tuple(found)

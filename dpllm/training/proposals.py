"""Compute the settings that a recipe leaves out: batch size, steps, learning rate and related keys, with reasons.

A recipe of four sections and six keys trains: `proposals` computes the rest before anything is trained, and
`complete_recipe` returns the recipe with it. Hardware has no influence, and of the private records only N, which the
guarantee treats as public; so a proposal is the same for `dpllm plan`, for `dpllm train` and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from dpllm.config import ConfigError, ModelConfig, Recipe, load_recipe
from dpllm.config.recipe_file import read_raw
from dpllm.data.rows import load_train_and_eval, unit_index_of
from dpllm.data.units import UnitIndex
from dpllm.models.starting_point import refuse_private_start
from dpllm.privacy import defaults
from dpllm.training.preflight import check_recipe
from dpllm.training.settings import Setting
from dpllm.training.suggested_run import RATE, suggested_run
from dpllm.training.weight_size import WeightSize, size_of_model

_BATCH, _STEPS = "privacy.expected_batch_size", "train.max_steps"
_GOES_WITH_THE_RATE = ("privacy.noise", "train.average", "train.warmup_steps")
_WEIGHTS = ("*.json", "*.safetensors")


def complete_recipe(
    path: str | Path, overrides: Sequence[str] = (), to_train: bool = False
) -> tuple[Recipe, tuple[Setting, ...]]:
    """Return the recipe of a file, completed by the settings that it leaves out, and those settings.

    Args:
        path: a file, or the name of a shipped recipe.
        overrides: dotted assignments.
        to_train: as for `proposals`.

    Raises:
        ConfigError: as `load_recipe`, or a setting that is left out cannot be computed.
    """
    found = proposals(path, overrides, to_train)
    return load_recipe(path, [*overrides, *(setting.override for setting in found)]), found


def proposals(path: str | Path, overrides: Sequence[str] = (), to_train: bool = False) -> tuple[Setting, ...]:
    """Return the settings that a recipe leaves out, with their reasons; none for a recipe that has them all.

    Batch size and steps follow from N. A recipe without a learning rate gets the one of the rule for its model, its
    steps and its noise, and with it the noise, the average and the warm-up that the rule was measured with, where the
    recipe does not name them. The learning rate of preference pairs (``train.trainer: dpo``) stays TRL's.

    Args:
        path: a file, or the name of a shipped recipe.
        overrides: dotted assignments, which count as settings of the recipe.
        to_train: whether the recipe will be trained now: its output folder is checked too, and the weights of a model
            of the Hub are fetched, from which the learning rate is computed.

    Raises:
        ConfigError: the recipe cannot be read, or the weights of its model are not on this machine.
        DataError: the records cannot be read.
    """
    raw, recipe = read_raw(path, overrides), load_recipe(path, overrides)
    found: list[Setting] = []

    def lacks(*keys: str) -> bool:
        return all(_value(raw, key) is None for key in keys)

    if recipe.beside:  # a method has settings of its own
        return ()
    by_rule = lacks(RATE) and recipe.train.get("trainer") != "dpo" and recipe.privacy.noise_multiplier != 0
    if not (lacks(_BATCH) or lacks(_STEPS, "train.num_train_epochs") or by_rule):
        return ()
    check_recipe(recipe, to_train)  # before a record is read
    refuse_private_start(recipe.model.name, recipe.model.start_is_independent)
    units = unit_index_of(load_train_and_eval(recipe.data, recipe.privacy)[0], recipe.privacy)
    found += _batch_and_steps(recipe, units, lacks)
    if by_rule:
        optimizer = str(recipe.train.get("optim", "adamw"))
        if not optimizer.startswith("adam"):
            raise ConfigError(
                f"{path}: {RATE} is not given, and its rule is for AdamW: set it for train.optim={optimizer}, or leave "
                "train.optim out"
            )
        known = load_recipe(path, [*overrides, *(setting.override for setting in found)])
        run = suggested_run(known, units, own_noise=not lacks("privacy.noise"))
        rate = run.rate_for(_size(recipe.model, to_train))
        found.append(rate)
        found += [one for one in run.settings if one.key in _GOES_WITH_THE_RATE and lacks(one.key)]
        if not lacks("train.lr_scheduler_type"):
            found = [one for one in found if one.key != "train.warmup_steps"]
    return tuple(found)


def _batch_and_steps(recipe: Recipe, units: UnitIndex, lacks: Callable[..., bool]) -> list[Setting]:
    """Return b and T where the recipe lacks them."""
    privacy = recipe.privacy
    rows = privacy.sampling == "example"
    count, noun = (units.num_rows, "rows") if rows else (units.num_units, "units")
    batch = defaults.batch_size(privacy, count)
    lacks_steps = lacks(_STEPS, "train.num_train_epochs")
    steps = recipe.train.get("max_steps") or 0
    if lacks_steps:
        steps = defaults.steps_for(count, batch)
    passes = steps * batch / count if steps > 0 else recipe.train.get("num_train_epochs") or 3
    passes_words = f"{passes:.1f} passes over the {count:,} {noun}"
    ends = " at most: the run ends before the step that would exceed ε" if privacy.epsilon is not None else ""
    found = []
    if lacks(_BATCH):
        reason = f"{batch / count:.1%} of the {count:,} {noun} in a step on average, and {passes_words}"
        if privacy.noise_multiplier is not None:
            reason += f"{ends}. At a given σ, larger batches cost more ε."
        elif rows or not lacks_steps:
            reason += f". At the same ε, a larger batch has more noise in all, and less for each of its {noun}."
        else:
            reason = defaults.batch_reason(count, batch, steps)
        found.append(Setting(_BATCH, batch, reason, None))
    if lacks_steps:
        ends = ends if privacy.noise_multiplier is not None else ""
        found.append(Setting(_STEPS, steps, f"{passes_words}, {batch:,} in a step on average{ends}.", None))
    return found


def _size(model: ModelConfig, download: bool) -> WeightSize:
    """Return the size of the trained weights.

    Raises:
        ConfigError: they are not on this machine.
    """
    if download and model.name is not None and not Path(model.name).expanduser().exists():
        snapshot_download(model.name, allow_patterns=list(_WEIGHTS))
    try:
        return size_of_model(model)
    except ConfigError as error:
        raise ConfigError(
            f"{RATE} is not given, and it follows from the model's weights: {error}; or set {RATE}"
        ) from error


def _value(raw: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    inside = raw.get(section)
    return inside.get(name) if isinstance(inside, Mapping) else None

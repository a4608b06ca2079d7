"""Check a recipe without its data, before anything is read, trained or written.

`dpllm train`, `recipes/compare.py` and `dpllm plan` do this first. `dpllm.config` has checked types and ranges of the
recipe's values when it read them. Here they are checked against the libraries, the machine and the model: the options
of both trainings, optimizer and schedule, the output folder, the budget file, the tokenizer, and the model, built
without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import TrainingArguments
from transformers.integrations import integration_utils

from dpllm.config import PRETRAINED_FOLDER, ConfigError, Recipe, nearest
from dpllm.config.extras import require
from dpllm.config.formats.record_format import Chat
from dpllm.config.metrics import METRICS
from dpllm.config.output_folder import REPORTS, check_output_folder
from dpllm.config.recipe_file import located
from dpllm.data.chat import ChatTemplate
from dpllm.engines.guard import no_totals
from dpllm.mechanism.catalogue import clipping_of, noise_of, with_randomness
from dpllm.mechanism.parts import Noise, Spec, require_entries
from dpllm.models.inputs import num_positions, refuse_unpackable
from dpllm.models.load import check_adapter, load_tokenizer, require_folder, skeleton
from dpllm.models.merging import refuse_unmergeable
from dpllm.models.quantization import make_ready, refuse_sharding
from dpllm.models.starting_point import refuse_steering
from dpllm.privacy.budget import read_budget
from dpllm.training.arguments import check_optimizer, check_section, refuse_options, training_arguments
from dpllm.training.choose_clipper import clipper_for
from dpllm.training.trl_arguments import pair_loss_of, refuse_elsewhere, table_of

PLAIN = {"save_strategy": "no", "report_to": "none"}
"""Default options of a recipe's trainings."""
_MOST_ENTRIES = "randomness='discrete' has an accounting for at most {:,} trained parameters; they are not counted here"


def to_plan(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's section as `dpllm plan` reads it: this machine need not have a GPU for bf16 and tf32."""
    read = {**PLAIN, **{name: value for name, value in section.items() if name != "tf32"}}
    return read if torch.accelerator.is_available() else {**read, "use_cpu": True}


def check_values(recipe: Recipe) -> None:
    """Check the values of a recipe that other libraries read: ``train`` and ``model.adapter``. Nothing is loaded.

    Raises:
        ConfigError: a name is unknown, or a value of another kind or out of range.
    """
    with located(recipe):
        if recipe.public_pretrain is not None:
            _check_train(
                "public_pretrain.train", {"output_dir": "unused", **recipe.public_pretrain.train}, False, False
            )
        _check_train("train", recipe.train, to_train=False, private=True)
        check_adapter(recipe.model)


def check_recipe(recipe: Recipe, to_train: bool = True) -> list[str]:
    """Check every part of a recipe that does not need its records.

    Args:
        recipe: the recipe.
        to_train: whether this machine will train: then a model on the Hub is checked as well, and loggers must be
            installed. If false (`dpllm plan`), nothing is downloaded.

    Returns:
        The parts that were not checked, and surprising behaviour of the chat template, one line each.

    Raises:
        ConfigError, EngineError: training would fail; the message has the remedy.
        GhostError, ValueError: the model cannot be clipped exactly, or not as requested; or it has more trained
            parameters than the noise accounting supports.
        BudgetError: the budget file cannot be read.
    """
    with located(recipe):
        return _check_recipe(recipe, to_train)


def _check_recipe(recipe: Recipe, to_train: bool) -> list[str]:
    public = recipe.public_pretrain
    if public is not None:
        folder = Path(str(recipe.train.get("output_dir", ""))) / PRETRAINED_FOLDER
        _check_train("public_pretrain.train", {"output_dir": str(folder), **public.train}, to_train, private=False)
    args = _check_train("train", recipe.train, to_train, private=True)
    check_adapter(recipe.model)
    refuse_steering(args, (), None, recipe.data.eval.public)
    if recipe.model.quantization is not None:
        refuse_sharding(None, args)
        if to_train:
            require("quantization", "model.quantization")
    if to_train and any(METRICS[name].library for name in recipe.data.metrics):
        require("metrics", f"data.metrics={recipe.data.metrics}")
    noise = with_randomness(noise_of(Spec.of(recipe.privacy.noise)), recipe.privacy.randomness)
    if noise.wants_total and args.deepspeed_plugin is not None:
        raise no_totals("DeepSpeed")
    if recipe.privacy.budget_file is not None:
        read_budget(recipe.privacy.budget_file)
    for what, name in (("model", recipe.model.name), ("tokenizer", recipe.model.tokenizer)):
        if name is not None:
            require_folder(what, name)
    if recipe.model.name is not None and not Path(recipe.model.name).is_dir() and not to_train:
        check_output_folder("train.output_dir", str(args.output_dir))
        return [
            f"the model {recipe.model.name} is not a folder here, so its parts and its tokenizer are not checked",
            *([] if noise.max_entries is None else [_MOST_ENTRIES.format(noise.max_entries)]),
        ]
    model = skeleton(recipe.model)
    _check_mechanism(recipe, model, noise)
    unchecked = []
    if recipe.model.tokenizer_vocab_size is not None:
        if public is None:
            raise ConfigError(
                "model.tokenizer_vocab_size trains a tokenizer on public text, but the recipe has no public_pretrain "
                "section: add one, or name a tokenizer with model.tokenizer"
            )
    elif to_train or Path(recipe.model.tokenizer or recipe.model.name or "/dev/null").is_dir():
        tokenizer = load_tokenizer(recipe.model)
        if recipe.data.form.holds is Chat:
            template = ChatTemplate(tokenizer)
            template.source()
            template.refuse_unused(recipe.data.chat_template_kwargs, "data")
            unchecked += template.notes(masked=recipe.train.get("trainer") is None)
    else:
        unchecked.append("the tokenizer is not checked: model.tokenizer names no folder here")
    require_positions(model, recipe.data.max_length, "data.max_length allows rows of")
    if recipe.public_pretrain is not None:
        longest = recipe.public_pretrain.data.max_length
        require_positions(model, longest, "public_pretrain.data.max_length allows rows of")
    check_output_folder("train.output_dir", str(args.output_dir), REPORTS + _saved_bytes(model, recipe))
    return unchecked


def _check_mechanism(recipe: Recipe, model: nn.Module, noise: Noise) -> None:
    """Check that the model's layers can be clipped as the recipe says, and that the noise's accounting covers them.

    Args:
        recipe: the recipe.
        model: built without weights, with its adapters and its frozen parameters.
        noise: noise of the recipe.
    """
    if recipe.microbatch.pack:
        refuse_unpackable(model, recipe.model.task)
    clipping = clipping_of(Spec.of(recipe.privacy.clipping), recipe.privacy.clip_norm)
    clipper = clipper_for(recipe.privacy.gradients, model, clipping)
    num_entries = sum(parameter.numel() for parameter in clipper.parameters.values())
    clipper.remove()
    require_entries(noise, num_entries)


def require_positions(model: nn.Module, longest: int, what: str) -> None:
    """Raise an error if rows may be longer than the model has positions.

    Args:
        model: model with or without weights.
        longest: tokens of the longest row.
        what: subject of the message; the length and the remedy follow it.

    Raises:
        ConfigError: rows may be longer.
    """
    most = num_positions(model)
    if most is not None and longest > most:
        raise ConfigError(
            f"{what} {longest} tokens, but the model has {most} positions: set data.max_length={most} or less"
        )


def refuse_unusable_model(model: nn.Module, args: TrainingArguments, merges: bool) -> None:
    """Refuse a model that a Trainer cannot train privately, save or continue; quantised layers are made ready.

    Args:
        model: model to train.
        args: arguments of the training.
        merges: whether the model is also written with its adapter merged.

    Raises:
        ConfigError: it cannot; the message has the remedy.
    """
    refuse_unwrapped_adapters(model)
    refuse_sharding(model, args)
    make_ready(model)
    if merges:
        refuse_unmergeable(model, args)


def refuse_unwrapped_adapters(model: nn.Module) -> None:
    """Raise an error for an adapter that transformers itself holds: its Trainer cannot load such a checkpoint.

    Steps that a crash loses would stay charged, and the run could not continue.

    Args:
        model: model to train.

    Raises:
        ConfigError: ``model.add_adapter`` made an adapter in a model that PEFT does not wrap.
    """
    if getattr(model, "_hf_peft_config_loaded", False) and not isinstance(model, PeftModel):
        raise ConfigError(
            "The model has an adapter of model.add_adapter() or model.load_adapter(), from whose checkpoints a Trainer "
            "cannot resume. Let PEFT wrap the model: model = peft.get_peft_model(model, config)"
        )


def _check_train(name: str, section: Mapping[str, Any], to_train: bool, private: bool) -> TrainingArguments:
    try:
        check_section(section)
        args = training_arguments({**PLAIN, **section} if to_train else to_plan(section))
        if private:
            refuse_elsewhere(section)
            refuse_options(args, table_of(section.get("trainer")))
            if section.get("trainer") == "dpo":
                pair_loss_of(args)
        check_optimizer(args)
    except ConfigError as error:
        raise ConfigError(str(error).replace("train", name, 1) if not private else str(error)) from error
    follows = {"eval_strategy": getattr(args.eval_strategy, "value", args.eval_strategy) != "no"}
    for option, is_set in {**follows, "eval_on_start": args.eval_on_start}.items():
        if is_set:
            raise ConfigError(
                f"{name}.{option}={section.get(option)} evaluates during the training, for which a recipe has no rows: "
                "the held-out records are measured before and after it. Leave it out, or write a program with "
                "DPTrainer and its eval_dataset"
            )
    known = integration_utils.INTEGRATION_TO_CALLBACK
    for logger in args.report_to or []:
        if logger not in known:
            raise ConfigError(f"{name}.report_to={logger} is unknown{nearest(str(logger), known)}")
        if to_train and logger not in integration_utils.get_available_reporting_integrations():
            raise ConfigError(f"{name}.report_to={logger}: it is not installed. Install it, or leave report_to out")
    return args


def _saved_bytes(model: nn.Module, recipe: Recipe) -> int:
    """Return the bytes of the weights that the run saves at its end: the adapter's, or the whole model's."""
    parameters = [p for p in model.parameters() if recipe.model.adapter is None or p.requires_grad]
    return sum(p.numel() * p.element_size() for p in parameters)

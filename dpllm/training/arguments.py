"""Read a recipe's ``train`` section strictly into training arguments, and refuse options that break privacy.

Settings that are not arguments are refused too: an accelerate configuration sets environment variables, which
TrainingArguments do not contain.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
import os
import re
import typing
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Never, TypedDict

import torch
from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from transformers import Trainer, TrainingArguments
from transformers.optimization import get_scheduler

from dpllm.config import ConfigError, PrivacyConfig, nearest, read_section
from dpllm.config.extras import require
from dpllm.config.foreign_kinds import check_kinds, plain_names
from dpllm.config.train_values import OWN, PLAIN, check_arguments, check_train
from dpllm.config.values import shown
from dpllm.data.units import UnitIndex
from dpllm.engines import private_config
from dpllm.mechanism.parts import Spec
from dpllm.privacy.defaults import batch_size
from dpllm.privacy.plan import PrivacyPlan, make_plan
from dpllm.report.publishing import refuse_uploads
from dpllm.training.argument_table import ARGUMENTS, Argument, refuse_by_table
from dpllm.training.corrected_adamw import asked_second_moment, refuse_unusable
from dpllm.training.trl_arguments import config_of
from dpllm.training.workload import workload_of

_SPLITTING = {"TP": "tensor", "CP": "context", "SP": "sequence"}


def refuse_environment(environment: Mapping[str, str] | None = None) -> None:
    """Refuse settings of the accelerate configuration that cannot be kept private.

    Args:
        environment: environment variables. None: those of this process.

    Raises:
        ConfigError: torch.compile, fp16 or fp8, FSDP version 1, or parallelism that splits a unit's layers or rows is
            set; the message names it.

    >>> refuse_environment({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: The accelerate configuration sets dynamo_backend
    (ACCELERATE_DYNAMO_BACKEND=INDUCTOR): ...
    """
    given = os.environ if environment is None else environment
    compiler = given.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() not in ("", "no"):
        raise ConfigError(
            f"The accelerate configuration sets dynamo_backend (ACCELERATE_DYNAMO_BACKEND={compiler}): the graph of "
            'a whole model may leave out the taps that compute the norms. Set dynamo_backend: "NO" there, and '
            "torch_compile=True in TrainingArguments (model.compile: blocks in a recipe)"
        )
    precision = given.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision.lower() in ("fp16", "fp8"):
        raise ConfigError(
            f"The accelerate configuration sets mixed_precision to {precision} (ACCELERATE_MIXED_PRECISION): "
            + (
                "its loss scaler skips steps depending on the data. "
                if precision.lower() == "fp16"
                else "its scales are chosen over all rows of a microbatch. "
            )
            + 'Set mixed_precision: "no" there, and train.bf16=true in the recipe'
        )
    if given.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and given.get("FSDP_VERSION", "1") == "1":
        raise ConfigError(
            "The accelerate configuration sets FSDP version 1, whose flat parameters hide the layers' parameters. Set "
            "fsdp_version: 2 (dpllm train --config fsdp2)"
        )
    for short, long in _SPLITTING.items():
        size = given.get(f"PARALLELISM_CONFIG_{short}_SIZE", "1")
        if size not in ("", "0", "1"):
            raise ConfigError(
                f"The accelerate configuration sets parallelism_config_{short.lower()}_size to {size}: {long} "
                "parallelism splits a unit's layers or rows over processes, and its norm with them. Leave it at 1"
            )


def find_deepspeed_config(root: Path, environment: MutableMapping[str, str] | None = None) -> None:
    """Make the DeepSpeed file of the shipped accelerate configurations available from any working directory.

    accelerate resolves its path from the folder in which ``accelerate launch`` was called. A path that does not exist
    there is resolved from the folder that contains ``accelerate_configs``.

    Args:
        root: the folder that contains ``accelerate_configs``.
        environment: environment variables, changed in place. None: those of this process.
    """
    given = os.environ if environment is None else environment
    name = given.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    if name.endswith(".json") and not Path(name).exists() and (root / name).is_file():
        given["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(root / name)


# Where TrainingArguments takes more than its annotations say; the names of the table are checked there.
_TAKEN: Mapping[str, Any] = {
    "resume_from_checkpoint": bool | str,
    "fsdp": bool | str | list[str],
    "debug": str | list[str],
    "loss_type": str | list[str],
}
FILES = ("accelerator_config", "fsdp_config", "deepspeed")
"""Names whose value is a mapping or the name of a file; the engines read them."""

# Errors that the classes of arguments, optimizers and schedules raise for unusable values. Any other error, such as a
# lack of memory, is not a mistake in a recipe.
_UNUSABLE = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, AssertionError, ImportError, OSError)
# Optimizers that update inside backward() or scale by the loss, before clipping and noise have taken place.
_REFUSED_OPTIMIZERS = ("lomo", "adalomo", "layerwise")


def check_section(section: Mapping[str, Any]) -> Any:
    """Check the names and the kinds of a recipe's ``train`` section; return the class that reads them.

    Raises:
        ConfigError: an unknown name, with the nearest known one, or a value of another kind or out of range.
    """
    kind: Any = TrainingArguments if section.get("trainer") is None else config_of(section["trainer"])
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    for name in section:
        if name not in known and name not in OWN:
            own = {field.name for field in dataclasses.fields(PrivacyConfig)}
            if name in own:
                raise ConfigError(f"train.{name} is unknown; {name} belongs to section privacy: privacy.{name}")
            remedy = nearest(str(name), known) or f": {kind.__name__} has no such argument, leave it out"
            raise ConfigError(f"train.{name} is unknown{remedy}")
    check_train("train", section)
    check_kinds("train", section, kind, _TAKEN, (*PLAIN, *FILES))
    return kind


def training_arguments(section: Mapping[str, Any]) -> TrainingArguments:
    """Make `TrainingArguments` from a recipe's ``train`` section; dpllm's own names (`OWN`) are checked and removed.

    With ``trainer`` they are arguments of TRL's configuration.

    Raises:
        ConfigError: an unknown name (the message has the nearest known one), a value that TrainingArguments refuses, or
            DeepSpeed is requested but not installed.

    >>> training_arguments({"output_dir": "out", "max_step": 3})
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: train.max_step is unknown; did you mean 'max_steps'?
    """
    kind = check_section(section)
    if "output_dir" not in section:
        raise ConfigError("train.output_dir is missing: name the folder for model, ledger and report.")
    if section.get("deepspeed") or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        require("deepspeed", "the engine DeepSpeed")
    given = {name: value for name, value in section.items() if value is not None and name not in OWN}  # null: default
    try:
        made: TrainingArguments = kind(**{**_processes_on_cpu(), **given})
        return made
    except (*_UNUSABLE, NotImplementedError) as error:
        words = " ".join(str(error).split())
        named = next((f".{name}={value}" for name, value in given.items() if re.search(rf"\b{name}\b", words)), "")
        raise ConfigError(f"train{named}: {words}") from error


def train_schema() -> dict[str, Any]:
    """Return the JSON schema of each name of ``TrainingArguments`` that has a plain kind, for `recipe_schema`."""
    schemas: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(TrainingArguments).items():
        with contextlib.suppress(PydanticSchemaGenerationError):
            made = TypeAdapter(_TAKEN.get(name, hint)).json_schema()
            words = made.pop("$defs", {})  # of an enumeration
            made["anyOf"] = [words.get(one.get("$ref", "").rpartition("/")[2], one) for one in made.get("anyOf", ())]
            schemas[name] = made if made["anyOf"] else {key: value for key, value in made.items() if key != "anyOf"}
    return schemas


def check_optimizer(args: TrainingArguments) -> None:
    """Build the optimizer and the schedule of the arguments once, for a single number, and drop them.

    The classes themselves check their options; without this call a mistake would be found only after the model was
    loaded and the run had begun.

    Raises:
        ConfigError: one of them cannot be built; the message has its name and options.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if args.optim_target_modules is not None or args.deepspeed_plugin is not None:
        return  # needs the model, or is built by DeepSpeed
    num_steps = max(args.max_steps, 2)
    options: dict[str, Any] = {"train.optim": name, "train.optim_args": args.optim_args}
    schedule: Any = args.lr_scheduler_kwargs
    try:
        kind, values = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **values)
        options = {
            "train.lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "train.lr_scheduler_kwargs": schedule,
        }
        get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=dict(schedule or {}),
        )
    except torch.OutOfMemoryError:  # a RuntimeError
        raise
    except (*_UNUSABLE, RuntimeError) as error:
        shown = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        raise ConfigError(
            f"{shown} cannot be used: {' '.join(str(error).split())[:300]}. Change it, or leave it out for the default"
        ) from error


def compile_options(args: TrainingArguments) -> dict[str, Any] | None:
    """Return the arguments of `dpllm.GhostClipper.compile`; None if nothing is compiled."""
    if not args.torch_compile:
        return None
    mode = {} if args.torch_compile_mode is None else {"mode": args.torch_compile_mode}
    return {"backend": args.torch_compile_backend or "inductor", **mode}


def _processes_on_cpu() -> dict[str, Any]:
    """Return the option that several processes need on a machine without an accelerator: gloo."""
    if "WORLD_SIZE" not in os.environ or torch.accelerator.is_available():
        return {}
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return {"ddp_backend": "gloo"} if deepspeed else {"use_cpu": True}


def private_arguments(args: TrainingArguments, table: Mapping[str, Argument] = ARGUMENTS) -> TrainingArguments:
    """Return a copy of the arguments for private training; raise for an option that cannot be kept private.

    ``max_grad_norm`` is set to 0: the Trainer's own clipping would rescale the noisy gradient. Batches are not
    replayed after a resume (``ignore_data_skip``): new ones are drawn. A DeepSpeed configuration gets the settings that
    private training needs (`dpllm.engines.private_config`).

    Args:
        args: arguments of the private training.
        table: the options that the trainer supports.

    Raises:
        ConfigError: a value out of range, or an option in conflict with the guarantee.
        EngineError: the same for an option in the DeepSpeed configuration.
    """
    refuse_options(args, table)
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs are visible to one process, which would use nn.DataParallel. Start one process per GPU "
            "(dpllm train --config ddp, or accelerate launch), or set CUDA_VISIBLE_DEVICES=0."
        )
    private = copy.copy(args)
    private.max_grad_norm = 0.0
    private.ignore_data_skip = True
    # accelerate would compile the whole model.
    private.torch_compile, private.torch_compile_backend, private.torch_compile_mode = False, None, None
    if args.deepspeed_plugin is not None:
        private_config(args.deepspeed_plugin.deepspeed_config)
    return private


def refuse_changed(args: TrainingArguments, table: Mapping[str, Argument] = ARGUMENTS) -> None:
    """Refuse options that were set after `private_arguments` made these arguments.

    Args:
        args: arguments of the private training.
        table: the options that the trainer supports.

    Raises:
        ConfigError: as `refuse_options`; or ``max_grad_norm`` was set.
    """
    refuse_options(args, table)
    if args.torch_compile:
        raise ConfigError("train.torch_compile was set after DPTrainer was made. Set it in the arguments that it gets.")
    if args.max_grad_norm:
        raise ConfigError(
            f"train.max_grad_norm={args.max_grad_norm!r} cannot be used in private training: the Trainer's own "
            "clipping would rescale the noisy gradient; a unit's gradient is clipped to privacy.clip_norm. Leave it 0."
        )


def checked_arguments(
    args: TrainingArguments, own_optimizer: bool, table: Mapping[str, Argument] = ARGUMENTS
) -> TrainingArguments:
    """Check as `private_arguments` does, after building the optimizer unless the caller passes one."""
    private = private_arguments(args, table)
    refuse_unusable(private, own_optimizer)
    if not own_optimizer:
        check_optimizer(args)
    return private


def refuse_options(args: TrainingArguments, table: Mapping[str, Argument] = ARGUMENTS) -> None:
    """Refuse the options that cannot be kept private on any machine.

    Args:
        args: arguments of the private training.
        table: the options that the trainer supports.

    Raises:
        ConfigError: a value out of range, or an option in conflict with the guarantee.
    """
    check_arguments(args)
    check_kinds("train", {name: getattr(args, name) for name in plain_names(type(args))}, type(args), unchecked=PLAIN)
    refuse_by_table(args, table)
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if accumulation.get("num_steps", 1) != 1:
        raise ConfigError(
            f"train.accelerator_config.gradient_accumulation_kwargs.num_steps={accumulation['num_steps']!r} cannot be "
            f"used in private training: {ARGUMENTS['gradient_accumulation_steps'].reason}."
        )
    refuse_environment()
    asked_second_moment(args)  # this refuses options that AdamW has not
    for kind in ("tp_size", "cp_size", "sp_size"):
        if (getattr(args.parallelism_config, kind, None) or 1) > 1:
            raise ConfigError(
                f"parallelism_config sets {kind} above 1: tensor, context and sequence parallelism split a unit's "
                "layers or rows over processes, and its norm with them. Use only dp_shard_size and dp_replicate_size."
            )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in _REFUSED_OPTIMIZERS):
        raise ConfigError(
            f"train.optim={optimizer} updates parameters during backward, before clipping and noise. Use adamw_torch."
        )
    if "schedule_free" in optimizer:
        raise ConfigError(
            f"train.optim={optimizer} keeps two sets of weights and swaps them outside of its step, where weights may "
            "not change. Use adamw_torch with lr_scheduler_type=constant."
        )
    refuse_uploads(args)


def plan_for(
    args: TrainingArguments, privacy: PrivacyConfig, units: UnitIndex, own_optimizer: bool = False, average: Any = None
) -> PrivacyPlan:
    """Compute the plan of a run on these data; see `dpllm.privacy.plan.make_plan`.

    Correlated noise is designed for the optimizer and the schedule of the arguments, and for the released average.

    Args:
        args: arguments of the private training.
        privacy: the privacy guarantee.
        units: index of the rows of each unit, within the bound on rows per user.
        own_optimizer: whether the caller passes an optimizer, so that the arguments do not describe it.
        average: the average of the weights that is released, as a recipe names it (``train.average``).
    """
    population = units.num_rows if privacy.sampling == "example" else units.num_units
    num_steps = num_private_steps(args, privacy, population)
    workload = None
    if num_steps > 0 and not own_optimizer and Spec.of(privacy.noise).kind != "independent":
        workload = workload_of(args, num_steps, average)
    return make_plan(privacy, units.num_units, num_steps, units.num_rows, workload)


def num_private_steps(args: TrainingArguments, privacy: PrivacyConfig, population: int) -> int:
    """Return T: ``max_steps``, or the number of steps of ``num_train_epochs`` expected passes over the data."""
    if args.max_steps > 0:
        return args.max_steps
    return math.ceil(args.num_train_epochs * population / batch_size(privacy, population))


def read_privacy(privacy: Any) -> PrivacyConfig:
    """Return the privacy guarantee of a Trainer, from an object or from the keys of a recipe's section ``privacy``.

    Raises:
        ConfigError: it is missing or has the wrong type; or a key is unknown, missing or unusable.
    """
    if isinstance(privacy, PrivacyConfig):
        return privacy
    if isinstance(privacy, Mapping):
        return read_section(PrivacyConfig, privacy, "DPTrainer", "privacy")
    given = "missing" if privacy is None else f"of type {type(privacy).__name__}"
    raise ConfigError(
        f"privacy is {given}: pass dpllm.PrivacyConfig(epsilon=..., clip_norm=..., expected_batch_size=...), or "
        "these as a dictionary"
    )


def require_arguments(args: Any) -> TrainingArguments:
    """Return the arguments of a Trainer.

    Raises:
        ConfigError: they are missing or have the wrong type.
    """
    if isinstance(args, TrainingArguments):
        return args
    given = "missing" if args is None else f"of type {type(args).__name__}"
    raise ConfigError(
        f"args is {given}: pass transformers.TrainingArguments(output_dir=..., max_steps=...); model, ledger and "
        "report go into output_dir"
    )


class Unknown(TypedDict, total=False):
    """Arguments of other Trainers, and of earlier releases, for which `DPTrainer` raises an error with a remedy."""

    tokenizer: Never
    formatting_func: Never
    dataset_text_field: Never
    max_seq_length: Never
    packing: Never


_REMEDIES = {
    "tokenizer": "pass it as processing_class",
    "formatting_func": "apply it before: train_dataset.map(lambda row: {'text': formatting_func(row)})",
    "max_seq_length": "its name is max_length, an option of SFTConfig; for DPTrainer data={'max_length': ...}",
    "packing": "pass pack_rows=True, which keeps the rows of a microbatch apart",
}


def refuse_unknown(given: Iterable[str], trainer: type, args: Any) -> None:
    """Refuse arguments that a Trainer does not have, and name where each belongs.

    Args:
        given: their names.
        trainer: the class that was called.
        args: arguments of the training, or None.

    Raises:
        TypeError: there is one.
    """
    for name in given:
        options = {field.name for field in dataclasses.fields(args)} if isinstance(args, TrainingArguments) else set()
        if name in _REMEDIES:
            remedy = _REMEDIES[name]
        elif name in options:
            remedy = f"it is an option of {type(args).__name__}: pass it in args"
        else:
            remedy = f"leave it out{nearest(name, inspect.signature(trainer).parameters)}".removesuffix(".")
        raise TypeError(f"{trainer.__name__} has no argument {name!r}: {remedy}")


def require_functions(**given: Any) -> None:
    """Check that functions passed to a Trainer can be called, before any of them is.

    Args:
        given: functions by name; None: not given.

    Raises:
        ConfigError: one cannot be called.
    """
    for name, one in given.items():
        if one is not None and not callable(one):
            raise ConfigError(f"{name} is {shown(one)}, which cannot be called: pass a function, or leave {name} out")

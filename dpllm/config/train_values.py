"""Check the values of ``train`` that affect privacy or have a range, and dpllm's own names in that section.

The table applies to recipes and to the arguments of `DPTrainer`. ``TrainingArguments`` converts nothing and checks
little: without the table, a quoted learning rate or a fractional batch size would fail hours later or never.
`dpllm.training.arguments` checks the kinds of all other names before any record is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dpllm.config.values import ConfigError, between, choice, flag, integer, nearest, shown
from dpllm.mechanism.averages import average_of
from dpllm.mechanism.limits import MAX_STEPS

MAX_EPOCHS = 1_000_000
_MOST = 2**31 - 1
_MOST_SEED = 2**32 - 1

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive", "detail")
_BACKENDS = ("nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl", "xccl", "neuron")

Check = Callable[[str, Any], Any]


def _max_steps(name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value != -1 and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}; leave it out to train for num_train_epochs")
    integer(name, value, -1, MAX_STEPS)


def _steps_or_share(name: str, value: Any, least: int = 0, most: int = _MOST, above: bool = True) -> None:
    """Raise unless `value` is a whole number of steps, or a share of all steps above 0 and below 1."""
    between(name, value, least, most, above=above)
    if value >= 1 and value != int(value):
        raise ConfigError(f"{name} must be a whole number of steps, or a share of them below 1, got {shown(value)}")


def _folder(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError(
            f"{name} must be the name of a folder, got {shown(value)}: the model, the ledger and the report go there"
        )


_POSITIVE = partial(between, least=0, above=True)
_NOT_NEGATIVE = partial(between, least=0)
_DECAY = partial(between, least=0, most=1, below=True)
_SIZE = partial(integer, minimum=1, maximum=_MOST)
_SEED = partial(integer, minimum=0, maximum=_MOST_SEED)

PLAIN: dict[str, Check] = {
    "per_device_train_batch_size": _SIZE,
    "per_device_eval_batch_size": _SIZE,
    "gradient_accumulation_steps": _SIZE,
    "num_train_epochs": partial(between, least=0, most=MAX_EPOCHS, above=True),
    "max_steps": _max_steps,
    "learning_rate": _POSITIVE,
    "warmup_steps": partial(_steps_or_share, most=MAX_STEPS, above=False),
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_epsilon": _POSITIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "label_smoothing_factor": _DECAY,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "logging_steps": _steps_or_share,
    "eval_steps": _steps_or_share,
    "eval_delay": _NOT_NEGATIVE,
    "eval_accumulation_steps": _SIZE,
    "save_steps": _steps_or_share,
    "save_total_limit": _SIZE,
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": partial(integer, minimum=0, maximum=1024),
    "dataloader_prefetch_factor": _SIZE,
    "torch_empty_cache_steps": _SIZE,
    "ddp_bucket_cap_mb": _SIZE,
    "ddp_timeout": _SIZE,
    "log_level": partial(choice, choices=_LOG_LEVELS),
    "log_level_replica": partial(choice, choices=_LOG_LEVELS),
    "ddp_backend": partial(choice, choices=_BACKENDS),
    "dataloader_multiprocessing_context": partial(choice, choices=("fork", "spawn", "forkserver")),
    **dict.fromkeys(("bf16", "fp16", "use_cpu", "push_to_hub", "load_best_model_at_end", "full_determinism"), flag),
}
"""Name of a ``TrainingArguments`` attribute that keeps the value it was given -> its check."""


def _average(name: str, value: Any) -> None:
    del name  # the message has it
    try:
        average_of(value)
    except ValueError as error:
        raise ConfigError(f"train.{error}") from error


WARM_UP = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.1}
"""The schedule of a private training that names none: a constant learning rate after a warm-up of 10 % of the steps."""


def with_schedule(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``train`` section of a private training with a schedule; values that it has are kept.

    A falling rate suppresses the noise of the last steps; an average of the weights does this at a constant rate too,
    and together with correlated noise it was measured better. The warm-up replaces the bias correction of Adam's first
    moment, which enlarges the first updates. A run of one step has no warm-up: its learning rate would be 0.

    Args:
        section: checked names and values; null stands for the default.

    >>> with_schedule({"warmup_steps": 5})
    {'warmup_steps': 5, 'lr_scheduler_type': 'constant_with_warmup'}
    >>> with_schedule({"lr_scheduler_type": "linear"})
    {'lr_scheduler_type': 'linear'}
    """
    filled = dict(section)
    if filled.get("lr_scheduler_type") is None:
        filled["lr_scheduler_type"] = WARM_UP["lr_scheduler_type"]
    same = filled["lr_scheduler_type"] == WARM_UP["lr_scheduler_type"]
    if same and filled.get("warmup_steps") is None and filled.get("max_steps") != 1:
        filled["warmup_steps"] = WARM_UP["warmup_steps"]
    return filled


TRL_TRAINERS = ("sft", "dpo")
"""The values of ``trainer`` in a recipe's ``train`` section; it then has the names of TRL's configuration too."""

OWN: dict[str, Check] = {"average": _average, "trainer": partial(choice, choices=TRL_TRAINERS)}
"""Name in a recipe's ``train`` section that is dpllm's own, and no name of ``TrainingArguments`` -> its check."""

SECOND_MOMENT = "second_moment"
SECOND_MOMENTS = ("low_passed", "corrected")
"""The values of ``second_moment`` in ``optim_args`` of AdamW (`dpllm.training.corrected_adamw`)."""
_ADAMW = ("adamw_torch", "adamw_torch_fused")


def second_moment_of(optim: str, optim_args: str | None) -> str | None:
    """Return the second moment that ``optim_args`` of a private training select; None: AdamW's own.

    Args:
        optim: ``train.optim``.
        optim_args: ``train.optim_args``; names without a value are left to ``TrainingArguments``.

    Raises:
        ConfigError: AdamW has no such option and would ignore it, or a different optimizer has the option.

    >>> second_moment_of("adamw_torch", "second_moment=low_passed"), second_moment_of("sgd", "momentum=0.9")
    ('low_passed', None)
    """
    if not isinstance(optim_args, str | None):
        raise ConfigError(
            f"train.optim_args must be a text, such as {SECOND_MOMENT}=corrected, got {shown(optim_args)}"
        )
    pairs = [pair.partition("=") for pair in (optim_args or "").replace(" ", "").split(",") if "=" in pair]
    given = {name: chosen for name, _, chosen in pairs}
    if optim not in _ADAMW:
        if SECOND_MOMENT in given:
            raise ConfigError(
                f"train.optim_args={optim_args}: {SECOND_MOMENT} is an option of AdamW, and train.optim={optim} has "
                f"none. Set train.optim={_ADAMW[0]}, or leave it out"
            )
        return None
    if unknown := sorted(given.keys() - {SECOND_MOMENT}):
        raise ConfigError(
            f"train.optim_args={optim_args}: {optim} has no option {unknown[0]!r}"
            f"{nearest(unknown[0], [SECOND_MOMENT])}. Leave it out; AdamW's decays are train.adam_beta1 and "
            "train.adam_beta2"
        )
    if SECOND_MOMENT in given:
        choice(f"train.optim_args: {SECOND_MOMENT}", given[SECOND_MOMENT], SECOND_MOMENTS)
    return given.get(SECOND_MOMENT)


def refuse_own(name: str, section: Mapping[str, Any]) -> None:
    """Refuse dpllm's own names in a section for a training without privacy.

    Raises:
        ConfigError: one of them is given.
    """
    own = sorted(OWN.keys() & section.keys())
    own += ["optim_args"] if SECOND_MOMENT in str(section.get("optim_args")) else []
    if own:
        raise ConfigError(f"{name}.{own[0]} is an option of the private training: set train.{own[0]}")


def check_train(name: str, section: Any) -> None:
    """Check the values of a ``train`` section that the table has, by kind and by range.

    All other names are checked by `dpllm.training.arguments.training_arguments` against the installed version.

    Args:
        name: name of the section, for the message.
        section: names to values.

    Raises:
        ConfigError: it is not a mapping, or a value cannot be used.

    >>> check_train("train", {"learning_rate": "1e-3"})
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: train.learning_rate must be a finite number, got '1e-3' (str): it is in quotes, so
    it is a text; write it without them
    """
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        raise ConfigError(f"{name} must be a mapping of TrainingArguments names to values, got {shown(section)}")
    checks: Mapping[str, Check] = {"output_dir": _folder, **PLAIN, **OWN}
    for key, value in section.items():
        if key in checks and (value is not None or key == "output_dir"):  # null: the default
            checks[key](f"{name}.{key}", value)


def check_arguments(args: Any) -> None:
    """Check the numbers and booleans of finished ``TrainingArguments``.

    Raises:
        ConfigError: one of them cannot be used.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(args)}
    for name, check in PLAIN.items():
        if name in defaults and not (getattr(args, name) is None and defaults[name] is None):
            check(f"train.{name}", getattr(args, name))

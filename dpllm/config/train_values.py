"""The values of ``train``: every name of ``TrainingArguments`` with its kind and its range.

Place in the flow: below the configuration, which checks a recipe's sections with this table as soon as they are read;
the arguments of `DPTrainer` are checked with the same table. ``TrainingArguments`` converts nothing and checks little:
without the table a quoted learning rate, a fractional batch size or the text "no" for a boolean would fail hours later,
or never. This module needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dpllm.config.values import ConfigError, between, choice, flag, integer, nearest, shown, text
from dpllm.mechanism.averages import average_of
from dpllm.mechanism.limits import MAX_STEPS

MAX_EPOCHS = 1_000_000
_MOST = 2**31 - 1
_MOST_SEED = 2**32 - 1

_INTERVALS = ("no", "steps", "epoch")
_SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive", "detail")
_BACKENDS = ("nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl", "xccl", "neuron")

Check = Callable[[str, Any], Any]


def _or_none(check: Check) -> Check:
    def checked(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return checked


def _max_steps(name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value != -1 and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}; leave it out to train for num_train_epochs")
    integer(name, value, -1, MAX_STEPS)


def _steps_or_share(name: str, value: Any) -> None:
    """Raise unless `value` is a whole number of steps, or a share of all steps above 0 and below 1."""
    between(name, value, 0, _MOST, above=True)
    if value >= 1 and value != int(value):
        raise ConfigError(f"{name} must be a whole number of steps, or a share of them below 1, got {shown(value)}")


def _warmup(name: str, value: Any) -> None:
    between(name, value, 0, MAX_STEPS)
    if value >= 1 and value != int(value):
        raise ConfigError(f"{name} must be a whole number of steps, or a share of them below 1, got {shown(value)}")


def _names(name: str, value: Any) -> None:
    if isinstance(value, str):
        text(name, value)
    elif not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name} must be a text or a list of texts, got {shown(value)}")


def _mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a mapping, got {shown(value)}")


def _mapping_or_file(name: str, value: Any) -> None:
    if not isinstance(value, str):
        _mapping(name, value)
    else:
        text(name, value)


def _resume(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        text(name, value)


def _folder(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError(
            f"{name} must be the name of a folder, got {shown(value)}: the model, the ledger and the report go there"
        )


def _flag_or(words: Sequence[str], name: str, value: Any) -> None:
    if not isinstance(value, bool) and value not in words:
        raise ConfigError(f"{name} must be true, false or one of {', '.join(map(repr, words))}, got {shown(value)}")


_FLAGS = (
    *("average_tokens_across_devices", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "torch_compile"),
    *("use_liger_kernel", "use_cache", "auto_find_batch_size", "logging_first_step", "log_on_each_node"),
    *("logging_nan_inf_filter", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches"),
    *("eval_use_gather_object", "batch_eval_metrics", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    *("push_to_hub", "hub_always_push", "load_best_model_at_end", "ignore_data_skip", "full_determinism", "use_cpu"),
    *("restore_callback_states_from_checkpoint", "dataloader_drop_last", "dataloader_pin_memory", "do_train"),
    *("dataloader_persistent_workers", "dataloader_in_order", "remove_unused_columns", "skip_memory_metrics"),
    *("do_eval", "do_predict"),
)
_FLAGS_OR_NONE = (
    *("tf32", "activation_checkpointing", "gradient_checkpointing", "disable_tqdm", "hub_private_repo"),
    *("greater_is_better", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph"),
)
_TEXTS_OR_NONE = (
    *("optim_args", "torch_compile_backend", "torch_compile_mode", "run_name", "trackio_space_id"),
    *("trackio_bucket_id", "hub_token", "hub_model_id", "hub_revision", "metric_for_best_model"),
)

# Numbers and booleans, which TrainingArguments keeps unchanged.
PLAIN: dict[str, Check] = {
    **dict.fromkeys(_FLAGS, flag),
    **dict.fromkeys(_FLAGS_OR_NONE, _or_none(flag)),
    "per_device_train_batch_size": partial(integer, minimum=1, maximum=_MOST),
    "per_device_eval_batch_size": partial(integer, minimum=1, maximum=_MOST),
    "num_train_epochs": partial(between, least=0, most=MAX_EPOCHS, above=True),
    "max_steps": _max_steps,
    "learning_rate": partial(between, least=0, above=True),
    "warmup_steps": _warmup,
    "weight_decay": partial(between, least=0),
    "adam_beta1": partial(between, least=0, most=1, below=True),
    "adam_beta2": partial(between, least=0, most=1, below=True),
    "adam_epsilon": partial(between, least=0, above=True),
    "gradient_accumulation_steps": partial(integer, minimum=1, maximum=_MOST),
    "max_grad_norm": partial(between, least=0),
    "label_smoothing_factor": partial(between, least=0, most=1, below=True),
    "neftune_noise_alpha": _or_none(partial(between, least=0)),
    "torch_empty_cache_steps": _or_none(partial(integer, minimum=1, maximum=_MOST)),
    "logging_steps": _steps_or_share,
    "eval_steps": _or_none(_steps_or_share),
    "eval_delay": partial(between, least=0),
    "eval_accumulation_steps": _or_none(partial(integer, minimum=1, maximum=_MOST)),
    "save_steps": _steps_or_share,
    "save_total_limit": _or_none(partial(integer, minimum=1, maximum=_MOST)),
    "seed": partial(integer, minimum=0, maximum=_MOST_SEED),
    "data_seed": _or_none(partial(integer, minimum=0, maximum=_MOST_SEED)),
    "dataloader_num_workers": partial(integer, minimum=0, maximum=1024),
    "dataloader_prefetch_factor": _or_none(partial(integer, minimum=1, maximum=_MOST)),
    "ddp_bucket_cap_mb": _or_none(partial(integer, minimum=1, maximum=_MOST)),
    "ddp_timeout": partial(integer, minimum=1, maximum=_MOST),
    "local_rank": partial(integer, minimum=-1, maximum=_MOST),
}
"""Name of a ``TrainingArguments`` attribute -> its check, for attributes that keep the value they were given."""

CHECKS: dict[str, Check] = {
    **PLAIN,
    **dict.fromkeys(_TEXTS_OR_NONE, _or_none(text)),
    "output_dir": _folder,
    "lr_scheduler_type": partial(choice, choices=_SCHEDULERS),
    "lr_scheduler_kwargs": _or_none(_mapping),
    "optim": text,
    "optim_target_modules": _or_none(_names),
    "activation_checkpointing_kwargs": _or_none(_mapping),
    "gradient_checkpointing_kwargs": _or_none(_mapping),
    "liger_kernel_config": _or_none(_mapping),
    "logging_strategy": partial(choice, choices=_INTERVALS),
    "eval_strategy": partial(choice, choices=_INTERVALS),
    "save_strategy": partial(choice, choices=(*_INTERVALS, "best")),
    "include_num_input_tokens_seen": partial(_flag_or, ("no", "all", "non_padding")),
    "log_level": partial(choice, choices=_LOG_LEVELS),
    "log_level_replica": partial(choice, choices=_LOG_LEVELS),
    "report_to": _or_none(_names),
    "project": text,
    "trackio_static_space_id": lambda name, value: None if value is None or value is False else text(name, value),
    "include_for_metrics": _or_none(_names),
    "hub_strategy": partial(choice, choices=("end", "every_save", "checkpoint", "all_checkpoints")),
    "accelerator_config": _or_none(_mapping_or_file),
    "parallelism_config": _or_none(_mapping),
    "dataloader_multiprocessing_context": _or_none(partial(choice, choices=("fork", "spawn", "forkserver"))),
    "label_names": _or_none(_names),
    "train_sampling_strategy": text,
    "length_column_name": text,
    "ddp_backend": _or_none(partial(choice, choices=_BACKENDS)),
    "fsdp": lambda name, value: None if value is None or isinstance(value, bool) else _names(name, value),
    "fsdp_config": _or_none(_mapping_or_file),
    "deepspeed": _or_none(_mapping_or_file),
    "debug": lambda name, value: None if value in (None, "") else _names(name, value),
    "resume_from_checkpoint": _or_none(_resume),
}
"""Name in a recipe's ``train`` section -> its check."""


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

_TRL: dict[str, Check] = {
    **dict.fromkeys(("packing", "padding_free", "assistant_only_loss", "activation_offloading"), flag),
    **dict.fromkeys(("shuffle_dataset", "disable_dropout", "use_weighting", "sync_ref_model"), flag),
    **dict.fromkeys(("precompute_ref_log_probs", "trust_remote_code"), flag),
    **dict.fromkeys(("completion_only_loss", "eval_packing"), _or_none(flag)),
    **dict.fromkeys(("beta", "label_smoothing", "discopop_tau", "f_alpha_divergence_coef"), between),
    "ld_alpha": _or_none(between),
    "truncation_mode": partial(choice, choices=("keep_start", "keep_end")),
    "loss_type": _names,
    "f_divergence_type": text,
    **dict.fromkeys(("eos_token", "pad_token", "chat_template_path"), _or_none(text)),
}
"""Name of TRL's configurations -> the check of its kind; their ranges are checked where they are used."""


SECOND_MOMENT = "second_moment"
SECOND_MOMENTS = ("low_passed", "corrected")
"""The values of ``second_moment`` in ``optim_args`` of AdamW (`dpllm.training.corrected_adamw`)."""
_ADAMW = ("adamw_torch", "adamw_torch_fused")


def second_moment_of(optim: str, optim_args: str | None) -> str | None:
    """Return the second moment that a private training's ``optim_args`` ask for; None: AdamW's own.

    Args:
        optim: ``train.optim``.
        optim_args: ``train.optim_args``; names without a value are left to ``TrainingArguments``.

    Raises:
        ConfigError: AdamW gets an option that it has not, which would be ignored; or another optimizer gets this one.

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
    """Check every value of a ``train`` section by kind and by range.

    A name that is in none of the tables is checked by `dpllm.training.arguments.training_arguments` against the
    installed version.

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
    checks = {**CHECKS, **OWN, **(_TRL if section.get("trainer") is not None else {})}
    for key, value in section.items():
        if key in checks and (value is not None or key == "output_dir"):  # null: the default
            checks[key](f"{name}.{key}", value)


def check_arguments(args: Any) -> None:
    """Check the numbers and booleans of finished ``TrainingArguments``.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for name, check in PLAIN.items():
        if hasattr(args, name):
            check(f"train.{name}", getattr(args, name))

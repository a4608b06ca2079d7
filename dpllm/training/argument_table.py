"""Every option of ``TrainingArguments``: it works, it is ignored for a reason, or it is refused before data are read.

`dpllm.training.arguments` consults it before anything else. `python -m dpllm.training.argument_table`
prints docs/training_arguments.md; a test compares the file with the table, and the table with the installed class.

An option that is in no table, of a later release of transformers or of a subclass of ``TrainingArguments``, may have
any effect, so it is refused unless it has its default. A trainer that reads options of such a subclass adds a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpllm.config.values import ConfigError, shown

WORKS, IGNORED, REFUSED = "works", "ignored", "refused"


@dataclass(frozen=True)
class Argument:
    """One option.

    Attributes:
        kind: `WORKS`, `IGNORED` or `REFUSED`.
        reason: why it is ignored or refused, as a clause; for an option that works, its meaning in private training
            where that differs from ``Trainer``.
        allowed: the values of a refused option that switch it off.
    """

    kind: str
    reason: str = ""
    allowed: tuple[Any, ...] = ()


def works(reason: str = "") -> Argument:
    """Return the entry of an option that works."""
    return Argument(WORKS, reason)


def ignored(reason: str) -> Argument:
    """Return the entry of an option that has no effect, with the reason."""
    return Argument(IGNORED, reason)


def refused(reason: str, *allowed: Any) -> Argument:
    """Return the entry of an option that is refused unless it has one of the ``allowed`` values."""
    return Argument(REFUSED, reason, allowed)


_EVALUATION = "for evaluation"
_REDUCER = "DistributedDataParallel's reducer is not used: the clipped sums are reduced once per step"
_FOLLOWS = "only with eval_is_public: no choice may depend on results for private rows"
_COMPILED = (
    "the clipper compiles the model's blocks after the checks of the first step; the head and the loss stay eager. "
    "With privacy.gradients=per_unit the option has no effect: call model.compile() before DPTrainer"
)
_LIGER = "its fused head hides the head's weight gradient from the norm computation"
_CONVERTED = (
    "evaluation would convert the model's weights in place, and training or saving would continue with the converted "
    "weights; set bf16=true, which also evaluates in bf16"
)
_GENERATION = (
    "DPTrainer evaluates the loss and the logits and does not generate text; leave it out, and call model.generate "
    "after training"
)

_TRAINING: dict[str, Argument] = {
    "output_dir": works("the folder for the model, the ledger and the report; it must not contain another private run"),
    "per_device_train_batch_size": works("the number of rows per microbatch; it does not affect the result"),
    "num_train_epochs": works("T = ceil(epochs · N / b) private steps"),
    "max_steps": works("the number of private steps T"),
    "learning_rate": works("Trainer's default, 5e-5, is usually too small"),
    "lr_scheduler_type": works("reduce_lr_on_plateau and greedy " + _FOLLOWS),
    "lr_scheduler_kwargs": works(),
    "warmup_steps": works(),
    "optim": works(
        "except lomo, adalomo, layerwise and schedule-free optimizers, which change the weights outside of the step"
    ),
    "optim_args": works("AdamW also accepts second_moment=corrected or low_passed, and refuses unknown names"),
    "weight_decay": works(),
    "adam_beta1": works(),
    "adam_beta2": works(),
    "adam_epsilon": works(),
    "optim_target_modules": works("the optimizer projects the private gradient"),
    "gradient_accumulation_steps": refused(
        "privacy.expected_batch_size sets the logical batch, and per_device_train_batch_size the microbatch",
        1,
    ),
    "average_tokens_across_devices": ignored("each row has its own loss, which no other row scales"),
    "max_grad_norm": ignored(
        "each unit's gradient is clipped to privacy.clip_norm, and the noisy gradient is not rescaled"
    ),
    "label_smoothing_factor": refused(
        "its loss averages over the batch; pass a compute_loss_func that returns one loss per row",
        0.0,
    ),
    "bf16": works("norms, sums and noise stay in float32"),
    "fp16": refused("its loss scaler skips steps because of the data; use bf16", False),
    "bf16_full_eval": refused(_CONVERTED, False),
    "fp16_full_eval": refused(_CONVERTED, False),
    "tf32": works(),
    "activation_checkpointing": works(),
    "activation_checkpointing_kwargs": works("offloading has not been tested, because it needs a GPU"),
    "gradient_checkpointing": works(),
    "gradient_checkpointing_kwargs": works(),
    "torch_compile": works(_COMPILED),
    "torch_compile_backend": works(),
    "torch_compile_mode": works(),
    "use_liger_kernel": refused(_LIGER, False),
    "liger_kernel_config": refused(_LIGER, None),
    "use_cache": works(),
    "neftune_noise_alpha": refused(
        "NEFTune scales its noise by the padded length, which depends on other rows; leave it out",
        None,
        0,
        0.0,
    ),
    "torch_empty_cache_steps": ignored("microbatches limit the memory: set microbatch.tokens: auto"),
    "auto_find_batch_size": refused(
        "it repeats steps; set per_device_train_batch_size, or microbatch.tokens: auto",
        False,
    ),
    "full_determinism": refused("it fixes the random seeds of the whole process, which must be secret", False),
    "seed": works("initialises new weights before training; draws, noise and dropout use secret randomness"),
    "data_seed": ignored("the draw of units is secret"),
    "train_sampling_strategy": refused(
        "ε requires that the plan's sampler draws the units; microbatches are already sorted by length",
        "random",
    ),
    "length_column_name": ignored("dpllm counts the tokens of each row"),
    "label_names": works(),
    "remove_unused_columns": works("with collators of transformers; other collators receive all columns"),
}
_LOGGING: dict[str, Argument] = {
    "logging_strategy": works("the report counts every logged loss"),
    "logging_steps": works(),
    "logging_first_step": works(),
    "log_on_each_node": works(),
    "logging_nan_inf_filter": works(),
    "include_num_input_tokens_seen": refused(
        "the number of tokens in a step depends on the secret draw, and ε does not cover it",
        "no",
        False,
    ),
    "log_level": works(),
    "log_level_replica": works(),
    "disable_tqdm": works(),
    "report_to": works("the report names each tracker; trackers that upload checkpoints are refused"),
    "run_name": works(),
    "project": works(),
    "trackio_space_id": works(),
    "trackio_bucket_id": works(),
    "trackio_static_space_id": works(),
    "debug": refused("it prints values computed from private rows, which ε does not cover; leave it out", [], ""),
    "skip_memory_metrics": works("the report counts logged memory figures"),
}
_EVALUATING: dict[str, Argument] = {
    "eval_strategy": works("the report counts every evaluation, unless eval_is_public is declared"),
    "eval_steps": works(),
    "eval_delay": works(),
    "per_device_eval_batch_size": works(),
    "prediction_loss_only": works(),
    "eval_on_start": works(),
    "eval_do_concat_batches": works(),
    "eval_use_gather_object": works(),
    "eval_accumulation_steps": works(),
    "include_for_metrics": works(),
    "batch_eval_metrics": works(),
    "metric_for_best_model": works(_FOLLOWS),
    "greater_is_better": works(_FOLLOWS),
    "load_best_model_at_end": refused(
        "it chooses a checkpoint by evaluation results, which ε does not cover; keep the last checkpoint",
        False,
    ),
    "sortish_sampler": refused("the plan's sampler draws the units", False),
    "predict_with_generate": refused(_GENERATION, False),
    "generation_max_length": refused(_GENERATION, None),
    "generation_num_beams": refused(_GENERATION, None),
    "generation_config": refused(_GENERATION, None),
}
_SAVING: dict[str, Argument] = {
    "save_only_model": works("a run resumed from such a checkpoint restarts the optimizer and the schedule"),
    "save_strategy": works("best " + _FOLLOWS),
    "save_steps": works(),
    "save_total_limit": works(),
    "save_on_each_node": refused(
        "all machines share one checkpoint folder; node-local copies lack the shards of other nodes",
        False,
    ),
    "enable_jit_checkpoint": refused(
        "dpllm saves a checkpoint on SIGTERM by itself, after the current step; leave it out",
        False,
    ),
    "resume_from_checkpoint": ignored("as in Trainer: pass it to train(), as a recipe does"),
    "restore_callback_states_from_checkpoint": works(
        "a checkpoint contains only callback states that do not depend on private rows"
    ),
    "ignore_data_skip": ignored("a resumed run draws new units"),
    "push_to_hub": works("uploads the model with its guarantee, from an allow-list of files"),
    "hub_token": works(),
    "hub_private_repo": works(),
    "hub_model_id": works(),
    "hub_strategy": works("only end with push_to_hub: other values upload checkpoints"),
    "hub_always_push": ignored("dpllm uploads nothing during training"),
    "hub_revision": works(),
}
_MACHINE: dict[str, Argument] = {
    "use_cpu": works(),
    "accelerator_config": works(_EVALUATION + "; gradient accumulation is refused"),
    "parallelism_config": works("only dp_shard_size and dp_replicate_size"),
    "dataloader_drop_last": refused("a step uses every drawn unit, and none may be dropped", False),
    "dataloader_num_workers": works(_EVALUATION),
    "dataloader_pin_memory": works(_EVALUATION),
    "dataloader_persistent_workers": works(_EVALUATION),
    "dataloader_prefetch_factor": works(_EVALUATION),
    "dataloader_multiprocessing_context": works(_EVALUATION),
    "dataloader_in_order": works(_EVALUATION),
    "ddp_find_unused_parameters": ignored(_REDUCER),
    "ddp_bucket_cap_mb": ignored(_REDUCER),
    "ddp_broadcast_buffers": ignored(_REDUCER),
    "ddp_static_graph": ignored(_REDUCER),
    "ddp_backend": works(),
    "ddp_timeout": works(),
    "fsdp": works("FSDP2"),
    "fsdp_config": works("FSDP2"),
    "deepspeed": works("ZeRO-1, -2 and -3; options that conflict with the guarantee are refused by name"),
    "do_train": ignored("as in Trainer: for scripts"),
    "do_eval": ignored("as in Trainer: for scripts"),
    "do_predict": ignored("as in Trainer: for scripts"),
    "local_rank": ignored("the launcher sets the rank"),
}
TOPICS: dict[str, dict[str, Argument]] = {
    "training": _TRAINING,
    "logging": _LOGGING,
    "evaluation": _EVALUATING,
    "checkpoints and the Hub": _SAVING,
    "machine": _MACHINE,
}
ARGUMENTS: dict[str, Argument] = {name: entry for topic in TOPICS.values() for name, entry in topic.items()}
"""The options of ``TrainingArguments`` and ``Seq2SeqTrainingArguments``, of all supported releases."""


def unlisted(kind: type, table: Mapping[str, Argument] = ARGUMENTS) -> list[str]:
    """Return the options of a class of arguments that are in no table."""
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name not in table]


def refuse_by_table(args: Any, table: Mapping[str, Argument] = ARGUMENTS) -> None:
    """Refuse the options that the table refuses, and options that it lacks and that differ from their default.

    Args:
        args: ``TrainingArguments``, or a subclass.
        table: the options that the trainer supports.

    Raises:
        ConfigError: an option conflicts with the guarantee, or its effect is unknown.
    """
    for name, entry in table.items():
        if entry.kind == REFUSED and hasattr(args, name):
            value = getattr(args, name)
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in entry.allowed):
                raise ConfigError(f"train.{name}={value!r} cannot be used in private training: {entry.reason}.")
    for name in unlisted(type(args), table):
        if not _is_default(args, name):
            raise ConfigError(
                f"train.{name}={shown(getattr(args, name))} is an option of {type(args).__name__} that this trainer "
                "does not support, so its effect on the guarantee is unknown. Leave it out"
            )


def _is_default(args: Any, name: str) -> bool:
    """Return whether an option has its default, also where the class replaces the declared one by another value."""
    field = next(one for one in dataclasses.fields(args) if one.name == name)
    value, default = getattr(args, name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if value == default or getattr(args, "deepspeed_plugin", None) is not None:  # a second one would set up DeepSpeed
        return bool(value == default)
    try:
        return bool(value == getattr(type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu), name))
    except (TypeError, ValueError):  # a user's class, with arguments that have no default
        return False


_HEAD = """# TrainingArguments in private training

Each option of transformers' `TrainingArguments` (and `Seq2SeqTrainingArguments`) works, is ignored, or is refused with
an error before any data are read. In a recipe these are the keys of the section `train`. An option missing from the
tables, such as one of a later transformers release, is refused unless it has its default value.

`python -m dpllm.training.argument_table` prints this file.
"""


def document() -> str:
    """Return the text of docs/training_arguments.md."""
    parts = [_HEAD]
    for kind, title, column in (
        (WORKS, "Works", "difference from `Trainer`, or limit"),
        (IGNORED, "Ignored", "because"),
        (REFUSED, "Refused", "because"),
    ):
        count = sum(entry.kind == kind for entry in ARGUMENTS.values())
        parts.append(f"\n## {title} ({count})\n\n| option | topic | {column} |\n| --- | --- | --- |\n")
        parts += [
            f"| `{name}` | {topic} | {entry.reason} |\n"
            for topic, entries in TOPICS.items()
            for name, entry in entries.items()
            if entry.kind == kind
        ]
    return "".join(parts)


if __name__ == "__main__":
    print(document(), end="")

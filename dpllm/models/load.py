"""Load the model and the tokenizer that a recipe names, and prepare them for training.

A model comes from the Hub, from a folder, or new from a configuration. The recipe then selects the trained parameters:
all, LoRA factors, or all but some frozen ones. Attaching the hooks later checks that each trainable part can be clipped
exactly.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from dpllm.config import TASKS, ConfigError, ModelConfig, nearest
from dpllm.config.foreign_kinds import check_kinds
from dpllm.config.values import between, integer
from dpllm.data.tokenization import train_tokenizer
from dpllm.models.inputs import align_padding
from dpllm.models.loading import NO_CODE, check_adapter_names, load_pretrained, needs_code, not_loaded, one_line
from dpllm.models.quantization import config_for, make_ready, refuse_other_form, stored_as
from dpllm.models.starting_point import DATA_DRIVEN_INIT
from dpllm.models.writing import complete_generation_config

AUTO_MODEL: dict[str, Any] = {task: getattr(transformers, about.auto_class) for task, about in TASKS.items()}
_CLASSES: dict[str, Any] = {
    task: getattr(transformers, f"MODEL_FOR_{about.mapping}_MAPPING") for task, about in TASKS.items()
}
_HEADS = r"(.*\.)?(classifier|score|qa_outputs)"
"""Pattern of heads that PEFT trains whole and that "all-linear" would also adapt, which PEFT refuses."""
DTYPES: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}

# Exceptions that transformers raises for a configuration from which no model can be built.
_UNBUILDABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)


def load_tokenizer(model: ModelConfig, public_texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a recipe; a missing padding token becomes the end-of-sequence token.

    Args:
        model: `tokenizer_vocab_size` trains one on `public_texts`; otherwise `tokenizer`, or the model's own, is
            loaded.
        public_texts: public text, never private: a vocabulary reveals the words of its text.

    Raises:
        ConfigError: it cannot be loaded, none is named, or there is no public text to train one on.
    """
    if model.tokenizer_vocab_size is not None:
        if public_texts is None:
            raise ConfigError(
                "model.tokenizer_vocab_size trains a tokenizer on public text, but the recipe has no public_pretrain "
                "section: add one, or name a tokenizer with model.tokenizer"
            )
        return train_tokenizer(public_texts, model.tokenizer_vocab_size, _max_positions(model))
    name = model.tokenizer or model.name
    if name is None:
        raise ConfigError(
            "a model made from model.config has no tokenizer: set model.tokenizer (load one) or "
            "model.tokenizer_vocab_size (train one on the public text)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # any: tokenizers raises plain Exception for an unreadable file
        raise not_loaded("tokenizer", name, error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"the tokenizer {name!r} has neither a padding nor an end-of-sequence token: set one in it"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, num_labels: int | None = None
) -> PreTrainedModel | PeftModel:
    """Return the model of a recipe, with its adapters and frozen parameters: `prepare_model` of `load_base_model`.

    Args:
        model: the recipe's section.
        tokenizer: as loaded by `load_tokenizer`.
        num_labels: number of classes if `model.num_labels` is not set, such as `dpllm.data.rows.num_labels_of`.

    Raises:
        ConfigError: one of the two functions raised it.
    """
    return prepare_model(load_base_model(model, tokenizer, num_labels), model)


def load_base_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, num_labels: int | None = None
) -> PreTrainedModel:
    """Return the model without adapters, every parameter trainable.

    Raises:
        ConfigError: it cannot be loaded; an unknown key or a bad value in `model.config`; a classifier without a
            number of classes; a vocabulary smaller than the tokenizer's; tied weights that cannot be (un)tied.
    """
    labels = _labels(model, num_labels)
    if model.config is not None:
        base = _from_config(model, tokenizer, labels)
    else:
        new_head = TASKS[model.task].labels != "text"
        options = {"dtype": DTYPES[model.dtype], "trust_remote_code": model.trust_remote_code, **labels}
        if model.quantization is not None:
            heads = _heads(model, labels) if new_head else None
            options["quantization_config"] = config_for(model.quantization, _dtype_of(model), heads)
        base = load_pretrained(AUTO_MODEL[model.task], str(model.name), new_head, **options)
        if model.quantization is not None:
            refuse_other_form(base, model.quantization)
        make_ready(base)
        _set_tying(base, model)
    table: Any = base.get_input_embeddings().weight
    rows = int(getattr(table, "ds_shape", table.shape)[0])  # ZeRO-3 keeps a partitioned table's shape there
    if rows < len(tokenizer):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has only {rows}: use the "
            "model's own tokenizer"
        )
    align_padding(base, tokenizer)
    complete_generation_config(base)
    return base


def _labels(model: ModelConfig, num_labels: int | None) -> dict[str, Any]:
    """Return the arguments of a configuration that set a head's size and its task.

    Raises:
        ConfigError: the number of classes is unknown.
    """
    about = TASKS[model.task]
    if not about.needs_labels:
        return {}
    known = model.num_labels or (1 if model.task == "regression" else num_labels)
    if known is None:
        raise ConfigError(
            "the number of classes is unknown: set model.num_labels, or list the classes in data.class_names. "
            "They must be public facts, so they are never counted in the private labels or in a private file's schema"
        )
    return {"num_labels": known, **({"problem_type": about.problem_type} if about.problem_type else {})}


def _dtype_of(model: ModelConfig) -> torch.dtype:
    """Return the dtype of the model's weights, also where the recipe takes it from the files."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    try:
        saved = _saved_config(model, {}).dtype
    except Exception as error:  # any, as for the weights
        raise not_loaded("model", str(model.name), error) from error
    return saved if isinstance(saved, torch.dtype) else torch.float32


def _heads(model: ModelConfig, labels: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts on top of a base model, which are new and trained and must not be quantised."""
    with torch.device("meta"):
        base = _without_weights(model, _saved_config(model, labels), torch.float32)
    return [name for name, _ in base.named_children() if name != base.base_model_prefix]


def skeleton(model: ModelConfig, num_labels: int | None = None) -> PreTrainedModel | PeftModel:
    """Return the model of a recipe without weights, on the meta device, with its adapters and frozen parameters.

    Only its configuration is read: ``model.config``, or the config.json of ``model.name``.

    Args:
        model: the recipe's section.
        num_labels: number of classes if `model.num_labels` is not given; None: two, so that it can be built.

    Raises:
        ConfigError: no model can be built from the configuration, or the adapters or patterns do not fit it.
    """
    labels = _labels(model, num_labels or 2)
    dtype = torch.float32 if model.dtype == "auto" else DTYPES[model.dtype]
    where = "model.config" if model.config is not None else f"the config.json of the model {model.name!r}"
    try:
        with torch.device("meta"):
            if model.config is not None:
                kind, arguments = config_arguments(model)
                if model.tokenizer_vocab_size is not None:
                    arguments.setdefault("vocab_size", model.tokenizer_vocab_size)
                config = AutoConfig.for_model(kind, **{**arguments, **labels})
            else:
                config = _saved_config(model, labels)
            base = _without_weights(model, config, dtype)
    except ConfigError:
        raise
    except OSError as error:
        raise not_loaded("model", str(model.name), error) from error
    except _UNBUILDABLE as error:
        if needs_code(error):
            raise not_loaded("model", str(model.name), error) from error
        raise ConfigError(
            f"model.task={model.task} cannot be built from {where} ({type(error).__name__}: "
            f"{one_line(error)}). Correct the sizes, or restore the config.json that belongs to the weights"
        ) from error
    with torch.device("meta"):
        return prepare_model(base, model)


def _saved_config(model: ModelConfig, labels: Mapping[str, Any]) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(str(model.name), trust_remote_code=model.trust_remote_code, **labels)


def _without_weights(model: ModelConfig, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a configuration on the meta device, also if DeepSpeed's ZeRO-3 is set up.

    transformers would then shard its weights over the processes, but the meta device has no weights.
    """
    kind = _CLASSES[model.task].get(type(config), None) if is_deepspeed_zero3_enabled() else None
    if kind is None:
        return AUTO_MODEL[model.task].from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    return (kind[0] if isinstance(kind, tuple) else kind)(config).to(dtype)


def config_arguments(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return the model_type of ``model.config``, and a copy of its other keys, all valid for the type.

    Raises:
        ConfigError: an unknown model_type or key, with the nearest known one.

    >>> config_arguments(ModelConfig(config={"model_type": "gpt2", "n_embd": 16}))
    ('gpt2', {'n_embd': 16})
    """
    arguments = copy.deepcopy(dict(model.config or {}))
    kind = arguments.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model.config: transformers does not know model_type {kind!r}") from error
    known = {*default.to_dict(), *default.attribute_map, "num_labels"}
    if default.is_encoder_decoder:
        known.add("decoder_start_token_id")
    for key in arguments:
        if key not in known:
            raise ConfigError(f"model.config: {kind} configurations have no key '{key}'{nearest(str(key), known)}")
    return kind, arguments


def prepare_model(base: PreTrainedModel, model: ModelConfig) -> PreTrainedModel | PeftModel:
    """Add the recipe's adapters and freeze its frozen parameters.

    Raises:
        ConfigError: an unknown LoRA argument, or one whose value would come from the private data; no module to adapt;
            a freeze pattern without a match; no trainable parameter left.
    """
    prepared: PreTrainedModel | PeftModel = base
    if model.adapter is None and (stored := stored_as(base)) is not None:
        raise ConfigError(
            f"the weights of the model {model.name!r} are quantised ({stored}), so its weight matrices cannot be "
            "trained directly: set model.adapter, such as {r: 16, target_modules: all-linear}"
        )
    if model.adapter is not None:
        config = _lora_config(model)
        check_adapter_names(base, config)
        try:
            prepared = get_peft_model(base, config)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ConfigError(f"model.adapter does not fit this model: {one_line(error)}") from error
        _name_the_base_from_everywhere(prepared)
    names = [name for name, _ in prepared.named_parameters()]
    for pattern in model.freeze:
        matched = set(fnmatch.filter(names, pattern))
        if not matched:
            raise ConfigError(
                f"model.freeze: no parameter name matches '{pattern}'{nearest(pattern, names) or '.'} "
                f"Parameter names look like {', '.join(names[:3])}"
            )
        for name, parameter in prepared.named_parameters():
            if name in matched:
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        raise ConfigError(
            "the model has no trainable parameter: remove patterns from model.freeze, or check model.adapter"
        )
    return prepared


def _name_the_base_from_everywhere(model: PeftModel) -> None:
    """Write the full path of a local base model into the adapter's configuration, which is read in another folder."""
    for config in model.peft_config.values():
        name = config.base_model_name_or_path
        if name and Path(name).expanduser().is_dir():
            config.base_model_name_or_path = str(Path(name).expanduser().resolve())


def with_adapter(base: nn.Module, config: Any, task: str | None) -> PeftModel:
    """Return a model with a new adapter, as the argument ``peft_config`` of a Trainer describes it.

    Args:
        base: model without an adapter.
        config: a `peft.PeftConfig`. It is not changed; a missing ``task_type`` is set for the model's task.
        task: one of `dpllm.config.TASKS`. None: unknown.

    Raises:
        ConfigError: the model has an adapter, or the adapter does not fit it or would start from private data.
    """
    name = "peft_config"
    if not isinstance(config, PeftConfig):
        raise ConfigError(
            f"{name} is of type {type(config).__name__}: pass a PEFT configuration, such as peft.LoraConfig(...)"
        )
    if isinstance(base, PeftModel):
        raise ConfigError(f"{name} describes an adapter, but the model already has one: leave {name} out")
    _refuse_data_driven(name, getattr(config, "init_lora_weights", None))
    config = copy.deepcopy(config)
    if task is not None:
        config.task_type = config.task_type or TASKS[task].peft
        if TASKS[task].label_per_token and getattr(config, "target_modules", None) == "all-linear":
            config.exclude_modules = getattr(config, "exclude_modules", None) or _HEADS
    if isinstance(config, LoraConfig):
        check_adapter_names(base, config, name)
    try:
        adapted: PeftModel = get_peft_model(base, config)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{name} does not fit this model: {one_line(error)}") from error
    _name_the_base_from_everywhere(adapted)
    return adapted


def _refuse_data_driven(name: str, kind: Any) -> None:
    """Refuse an initialisation of LoRA that is computed from data."""
    if isinstance(kind, str) and kind.lower() in DATA_DRIVEN_INIT:
        raise ConfigError(
            f"{name}: init_lora_weights={kind!r} starts from statistics of the private data, which ε would not "
            "cover. Use true, 'gaussian', 'pissa' or 'olora'"
        )


_RANGES: Mapping[str, Any] = {
    "r": partial(integer, minimum=1),
    "lora_alpha": partial(between, least=0, above=True),
    "lora_dropout": partial(between, least=0, most=1, below=True),
}


def check_adapter(model: ModelConfig) -> None:
    """Check the names, kinds and ranges of ``model.adapter``, without a model.

    Raises:
        ConfigError: `peft.LoraConfig` does not have a name, or cannot use a value.
    """
    if model.adapter is not None:
        _lora_config(model)


def _lora_config(model: ModelConfig) -> LoraConfig:
    arguments = copy.deepcopy(dict(model.adapter or {}))
    known = [field.name for field in dataclasses.fields(LoraConfig)]
    for key in arguments:
        if key not in known:
            raise ConfigError(f"model.adapter.{key}: LoraConfig has no argument '{key}'{nearest(str(key), known)}")
    check_kinds("model.adapter", arguments, LoraConfig, {"lora_alpha": float}, ("init_lora_weights",))
    for key, check in _RANGES.items():
        if arguments.get(key) is not None:
            check(f"model.adapter.{key}", arguments[key])
    _refuse_data_driven("model.adapter", arguments.get("init_lora_weights"))
    arguments.setdefault("task_type", TASKS[model.task].peft)
    if TASKS[model.task].label_per_token and arguments.get("target_modules") == "all-linear":
        arguments.setdefault("exclude_modules", _HEADS)
    try:
        return LoraConfig(**arguments)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"model.adapter: {one_line(error)}") from error


def _from_config(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, labels: Mapping[str, Any]) -> PreTrainedModel:
    if model.dtype == "auto":
        raise ConfigError("model.dtype='auto' takes the dtype of saved weights, but model.config has none: use float32")
    kind, arguments = config_arguments(model)
    if AutoConfig.for_model(kind).is_encoder_decoder:
        arguments.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
    arguments.setdefault("vocab_size", len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        arguments.setdefault(token, getattr(tokenizer, token))
    if model.tie_word_embeddings is not None:
        arguments["tie_word_embeddings"] = model.tie_word_embeddings
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kind, **{**arguments, **labels})
        return AUTO_MODEL[model.task].from_config(config, dtype=DTYPES[model.dtype], **NO_CODE)
    except _UNBUILDABLE as error:
        raise ConfigError(f"model.config: {one_line(error)}") from error


def _set_tying(base: PreTrainedModel, model: ModelConfig) -> None:
    """Tie or untie head and input embedding, as the recipe requires, without changing the model's function."""
    wanted = model.tie_word_embeddings
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if wanted is None or wanted == tied:
        return
    if wanted:
        raise ConfigError(
            "model.tie_word_embeddings=true would discard the untied head of this pretrained model: leave it out"
        )
    if model.task != "causal_lm":
        raise ConfigError(f"model.tie_word_embeddings=false is for causal_lm only: leave it out for {model.task}")
    head.weight = nn.Parameter(head.weight.detach().clone())
    base.config.tie_word_embeddings = False
    base.all_tied_weights_keys = {}


def _max_positions(model: ModelConfig) -> int:
    config = model.config or {}
    for key in ("max_position_embeddings", "n_positions"):
        if key in config:
            return int(config[key])
    raise ConfigError("model.config needs max_position_embeddings, the longest row that the trained tokenizer may make")

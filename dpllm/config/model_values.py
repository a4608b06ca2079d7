"""The values of ``model.adapter`` and ``model.config``: kinds and ranges that can be checked without the libraries.

Place in the flow: below the configuration, which calls these checks when a recipe is read. Whether a value fits the
model is checked later by `dpllm.training.preflight`, on a model without weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from dpllm.config.values import ConfigError, between, choice, flag, integer, number, shown

HEADS = ("auto", "whole", "chunks")
"""Values of ``model.head``."""
_MOST = 2**31 - 1
_SIZES = re.compile(
    r"(?:.*_size|d_model|d_ff|d_kv|dim|hidden_dim|n_embd|n_head|n_layer|n_heads|n_layers|n_positions|n_ctx|num_layers"
    r"|num_heads|num_hidden_layers|num_attention_heads|num_key_value_heads|num_decoder_layers|encoder_layers"
    r"|decoder_layers|encoder_attention_heads|decoder_attention_heads|encoder_ffn_dim|decoder_ffn_dim"
    r"|max_position_embeddings|num_labels)"
)
_OPTIONAL_SIZES = ("type_vocab_size",)  # 0 means that the model has no such table
_SHARES = re.compile(r"(?:.*_)?(?:dropout|pdrop|dropout_prob|dropout_rate|layerdrop)")


def check_adapter(name: str, section: Any) -> None:
    """Check the arguments of ``LoraConfig`` by kind and by range; names are checked where peft is imported.

    Raises:
        ConfigError: it is not a mapping, or a value cannot be used.

    >>> check_adapter("adapter", {"r": "abc"})
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: adapter.r must be a whole number, got 'abc' (str)
    """
    _check_keys(name, section, "LoraConfig arguments")
    for key, value in section.items():
        if key in _PEFT and value is not None:
            _PEFT[key](f"{name}.{key}", value)


def check_model_config(name: str, section: Any) -> None:
    """Check the numbers of a transformers configuration: finite, sizes positive, dropout a share.

    Raises:
        ConfigError: it is not a mapping with model_type, or a number cannot be used.

    >>> check_model_config("config", {"model_type": "gpt2", "n_embd": 0})
    Traceback (most recent call last):
    dpllm.config.values.ConfigError: config.n_embd must be at least 1, got 0
    """
    example = "such as {model_type: llama, hidden_size: 128}"
    if not isinstance(section, Mapping) or "model_type" not in section:
        raise ConfigError(f"{name} must be a mapping with model_type, {example}, got {shown(section)}")
    _check_keys(name, section, f"names to values, {example}")
    if not isinstance(section["model_type"], str) or not section["model_type"]:
        raise ConfigError(f"{name}.model_type must be a text, {example}, got {shown(section['model_type'])}")
    for key, value in section.items():
        if value is None:
            continue
        if key in _OPTIONAL_SIZES:
            integer(f"{name}.{key}", value, 0, _MOST)
        elif _SIZES.fullmatch(key) and not isinstance(value, list | Mapping):
            integer(f"{name}.{key}", value, 1, _MOST)
        elif _SHARES.fullmatch(key):
            between(f"{name}.{key}", value, 0, 1, below=True)
        elif isinstance(value, float):
            number(f"{name}.{key}", value)


def _check_keys(name: str, section: Any, what: str) -> None:
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        raise ConfigError(f"{name} must be a mapping of {what}, got {shown(section)}")


def _texts(name: str, value: Any) -> None:
    """Raise unless `value` is a text, or a list of texts that is not empty."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple | set) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise ConfigError(f"{name} must be a text or a list of texts, got {shown(value)}")


def _list_of_texts(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ConfigError(f"{name} must be a list of module names, got {shown(value)}; write [{value}]")
    _texts(name, value)


def _numbers_by_name(check: Any, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of module names to numbers, got {shown(value)}")
    for key, item in value.items():
        check(f"{name}.{key}", item)


def _layers(name: str, value: Any) -> None:
    for item in value if isinstance(value, list) else [value]:
        integer(name, item, 0, _MOST)


_ALPHA = partial(between, least=0, above=True)
_RANK = partial(integer, minimum=1, maximum=_MOST)
_PEFT: dict[str, Any] = {
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "lora_dropout": partial(between, least=0, most=1, below=True),
    "bias": partial(choice, choices=("none", "all", "lora_only")),
    "target_modules": _texts,
    "exclude_modules": _texts,
    "modules_to_save": _list_of_texts,
    "layers_to_transform": _layers,
    "layers_pattern": _texts,
    "rank_pattern": partial(_numbers_by_name, _RANK),
    "alpha_pattern": partial(_numbers_by_name, _ALPHA),
    **dict.fromkeys(("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias", "inference_mode"), flag),
}

"""Configurations of toy size for every model class of transformers.

`toy_config` reads the default configuration of a class and shrinks it by the names of its fields, in nested
configurations too. `SPECIAL` has the classes for which names are not enough, with the fields that differ.

Sizes: width 32, 4 heads of 8, 2 layers (more where a model alternates between kinds of layers), 4 experts of which a
token takes 2, 96 tokens. Every rate of dropout, of skipped layers and of router noise is 0.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 96
FIRST_WORD, LAST_WORD = 8, 47
"""Tokens of rows. Special tokens of a default configuration that are too large for the vocabulary get numbers above."""
NUM_LABELS = 3
MOST_LAYERS = 4

_SIZES: tuple[tuple[str, int], ...] = (
    # Widths first. A name takes the first pattern that matches all of it.
    (r"qk_head_dim", 16),
    (r".*head_dim|d_kv|d_head|.*headdim|.*_d_head|dim_head|attention_head_size|qk_(nope|rope)_head_dim", 8),
    (r"hidden_size_per_layer_input|ple_embed_dim|adapter_rank|.*lora_rank.*|embedding_rank|o_lora_rank", 8),
    (r".*(intermediate|ffn|mlp)_?(hidden_)?(size|dim).*|d_ff|dff|dim_ff|n_inner|d_inner|linear_size|hidden_dim", 48),
    (r"(encoder|decoder)_ffn_dim|.*ffn_hidden_size|expert_ffn_hidden_size|ffn_dim|mlp_dim", 48),
    (r"(d_model|n_embd|embed_dim|emb_dim|dim|embedding_size|embedding_dim|dim_model|lru_width|model_dim)", 32),
    (r".*(hidden_size|embed_proj_dim|embed_dim|embedding_size|emb_size|output_dim|input_dim|_in_dim|_out_dim)", 32),
    (r"(true|bottleneck)_.*size|prediction_head_size|intra_bottleneck_size", 32),
    (r"(ssm_)?state_size|mamba_d_state|.*_d_state|time_step_rank|mamba_dt_rank|.*dt_rank", 8),
    (r"(num_)?(hidden|encoder|decoder|n)_?layers|num_layers|n_layers?|depth|num_(encoder|decoder)_layers", 2),
    (r"(speech_encoder|t2u_encoder|t2u_decoder|encoder|decoder)_layers|conf_num_hidden_layers|num_blocks", 2),
    (
        r"num_(encoder_|decoder_)?attention_heads|n_heads?|num_heads|(encoder|decoder)_attention_heads|attention_heads",
        4,
    ),
    (r".*attention_heads", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|.*max_(source|target)_positions|context_length", 64),
    (r"max_(encoder|decoder)_position_embeddings|max_sequence_length|model_max_length", 64),
    (r"(num|n|moe_num)_?(routed|local)?_?experts|zero_expert_num", 4),
    (r"(num_experts_per_tok(en)?|moe_(top_?k|k)|num_experts_per_token|top_k_experts)", 2),
    (r"n_groups?|topk_group|mamba_n_groups|mamba_ngroups|expert_group", 1),
    (r".*(sliding_window|window_size|attention_window|local_attention|attention_chunk_size).*", 4),
    (r".*chunk_size", 8),
    (r"patch_size", 4),
    (r"image_size|crop_size", 8),
    (r".*vocab_size.*|.*_vocab", VOCABULARY),
)


def toy_changes(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments that make a configuration of this class small, nested ones as dictionaries."""
    declared = [field.name for field in dataclasses.fields(type(config))]  # others follow from these
    fields = {name: _value(config, name) for name in declared if name not in _NOT_FIELDS}
    changes: dict[str, Any] = {}
    layers, kept = _layers(fields)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = {"model_type": value.model_type, **toy_changes(value)}
        elif kept and isinstance(value, list | tuple) and len(value) == layers:
            changes[name] = type(value)(value[number] for number in kept)
        elif isinstance(value, dict) and name in ("rope_parameters", "rope_scaling"):
            changes[name] = _toy_rope(value)
        elif (small := _small(name, value, fields)) is not None:
            changes[name] = small
    if kept:
        changes.update({name: len(kept) for name in _LAYER_COUNTS if name in fields})
    return {**changes, **SPECIAL.get(config.model_type, {})}


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return the value of a field; None if it is different in each layer, or unset."""
    try:
        return getattr(config, name)
    except Exception:  # transformers' own, which it raises for fields that are different in each layer
        return None


def toy_config(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    """Return a configuration of this class at toy size."""
    start = BUILDABLE.get(kind.model_type, {})
    changes = toy_changes(kind(**start))
    return kind(**{**start, **changes, **more})


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NOT_FIELDS = ("id2label", "label2id", "problem_type", "dtype", "architectures", "transformers_version")


def _layers(fields: Mapping[str, Any]) -> tuple[int, list[int]]:
    """Return the default number of layers, and the numbers of those to keep: one of each kind, at least two.

    Kinds are read off the fields that have an entry for each layer.
    """
    count = next((fields[name] for name in _LAYER_COUNTS if isinstance(fields.get(name), int)), 0)
    lists = [v for v in fields.values() if isinstance(v, list | tuple) and len(v) == count]
    if not lists or count < 2:
        return count, []
    first: dict[str, int] = {}
    for number, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(repr(kind), number)
    kept = sorted(first.values())[:MOST_LAYERS]
    kept += [number for number in range(count) if number not in kept][: max(0, 2 - len(kept))]
    return count, sorted(kept)


def _small(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    """Return the value of a field at toy size, None to leave it as it is."""
    if isinstance(value, bool) or value is None:
        return None
    if re.search(r"dropout|pdrop|layerdrop|drop_path|jitter", name) and isinstance(value, int | float):
        return type(value)(0)
    if not isinstance(value, int):
        return _small_tokens(name, value)
    if re.fullmatch(r".*(token|pad|bos|eos|sep|cls|mask|unk)_(id|index)", name):
        return _small_tokens(name, value)
    if re.fullmatch(r".*(num_key_value_heads|num_kv_heads)", name):
        heads = fields.get(name.replace("key_value", "attention"), fields.get("num_attention_heads"))
        return {1: 1, heads: 4}.get(value, 2)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size) if value > 0 else None
    return None


def _small_tokens(name: str, value: Any) -> Any:
    if not re.search(r"(token|pad|bos|eos|sep|cls|mask|unk)_(id|index)", name):
        return None
    if isinstance(value, list | tuple):
        return 2
    return value if isinstance(value, int) and value < FIRST_WORD else _number_above(name)


def _number_above(name: str) -> int:
    """Return a token beyond the words, the same for the same name."""
    known = ("bos_token_id", "eos_token_id", "pad_token_id")
    if name in known:
        return known.index(name) + 1
    return LAST_WORD + 1 + sum(map(ord, name)) % (VOCABULARY - LAST_WORD - 1)


def _toy_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings for heads of 8 features; nested settings are those of each kind of layer."""
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _toy_rope(value)
        elif name == "mrope_section":
            small[name] = [2, 1, 1][: len(value)]
        elif name == "original_max_position_embeddings":
            small[name] = 64
        elif isinstance(value, Sequence) and not isinstance(value, str):
            small[name] = list(value)[:4]
        else:
            small[name] = value
    return small


BUILDABLE: dict[str, dict[str, Any]] = {}
"""Arguments without which the default configuration itself is refused."""

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}  # heads x features = expansion x width
_HEADS = {"head_dim": 8, "num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_BERT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": VOCABULARY},
}
_GEMMA4 = {"global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # the other is refused: short rows switch it off for good
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"use_cache": False},
    "blt_local_encoder": {"hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
        "swa_v_head_dim": 8,
        "swa_head_dim": 16,
        "head_dim": 16,
    },
    "encoder-decoder": {
        "encoder": {"model_type": "bert", **_BERT},
        "decoder": {"model_type": "bert", **_BERT, "is_decoder": True, "add_cross_attention": True},
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 5, "token_dropout": False},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "max_2d_position_embeddings": 64},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": _HEADS,
    "nemotron": _HEADS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "neomme": {"head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "reformer": {"axial_pos_embds": False, "attn_layers": ("local", "lsh"), "num_hidden_layers": 2, "hash_seed": 0},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xlstm": {"chunk_size": 8, "qk_dim_factor": 1.0},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
}
"""Fields that names alone do not decide, by type of model."""

"""Tiny random transformers, the ways of training them, and the batches they are fed.

Every model is made from its configuration: 2 layers, width 32, 97 tokens. A `Case` names one
combination of family, head, mode, dtype and checkpointing; `build_model` makes it and `make_batch`
the rows that go with it. Dropout is off (so that a row can be run alone) unless the family or the mode says otherwise.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

VOCABULARY_SIZE = 97
WIDTH = 32
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KEY_VALUE_HEADS = 2
MLP_WIDTH = 48
NUM_LABELS = 3
MAX_POSITIONS = 40
ROW_LENGTHS = (9, 12, 7, 11, 10)
TARGET_LENGTHS = (6, 4, 8, 5, 7)  # seq2seq only
IGNORED = -100

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "autocast": torch.float32,  # float32 parameters, forward under autocast(bfloat16)
}
CHECKPOINTING = ("none", "non-reentrant", "reentrant")


@dataclass(frozen=True)
class Family:
    """One architecture: how to make it, and the names its modes need.

    `attention` names the projections that attention-only LoRA targets, `embeddings` the input
    embedding(s) by module suffix, `head` the output layer, and `layer_zero` a substring of the
    parameter names of the lowest layer.
    """

    name: str
    task: str
    make: Callable[[bool], nn.Module]
    attention: tuple[str, ...]
    embeddings: tuple[str, ...]
    head: str
    layer_zero: str
    heads: tuple[bool, ...] = (False,)  # which values of `tied` the architecture allows
    pad_token_id: int = 0
    conv1d: bool = False
    dropout: bool = False
    without_lora: tuple[str, ...] = ()  # linear layers that PEFT does not adapt
    experts: bool = False


def _decoder_settings(tied: bool, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": MLP_WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        **more,
    }


def _gpt2(tied: bool, dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=MAX_POSITIONS,
        n_embd=WIDTH,
        n_layer=NUM_LAYERS,
        n_head=NUM_HEADS,
        n_inner=MLP_WIDTH,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def _mistral(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS, head_dim=8, sliding_window=5)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**settings))


def _qwen2(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))


def _qwen3(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS, head_dim=16)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))


def _gemma3(tied: bool) -> nn.Module:
    settings = _decoder_settings(
        tied,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))


def _phi3(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS)
    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**settings))


def _experts_settings(tied: bool, **more: Any) -> dict[str, Any]:
    """Settings of a decoder with four experts, of which each token takes two."""
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS)
    settings |= {"intermediate_size": 24, "moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    # PyTorch's grouped product, the default of transformers, has no float64.
    return settings | {"experts_implementation": "eager", **more}


def _mixtral(tied: bool) -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_experts_settings(tied)))


def _qwen3_moe(tied: bool) -> nn.Module:
    settings = _experts_settings(tied, num_experts=4, head_dim=8, norm_topk_prob=True, mlp_only_layers=[])
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))


def _gpt_oss(tied: bool) -> nn.Module:
    settings = _experts_settings(
        tied,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))


def _deepseek_v3(tied: bool) -> nn.Module:
    settings = _experts_settings(
        tied,
        num_key_value_heads=NUM_HEADS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings))


def _deepseek_v3_in_one_group(tied: bool) -> nn.Module:
    """Every token takes the two experts of one group, whatever it is; the experts of the other group get none."""
    model = _deepseek_v3(tied)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([10.0, 10.0, 0.0, 0.0]))
    return model


def _gpt_neox(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, attention_dropout=0.0, hidden_dropout=0.0)
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings))


def _opt(tied: bool) -> nn.Module:
    settings = _decoder_settings(tied, ffn_dim=MLP_WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0, pad_token_id=1)
    del settings["intermediate_size"]
    return transformers.OPTForCausalLM(transformers.OPTConfig(**settings))


def _encoder_settings(**more: Any) -> dict[str, Any]:
    settings = _decoder_settings(True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=NUM_LABELS)
    return settings | more


def _bert(tied: bool) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_encoder_settings()))


def _roberta(tied: bool) -> nn.Module:
    settings = _encoder_settings(pad_token_id=1, bos_token_id=0, type_vocab_size=1)
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**settings))


def _albert(tied: bool) -> nn.Module:
    settings = _encoder_settings(embedding_size=16, num_hidden_groups=1, classifier_dropout_prob=0.0)
    return transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**settings))


def _t5(tied: bool) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY_SIZE,
        d_model=WIDTH,
        d_kv=8,
        d_ff=MLP_WIDTH,
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="relu" if tied else "gated-gelu",  # T5 and T5 v1.1
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config)
    if not tied:  # transformers ties every T5; untied, the head gets a copy
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return model


def _mamba2(tied: bool) -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=1,
        chunk_size=8,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.Mamba2ForCausalLM(config)


def _falcon_h1(tied: bool) -> nn.Module:
    mamba = {f"mamba_{name}": size for name, size in {"d_ssm": 64, "n_heads": 8, "d_head": 8, "d_state": 8}.items()}
    settings = _decoder_settings(tied, num_key_value_heads=NUM_KEY_VALUE_HEADS, mamba_n_groups=1, mamba_chunk_size=8)
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**settings, **mamba))


def _qwen3_next(tied: bool) -> nn.Module:
    settings = _decoder_settings(
        tied,
        num_key_value_heads=NUM_KEY_VALUE_HEADS,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=MLP_WIDTH,
        shared_expert_intermediate_size=MLP_WIDTH,
        experts_implementation="eager",
    )
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings))


_BOTH_HEADS = (True, False)
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def _causal(name: str, make: Callable[[bool], nn.Module], **names: Any) -> Family:
    defaults: dict[str, Any] = {
        "attention": _QKVO,
        "embeddings": ("embed_tokens",),
        "head": "lm_head",
        "layer_zero": "model.layers.0.",
        "heads": _BOTH_HEADS,
    }
    return Family(name, "causal_lm", make, **(defaults | names))


_GPT2_NAMES: dict[str, Any] = {
    "attention": ("c_attn",),
    "embeddings": ("wte",),
    "layer_zero": "transformer.h.0.",
    "conv1d": True,
}
_ENCODER_NAMES: dict[str, Any] = {
    "attention": ("query", "key", "value"),
    "embeddings": ("word_embeddings",),
    "head": "classifier",
}

FAMILIES = {
    family.name: family
    for family in (
        _causal("gpt2", lambda tied: _gpt2(tied, dropout=0.1), dropout=True, **_GPT2_NAMES),
        _causal("gpt2-without-dropout", lambda tied: _gpt2(tied, dropout=0.0), **_GPT2_NAMES),
        _causal("llama", _llama),
        _causal("mistral", _mistral),
        _causal("qwen2", _qwen2),
        _causal("qwen3", _qwen3),
        _causal("gemma3", _gemma3),
        _causal("phi3", _phi3, attention=("qkv_proj", "o_proj")),
        _causal(
            "deepseek_v3-in-one-group",
            _deepseek_v3_in_one_group,
            attention=("q_b_proj", "kv_b_proj", "o_proj"),
            heads=(False,),
            experts=True,
        ),
        _causal("mixtral", _mixtral, experts=True),
        _causal("qwen3_moe", _qwen3_moe, heads=(False,), experts=True),
        _causal(
            "deepseek_v3", _deepseek_v3, attention=("q_b_proj", "kv_b_proj", "o_proj"), heads=(False,), experts=True
        ),
        _causal(
            "mamba2",
            _mamba2,
            attention=("in_proj",),
            embeddings=("embeddings",),
            layer_zero="backbone.layers.0.",
            without_lora=("out_proj", "conv1d"),
        ),
        _causal("falcon_h1", _falcon_h1, without_lora=("out_proj", "conv1d")),
        _causal("qwen3_next", _qwen3_next, heads=(False,), experts=True),
        _causal(
            "gpt_neox",
            _gpt_neox,
            attention=("query_key_value",),
            embeddings=("embed_in",),
            head="embed_out",
            layer_zero="gpt_neox.layers.0.",
        ),
        _causal(
            "opt",
            _opt,
            attention=("q_proj", "k_proj", "v_proj", "out_proj"),
            layer_zero="model.decoder.layers.0.",
            pad_token_id=1,
        ),
        Family("bert", "sequence_classification", _bert, layer_zero="bert.encoder.layer.0.", **_ENCODER_NAMES),
        Family(
            "roberta",
            "sequence_classification",
            _roberta,
            layer_zero="roberta.encoder.layer.0.",
            pad_token_id=1,
            **_ENCODER_NAMES,
        ),
        Family("albert", "sequence_classification", _albert, layer_zero="embedding_hidden_mapping", **_ENCODER_NAMES),
        Family(
            "t5",
            "seq2seq_lm",
            _t5,
            attention=("q", "k", "v", "o"),
            embeddings=("embed_tokens",),
            head="lm_head",
            layer_zero="encoder.block.0.",
            heads=_BOTH_HEADS,
        ),
    )
}


_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS", "seq2seq_lm": "SEQ_2_SEQ_LM"}


def _lora(family: Family, model: nn.Module, **settings: Any) -> nn.Module:
    settings = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": "all-linear"} | settings
    if family.without_lora and settings["target_modules"] == "all-linear":
        settings["exclude_modules"] = list(family.without_lora)
    config = LoraConfig(task_type=_TASK_TYPES[family.task], fan_in_fan_out=family.conv1d, **settings)
    return get_peft_model(model, config)


def _freeze(model: nn.Module, is_frozen: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_frozen(name):
            parameter.requires_grad_(False)
    return model


def _full(family: Family, model: nn.Module) -> nn.Module:
    return model


def _bias_only(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(model, lambda name: not (name.endswith("bias") or name.startswith("classifier")))


def _frozen_embeddings(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(model, lambda name: any(f"{word}." in name for word in (*family.embeddings, "wpe", "shared")))


def _frozen_lower(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(_frozen_embeddings(family, model), lambda name: family.layer_zero in name)


_ROUTERS = (".gate.weight", ".router.weight", ".router.bias")


def _routers_only(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(model, lambda name: not name.endswith(_ROUTERS))


def _experts_only(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(model, lambda name: ".experts." not in name and not name.endswith(_ROUTERS))


def _frozen_experts(family: Family, model: nn.Module) -> nn.Module:
    return _freeze(model, lambda name: ".experts." in name)


def _mode(**settings: Any) -> Callable[[Family, nn.Module], nn.Module]:
    return lambda family, model: _lora(family, model, **settings)


MODES: dict[str, Callable[[Family, nn.Module], nn.Module]] = {
    "full": _full,
    "lora-attention": lambda family, model: _lora(family, model, target_modules=list(family.attention)),
    "lora-all-linear": _mode(),
    "lora-dropout": _mode(lora_dropout=0.1),
    "lora-bias-all": _mode(bias="all"),
    "lora-bias-lora-only": _mode(bias="lora_only"),
    "lora-own-bias": lambda family, model: _lora(
        family, model, target_modules=list(family.attention[:-1] or family.attention), lora_bias=True
    ),
    "lora-modules-to-save": lambda family, model: _lora(family, model, modules_to_save=[family.head]),
    "lora-tied-to-save": lambda family, model: _lora(
        family, model, modules_to_save=list(family.embeddings), ensure_weight_tying=True
    ),
    "lora-rslora": _mode(use_rslora=True),
    "lora-dora": _mode(use_dora=True),
    "lora-embedding": lambda family, model: _lora(
        family, model, target_modules=[*family.embeddings, *family.attention]
    ),
    "lora-experts": lambda family, model: _lora(
        family, model, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
    "routers-only": _routers_only,
    "experts-only": _experts_only,
    "bias-only": _bias_only,
    "frozen-embeddings": _frozen_embeddings,
    "frozen-lower": _frozen_lower,
    "frozen-experts": _frozen_experts,
}

_WITHOUT_BIASES = {
    *("llama", "mistral", "qwen3", "gemma3", "phi3", "t5"),
    *("mixtral", "qwen3_moe", "deepseek_v3"),
}
_BIAS_MODES = {"lora-bias-all", "lora-bias-lora-only", "lora-own-bias", "bias-only"}
_UNTIED_MODES = {"lora-modules-to-save", "lora-embedding"}  # PEFT advises against a tied layer in these two


@dataclass(frozen=True)
class Case:
    """One thing to be right about. `tied` is False for classifiers, which have no tied head."""

    family: str
    mode: str = "full"
    tied: bool = False
    dtype: str = "float64"
    checkpointing: str = "none"

    @property
    def spec(self) -> Family:
        return FAMILIES[self.family]

    @property
    def has_dropout(self) -> bool:
        return self.spec.dropout or self.mode == "lora-dropout"

    def __str__(self) -> str:
        head = ("tied" if self.tied else "untied") if len(self.spec.heads) > 1 else "classifier"
        parts = [self.family, head, self.mode]
        parts += [self.dtype] if self.dtype != "float64" else []
        parts += [self.checkpointing] if self.checkpointing != "none" else []
        return "-".join(parts)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


def is_meaningful(family: str, mode: str, tied: bool) -> bool:
    """Whether the mode says anything about the architecture (no bias modes where there is no bias)."""
    if mode in _BIAS_MODES and family in _WITHOUT_BIASES:
        return False
    if mode in ("lora-experts", "routers-only", "experts-only", "frozen-experts") and not FAMILIES[family].experts:
        return False
    if mode == "lora-all-linear" and FAMILIES[family].experts:  # PEFT warns of patterns for experts that match nothing
        return False
    if tied and mode in _UNTIED_MODES:
        return False
    if mode == "lora-tied-to-save":  # PEFT knows how to keep these tied, and no others
        return tied and FAMILIES[family].task == "causal_lm" and FAMILIES[family].embeddings == ("embed_tokens",)
    return tied in FAMILIES[family].heads


def _perturb(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Moves parameters off their initial values: no zero LoRA factor, no norm weight of exactly one."""
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(0.05 * noise.to(parameter.dtype))


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters, and leaves buffers such as rotary frequencies in float32, as `from_pretrained` does.

    For float64 the buffers are cast as well.
    """
    if dtype is torch.float64:
        model.double()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def build_model(case: Case, seed: int = 0) -> nn.Module:
    """A model in training mode with random weights that depend on the case's architecture and `seed` alone.

    PEFT wraps a base model that already has its dtype, so that bfloat16 gets PEFT's own choice for the
    adapters. Checkpointing is not switched on here: see `enable_checkpointing`.
    """
    architecture = zlib.crc32(f"{case.family}/{case.tied}/{case.mode}/{seed}".encode())
    torch.manual_seed(architecture)
    generator = torch.Generator().manual_seed(architecture)
    model = case.spec.make(case.tied)
    _perturb(list(model.parameters()), generator)
    _cast_parameters(model, DTYPES[case.dtype])
    before = {id(parameter) for parameter in model.parameters()}
    model = MODES[case.mode](case.spec, model)
    _perturb([parameter for parameter in model.parameters() if id(parameter) not in before], generator)
    if case.dtype == "float64":
        model.double()
    return model.train()


def float64_copy(model: nn.Module) -> nn.Module:
    """An independent float64 copy of the same weights. To be made before hooks and checkpointing."""
    return copy.deepcopy(model).double()


def enable_checkpointing(model: nn.Module, kind: str) -> None:
    """Activation checkpointing as a user of transformers switches it on."""
    if kind == "none":
        return
    kwargs = {"use_reentrant": kind == "reentrant"}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:  # its name in older transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    if kind == "reentrant" and not all(parameter.requires_grad for parameter in model.parameters()):
        model.enable_input_require_grads()


def forward_context(case: Case, device: str = "cpu") -> AbstractContextManager[Any]:
    """Autocast for the autocast dtype, nothing otherwise. The backward pass stays outside."""
    return torch.autocast(device, dtype=torch.bfloat16) if case.dtype == "autocast" else nullcontext()


@dataclass(frozen=True)
class Batch:
    """Model inputs (B, T), and labels: (B, T) or, for a classifier, (B,)."""

    inputs: dict[str, Tensor]
    labels: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.labels)

    def rows(self, index: list[int]) -> Batch:
        """The same rows in another order, or some of them, with the padding they came with."""
        return Batch({name: value[index] for name, value in self.inputs.items()}, self.labels[index])

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch({name: value.to(device) for name, value in self.inputs.items()}, self.labels.to(device))

    def unpadded_row(self, row: int) -> Batch:
        """One row alone, cut to its own length."""
        length = int(self.inputs["attention_mask"][row].sum())
        inputs = {name: value[row : row + 1] for name, value in self.inputs.items()}
        for name in ("input_ids", "attention_mask"):
            inputs[name] = inputs[name][:, :length]
        labels = self.labels[row : row + 1]
        if "decoder_input_ids" in inputs:
            length = int(inputs["decoder_attention_mask"].sum())
            for name in ("decoder_input_ids", "decoder_attention_mask"):
                inputs[name] = inputs[name][:, :length]
        return Batch(inputs, labels[:, :length] if labels.dim() == 2 else labels)


def _padded(rows: list[Tensor], fill: int, extra: int) -> Tensor:
    length = max(map(len, rows)) + extra
    return torch.stack([nn.functional.pad(row, (0, length - len(row)), value=fill) for row in rows])


def make_batch(family: Family, seed: int = 0, num_rows: int = 5, extra_padding: int = 0, stretch: int = 1) -> Batch:
    """Rows of different length, padded on the right; some tokens occur several times, one is the padding token.

    A causal row's first two tokens are a prompt without loss, in every second row. `stretch`
    multiplies the lengths: at 3, rows are longer than the model is wide, and norms are cheaper otherwise.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(length: int) -> Tensor:
        row = torch.randint(4, VOCABULARY_SIZE, (length,), generator=generator)
        row[length // 2] = row[1]  # a token twice
        row[-1] = 5  # a token shared by all rows
        row[2] = family.pad_token_id  # not padding here; an embedding with padding_idx doesn't train it
        return row

    rows = [draw(stretch * ROW_LENGTHS[i % len(ROW_LENGTHS)]) for i in range(num_rows)]
    inputs = {
        "input_ids": _padded(rows, family.pad_token_id, extra_padding),
        "attention_mask": _padded([torch.ones_like(row) for row in rows], 0, extra_padding),
    }
    if family.task == "sequence_classification":
        return Batch(inputs, torch.randint(0, NUM_LABELS, (num_rows,), generator=generator))
    if family.task == "causal_lm":
        targets = [row.clone() for row in rows]
        for target in targets[::2]:
            target[:2] = IGNORED
        return Batch(inputs, _padded(targets, IGNORED, extra_padding))
    targets = [draw(stretch * TARGET_LENGTHS[i % len(TARGET_LENGTHS)]) for i in range(num_rows)]
    shifted = [torch.cat([target.new_zeros(1), target[:-1]]) for target in targets]  # starts with token 0
    inputs["decoder_input_ids"] = _padded(shifted, family.pad_token_id, extra_padding)
    inputs["decoder_attention_mask"] = _padded([torch.ones_like(row) for row in shifted], 0, extra_padding)
    return Batch(inputs, _padded(targets, IGNORED, extra_padding))

"""Read the shape of a model: the numbers of its parameters, and the modules that will run one row at a time.

Both are read from a model on the meta device: no weight is allocated, and no record is read.

The result is the input of `dpllm.planning.footprint`. Adapters and frozen parameters come from the functions that
prepare the model for training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, PreTrainedConfig

from dpllm.config import TASKS, ConfigError, ModelConfig
from dpllm.config.quantization import Quantization
from dpllm.ghost.attach import Ladder, is_linear, is_transposed
from dpllm.models.load import AUTO_MODEL, DTYPES, config_arguments, load_tokenizer, prepare_model

_ROWS, _TOKENS = 2, 8
_NOBODY: Any = None  # replaces a clipper: no call is clipped
_COMPOSED = ("NewGELUActivation", "FastGELUActivation")


@dataclass(frozen=True)
class Linear:
    """One matrix of a block.

    Attributes:
        role: one of `ROLES`; all "qkv" layers read the same input, and so do all "mlp_in" layers.
        inputs: width of its input.
        outputs: width of its output.
        trainable: whether its weight is trained.
        bias: whether its bias is trained.
        rank: r of its adapter, 0 without one.
    """

    role: str
    inputs: int
    outputs: int
    trainable: bool = True
    bias: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Norm:
    """One norm of a block.

    Attributes:
        width: number of its features.
        widens: whether it computes on a float32 copy, like transformers' RMS norms.
        trainable: whether its scale is trained.
    """

    width: int
    widens: bool
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class Block:
    """One of the equal blocks of a model."""

    entries: int
    """Entries of the largest block, adapters included."""
    linears: tuple[Linear, ...]
    """Its matrices."""
    norms: tuple[Norm, ...]
    """Its norms."""
    composed_activation: bool
    """Whether the MLP's activation function consists of elementary operations (GPT-2's GELU), each of which saves."""

    @property
    def has_adapters(self) -> bool:
        """Return whether LoRA factors are trained."""
        return any(linear.rank for linear in self.linears)

    @property
    def matrices(self) -> int:
        """Return the number of entries of its matrices."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies two projections."""
        return self.width("mlp_in", "outputs") == 2 * self.width("mlp_out", "inputs")

    def width(self, role: str, side: str) -> int:
        """Return the summed ``inputs`` or ``outputs`` of the matrices of a role."""
        return sum(getattr(linear, side) for linear in self.linears if linear.role == role)


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output layer, which computes the logits."""

    entries: int
    """Its number of entries, even if it is the embedding; 0 if the model has none."""
    vocabulary: int
    """Width of the logits: V, or the number of classes."""
    tied: bool
    """Whether it is the embedding."""
    trainable: bool
    """Whether it is trained."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts of entries, and widths. Each shared parameter counts once."""

    total: int
    """P."""
    trainable: int
    """P_t."""
    largest_trainable: int
    """Entries of the largest trainable parameter."""
    num_layers: int
    """L."""
    hidden: int
    """d."""
    embedding: int
    """Entries of the input embedding."""
    trainable_tables: int
    """Number of trainable embeddings (of tokens, positions)."""
    dtype_bytes: int
    """Bytes per parameter by the recipe's ``model.dtype``, without adapters."""
    block: Block
    """One block; all blocks are equal."""
    head: Head
    """The output layer."""
    quantized: int = 0
    """Entries of frozen matrices that are stored quantised."""
    quantized_bytes: int = 0
    """Their bytes, scales included."""

    @property
    def frozen(self) -> int:
        """P - P_t."""
        return self.total - self.trainable


def shape_of_model(model: ModelConfig) -> ModelShape:
    """Return the shape of a recipe's model, adapters and frozen parameters included.

    Raises:
        ConfigError: its configuration cannot be read (if a name on the Hub cannot be reached, use a folder with
            its config.json), or the form of its blocks is unknown.

    >>> llama = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    ...          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> shape_of_model(ModelConfig(config=llama, dtype="bfloat16")).total
    8030261248
    """
    base, prepared = on_meta(model)
    shape = _shape_of(prepared, base, base.dtype.itemsize)
    if model.quantization is None:
        return shape
    stored = Quantization.of(model.quantization)
    matrices = list(_quantized(base))
    return dataclasses.replace(
        shape,
        quantized=sum(outputs * inputs for outputs, inputs in matrices),
        quantized_bytes=sum(stored.num_bytes(outputs, inputs) for outputs, inputs in matrices),
    )


def on_meta(model: ModelConfig) -> tuple[Any, Any]:
    """Return a recipe's model without weights, before and after adapters and frozen parameters.

    Raises:
        ConfigError: no model can be built from its configuration, or the configuration cannot be read.
    """
    config = _config_of(model)
    dtype = DTYPES[model.dtype]
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            base = AUTO_MODEL[model.task].from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"no model can be built from this configuration: {error}") from error
    with torch.device("meta"):
        return base, prepare_model(base, model)


def _quantized(base: Any) -> Iterator[tuple[int, int]]:
    """Yield outputs and inputs of each matrix that is stored quantised: all but heads and trained parts."""
    for path, module in getattr(base, base.base_model_prefix, base).named_modules():
        if is_linear(module) and ".lora_" not in path and ".modules_to_save." not in path:
            outputs, inputs = module.get_parameter("weight").shape
            yield (inputs, outputs) if is_transposed(module) else (outputs, inputs)


def _config_of(model: ModelConfig) -> PreTrainedConfig:
    if model.config is None:
        try:
            config = AutoConfig.from_pretrained(str(model.name), trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the configuration of the model {model.name!r} cannot be read ({str(error).splitlines()[0][:200]}). "
                "Set model.name to a local folder with its config.json; no other file is needed for this"
            ) from error
    else:
        config = _fresh(model)
    if config.is_encoder_decoder:
        raise ConfigError(
            "memory and communication can be estimated only for single-stack models, not for encoder-decoders. "
            "Measure a short run instead"
        )
    if model.tie_word_embeddings is not None:
        config.tie_word_embeddings = model.tie_word_embeddings
    if TASKS[model.task].needs_labels and model.num_labels:
        config.num_labels = model.num_labels
    return config


def _fresh(model: ModelConfig) -> PreTrainedConfig:
    kind, arguments = config_arguments(model)
    if "vocab_size" not in arguments:
        arguments["vocab_size"] = model.tokenizer_vocab_size or len(load_tokenizer(model))
    try:
        return AutoConfig.for_model(kind, **arguments)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model.config: {' '.join(str(error).split())[:300]}") from error


def _shape_of(model: nn.Module, base: Any, dtype_bytes: int) -> ModelShape:
    config = base.config
    blocks = _blocks(model, int(config.num_hidden_layers))
    linears = _linears(blocks[0], int(config.hidden_size))
    parameters = list(model.parameters())
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    head_weight = head.weight if head is not None else None
    inside = {id(p) for p in blocks.parameters()}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad}
    return ModelShape(
        total=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        largest_trainable=max(p.numel() for p in parameters if p.requires_grad),
        num_layers=len(blocks),
        hidden=int(config.hidden_size),
        embedding=embedding.weight.numel(),
        trainable_tables=len(tables - inside),
        dtype_bytes=dtype_bytes,
        block=Block(
            entries=max(sum(p.numel() for p in block.parameters()) for block in blocks),
            linears=linears,
            norms=_norms(blocks[0]),
            composed_activation=any(type(m).__name__ in _COMPOSED for m in blocks[0].modules()),
        ),
        head=Head(
            entries=head_weight.numel() if head_weight is not None else 0,
            vocabulary=int(head_weight.shape[0]) if head_weight is not None else int(config.num_labels),
            tied=head_weight is not None and head_weight is embedding.weight,
            trainable=head_weight is not None and head_weight.requires_grad,
        ),
    )


def _blocks(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the stack of blocks: the list of `num_layers` modules of one class."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and len({type(m) for m in module}) == 1:
            return module
    raise ConfigError(
        f"{type(model).__name__} has no list of {num_layers} equal blocks, so its memory and communication are unknown"
    )


def _linears(block: nn.Module, hidden: int) -> tuple[Linear, ...]:
    """Return the matrices of a block, with roles by order and width: queries/keys/values, output, MLP in, MLP out."""
    found: list[tuple[int, int, bool, bool, int]] = []
    for path, module in block.named_modules():
        if not is_linear(module) or ".lora_" in path:
            continue
        weight = module.get_parameter("weight")
        outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
        bias = getattr(module, "bias", None)
        around = block.get_submodule(path.rpartition(".")[0]) if path.endswith(".base_layer") else None
        found.append(
            (inputs, outputs, weight.requires_grad, bias is not None and bias.requires_grad, _trained_rank(around))
        )
    inner = found[-1][0] if found else 0
    last = len(found) - 1
    first = last
    while first > 0 and found[first - 1][0] == hidden and found[first - 1][1] in (inner, 2 * inner):
        first -= 1
    if first == last or first < 2 or found[last][1] != hidden or found[first - 1][1] != hidden:
        raise ConfigError(
            f"{type(block).__name__} is not a block of attention followed by an MLP, so its memory is unknown"
        )
    roles = ["qkv"] * (first - 1) + ["attention_out"] + ["mlp_in"] * (last - first) + ["mlp_out"]
    return tuple(Linear(role, *numbers) for role, numbers in zip(roles, found, strict=True))


def _trained_rank(adapted: nn.Module | None) -> int:
    factors = getattr(adapted, "lora_A", None)
    return sum(f.weight.shape[0] for f in factors.values() if f.weight.requires_grad) if factors else 0


def _norms(block: nn.Module) -> tuple[Norm, ...]:
    """Return the modules whose own parameters are a scale (and a shift)."""
    found = []
    for module in block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 1 and not is_linear(module):
            found.append(Norm(weight.numel(), not isinstance(module, nn.LayerNorm), weight.requires_grad))
    return tuple(found)


def row_by_row_modules(model: ModelConfig) -> list[str] | None:
    """Return the paths of the modules that will run row by row, as far as shapes show.

    The taps of the model (`dpllm.ghost.attach`) are chosen on tensors that have only shapes. Modules whose gradients no
    tap computes run row by row: exact, but with as many kernel launches as a microbatch has rows. The first call of the
    real model also compares values (`dpllm.ghost.weights_check`), and may find more of them.

    Returns:
        None if shapes do not suffice: the model's own code needs values, as some routers of experts do.

    Raises:
        ConfigError: see `shape_of_model`.

    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> row_by_row_modules(ModelConfig(config={"model_type": "llama", "vocab_size": 300, **sizes}))
    []
    """
    base, prepared = on_meta(model)
    base.set_experts_implementation("batched_mm")  # the one of transformers' that works for any dtype without values
    ladder = Ladder(prepared, _NOBODY, {name: p for name, p in prepared.named_parameters() if p.requires_grad})
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
            ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
            ladder.discover(lambda: prepared(input_ids=ids))
        ladder.attach()
    except Exception:  # from the model's own code, which receives tensors without values
        return None
    return sorted(ladder.splits)


def row_by_row_words(paths: list[str] | None, rows: int) -> str:
    """Describe how many modules run row by row, which, and what it costs.

    >>> row_by_row_words(["layers.0.mixer", "layers.1.mixer"], 8)
    '2 (layers.0.mixer, …), each with 8 times its kernel launches'
    """
    if paths is None:
        return "unknown before the first step"
    if not paths:
        return "none known before the first step"
    names = (paths[0] or "the model") + (", …" if len(paths) > 1 else "")
    return f"{len(paths)} ({names}), each with {rows} times its kernel launches"

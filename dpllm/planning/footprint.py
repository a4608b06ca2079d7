"""Estimate memory and communication of a private run, per GPU, by formulas before the run.

The shape comes from `dpllm.planning.model_shape`. Nothing here is measured.

Symbols: P parameters, P_t trainable ones, N GPUs, B rows and T tokens of a microbatch, M microbatches of a step, L
blocks, d hidden size, V vocabulary, c bytes of the compute dtype, s bytes of the residual stream's dtype.

The assumptions are:

* AdamW, fused (no temporaries). Its moments have the dtype of the tensors it updates: the parameters, or under
  DeepSpeed float32 master weights. With another second moment (`dpllm.training.corrected_adamw`) they are float32.
  Frozen parameters have neither sum nor optimizer state.
* ``train.bf16``: one process and DDP compute under autocast and keep parameters in ``model.dtype``; FSDP2 keeps
  trainable parameters in float32 and gathers bfloat16; DeepSpeed keeps all in bfloat16 plus float32 master weights.
  PEFT keeps adapters in float32.
* Quantised matrices keep their stored size (`dpllm.config.quantization`); all others have the frozen dtype. Moments of
  bitsandbytes' AdamW have 8 or 32 bits; paged ones are counted as if they stayed on the GPU.
* Every row has T tokens without padding, all tokens are targets, attention runs in a fused kernel that saves no (T, T)
  matrix, dropout is 0, and all blocks are equal.
* Sums are float32. FSDP2 and ZeRO-3 compute them in buckets, of which two exist at a time, and keep a shard. ZeRO-2
  reduces buckets of 5e8 entries. These three instead keep whole sums between microbatches, and reduce them once per
  step, where every GPU has memory left for them (`Run.adds_up`), or where they take at most half the memory of a GPU's
  weights (LoRA). ZeRO-1 passes the whole sum once per step, and DeepSpeed's optimizer for bfloat16 holds a second copy.
* An average of the weights (``train.average``) is float32, divided like the optimizer's state. While it is shown, for
  an evaluation or a save, it replaces the weights, which are stored next to it (DeepSpeed: in the master weights).
* ``privacy.gradients=per_unit`` stores the gradient of one unit instead of the book; "auto" counts as ghost.
* A collective over n GPUs sends (n - 1)/n of the tensor per GPU for an all-gather or a reduce-scatter, twice that for
  an all-reduce (ring algorithms). DDP reduce-scatters sums and gathers finished gradients in the weights' dtype. FSDP2
  and ZeRO-3 gather all weights for forward and for backward of each microbatch, ZeRO-1 and -2 the updated weights.
  Padding of shards is not counted.
* CUDA context, fragmentation of the allocator, and buffers of NCCL are not counted: leave 5 to 10 % free.

Sources: `dpllm.engines`, `dpllm.ghost`; ZeRO, arXiv:1910.02054, section 5 and 7; accelerate/utils/fsdp_utils.py
(fsdp2_prepare_model); deepspeed/runtime/zero/{stage3,stage_1_and_2,config}.py and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import TrainingArguments

from dpllm.config import ConfigError, Recipe, nearest
from dpllm.config.train_values import second_moment_of
from dpllm.ghost import NormMethod
from dpllm.ghost.parameters import logits_outweigh
from dpllm.mechanism.catalogue import noise_of
from dpllm.mechanism.generators import ENTRIES_AT_A_TIME
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.strategies import Workload
from dpllm.models.losses import CHUNK_ENTRIES
from dpllm.planning.model_shape import Block, Linear, ModelShape, shape_of_model
from dpllm.privacy.plan import PrivacyPlan

ENGINES = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class Update:
    """The settings of the optimizer and of the released average."""

    averaged: bool = False
    """Whether the run keeps an average of its weights."""
    corrected: bool = False
    """Whether the optimizer is AdamW with a corrected second moment, whose moments are float32 everywhere."""
    moment_bits: int | None = None
    """Bits of an entry of AdamW's moments in bitsandbytes; None: they have the dtype of the weights."""


@dataclass(frozen=True, kw_only=True)
class Run(Update):
    """The settings of training that determine memory and communication.

    Raises:
        ConfigError: the engine is unknown, or the numbers do not fit it.
    """

    engine: str
    """One of `ENGINES`."""
    num_gpus: int
    """N."""
    rows: int
    """B: rows of a microbatch."""
    tokens: int
    """T: tokens of a row."""
    num_microbatches: int
    """M: microbatches of a step on each GPU."""
    checkpointing: bool
    """Whether a block stores only its input and is recomputed in the backward pass."""
    bf16: bool
    """``train.bf16``."""
    unit_rows: int = 1
    """Largest number of rows of a unit; a unit with more than B rows goes through the model in several passes."""
    noise_tensors: int = 0
    """Tensors of the gradient's size, over all GPUs together, that correlated noise stores between steps; 0 if the
    noise is independent or regenerated."""
    per_unit: bool = False
    """Whether one unit is run at a time (privacy.gradients=per_unit)."""
    head: str = "auto"
    """``model.head``; "whole" if the loss is not that of a causal language model."""
    adds_up: bool = False
    """Whether memory is left for whole sums between the microbatches of a step (`dpllm.engines.buckets`)."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.engine not in ENGINES:
            raise ConfigError(
                f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}{nearest(self.engine, ENGINES)}"
            )
        for name in ("num_gpus", "rows", "tokens", "num_microbatches", "unit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.moment_bits is not None and self.is_deepspeed:
            raise ConfigError(f"bitsandbytes optimizers have no estimate under {self.engine}: use adamw_torch")
        if self.per_unit and self.shards_weights:
            raise ConfigError(
                f"privacy.gradients=per_unit needs whole parameters, but {self.engine} shards them: use single, ddp, "
                "zero1 or zero2"
            )
        if self.engine == "single" and self.num_gpus != 1:
            raise ConfigError(f"the engine single uses 1 GPU, not {self.num_gpus}: use ddp, fsdp2 or a zero engine")

    @property
    def is_fsdp(self) -> bool:
        """Return whether PyTorch shards the model."""
        return self.engine == "fsdp2"

    @property
    def is_deepspeed(self) -> bool:
        """Return whether DeepSpeed shards the model."""
        return self.engine.startswith("zero")

    @property
    def shards_weights(self) -> bool:
        """Return whether parameters are sharded, and their sums computed one at a time."""
        return self.engine in ("fsdp2", "zero3")


_FLOAT32, _BFLOAT16 = 4, 2
_INDEX = 8  # bytes of a token id
_LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters: gathered entries that it keeps before it frees any
_BUCKET = 5 * 10**8  # DeepSpeed's reduce_bucket_size, in entries
_SUMS_BUCKET = 16 * 2**20  # bytes of the sums that FSDP2 and ZeRO-3 reduce together; a larger one alone
_BLOCK_OF_MOMENTS = 256  # entries of a moment of 8 bits that share a float32 scale, in bitsandbytes
_ADAMW = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused")),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), 8),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), 32),
}
"""Optimizers whose memory is known, with the bits of a moment's entry; None: the dtype of the weights."""
_SUB_GROUP = 10**9  # DeepSpeed's sub_group_size: entries of a shard that ZeRO-3 updates at a time


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Memory that is kept between steps and microbatches, in bytes per GPU."""

    weights: int
    """Parameters, or this GPU's shard of them."""
    clipped_sum: int
    """Float32 sum of clipped gradients, from the first microbatch of a step to its update."""
    optimizer: int
    """AdamW's moments, and float32 master weights if the engine keeps them."""
    noise: int
    """Float32 noise of earlier steps, with which that of later ones is correlated. Each GPU stores a slice of each
    parameter, on every engine."""
    average: int
    """The average of the weights, if the run keeps one."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.clipped_sum + self.optimizer + self.noise + self.average


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Memory that exists only while a microbatch, or the update of a step, is computed, in bytes per GPU."""

    gathered: int
    """Gathered weights of the active blocks: two blocks and the head (FSDP2 prefetches one), or 1e9 entries and a block
    (ZeRO-3). Of quantised weights, the largest matrix, restored to be multiplied."""
    activations: int
    """Tensors that autograd and the taps keep from forward to backward; with checkpointing, the blocks' inputs."""
    recomputed: int
    """The saved tensors of one block, recomputed in the backward pass; 0 without checkpointing."""
    logits: int
    """Logits and their gradient, in the model's dtype, at the peak, which is the start of the backward pass; and a
    float32 chunk of `dpllm.models.losses`. In chunks: two float32 chunks, the gradient of the hidden states, and Gram
    matrices of a trained head's rows."""
    book: int
    """Tensors that private training stores at the end of the backward pass, until the norms are known: input and output
    gradient of every trainable layer, or the per-row gradient if that is smaller. Ordinary training frees these layer
    by layer, when weight gradients replace them."""
    forming: int
    """Memory while the sum is computed: one parameter's whole float32 sum if the engine shards, its noise, and float32
    copies of the layer's input and output gradient; for ZeRO-2 a bucket and its flat copy."""
    update: int
    """Gradients that the optimizer receives in addition to the sum; or, if that is more, the weights that an average
    replaces while it is shown."""

    @property
    def peak(self) -> int:
        """The peak over four phases.

        The phases are the start of the backward pass (all activations, logits), its end (the book, one block's
        activations), the sum (the book, one parameter), and the update.
        """
        return max(
            self.activations + self.logits + self.gathered,
            max(self.activations, self.book) + self.recomputed + self.gathered,
            self.book + self.forming,
            self.update,
        )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a GPU sends per step."""

    weights: int
    """To gather weights."""
    sums: int
    """To reduce clipped sums."""

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.weights + self.sums


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per GPU, and bytes that each GPU sends per step; computed, not measured."""

    run: Run
    shape: ModelShape
    kept: Kept
    passing: Passing
    sent: Sent

    @property
    def total(self) -> int:
        """The kept memory plus the peak of the passing memory."""
        return self.kept.total + self.passing.peak

    @property
    def with_whole_sums(self) -> Footprint | None:
        """The same run where memory is left for whole sums; None if its engine needs no more for them."""
        added = footprint(self.shape, dataclasses.replace(self.run, adds_up=True))
        return None if added.kept == self.kept else added

    def seconds(self, bandwidth: float) -> float:
        """Return the seconds of communication per step at a bandwidth in bytes per second, without overlap."""
        return self.sent.total / bandwidth

    def to_dict(self) -> dict[str, int | str]:
        """Return every number by name, in bytes."""
        return {
            "engine": self.run.engine,
            "num_gpus": self.run.num_gpus,
            "num_microbatches": self.run.num_microbatches,
            **vars(self.kept),
            **vars(self.passing),
            "weights_sent": self.sent.weights,
            "sums_sent": self.sent.sums,
            "persistent": self.kept.total,
            "total": self.total,
            "sent": self.sent.total,
        }


@dataclass(frozen=True)
class _Dtypes:
    """Bytes per entry."""

    trainable: int
    frozen: int
    compute: int
    stream: int
    gather: int
    autocast: bool  # whether float32 activations are cast for every matrix product
    casts_weights: bool  # whether weights are cast too

    @classmethod
    def of(cls, shape: ModelShape, run: Run) -> _Dtypes:
        """Return the dtypes of a run; see the assumptions in the docstring of this module."""
        stored = shape.dtype_bytes
        adapted = _FLOAT32 if shape.block.has_adapters else stored
        compute = _BFLOAT16 if run.bf16 else stored
        if run.is_deepspeed and run.bf16:
            return cls(_BFLOAT16, _BFLOAT16, compute, compute, _BFLOAT16, True, False)
        if run.is_fsdp and run.bf16:
            return cls(_FLOAT32, stored, compute, compute, _BFLOAT16, True, False)
        casts = run.bf16 and stored == _FLOAT32
        return cls(adapted, stored, compute, stored, stored, run.bf16, casts)


def footprint(shape: ModelShape, run: Run) -> Footprint:
    """Apply the formulas.

    Args:
        shape: shape of the model (`dpllm.planning.model_shape.shape_of_model`).
        run: settings of the training.
    """
    dtypes = _Dtypes.of(shape, run)
    tokens = run.rows * run.tokens
    plain = shape.frozen - shape.quantized
    whole = plain * dtypes.frozen + shape.quantized_bytes + shape.trainable * dtypes.trainable
    block = tokens * _block_activations(shape.block, dtypes)
    block_casts = _BFLOAT16 * shape.block.matrices if dtypes.casts_weights else 0
    saved = tokens * shape.hidden * dtypes.stream if run.checkpointing else block + block_casts
    outer = tokens * shape.hidden * (_FLOAT32 + dtypes.stream + dtypes.compute)
    outer += _BFLOAT16 * shape.head.entries if dtypes.casts_weights else 0
    return Footprint(
        run=run,
        shape=shape,
        kept=Kept(
            weights=_share(whole, run.num_gpus) if run.shards_weights else whole,
            clipped_sum=_sum(shape, run, whole),
            optimizer=_optimizer(shape, run, dtypes),
            noise=run.noise_tensors * _share(_FLOAT32 * shape.trainable, run.num_gpus),
            average=_average(shape, run),
        ),
        passing=Passing(
            gathered=_gathered(shape, run, dtypes),
            activations=shape.num_layers * saved + outer,
            recomputed=block + block_casts if run.checkpointing else 0,
            logits=_logits(shape, run, dtypes),
            book=_book(shape, run, dtypes),
            forming=_forming(shape, run),
            update=max(_update(shape, run, dtypes), _replaced(shape, run, dtypes)),
        ),
        sent=_communication(shape, run, dtypes, whole),
    )


def in_chunks(shape: ModelShape, run: Run) -> bool:
    """Return whether logits exist one chunk at a time, by the rule of `dpllm.training.row_losses`."""
    head = shape.head
    if run.head == "whole" or not head.entries:
        return False
    if not head.trainable:
        return True
    if run.per_unit or run.shards_weights:
        return False
    return run.head == "chunks" or (
        run.checkpointing and logits_outweigh(head.vocabulary, shape.hidden, shape.num_layers)
    )


def _has_gram(shape: ModelShape, run: Run) -> bool:
    return in_chunks(shape, run) and shape.head.trainable and run.tokens <= 2 * shape.hidden


def _logits(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    tokens = run.rows * run.tokens
    chunk = _FLOAT32 * min(CHUNK_ENTRIES, tokens * shape.head.vocabulary)
    if not in_chunks(shape, run):
        return 2 * dtypes.compute * tokens * shape.head.vocabulary + chunk
    gram = _FLOAT32 * tokens * run.tokens if _has_gram(shape, run) else 0
    return 2 * chunk + dtypes.compute * tokens * shape.hidden + gram


def _share(size: int, group: int) -> int:
    """Return one GPU's part, rounded up."""
    return -(-size // group)


def _keeps_whole_sums(shape: ModelShape, run: Run, weights: int) -> bool:
    """Return whether a GPU keeps whole sums between microbatches, by the rules of `dpllm.engines.buckets`."""
    if not (run.shards_weights or run.engine == "zero2") or run.num_microbatches == 1:
        return False
    held = _share(weights, run.num_gpus) if run.shards_weights else weights
    return run.adds_up or _FLOAT32 * shape.trainable <= held // 2


def _sum(shape: ModelShape, run: Run, weights: int) -> int:
    full = _FLOAT32 * shape.trainable
    if _keeps_whole_sums(shape, run, weights):
        return full + _share(full, run.num_gpus)
    if run.shards_weights or run.engine == "zero2":
        return _share(full, run.num_gpus)
    return 2 * full if run.engine == "zero1" and run.bf16 else full


def _optimizer(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    if not run.is_deepspeed:
        moments = 2 * (_FLOAT32 if run.corrected else dtypes.trainable) * shape.trainable
        if run.moment_bits is not None:
            scales = 0 if run.moment_bits != 8 else 2 * _FLOAT32 * _share(shape.trainable, _BLOCK_OF_MOMENTS)
            moments = 2 * run.moment_bits // 8 * shape.trainable + scales
        return _share(moments, run.num_gpus) if run.is_fsdp else moments
    return 3 * _FLOAT32 * _share(shape.trainable, run.num_gpus)  # master weights, two moments


def _update(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    if run.is_deepspeed:
        return _FLOAT32 * min(_share(shape.trainable, run.num_gpus), _SUB_GROUP)
    if dtypes.trainable == _FLOAT32:
        return 0  # the sum itself becomes the gradient
    gradient = dtypes.trainable * shape.trainable
    return _share(gradient, run.num_gpus) if run.is_fsdp else gradient


def _average(shape: ModelShape, run: Run) -> int:
    if not run.averaged:
        return 0
    whole = _FLOAT32 * shape.trainable
    return _share(whole, run.num_gpus) if run.is_deepspeed or run.is_fsdp else whole


def _replaced(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    """Return the bytes of the weights that an average replaces; for DeepSpeed, one whole parameter."""
    if not run.averaged:
        return 0
    if run.is_deepspeed:
        return _FLOAT32 * shape.largest_trainable
    weights = dtypes.trainable * shape.trainable
    return _share(weights, run.num_gpus) if run.is_fsdp else weights


def _gathered(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    if run.is_fsdp:
        return dtypes.gather * (
            2 * shape.block.entries + max(shape.head.entries, shape.embedding if shape.head.tied else 0)
        )
    if run.engine == "zero3":
        return dtypes.gather * min(shape.total, _LIVE + max(shape.block.entries, shape.head.entries))
    if shape.quantized:
        return dtypes.compute * max(linear.inputs * linear.outputs for linear in shape.block.linears)
    return 0


def _per_token_inputs(linears: tuple[Linear, ...], compute: int, shared: bool) -> int:
    """Return the bytes per token of the inputs of trainable layers; with `shared`, one input per role."""
    total, seen = 0, set()
    for linear in linears:
        if linear.trainable and not (shared and linear.role in seen):
            total += compute * linear.inputs
            seen.add(linear.role)
    return total


def _block_activations(block: Block, dtypes: _Dtypes) -> int:
    """Return the bytes per token that one block saves for backward.

    They are the norms in float32, queries, keys, values and the attention's output, the MLP's inner tensors, and the
    inputs of trainable layers. The inputs of the output layers of attention and of a gated MLP are saved in any case.
    """
    compute, linears = dtypes.compute, block.linears
    norms = sum(
        (_FLOAT32 if norm.widens else dtypes.stream) * norm.width
        + (dtypes.stream * norm.width if norm.trainable and norm.widens and dtypes.stream != _FLOAT32 else 0)
        for norm in block.norms
    )
    attention = compute * (block.width("qkv", "outputs") + block.width("attention_out", "inputs"))
    inner = block.width("mlp_in", "outputs")
    mlp = compute * (inner + (inner // 2 if block.gated else 0))
    if block.composed_activation:  # x, x/2, tanh and 1 + tanh instead of x; the power is in float32 under autocast
        mlp += (4 * (_FLOAT32 if dtypes.autocast else compute) - compute) * inner
    shared = not (dtypes.autocast and dtypes.stream == _FLOAT32)
    inputs = _per_token_inputs(tuple(x for x in linears if x.role != "attention_out"), compute, shared)
    adapters = 0
    for linear in linears:
        if linear.rank:
            own_copy = dtypes.autocast or compute != _FLOAT32
            width = compute if dtypes.autocast else _FLOAT32
            adapters += width * (linear.rank + (linear.inputs if own_copy else 0))
    if block.has_adapters and not dtypes.autocast and compute == _FLOAT32:
        adapted = tuple(dataclasses.replace(x, trainable=x.rank > 0) for x in linears if x.role != "attention_out")
        inputs += _per_token_inputs(adapted, compute, shared=True)
    return norms + attention + mlp + inputs + adapters


def _book(shape: ModelShape, run: Run, dtypes: _Dtypes) -> int:
    """Return the bytes of the book; `dpllm.ghost.unit_gradients` decides on factors or instance for each layer."""
    if run.per_unit:  # a unit's gradient, in float32 if the unit has several calls
        several = run.unit_rows > run.rows
        return shape.trainable * (dtypes.trainable + (_FLOAT32 if several else 0))
    compute, rows, tokens = dtypes.compute, run.rows, run.tokens
    shared = not (dtypes.autocast and dtypes.stream == _FLOAT32)
    factored = tuple(
        x for x in shape.block.linears if x.trainable and not _prefers_instance(x.inputs, x.outputs, run, compute)
    )
    block = tokens * _per_token_inputs(factored, compute, shared)
    block += sum(tokens * compute * linear.outputs for linear in factored)
    for linear in shape.block.linears:
        if linear.trainable and linear not in factored:
            block += _FLOAT32 * linear.inputs * linear.outputs
        if linear.bias:
            block += _FLOAT32 * linear.outputs
        if linear.rank:
            width = compute if dtypes.autocast else _FLOAT32
            for inputs, outputs in ((linear.inputs, linear.rank), (linear.rank, linear.outputs)):
                block += (
                    _FLOAT32 * inputs * outputs
                    if _prefers_instance(inputs, outputs, run, width)
                    else tokens * width * (inputs + outputs)
                )
    block += sum(_FLOAT32 * norm.width for norm in shape.block.norms if norm.trainable)
    outer = sum(tokens * (dtypes.stream * shape.hidden + _INDEX) for _ in range(shape.trainable_tables))
    if shape.head.trainable:
        inputs, outputs = shape.hidden, shape.head.vocabulary
        factors = tokens * compute * (inputs + outputs)
        if in_chunks(shape, run):  # hidden states, times the gradient of the loss, and Gram matrices
            factors = tokens * (2 * compute * inputs + (_FLOAT32 * tokens if _has_gram(shape, run) else 0))
        outer += min(factors, _FLOAT32 * inputs * outputs)
    per_row = shape.num_layers * block + outer
    if run.unit_rows <= rows:
        return rows * per_row
    held = min((run.unit_rows - rows) * per_row, _FLOAT32 * shape.trainable)  # never more than the unit's gradient
    return rows * per_row + held


def _prefers_instance(inputs: int, outputs: int, run: Run, width: int) -> bool:
    """Return the result of `dpllm.ghost.NormMethod.holds_instance` for units of one row."""
    return NormMethod().holds_instance(run.tokens * width * (inputs + outputs), inputs * outputs * _FLOAT32)


def _forming(shape: ModelShape, run: Run) -> int:
    """Return the bytes of whole sums, noise, and float32 copies of a layer's factors."""
    tokens = run.rows * run.tokens
    copies = 0
    layers = [(x.inputs, x.outputs) for x in shape.block.linears if x.trainable]
    if shape.head.trainable and not in_chunks(shape, run):
        layers.append((shape.hidden, shape.head.vocabulary))
    if run.per_unit:
        layers, copies = [], _FLOAT32 * shape.largest_trainable
    for inputs, outputs in layers:
        copies = max(copies, _FLOAT32 * tokens * (inputs + outputs + min(inputs, outputs)))
    largest = _FLOAT32 * shape.largest_trainable
    noise = min(_FLOAT32 * ENTRIES_AT_A_TIME, _share(largest, run.num_gpus))
    if run.engine == "zero2":
        return largest + noise + copies + 2 * _FLOAT32 * min(shape.trainable, _BUCKET)
    if run.shards_weights:
        return copies + noise + 2 * min(_FLOAT32 * shape.trainable, max(largest, _SUMS_BUCKET))
    return copies + noise


def _communication(shape: ModelShape, run: Run, dtypes: _Dtypes, whole: int) -> Sent:
    """Return the bytes that one GPU sends per step for weights and for sums."""

    def around(size: int) -> int:
        return size * (gpus - 1) // gpus

    microbatches, gpus = run.num_microbatches, run.num_gpus
    sums = _FLOAT32 * shape.trainable
    updated = dtypes.trainable * shape.trainable
    if run.engine == "single":
        return Sent(weights=0, sums=0)
    if run.engine == "ddp":
        return Sent(weights=0, sums=around(sums) + around(updated))
    reductions = 1 if _keeps_whole_sums(shape, run, whole) else microbatches
    if run.engine in ("zero1", "zero2"):
        times = reductions if run.engine == "zero2" else 2 if run.bf16 else 1
        return Sent(weights=around(updated), sums=times * around(sums))
    return Sent(weights=around(2 * microbatches * dtypes.gather * shape.total), sums=reductions * around(sums))


def footprint_of_recipe(
    recipe: Recipe,
    arguments: TrainingArguments,
    plan_or_batch: PrivacyPlan | int,
    engine: str,
    num_gpus: int,
) -> Footprint:
    """Return the memory and communication of a recipe; no private data is read, and no weights.

    Args:
        recipe: the recipe. ``data.max_length`` is T, and B the number of such rows in ``microbatch.tokens`` ("auto" or
            left out: ``per_device_train_batch_size``). Every user is assumed to have ``max_rows_per_unit`` rows. A
            row of ``train.trainer=dpo`` counts as two.
        arguments: the arguments from its ``train`` section.
        plan_or_batch: the plan, or the expected batch size b in units. With the latter, ``bands: auto`` counts as the
            largest number of bands that a plan would choose. ``noise_memory: auto`` counts as stored.
        engine: one of `ENGINES`.
        num_gpus: N.

    Raises:
        ConfigError: the model's configuration cannot be read, its blocks have an unknown form, the optimizer is not
            AdamW, or the engine does not exist or cannot be used.
    """
    if num_gpus < 1:
        raise ConfigError(f"num_gpus must be at least 1, got {num_gpus}")
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if optimizer not in _ADAMW:
        raise ConfigError(f"train.optim={optimizer}: its memory is unknown. Use {', '.join(_ADAMW)} for this estimate")
    if recipe.model.quantization is not None and engine not in ("single", "ddp"):
        raise ConfigError(
            f"model.quantization={recipe.model.quantization!r} is not available under {engine}, which shards weights "
            "or their updates: use single or ddp"
        )
    batch = plan_or_batch if isinstance(plan_or_batch, int) else plan_or_batch.expected_batch_size
    kept = _most_kept(recipe, batch) if isinstance(plan_or_batch, int) else plan_or_batch.mechanism.noise.tensors_kept
    by_example = recipe.privacy.sampling == "example"
    sequences = 2 if recipe.train.get("trainer") == "dpo" else 1  # of a row: a pair has two
    per_unit = sequences * (1 if by_example else recipe.privacy.max_rows_per_unit or 1)
    rows = sequences * arguments.per_device_train_batch_size
    if isinstance(recipe.microbatch.tokens, int):
        rows = max(1, recipe.microbatch.tokens // recipe.data.max_length)
    if one_unit := recipe.privacy.gradients == "per_unit":
        rows = min(rows, per_unit)
    shape, head = shape_of_model(recipe.model), recipe.model.head
    is_causal = recipe.model.task == "causal_lm" and recipe.train.get("trainer") != "dpo"
    if not is_causal or (recipe.microbatch.pack and shape.head.trainable):
        head = "whole"
    run = Run(
        engine=engine,
        num_gpus=num_gpus,
        rows=rows,
        tokens=recipe.data.max_length,
        num_microbatches=_share(batch * per_unit, num_gpus * rows),
        checkpointing=bool(arguments.gradient_checkpointing),
        bf16=bool(arguments.bf16),
        unit_rows=per_unit,
        noise_tensors=0 if recipe.noise_memory == "regenerated" else kept,
        averaged=recipe.train.get("average") is not None,
        corrected=second_moment_of(optimizer, arguments.optim_args) is not None,
        moment_bits=_ADAMW[optimizer],
        per_unit=one_unit,
        head=head,
    )
    return footprint(shape, run)


def _most_kept(recipe: Recipe, batch: int) -> int:
    """Return the largest number of tensors that a plan's noise would store, for any number of units and steps."""
    noise, units = noise_of(Spec.of(recipe.privacy.noise)), 1000 * batch  # no noise has more than 1000 bands
    draw = Draw(num_units=units, population=units, expected_batch_size=batch, max_batch_size=units)
    return max(one.tensors_kept for one in noise.candidates(draw, Workload.released([1.0] * 1000)))


def engines_for(num_gpus: int, quantized: bool = False, per_unit: bool = False) -> tuple[str, ...]:
    """Return the engines worth comparing on this number of GPUs; quantised weights and single units are not sharded.

    >>> engines_for(1), engines_for(8)
    (('single',), ('ddp', 'fsdp2', 'zero1', 'zero2', 'zero3'))
    """
    if num_gpus == 1:
        return ("single",)
    if quantized:
        return ("ddp",)
    if per_unit:
        return ("ddp", "zero1", "zero2")
    return tuple(name for name in ENGINES if name != "single")


NATURE = "computed by dpllm.planning.footprint, not measured"

_NOISE = "noise of earlier steps, if it is stored"
_WHOLE, _SENT_THEN = "total, if whole sums are kept", "sent per step, if whole sums are kept"
_MAY_BE_NONE = (_NOISE, "average of the weights", _WHOLE, _SENT_THEN)
_SENT = ("sent per step", "of it for weights", _SENT_THEN)


def footprint_rows(result: Footprint) -> list[tuple[str, str]]:
    """Return the footprint as (name, value) rows for people; every size is per GPU."""
    run = result.run
    spread = f"{run.engine} on {run.num_gpus} GPU{'s' if run.num_gpus > 1 else ''}"
    return [
        ("engine", spread),
        *_setting(result),
        *((name, format_bytes(size)) for name, size in _parts(result) if size or name not in _MAY_BE_NONE),
        ("nature of these numbers", NATURE),
    ]


def comparison_rows(results: Sequence[Footprint]) -> tuple[str, list[tuple[str, ...]]]:
    """Return several engines side by side.

    Returns:
        The unit of all numbers; and rows of a name and one number per footprint. The first row has the engines' names.
    """
    parts = [_parts(result) for result in results]
    unit, size_of_unit = _unit_of(max(size for part in parts for name, size in part if name not in _SENT))
    rows: list[tuple[str, ...]] = [("", *(result.run.engine for result in results))]
    for cells in zip(*parts, strict=True):
        name, sizes = cells[0][0], [size for _, size in cells]
        if any(sizes) or name not in _MAY_BE_NONE:
            rows.append((name, *(f"{size / size_of_unit:,.1f}" if size else "0" for size in sizes)))
    return unit, rows


def setting_of(result: Footprint) -> str:
    """Return the model and its microbatches on one line; it is the same for every engine."""
    return "; ".join(f"{name}: {value}" for name, value in _setting(result))


def _setting(result: Footprint) -> list[tuple[str, str]]:
    run, shape = result.run, result.shape
    return [
        ("parameters, trainable", f"{shape.total:,}, {shape.trainable:,}"),
        ("microbatch", f"{run.rows} rows of {run.tokens:,} tokens, {run.num_microbatches:,} per GPU and step"),
    ]


def _parts(result: Footprint) -> list[tuple[str, int]]:
    kept, passing, whole = result.kept, result.passing, result.with_whole_sums
    return [
        ("weights", kept.weights),
        ("clipped sum", kept.clipped_sum),
        ("optimizer state", kept.optimizer),
        (_NOISE, kept.noise),
        ("average of the weights", kept.average),
        ("gathered weights", passing.gathered),
        ("activations", passing.activations + passing.recomputed),
        ("logits and loss", passing.logits),
        ("gradient of one unit" if result.run.per_unit else "the book", passing.book),
        ("forming the sum", passing.forming),
        ("total, at most", result.total),
        ("sent per step", result.sent.total),
        ("of it for weights", result.sent.weights),
        (_WHOLE, 0 if whole is None else whole.total),
        (_SENT_THEN, 0 if whole is None else whole.sent.total),
    ]


def format_bytes(size: int) -> str:
    """Format bytes for people, in powers of 1000, the units in which GPUs and networks are sold.

    >>> format_bytes(80 * 2**30), format_bytes(1500), format_bytes(0)
    ('85.9 GB', '1.5 kB', '0 B')
    """
    unit, size_of_unit = _unit_of(size)
    return f"{size / size_of_unit:,.0f} B" if unit == "B" else f"{size / size_of_unit:,.1f} {unit}"


def _unit_of(size: int) -> tuple[str, int]:
    """Return the largest unit that a size reaches, and the unit's bytes."""
    for unit, size_of_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= size_of_unit:
            return unit, size_of_unit
    return "B", 1

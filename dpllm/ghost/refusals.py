"""Refuse models that cannot be clipped exactly, by name, when a clipper is attached and before anything is computed.

Most refused modules compute a row with values of other rows, or of the padded length. A router that chooses each
token's experts from that token alone, and an expert that accepts every token, couple no rows. Experts with a limited
capacity, tokens that compete for experts, and losses or statistics over the batch's loads do. Routers that draw random
numbers are refused too, since the check that rows are independent (`dpllm.training.checks.independence`) could not
distinguish them from a coupling.

Classes are recognised by name and module, since their libraries need not be installed; routers, which come from many
libraries, are recognised by their options. The independence of rows is also measured (`dpllm.ghost.weights_check`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SHORTAGES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Messages of plain RuntimeErrors for memory shortages outside PyTorch's allocator: CUDA and Triton launches, cuBLAS,
cuDNN, and the CPU's allocator."""


class GhostError(ValueError):
    """A model, a module, a loss or a call for which exact per-unit clipping cannot be guaranteed.

    The message names the module or parameter by its path, the reason, and the remedy.
    """


class NoRuleError(GhostError):
    """A structure that cannot be clipped in one backward pass over all units, but can be clipped one unit at a time.

    `dpllm.ghost.PerUnitClipper` is exact for it, and the message says so.
    """

    REMEDY = (
        "Or clip one unit at a time, which is slower but exact for any structure: privacy.gradients=per_unit, or "
        "PerUnitClipper in a loop without a run"
    )

    def __init__(self, message: str) -> None:
        """Add the remedy that applies to every such structure."""
        super().__init__(f"{message.rstrip('.')}. {self.REMEDY}")


class CoupledError(NoRuleError):
    """The loss of a row depends on other rows of its call.

    Run one unit at a time it does not, but then a loss over the rows of a batch has a different meaning, and only the
    user can choose that.
    """


class MissedUseError(NoRuleError):
    """A trained parameter received a gradient outside its taps."""

    def __init__(self, name: str) -> None:
        """Name the parameter."""
        super().__init__(
            f"{name} received a gradient that is not clipped, and it was dropped. Either backward() was called on a "
            "loss directly (pass the row losses to GhostClipper.backward()), or the parameter is used outside the "
            "model's call or in a way that the model's first call did not use it. Move the computation into the "
            "model's forward pass, create GhostClipper after the last change to the model, or freeze the parameter."
        )
        self.name = name


class UnreachedError(GhostError):
    """A trainable parameter has no gradient in any loss."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory.

    >>> is_shortage(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    True
    >>> is_shortage(RuntimeError("Triton Error [CUDA]: out of memory")), is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    is_plain = isinstance(error, RuntimeError) and any(words in str(error) for words in SHORTAGES)
    return is_plain or isinstance(error, torch.OutOfMemoryError)


# ------------------------------------------------------------------------------------------------------ refusals


_PACKED = ("Params4bit", "Int8Params")  # of bitsandbytes
_FP8 = ("transformer_engine", "msamp")

_NAMED = (
    (r"(SwitchTransformers|NllbMoe)(Top\d)?(Router|SparseMLP|SparseMoE)", "an expert drops tokens beyond its capacity"),
    (r"TopKGate|MOELayer|ExpertChoice.*", "an expert takes a limited number of the tokens of all rows"),
)
_COUPLES = "couples the rows of a batch: "
_REMEDY = "use a model whose routers choose per token and without a capacity (Mixtral, Qwen3-MoE, gpt-oss)"
# Router options that couple rows when they are true or above 0: their names, the reason, and the remedy.
_OPTIONS = (
    (("batch_prioritized_routing",), "tokens of all rows compete, and the last ones are dropped", _REMEDY),
    (("expert_choice", "use_expert_choice"), "experts choose among the tokens of all rows (expert choice)", _REMEDY),
    (
        ("expert_capacity", "capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor"),
        "an expert drops tokens of one row if tokens of other rows have used up its capacity",
        _REMEDY,
    ),
    (
        ("jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
        "its router multiplies the tokens of all rows by random numbers from one generator",
        "load the model with this option set to 0 (router_jitter_noise=0, input_jitter_noise=0, or "
        "ffn_config.moe_jitter_eps=None); DP-SGD already adds noise",
    ),
)


def refuse_for_one_pass(model: nn.Module) -> None:
    """Raise `GhostError` for a model whose units cannot be clipped in one joint backward pass."""
    _refuse_replicating(model)
    refuse_compiled(model)
    _refuse(model, _carries_over, says=_COUPLES)
    _refuse(model, coupling, NoRuleError, says=_COUPLES)
    _refuse_router_loss(getattr(model, "config", None))
    _refuse_skipped_layers(model)
    _refuse(model, _switching)


def refuse_for_one_unit(model: nn.Module) -> None:
    """Raise `GhostError` for a model in which one unit's gradient depends on earlier units."""
    _refuse_replicating(model)
    _refuse(model, _statistics)
    _refuse(model, _switching)


def _refuse(
    model: nn.Module,
    reason_of: Callable[[nn.Module], str | None],
    error: type[GhostError] = GhostError,
    says: str = "",
) -> None:
    """Raise an error for the first module with a reason; the message has the module's path and class."""
    for path, module in model.named_modules():
        if (reason := reason_of(module)) is not None:
            raise error(f"{path or 'the model'} ({type(module).__name__}) {says}{reason}.")


def _refuse_replicating(model: nn.Module) -> None:
    """Raise `GhostError` for a model wrapped in replicas with their own reducer."""
    if isinstance(model, nn.DataParallel):
        raise GhostError(
            "nn.DataParallel splits the batch, so gradients cannot be assigned to rows. Use one process per device "
            "instead."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise GhostError(
            "DistributedDataParallel reduces unclipped gradients with its own hooks. Pass the wrapped model "
            "(model.module) to GhostClipper; dpllm.engines.engine_for reduces the clipped sum."
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raise `GhostError` for a model compiled as a whole, by ``torch.compile(model)`` or ``model.compile()``."""
    if "_orig_mod" in model._modules or getattr(model, "_compiled_call_impl", None) is not None:
        raise NoRuleError(
            "The model was compiled with torch.compile, and its graph may omit the taps that compute the norms. Pass "
            "the uncompiled model to GhostClipper, train that one, and call GhostClipper.compile(), which compiles "
            "its blocks. With DPTrainer, set TrainingArguments(torch_compile=True)."
        )


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise `GhostError` for a model whose layers are split over processes that compute the same rows together.

    transformers splits by its ``tp_plan``, PyTorch by ``parallelize_module``. FSDP2 splits parameters too, but gathers
    them for each layer.
    """
    modules = list(model.modules())
    size = max(getattr(module, "_tp_size", None) or 1 for module in modules)
    gathered = any(isinstance(module, FSDPModule) for module in modules)
    divided = [] if gathered else [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if size > 1 or divided:
        what = f"{divided[0]} is divided over processes" if divided else f"tp_size={size}"
        raise GhostError(
            f"The model is tensor-parallel ({what}): each process has only a part of a unit's gradient, so it cannot "
            "bound the unit. Load the model without distributed_config and parallelize_module, and shard it with "
            "FSDP2 (dpllm train --config fsdp2)."
        )


def coupling(module: nn.Module) -> str | None:
    """Return why a module couples rows by its scales, noise or choice of experts, with the remedy; None if it does not.

    >>> coupling(nn.Linear(2, 2)) is None
    True
    """
    threshold = getattr(getattr(module, "state", None), "threshold", 0)
    if type(module).__name__ == "Linear8bitLt" and threshold:
        return (
            f"LLM.int8 chooses outlier columns over all rows of the batch (llm_int8_threshold={threshold}). Load the "
            "model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits"
        )
    if is_fp8(module):
        return (
            "fp8 products are scaled by the largest activation of the whole batch. Train in bf16 (mixed_precision: "
            "bf16, without fp8 recipes), or with one scale per token (Float8LinearConfig.from_recipe_name('rowwise'))"
        )
    if getattr(module, "neftune_noise_alpha", None):
        return (
            f"NEFTune (neftune_noise_alpha={module.neftune_noise_alpha}) scales its noise by the padded length, which "
            "depends on other rows. Remove it; DP-SGD already adds noise"
        )
    for pattern, reason in _NAMED:
        if re.fullmatch(pattern, type(module).__name__):
            return f"{reason}, so tokens of one row displace tokens of other rows; {_REMEDY}"
    for names, reason, remedy in _OPTIONS:
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, int | float) and value > 0:
                return f"{reason} ({name}={value}); {remedy}"
    return None


def _carries_over(module: nn.Module) -> str | None:
    """Return why a module couples rows in a way that clipping one unit at a time cannot solve; None if it does not."""
    kind = type(module).__name__
    for pattern, statistics in (("(Lazy|Sync|Frozen)?_?BatchNorm.*", "batch"), ("InstanceNorm.*", "running")):
        if re.fullmatch(pattern, kind):
            return f"{statistics} statistics mix the rows; use layer or group normalisation"
    return coupling(module) if is_fp8(module) else None


def is_fp8(module: nn.Module) -> bool:
    """Return whether a module computes 8-bit products scaled by the largest activations of several tokens."""
    kind, library = type(module).__name__, type(module).__module__.partition(".")[0]
    if kind != "Float8Linear":  # of torchao
        return library in _FP8 and ("Linear" in kind or "MLP" in kind)

    def word(cast: Any, name: str) -> str:
        value = getattr(cast, name, None)
        return str(getattr(value, "value", value))

    config = getattr(module, "config", None)
    casts = [getattr(config, f"cast_config_{which}", None) for which in ("input", "grad_output")]
    return any(
        word(cast, "scaling_granularity") != "axiswise" and word(cast, "scaling_type") != "disabled" for cast in casts
    )


def is_packed(parameter: Any) -> bool:
    """Return whether a parameter holds quantised values, which have no gradient.

    >>> is_packed(nn.Parameter(nn.Linear(2, 2).weight))
    False
    """
    held = getattr(parameter, "data", parameter)  # torchao wraps its tensor in an ordinary parameter
    of_torchao = any(type(one).__module__.partition(".")[0] == "torchao" for one in (parameter, held))
    return type(parameter).__name__ in _PACKED or of_torchao


def scales_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors next to a module's quantised weights that determine their values, by name.

    They are neither parameters nor buffers: block scales and code tables of 4-bit weights, row scales of 8-bit weights.

    >>> scales_of(nn.Linear(2, 2))
    {}
    """
    found: dict[str, Any] = {}
    for name, parameter in module.named_parameters(recurse=False):
        state, nested = getattr(parameter, "quant_state", None), ""
        while state is not None:
            found |= {f"{name}.{nested}{part}": getattr(state, part, None) for part in ("absmax", "code", "offset")}
            state, nested = getattr(state, "state2", None), f"{nested}nested_"
    found["SCB"] = getattr(getattr(module, "state", None), "SCB", None)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _refuse_router_loss(config: Any, where: str = "config") -> None:
    """Raise `NoRuleError` for a model that adds a loss over its experts' loads, by its config or a nested one."""
    if getattr(config, "output_router_logits", False):
        raise NoRuleError(
            f"The model adds a router loss over the batch ({where}.output_router_logits). Set it to False."
        )
    for name in getattr(config, "sub_configs", None) or {}:
        _refuse_router_loss(getattr(config, name, None), f"{where}.{name}")


def _refuse_skipped_layers(model: nn.Module) -> None:
    """Raise `GhostError` if whole layers with trainable parameters are skipped at random, without a gradient."""
    holders = [(path, module) for path, module in model.named_modules() if "layerdrop" in vars(module)]
    for path, module in holders or [("the model's config", model)]:
        rate = module.layerdrop if holders else getattr(getattr(model, "config", None), "layerdrop", 0)
        if isinstance(rate, int | float) and rate > 0 and any(p.requires_grad for p in module.parameters()):
            raise NoRuleError(
                f"{path} has layerdrop={rate}, which skips whole layers at random, so their parameters receive no "
                "gradient. Set layerdrop to 0 there and in the model's config, and use dropout instead."
            )


def _switching(module: nn.Module) -> str | None:
    """Return why a module is refused whose attention a short row would switch for all later rows; None if it is not.

    BigBird and BigBird-Pegasus do this (transformers, ``set_attention_type`` in their forward passes).
    """
    if vars(module).get("attention_type") != "block_sparse":
        return None
    return (
        "permanently switches off block-sparse attention at the first batch of short rows, so one unit changes the "
        'gradients of all later units. Load the model with attention_type="original_full", or call its '
        'set_attention_type("original_full")'
    )


def _statistics(module: nn.Module) -> str | None:
    """Return why a module is refused that keeps statistics of past rows, or shares them between processes."""
    if isinstance(module, nn.SyncBatchNorm):
        return "sums its statistics over the processes, and so over units. Use layer or group normalisation"
    if getattr(module, "track_running_stats", False):
        return (
            "keeps running statistics of the rows it has processed, and they would be saved without noise. Use layer "
            "or group normalisation, or fixed statistics (a FrozenBatchNorm)"
        )
    if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "rewrites the rows of its table that a unit looks up (max_norm). Set max_norm=None"
    return "scales its products by earlier inputs (fp8). Train in bf16" if is_fp8(module) else None

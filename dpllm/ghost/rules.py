"""The choice of a rule for each module, and the modules that have no rule."""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.refusals import coupling, is_fp8, is_packed, refuse_router_loss

# Modules through which one row changes another row's loss or gradient, with the reason. Names, because most of them
# live in libraries that this package does not import; the independence of rows is also measured on the first batch
# (`book.Book`).
_COUPLED = (
    (r"(Lazy|Sync|Frozen)?_?BatchNorm.*", "batch statistics mix the rows; use layer or group normalisation"),
    (r"InstanceNorm.*", "running statistics mix the rows; use layer or group normalisation"),
)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each once.

    Raises:
        GhostError: there is none, one is quantised or complex, or a hook changes or reads the gradient of one.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise GhostError(
            "The model has no trainable parameter. Set requires_grad on the parameters to train (for LoRA: wrap the "
            "model with peft.get_peft_model before)."
        )
    for name, parameter in parameters.items():
        if is_packed(parameter):
            raise GhostError(
                f"{name} is quantised ({type(parameter).__name__}) and trainable: the update of a weight in this form "
                "is rounded by the weights beside it, and it has no exact gradient. Freeze it "
                "(requires_grad_(False)), and train LoRA adapters on top of it."
            )
        if parameter.is_complex():
            raise GhostError(
                f"{name} has the dtype {parameter.dtype}, and norms, sums and noise are those of real numbers: its "
                "imaginary part would not be trained. Keep two real parameters, or one of the shape (..., 2), and use "
                "torch.view_as_complex; or freeze it."
            )
        if any(not getattr(hook, "is_guard", False) for hook in (parameter._backward_hooks or {}).values()):
            raise GhostError(
                f"{name} has a hook on its gradient (Tensor.register_hook), and the clipped sum is formed without one: "
                "a hook that masks the gradient would have no effect. Remove the hook; instead of PEFT's CPT, which "
                "sets one, use prompt tuning."
            )
    return parameters


def two_passes_over_shards() -> GhostError:
    """Return the error for a sharded model that is to be clipped in two passes."""
    return GhostError(
        "Two backward passes (NormMethod(backward_passes=2)) need parameters that stay whole from the first to the "
        "second, and a process that holds a gradient of the whole model; this one's are sharded. Use "
        "NormMethod(backward_passes=1) with smaller microbatches, or a replicated model."
    )


def refuse_coupled_modules(model: nn.Module) -> None:
    """Raise `GhostError` for a module through which rows of a batch affect each other, trainable or not."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        for pattern, reason in _COUPLED:
            if re.fullmatch(pattern, kind):
                error = GhostError if "Norm" in kind else NoRuleError  # running statistics are carried between calls
                raise error(f"{path or 'the model'} ({kind}) couples the rows of a batch: {reason}.")
        if (found := coupling(module)) is not None:
            raise (GhostError if is_fp8(module) else NoRuleError)(
                f"{path or 'the model'} ({kind}) couples the rows of a batch: {found}."
            )
    refuse_router_loss(model)


def refuse_skipped_layers(model: nn.Module) -> None:
    """Raise `GhostError` where whole layers with trainable parameters are left out of a pass at random.

    In such a pass the parameters of a layer receive no gradient, which looks like a graph that was cut.
    """
    holders = [(path, module) for path, module in model.named_modules() if "layerdrop" in vars(module)]
    for path, module in holders or [("the model's config", model)]:
        rate = module.layerdrop if holders else getattr(getattr(model, "config", None), "layerdrop", 0)
        if isinstance(rate, int | float) and rate > 0 and any(p.requires_grad for p in module.parameters()):
            raise NoRuleError(
                f"{path} has layerdrop={rate}: whole layers are skipped at random, and their parameters then have no "
                "gradient. Set layerdrop to 0 there (and in the model's config); use dropout instead."
            )


def refuse_switching(model: nn.Module) -> None:
    """Raise `GhostError` for a module that a short row switches to another attention, for all later rows.

    BigBird and BigBird-Pegasus do (transformers, ``set_attention_type`` in their forward passes).
    """
    for path, module in model.named_modules():
        if vars(module).get("attention_type") == "block_sparse":
            raise GhostError(
                f"{path or 'the model'} ({type(module).__name__}) leaves its block-sparse attention for good at the "
                "first batch of short rows, so one unit changes the gradients of all later ones. Load the model with "
                'attention_type="original_full", or call its set_attention_type("original_full").'
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `GhostError` for a wrapped model: compiled, or with its own reducer."""
    refuse_replicating(model)
    refuse_compiled(model)


def refuse_replicating(model: nn.Module) -> None:
    """Raise `GhostError` for a model wrapped by replicas with their own reducer."""
    if isinstance(model, nn.DataParallel):
        raise GhostError(
            "nn.DataParallel splits the batch where the hooks cannot see it. Use one process per device instead."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise GhostError(
            "DistributedDataParallel reduces unclipped gradients with its own hooks. Give GhostClipper the model "
            "inside (model.module); dpllm.engines.engine_for reduces the clipped sum."
        )


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise `GhostError` for a model whose layers are divided over processes that compute the same rows together.

    transformers divides by its ``tp_plan``, PyTorch by ``parallelize_module``. FSDP2 divides parameters too, and
    gathers them for each layer.
    """
    modules = list(model.modules())
    size = max(getattr(module, "_tp_size", None) or 1 for module in modules)
    gathered = any(isinstance(module, FSDPModule) for module in modules)
    divided = [] if gathered else [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if size > 1 or divided:
        what = f"{divided[0]} is divided over processes" if divided else f"tp_size={size}"
        raise GhostError(
            f"The model is tensor-parallel ({what}): each process has a part of a unit's gradient, so a unit could not "
            "be bounded there. Load the model without distributed_config and parallelize_module, and shard it with "
            "FSDP2 (dpllm train --config fsdp2)."
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raise `GhostError` for a whole model that was compiled, by ``torch.compile(model)`` or ``model.compile()``."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise NoRuleError(
            "The model was compiled with torch.compile, and its graph may leave out the taps that compute the norms. "
            "Give GhostClipper the model before compilation, train that one, and call GhostClipper.compile(), which "
            "compiles its blocks; with DPTrainer, set TrainingArguments(torch_compile=True)."
        )

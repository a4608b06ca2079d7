"""A model with its LoRA adapter added to its weights, to be released as an ordinary model.

Place in the flow: after the training, when the model is saved. The sum depends only on the public base and on the
trained adapter, so the guarantee of the adapter covers it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpllm.config.values import ConfigError
from dpllm.ghost.refusals import is_packed
from dpllm.models.quantization import sharding_of

MERGED_FOLDER = "merged"
"""Folder, inside that of the adapter, of the model with its adapter merged."""


def refuse_unmergeable(model: Any, args: Any = None) -> None:
    """Make sure, before the training, that an adapter can be merged after it.

    Args:
        model: to train, or trained.
        args: ``TrainingArguments``; None: the model is whole on this process.

    Raises:
        ConfigError: there is no adapter, it is of another kind than LoRA, it changes a quantised model in another way
            than by a sum, it changes a weight that several layers share, or no process will have the whole model.
    """
    if args is not None and (shards := sharding_of(args)) is not None:
        raise ConfigError(
            f"merge_adapter needs the whole model on one process, and {shards} shards it: leave merge_adapter out, and "
            "merge the saved adapter afterwards (peft: merge_and_unload)"
        )
    configs = model.peft_config if isinstance(model, PeftModel) else {}
    kinds = sorted({_word(config.peft_type) for config in configs.values()})
    if kinds != ["LORA"]:
        found = f"the model has {', '.join(kinds)}" if kinds else "the model has no adapter"
        raise ConfigError(f"merge_adapter adds a LoRA adapter to the weights, and {found}: leave merge_adapter out")
    options = [one for one in ("use_dora", "lora_bias") if any(getattr(c, one, False) for c in configs.values())]
    if options and _is_packed(model):
        more = options[0]
        raise ConfigError(
            f"merge_adapter: an adapter with {more} changes a quantised weight by more than a sum, so it cannot be "
            f"merged exactly. Leave {more} or merge_adapter out"
        )

    _refuse_shared(model)
    if _is_packed(model):
        _refuse_other_parts(model)


def _refuse_shared(model: nn.Module) -> None:
    """Refuse an adapter of one of several layers that share a weight: the sum would change the others, too."""
    paths: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name)
    for path, module in model.named_modules():
        weight = getattr(module.get_base_layer(), "weight", None) if isinstance(module, LoraLayer) else None
        if len(several := paths.get(id(weight), [])) > 1:
            other = next(name for name in several if not name.startswith(f"{path}."))
            raise ConfigError(
                f"merge_adapter: {path} has an adapter, and shares its weight with {other}, which the sum would change "
                "too. Leave the layer out of target_modules, or leave merge_adapter out"
            )


def _refuse_other_parts(model: nn.Module) -> None:
    """Refuse a part of an adapter of a quantised model that `_changes` does not add."""
    for path, module in model.named_modules():
        is_part = isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if not is_part or isinstance(module, ModulesToSaveWrapper):
            continue
        if not isinstance(module, LoraLayer) or not hasattr(module.get_base_layer(), "weight"):
            raise ConfigError(
                f"merge_adapter: {path} ({type(module).__name__}) is trained in a way that is not added to a quantised "
                "model. Leave trainable_token_indices and target_parameters of model.adapter out, or leave "
                "merge_adapter or quantization out"
            )


def merged(model: Any) -> Any:
    """Return a copy of a model with its LoRA adapter added to its weights, in ``config.dtype``, without quantisation.

    The frozen weights are restored from their stored form: the adapter was trained on these, not on the original ones.

    Args:
        model: with LoRA adapters, whole on this process, without hooks of a run.

    Raises:
        ConfigError: as `refuse_unmergeable`.
    """
    refuse_unmergeable(model)
    whole = copy.deepcopy(model)
    if not _is_packed(whole):
        return whole.merge_and_unload(safe_merge=True)
    changes = dict(_changes(whole))
    base: Any = whole.unload()
    transposed = {n for n, m in base.named_modules() if getattr(m, "source_cls", None) is Conv1D}
    base.dequantize()
    with torch.no_grad():
        for name, module in list(base.named_modules()):
            if name in changes:
                _add(module, changes[name])
            if name in transposed:  # bitsandbytes has one class for both kinds of layers
                base.set_submodule(name, _as_conv1d(module))
    base.tie_weights()
    return base


def _changes(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each adapted layer within the base model, and the change of its weight in float32."""
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer: Any = module
        total = None
        for adapter in layer.active_adapters:
            if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
                continue
            delta = layer.get_delta_weight(adapter).detach().float()
            total = delta if total is None else total + delta
        if total is not None:
            yield name, total


def _add(module: nn.Module, change: Tensor) -> None:
    weight: Any = module.weight
    weight.copy_((weight.float() + change.to(weight.device)).to(weight.dtype))


def _as_conv1d(linear: nn.Module) -> Conv1D:
    weight: Any = linear.weight
    made: Any = Conv1D(weight.shape[0], weight.shape[1])
    made.weight = nn.Parameter(weight.detach().T.contiguous())
    made.bias = linear.bias if linear.bias is not None else made.bias
    return made


def _is_packed(model: nn.Module) -> bool:
    return any(is_packed(parameter) for parameter in model.parameters())


def _word(value: Any) -> str:
    return str(getattr(value, "value", value) or "")

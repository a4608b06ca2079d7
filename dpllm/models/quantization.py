"""Handle quantised bases: frozen weights that bitsandbytes stores in 4 or 8 bits, and weights quantised before.

`dpllm.models.load` takes the library's configuration from here, and the run makes a model ready before it is hooked.
LoRA on top of such weights is QLoRA (Dettmers et al. 2023, arXiv:2305.14314): per-unit norms need only the adapters'
inputs and output gradients, which pass through the frozen layers row by row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from dpllm.config.extras import require
from dpllm.config.quantization import Quantization
from dpllm.config.values import ConfigError
from dpllm.ghost.refusals import is_packed

BASE_STORED_AS = "frozen weights are stored as"
"""Name of the ledger's fact: the stored form of a quantised base."""

_WITHOUT_DATA = {
    *("bitsandbytes", "hqq", "eetq", "quanto", "torchao", "higgs", "gguf", "bitnet", "metal", "sinq", "gemma"),
    *("fp8", "fbgemm_fp8", "mxfp8", "mxfp4"),
}
"""Methods of transformers (`QuantizationMethod`) that read only weights; all others may be calibrated with text."""


def config_for(quantization: Any, dtype: torch.dtype, heads: list[str] | None = None) -> BitsAndBytesConfig:
    """Return the library's configuration of ``model.quantization``.

    Args:
        quantization: value in the recipe.
        dtype: dtype in which restored matrices are multiplied.
        heads: modules that are not quantised. None: the output layer, as transformers chooses it.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    require("quantization", "model.quantization")
    chosen = Quantization.of(quantization)
    if chosen.kind == "int8":
        return BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=chosen.outlier_threshold, llm_int8_skip_modules=heads
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=chosen.kind,
        bnb_4bit_use_double_quant=chosen.double,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=heads,
    )


def make_ready(model: nn.Module) -> None:
    """Bring quantised layers into the form that they keep during a run; other models are not changed.

    At its first call a layer of bitsandbytes moves its scales (8 bits) or converts its bias (4 bits). On some
    processors it rewrites 4-bit weights at the first call without gradients, into a layout that has no backward pass.
    Each would look like a frozen weight that changed. The first two are done here, and the layer's own flag disables
    the third.

    Raises:
        ConfigError: a layer already has the layout without a backward pass.
    """
    module: Any
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(module, "support_avx512bf16_for_cpu"):  # not PEFT's layers, which have the same class names
            if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ConfigError(
                    f"{path} was used for prediction on this CPU, so bitsandbytes has rewritten its weights into a "
                    "layout through which no gradient passes. Load the model again, and evaluate it only after it was "
                    "given to the run"
                )
            module.support_avx512bf16_for_cpu = False
            bias, computed = getattr(module, "bias", None), getattr(module, "compute_dtype", None)
            if isinstance(bias, nn.Parameter) and module.compute_type_is_set and computed is not None:
                bias.data = bias.data.to(computed)
        if hasattr(module, "init_8bit_state") and getattr(weight, "CB", None) is not None:
            module.init_8bit_state()


def refuse_other_form(model: nn.Module, quantization: Any) -> None:
    """Check that a loaded model has the form that a recipe names, since transformers keeps the form of the files.

    Raises:
        ConfigError: its files were already quantised in a different way.
    """
    wanted, found = Quantization.of(quantization), stored_as(model)
    if found != wanted.words:
        raise ConfigError(
            f"quantization={wanted.kind} asks for {wanted.words}, but the model's files are already quantised: "
            f"{found}. Leave quantization out, or name the unquantised model"
        )


def stored_as(model: nn.Module) -> str | None:
    """Return the stored form of a model's frozen weights, for the report; None if they are not quantised."""
    config = _quantization_of(model)
    if not config:
        return None
    method = _word(config.get("quant_method"))
    if method != "bitsandbytes":
        bits = config.get("bits")
        return f"{method}, as the weights came" + (f" ({bits} bits)" if bits else "")
    if config.get("load_in_8bit"):
        return Quantization("int8").words
    return Quantization(config.get("bnb_4bit_quant_type", "fp4"), config.get("bnb_4bit_use_double_quant", False)).words


def calibration_points(model: nn.Module) -> list[str]:
    """Return the open point of a base whose quantisation may have been calibrated with text; an empty list otherwise.

    GPTQ, AWQ and similar methods choose the stored weights by the activations of sample texts. If these were private
    records, the frozen weights contain information about them, which ε does not cover.
    """
    config = _quantization_of(model)
    method = _word(config.get("quant_method")) if config else ""
    if not method or method in _WITHOUT_DATA:
        return []
    data = config.get("dataset")
    told = f" (its configuration names {_shown(data)})" if data else ""
    return [
        f"The frozen weights were quantised by {method}, which is usually calibrated with sample texts{told}. If those "
        "were private records, the weights hold information about them that epsilon does not cover: confirm that the "
        "calibration data are public, or start from uncalibrated weights (model.quantization: nf4)."
    ]


def refuse_sharding(model: nn.Module | None, args: Any) -> None:
    """Check that quantised weights will not be sharded over processes, before anything is prepared.

    Args:
        model: model to train. None: it is known to be quantised.
        args: ``TrainingArguments``.

    Raises:
        ConfigError: the launch or the arguments ask for FSDP or DeepSpeed.
    """
    shards = sharding_of(args)
    if shards is None or (model is not None and not any(is_packed(p) for p in model.parameters())):
        return
    raise ConfigError(
        f"the model is quantised, and private sums of quantised weights were not verified under {shards}. Launch "
        "without sharding (dpllm train --config single or ddp), where a quantised model needs little memory, or "
        "leave quantization out"
    )


def sharding_of(args: Any) -> str | None:
    """Return the sharding that ``TrainingArguments`` or the launch request: "FSDP", "DeepSpeed" or None."""
    if getattr(args, "deepspeed_plugin", None) is not None:
        return "DeepSpeed"
    by_launch = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return "FSDP" if by_launch or getattr(args, "fsdp", None) else None


def _quantization_of(model: Any) -> Mapping[str, Any]:
    """Return the quantisation of a model's configuration as a mapping; empty without one."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(getattr(inner, "config", None), "quantization_config", None)
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else config.to_dict()


def _word(value: Any) -> str:
    return str(getattr(value, "value", value) or "")


def _shown(data: Any) -> str:
    if isinstance(data, str):
        return repr(data[:80])
    return f"{len(data)} texts" if isinstance(data, list | tuple) else type(data).__name__

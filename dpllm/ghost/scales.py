"""Modules whose arithmetic on one row depends on the other rows, or on the padded length: refused by name.

Also the weights that are stored in a form without a gradient: quantised ones, which only stay frozen.

Their libraries need not be installed, so classes are recognised by name and module. The independence of rows is
measured as well (`dpllm.training.checks.independence`); the modules here are refused before anything is computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_PACKED = ("Params4bit", "Int8Params")  # of bitsandbytes
_CAST = ("input", "grad_output")  # what torchao casts to fp8, besides weights
_FP8 = ("transformer_engine", "msamp")


def coupling(module: nn.Module) -> str | None:
    """Return the reason why a module couples rows by its scales or its noise, with the remedy; None if it does not.

    >>> coupling(nn.Linear(2, 2)) is None
    True
    """
    kind = type(module).__name__
    threshold = getattr(getattr(module, "state", None), "threshold", 0)
    if kind == "Linear8bitLt" and threshold:
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
            "other rows decide. Leave it out; DP-SGD already adds noise"
        )
    return None


def is_fp8(module: nn.Module) -> bool:
    """Whether a module forms products in 8 bits, scaled by the largest activations of several tokens."""
    kind, library = type(module).__name__, type(module).__module__.partition(".")[0]
    return _scales_by_batch(module) or (library in _FP8 and ("Linear" in kind or "MLP" in kind))


def is_packed(parameter: Any) -> bool:
    """Return whether a parameter holds quantised values, which have no gradient.

    >>> is_packed(nn.Parameter(nn.Linear(2, 2).weight))
    False
    """
    held = getattr(parameter, "data", parameter)  # torchao puts its tensor into an ordinary parameter
    of_torchao = any(type(one).__module__.partition(".")[0] == "torchao" for one in (parameter, held))
    return type(parameter).__name__ in _PACKED or of_torchao


def scales_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors beside a module's quantised weights that decide their values, by name.

    They are neither parameters nor buffers: block scales and code tables of 4-bit weights, row scales of 8-bit ones.

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


def _scales_by_batch(module: nn.Module) -> bool:
    """Whether a layer of torchao scales its input, or the gradient of its output, by more than one token."""
    if type(module).__name__ != "Float8Linear":
        return False
    casts = [getattr(getattr(module, "config", None), f"cast_config_{which}", None) for which in _CAST]
    return any(
        _word(cast, "scaling_granularity") != "axiswise" and _word(cast, "scaling_type") != "disabled" for cast in casts
    )


def _word(cast: Any, name: str) -> str:
    value = getattr(cast, name, None)
    return str(getattr(value, "value", value))

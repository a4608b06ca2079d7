"""Modules whose arithmetic on one row depends on other rows, or on the padded length: refused by name.

Also the weights that are stored in a form without a gradient: quantised ones, which only stay frozen.

A router that chooses the experts of each token from that token, and an expert that takes every token sent to it, couple
no rows. Rows are coupled by experts with a limited capacity, by tokens that compete for experts, by a loss over the
batch's loads, and by statistics of them. Random numbers of routers are refused too: the check that rows are independent
(`dpllm.training.checks.independence`) could not tell them from a coupling.

Their libraries need not be installed, so classes are recognised by name and module, and routers, which come from many
libraries, by the options that they hold. The check measures the independence of rows as well; the modules here are
refused before anything is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dpllm.ghost.errors import NoRuleError

_PACKED = ("Params4bit", "Int8Params")  # of bitsandbytes
_CAST = ("input", "grad_output")  # what torchao casts to fp8, besides weights
_FP8 = ("transformer_engine", "msamp")


def coupling(module: nn.Module) -> str | None:
    """Return the reason why a module couples rows, with the remedy; None if it does not.

    It may do so by its scales, by its noise, or by its choice of experts.

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
    return _choice_of_experts(module)


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


_JITTER = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")
_CAPACITY = ("expert_capacity", "capacity_factor", "moe_capacity_factor", "moe_expert_capacity_factor")
_COMPETING = {
    "batch_prioritized_routing": "tokens of all rows compete, and the last ones are dropped",
    "expert_choice": "experts choose among the tokens of all rows (expert choice)",
    "use_expert_choice": "experts choose among the tokens of all rows (expert choice)",
}
_NAMED = (
    (r"(SwitchTransformers|NllbMoe)(Top\d)?(Router|SparseMLP|SparseMoE)", "an expert drops tokens beyond its capacity"),
    (r"TopKGate|MOELayer|ExpertChoice.*", "an expert takes a limited number of the tokens of all rows"),
)
_REMEDY = "use a model whose routers choose for each token by itself, without a capacity (Mixtral, Qwen3-MoE, gpt-oss)"


def _choice_of_experts(module: nn.Module) -> str | None:
    """Return the reason why a module couples rows by its choice of experts, with the remedy; None if it does not."""
    for pattern, reason in _NAMED:
        if re.fullmatch(pattern, type(module).__name__):
            return f"{reason}, so the tokens of one row displace those of others; {_REMEDY}"
    held = vars(module)
    for name, reason in _COMPETING.items():
        if held.get(name):
            return f"{reason} ({name}={held[name]}); {_REMEDY}"
    for name in _CAPACITY:
        if _above_zero(held.get(name)):
            return (
                f"an expert drops tokens beyond its capacity ({name}={held[name]}), which those of other rows use up; "
                f"{_REMEDY}"
            )
    for name in _JITTER:
        if _above_zero(held.get(name)):
            return (
                f"its router multiplies the tokens of all rows by random numbers from one generator ({name}="
                f"{held[name]}). Load the model with 0 for it (router_jitter_noise=0, input_jitter_noise=0, or "
                "ffn_config.moe_jitter_eps=None); DP-SGD already adds noise"
            )
    return None


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def refuse_router_loss(model: nn.Module) -> None:
    """Raise `NoRuleError` for a model that adds a loss over the loads of its experts."""
    for where, config in _configs(getattr(model, "config", None), "config"):
        if getattr(config, "output_router_logits", False):
            raise NoRuleError(
                f"The model adds a router loss over the batch ({where}.output_router_logits). Set it to False."
            )


def _configs(config: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield a config and those inside it, with their places."""
    yield where, config
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name), f"{where}.{name}")

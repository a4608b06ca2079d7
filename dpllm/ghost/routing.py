"""Ways of choosing experts that couple rows: refused before anything is computed.

A router that chooses the experts of each token from that token, and an expert that takes every token sent to it, couple
no rows. Rows are coupled by experts with a limited capacity, by tokens that compete for experts, by a loss over the
batch's loads, and by statistics of them. Random numbers of routers are refused too: the check that rows are independent
(`dpllm.training.checks.independence`) could not tell them from a coupling.

Routers come from many libraries, so they are recognised by the options that they hold, and some by name. The check
measures the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from dpllm.ghost.errors import NoRuleError

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


def coupling(module: nn.Module) -> str | None:
    """Return the reason why a module couples rows by its choice of experts, with the remedy; None if it does not.

    >>> coupling(nn.Linear(2, 2)) is None
    True
    """
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

"""Trained experts of a mixture, through the interface of transformers: an implementation of ours, registered there.

transformers keeps the experts of a layer as stacks of matrices, and looks up the function that computes them in a
public registry (``ALL_EXPERTS_FUNCTIONS``), by the name in the model's config. While a clipper is attached, that name
is `NAME`. Nothing of the model or of transformers is replaced. Our function computes what the others do, and taps both
products, so that the input, the output gradient and the expert of each token are known (`dpllm.ghost.routed`).

Choosing experts for each token by itself couples no rows. `dpllm.ghost.refusals` refuses other ways of choosing.

Shape suffixes: N tokens of all rows, k experts of each token, S = N * k slots, E experts, D and P widths, B rows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost.contributions import Lookup
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.grouped import grouped_product
from dpllm.ghost.routed import Routed
from dpllm.ghost.taps import Hand, Host, Target, as_tokens, tap_output

NAME = "dpllm"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_BIASES = {"gate_up_proj_bias": "gate_up_proj", "up_proj_bias": "up_proj", "down_proj_bias": "down_proj"}


class Share(Protocol):
    """A parameter, or several, of which a stack of matrices is computed: the stack itself, or LoRA factors of it."""

    @property
    def targets(self) -> list[Target]:
        """The parameters."""
        ...

    def factors(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors that `record` needs, copied: the parameters may be freed before the backward pass."""
        ...

    def record(self, use: Routed, factors: list[Tensor], hand: Hand) -> None:
        """Hand over the contributions to the parameters, from the gradient of the stack."""
        ...


def is_experts(module: nn.Module) -> bool:
    """Whether a module computes its stacks of matrices through transformers' interface for experts."""
    config: Any = getattr(module, "config", None)
    marks = ("num_experts", "has_gate", "has_bias", "is_transposed")
    return hasattr(config, "_experts_implementation") and all(hasattr(module, mark) for mark in marks)


@dataclass
class Stack:
    """How often the calls of the model used one stack of matrices."""

    uses: int = 0


class ExpertsRule:
    """Taps the products of one module that holds experts.

    Args:
        path: of the module.
        module: the module.
        host: the clipper.
    """

    def __init__(self, path: str, module: nn.Module, host: Host) -> None:
        """Start without trained parameters."""
        narrow = {name: p.dtype for name, p in module.named_parameters(recurse=False) if p.element_size() < 2}
        if narrow:
            raise NoRuleError(
                f"{path} ({type(module).__name__}) has quantised experts ({', '.join(map(str, narrow.values()))}), "
                "whose products are not those of a matrix. Train adapters of other layers, or load the model in bf16."
            )
        self.path, self.kind, self.host = path, type(module).__name__, host
        self.shares: dict[str, list[Share]] = {}
        self.biases: dict[str, Target] = {}
        config: Any = module.config
        self._config = config
        # Layers share a config: the first of them remembers the implementation that the user chose.
        self._before = self._config._experts_implementation
        self._module = weakref.ref(module)
        self.stacks: dict[str, Stack] = {}

    @classmethod
    def on(cls, path: str, module: nn.Module, host: Host) -> ExpertsRule:
        """Return the rule of a module for this clipper; attach one if there is none."""
        rule = _ATTACHED.get(module)
        if rule is None or rule.host is not host:
            rule = _ATTACHED[module] = cls(path, module, host)
            # Whoever defines such a module has loaded the registry; this folder does not import transformers.
            sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
            rule._config._experts_implementation = NAME
        return rule

    def train(self, trainable: Mapping[str, Target]) -> None:
        """Record the uses of these parameters of the module, by their names within it.

        Raises:
            GhostError: one that is neither a stack of matrices nor of biases.
        """
        for name, target in trainable.items():
            if name in _MATRICES:
                self.shares.setdefault(name, []).append(Whole(target))
            elif name in _BIASES:
                self.biases[_BIASES[name]] = target
            else:
                raise NoRuleError(
                    f"{self.path} ({self.kind}) has a trainable parameter {name}, which is not a matrix or a bias of "
                    f"its experts ({', '.join((*_MATRICES, *_BIASES))}). Freeze it."
                )

    def counted(self) -> Iterator[tuple[Target, Stack]]:
        """Yield each trained parameter with the uses of its stack."""
        for name in (*self.shares, *(name for name in self.biases if name not in self.shares)):
            stack = self.stacks.setdefault(name, Stack())
            for target in (t for share in self.shares.get(name, []) for t in share.targets):
                yield target, stack
            if name in self.biases:
                yield self.biases[name], stack

    def remove(self) -> None:
        """Detach: the module is computed as before."""
        module = self._module()
        if module is not None and _ATTACHED.get(module) is self:
            del _ATTACHED[module]
            if self._before != NAME:
                self._config._experts_implementation = self._before

    def is_trained(self, name: str) -> bool:
        """Whether a stack, or its bias, takes part in this call with a trained parameter."""
        return (name in self.shares or name in self.biases) and self.host.call is not None

    def tap(self, name: str, module: Any, output_SP: Tensor, x: Tensor, route: Route, of_tokens: bool) -> Tensor:
        """Tap a product in which one of the parameters is trained.

        Args:
            name: of the stack.
            module: that holds it.
            output_SP: the product, biases included, slots sorted by expert.
            x: the factor of each slot in that order (S, D), or of each token (N, D).
            route: the experts of the tokens.
            of_tokens: whether ``x`` has tokens.
        """
        call, shares, bias = self.host.call, self.shares.get(name, []), self.biases.get(name)
        if call is not None and self.host.in_forward:
            self.stacks.setdefault(name, Stack()).uses += 1
        if call is None or not torch.is_grad_enabled():
            return output_SP
        num_experts, is_transposed = getattr(module, name).shape[0], bool(module.is_transposed)
        with torch.no_grad():
            kept = [share.factors(module) for share in shares]
        counts, shape = [len(factors) for factors in kept], output_SP.shape

        def receive(hand: Hand, grad: Tensor, saved: list[Tensor]) -> None:
            index_Nk, place_S, *more = saved
            slots = _Rows(hand, index_Nk, place_S)
            index_BS, grad_BSP = slots.index(), slots.of_slots(grad.view(shape))
            if bias is not None:
                hand.give(bias, Lookup(index_BS.clamp_min(0), grad_BSP, num_experts))
            if not shares:
                return
            x, *more = more
            x_BTD = slots.of_tokens(x) if of_tokens else slots.of_slots(x)
            left, right = (x_BTD, grad_BSP) if is_transposed else (grad_BSP, x_BTD)
            use = Routed(index_BS, left, right, num_experts, input_side="left" if is_transposed else "right")
            for share, count in zip(shares, counts, strict=True):
                share.record(use, [more.pop(0) for _ in range(count)], hand)

        saved = [x, *(t for factors in kept for t in factors)] if shares else []
        # In one dimension: the slots are sorted by expert, and must not be taken for the tokens of rows.
        flat = tap_output(call, output_SP.flatten(), receive, route.index_Nk, route.place_S, *saved)
        return flat.view(shape)


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, ExpertsRule] = weakref.WeakKeyDictionary()


def refuse_divided(path: str, module: nn.Module) -> None:
    """Raise `GhostError` for experts that are divided over processes."""
    if getattr(module, "_is_expert_parallel", False):
        raise GhostError(
            f"{path} ({type(module).__name__}) computes only the experts of this process (expert parallelism), and "
            "a unit's norm would be spread over processes. Load the model without it."
        )


def train_experts(path: str, module: nn.Module, trainable: Mapping[str, Target], host: Host) -> ExpertsRule:
    """Return the rule of a module whose own parameters, by their names in it, are trained."""
    rule = ExpertsRule.on(path, module, host)
    rule.train(trainable)
    return rule


def attach_partitioned(model: nn.Module, host: Host) -> list[ExpertsRule]:
    """Compute frozen experts that ZeRO-3 partitioned by our implementation too, in place of transformers' eager one.

    That one calls a module for each expert that has tokens, and DeepSpeed stops where the processes differ in the
    modules that they call.

    Args:
        model: the model.
        host: the clipper; nothing of these experts is recorded.
    """
    return [
        ExpertsRule.on(path, module, host)
        for path, module in model.named_modules()
        if is_experts(module)
        and getattr(module.config, "_experts_implementation", None) == "eager"
        and any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False))
    ]


@dataclass(frozen=True)
class Whole:
    """A stack of matrices that is trained itself."""

    target: Target

    @property
    def targets(self) -> list[Target]:
        """The stack."""
        return [self.target]

    def factors(self, module: nn.Module) -> list[Tensor]:
        """Return nothing: the gradient does not depend on the value."""
        del module
        return []

    def record(self, use: Routed, factors: list[Tensor], hand: Hand) -> None:
        """Hand over the use."""
        del factors
        hand.give(self.target, use)


@dataclass(frozen=True)
class _Rows:
    """Sorts slots back by token, and cuts them into the rows of the batch."""

    hand: Hand
    index_Nk: Tensor
    place_S: Tensor

    def index(self) -> Tensor:
        """Return the expert of each slot (B, T * k); -1 behind the end of a packed row."""
        return self._cut(self.index_Nk + 1) - 1

    def of_slots(self, x_SD: Tensor) -> Tensor:
        """Return (B, T * k, D) from values sorted by expert."""
        k = self.index_Nk.shape[1]
        return self._cut(x_SD[self.place_S].unflatten(0, (-1, k)).flatten(1), k)

    def of_tokens(self, x_ND: Tensor) -> Tensor:
        """Return (B, T, D) from the values of tokens."""
        return as_tokens(self.hand.view(x_ND))

    def _cut(self, x_NC: Tensor, k: int | None = None) -> Tensor:
        x_BTC = as_tokens(self.hand.view(x_NC))
        return x_BTC.flatten(1) if k is None else x_BTC.unflatten(2, (k, -1)).flatten(1, 2)


@dataclass(frozen=True)
class Route:
    """The experts of some tokens, and the slots sorted by expert.

    Attributes:
        index_Nk: the experts of each token.
        order_S: the slots in the order of their experts.
        place_S: the place of each slot in that order.
        counts_E: the slots of each expert.
    """

    index_Nk: Tensor
    order_S: Tensor
    place_S: Tensor
    counts_E: Tensor

    @classmethod
    def of(cls, index_Nk: Tensor, num_experts: int) -> Route:
        """Sort the slots."""
        expert_S = index_Nk.reshape(-1)
        order_S = torch.argsort(expert_S, stable=True)
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return cls(index_Nk, order_S, place_S, torch.bincount(expert_S, minlength=num_experts))


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of each token, weighted and added; an implementation for transformers' interface.

    Args:
        module: the experts; attributes as set by ``transformers.integrations.moe.use_experts_implementation``.
        hidden_states: (N, D).
        top_k_index: (N, k), the experts of each token.
        top_k_weights: (N, k).

    Returns:
        (N, D), in the dtype of ``hidden_states``.

    Raises:
        GhostError: an index that is no expert of this module, or weights of another shape.
    """
    rule = _ATTACHED.get(module)
    route = Route.of(top_k_index, module.num_experts)
    if len(route.counts_E) != module.num_experts or top_k_weights.shape != top_k_index.shape:
        raise NoRuleError(
            f"{type(module).__name__} is given experts {tuple(top_k_index.shape)} up to number "
            f"{len(route.counts_E) - 1} and weights {tuple(top_k_weights.shape)}; it has {module.num_experts} experts, "
            "and each choice needs one weight. Freeze the experts."
        )

    def product(name: str, x: Tensor, of_tokens: bool) -> Tensor:
        is_trained = rule is not None and rule.is_trained(name)
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        if is_trained:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        x = x.to(weight.dtype)
        x_SD = x[route.order_S // top_k_index.shape[1]] if of_tokens else x
        with torch.autocast(x.device.type, enabled=False):  # as transformers' grouped product: in the weight's dtype
            out_SP = grouped_product(x_SD, weight, route.counts_E, outputs_first=not module.is_transposed)
        if bias is not None:
            out_SP = out_SP + bias[route.index_Nk.reshape(-1)[route.order_S]]
        return rule.tap(name, module, out_SP, x, route, of_tokens) if rule is not None and is_trained else out_SP

    up_SP = product("gate_up_proj" if module.has_gate else "up_proj", hidden_states, of_tokens=True)
    inner_SP = module._apply_gate(up_SP) if module.has_gate else module.act_fn(up_SP)
    out_SD = product("down_proj", inner_SP, of_tokens=False)[route.place_S]
    if getattr(module, "has_post_expert_norm", False):
        out_SD = module.post_expert_norm(out_SD)
    weighted_SD = out_SD * top_k_weights.reshape(-1, 1)
    return weighted_SD.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)

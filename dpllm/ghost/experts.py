"""Trained experts of a mixture, and LoRA on them, through the interface of transformers.

transformers stores a layer's experts as stacks of matrices, and selects the function that computes them from a public
registry (``ALL_EXPERTS_FUNCTIONS``), by the name in the model's config. While a clipper is attached, that name is
`NAME`, and our function computes the same result. It taps both products, so each token's input, output gradient and
expert are known.

Choosing experts per token couples no rows. `dpllm.ghost.refusals` refuses other ways of choosing.

PEFT's ``ParamWrapper`` (``target_parameters``) adds scaling * B[e] A[e] to each expert's matrix while the experts run.
A and B are views of ``lora_A.weight`` and ``lora_B.weight``, which are never called as layers. If the matrix has the
gradient sum of g_s (x) x_s over slots, A has scaling * sum of (B^T g_s) (x) x_s, and B has scaling * sum of
g_s (x) (A x_s). So no gradient of a whole matrix is formed.

For y_s = W[e_s] x_s, where *slot* s is one choice of one token, row b's gradient of W[e] is the sum of g_s (x) x_s over
the row's slots with e_s = e (`Routed`). Different experts are different entries of the parameter, so a unit's squared
norm is the sum over experts of the norm of its slots there: a *segment* is one unit in one expert. The clipped sum is
one product for each expert, in which each slot has the factor of its row.

Shape suffixes: N tokens of all rows, k experts of each token, S slots (N * k, or of a row), E experts, D and P widths,
K rank, B rows, T tokens of each, U units, L and R the two dimensions of one expert's matrix, M segments, and N slots of
each there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.refusals import GhostError, NoRuleError
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.taps import Call, Hand, Host, Target, as_tokens, tap_output
from dpllm.ghost.unit_gradients import Lookup, Rows

NAME = "dpllm"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
_ALIGNED = 16  # bytes to which the rows of matrices must be aligned for PyTorch's grouped product
_STEPS = 4  # sizes in each doubling to which segments are padded
Layout = Literal["stacked", "flat", "interleaved"]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module computes its stacks of matrices through transformers' expert interface."""
    config: Any = getattr(module, "config", None)
    marks = ("num_experts", "has_gate", "has_bias", "is_transposed")
    return hasattr(config, "_experts_implementation") and all(hasattr(module, mark) for mark in marks)


def is_wrapper(module: nn.Module) -> bool:
    """Return whether a module is PEFT's wrapper of one parameter of another module."""
    return any(kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def refuse_divided(path: str, module: nn.Module) -> None:
    """Raise `GhostError` for experts that are divided over processes (expert parallelism)."""
    if getattr(module, "_is_expert_parallel", False):
        raise GhostError(
            f"{path} ({type(module).__name__}) computes only this process's experts (expert parallelism), so a unit's "
            "norm would be spread over processes. Load the model without expert parallelism."
        )


def train_experts(path: str, module: nn.Module, trainable: Mapping[str, Target], host: Host) -> ExpertsRule:
    """Tap a module whose listed parameters (by attribute name) are trained.

    Raises:
        NoRuleError: a parameter is neither a stack of matrices nor of biases.
    """
    for name in trainable:
        if name.removesuffix("_bias") not in _MATRICES:
            raise NoRuleError(f"{path}.{name} is neither a stack of matrices nor a stack of their biases. Freeze it.")
    rule = ExpertsRule.on(path, module, host)
    for name, target in trainable.items():
        matrix = name.removesuffix("_bias")
        stack = rule.stacks.setdefault(matrix, Stack())
        if name == matrix:
            stack.matrices = target
        else:
            stack.biases = target
    return rule


def train_adapters(path: str, wrapper: Any, trainable: Mapping[str, Target], host: Host) -> ExpertsRule:
    """Tap the experts whose parameter PEFT's wrapper adapts; ``trainable`` holds its factors by attribute name.

    Raises:
        NoRuleError: the wrapped parameter is not a stack of experts, or a trainable parameter is not a LoRA factor.
    """
    experts, stack_name = wrapper.get_base_layer(), wrapper.parameter_name
    if not is_experts(experts) or wrapper.num_experts < 2:
        raise NoRuleError(
            f"{path} is LoRA on {stack_name} of {type(experts).__name__}, which is not a stack of experts. Freeze it."
        )
    adapters = sorted({name.split(".")[1] for name in trainable})
    known = {f"{side}.{adapter}.weight" for side in ("lora_A", "lora_B") for adapter in adapters}
    if unknown := trainable.keys() - known:
        raise NoRuleError(
            f"{path} (ParamWrapper) has trainable parameters that are not LoRA factors: {sorted(unknown)}. Freeze them."
        )
    rule = ExpertsRule.on(path, experts, host)
    for adapter in adapters:
        down, up = (trainable.get(f"{side}.{adapter}.weight") for side in ("lora_A", "lora_B"))
        rule.stacks.setdefault(stack_name, Stack()).adapters.append(LoraFactors(wrapper, adapter, down, up))
    return rule


def attach_partitioned(model: nn.Module, host: Host) -> list[ExpertsRule]:
    """Also compute frozen experts that ZeRO-3 partitioned with our implementation, without recording them.

    transformers' eager implementation calls one module per expert that has tokens, and DeepSpeed hangs if the processes
    call different modules.
    """
    return [
        ExpertsRule.on(path, module, host)
        for path, module in model.named_modules()
        if is_experts(module)
        and getattr(module.config, "_experts_implementation", None) == "eager"
        and any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False))
    ]


class ExpertsRule:
    """The tapped stacks of one module, which our implementation computes while it is attached."""

    def __init__(self, path: str, module: nn.Module, host: Host) -> None:
        """Attach to a module, without trained parameters."""
        narrow = {name: p.dtype for name, p in module.named_parameters(recurse=False) if p.element_size() < 2}
        if narrow:
            raise NoRuleError(
                f"{path} ({type(module).__name__}) has quantised experts ({', '.join(map(str, narrow.values()))}), "
                "which do not compute plain matrix products. Train adapters of other layers, or load the model in "
                "bf16."
            )
        self.host = host
        self.stacks: dict[str, Stack] = {}
        config: Any = module.config
        self._config = config
        # Layers share a config: the first layer stores the implementation that the user chose.
        self._before = config._experts_implementation
        self._module = weakref.ref(module)
        _ATTACHED[module] = self
        # Code that defines such a module has loaded the registry; this folder does not import transformers.
        sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        config._experts_implementation = NAME

    @classmethod
    def on(cls, path: str, module: nn.Module, host: Host) -> ExpertsRule:
        """Return this clipper's rule for a module, attaching one if there is none."""
        rule = _ATTACHED.get(module)
        return rule if rule is not None and rule.host is host else cls(path, module, host)

    def remove(self) -> None:
        """Detach, and restore the module's implementation."""
        module = self._module()
        if module is not None and _ATTACHED.get(module) is self:
            del _ATTACHED[module]
            if self._before != NAME:
                self._config._experts_implementation = self._before


_ATTACHED: weakref.WeakKeyDictionary[nn.Module, ExpertsRule] = weakref.WeakKeyDictionary()


@dataclass
class Stack:
    """The trained parts of one stack of matrices."""

    matrices: Target | None = None
    biases: Target | None = None
    adapters: list[LoraFactors] = field(default_factory=list)

    def tap(self, module: Any, call: Call, output_SP: Tensor, x: Tensor, of_tokens: bool, route: Route) -> Tensor:
        """Tap a product with the stack, including biases, during a call of the model; slots are sorted by expert.

        ``x`` is the input of each slot (S, D), or of each token (N, D).
        """
        of_adapters = (target for adapter in self.adapters for target in (adapter.down, adapter.up))
        call.count(self.matrices, self.biases, *of_adapters)
        if not torch.is_grad_enabled():
            return output_SP
        with torch.no_grad():
            factors = [factor for adapter in self.adapters for factor in adapter.factors(module)]
        shape, num_experts, x_is_left = output_SP.shape, module.num_experts, bool(module.is_transposed)

        def receive(hand: Hand, grad: Tensor, saved: list[Tensor]) -> None:
            route, more = Route(*saved[:4]), saved[4:]
            index_BS, outputs = route.by_rows(hand), Factor(hand, route, grad.view(shape), of_tokens=False)
            if self.biases is not None:
                hand.give(self.biases, Lookup(index_BS.clamp_min(0), outputs.by_rows(), num_experts))
            if not more:
                return
            inputs = Factor(hand, route, more[0], of_tokens)
            if self.matrices is not None:
                left, right, side = (inputs, outputs, "left") if x_is_left else (outputs, inputs, "right")
                hand.give(self.matrices, left.outer(right, index_BS, num_experts, side))
            for adapter, up_EPK, down_EKD in zip(self.adapters, more[1::2], more[2::2], strict=True):
                adapter.record(index_BS, inputs, outputs, x_is_left, up_EPK, down_EKD)

        saved = [x, *factors] if self.matrices is not None or self.adapters else []
        # Flattened: the slots are sorted by expert, and must not be mistaken for the rows' tokens.
        return tap_output(call, output_SP.flatten(), receive, *route, *saved).view(shape)


class Route(NamedTuple):
    """The tokens' experts, the slots sorted by expert, each slot's rank there, and each expert's slot count."""

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

    def by_rows(self, hand: Hand) -> Tensor:
        """Return the expert of each slot (B, T * k); -1 beyond the end of a packed row."""
        return as_tokens(hand.view(self.index_Nk + 1)).flatten(1) - 1


class Factor(NamedTuple):
    """One factor of the slots' gradients, per slot sorted by expert (S, D), or per token (N, D)."""

    hand: Hand
    route: Route
    value: Tensor
    of_tokens: bool

    def by_rows(self) -> Tensor:
        """Return (B, T * k, D) with a token's k slots adjacent, or (B, T, D) for per-token values."""
        x, k = self.value, 1
        if not self.of_tokens:
            k = self.route.index_Nk.shape[1]
            x = x[self.route.place_S].unflatten(0, (-1, k)).flatten(1)
        return as_tokens(self.hand.view(x)).unflatten(2, (k, -1)).flatten(1, 2)

    def outer(self, right: Factor, index_BS: Tensor, num_experts: int, side: str, layout: Layout = "stacked") -> Routed:
        """Return the use of a parameter whose dimensions these two factors span; ``side`` is the input's side."""
        left_BTL, right_BTR = self.by_rows(), right.by_rows()
        if left_BTL.dtype != right_BTR.dtype:
            left_BTL, right_BTR = kernels.widen(left_BTL), kernels.widen(right_BTR)
        return Routed(index_BS, left_BTL, right_BTR, num_experts, layout, side)

    def times(self, matrices_EDK: Tensor, scaling: float) -> Factor:
        """Return each slot's factor times its expert's matrix and the scaling, in float32 or wider."""
        x_SD = self.value[self.route.order_S // self.route.index_Nk.shape[1]] if self.of_tokens else self.value
        x_SD = kernels.widen(x_SD)
        product_SK = grouped_product(x_SD, matrices_EDK.to(x_SD.dtype), self.route.counts_E)
        return self._replace(value=product_SK * scaling, of_tokens=False)


@dataclass
class LoraFactors:
    """The LoRA factors of one adapter, by its name in PEFT's wrapper, on one stack of matrices.

    Attributes:
        down: ``lora_A.weight``, (E * K, inputs), if trainable.
        up: ``lora_B.weight``, (outputs, K * E), if trainable.
        is_verified: whether the factors' product was compared with PEFT's.
    """

    wrapper: Any
    adapter: str
    down: Target | None
    up: Target | None
    is_verified: bool = False

    @property
    def up_is_left(self) -> bool:
        """Whether the matrices are (outputs, inputs), as PEFT reads them."""
        return bool(getattr(self.wrapper, "_did_swap_in_out_features", False))

    @property
    def scaling(self) -> float:
        """The number by which PEFT multiplies the factors' product."""
        return float(self.wrapper.scaling[self.adapter])

    def factors(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return copies of B (E, P, K) and A (E, K, D), since the parameters may be freed before the backward pass.

        Raises:
            GhostError: the adapter is not used in this call, or PEFT computes a different product of the factors.
        """
        name, num_experts = self.wrapper.parameter_name, self.wrapper.num_experts
        if name not in getattr(module, "parametrizations", {}) or self.adapter not in self.wrapper.active_adapters:
            raise GhostError(
                f"The LoRA factors {self.adapter!r} of {name} are trainable but not used: the adapter is disabled, "
                "merged or not active. Activate the adapter, or freeze its factors."
            )
        down_EKD = self.wrapper.lora_A[self.adapter].weight.detach().unflatten(0, (num_experts, -1))
        up_EPK = self.wrapper.lora_B[self.adapter].weight.detach().unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        if not self.is_verified and bool(down_EKD.any()) and bool(up_EPK.any()):  # a product of zeros shows no order
            self._verify(up_EPK, down_EKD)
        return up_EPK.clone(), down_EKD.clone()

    def _verify(self, up_EPK: Tensor, down_EKD: Tensor) -> None:
        delta, scaling = self.wrapper.get_delta_weight(self.adapter).detach().double(), self.scaling
        up, down = up_EPK.double(), down_EKD.double()
        ours = scaling * (up @ down if self.up_is_left else (up @ down).mT)
        scale = abs(scaling) * float((up.abs() @ down.abs()).max())
        eps = max(torch.finfo(t.dtype).eps for t in (self.wrapper.get_param(), up_EPK))
        if delta.shape != ours.shape or float((delta - ours).abs().max()) > 16 * eps * scale:
            raise NoRuleError(
                f"PEFT multiplies the LoRA factors of {self.wrapper.parameter_name} in a different order than its "
                "releases up to 0.21, so their per-unit gradients are unknown. Install one of those releases, or "
                "freeze the factors."
            )
        self.is_verified = True

    def record(
        self, index_BS: Tensor, inputs: Factor, outputs: Factor, x_is_left: bool, up_EPK: Tensor, down_EKD: Tensor
    ) -> None:
        """Record the uses of the two parameters.

        The inputs span the first dimension of the matrices if ``x_is_left``; B and A come from `factors`.
        """
        up, down, side = outputs, inputs, "right"
        if self.up_is_left == x_is_left:  # PEFT reads the matrices' inputs as their outputs
            up, down, side = inputs, outputs, "left"
        hand, experts = inputs.hand, self.wrapper.num_experts
        with kernels.exact_matmul(), torch.no_grad():
            if self.down is not None:
                up_SK = up.times(up_EPK, self.scaling)
                hand.give(self.down, up_SK.outer(down, index_BS, experts, side, "flat"))
            if self.up is not None:
                down_SK = down.times(down_EKD.mT, self.scaling)
                hand.give(self.up, up.outer(down_SK, index_BS, experts, side, "interleaved"))


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of each token, weighted and summed; an implementation for transformers' interface.

    Args:
        module: the experts; attributes as set by ``transformers.integrations.moe.use_experts_implementation``.
        hidden_states: (N, D).
        top_k_index: (N, k), the experts of each token.
        top_k_weights: (N, k).

    Returns:
        (N, D), in the dtype of ``hidden_states``.

    Raises:
        NoRuleError: an index does not name an expert of this module, or the weights have a different shape.
    """
    rule = _ATTACHED.get(module)
    call = None if rule is None else rule.host.call
    stacks = rule.stacks if rule is not None and call is not None else {}
    route = Route.of(top_k_index, module.num_experts)
    if len(route.counts_E) != module.num_experts or top_k_weights.shape != top_k_index.shape:
        raise NoRuleError(
            f"{type(module).__name__} received expert indices of shape {tuple(top_k_index.shape)}, up to "
            f"{len(route.counts_E) - 1}, and weights of shape {tuple(top_k_weights.shape)}. It has "
            f"{module.num_experts} experts, and each choice needs one weight. Freeze the experts."
        )

    def product(name: str, x: Tensor, of_tokens: bool) -> Tensor:
        stack, weight = stacks.get(name), getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        if stack is not None:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        x = x.to(weight.dtype)
        x_SD = x[route.order_S // top_k_index.shape[1]] if of_tokens else x
        out_SP = grouped_product(x_SD, weight, route.counts_E, outputs_first=not module.is_transposed)
        if bias is not None:
            out_SP = out_SP + bias[route.index_Nk.reshape(-1)[route.order_S]]
        return out_SP if stack is None or call is None else stack.tap(module, call, out_SP, x, of_tokens, route)

    up_SP = product("gate_up_proj" if module.has_gate else "up_proj", hidden_states, of_tokens=True)
    inner_SP = module._apply_gate(up_SP) if module.has_gate else module.act_fn(up_SP)
    out_SD = product("down_proj", inner_SP, of_tokens=False)[route.place_S]
    if getattr(module, "has_post_expert_norm", False):
        out_SD = module.post_expert_norm(out_SD)
    weighted_SD = out_SD * top_k_weights.reshape(-1, 1)
    return weighted_SD.unflatten(0, top_k_index.shape).sum(1).to(hidden_states.dtype)


def grouped_product(x_SD: Tensor, stack: Tensor, counts_E: Tensor, outputs_first: bool = False) -> Tensor:
    """Return (S, P): each token times its expert's matrix, y_s = x_s W[e_s].

    The tokens are sorted by expert, and ``counts_E`` (int64) holds each expert's number of tokens. The matrices are
    (E, D, P), or (E, P, D) with ``outputs_first``.
    """
    parts = counts_E.cumsum(0).int() if _has_kernel(x_SD, stack) else counts_E.tolist()
    if stack.requires_grad:
        return _product(x_SD, stack.mT if outputs_first else stack, parts)
    y: Tensor = _WithDetached.apply(x_SD, stack, outputs_first, parts)
    return y


class _WithDetached(torch.autograd.Function):
    """The product with a stack that is not in the graph.

    Only the stack is saved, not the tokens. The stack itself is saved, since a view would keep the whole stack of a
    layer that ZeRO-3 has released.
    """

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, stack: Tensor, outputs_first: bool, parts: Tensor | list[int]) -> Tensor:
        ctx.parts, ctx.outputs_first = parts, outputs_first
        ctx.save_for_backward(stack)
        return _product(x_SD, stack.mT if outputs_first else stack, parts)

    @staticmethod
    def backward(ctx: Any, grad_SP: Tensor) -> tuple[Tensor | None, ...]:
        (stack,) = ctx.saved_tensors
        return _product(grad_SP, stack if ctx.outputs_first else stack.mT, ctx.parts), None, None, None


def _has_kernel(x_SD: Tensor, stack: Tensor) -> bool:
    """Return whether PyTorch has a kernel for these matrices, forward and backward."""
    if not (x_SD.is_cuda and x_SD.dtype == torch.bfloat16 == stack.dtype):
        return False
    if any(width * x_SD.element_size() % _ALIGNED for width in stack.shape[1:]):
        return False
    return torch.cuda.get_device_capability(x_SD.device) >= (8, 0)


def _product(x_SD: Tensor, weight_EDP: Tensor, parts: Tensor | list[int]) -> Tensor:
    """Return (S, P); parts are the end offsets of each expert's tokens, for the kernel, or their counts."""
    with torch.autocast(x_SD.device.type, enabled=False):  # as transformers' grouped product: in the weight's dtype
        if isinstance(parts, Tensor):
            return F.grouped_mm(x_SD.contiguous(), weight_EDP, offs=parts)
        return torch.cat([x @ weight for x, weight in zip(x_SD.split(parts), weight_EDP, strict=True)])


# -------------------------------------------------- norms and sums


@dataclass(frozen=True)
class Routed:
    """Gradient of a stack of matrices: sum_s onehot(index_s) (x) left_s (x) right_s.

    Attributes:
        index_BS: the expert of each slot, the k slots of a token side by side; -1: none.
        left_BTL: factor along the first dimension of each matrix, per slot, or per token for its k slots.
        right_BTR: factor along the second dimension, likewise.
        num_experts: E.
        layout: of the parameter. "stacked": (E, L, R). "flat": (E * L, R) (PEFT's ``lora_A``). "interleaved":
            (L, R * E), with adjacent experts (PEFT's ``lora_B``).
        input_side: "left" or "right", whichever holds the input.
    """

    index_BS: Tensor
    left_BTL: Tensor
    right_BTR: Tensor
    num_experts: int
    layout: Layout = "stacked"
    input_side: str = "right"

    @property
    def grad(self) -> Tensor:
        """The output gradient of each slot."""
        return self.right_BTR if self.input_side == "left" else self.left_BTL

    def factor_bytes(self) -> int:
        """Return the bytes of the factors."""
        return self.left_BTL.nbytes + self.right_BTR.nbytes

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the units' gradients would take."""
        entries = rows.num_units * self.num_experts * self.left_BTL.shape[2] * self.right_BTR.shape[2]
        return entries * self._dtype.itemsize

    def instance(self, rows: Rows) -> Tensor:
        """Return the units' gradients (U, *parameter shape)."""
        width = self.left_BTL.shape[2], self.right_BTR.shape[2]
        total = torch.zeros(rows.num_units * self.num_experts, *width, dtype=self._dtype, device=self.right_BTR.device)
        for number_M, left_MNL, right_MNR in self._segments(rows):
            total[number_M] = kernels.wide_bmm(left_MNL.mT, right_MNR)
        total_UELR = total.unflatten(0, (rows.num_units, self.num_experts))
        if self.layout == "interleaved":
            return total_UELR.permute(0, 2, 3, 1).flatten(2)
        return total_UELR.flatten(1, 2) if self.layout == "flat" else total_UELR

    def norms(self, rows: Rows, norm_method: NormMethod) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_U, slack_U)``, as `dpllm.ghost.unit_gradients.squared_norms`."""
        both_U2 = torch.zeros(rows.num_units, 2, dtype=self._dtype, device=self.right_BTR.device)
        slack = kernels.rounding_slack(self._dtype)
        for number_M, left_MNL, right_MNR in self._segments(rows):
            sq_norm_M, mass_M = norm_method.outer_norms(right_MNR, [left_MNL])
            both_U2.index_add_(0, number_M // self.num_experts, torch.stack([sq_norm_M, slack * mass_M], 1))
        return both_U2[:, 0], both_U2[:, 1]

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``."""
        order, counts = _sorted(self.index_BS.flatten(), self.num_experts)
        blocks_ELR = total.filled()
        if self.layout == "interleaved":
            blocks_ELR = blocks_ELR.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        elif self.layout == "flat":
            blocks_ELR = blocks_ELR.unflatten(0, (self.num_experts, -1))
        for block_LR, slot_N in zip(blocks_ELR, order.split(counts.tolist()), strict=True):
            if len(slot_N):  # each slot is a row of one token
                left_N1L, right_N1R = (self._taken(x, slot_N)[:, None] for x in (self.left_BTL, self.right_BTR))
                of_slots = Weights(weights.factor[slot_N // self.index_BS.shape[1]])
                norm_method.add_weighted_outer_(Sum.onto(block_LR), left_N1L, right_N1R, of_slots)

    def fold(self) -> Routed:
        """Return the same use with all tokens in a single row."""
        return self._with(*(x.flatten(0, 1)[None] for x in (self.index_BS, self.left_BTL, self.right_BTR)))

    @staticmethod
    def cat(uses: Sequence[Routed]) -> Routed:
        """Concatenate uses of one parameter: a sum over all their slots."""
        whole = [use.per_slot() for use in uses]
        columns = zip(*((use.index_BS, use.left_BTL, use.right_BTR) for use in whole), strict=True)
        return whole[0]._with(*(torch.cat(column, 1) for column in columns))

    def per_slot(self) -> Routed:
        """Return the same use with both factors repeated for each slot."""
        slots = self.index_BS.shape[1]
        each = (x.repeat_interleave(slots // x.shape[1], dim=1) for x in (self.left_BTL, self.right_BTR))
        return self._with(self.index_BS, *each)

    def _with(self, index_BS: Tensor, left_BTL: Tensor, right_BTR: Tensor) -> Routed:
        return replace(self, index_BS=index_BS, left_BTL=left_BTL, right_BTR=right_BTR)

    @property
    def _dtype(self) -> torch.dtype:
        return kernels.accumulation_dtype(torch.promote_types(self.left_BTL.dtype, self.right_BTR.dtype))

    def _segments(self, rows: Rows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the units' segments, grouped by similar size; padding rows are in none.

        Yields each segment's unit * E + expert (M,), and the factors (M, N, L) and (M, N, R), zero-padded.
        """
        unit_B1 = rows.unit_B[:, None]
        number_BS = torch.where((unit_B1 >= 0) & (self.index_BS >= 0), unit_B1 * self.num_experts + self.index_BS, -1)
        order, counts = _sorted(number_BS.flatten(), rows.num_units * self.num_experts)
        starts = np.cumsum(counts) - counts
        (occurring,) = np.nonzero(counts)
        sizes = _rounded_up(counts[occurring])
        for size in np.unique(sizes):
            number_M = occurring[sizes == size]
            count_M1, place_1N = counts[number_M][:, None], np.arange(size)[None]
            place_MN = starts[number_M][:, None] + np.minimum(place_1N, count_M1 - 1)
            arrays = number_M, place_MN, place_1N < count_M1
            number, place, is_real = (torch.from_numpy(x).to(order.device) for x in arrays)
            left, right = (self._taken(x, order[place]) * is_real[:, :, None] for x in (self.left_BTL, self.right_BTR))
            yield number, left, right

    def _taken(self, x_BTD: Tensor, slot: Tensor) -> Tensor:
        """Return the factors of the given slots, counted over all rows."""
        return x_BTD.flatten(0, 1)[slot // (self.index_BS.shape[1] // x_BTD.shape[1])]


def _sorted(number: Tensor, num_numbers: int) -> tuple[Tensor, np.ndarray]:
    """Return the slots that have a number, sorted by it, and the count of each number; -1 excludes a slot."""
    order = torch.argsort(number, stable=True)
    counts = torch.bincount(number + 1, minlength=num_numbers + 1).cpu().numpy()
    return order[int(counts[0]) :], counts[1:]


def _rounded_up(counts: np.ndarray) -> np.ndarray:
    """Round up to a grid of `_STEPS` sizes in each doubling, so that few sizes occur.

    >>> _rounded_up(np.array([1, 7, 8, 9, 33, 64]))
    array([ 1,  7,  8, 10, 40, 64])
    """
    steps = np.maximum(1, 2 ** np.floor(np.log2(np.maximum(counts, 1))).astype(np.int64) // _STEPS)
    return -(-counts // steps) * steps

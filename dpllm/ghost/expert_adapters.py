"""LoRA on stacks of experts: PEFT's ``target_parameters``.

PEFT's ``ParamWrapper`` adds scaling * lhs[e] @ rhs[e] to the matrix of each expert while the experts run. lhs and rhs
are two views of ``lora_A.weight`` and ``lora_B.weight``, which are never called as layers. If the gradient of the
matrix is the sum of left_s (x) right_s over slots, that of lhs is scaling * sum of left_s (x) (rhs right_s), and that
of rhs is scaling * sum of (lhs^T left_s) (x) right_s. So no gradient of a whole matrix is formed.

Shape suffixes: B rows, T tokens, S slots of a row, E experts, L and R the dimensions of one expert's matrix, K rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.experts import ExpertsRule, is_experts
from dpllm.ghost.grouped import grouped_product
from dpllm.ghost.routed import Routed
from dpllm.ghost.taps import Hand, Host, Target


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of one parameter of another module."""
    return any(kind.__name__ == "ParamWrapper" and kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def train(path: str, wrapper: Any, trainable: Mapping[str, Target], host: Host) -> ExpertsRule:
    """Return the rule of the experts around whose parameter a wrapper lies, which then records its LoRA factors.

    Args:
        path: of the wrapper.
        wrapper: the wrapper.
        trainable: its trainable factors, by their names within it.
        host: the clipper.

    Raises:
        GhostError: the wrapped parameter is not a stack of experts, or a trainable parameter is no LoRA factor.
    """
    experts = wrapper.get_base_layer()
    name = wrapper.parameter_name
    if not is_experts(experts) or wrapper.num_experts < 2:
        raise NoRuleError(
            f"{path} is LoRA on the parameter {name} of {type(experts).__name__} (target_parameters), whose per-unit "
            "gradient is only known for experts that transformers computes through its interface. Adapt a linear "
            "layer instead (target_modules), or take this name out of target_parameters."
        )
    rule = ExpertsRule.on(path, experts, host)
    for adapter in {name.split(".")[1] for name in trainable}:
        of_adapter = {side: trainable.get(f"{side}.{adapter}.weight") for side in ("lora_A", "lora_B")}
        rule.shares.setdefault(name, []).append(
            LoraFactors(wrapper, adapter, of_adapter["lora_A"], of_adapter["lora_B"])
        )
    known = {f"{side}.{name.split('.')[1]}.weight" for name in trainable for side in ("lora_A", "lora_B")}
    if unknown := trainable.keys() - known:
        raise NoRuleError(f"{path} (ParamWrapper) has trainable parameters beside LoRA factors: {sorted(unknown)}.")
    return rule


@dataclass
class LoraFactors:
    """The LoRA factors of one adapter on one stack of matrices.

    Attributes:
        wrapper: PEFT's module.
        adapter: the adapter's name.
        down: ``lora_A.weight``, (E * K, inputs), where it is trainable.
        up: ``lora_B.weight``, (outputs, K * E), where it is trainable.
        is_verified: whether the product of the factors was compared with PEFT's.
    """

    wrapper: Any
    adapter: str
    down: Target | None
    up: Target | None
    is_verified: bool = False

    def factors(self, module: nn.Module) -> list[Tensor]:
        """Return copies of lhs (E, L, K) and rhs (E, K, R).

        Raises:
            GhostError: the adapter is not in use in this call, or PEFT computes another product of the factors.
        """
        name = self.wrapper.parameter_name
        if name not in getattr(module, "parametrizations", {}) or self.adapter not in self.wrapper.active_adapters:
            raise GhostError(
                f"The LoRA factors {self.adapter!r} of {name} are trainable and not in use (adapter switched off, "
                "merged, or not active). Switch the adapter on, or freeze its factors."
            )
        num_experts = self.wrapper.num_experts
        down = self.wrapper.lora_A[self.adapter].weight.detach()
        up = self.wrapper.lora_B[self.adapter].weight.detach()
        down_EKD = down.unflatten(0, (num_experts, -1))
        up_EPK = up.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        lhs, rhs = (up_EPK, down_EKD) if self._up_is_left else (down_EKD.mT, up_EPK.mT)
        if not self.is_verified and bool(lhs.any()) and bool(rhs.any()):  # a product of zeros shows no order
            self._verify(lhs, rhs)
        return [lhs.clone(), rhs.clone()]

    @property
    def _up_is_left(self) -> bool:
        """Whether the matrices are (outputs, inputs), as PEFT reads them."""
        return bool(getattr(self.wrapper, "_did_swap_in_out_features", False))

    def _verify(self, lhs_ELK: Tensor, rhs_EKR: Tensor) -> None:
        delta = self.wrapper.get_delta_weight(self.adapter).detach().double()
        ours = self.wrapper.scaling[self.adapter] * (lhs_ELK.double() @ rhs_EKR.double())
        scale = (lhs_ELK.double().abs() @ rhs_EKR.double().abs()).max() * abs(self.wrapper.scaling[self.adapter])
        eps = max(torch.finfo(t.dtype).eps for t in (self.wrapper.get_param(), lhs_ELK))
        if delta.shape != ours.shape or float((delta - ours).abs().max()) > 16 * eps * float(scale):
            raise NoRuleError(
                f"PEFT multiplies the LoRA factors of {self.wrapper.parameter_name} in another order than its releases "
                "up to 0.21 do, so their per-unit gradients are not known. Install one of them, or freeze the factors."
            )
        self.is_verified = True

    @property
    def targets(self) -> list[Target]:
        """The trained factors."""
        return [target for target in (self.down, self.up) if target is not None]

    def record(self, use: Routed, factors: list[Tensor], hand: Hand) -> None:
        """Hand over the uses of the two factors, from the gradient of the stack."""
        lhs_ELK, rhs_EKR = factors
        scaling = self.wrapper.scaling[self.adapter]
        down, up = ("right", "left") if self._up_is_left else ("left", "right")
        with kernels.exact_matmul(), torch.no_grad():
            for target, side in ((self.down, down), (self.up, up)):
                if target is None:
                    continue
                if side == "right":  # of rhs: (lhs^T left) (x) right
                    low_BSK = _times(use, use.left_BTL, lhs_ELK) * scaling
                    outer = (low_BSK, use.right_BTR)
                else:  # of lhs: left (x) (rhs right)
                    low_BSK = _times(use, use.right_BTR, rhs_EKR.mT) * scaling
                    outer = (use.left_BTL, low_BSK)
                hand.give(target, _factor_use(use, outer, side, target is self.up))


def _factor_use(use: Routed, outer: tuple[Tensor, Tensor], side: str, is_up: bool) -> Routed:
    """Return the use of one factor in the layout of its parameter: (K, inputs) for A, (outputs, K) for B."""
    # A holds its rank first, as rhs does; lhs holds it last. B is the reverse.
    flip = (side == "left") != is_up
    left, right = (kernels.widen(x) for x in (outer[::-1] if flip else outer))
    input_side = use.input_side if not flip else {"left": "right", "right": "left"}[use.input_side]
    return Routed(use.index_BS, left, right, use.num_experts, "interleaved" if is_up else "flat", input_side)


def _times(use: Routed, x_BTD: Tensor, matrix_EDK: Tensor) -> Tensor:
    """Return (B, S, K): each slot's factor times the matrix of its expert, in float32 or wider."""
    index_S = use.index_BS.flatten()
    number_S = torch.where(index_S >= 0, index_S, use.num_experts)
    order_S = torch.argsort(number_S, stable=True)
    counts_E = torch.bincount(number_S, minlength=use.num_experts + 1)[: use.num_experts]
    x_SD = kernels.widen(use.taken(x_BTD, order_S))
    low_SK = grouped_product(x_SD, matrix_EDK.to(x_SD.dtype), counts_E)
    sorted_back = torch.empty_like(low_SK)
    sorted_back[order_S] = low_SK
    return sorted_back.unflatten(0, use.index_BS.shape)
